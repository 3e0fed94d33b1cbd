"""How names of the library look on the site: each docment once, in a table or in the source, never in both."""
import ast
import inspect
import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from textwrap import wrap

from execnb.nbio import read_nb
from fastcore.docments import docments
from nbdev.config import get_config
from nbdev.process import Processor
from nbdev.showdoc import BasicMarkdownRenderer

EMPTY = inspect.Parameter.empty


def exported(sym):
    "The module's own object for one that a notebook defined: it has a source file, and its home is not `__main__`."
    name = getattr(sym, "__qualname__", "")
    if getattr(sym, "__module__", None) != "__main__": return sym
    lib = get_config().lib_name
    found = []
    for module, names in import_module(f"{lib}._modidx").d["syms"].items():
        if f"{module}.{name}" not in names: continue
        found.append(import_module(module))
        for part in name.split("."): found[-1] = getattr(found[-1], part)
    same = [each for each in found if inspect.getdoc(each) == inspect.getdoc(sym)]  # several modules have a `verify`
    return (same or [sym])[0]


def is_ours(cls): return cls.__module__.split(".")[0] in (get_config().lib_name, "__main__")


def annotation_text(annotation):
    "An annotation as it was written, without the modules of its names."
    if annotation is EMPTY: return ""
    if annotation in (None, type(None)): return "None"
    text = annotation if isinstance(annotation, str) else None
    if text is None and inspect.isclass(annotation) and not getattr(annotation, "__args__", None): text = annotation.__name__
    text = str(annotation) if text is None else text
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


def default_text(value):
    if value is EMPTY: return ""
    return value.__name__ if inspect.isfunction(value) or inspect.isclass(value) else repr(value)


def escaped(text):
    "Text for a cell of a Markdown table, where a bar would end the cell."
    text = re.sub(r"`([^`]*\|[^`]*)`", lambda m: "<code>" + m[1].replace("<", "&lt;") + "</code>", " ".join(str(text).split()))
    return text.replace("|", "&#124;")


def own_fields(cls):
    "Fields of a dataclass that our classes define, with their comments or their `help`."
    comments = docments(cls, full=True)
    homes = {name: c for c in reversed(cls.__mro__) for name in vars(c).get("__annotations__", {})}
    for f in fields(cls):
        if not is_ours(homes.get(f.name, cls)): continue
        default = f.default if f.default.__class__.__name__ != "_MISSING_TYPE" else EMPTY
        words = f.metadata.get("help") or comments.get(f.name, {}).get("docment")
        yield f.name, f.type, default, words


def parameters(sym):
    "(name, annotation, default, words) of each parameter that users give, and the same of what is returned, or None."
    if is_dataclass(sym): return list(own_fields(sym)), None
    if inspect.isclass(sym):
        home = next((c for c in sym.__mro__ if "__init__" in vars(c)), object)
        if not is_ours(home): return [], None
    try: signature = inspect.signature(sym)
    except (TypeError, ValueError): return [], None
    words = {k: None if v.get("docment") is EMPTY else v.get("docment") for k, v in docments(sym, full=True).items()}
    rows = [("*" * {p.VAR_POSITIONAL: 1, p.VAR_KEYWORD: 2}.get(p.kind, 0) + n, p.annotation, p.default, words.get(n))
            for n, p in signature.parameters.items() if n not in ("self", "cls")]
    if inspect.isclass(sym): return (rows if any(r[3] for r in rows) else []), None
    returned = (signature.return_annotation, words.get("return"))
    return rows, returned if returned != (EMPTY, None) else None


def signature_text(sym, rows, name):
    "The call, in lines of at most 88 columns, types and meanings left to the table."
    if isinstance(sym, property) or not callable(sym): return name
    keyword_only = next((n for n, p in _params(sym).items() if p.kind is p.KEYWORD_ONLY), None)
    shown = [r for r in rows]
    parts = []
    for n, _, default, _ in shown:
        if n == keyword_only and not any(p.startswith("*") for p in parts): parts.append("*")
        parts.append(n + ("" if default is EMPTY else "=" + default_text(default)))
    if inspect.isclass(sym):
        bases = ", ".join(b.__name__ for b in sym.__bases__ if b is not object)
        if not shown: return f"class {name}" + (f"({bases})" if bases else "")
    text = f"{name}({', '.join(parts)})"
    if len(text) <= 88: return text
    return f"{name}(\n" + "\n".join(wrap(", ".join(parts), 84, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)) + "\n)"


def _params(sym):
    try: return inspect.signature(sym).parameters
    except (TypeError, ValueError): return {}


def table(rows, returned):
    "Parameters and result with their types, defaults and meanings; nothing where no meaning is written."
    if not any(r[3] for r in rows) and not (returned and returned[1]): return ""
    lines = ["|  | **Type** | **Default** | **Details** |", "|---|---|---|---|"]
    for name, annotation, default, words in rows:
        lines.append(f"| {escaped(name)} | {escaped(annotation_text(annotation))} | {escaped(default_text(default))} | {escaped(words or '')} |")
    if returned: lines.append(f"| **Returns** | {escaped(annotation_text(returned[0]))} | | {escaped(returned[1] or '')} |")
    return "\n".join(lines)


class TableRenderer(BasicMarkdownRenderer):
    "Heading with a link to the source, signature, docstring, and a table of the parameters' docments."
    def __init__(self, sym, *args, **kwargs):
        try: inspect.signature(sym, eval_str=True)
        except NameError: sym.__signature__ = inspect.signature(sym)  # a foreign base's annotations have no names here
        except (ValueError, TypeError): pass
        super().__init__(sym, *args, **kwargs)

    def _repr_markdown_(self):
        sym = exported(self.sym)
        rows, returned = parameters(sym)
        name = self.nm if inspect.isclass(sym) else self.nm.rsplit(".", 1)[-1]
        doc = inspect.getdoc(sym) or ""
        if is_dataclass(sym) and doc.startswith(sym.__name__ + "("): doc = ""
        parts = [self.heading(), f"```python\n{signature_text(sym, rows, name)}\n```", doc, table(rows, returned)]
        return "\n\n".join(part for part in parts if part)

    def heading(self):
        "A rule, the link to the source and the name, as nbdev writes them; nbdev finds no line for names that a page imports."
        text = super()._repr_markdown_().split("```python")[0].strip()
        return re.sub("#LNone", lambda m: f"#L{inspect.getsourcelines(exported(self.sym))[1]}", text)


class sources_once(Processor):
    "Before an `#| exports` cell stand the names that it defines, as headings; its source says the rest."
    def begin(self):
        cells = self.nb.cells
        for source in [c for c in cells if c.cell_type == "code" and "exports" in (c.directives_ or {})]:
            shown = sorted(self.neighbours(source), key=lambda c: position(source, c))
            for cell in shown: remove(cells, cell)
            at = index_of(cells, source)
            for number, cell in enumerate(shown): keep_heading(cell, alone=number == 0)
            cells[at:at] = shown

    def neighbours(self, source):
        "The documentation cells that nbdev put around a source cell."
        cells, found = self.nb.cells, []
        for step in (-1, 1):
            i = index_of(cells, source) + step
            while 0 <= i < len(cells) and getattr(cells[i], "has_sd", 0):
                found, i = [*found, cells[i]], i + step
        return [c for c in found if position(source, c) >= 0]


def index_of(cells, cell): return next(i for i, c in enumerate(cells) if c is cell)


def remove(cells, cell): del cells[index_of(cells, cell)]


def position(source, shown):
    "Where in a source cell the name of a documentation cell is defined; -1: it is not."
    name = re.search(r"show_doc\((\w+)", shown.source)[1]
    found = re.search(rf"^(?:async )?(?:def|class) {name}\b", source.source, flags=re.M)
    return found.start() if found else -1


def keep_heading(cell, alone):
    "Of a documented name its heading, with rule and source link where it is the first of its cell."
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "text/markdown" not in data: continue
        text = "".join(data["text/markdown"]).split("```python")[0]
        data["text/markdown"] = [text if alone else text[text.index("###"):]]


def public_links(cell):
    "Names that begin with an underscore have no heading on the site, so they are not linked; a link within a link's words goes."
    if cell.cell_type != "markdown": return
    text = re.sub(r"\[(`[\w.]*\b_\w+`)\]\(https?://[^)]*\)", r"\1", cell.source)
    inner = r"\[(`[^`]*`)\]\([^)]*\)"
    cell.source = re.sub(rf"\[((?:[^\[\]]|{inner})*)\](?=\()", lambda m: "[" + re.sub(inner, r"\1", m[1]) + "]", text)


def is_guide(path):
    "Whether a page is for users: a folder's chapter, a story, a guide, a page at the top."
    place = Path(path).resolve().relative_to(Path(get_config().nbs_path).resolve())
    if place.parts[0] in ("stories", "guides", "benchmarks") or len(place.parts) == 1: return True
    return place.name == "index.ipynb" and place.parts[0] != "foundation"


def statements(cell):
    try: return ast.parse(re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.M)).body
    except SyntaxError: return []


class folded_code(Processor):
    "Cells that only test, and on pages for users those that only import, show as one line to click."
    def begin(self):
        for cell in self.nb.cells:
            name = self.name(cell)
            if not name or cell.get("outputs") or not {"export", "exports", "hide", "code-fold:"}.isdisjoint(cell.directives_ or {}): continue
            cell.source = f"#| code-fold: true\n#| code-summary: {name}\n{cell.source}"

    def name(self, cell):
        kinds = {type(node) for node in statements(cell)} if cell.cell_type == "code" else set()
        if kinds == {ast.Assert}: return "Test"
        if kinds and kinds <= {ast.Import, ast.ImportFrom} and is_guide(self.nb.path_): return "Imports of this page"


class for_users(Processor):
    "Pages of source say under their title which page users should read."
    def begin(self):
        path, nbs = Path(self.nb.path_).resolve(), Path(get_config().nbs_path).resolve()
        chapter = path.parent / "index.ipynb"
        prose = [c for c in self.nb.cells if c.cell_type == "markdown" and not c.source.startswith("# ")]
        use, _ = (nbs / "_quarto.yml").read_text(encoding="utf-8").split("- id: source")
        said = any("To use it, read" in c.source for c in prose)
        if said or path.relative_to(nbs).as_posix() in use or path.parent.name == "foundation" or not chapter.exists() or not prose: return
        title = re.search(r"# (.*)", next(c.source for c in read_nb(chapter).cells if c.cell_type == "markdown"))[1]
        prose[0].source = f"::: {{.measured}}\nTo use it, read [{title}](index.ipynb). This page is one of its parts, with the source.\n:::\n\n{prose[0].source}"


class measured(Processor):
    "Pages that are run by hand say under their title when, on what machine and at which commit that was."
    def begin(self):
        facts = dict(self.nb.metadata.get("measured", {}))
        prose = [c for c in self.nb.cells if c.cell_type == "markdown" and not c.source.startswith("# ")]
        if not facts or not prose: return
        words = [f"Outputs of {facts.pop('date')}", f"commit {facts.pop('commit')}"]
        if "machine" in facts: words.append(f"{facts.pop('machine')}, {facts.pop('cores')} cores, threads: {facts.pop('threads')}")
        else: words.append("the machine was not recorded; figures are those of its two cores")
        words.append(", ".join(f"{name} {value}" for name, value in facts.items()))
        prose[0].source += f"\n\n::: {{.measured}}\n{'; '.join(filter(None, words))}.\n:::"


class colab_links(Processor):
    "Chapters and stories end with a link that opens them in Colab, where they have none of their own."
    def begin(self):
        path, cfg = Path(self.nb.path_).resolve(), get_config()
        place = path.relative_to(Path(cfg.nbs_path).resolve())
        chapter = place.name == "index.ipynb" and len(place.parts) == 2 and place.parts[0] != "foundation"
        if not chapter and place.parts[0] not in ("stories", "guides"): return
        prose = [c for c in self.nb.cells if c.cell_type == "markdown" and not c.source.startswith("# ")]
        if not prose or any("colab.research" in c.source for c in prose): return
        url = f"https://colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/{cfg.branch}/nbs/{place.as_posix()}"
        prose[-1].source += f"\n\n*[Open this page in Colab]({url}), with `%pip install git+{cfg.git_url}` as the first cell.*"
