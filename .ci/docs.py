"""Build the site into _docs without Quarto's binary, or with `--readme` write README.md from index.ipynb.

Notebooks pass through nbdev's processors, as for Quarto; smalldocs renders them; TeX becomes MathML, so that no page
needs a script from a network; every local link and image of the result is then looked up.
"""
import argparse
import html
import re
import shutil
import sys
from base64 import b64decode
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

root = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(root), str(root / ".ci")]
math_span = re.compile(r'<span class="math (inline|display)">(.*?)</span>', re.S)
outer_script = re.compile(r'<(?:script|link)[^>]*https?://[^>]*katex[^>]*>(?:\s*</script>)?', re.I)
outer_font = re.compile(r"@import url\(https?://[^)]*\);?")  # the text falls back to the reader's own fonts
commands = ("prompt_packing.cli", "prompt_packing.cli.training", "prompt_packing.cli.corpus")  # `compare` in prose is the function, not the command
katex_call = re.compile(r"<script[^>]*>[^<]*renderMathInElement[^<]*</script>")


def mathml(match):
    from latex2mathml.converter import convert
    tex = html.unescape(match[2].strip())
    tex = re.sub(r"^\\[\[(]|\\[\])]$", "", tex)
    return convert(tex, display="block" if match[1] == "display" else "inline")


def process():
    "nbdev's processors over nbs/, into _proc."
    import nbdev.doclinks
    import nbdev.serve
    nbdev.doclinks._build_modidx()
    lookup = nbdev.doclinks._build_lookup_table
    nbdev.doclinks._build_lookup_table = lambda *libs: lookup(*libs[:2], commands)
    proc = nbdev.serve.proc_nbs(n_workers=0, force=True)
    shutil.copy(root / "CHANGELOG.md", proc / "changelog.md")
    return proc


def build():
    "The whole site; its folder."
    import smalldocs.cli
    proc, docs = process(), root / "_docs"
    code = smalldocs.cli.main(["render", str(proc), "--quiet"])
    if code: sys.exit(code)
    shutil.rmtree(docs, ignore_errors=True)
    shutil.move(proc / "_docs", docs)
    for page in docs.rglob("*.html"):
        text = math_span.sub(mathml, page.read_text(encoding="utf-8"))
        text = with_relative_links(katex_call.sub("", outer_script.sub("", text)), page.relative_to(docs))
        for change in (with_names_in_cells, accessible, with_readable_tables, with_kinds, with_sentences, with_messages_once, with_dunders, with_card, with_breaks): text = change(text)
        page.write_text(text, encoding="utf-8")
    for theme in (docs / "site_libs" / "themes").glob("*.css"):
        theme.write_text(outer_font.sub("", theme.read_text(encoding="utf-8")), encoding="utf-8")
    return docs


def accessible(text):
    "What scrolls sideways can be reached by keyboard; icons beside words are not read out."
    text = re.sub(r'<(pre|div) class="(sourceCode|sd-table|cell-output)', r'<\1 tabindex="0" class="\2', text)
    text = re.sub(r'<pre>|<math (?=[^>]*display="block")', lambda m: m[0].rstrip(">").rstrip() + ' tabindex="0"' + (">" if m[0] == "<pre>" else " "), text)
    text = re.sub(r'<th( style="[^"]*")?></th>', r'<td\1></td>', text)  # a head without words is no head
    text = re.sub(r'(<a class="[^"]*(?:sidebar-item-toggle|text-start)[^>]*) role="navigation"', r'\1 role="button"', text)
    text = text.replace('<nav class="navbar', '<nav aria-label="Site" class="navbar').replace('<div class="toc-actions"', '<div class="toc-actions" role="navigation" aria-label="This page on GitHub"')
    for start, name in (('<nav class="quarto-secondary-nav"', "Section"), ('<nav id="quarto-sidebar"', "Pages"), ('<nav class="page-navigation"', "Next and previous page")):
        text = text.replace(start, f'{start} aria-label="{name}"')
    return re.sub(r'(<i class="bi [^"]*") role="img"', r'\1 aria-hidden="true"', text)


def with_names_in_cells(text):
    "Cells of wide tables of words know their column's name, so that a narrow screen can show a row as a list."
    def named(match):
        table = match[0]
        heads = [re.sub(r"<[^>]*>", "", head).strip() for head in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", re.split("</thead>", table)[0], re.S)]
        if len(heads) < 3 or "dataframe" in table[:200] or "parameters" in table[:200]: return table
        body = re.split("</thead>", table)[1]
        if sum(map(is_words, re.findall(r"<td[^>]*>(.*?)</td>", body, re.S))) < len(re.findall("<td", body)) / 2: return table

        def row(found):
            names = iter(heads)
            return re.sub(r"<td(?=[ >])", lambda m: f'<td data-name="{html.escape(next(names, ""))}"', found[0])
        table = re.sub(r"<tr.*?</tr>", lambda m: m[0] if "<th" in m[0] else row(m), table, flags=re.S)
        return re.sub(r'<table class="', '<table class="stacked ', table, count=1)
    return re.sub(r"<table class=.*?</table>", named, text, flags=re.S)


def with_separators(text):
    "Numbers of five digits and more with commas, and where a table has such numbers, those of four digits too."
    if not re.search(r"<td[^>]*>\d{5,}(\.\d+)?</td>", text): return text
    return re.sub(r"(<td[^>]*>)(\d{4,})(?=(\.\d+)?</td>)", lambda m: f"{m[1]}{int(m[2]):,}", text)


def with_breaks(text):
    "Long names in tables may break after an underscore or between two words written together, and nowhere else."
    def broken(name): return re.sub(r"(?<=[a-z0-9])_(?=[a-z0-9])|(?<=[a-z])(?=[A-Z])", lambda m: m[0] + "<wbr>", name[0]) if len(name[0]) > 15 else name[0]
    def of_cell(cell): return re.sub(r"(<code[^>]*>)([^<]*)(?=</code>)", lambda m: m[1] + re.sub(r"\w+", broken, m[2]), cell[0])
    return re.sub(r"<td[ >].*?</td>", of_cell, text, flags=re.S)


def is_words(cell):
    "Whether a table's cell is read as text, not compared as a number."
    plain = re.sub(r"<[^>]*>|&\w+;", "", cell).strip()
    if plain in ("", "NaN", "None", "nan", "inf"): return False
    return sum(map(str.isalpha, plain)) > sum(map(str.isdigit, plain))


def with_words_left(table):
    "A data frame's table: columns of text, and their heads, get a class; long texts a second one, since only they may wrap."
    rows = [re.findall(r"<td>(.*?)</td>", row, re.S) for row in re.findall(r"<tr.*?</tr>", table, re.S)]
    width = max(map(len, rows), default=0)
    words = [any(is_words(row[i]) for row in rows if len(row) == width) for i in range(width)]

    def marked(row):
        cells = re.findall(r"<(?:td|th)[^>]*>.*?</(?:td|th)>", row[0], re.S)
        if "colspan" in row[0] or len(cells) < width: return row[0]
        for i, cell in enumerate(cells[len(cells) - width:]):
            if not words[i] or cell == "<th></th>": continue
            kind = "words long" if len(cell) > 50 and cell.startswith("<td") else "words"
            cells[len(cells) - width + i] = re.sub(r"^<(t[dh])", rf'<\1 class="{kind}"', cell)
        return row[1] + "\n".join(cells) + row[3]
    return re.sub(r"(<tr[^>]*>)(.*?)(</tr>)", marked, table, flags=re.S)


def with_readable_tables(text):
    "Tables of numbers and text as `with_separators` and `with_words_left` write them."
    text = re.sub(r"<table.*?</table>", lambda m: with_separators(m[0]), text, flags=re.S)
    return re.sub(r'<table[^>]*class="dataframe".*?</table>', lambda m: with_words_left(m[0]), text, flags=re.S)


def with_kinds(text):
    "Tables of parameters and pictures much wider than high get a class, for narrow screens."
    text = re.sub(r'<table class="([^"]*)">(?=\s*(?:<colgroup>.*?</colgroup>\s*)?<thead>\s*<tr[^>]*>\s*<th[^>]*></th>\s*<th[^>]*>(?:<strong>)?Type)', r'<table class="\1 parameters">', text, flags=re.S)

    def marked(match):
        size = b64decode(match[2])[16:24]
        width, height = int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")
        return f'<img class="wide" {match[1]}{match[2]}' if width > 2.7 * height else match[0]
    return re.sub(r'<img ([^>]*src="data:image/png;base64,)([A-Za-z0-9+/]{32})', marked, text)


def with_sentences(text):
    "Long printed lines wrap, each with its further lines indented, unless what was printed has columns."
    def wrapped(match):
        lines = html.unescape(match[2]).splitlines()
        if max(map(len, lines), default=0) <= 40 or any(re.search(r"\S {2,}\S", line) for line in lines): return match[0]
        spans = "".join(f'<span class="line">{line}\n</span>' for line in match[2].splitlines())
        return f'{match[1]}<pre class="sentences" tabindex="0"><code>{spans}</code></pre>'
    output = r'(<div[^>]*class="cell-output cell-output-(?:stdout|display)[^>]*>\s*)<pre tabindex="0"><code>([^<]*)</code></pre>'
    return re.sub(output, wrapped, text)


def with_messages_once(text):
    "A message that is repeated line by line stands once, with its number."
    def counted(match):
        groups = [(line, len(list(same))) for line, same in groupby(match[2].splitlines())]
        return match[1] + "\n".join(line + f" ({n} times)" * (n > 1) for line, n in groups) + match[3]
    return re.sub(r'(<div[^>]*cell-output-stderr[^>]*>\s*<pre tabindex="0"><code>)([^<]*)(</code>)', counted, text)


def with_dunders(text):
    "Headings of special methods with their underscores, which Markdown takes for emphasis."
    return re.sub(r"(<h[2-6] [^>]*>(?:\w+\.)?)<strong>([a-z]+)</strong>(?=</h)", r"\1__\2__", text)


def with_card(text):
    "The picture that others show beside a link to a page."
    from nbdev.config import get_config
    cfg = get_config()
    picture = f'<meta property="og:image" content="{cfg.doc_host}{cfg.doc_baseurl}/images/front.png">'
    return text if "og:image" in text else text.replace('<meta property="og:title"', f'{picture}\n<meta property="og:title"', 1)


def with_relative_links(text, page):
    "Links to names, which nbdev writes with the published site's address, made relative to the page."
    from nbdev.config import get_config
    cfg = get_config()
    up = "../" * (len(page.parts) - 1) or "./"
    return text.replace(f'href="{cfg.doc_host}{cfg.doc_baseurl}/', f'href="{up}')


class Page(HTMLParser):
    "The links that leave a page, the anchors that it offers, and what a reader cannot read: links left as Markdown, pictures without words."
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.unread, self.inside = [], set(), [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.inside += tag in ("code", "pre", "script", "style")
        self.anchors |= {attrs.get("id"), attrs.get("name")} - {None}
        if tag == "img" and not attrs.get("alt"): self.unread.append("a picture without alternative text")
        self.links += [attrs[k] for k in ("href", "src") if attrs.get(k)]

    def handle_endtag(self, tag): self.inside -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data):
        if not self.inside and re.search(r"\]\([\w./#-]+\)", data): self.unread.append("a link left as Markdown: " + data.strip()[:80])


def broken_links(docs):
    "`page: link` for each local link or image that leads nowhere."
    from nbdev.config import get_config
    base = get_config().doc_baseurl.rstrip("/") + "/"
    pages = {p.resolve(): Page(p.read_text(encoding="utf-8")) for p in docs.rglob("*.html")}
    bad = []
    for path, page in pages.items():
        bad += [f"{path.relative_to(docs.resolve())}: {words}" for words in page.unread]
        for link in page.links:
            url, anchor = urldefrag(link)
            if urlsplit(url).scheme or url.startswith("//") or link == "#": continue
            name = unquote(urlsplit(url).path)
            target = docs / name.removeprefix(base).lstrip("/") if name.startswith("/") else path.parent / name if name else path
            target = target.resolve()
            if target.is_dir(): target /= "index.html"
            lost = not target.exists() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors)
            if lost: bad.append(f"{path.relative_to(docs.resolve())}: {link}")
    return bad


def readme():
    "README.md: index.ipynb's prose, code and outputs, links turned to the site and the repository."
    from execnb.nbio import read_nb
    from nbdev.config import get_config
    cfg = get_config()
    parts = ["<!-- Written from nbs/index.ipynb by `make prepare`; edit there. -->"]
    for cell in read_nb(root / "nbs" / "index.ipynb").cells:
        source = cell.source.strip()
        if cell.cell_type == "markdown": parts.append(side_by_side(source))
        elif cell.cell_type == "code" and not re.search(r"^#[|] *(hide|export|default_exp|code-fold)", source, re.M):
            code = re.sub(r"^#[|] .*\n", "", source, flags=re.M)
            if "#| echo: false" not in source: parts.append(f"```python\n{code}\n```")
            parts += [text for out in cell.get("outputs", []) if (text := shown(out))]
    return with_public_links("\n\n".join(parts), cfg) + "\n"


def with_public_links(text, cfg):
    "Links to notebooks become links to the site, pictures those of the repository."
    site = cfg.doc_host + cfg.doc_baseurl
    text = re.sub(r"\]\((?!https?:|#|images/)([\w/]+)\.ipynb(#[\w.-]+)?\)", rf"]({site}/\1.html\2)", text)
    return re.sub(r'(\]\(|src=")images/', rf"\1{raw_url(cfg)}/nbs/images/", text)


def side_by_side(text):
    "The page's two columns as a table, since GitHub knows no columns; GitHub also needs the picture's width."
    text = re.sub(r"::: \{\.front\}\n::: \{\.front-code\}", "<table><tr><td>", text)
    text = re.sub(r":::\n::: \{\.front-picture\}", "</td><td>", text)
    text = re.sub(r":::\n:::", "</td></tr></table>", text)
    return re.sub(r'!\[(.*?)\]\((\S+)\)\{fig-alt=(".*?")\}', r'<img width="360" src="\2" alt=\3>\n\n\1', text)


def raw_url(cfg):
    "Where the package index finds the repository's pictures."
    return cfg.git_url.replace("github.com", "raw.githubusercontent.com") + "/" + cfg.branch


def shown(output):
    "An output as GitHub's Markdown shows it; pictures of code cells are left to the site."
    data = output.get("data", {})
    if "text/markdown" in data: return "".join(data["text/markdown"])
    if "image/png" in data: return ""
    if "text/html" in data and "dataframe" in "".join(data["text/html"]): return markdown_table("".join(data["text/html"]))
    text = "".join(data.get("text/plain", output.get("text", "")))
    return "\n".join("    " + line for line in text.rstrip().splitlines())


def markdown_table(text):
    "A data frame's HTML as a Markdown table."
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr.*?</tr>", text, re.S)]
    lines = ["| " + " | ".join(cell.replace("|", "&#124;") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def synced_quarto():
    "_quarto.yml with title, URLs and description as settings.ini has them, the one place where they are edited."
    from nbdev.config import get_config
    cfg = get_config()
    text = (root / "_quarto.yml").read_text(encoding="utf-8")
    for key, value in {"title": cfg.title, "site-url": cfg.doc_host + cfg.doc_baseurl, "repo-url": cfg.git_url,
                       "href": cfg.git_url, "description": cfg.description, "repo-branch": cfg.branch}.items():
        old = '"https?:.*"' if key == "href" else ".*"
        text = re.sub(rf'(?m)^(\s+{key}: ){old}$', lambda m: f'{m[1]}"{value}"' if key != "repo-branch" else m[1] + value, text)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write README.md and _quarto.yml's URLs, build nothing")
    args = parser.parse_args()
    if args.readme:
        (root / "README.md").write_text(readme(), encoding="utf-8")
        return (root / "_quarto.yml").write_text(synced_quarto(), encoding="utf-8")
    docs = build()
    bad = broken_links(docs)
    print(*bad, sep="\n")
    print(f"{len(list(docs.rglob('*.html')))} pages, {len(bad)} broken links")
    sys.exit(bool(bad))


if __name__ == "__main__": main()
