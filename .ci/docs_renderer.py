"""What our pages need beside nbdev's processors: each source once, folded on pages of use, what made stored results, and names as their readers call them."""
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from pathlib import Path

import evidence
import yaml
from execnb.nbio import mk_cell
from imports import root
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.process import Processor
from nbdev.showdoc import BasicMarkdownRenderer


def is_for_use(page):
    "Whether a page of nbs is in the sidebar of those who use the library, the first one."
    website = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    return f"'{page}'" in str(website["sidebar"][0]["contents"])


class sources_once(Processor):
    """Names of an `#| exports` cell get a heading; their source says the rest. It is folded
    where people come to use the library."""
    def begin(self):
        cells = self.nb.cells
        folded = is_for_use(Path(self.nb.path_).resolve().relative_to(root / "nbs").as_posix())
        for source in [c for c in cells if "exports" in (getattr(c, "directives_", None) or {})]:
            names = re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", source.source, re.M)
            shown = [f"show_doc({name})" for name in names]
            cells[:] = [cell for cell in cells if not (
                hasattr(cell, "has_sd") and cell.source.splitlines()[-1] in shown)]
            at = cells.index(source)
            cells[at:at] = [mk_cell(f"### {name}", "markdown") for name in names]
            if folded:
                fold = "#| code-fold: true\n#| code-summary: Signature and source\n"
                source.source = fold + source.source


class stored_results(Processor):
    """At which commit results that CI does not repeat were measured, and what changed since: under
    the title of a page that is run by hand, else beside the first of them."""
    def begin(self):
        cells = self.nb.cells
        said = evidence.lines(Path(self.nb.path_).resolve())
        top = next((cell for cell in cells if cell.get("id") == "measured"), None)
        if top and said:
            end = top.source.rindex("\n:::")
            top.source = f"{top.source[:end]}\n\n{' '.join(said.values())}{top.source[end:]}"
            return
        for at, cell in reversed(list(enumerate(cells))):
            if cell.get("id") in said:
                text = f"::: {{.measured}}\n{said[cell['id']]}\n:::"
                cells[at + 1:at + 1] = [mk_cell(text, "markdown")]


def base_of(symbol):
    "The first class of another library that a class of ours inherits from; None: there is none."
    for base in getattr(symbol, "__mro__", ())[1:-1]:
        if base.__module__.split(".")[0] not in ("prompt_packing", "typing", "abc", "builtins"):
            return base


def parameters_of(symbol):
    "The parameters of a class that passes all of them on, as far as they are known."
    base = base_of(symbol)
    if is_dataclass(symbol): # those of ours; a hundred more are those of the base
        own = [field for each in symbol.__mro__ if each.__module__.startswith("prompt_packing")
               for field in getattr(each, "__annotations__", {})]
        return [f"{name}=None" for name in own] + ["**kwargs"]
    if base is None:
        return ["*args", "**kwargs"]
    return [str(parameter.replace(annotation=inspect.Parameter.empty))
            for parameter in inspect.signature(base).parameters.values()]


def public_part(text):
    "A docstring without its paragraphs about private methods, which are for pages of source."
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"`_[a-z]", paragraph):
            if kept and kept[-1].rstrip().endswith(":"):
                kept.pop()
        else:
            kept.append(paragraph)
    first, *more = kept or [""]
    return "\n\n".join([f"*{' '.join(first.split())}*", *more])


class Reference(BasicMarkdownRenderer):
    "A name as its reader uses it: class or def, what a class inherits from, the docstring."
    def _repr_markdown_(self):
        base, call = base_of(self.sym), str(self.dm).replace(":NoneType=None", "=None")
        if inspect.isclass(self.sym):
            call = re.sub(r"\)(->\w+)?:$", ")", call.strip()).replace("def ", "class ", 1)
            passes_on = re.search(r"\(\s*\*args, \*\*kwargs\s*\)", call)
            if passes_on or base and is_dataclass(self.sym):
                call = textwrap.fill(f"class {self.nm}({', '.join(parameters_of(self.sym))})", 88,
                                     subsequent_indent="    ")
        parts = ["---", f"{'#' * self.title_level} {self.nm}", f"```python\n{call}\n```"]
        if source := source_of(self.sym):
            style = 'target="_blank" style="float:right; font-size:smaller"'
            parts.insert(1, f"[source]({source}){{{style}}}")
        if self.docs:
            parts.append(public_part(self.docs))
        if base:
            library = base.__module__.split(".")[0]
            parts.append(f"Inherits from `{library}.{base.__qualname__}`: its parameters, "
                         "attributes and methods.")
        return "\n\n".join(parts)


def source_of(symbol):
    "The address of a name's source, with its line; None where it has no file of ours."
    try:
        file, (_, line) = inspect.getsourcefile(symbol), inspect.getsourcelines(symbol)
        place = Path(file).resolve().relative_to(root).as_posix()
    except (TypeError, OSError, ValueError):
        return NbdevLookup().code(f"{symbol.__module__}.{symbol.__qualname__}")
    config = get_config()
    return f"{config.git_url}/blob/{config.branch}/{place}#L{line}"
