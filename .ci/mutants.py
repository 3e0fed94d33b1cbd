"""Draw small faults in a folder's modules, and see which page finds them.

    python .ci/mutants.py bucketing --seed 1 # or a module of its own, such as cli

A fault is a sign, a comparison, `and` for `or`, or a number that is off by one. It is
carried into the notebook by nbdev_update, in a copy of the repository. Then the module's
own page is run, and if that passes, the pages that import the module, at most three.
"""
import argparse
import random
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from imports import affected_pages, name_of, root

SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
         "and": "or", "or": "and"}


def candidates(folder):
    "(file, token, the fault in its place) of a folder's modules."
    for file in sorted((root / "prompt_packing").rglob("*.py")):
        if folder not in name_of(file).split("."):
            continue
        with file.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                fault = SWAPS.get(token.string)
                if token.string.isdecimal():
                    fault = str(int(token.string) + 1)
                if fault:
                    yield file, token, fault


def finds(copied, pages):
    "Whether one of these pages fails in the copy."
    # a page may take its usual 900 seconds: one that only is slow finds nothing
    command = ["env", f"PYTHONPATH={copied}:{copied}/.ci", "OMP_NUM_THREADS=1", sys.executable,
               ".ci/notebooks.py", *(str(page.relative_to(root)) for page in pages)]
    return pages and subprocess.run(command, cwd=copied, capture_output=True).returncode


def who_finds(copied, file, token, fault):
    "own page, another page, or none."
    place, number = copied / file.relative_to(root), token.start[0] - 1
    lines = place.read_text().splitlines(keepends=True)
    lines[number] = lines[number][:token.start[1]] + fault + lines[number][token.end[1]:]
    place.write_text("".join(lines))
    subprocess.run(["nbdev_update", "--fname", place], cwd=copied, check=True, capture_output=True)
    own, *others = affected_pages({name_of(file)})
    if finds(copied, [own]):
        return "own page"
    return "another page" if finds(copied, others[:3]) else "survived"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of prompt_packing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=20, help="of faults")
    args = parser.parse_args()
    every, outcomes = list(candidates(args.folder)), Counter()
    for file, token, fault in random.Random(args.seed).sample(every, min(args.number, len(every))):
        with TemporaryDirectory() as folder:
            copied = shutil.copytree(root, Path(folder, "copy"), symlinks=True, ignore=(
                shutil.ignore_patterns(".git", ".venv", "_docs", "_proc", "runs")))
            outcome = who_finds(copied, file, token, fault)
        outcomes[outcome] += 1
        print(f"{outcome:13}{file.stem}:{token.start[0]}  {token.string} -> {fault}  in  "
              f"{token.line.strip()}", flush=True)
    print(", ".join(f"{outcome}: {number}" for outcome, number in outcomes.most_common()))
