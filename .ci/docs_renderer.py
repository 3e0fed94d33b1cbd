"""What our pages need beside nbdev's processors: each source once, folded on pages of use, and what made stored results."""
import re
from pathlib import Path

import evidence
import yaml
from execnb.nbio import mk_cell
from imports import root
from nbdev.process import Processor


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
