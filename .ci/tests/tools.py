"""Tests of what the pages cannot test: `python .ci/tests/tools.py`."""
import ast
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
import check
import dependencies
import evidence
from asserts import BothSides
from docs import targets, wrong_links
from docs_renderer import is_for_use
from outputs import difference
from words import Terms, comments_of, messages_of, names_of, split_name


def test_links():
    "A name prefers its own page, then its folder; of namesakes elsewhere none is linked."
    symbols = {f"lib.{module}": {f"lib.{module}.{name}": (module, "") for name in names}
               for module, names in {"a.one": ["verify", "One"], "a.two": ["verify"],
                                     "b.three": ["verify", "_own", "One.run"],
                                     "cli": ["One"]}.items()}
    assert targets("a/two", symbols) == {"verify": "/a.two", "One": "/a.one"}
    assert targets("b/index", symbols) == {"verify": "/b.three", "One": "/a.one"}
    assert targets("cli", symbols) == {"One": "/cli"}
    assert targets("guides/x", symbols) == {"One": "/a.one"}


def test_pages_of_use():
    "Pages in the first sidebar are for use, at any depth; what others end with is not."
    pages = ["index.ipynb", "cli/index.ipynb", "bucketing/packing.ipynb", "changelog.md"]
    assert all(map(is_for_use, pages))
    assert not any(map(is_for_use, ["steps.ipynb", "bucketing/stratified_steps.ipynb", "foundation/text_files.ipynb"]))


def test_wrong_links():
    "An anchor that is not there, and a name that leads to a namesake, are found."
    pages = {"a/own.html": '<h3 id="run">run</h3>',
             "a/page.html": '<a href="../b/other.html#run"><code>run</code></a>'
                            '<a href="own.html#run"><code>run</code></a>'
                            '<a href="../b/other.html#run">another run</a>'
                            '<a href="own.html#gone">gone</a><a href="https://x.y/#z">z</a>',
             "b/other.html": '<h3 id="run">run</h3><a href="#run"><code>run()</code></a>'}
    with TemporaryDirectory() as folder:
        for name, text in pages.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert sorted(wrong_links(Path(folder).resolve())) == [
            "a/page.html: own.html#gone leads nowhere",
            "a/page.html: run leads to a namesake, ../b/other.html#run"]


def test_asserts():
    "What a failing assertion says."
    def said(code):
        tree = ast.fix_missing_locations(BothSides().visit(ast.parse(code)))
        try:
            exec(compile(tree, "cell", "exec"), {})
        except AssertionError as error:
            return str(error)

    assert said("assert 1 + 1 == 2 and 1 < 2 < 3") is None
    assert said("x = 3\nassert x - 1 == 5") == "x - 1 == 5, with 2 and 5"
    assert said("def f():\n    assert 0 < 7 < 5\nf()") == "0 < 7 < 5, with 0 and 7 and 5"
    assert said("assert 'a' in 'a' and 'b' in 'a'") == "'b' in 'a', with 'b' and 'a'"
    assert said("assert 1 == 2, 'mine'") == "mine"
    assert said("x = 'cat'\nassert x.startswith('d')") == "x.startswith('d')"
    calls = "n = []\ndef f():\n    n.append(1)\n    return len(n)\nassert f() == 2"
    assert said(calls) == "f() == 2, with 1 and 2" # computed once


def test_outputs():
    "What may differ, and what may not."
    def said(text):
        return [dict(output_type="stream", name="stdout", text=[text])]
    alike = [("loss 0.6931", "loss 0.6934"), ("error 3e-08", "error 9.1e-07"), ("0.04 of 1,000", "0.05 of 1,005"),
             ("<f at 0x7f3a91b2c0>", "<f at 0x5512ab3400>"), ("a.py#L12", "a.py#L14"), ("a   b\n----", "a b\n--------"),
             ("10^-6", "10^-7"), ("{'train_runtime': '0.03', 'loss': '1'}", "{'train_runtime': '0.07', 'loss': '1'}")]
    apart = [("padding 0.048%", "padding 1.97%"), ("9.37%", "5.70%"), ("5 rows", "6 rows"), ("100 rows", "103 rows"),
             ("exact", "not exact"), ("a", "a b"), ("error 1e-06", "error 1e-03"), ("bfloat16", "float16"), ("x -1.0", "x 1.0"), ("10^-6", "10^-3"), ("sha 3e12345", "sha 4e12345")]
    for a, b in alike:
        assert difference(said(a), said(b)) is None, (a, b, difference(said(a), said(b)))
    for a, b in apart:
        assert difference(said(a), said(b)) and difference(said(b), said(a)), (a, b)
    warning = [dict(output_type="stream", name="stderr", text=["a warning"])]
    assert difference([], warning) is None and difference(said("a"), []) is not None
    styled = [[dict(output_type="execute_result", data={
        "text/plain": [f"<Styler at 0x{number}>"],
        "text/html": [f"<style>#T_{number} {{}}</style><td id='T_{number}'>{number}</td>"]})]
        for number in (11111111, 22222222)]
    assert difference(styled[0], styled[0]) is None and difference(*styled)
    print(len(alike) + len(apart) + 2, "pairs compared")


def a_page(folder, *sources):
    "A notebook with a title and these code cells; its path."
    cells = [dict(cell_type="markdown", id="0", metadata={}, source="# Title")] + [
        dict(cell_type="code", id=str(i), metadata={}, source=source, outputs=[],
             execution_count=None) for i, source in enumerate(sources, 1)]
    path = Path(folder, "page.ipynb")
    path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    return path


def test_cells():
    "Relative imports are refused, long exported cells too; those over 100 lines are noted."
    def lines(number):
        return "#| export\n" + "\n".join(f"x = {i}" for i in range(number - 1))
    with TemporaryDirectory() as folder:
        page = a_page(folder, "from .rows import a", "def f():\n    from .. import b",
                      "from prompt_packing.rows import c", lines(100), lines(101), lines(121))
        faults = [" ".join(fault.split()[:4]) for fault in check.faults(page)]
        assert faults == ["cell 1 imports .rows:", "cell 2 imports ..:", "cell 6 exports 121"]
        assert list(check.long_cells(page)) == ["cell 5 exports 101 lines",
                                                "cell 6 exports 121 lines"]


def test_sizes():
    "Lines of code have no docstrings, comments and empty lines; a folder above its ceiling is named."
    source = '"""Doc.\n\nMore."""\n\n# a comment\nx = """a\nb"""\ndef f():\n    "Doc."\n    return 1\n'
    assert check.code_lines(source) == 4
    with TemporaryDirectory() as folder:
        for name in ("cli.py", "tasks/labels.py", "tasks/task.py", "_modidx.py"):
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        assert check.sizes(Path(folder)) == {"cli and the top": 4, "tasks": 8}
    rows = {line[:20].strip(): line[20:].split() for line in check.table({"tasks": 700, "new": 3})}
    assert rows["tasks"] == ["700", "690", "10", "above"] and rows["recurrent"] == ["0", "580"]
    assert rows["new"] == ["3", "0", "3", "above"] and rows["together"] == ["703", "9,850"]


def stale(page):
    "The ids of a page's stale cells, as a new process would find them."
    for cached in (dependencies.direct, dependencies.exports, evidence.same_code):
        cached.cache_clear()
    return "".join(result.cell for result in evidence.results(page) if evidence.is_stale(result))


def test_stale_results():
    "A change of one module makes those cells stale that use it, directly or not, and no others."
    modules = {"__init__": "", "base": '"Doc."\nx = 1', "loaders": "from .base import x\ny = x",
               "losses": "def double(z):\n    two = 2\n    return two * z\nz = double(3)",
               "cli": "def main(): pass"}
    slow = "#| slow\n"
    cells = ["from prompt_packing.loaders import y\nfrom prompt_packing.losses import z",
             "import helper", "def train():\n    return y",  slow + "train()", slow + "z",
             slow + 'run("from prompt_packing.losses import z")', slow + "helper.go()",
             slow + 'run("prompt-packing padding a.txt")', slow + "1 + 1", "z"]
    with TemporaryDirectory() as folder, patch.object(dependencies, "root", Path(folder)), \
            patch.object(evidence, "root", Path(folder)):
        def git(*command):
            return subprocess.check_output(["git", "-C", folder, "-c", "user.name=a", "-c",
                                            "user.email=a@b.c", *command], text=True)
        for place in ("prompt_packing", "nbs"):
            Path(folder, place).mkdir()
        paths = {name: Path(folder, "prompt_packing", f"{name}.py") for name in modules}
        paths["helper"] = Path(folder, "nbs", "helper.py")
        for name, code in {**modules, "helper": "def go(): pass"}.items():
            paths[name].write_text(code)
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "first")
        page = a_page(Path(folder, "nbs"), *cells)
        notebook = json.loads(page.read_text())
        for cell in notebook["cells"][4:]:
            cell["metadata"]["measured"] = "commit " + git("rev-parse", "HEAD").strip()
            cell["outputs"] = [dict(output_type="stream", name="stdout", text=["1"])]
        page.write_text(json.dumps(notebook))
        assert stale(page) == ""
        changes = {"base": ("x = 2", "4"), "loaders": ("y = 0", "4"), "losses": ("z = 0", "56"),
                   "helper": ("def go(): return 1", "7"), "cli": ("", "8")}
        for name, (code, expected) in changes.items():
            before = paths[name].read_text()
            paths[name].write_text(code)
            assert stale(page) == expected, (name, stale(page))
            paths[name].write_text(before)
        paths["base"].write_text('__version__ = "2"\n"Other words."\n# and a comment\nx = 1')
        losses = paths["losses"].read_text()
        paths["losses"].write_text(losses.replace("two", "factor")) # a local variable
        assert stale(page) == ""
        paths["losses"].write_text(losses.replace("(z)", "(number)").replace("* z", "* number"))
        assert stale(page) == "56" # a parameter may be passed by its name
        paths["losses"].write_text(losses)
        paths["base"].write_text("x = 2")
        assert stale(page) == "4"
        first, *_ = evidence.lines(page).values()
        assert "1 of 6 outputs measured at" in first and "before changes to base" in first, first
        cell = notebook["cells"][4]
        for words in ("", "commit 12345 with uncommitted changes", "commit 0123abc"):
            cell["metadata"]["measured"] = words
            page.write_text(json.dumps(notebook))
            assert stale(page) == ("" if words == "commit 0123abc" else "4"), words
        assert "which this clone does not have" in " ".join(evidence.lines(page).values())


def test_words():
    "Private terms are found in names, messages and headings; plain English is none."
    terms = Terms((Path(__file__).parents[1] / "words.txt").read_text(encoding="utf-8"))
    private = {"identifiers": ["is_whole", "StepCut", "cut_rows", "Looks", "pass_cost", "found", "_own"],
               "headings": ["The look", "Planned steps", "Random cuts", "Figures of chapters"],
               "messages": ["batches come ready-made", "the losses of the parts are added",
                            "it is cut into rows", "a look at the loss", "logits of targets alone"]}
    plain = {"identifiers": ["partial", "cutoff", "always", "lookup", "outlook_path", "dealer"],
             "headings": ["Look up a head", "Three ways to find out", "Cut padding by half",
                          "Part of a checkpoint", "The head alone"],
             "messages": ["a whole number is needed", "in this way", "a part of the model",
                          "deal with errors", "it looks like text", "one pass over the data",
                          "the head and its loss", "a great deal of memory", "apart from that"]}
    for kind, texts in private.items():
        for text in texts:
            assert terms.found(kind, text, text), text
    for kind, texts in plain.items():
        for text in texts:
            assert not terms.found(kind, text, text), text
    assert terms.found("identifiers", "part", "labels.part") == [] # an exception
    code = '''def f(first, *, second=1): # what it is
    "Docstring of four words."
    self.third = f"no {first} here, sorry"
    raise ValueError("too short")'''
    assert set(names_of(ast.parse(code))) == {"f", "first", "second", "third"}
    assert list(messages_of(ast.parse(code))) == [(3, "no {} here, sorry")]
    assert list(comments_of(code)) == [(1, "what it is")]
    assert split_name("lay_out_HTMLPage2") == "lay out html page"


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(name)
