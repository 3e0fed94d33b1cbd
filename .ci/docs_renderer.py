"""What our pages need beside nbdev's processors: each source once, and folded code."""
import re
from pathlib import Path

import yaml
from execnb.nbio import mk_cell
from imports import root
from nbdev.process import Processor

FOLDED = {"Test": {"Assert"}, "Imports of this page": {"Import", "ImportFrom"}}


def is_for_use(path):
    "Whether a page is in the sidebar of those who use the library, the first one."
    website = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    return path.relative_to(root / "nbs").as_posix() in str(website["sidebar"][0]["contents"])


class sources_once(Processor):
    """Names of an `#| exports` cell get a heading; their source says the rest. It is folded
    where people come to use the library."""
    def begin(self):
        cells = self.nb.cells
        folded = is_for_use(Path(self.nb.path_).resolve())
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
