"""What a page must keep to."""
import ast
import sys

import nbformat
from execnb.nbio import read_nb
from imports import pages, root

LONGEST_CELL = 120 # lines of exported code


def faults(page):
    "What the site would drop without a word or show raw, and cells that are two ideas."
    for invalid in nbformat.validator.iter_validate(nbformat.read(page, nbformat.NO_CONVERT)):
        yield f"is no valid notebook: {str(invalid).splitlines()[0]}"
    cells = read_nb(page).cells
    title = next(cell.source for cell in cells if cell.cell_type == "markdown")
    for line in title.splitlines():
        if line.strip() and line[:2] not in ("# ", "> "):
            yield f"the site drops what follows the title in its cell: {line}"
    for cell in [cell for cell in cells if cell.cell_type == "code"]:
        is_exported = cell.source.startswith("#| export")
        length = len(list(filter(str.strip, cell.source.splitlines())))
        if is_exported and length > LONGEST_CELL:
            yield f"cell {cell.id} exports {length} lines, and {LONGEST_CELL} are one idea"
        kinds = {type(node) in (ast.Import, ast.ImportFrom) for node in cell.parsed_() or []}
        if kinds == {True, False} and not is_exported and "#| hide" not in cell.source:
            yield f"cell {cell.id} imports and does more: docs execute it"
        if any("Warning: " in "".join(output.get("text", "")) for output in cell.outputs):
            yield f"cell {cell.id} prints a raw warning"


if __name__ == "__main__":
    found = [f"{page.relative_to(root)}: {fault}" for page in pages() for fault in faults(page)]
    print(*found, sep="\n")
    sys.exit(bool(found))
