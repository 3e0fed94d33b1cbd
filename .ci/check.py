"""What a page must keep to."""
import ast
import sys

import nbformat
from imports import pages, root

LONGEST_CELL = 120 # lines of exported code


def faults(page):
    "What the site would drop without a word, and cells that are two ideas."
    try:
        nb = nbformat.read(page, as_version=nbformat.NO_CONVERT)
        nbformat.validate(nb)
    except (nbformat.ValidationError, ValueError, KeyError, AttributeError) as error:
        return [f"is no valid notebook: {str(error).splitlines()[0]}"]
    title = [c.source.splitlines() for c in nb.cells if c.cell_type == "markdown"][:1]
    lost = [line for line in (title or [[]])[0] if line.strip() and line[:2] not in ("# ", "> ")]
    found = [f"the site drops what follows the title in its cell: {line}" for line in lost]
    for cell in nb.cells:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if cell.source.startswith("#| export"):
            if len(lines) > LONGEST_CELL:
                found.append(f"cell {cell.id} exports {len(lines)} lines, and at most "
                             f"{LONGEST_CELL} are one idea")
        elif cell.cell_type == "code" and "#| hide" not in cell.source and (
                mixes_imports(cell.source)):
            found.append(f"cell {cell.id} imports and does more: docs execute it")
    return found


def mixes_imports(source):
    "Whether a cell holds imports beside other statements."
    try:
        kinds = {isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(source).body}
    except SyntaxError: # a magic
        return False
    return kinds == {True, False}


if __name__ == "__main__":
    found = [f"{page.relative_to(root)}: {fault}" for page in pages() for fault in faults(page)]
    print(*found, sep="\n")
    sys.exit(bool(found))
