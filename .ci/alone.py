"""Run chapters and short stories as a user does: the wheel, its requirements and IPython, an empty folder, no repository.

    python .ci/alone.py                                      # chapters, the front page, stories of at most a minute
    python .ci/alone.py nbs/guides/coming_from.ipynb         # one

The environment is a new one whose packages are links to those that the requirements of the wheel name, directly or not:
what only developers install (nbdev, fastcore, optuna ...) cannot be imported in it.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

root = Path(__file__).resolve().parent.parent
LONGEST_STORY = 1  # minutes, as the story says in its first cells

RUNNER = '''
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
import prompt_packing
assert "site-packages" in prompt_packing.__file__, prompt_packing.__file__
from IPython.core.interactiveshell import InteractiveShell
import matplotlib
matplotlib.use("Agg")
shell = InteractiveShell.instance(colors="nocolor")
for cell in json.load(open(sys.argv[1])):
    result = shell.run_cell(cell)
    if not result.success: sys.exit("in the cell\\n" + cell)
'''


def needed(names):
    "Distributions that these requirements bring, directly or not."
    found, waiting = {}, [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        extras = tuple(sorted(requirement.extras))
        if (requirement.name, extras) in found: continue
        there = found[requirement.name, extras] = distribution(requirement.name)
        for text in there.requires or []:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or ("",)): waiting.append(one)
    return found.values()


def environment(folder):
    "Python of a new environment in `folder` with the wheel, what it requires, and IPython."
    venv.create(folder / "env", symlinks=True)
    site = next((folder / "env/lib").glob("python*/site-packages"))
    for found in needed([*requirements(), "ipython"]):
        for name in {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}:
            link, place = site / name, Path(found.locate_file(name))
            if place.exists() and not link.exists(): link.symlink_to(place)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, root], check=True)
    python = folder / "env/bin/python"
    wheel = next(folder.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    return python


def requirements():
    return next(line for line in (root / "settings.ini").read_text().splitlines() if line.startswith("requirements ")).split("=", 1)[1].split()


def minutes(nb):
    "How long a notebook says it takes."
    text = "\n".join(cell.source for cell in nb.cells[:8] if cell.cell_type == "markdown")
    found = re.search(r"\*About (\d+|an?) (minute|hour)", text)
    if re.search(r"\*About [^*]* needs ", text): return 60  # a library that the package does not require
    if not found: return 60 if "skip_exec: true" in "\n".join(cell.source for cell in nb.cells[:2]) else 1
    return (int(found[1]) if found[1].isdigit() else 1) * (60 if found[2] == "hour" else 1)


def cells_of(nb):
    "The code that a reader runs: all but cells that are slow or not meant to be run."
    for cell in nb.cells:
        flags = re.findall(r"^#\s*\|\s*(\w+(?:: *\w+)?)", cell.source, flags=re.M)
        if cell.cell_type == "code" and not {"slow", "eval: false"} & set(flags): yield cell.source


def run(python, path, folder):
    "One line, and what it printed where it failed; whether it passed."
    import json
    from execnb.nbio import read_nb
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "empty").mkdir()
    (place / "cells.json").write_text(json.dumps(list(cells_of(read_nb(path)))))
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "IN_TEST"))}
    start = time.time()
    done = subprocess.run([python, "-c", RUNNER, place / "cells.json"], cwd=place / "empty", capture_output=True, text=True,
                          env=settings | {"IPYTHONDIR": str(place), "TMPDIR": str(place), "TOKENIZERS_PARALLELISM": "false"})
    passed = done.returncode == 0
    print(f"{'passed' if passed else 'failed':8}{path.relative_to(root)} ({time.time() - start:.0f} s)", flush=True)
    if not passed: print((done.stdout + done.stderr)[-3000:], flush=True)
    return passed


def main():
    from execnb.nbio import read_nb
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORKERS", 2)))
    args = parser.parse_args()
    found = [path.resolve() for path in args.notebooks]
    if not found:
        chapters = sorted((root / "nbs").glob("*/index.ipynb"))
        stories = [path for path in sorted((root / "nbs/stories").glob("*.ipynb")) if minutes(read_nb(path)) <= LONGEST_STORY]
        found = [*stories, *chapters, root / "nbs/index.ipynb"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.workers) as pool:
        python = environment(Path(name))
        passed = list(pool.map(lambda path: run(python, path, name), found))
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    sys.exit(not all(passed))


if __name__ == "__main__": main()
