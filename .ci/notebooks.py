"""Run notebooks as nbdev_test does, each in a process of its own; with `--keep`, keep their outputs.

    python .ci/notebooks.py                                 # test all
    python .ci/notebooks.py --changed $(git diff --name-only main) # what uses these files
    python .ci/notebooks.py nbs/bucketing/batch_sampler.ipynb::3f2a  # one, as far as a cell
    python .ci/notebooks.py --keep --slow nbs/tutorials/a_story.ipynb

A test fails at the first exception, and at the end where a cell's output differs from the
stored one (`outputs.py` has the rule). A cell that begins with `#| varies` prints what
differs from run to run, such as seconds. `--any-output` compares nothing, for other
releases of the libraries.

The heavy libraries are imported once; every notebook runs in a fork. Cells marked `#| slow`,
and notebooks whose front matter says `skip_exec: true`, run only with `--slow`.
"""
import argparse
import gc
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from asserts import BothSides
from execnb.nbio import read_nb, write_nb
from imports import changed_pages, pages, root
from outputs import difference

SHARED = [ # imported once
    "transformers.trainer", "transformers.models.auto.modeling_auto", "datasets", "evaluate",
    "scipy.stats", "matplotlib.pyplot", "sklearn.linear_model", "execnb.shell", "fastcore.all"]
LIBRARIES = ["torch", "transformers", "accelerate", "datasets", "peft"]
SKIPPED = 3 # status of a notebook that is not meant to be run


def run(name, folder, args):
    "The exit status of a notebook that this process runs, for `a/page.ipynb::id` as far as a cell."
    path, _, until = name.partition("::")
    fname = Path(path).resolve()
    sink = os.open(f"{folder}/said.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(sink, stream)
    signal.alarm(args.limit) # which ends this process
    # a job in the background of a shell ignores it, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(IN_TEST="1", TMPDIR=folder)
    tempfile.tempdir = folder
    # a page may import a file beside it, as in Jupyter
    sys.path[:0] = [str(root), str(fname.parent)]
    os.chdir(fname.parent)
    status = executed(fname, until, args)
    sys.stdout.flush()
    return status


def executed(fname, until, args):
    "The exit status of a notebook."
    from execnb.shell import CaptureShell
    shell, nb = CaptureShell(fname), read_nb(fname)
    shell.ast_transformers.append(BothSides())
    if "skip_exec: true" in nb.cells[0].source and not args.slow:
        return SKIPPED
    left_out = {"eval: false"} if args.slow else {"eval: false", "slow"}
    found = [cell.idx_ for cell in nb.cells if cell.id.startswith(until)]
    if not found:
        raise SystemExit(f"at {until}: no cell has an id that begins so")

    def passed_over(cell):
        return cell.cell_type != "code" or cell.idx_ > found[-1] or left_out & marks(cell)

    def begin(cell):
        seconds[cell.id] = -time.time()
        return passed_over(cell)

    def end(cell):
        seconds[cell.id] += time.time()

    cells, seconds = [cell for cell in nb.cells if not passed_over(cell)], {}
    stored = [cell.outputs for cell in cells]
    for cell in cells:
        cell.outputs = []
    try:
        shell.run_all(nb, exc_stop=True, preproc=begin, postproc=end)
    except BaseException:
        failed = nb.cells[shell._cell_idx - 1]
        print(shell.prettytb(fname=fname))
        print(f"at {place(fname, nb.cells, failed)}: {shell.exc!r}"[:600])
        return 1
    changed = []
    for cell, before in zip(cells, stored):
        cell.outputs = list(filter(None, map(tidy, cell.outputs)))
        words = difference(before, cell.outputs)
        if words and "varies" not in marks(cell):
            changed.append(f"at {place(fname, nb.cells, cell)}: {words}")
    if args.keep:
        sign(nb, cells, seconds, is_partial=bool(until))
        write_nb(nb, fname)
    if args.keep or args.any_output or not changed:
        return 0
    print(*changed, sep="\n")
    print(f"only outputs differ; to keep these: make run NB={fname.relative_to(root)}")
    return 1


def sign(nb, cells, seconds, is_partial):
    "Write down what made the outputs that CI does not repeat: of slow cells, and of a page."
    for cell in cells:
        if "slow" in marks(cell) and cell.outputs:
            cell.metadata["measured"] = made(seconds[cell.id])
    for cell in nb.cells:
        if cell.id == "measured" and not is_partial:
            total = sum(seconds[each.id] for each in cells)
            cell.source = f"::: {{.measured}}\nOutputs of {made(total)}.\n:::"


def marks(cell):
    "The directives of a cell."
    return set(re.findall(r"^#\| *(.*\S)", cell.source, re.M))


def place(fname, cells, cell):
    "A cell for a reader: its id, which `make test NB=` takes, and the heading above it."
    above = "\n".join(c.source for c in cells[:cell.idx_] if c.cell_type == "markdown")
    headings = re.findall(r"^#+ (.*)", above, re.M)
    return f"{fname.relative_to(root)}::{cell.id} ({''.join(headings[-1:])})"


def tidy(output):
    "An output without what differs from run to run: addresses, this machine's folders, progress."
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", json.dumps(output))
    output = json.loads(text.replace(f"{root}/", "").replace(f"{tempfile.gettempdir()}/", ""))
    if output["output_type"] != "stream":
        return output
    output["text"] = [line for line in output["text"] if not re.search(r"\r|\d+%\||/s\]", line)]
    return output if "".join(output["text"]).strip() else None


def made(seconds):
    "When, at which commit, in how many seconds and on what outputs were made; `evidence.py` reads it."
    processor = subprocess.getoutput("lscpu 2>/dev/null | sed -n 's/^Model name: *//p'")
    git = ["git", "-C", str(root)] # a page may have changed the folder
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    code = ["--", root / "prompt_packing", *(root / "nbs").glob("*/*.py")]
    changes = subprocess.check_output([*git, "status", "--porcelain", *code])
    return (f"{time.strftime('%Y-%m-%d')}, commit {commit}"
            f"{' with uncommitted changes' if changes else ''}, {seconds:.0f} s, "
            f"{processor or platform.machine()}, {os.cpu_count()} cores, "
            f"threads {os.environ.get('OMP_NUM_THREADS', 'all')}, {installed()}")


def installed():
    numbers = {"Python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def report(name, folder, start, status):
    "Print how a notebook ended, and its output where it failed; (outcome, what broke)."
    said = Path(folder, "said.log").read_text(errors="replace")
    if status == -signal.SIGALRM:
        said += f"\nat {name}: not done after {time.time() - start:.0f} s"
    outcome = {0: "passed", SKIPPED: "skipped"}.get(status, "failed")
    shown = f"\n{said[-6000:]}" if outcome == "failed" else ""
    print(f"{outcome:8}{name} ({time.time() - start:.0f} s){shown}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    places = re.findall(r"^at (.*)", said, re.M)
    return outcome, places[-1] if places else f"{name}: status {status} {said[-200:]}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("notebooks", nargs="*", help="default: all under nbs")
    add("--changed", action="store_true", help="the pages that use these files")
    add("--keep", action="store_true", help="write the outputs into the notebooks")
    add("--slow", action="store_true", help="run slow cells, and notebooks that are run by hand")
    add("--workers", type=int, default=int(os.environ.get("WORKERS", 2)))
    add("--limit", type=int, default=900, help="seconds that one notebook may take")
    add("--any-output", action="store_true", help="compare no outputs")
    args = parser.parse_args()
    chosen = changed_pages(args.notebooks) if args.changed else args.notebooks or pages()
    # large ones last, which are taken first: two workers end together
    names = sorted(map(os.path.relpath, chosen), key=lambda n: os.path.getsize(n.split("::")[0]))
    os.environ.setdefault("MATPLOTLIBRC", str(root / "nbs" / "matplotlibrc")) # our style
    for name in SHARED:
        import_module(name)
    gc.freeze() # transformers collects garbage after each run: what was imported is none
    running, reports = {}, []
    while names or running:
        if names and len(running) < args.workers:
            job = names.pop(), tempfile.mkdtemp()
            pid = os.fork()
            if not pid:
                os._exit(run(*job, args))
            running[pid] = *job, time.time()
        else:
            pid, status = os.wait()
            reports.append(report(*running.pop(pid), os.waitstatus_to_exitcode(status)))
    faults = [fault for outcome, fault in reports if outcome == "failed"]
    if faults: # a paragraph for an issue
        print(f"With {installed()}, {len(faults)} pages fail.", *(f"{fault}." for fault in faults))
    outcomes = [outcome for outcome, _ in reports]
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped")))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
