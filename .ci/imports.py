"""Which module a page exports, which pages run what a module defines, and what has changed."""
import ast
import re
import subprocess
from functools import cache
from pathlib import Path

root = Path(__file__).resolve().parent.parent
PACKAGE = "prompt_packing"


@cache
def modules():
    "name -> the names of the modules of the package that it imports."
    files = {name_of(file): file for file in (root / PACKAGE).rglob("*.py")}
    return {name: imported(file.read_text(), name, file.stem == "__init__") & files.keys()
            for name, file in files.items() if not name.endswith("_modidx")}


def name_of(file):
    "A module's full name by its place."
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(source, name="", is_folder=False):
    "Full names of the modules that a source imports; relative ones are of module `name`."
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            up = parts[:len(parts) - node.level + is_folder] if node.level else []
            home = ".".join([*up, *filter(None, [node.module])])
            found |= {home, *(f"{home}.{alias.name}" for alias in node.names)}
    return found


@cache
def pages():
    "page -> (the module that it exports, the text of its code)."
    return {page: exported(page) for page in sorted((root / "nbs").rglob("*.ipynb"))
            if ".ipynb_checkpoints" not in page.parts}


def exported(page):
    from execnb.nbio import read_nb
    code = "\n".join(c.source for c in read_nb(page).cells if c.cell_type == "code")
    name = re.search(r"^#\| default_exp (\S+)", code, re.M)
    module = f"{PACKAGE}.{name[1]}".removesuffix(".__init__") if name else None
    return module, code


def page_of(module):
    "The page that exports a module."
    return next((page for page, (name, _) in pages().items() if name == module), None)


def affected_pages(changed):
    "The pages that export one of these modules, then those that import one, or its chapter."
    chapters = {name.rpartition(".")[0] for name in changed}
    affected = changed | {name for name in chapters if modules().get(name, set()) & changed}
    names = "|".join(map(re.escape, sorted(affected)))
    uses = re.compile(rf"^\s*(?:from|import) (?:{names})(?![\w.])", re.M)
    own = [page_of(name) for name in sorted(changed)]
    others = [page for page, (_, code) in pages().items() if names and uses.search(code)]
    return list(dict.fromkeys(filter(None, own + others)))


def changed_pages(base="main"):
    "The pages to run after the changes since `base`, committed or not."
    def lines(*command):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        return done.stdout.splitlines()

    start = lines("merge-base", "HEAD", base) or ["HEAD"]
    files = lines("diff", "--name-only", start[0]) + lines(
        "ls-files", "--others", "--exclude-standard")
    paths = {root / name for name in files if (root / name).exists()}
    own = [page for page in pages() if page in paths]
    of_pages = {pages()[page][0] for page in own} - {None}
    return list(dict.fromkeys(own + affected_pages(
        of_pages | {name_of(path) for path in paths if path.suffix == ".py"} & modules().keys())))
