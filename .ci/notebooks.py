"""Run notebooks as nbdev_test does, each in a process of its own; with `--keep`, keep their outputs.

    python .ci/notebooks.py                                  # test all
    python .ci/notebooks.py --without reliability            # chapters and modules: what `make test` runs
    python .ci/notebooks.py nbs/bucketing/plan.ipynb         # test one
    python .ci/notebooks.py nbs/bucketing/plan.ipynb::3f2a  # test one as far as the cell of this id (its beginning is enough)
    python .ci/notebooks.py --keep [--flags slow] [--force] nbs/stories/a_story.ipynb

A test fails at the first exception, and at the end where a cell's output differs from the stored one: words must be
alike, numbers within 2% (`outputs.py` has the rule). A cell that begins with `#| varies` prints what differs from
run to run or from machine to machine, such as seconds; a notebook with `varies: true` in its front matter prints
little else. `--any-output` compares nothing, for other releases of the libraries.

A server imports the heavy libraries once; every notebook runs in a fork of it. Notebooks whose front matter says
`skip_exec: true` run only with `--force`, cells with a flag of `tst_flags` in settings.ini only when `--flags` names it.
"""
import argparse
import base64
import gc
import io
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

from outputs import difference
from PIL import Image

root = Path(__file__).resolve().parent.parent
SHARED = ["torch", "transformers", "transformers.trainer", "transformers.models.auto.modeling_auto", "datasets", "evaluate", "accelerate", "pandas", "scipy.stats",
          "matplotlib.pyplot", "sklearn.linear_model", "nbdev.process", "execnb.shell", "fastcore.all"]


def run(fname, until, skip_flags, force, keep, compare, log, temp):
    """Run one notebook in this process, as far as the cell whose id begins with `until`.

    Exits with 1 at the first exception or where outputs differ, with 3 where its front matter skips it."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2): os.dup2(sink, stream)
    gc.freeze()  # what the server imported need not be searched at each of transformers' gc.collect()
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it, and so would its children
    multiprocessing.set_start_method("fork", force=True)  # as scripts have it; a forkserver would import all again for a DataLoader's workers
    os.environ.update(IN_TEST="1", TMPDIR=temp)
    tempfile.tempdir = temp
    sys.path[:0] = [str(root), str(fname.parent)]  # a page may import a file beside it, as in Jupyter
    os.chdir(fname.parent)
    processed = NBProcessor(fname, procs=FrontmatterProc, process=True).nb
    front = {key: str(value).lower() == "true" for key, value in getattr(processed, "frontmatter_", {}).items()}
    skip = front.get("skip_exec", False)
    if skip and not force: sys.exit(3)
    directives = {c.id: getattr(c, "directives_", None) or {} for c in processed.cells if c.cell_type == "code"}

    def passed_over(cell):
        found = directives.get(cell.get("id"), {})
        return cell.cell_type != "code" or found.get("eval:", [""])[0].lower() == "false" or bool(skip_flags & found.keys())

    shell, nb = CaptureShell(fname), read_nb(fname)
    if until: del nb.cells[last_cell(nb.cells, until) + 1:]
    ran = [c for c in nb.cells if not passed_over(c)]
    stored = {c.id: c.get("outputs", []) for c in ran if "varies" not in directives[c.id]}
    for cell in ran: cell.outputs = []
    try: shell.run_all(nb, exc_stop=True, preproc=passed_over)
    except BaseException:
        print(shell.prettytb(fname=fname))
        sys.exit(1)
    for cell in ran: cell.outputs = [o for o in map(tidy, cell.get("outputs", [])) if o.get("output_type") != "stream" or "".join(o["text"]).strip()]
    if keep:
        if skip: nb.metadata["measured"] = measured()  # the site shows it under the title
        return write_nb(nb, fname)
    if not compare or front.get("varies"): return
    differ = [(cell, words) for cell in ran if cell.id in stored and (words := difference(stored[cell.id], cell.outputs))]
    for cell, words in differ: print(f"cell {fname.relative_to(root)}::{cell.id} {words}")
    sys.exit(bool(differ))


def measured():
    "When, on what and with what a notebook was run."
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")] if Path("/proc/cpuinfo").exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    versions = {name: version(name) for name in ("torch", "transformers", "datasets", "peft") if find_spec(name)}
    return {"date": f"{date.today()}", "commit": commit, "machine": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "all"), "python": platform.python_version(), **versions}


def last_cell(cells, until):
    "Index of the cell whose id begins with `until`."
    found = [i for i, cell in enumerate(cells) if cell.get("id", "").startswith(until)]
    if len(found) != 1: raise SystemExit(f"{len(found)} cells have an id that begins with {until}")
    return found[0]


def tidy(output):
    "Drop what differs from run to run and says nothing: memory addresses, folders of this machine, progress bars, carriage returns."
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", json.dumps(output))
    output = json.loads(text.replace(f"{root}/", "").replace(f"{tempfile.gettempdir()}/", ""))
    if output.get("output_type") == "stream":
        output["text"] = [line for line in output["text"] if "\r" not in line and not re.search(r"\d+%\||it/s", line)]
    if "image/png" in (data := output.get("data", {})): data["image/png"] = few_colors("".join(data["image/png"]))
    return output


def few_colors(png):
    "A picture on white in 256 colours, which a plot does not miss: a third of its bytes. One that has a palette stays as it is."
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    if image.mode == "P": return png
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    small = io.BytesIO()
    white.convert("RGB").quantize(256).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


class Job:
    "One notebook under way."
    def __init__(self, context, place, *settings):
        name, _, until = str(place).partition("::")
        fname = Path(name).resolve()
        self.fname, self.start, self.log = fname, time.time(), root / f".ci.{os.getpid()}.{'.'.join(fname.relative_to(root).parts)}.log"
        self.temp = tempfile.mkdtemp()  # what a notebook leaves there is gone with it
        self.process = context.Process(target=run, args=(fname, until, *settings, self.log, self.temp))
        self.process.start()

    def ended(self, limit):
        "Whether it is over; a notebook over its time limit is ended."
        if self.process.exitcode is None and time.time() - self.start > limit:
            self.process.kill()
            self.process.join()
            with self.log.open("a") as file: file.write(f"\nkilled after {limit} s")
        return self.process.exitcode is not None

    def report(self):
        "One line, and the notebook's output where it failed; returns passed, failed or skipped."
        outcome = {0: "passed", 3: "skipped"}.get(self.process.exitcode, "failed")
        print(f"{outcome:8}{self.fname.relative_to(root)} ({time.time() - self.start:.0f} s)", flush=True)
        if outcome == "failed": print(self.log.read_text(errors="replace")[-6000:], flush=True)
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.temp, ignore_errors=True)
        return outcome


def order(place):
    "Notebooks with processes of their own and long trainings first, so that two workers end together."
    fname = Path(str(place).partition("::")[0]).resolve()
    return "reliability" not in fname.parts, -fname.stat().st_size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all under nbs")
    parser.add_argument("--without", default="", help="leave out the notebooks in this folder of nbs")
    parser.add_argument("--keep", action="store_true", help="write the outputs into the notebooks")
    parser.add_argument("--flags", default="", help="flags whose cells run although settings.ini skips them")
    parser.add_argument("--force", action="store_true", help="run notebooks that say skip_exec too")
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORKERS", 2)))
    parser.add_argument("--limit", type=float, default=900, help="seconds that one notebook may take")
    parser.add_argument("--any-output", action="store_true", help="compare no outputs")
    args = parser.parse_args()
    settings = args.force, args.keep, not args.any_output
    from nbdev.config import get_config
    skip_flags = set(get_config().tst_flags.split()) - set(args.flags.split())
    found = args.notebooks or [p for p in (root / "nbs").rglob("*.ipynb") if not any(part.startswith(".") for part in p.parts)]
    if args.without: found = [p for p in found if args.without not in p.parts]
    waiting, running, outcomes = sorted(set(found), key=order), [], []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SHARED)
    while waiting or running:
        while waiting and len(running) < args.workers: running.append(Job(context, waiting.pop(0), skip_flags, *settings))
        for job in [j for j in running if j.ended(args.limit)]:
            running.remove(job)
            outcomes.append(job.report())
        time.sleep(0.1)
    passed, failed = outcomes.count("passed"), outcomes.count("failed")
    print(f"{passed} passed, {failed} failed, {outcomes.count('skipped')} skipped")
    sys.exit(bool(failed))


if __name__ == "__main__": main()
