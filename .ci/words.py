"""Is a private term left, for which the field has a word? `python .ci/words.py [--strict] [PLACE ...]`

`words.txt` has the terms, their replacements and the exceptions with their reasons. Checked are
the identifiers that the package defines; its messages and help, which are all strings of three
words and more in its code; its docstrings and comments on parameters; and the headings of pages.
Prose of pages is counted and fails nothing. PLACE lists what is found in paths that hold it.
"""
import argparse
import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

from imports import root

CHECKED = ["identifiers", "headings", "messages", "docstrings"]
NOTED = ["prose"] # of pages


class Terms:
    "The terms of `words.txt`, by what they are looked for in."
    def __init__(self, text):
        sections, section = {}, None
        for line in filter(None, map(str.strip, text.splitlines())):
            if line.startswith("["):
                section = sections.setdefault(line.strip("[]"), {})
            elif not line.startswith("#"):
                term, instead = line.rsplit(" | ", 1)
                section[term] = instead
        texts = sections.get("texts", {})
        self.exceptions = sections.get("exceptions", {})
        self.used = set() # exceptions that were met
        self.terms = {"identifiers": compiled(sections.get("identifiers", {})),
                      "headings": compiled({**texts, **sections.get("headings", {})})}
        self.terms |= dict.fromkeys(["messages", "docstrings", "prose"], compiled(texts))

    def found(self, kind, text, name=""):
        "(what was found, what to write instead) of each term in a text."
        if kind == "identifiers":
            met = {name} & set(self.exceptions)
            text = split_name(text)
        else:
            text = " ".join(text.split())
            met = {words for words in self.exceptions if words in text}
            for words in met:
                text = text.replace(words, " ")
        self.used |= met
        if kind == "identifiers" and met:
            return []
        matches = ((term.search(text), instead) for term, instead in self.terms[kind])
        return [(match[0], instead) for match, instead in matches if match]


def compiled(terms):
    return [(re.compile(rf"(?<![\w-])(?:{term})(?![\w-])", re.I), instead)
            for term, instead in terms.items()]


def split_name(name):
    "The words of an identifier: `lay_out_HTMLPage2` has lay, out, html, page."
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()


def names_of(tree):
    "name -> line of what a module defines: functions, classes, arguments, variables, attributes."
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        names[name] = min(node.lineno, names.get(name, node.lineno))
    return names


def docstrings_of(tree):
    "The nodes of docstrings."
    documented = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, documented) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and \
                isinstance(first.value.value, str):
            yield first.value


def messages_of(tree):
    "(line, text) of strings of three words and more that are no docstrings; {} where values go."
    skipped = set(docstrings_of(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= set(ast.walk(node)) - {node}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if len(text.split()) > 2:
            yield node.lineno, text


def comments_of(code):
    "(line, text) of comments, which are the documentation of parameters."
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# %%", "#|")):
            yield token.start[0], token.string.lstrip("# ")


def of_module(path):
    "(kind, line, text, name) of all that is checked in a module."
    code = path.read_text(encoding="utf-8")
    tree = ast.parse(code)
    yield "identifiers", 1, path.stem, path.stem
    for name, line in names_of(tree).items():
        yield "identifiers", line, name, f"{path.stem}.{name}"
    for line, text in messages_of(tree):
        yield "messages", line, text, ""
    for node in docstrings_of(tree):
        yield "docstrings", node.lineno, node.value, ""
    for line, text in comments_of(code):
        yield "docstrings", line, text, ""


def of_page(path):
    "(kind, cell, text, name) of headings and prose; code, formulas and addresses are none."
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        text = re.sub(r"(?s)```.*?```|\$\$.*?\$\$", "", "".join(cell["source"]))
        text = re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$\n]+\$", " x ", text)
        for line in text.splitlines():
            heading = re.match(r"#+ ([^{]*)", line)
            if heading:
                yield "headings", cell["id"], heading[1], ""
        for paragraph in re.split(r"\n\s*\n", re.sub(r"(?m)^#+ .*$", "", text)):
            if paragraph.strip():
                yield "prose", cell["id"], paragraph, ""


def everything(folder):
    "(kind, place, text, name) of a checkout."
    for path in sorted((folder / "prompt_packing").rglob("*.py")):
        if path.name != "_modidx.py":
            for kind, line, text, name in of_module(path):
                yield kind, f"{path.relative_to(folder)}:{line}", text, name
    for path in sorted((folder / "nbs").rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts:
            for kind, cell, text, name in of_page(path):
                yield kind, f"{path.relative_to(folder)}::{cell}", text, name


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("places", nargs="*", help="list what is found in paths that hold one of these, prose too")
    add("--strict", action="store_true", help="fail where a private term is left")
    add("--root", type=Path, default=root, help="another checkout")
    args = parser.parse_args()
    terms = Terms((root / ".ci" / "words.txt").read_text(encoding="utf-8"))
    seen, found = dict.fromkeys(CHECKED + NOTED, 0), dict.fromkeys(CHECKED + NOTED, 0)
    for kind, place, text, name in everything(args.root.resolve()):
        seen[kind] += 1
        faults = terms.found(kind, text, name)
        found[kind] += bool(faults)
        is_listed = any(part in place for part in args.places) if args.places else (
            args.strict and kind in CHECKED)
        for term, instead in faults if is_listed else []:
            where = text if kind in ("identifiers", "headings") else f"... {term} ..."
            print(f"{place}: {kind}: {where!r}: {term!r} is: {instead}")
    for exception in sorted(set(terms.exceptions) - terms.used):
        print(f"exception that nothing needs: {exception}")
    counts = [f"{found[kind]:,} of {seen[kind]:,} {kind}" for kind in CHECKED + NOTED]
    print("with a private term:", ", ".join(counts))
    sys.exit(args.strict and any(found[kind] for kind in CHECKED))


if __name__ == "__main__":
    main()
