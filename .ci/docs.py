"""Build the site into _docs without Quarto's binary, or with `--readme` write README.md from index.ipynb.

Notebooks pass through nbdev's processors, as for Quarto; smalldocs renders them; TeX
becomes MathML, so that no page needs a script from a network; every local link and image
of the result is then looked up.
"""
import html
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from nbdev.config import get_config

root = Path(__file__).resolve().parent.parent
cfg = get_config()
SITE = cfg.doc_host + cfg.doc_baseurl
MATH = re.compile(r'<span class="math (inline|display)">(.*?)</span>', re.S)
# scripts and fonts of other hosts: the text falls back to the reader's own
FOREIGN = re.compile(r'<(?:script|link)[^>]*https?://[^>]*katex[^>]*>(?:\s*</script>)?|'
                     r"<script[^>]*>[^<]*renderMathInElement[^<]*</script>", re.I)
FONT = re.compile(r"@import url\(https?://[^)]*\);?")


def mathml(match):
    from latex2mathml.converter import convert
    tex = re.sub(r"^\\[\[(]|\\[\])]$", "", html.unescape(match[2].strip()))
    return convert(tex, display="block" if match[1] == "display" else "inline")


def build():
    "The whole site; its folder."
    import nbdev.doclinks
    import nbdev.serve
    import smalldocs.cli
    nbdev.doclinks._build_modidx()
    proc, docs = nbdev.serve.proc_nbs(n_workers=0, force=True), root / "_docs"
    shutil.copy(root / "CHANGELOG.md", proc / "changelog.md")
    status = smalldocs.cli.main(["render", str(proc), "--quiet"])
    if status:
        sys.exit(status)
    shutil.rmtree(docs, ignore_errors=True)
    shutil.move(proc / "_docs", docs)
    for page in docs.rglob("*.html"):
        text = FOREIGN.sub("", MATH.sub(mathml, page.read_text(encoding="utf-8")))
        # nbdev writes links to names with the published site's address
        up = "../" * (len(page.relative_to(docs).parts) - 1) or "./"
        page.write_text(text.replace(f'href="{SITE}/', f'href="{up}'), encoding="utf-8")
    for theme in (docs / "site_libs" / "themes").glob("*.css"):
        theme.write_text(FONT.sub("", theme.read_text(encoding="utf-8")), encoding="utf-8")
    return docs


class Page(HTMLParser):
    "The links that leave a page, and the anchors that it offers."
    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        self.links += [attrs[name] for name in ("href", "src") if attrs.get(name)]


def broken_links(docs):
    "`page: link` for each local link or image that leads nowhere."
    pages = {path.resolve(): Page(path) for path in docs.rglob("*.html")}
    return [f"{path.relative_to(docs)}: {link}" for path, page in pages.items()
            for link in page.links if leads_nowhere(link, path, docs, pages)]


def leads_nowhere(link, path, docs, pages):
    url, anchor = urldefrag(link)
    if urlsplit(url).scheme or url.startswith("//") or link == "#":
        return False
    name = unquote(urlsplit(url).path)
    base = cfg.doc_baseurl.rstrip("/") + "/"
    target = docs / name.removeprefix(base).lstrip("/") if name[:1] == "/" else path.parent / name
    target = target.resolve() if name else path
    if target.is_dir():
        target /= "index.html"
    lacks = target in pages and anchor and unquote(anchor) not in pages[target].anchors
    return lacks or not target.exists()


def readme():
    "README.md: prose, code and outputs of index.ipynb, links turned to the site."
    from execnb.nbio import read_nb
    parts = ["<!-- Written from nbs/index.ipynb by `make prepare`; edit there. -->"]
    for cell in read_nb(root / "nbs" / "index.ipynb").cells:
        source = cell.source.strip()
        hidden = re.search(r"^#[|] *(hide|export|default_exp|code-fold)", source, re.M)
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"^:::.*\n?|\{fig-alt=.*?\}", "", source, flags=re.M))
        elif cell.cell_type == "code" and not hidden:
            if "#| echo: false" not in source:
                code = re.sub(r"^#[|] .*\n", "", source, flags=re.M)
                parts.append(f"```python\n{code}\n```")
            parts += filter(None, map(shown, cell.get("outputs", [])))
    text = "\n\n".join(parts)
    text = re.sub(r"\]\((?!https?:|#|images/)([\w/]+)\.ipynb(#[\w.-]+)?\)", rf"]({SITE}/\1.html\2)", text)
    raw = cfg.git_url.replace("github.com", "raw.githubusercontent.com") + f"/{cfg.branch}"
    return text.replace("](images/", f"]({raw}/nbs/images/") + "\n"


def shown(output):
    "An output as GitHub's Markdown shows it; pictures of code cells are left to the site."
    data = output.get("data", {})
    if "text/markdown" in data:
        return re.sub(r"^:::.*\n?", "", "".join(data["text/markdown"]), flags=re.M)
    text = "" if "image/png" in data else "".join(data.get("text/plain", output.get("text", "")))
    return "\n".join("    " + line for line in text.rstrip().splitlines())


def synced_quarto():
    "_quarto.yml with title, URLs and description as settings.ini, their one place, has them."
    text = (root / "_quarto.yml").read_text(encoding="utf-8")
    for key, value in {"title": cfg.title, "site-url": SITE, "repo-url": cfg.git_url,
                       "description": cfg.description}.items():
        text = re.sub(rf"(?m)^(\s+{key}: ).*$", rf'\1"{value}"', text)
    return text


def main():
    if "--readme" in sys.argv:
        (root / "README.md").write_text(readme(), encoding="utf-8")
        return (root / "_quarto.yml").write_text(synced_quarto(), encoding="utf-8")
    docs = build().resolve()
    bad = broken_links(docs)
    print(*bad, sep="\n")
    print(f"{len(list(docs.rglob('*.html')))} pages, {len(bad)} broken links")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
