"""Draw small faults in a folder's modules, and see which page finds them.

    python .ci/mutants.py bucketing --number 20 --seed 0

A fault is a sign, a comparison, `and` for `or`, or a number that is off by one. It is
carried into the notebook by nbdev_update, in a copy of the repository. Then the module's
own page is run, and if that passes, the pages that import the module, at most three.
"""
import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from imports import affected_pages, name_of, root

OTHERS = 3 # pages that are run after a module's own
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
         ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And}


def mutated(node):
    "A node with one fault, or None."
    new = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        new = new.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        new.value += 1
    else:
        return None
    return ast.unparse(new)


def candidates(folder):
    "(file, node, its code, the code of the fault) of a folder's modules."
    for file in sorted((root / "prompt_packing" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            fault = mutated(node) if isinstance(node, ast.expr) else None
            if fault and node.lineno == node.end_lineno and ast.unparse(node) != fault:
                yield file, node, ast.unparse(node), fault


def finds(copied, pages):
    "Whether one of these pages fails in the copy."
    names = [str(page.relative_to(root)) for page in pages]
    command = [sys.executable, ".ci/notebooks.py", "--limit", "300", *names]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=f"{copied}:{copied}/.ci")
    done = subprocess.run(command, cwd=copied, capture_output=True, env=env)
    return bool(names) and done.returncode != 0


def who_finds(copied, file, node, fault):
    "own page, another page, or none."
    place = copied / file.relative_to(root)
    lines = place.read_text().splitlines(keepends=True)
    line = lines[node.lineno - 1].encode() # columns are counted in bytes
    changed = line[:node.col_offset] + f"({fault})".encode() + line[node.end_col_offset:]
    lines[node.lineno - 1] = changed.decode()
    place.write_text("".join(lines))
    subprocess.run(["nbdev_update", "--fname", place], cwd=copied, check=True, capture_output=True)
    own, *others = affected_pages({name_of(file)})
    if finds(copied, [own]):
        return "own page"
    return "another page" if finds(copied, others[:OTHERS]) else "survived"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of prompt_packing")
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    every = list(candidates(args.folder))
    outcomes = []
    drawn = random.Random(args.seed).sample(every, min(args.number, len(every)))
    for file, node, code, fault in drawn:
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder, "copy")
            shutil.copytree(root, copied, symlinks=True, ignore=shutil.ignore_patterns(
                ".git", ".venv", "_docs", "_proc", "runs"))
            outcomes.append(who_finds(copied, file, node, fault))
        print(f"{outcomes[-1]:13}{file.stem}:{node.lineno}  {code} -> {fault}", flush=True)
    for kind in ("own page", "another page", "survived"):
        print(f"{kind}: {outcomes.count(kind)} of {len(outcomes)}")


if __name__ == "__main__":
    main()
