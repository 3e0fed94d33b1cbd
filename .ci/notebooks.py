"""Run notebooks as nbdev_test does, each in a process of its own; with `--keep`, keep their outputs.

    python .ci/notebooks.py                                 # test all
    python .ci/notebooks.py --without reliability           # what `make test` runs
    python .ci/notebooks.py --changed                       # what depends on your changes
    python .ci/notebooks.py nbs/bucketing/plan.ipynb::3f2a  # one, as far as a cell
    python .ci/notebooks.py --alone nbs/trainer/index.ipynb # as who installed the package
    python .ci/notebooks.py --keep [--flags slow] [--force] nbs/stories/a_story.ipynb

A test fails at the first exception, and at the end where a cell's output differs from the
stored one (`outputs.py` has the rule). A cell that begins with `#| varies` prints what
differs from run to run, such as seconds; in a notebook with `varies: true` in its front
matter all cells do. `--any-output` compares nothing, for other releases of the libraries.

A server imports the heavy libraries once; every notebook runs in a fork of it. Notebooks
whose front matter says `skip_exec: true` run only with `--force`, cells with a flag of
`tst_flags` in settings.ini only where `--flags` names it.
"""
import argparse
import gc
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import asserts
from imports import changed_pages, root
from outputs import difference

SHARED = [ # imported once
    "torch", "transformers", "transformers.trainer", "datasets", "evaluate", "accelerate",
    "transformers.models.auto.modeling_auto", "pandas", "scipy.stats", "matplotlib.pyplot",
    "sklearn.linear_model", "nbdev.process", "execnb.shell", "fastcore.all"]
LIBRARIES = ["torch", "transformers", "accelerate", "datasets", "peft"]
# what only developers install
TOOLS = {"nbdev", "fastcore", "execnb", "nbformat", "optuna", "hypothesis", "distributed"}
SKIPPED = 3 # status of a notebook that is not meant to be run


def run(fname, until, flags, args, log, temp):
    "Run one notebook in this process, as far as the cell whose id begins with `until`."
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(sink, stream)
    gc.freeze() # transformers collects garbage after each run: what was imported is none
    # a job in the background of a shell ignores it, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # as scripts have it; a forkserver would import all again for a DataLoader's workers
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(IN_TEST="1", TMPDIR=temp)
    tempfile.tempdir = temp
    # a page may import a file beside it, as in Jupyter
    sys.path[:0] = [str(root), str(fname.parent)]
    os.chdir(fname.parent)
    sys.exit(executed(fname, until, flags, args))


def executed(fname, until, flags, args):
    "The exit status of a notebook."
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor
    processed = NBProcessor(fname, procs=FrontmatterProc, process=True).nb
    front = getattr(processed, "frontmatter_", {})
    is_true = {key for key, value in front.items() if str(value).lower() == "true"}
    if "skip_exec" in is_true and not args.force:
        return SKIPPED
    directives = {c.id: c.directives_ or {} for c in processed.cells if c.cell_type == "code"}
    shell, nb = CaptureShell(fname), read_nb(fname)
    if until:
        del nb.cells[last_cell(nb.cells, until) + 1:]
    shell.ast_transformers.append(asserts.BothSides())

    def passed_over(cell):
        marks = directives.get(cell.get("id"), {})
        return cell.cell_type != "code" or marks.get("eval:") == ["false"] or flags & marks.keys()

    cells = [cell for cell in nb.cells if not passed_over(cell)]
    stored = {c.id: c.get("outputs", []) for c in cells if "varies" not in directives[c.id]}
    for cell in cells:
        cell.outputs = []
    if args.alone:
        os.chdir(tempfile.mkdtemp()) # no file of the repository is near
        sys.modules.update({name: None for name in sys.modules if name.split(".")[0] in TOOLS})
    try:
        shell.run_all(nb, exc_stop=True, preproc=passed_over)
    except BaseException:
        failed = [cell for cell in cells if is_error(cell)] or cells
        print(shell.prettytb(fname=fname))
        print(f"at {place(fname, nb.cells, failed[0])}: {shell.exc!r}"[:600])
        return 1
    for cell in cells:
        tidied = map(tidy, cell.get("outputs", []))
        cell.outputs = [output for output in tidied if says_something(output)]
    if args.keep:
        if "skip_exec" in is_true:
            nb.metadata["measured"] = measured() # the site shows it under the title
        return write_nb(nb, fname)
    if args.any_output or args.alone or "varies" in is_true:
        return 0
    differ = {c.id: difference(stored[c.id], c.outputs) for c in cells if c.id in stored}
    for cell in cells:
        if differ.get(cell.id):
            print(f"at {place(fname, nb.cells, cell)}: {differ[cell.id]}")
    if not any(differ.values()):
        return 0
    print(f"only outputs differ; to keep these: make run NB={fname.relative_to(root)}")
    return 1


def is_error(cell):
    return any(output.get("output_type") == "error" for output in cell.get("outputs", []))


def place(fname, cells, cell):
    "A cell for a reader: its id, which `make test NB=` takes, and the heading above it."
    above = "\n".join(c.source for c in cells[:cells.index(cell)] if c.cell_type == "markdown")
    headings = re.findall(r"^#+ (.*)", above, re.M)
    return f"{fname.relative_to(root)}::{cell.id} ({headings[-1] if headings else ''})"


def measured():
    "When, on what and with what a notebook was run."
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root,
                            capture_output=True, text=True).stdout.strip()
    return dict(
        date=f"{date.today()}", commit=commit, cores=os.cpu_count(),
        machine=names[0] if names else platform.processor() or platform.machine(),
        threads=os.environ.get("OMP_NUM_THREADS", "all"), python=platform.python_version(),
        **installed())


def installed():
    return {name: version(name) for name in LIBRARIES if find_spec(name)}


def last_cell(cells, until):
    "Index of the cell whose id begins with `until`."
    found = [i for i, cell in enumerate(cells) if cell.get("id", "").startswith(until)]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} cells have an id that begins with {until}")
    return found[0]


def tidy(output):
    "Drop what differs from run to run: addresses, folders of this machine, progress bars."
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", json.dumps(output))
    text = text.replace(f"{root}/", "").replace(f"{tempfile.gettempdir()}/", "")
    output = json.loads(text)
    if output.get("output_type") == "stream":
        output["text"] = [line for line in output["text"]
                          if not re.search(r"\r|\d+%\||it/s", line)]
    return output


def says_something(output):
    return output.get("output_type") != "stream" or "".join(output["text"]).strip()


class Job:
    "One notebook under way."
    def __init__(self, context, name, flags, args):
        path, _, until = str(name).partition("::")
        self.fname, self.start, self.temp = Path(path).resolve(), time.time(), tempfile.mkdtemp()
        self.log = Path(self.temp + ".log")
        self.process = context.Process(
            target=run, args=(self.fname, until, flags, args, self.log, self.temp))
        self.process.start()

    def has_ended(self, limit):
        "Whether it is over; a notebook over its time limit is ended."
        if self.process.exitcode is None and time.time() - self.start > limit:
            self.process.kill()
            self.process.join()
            with self.log.open("a") as file:
                file.write(f"\nkilled after {limit} s")
        return self.process.exitcode is not None

    def report(self):
        "One line, and the notebook's output where it failed; (outcome, its last line)."
        outcome = {0: "passed", SKIPPED: "skipped"}.get(self.process.exitcode, "failed")
        seconds = time.time() - self.start
        print(f"{outcome:8}{self.fname.relative_to(root)} ({seconds:.0f} s)", flush=True)
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        if outcome == "failed":
            print(said[-6000:], flush=True)
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.temp, ignore_errors=True)
        lines = [line for line in said.splitlines() if line.startswith("at ")]
        return outcome, lines[-1][3:] if lines else f"{self.fname.relative_to(root)}: {said[-200:]}"


def paragraph(faults):
    "What to write into an issue."
    names = ", ".join(f"{name} {number}" for name, number in installed().items())
    return (f"With Python {platform.python_version()}, {names}, {len(faults)} pages fail. "
            + " ".join(f"{fault}." for fault in faults))


def order(name):
    "Pages with processes of their own and long trainings first: two workers end together."
    fname = Path(str(name).partition("::")[0]).resolve()
    return "reliability" not in fname.parts, -fname.stat().st_size


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("notebooks", nargs="*", type=Path, help="default: all under nbs")
    add("--without", default="", help="leave out the notebooks in this folder of nbs")
    add("--changed", action="store_true", help="those that import what changed since main")
    add("--keep", action="store_true", help="write the outputs into the notebooks")
    add("--flags", default="", help="flags whose cells run although settings.ini skips them")
    add("--force", action="store_true", help="run notebooks that say skip_exec too")
    add("--workers", type=int, default=int(os.environ.get("WORKERS", 2)))
    add("--limit", type=float, default=900, help="seconds that one notebook may take")
    add("--alone", action="store_true", help="in an empty folder, without development tools")
    add("--any-output", action="store_true", help="compare no outputs")
    args = parser.parse_args()
    from nbdev.config import get_config
    flags = set(get_config().tst_flags.split()) - set(args.flags.split())
    every = [p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    chosen = changed_pages() if args.changed else args.notebooks or every
    waiting = sorted({p for p in chosen if args.without not in p.parts}, key=order)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SHARED)
    running, reports = [], []
    while waiting or running:
        while waiting and len(running) < args.workers:
            running.append(Job(context, waiting.pop(0), flags, args))
        for job in [job for job in running if job.has_ended(args.limit)]:
            running.remove(job)
            reports.append(job.report())
        time.sleep(0.1)
    faults = [fault for outcome, fault in reports if outcome == "failed"]
    if faults:
        print(paragraph(faults))
    outcomes = [outcome for outcome, _ in reports]
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped")))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
