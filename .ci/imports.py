"""Which module a page exports, which pages use a module, and which pages a change concerns."""
import re
from functools import cache
from pathlib import Path

from execnb.nbio import read_nb

root = Path(__file__).resolve().parent.parent


def name_of(file):
    "A module's full name by its place."
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def pages():
    "page -> (the module that it exports, the text of its code)."
    return {page: exported(page) for page in sorted((root / "nbs").rglob("*.ipynb"))
            if ".ipynb_checkpoints" not in page.parts}


def exported(page):
    code = "\n".join(c.source for c in read_nb(page).cells if c.cell_type == "code")
    name = re.search(r"^#\| default_exp (\S+)", code, re.M)
    return name and f"prompt_packing.{name[1]}".removesuffix(".__init__"), code


def users(names):
    "The pages that import one of these modules."
    imports = "|".join(map(re.escape, sorted(names)))
    uses = re.compile(rf"^\s*(?:from|import) (?:{imports})(?![\w.])", re.M)
    return [page for page, (_, code) in pages().items() if names and uses.search(code)]


LEDGERS = [root / "nbs" / page for page in (  # of all modules
    "api.ipynb", "architecture.ipynb", "foundation/private_apis.ipynb")]


def affected_pages(changed):
    "The pages that export one of these modules, then those that import one, or its chapter."
    own = [page for page, (module, _) in pages().items() if module in changed]
    chapters = {pages()[page][0] for page in users(changed)} & {
        name.rpartition(".")[0] for name in changed}
    return list(dict.fromkeys(own + users(changed | chapters)))


def changed_pages(files):
    "The pages to run after changes of these files."
    paths = {root / name for name in files}
    own = [page for page in pages() if page in paths]
    modules = {pages()[page][0] for page in own} | {
        name_of(path) for path in paths if path.suffix == ".py"}
    return list(dict.fromkeys(own + affected_pages(modules - {None}) + LEDGERS))
