"""Which files of code a cell of a page depends on: what it uses of the cells above it, and what these import."""
import ast
import builtins
import re
from functools import cache
from pathlib import Path

from imports import root

PACKAGE = "prompt_packing"


@cache
def parsed(source):
    "The tree of a cell; its lines that are no Python (magics, directives) are left out."
    lines = ["" if line.lstrip().startswith(("%", "!", "#|")) else line
             for line in source.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return ast.parse("")


@cache
def used(tree):
    return {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@cache
def changed(tree):
    "Names that a cell binds, and those whose objects it changes at its top level."
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        for inner in ast.walk(node):
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(inner.name)
            elif isinstance(inner, ast.alias):
                names.add((inner.asname or inner.name).partition(".")[0])
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            elif isinstance(inner, (ast.Attribute, ast.Subscript)) and not isinstance(
                    inner.ctx, ast.Load):
                names.add(base(inner))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            names |= acted_on(node.value)
    return names - {None}


def acted_on(call):
    "`rows` of `rows.append(1)`, `model` of `train(model)`; a function of Python changes nothing."
    if isinstance(call.func, ast.Name):
        return set() if hasattr(builtins, call.func.id) else set(map(base, call.args))
    return {base(call.func)}


def base(node):
    "`a` of `a.b[0].c`."
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def needed(trees, number):
    "The numbers of the cells that a cell needs, itself included, and the names that these use."
    numbers, names = {number}, used(trees[number])
    while True:
        more = {i for i in range(number) if i not in numbers and changed(trees[i]) & names}
        if not more:
            return sorted(numbers), names
        numbers |= more
        for i in more:
            if not is_import(trees[i]):
                names |= used(trees[i])


def is_import(tree):
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body)


def imports(trees, names=None):
    "(module, name) of what is imported, '' for a module; of `names` alone where they are given."
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    if names is None or bound in names:
                        for attribute in attributes(trees, bound, alias.name):
                            yield alias.name, attribute
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if names is None or (alias.asname or alias.name) in names:
                        yield "." * node.level + (node.module or ""), alias.name
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from in_text(node.value)
            elif isinstance(node, ast.List) and f"'-m', '{PACKAGE}'" in ast.unparse(node):
                yield f"{PACKAGE}.cli", ""


def attributes(trees, bound, module):
    "What is taken from `import prompt_packing`; of other modules all."
    if module != PACKAGE:
        return {""}
    found = {node.attr for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Attribute) and base(node.value) == bound}
    return found or {""}


def in_text(text):
    "Imports of a script in a string, and commands of the package."
    for module, names in re.findall(rf"from ({PACKAGE}[\w.]*) import \(?([\w, \n]+)", text):
        for name in re.findall(r"\w+", names):
            yield module, name
    for module in re.findall(rf"^\s*import ({PACKAGE}[\w.]*)", text, re.M):
        yield module, ""
    if re.search(rf"prompt-packing [a-z]|-m {PACKAGE}\b", text):
        yield f"{PACKAGE}.cli", ""
    for name in re.findall(r"\b(\w+)\.py\b", text):
        yield name, ""


@cache
def exports(file):
    "name -> (module, name) of what the `__init__` of a folder imports."
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {alias.asname or alias.name: ("." * node.level + (node.module or ""), alias.name)
            for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def absolute(module, file):
    "A relative import of a file of the package by its whole name."
    level = len(module) - len(module.lstrip("."))
    if not level:
        return module
    parts = file.relative_to(root).with_suffix("").parts[:-level]
    return ".".join([*parts, *filter(None, [module[level:]])])


def files_of(module, name, folder):
    "The files that define a name of a module: of the package, or beside a page in `folder`."
    beside = folder / f"{module}.py"
    if beside.is_file():
        return {beside}
    if module.partition(".")[0] != PACKAGE or "_modidx" in (name, module.split(".")[-1]):
        return set()
    path = root.joinpath(*module.split("."))
    if path.with_suffix(".py").is_file():
        return {path.with_suffix(".py")}
    init = path / "__init__.py"
    if not init.is_file():
        return set()
    if (path / f"{name}.py").is_file():
        return {path / f"{name}.py"}
    homes = [init] if module != PACKAGE else sorted(path.glob("*/__init__.py"))
    for home in homes:
        if name in exports(home):
            source, original = exports(home)[name]
            return files_of(absolute(source, home), original, folder)
    if name or module != PACKAGE:
        return {init, path / name / "__init__.py"} if (path / name).is_dir() else {init}
    return {file for file in path.rglob("*.py") if file.name != "_modidx.py"}


@cache
def direct(file):
    "The files that a file of code imports."
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = set()
    for module, name in imports([tree]):
        found |= files_of(absolute(module, file), name, file.parent)
    return found - {file}


def with_imports(files):
    "These files and all that they import, directly or not."
    known, todo = set(), set(files)
    while todo:
        known |= todo
        todo = set().union(*map(direct, todo)) - known
    return known


def of_cell(sources, number, folder, own=()):
    "The files that cell `number` of a page in `folder` depends on; `own`: what the page exports."
    trees = list(map(parsed, sources))
    numbers, names = needed(trees, number)
    files = set(own)
    for module, name in imports([trees[i] for i in numbers], names):
        files |= files_of(module, name, folder)
    return with_imports(files)


def name_of(file):
    "`bucketing.stream` of the package, `reliability/tiny_models.py` of the pages."
    path = Path(file).relative_to(root)
    if path.parts[0] == PACKAGE:
        return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    return path.relative_to("nbs").as_posix()
