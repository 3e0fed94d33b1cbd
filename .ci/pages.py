"""What the notebooks look like: a table of all pages, and what breaks the rules of CONTRIBUTING.md (exit status 1)."""
import ast
import re
import sys
from pathlib import Path

from execnb.nbio import read_nb

root = Path(__file__).resolve().parent.parent
LONGEST_LINE, MOST_CELLS = 100, 72


def directives(cell): return re.findall(r"^#\s*\|\s*(\w+)", cell.source, flags=re.M)


def code_lines(cell): return [line for line in cell.source.splitlines() if line.strip() and not line.startswith("#|")]


def statements(cell):
    try: return ast.parse(re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.M)).body
    except SyntaxError: return []


def mixes_imports(cell):
    "Whether a cell holds imports beside other statements (an `if` or a `try` around them counts as an import)."
    kinds = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in statements(cell)]
    return any(kinds) and not all(kinds)


def longest_function(cells):
    "Lines of the longest function or method in exported cells."
    found = [node for cell in cells for top in statements(cell) for node in ast.walk(top)
             if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return max((node.end_lineno - node.body[0].lineno + 1 for node in found), default=0)


def look(path):
    "A row of the table, and the faults of a page."
    cells = read_nb(path).cells
    code = [c for c in cells if c.cell_type == "code"]
    exported = [c for c in code if {"export", "exports", "exporti"} & set(directives(c))]
    shown = [c for c in code if "exports" in directives(c)]
    total = sum(len(code_lines(c)) for c in exported)
    row = (str(path.relative_to(root / "nbs")), len(cells), sum(c.cell_type == "markdown" for c in cells) / len(cells),
           total, sum(len(code_lines(c)) for c in shown) / total if total else None, longest_function(exported))
    faults = [f"a line of {len(line)} columns: {line.strip()[:60]}" for c in code for line in code_lines(c) if len(line) > LONGEST_LINE]
    faults += ["imports beside other code: " + code_lines(c)[-1][:60] for c in code if c not in exported and mixes_imports(c) and "hide" not in directives(c)]
    faults += ["import *" for c in code if re.search(r"^from \S+ import \*", c.source, flags=re.M)]
    if len(cells) > MOST_CELLS: faults.append(f"{len(cells)} cells, and a page has at most {MOST_CELLS}")
    return row, [f"{row[0]}: {fault}" for fault in faults]


def main():
    paths = sorted(p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    rows, faults = zip(*map(look, paths))
    print(f"{'page':38}{'cells':>6}{'prose':>7}{'exported':>9}{'shown':>7}{'longest':>8}")
    for name, cells, prose, lines, share, longest in rows:
        shown = "" if share is None else f"{share:.0%}"
        print(f"{name:38}{cells:6}{prose:7.0%}{lines:9}{shown:>7}{longest:8}")
    exported, visible = sum(r[3] for r in rows), sum(r[3] * r[4] for r in rows if r[4] is not None)
    print(f"{len(rows)} pages, {exported} exported lines, {visible / exported:.0%} of them shown")
    broken = [fault for found in faults for fault in found]
    print(*broken, sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__": main()
