"""Which stored results were measured before their code changed?

    python .ci/evidence.py [PAGE ...]        # list and count them
    python .ci/evidence.py --run [PAGE ...]  # also run their pages again, shortest first

No change of the library makes the outputs of slow cells and of pages with `skip_exec: true`
again. Each says when, at which commit and on what machine it was made: a cell in its metadata, a
page in its cell `measured`; `notebooks.py --keep --slow` writes both. A result is stale where a
module that its cell depends on (`dependencies.py`) has other code today; comments, docstrings,
names of local variables and the number of the version may differ. `--run` may be stopped at any
time: the outputs of each page are kept when it ends, and are no longer stale when it is called
again.
"""
import argparse
import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from types import CodeType

from dependencies import PACKAGE, name_of, of_cell
from execnb.nbio import read_nb
from imports import exported, pages, root


@dataclass(frozen=True)
class Result:
    "The stored output of a cell that no change makes again."
    page: Path
    cell: str # its id
    measured: str # when, at which commit, on what machine; "" where nobody wrote it
    files: frozenset # that it depends on

    @property
    def commit(self):
        return (re.findall(r"\bcommit (\w+)", self.measured) or [""])[0]

    @property
    def changed(self):
        "The files that have other code than at that commit; None: the commit is not in this clone."
        if not self.commit or "uncommitted" in self.measured:
            return self.files
        if not blobs(self.commit):
            return None
        return frozenset(file for file in self.files if not same_code(self.commit, file))


def results(page):
    "The results of a page, one for each cell."
    cells = read_nb(page).cells
    is_skipped = "skip_exec: true" in cells[0].source
    of_page = next((cell.source for cell in cells if cell.id == "measured"), "")
    module, _ = exported(page)
    own = [root.joinpath(*module.split("."), "__init__.py") if "/" not in module and
           root.joinpath(*module.split(".")).is_dir() else
           root.joinpath(*module.split(".")).with_suffix(".py")] if module else []
    code = [cell for cell in cells if cell.cell_type == "code"]
    sources = [cell.source for cell in code]
    for number, cell in enumerate(code):
        is_slow = re.search(r"^#\| *slow\b", cell.source, re.M)
        if cell.outputs and (is_slow or is_skipped):
            measured = of_page if is_skipped else cell.metadata.get("measured", "")
            files = of_cell(sources, number, page.parent, own)
            yield Result(page, cell.id, " ".join(measured.split()), frozenset(files))


def git(*command):
    done = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


@cache
def blobs(commit):
    "path -> its hash at a commit; {} where the clone does not have it."
    lines = git("ls-tree", "-r", commit, "--", PACKAGE, "nbs").splitlines()
    rows = (re.split(r"[ \t]", line, maxsplit=3) for line in lines)
    return {path: digest for _, _, digest, path in rows if path.endswith(".py")}


@cache
def same_code(commit, file):
    "Whether a file did at a commit what it does today."
    path, today = file.relative_to(root).as_posix(), file.read_bytes()
    then = blobs(commit).get(path)
    if then is None:
        return False
    if sha1(b"blob %d\0" % len(today) + today).hexdigest() == then:
        return True
    return code_of(git("cat-file", "blob", then)) == code_of(today.decode())


def code_of(source):
    "What a module does: bytecode without docstrings, lines, names of local variables, its version."
    source = re.sub(r"^__version__ = .*$", "", source, flags=re.M)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return instructions(compile(ast.fix_missing_locations(tree), "module", "exec"))


def instructions(code):
    "Of a code object, and of those of its functions. Local variables are numbers there."
    constants = tuple(instructions(each) if isinstance(each, CodeType) else (type(each), repr(each))
                      for each in code.co_consts)
    handlers = getattr(code, "co_exceptiontable", b"") # in `co_code` before Python 3.11
    parameters = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount] # callers use them
    return (code.co_name, code.co_code, code.co_names, handlers, code.co_flags, parameters,
            code.co_argcount, code.co_kwonlyargcount, constants)


def names(files):
    "Modules in words, those of a folder together where there are several."
    folders = {}
    for name in sorted(map(name_of, files)):
        folders.setdefault(re.split("[./]", name)[0], []).append(name)
    return ", ".join(some[0] if len(some) == 1 else f"{folder} ({len(some)} modules)"
                     for folder, some in folders.items())


def is_stale(result):
    return bool(result.changed) or not result.measured or "uncommitted" in result.measured


def grouped(found):
    "Results of one commit, the stale ones apart from the others."
    groups = {}
    for result in found:
        groups.setdefault((result.measured, is_stale(result)), []).append(result)
    return list(groups.values())


def state(some):
    "What is known of results of one commit, as the site and this command say it."
    first = some[0]
    if not first.measured:
        return "measured at a commit that nobody wrote down"
    when = f"measured at {first.commit[:7]}"
    if "uncommitted" in first.measured:
        return f"{when}, with changes that were not committed"
    if any(result.changed is None for result in some):
        return f"{when}, which this clone does not have"
    changed = frozenset().union(*(result.changed for result in some))
    if changed:
        return f"{when}, before changes to {names(changed)}"
    return f"{when}; what they depend on has not changed since"


def lines(page):
    "cell id -> what the site says of the results that begin there, a sentence for each commit."
    found = list(results(page))
    is_skipped = "skip_exec: true" in read_nb(page).cells[0].source
    said = {}
    for some in grouped(found):
        count = f"{len(some)} of {len(found)}" if len(some) < len(found) else f"All {len(found)}"
        text = f"{count} outputs {state(some)}." if len(found) > 1 else f"The output {state(some)}."
        if not is_skipped:
            text = f"Not repeated by the continuous integration: {text[0].lower()}{text[1:]}"
            text += f" Made {some[0].measured}." if some[0].measured else ""
        said[some[0].cell] = text
    return said


def seconds(page):
    "How long a page's stored results took; unknown ones come last."
    found = [int(n) for n in re.findall(r"\b(\d+) s\b", " ".join(
        {result.measured for result in results(page)}))]
    return sum(found) or float("inf")


def run(stale):
    "Run pages again, each as a whole, and keep their outputs; those that failed."
    failed, here = [], Path(sys.executable).parent
    for page in sorted(stale, key=seconds):
        command = [sys.executable, root / ".ci" / "notebooks.py", "--keep", "--slow",
                   "--limit", "36000", page]
        if subprocess.run(command).returncode:
            failed.append(page)
        subprocess.run([here / "nbdev_clean", "--fname", page], cwd=root, check=True)
    return failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pages", nargs="*", type=Path, help="default: all under nbs")
    add("--run", action="store_true", help="run the pages that have stale results, shortest first")
    args = parser.parse_args()
    found = [result for page in map(Path.resolve, args.pages or pages())
             for result in results(page)]
    old = [result for result in found if is_stale(result)]
    for page in dict.fromkeys(result.page for result in old):
        of_page = [result for result in found if result.page == page]
        for some in grouped(filter(is_stale, of_page)):
            print(f"{page.relative_to(root)}: {len(some)} of {len(of_page)} {state(some)}")
    unknown = sum(result.changed is None for result in found)
    print(f"{len(old)} of {len(found)} stored results are stale"
          + (f"; of {unknown} the commit is not in this clone" if unknown else ""), flush=True)
    if args.run and git("status", "--porcelain", "--", PACKAGE, "nbs/*/*.py"):
        sys.exit("commit the changes of modules first: results say at which commit they were made")
    if args.run:
        failed = run({result.page for result in old})
        print(*(f"failed: {page.relative_to(root)}" for page in failed), sep="\n")
        sys.exit(bool(failed))


if __name__ == "__main__":
    main()
