"""What the notebooks look like: a table of all pages, and what breaks the rules of CONTRIBUTING.md (exit status 1)."""
import ast
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nbformat
from execnb.nbio import read_nb

root = Path(__file__).resolve().parent.parent
LONGEST_LINE, MOST_CELLS = 100, 72
RETURNED = {  # public names that users get from a call, or that transformers calls for them, and never type
    "BackboneFacts", "CollatorFacts", "Task"}
USED_AT_HOME = {  # public names that no other page uses yet: no name is added
    "create_wiki_dataloader", "pad_nest", "prompt_features", "tour"}


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
    title = next((c.source.splitlines() for c in cells if c.cell_type == "markdown"), [])
    lost = [line for line in title if line.strip() and not re.match(r"# |> |- \w+:", line)]
    if lost: faults.append("the site drops what follows the title in its cell: " + lost[0][:60])
    if len(cells) > MOST_CELLS: faults.append(f"{len(cells)} cells, and a page has at most {MOST_CELLS}")
    return row, [f"{row[0]}: {fault}" for fault in faults]


def invalid(path):
    "Why nbformat refuses a notebook, or nothing; Quarto and nbdev drop what is invalid without a word, or stop at it."
    try: nbformat.validate(nbformat.read(path, as_version=nbformat.NO_CONVERT))
    except (nbformat.ValidationError, ValueError, KeyError, AttributeError) as error:
        return [f"{path.relative_to(root / 'nbs')}: is no valid notebook: {str(error).splitlines()[0]}"]
    return []


def public_names():
    "name -> folders whose `__all__` holds it."
    found = {}
    for file in sorted((root / "prompt_packing").glob("*/__init__.py")):
        lists = [node.value for node in ast.parse(file.read_text()).body
                 if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"]
        for name in (element.value for each in lists for element in each.elts): found.setdefault(name, set()).add(file.parent.name)
    return found


def homes():
    "name -> pages that define it, of functions and classes."
    spec = spec_from_file_location("modidx", root / "prompt_packing/_modidx.py")
    spec.loader.exec_module(index := module_from_spec(spec))
    found = {}
    for module, names in index.d["syms"].items():
        page = module.removeprefix("prompt_packing.").replace(".", "/")
        for name in names: found.setdefault(name.split(".")[-1], set()).add(page)
    return found


def used_text(path):
    "What a page runs or shows in a block of code, its imports aside."
    parts = []
    for cell in read_nb(path).cells:
        if cell.cell_type == "markdown": parts += re.findall(r"```.*?```", cell.source, flags=re.S)
        elif not {"export", "exports", "exporti"} & set(directives(cell)):
            parts.append(re.sub(r"^(from|import) [^(\n]*(\([^)]*\))?$", "", cell.source, flags=re.M))
    return "\n".join(parts)


def only_at_home(paths):
    "Public names that no page uses but their chapter and the page that defines them."
    texts = {str(path.relative_to(root / "nbs").with_suffix("")): used_text(path) for path in paths}
    places, found = homes(), []
    for name, folders in public_names().items():
        own = {f"{folder}/index" for folder in folders} | places.get(name, set())
        if not any(re.search(rf"\b{name}\b", text) for page, text in texts.items() if page not in own): found.append(name)
    return found


def main():
    paths = sorted(p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    rows, faults = zip(*map(look, paths))
    print(f"{'page':38}{'cells':>6}{'prose':>7}{'exported':>9}{'shown':>7}{'longest':>8}")
    for name, cells, prose, lines, share, longest in rows:
        shown = "" if share is None else f"{share:.0%}"
        print(f"{name:38}{cells:6}{prose:7.0%}{lines:9}{shown:>7}{longest:8}")
    exported, visible = sum(r[3] for r in rows), sum(r[3] * r[4] for r in rows if r[4] is not None)
    print(f"{len(rows)} pages, {exported} exported lines, {visible / exported:.0%} of them shown")
    alone, names = set(only_at_home(paths)), public_names()
    print(f"{len(names)} public names, {len(alone)} of them used on no other page: {', '.join(sorted(alone))}")
    broken = [fault for found in faults for fault in found] + [fault for path in paths for fault in invalid(path)]
    broken += [f"{name}: public, and no page but its own uses it" for name in sorted(alone - RETURNED - USED_AT_HOME)]
    print(*broken, sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__": main()
