"""What our pages need beside nbdev's processors: links to the right name, each source once, folded code."""
import ast
import inspect
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path

from execnb.nbio import mk_cell
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.process import Processor
from nbdev.showdoc import BasicMarkdownRenderer


class Renderer(BasicMarkdownRenderer):
    "nbdev's, also for classes with annotations that only their foreign base can read."
    def __init__(self, sym, *args, **kwargs):
        try:
            inspect.signature(sym, eval_str=True)
        except NameError:
            sym.__signature__ = inspect.signature(sym)
        except (ValueError, TypeError):
            pass
        super().__init__(sym, *args, **kwargs)


def targets(page, symbols):
    "name -> full name, as a page means it: its own, its folder's, or the only one there is."
    homes = defaultdict(dict)
    for module, names in symbols.items():
        place = module.split(".", 1)[-1]
        if place.split(".")[0] == "cli": # `compare` in prose is the function, not the command
            continue
        for full in names:
            name = full.removeprefix(f"{module}.")
            if not re.search(r"\b_", name): # what has no heading on the site
                homes[name][place] = full
    own, folder = page.replace("/", ".").removesuffix(".index"), page.split("/")[0]
    found = {}
    for name, places in homes.items():
        near = {place: full for place, full in places.items() if place.split(".")[0] == folder}
        choices = near or places
        if own in choices or len(choices) == 1:
            found[name] = choices.get(own) or next(iter(choices.values()))
    return found


def page_of(nb):
    "A page's place in nbs/, without its ending."
    nbs = Path(get_config().nbs_path).resolve()
    return Path(nb.path_).resolve().relative_to(nbs).with_suffix("").as_posix()


class links(Processor):
    "Names in backticks lead to the page that defines them."
    def begin(self):
        symbols = import_module(f"{get_config().lib_name}._modidx").d["syms"]
        lookup = NbdevLookup()
        names = targets(page_of(self.nb), symbols)
        lookup.syms = {name: lookup.syms.get(full) for name, full in names.items()}
        for cell in self.nb.cells:
            if cell.cell_type == "markdown":
                cell.source = without_inner_links(lookup.linkify(cell.source))


def without_inner_links(text):
    "A link within a link's words goes."
    inner = r"\[(`[^`]*`)\]\([^)]*\)"
    words = rf"\[((?:[^\[\]]|{inner})*)\](?=\()"
    return re.sub(words, lambda match: "[" + re.sub(inner, r"\1", match[1]) + "]", text)


class sources_once(Processor):
    "Names of an `#| exports` cell get a heading; their source says the rest."
    def begin(self):
        cells = self.nb.cells
        for source in [c for c in cells if "exports" in (getattr(c, "directives_", None) or {})]:
            names = re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", source.source, re.M)
            shown = {f"show_doc({name}" for name in names}
            cells[:] = [c for c in cells if not getattr(c, "has_sd", 0)
                        or not any(start in c.source for start in shown)]
            at = next(i for i, cell in enumerate(cells) if cell is source)
            cells[at:at] = [mk_cell(f"### {name}", "markdown") for name in names]


class folded_code(Processor):
    "Cells of assertions, and on pages that export nothing those of imports, are folded."
    def begin(self):
        for cell in self.nb.cells:
            marks = set(getattr(cell, "directives_", None) or {})
            if cell.cell_type != "code" or marks & {"export", "exports", "hide", "code-fold:"}:
                continue
            try:
                kinds = {type(node) for node in ast.parse(cell.source).body}
            except SyntaxError: # a magic
                continue
            summary = {frozenset({ast.Assert}): "Test"}.get(frozenset(kinds))
            if kinds and kinds <= {ast.Import, ast.ImportFrom}:
                summary = "Imports of this page"
            if summary and not cell.get("outputs"):
                cell.source = f"#| code-fold: true\n#| code-summary: {summary}\n{cell.source}"


class measured(Processor):
    "Pages that are run by hand say under their title when, where and with what that was."
    def begin(self):
        facts = self.nb.metadata.get("measured", {})
        prose = [c for c in self.nb.cells if c.cell_type == "markdown" and c.source[:2] != "# "]
        if facts and prose:
            words = ", ".join(f"{name} {value}" for name, value in facts.items())
            prose[0].source += f"\n\n::: {{.measured}}\nOutputs of {words}.\n:::"
