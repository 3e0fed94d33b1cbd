"""What our pages need beside nbdev's processors: each source once, and folded code."""
import re

from execnb.nbio import mk_cell
from nbdev.process import Processor

FOLDED = {"Test": {"Assert"}, "Imports of this page": {"Import", "ImportFrom"}}


class sources_once(Processor):
    "Names of an `#| exports` cell get a heading; their source says the rest."
    def begin(self):
        cells = self.nb.cells
        for source in [c for c in cells if "exports" in (getattr(c, "directives_", None) or {})]:
            names = re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", source.source, re.M)
            shown = [f"show_doc({name})" for name in names]
            cells[:] = [cell for cell in cells if not (
                hasattr(cell, "has_sd") and cell.source.splitlines()[-1] in shown)]
            at = cells.index(source)
            cells[at:at] = [mk_cell(f"### {name}", "markdown") for name in names]


class folded_code(Processor):
    "Cells of assertions, and those of imports, are folded."
    def begin(self):
        for cell in self.nb.cells:
            if re.search(r"(?m)^#\| *(export|hide|code-fold)", cell.source) or cell.get("outputs"):
                continue
            kinds = {type(node).__name__ for node in cell.parsed_() or []}
            for summary, folded in FOLDED.items():
                if kinds and kinds <= folded:
                    cell.source = f"#| code-fold: true\n#| code-summary: {summary}\n{cell.source}"
