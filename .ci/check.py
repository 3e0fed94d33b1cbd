"""What a page must keep to; with `--notes`, what grows too long: it is printed and fails nothing."""
import ast
import io
import sys
import tokenize
from collections import Counter

import nbformat
from execnb.nbio import read_nb
from imports import pages, root

LONGEST_CELL = 120 # lines of exported code
LONG_CELL = 100 # is noted
CEILINGS = { # lines of code that a folder should stay below
    "foundation": 620, "packed_sequence": 270, "recurrent": 580, "accumulation_loss": 1850,
    "bucketing": 1850, "frozen_weights": 430, "tasks": 690, "trainer": 1200,
    "prompt_tuning": 1260, "compare": 750, "cli and the top": 420}
TOGETHER = 9850


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
        is_exported, nodes = cell.source.startswith("#| export"), cell.parsed_() or []
        if is_exported and length(cell) > LONGEST_CELL:
            yield f"cell {cell.id} exports {length(cell)} lines, and {LONGEST_CELL} are one idea"
        kinds = {type(node) in (ast.Import, ast.ImportFrom) for node in nodes}
        if kinds == {True, False} and not is_exported and "#| hide" not in cell.source:
            yield f"cell {cell.id} imports and does more: docs execute it"
        for dots, name in relative_imports(nodes):
            yield f"cell {cell.id} imports {dots}{name}: write the whole name, prompt_packing..."
        if any("Warning: " in "".join(output.get("text", "")) for output in cell.outputs):
            yield f"cell {cell.id} prints a raw warning"


def length(cell):
    return len(list(filter(str.strip, cell.source.splitlines())))


def relative_imports(nodes):
    "(dots, module) of each import that works in an exported module and not in its notebook."
    for node in [inner for node in nodes for inner in ast.walk(node)]:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level, node.module or ""


def long_cells(page):
    "Exported cells that are longer than they should be."
    for cell in read_nb(page).cells:
        if cell.source.startswith("#| export") and length(cell) > LONG_CELL:
            yield f"cell {cell.id} exports {length(cell)} lines"


def code_lines(source):
    "Number of lines that are neither empty nor comment nor docstring."
    documented, code = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)) \
                and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
               tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def sizes(package):
    "Folder of the package -> its lines of code."
    lines = Counter()
    for path in package.rglob("*.py"):
        if path.name != "_modidx.py":
            folder, *rest = path.relative_to(package).parts
            folder = folder if rest else "cli and the top"
            lines[folder] += code_lines(path.read_text(encoding="utf-8"))
    return lines


def table(lines):
    "The lines of each folder beside its ceiling."
    lines, ceilings = Counter(lines), Counter(CEILINGS)
    lines["together"], ceilings["together"] = lines.total(), TOGETHER
    yield f"{'lines of code':20}{'today':>8}{'ceiling':>9}"
    for folder in dict.fromkeys([*ceilings, *lines]):
        more = lines[folder] - ceilings[folder]
        above = f"   {more:,} above" if more > 0 else ""
        yield f"{folder:20}{lines[folder]:8,}{ceilings[folder]:9,}{above}"


def of_pages(find):
    return [f"{page.relative_to(root)}: {words}" for page in pages() for words in find(page)]


if __name__ == "__main__":
    if "--notes" in sys.argv:
        print(*of_pages(long_cells), *table(sizes(root / "prompt_packing")), sep="\n")
        sys.exit()
    found = of_pages(faults)
    print(*found, sep="\n")
    sys.exit(bool(found))
