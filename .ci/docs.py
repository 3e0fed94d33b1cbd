"""Build the site into _docs without Quarto's binary, or with `--readme` write README.md from index.ipynb.

Notebooks pass through nbdev's processors, as for Quarto; smalldocs renders them; TeX
becomes MathML, so that no page needs a script from a network; every local link and image
of the result is then looked up.
"""
import re
import shutil
import sys
from inspect import signature
from urllib.parse import unquote, urldefrag

import fastcore.docments
import nbdev.serve
import smalldocs.config
import smalldocs.markdown
import smalldocs.site
from docs_renderer import is_for_use
from imports import root
from latex2mathml.converter import convert
from nbdev.config import get_config
from prompt_packing._modidx import d as index

cfg = get_config()
SITE = cfg.doc_host + cfg.doc_baseurl
LINK = re.compile(r'\b(?:href|src)="([^"]+)"(?:><code>(\w+)(?:\(\))?</code></a>)?')
FONT = re.compile(r"@import url\(https?://[^)]*\);?") # the text falls back to the reader's own


def mathml(tex, options):
    return convert(tex, display="block" if options.get("display_mode") else "inline")


def targets(page, symbols):
    "name -> its address, as a page means it: its own, its folder's, or the only one there is."
    homes = {} # name -> distance -> addresses
    for module, names in symbols.items():
        place = module.split(".", 1)[-1].replace(".", "/")
        near = place.split("/")[0] == page.split("/")[0]
        distance = 2 - near - (place == page.removesuffix("/index"))
        if place == "cli" and not near: # `compare` is the function, not the command
            continue
        for full, (address, _) in names.items():
            name = full.removeprefix(f"{module}.")
            if name[0] != "_" and "." not in name: # these have a heading on the site
                places = homes.setdefault(name, {})
                places.setdefault(distance, []).append(f"/{address}")
    nearest = {name: places[min(places)] for name, places in homes.items()}
    return {name: addresses[0] for name, addresses in nearest.items() if len(addresses) == 1}


class Site(smalldocs.site.Site):
    "Names in backticks lead to the page that defines them; a search lists pages of use first."
    def render_page(self, page):
        self.symbols = targets(page.src.with_suffix("").as_posix(), index["syms"])
        super().render_page(page)
        page.env["math"] = False # it is MathML, and needs no script of another host

    def write_search(self):
        for page in self.pages.values():
            if not is_for_use(page.src): # search.html knows them by their titles
                page.env["title_text"] = f"Source: {page.title}"
        super().write_search()


def build():
    "The whole site; its folder, and the links that lead to no file."
    # annotations stay text: torch and transformers import names for type checkers alone
    fastcore.docments.signature = lambda symbol, eval_str=False: signature(symbol)
    proc, docs = nbdev.serve.proc_nbs(n_workers=0, force=True), root / "_docs"
    shutil.copy(root / "CHANGELOG.md", proc / "changelog.md")
    smalldocs.markdown.math_renderer = mathml
    smalldocs.markdown.looks_like_code = str.isascii # short names in lower case, too
    project = smalldocs.config.load(proc)
    project.website.update({"title": cfg.title, "site-url": SITE, "repo-url": cfg.git_url,
                            "repo-branch": cfg.branch, "description": cfg.description})
    site = Site(project, quiet=True)
    site.build()
    shutil.rmtree(docs, ignore_errors=True)
    shutil.move(proc / "_docs", docs)
    for theme in (docs / "site_libs" / "themes").glob("*.css"):
        theme.write_text(FONT.sub("", theme.read_text(encoding="utf-8")), encoding="utf-8")
    return docs, [f"{page}: {link} leads nowhere" for page, link in site.broken]


def wrong_links(docs):
    """`page: link` for each local link to an anchor that is not there, and for each name that
    leads to another folder although its own has one that is called so."""
    pages = {path: path.read_text(encoding="utf-8") for path in docs.rglob("*.html")}
    anchors = {path: {"", *re.findall(r'\b(?:id|name)="([^"]*)"', text)}
               for path, text in pages.items()}
    names = {path: set(re.findall(r">(\w+)</h3>", text)) for path, text in pages.items()}
    for path, text in pages.items():
        near = set().union(*(names[page] for page in pages if page.parent == path.parent))
        for link, name in LINK.findall(text):
            url, anchor = urldefrag(unquote(link))
            target = (path.parent / url).resolve() if url else path
            if anchor not in anchors.get(target, {anchor}):
                yield f"{path.relative_to(docs)}: {link} leads nowhere"
            elif anchor and name in near and target.parent != path.parent:
                yield f"{path.relative_to(docs)}: {name} leads to a namesake, {link}"


def readme():
    "README.md: prose and prose that cells print, of index.ipynb, links turned to the site."
    from execnb.nbio import read_nb
    parts = ["<!-- Written from nbs/index.ipynb by `make prepare`; edit there. -->"]
    for cell in read_nb(root / "nbs" / "index.ipynb").cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        parts += ["".join(output.data["text/markdown"]) for output in cell.get("outputs", [])]
    text = re.sub(r"^:::.*\n?|\{fig-alt=.*?\}", "", "\n\n".join(parts), flags=re.M)
    text = re.sub(r"\]\(([\w/]+)\.ipynb(#[\w.-]+)?\)", rf"]({SITE}/\1.html\2)", text)
    raw = cfg.git_url.replace("github.com", "raw.githubusercontent.com") + f"/{cfg.branch}"
    return re.sub(r'(\]\(|src=")images/', rf"\1{raw}/nbs/images/", text) + "\n"


if __name__ == "__main__":
    if "--readme" in sys.argv:
        (root / "README.md").write_text(readme(), encoding="utf-8")
        sys.exit()
    docs, wrong = build()
    wrong += wrong_links(docs)
    print(*wrong, sep="\n")
    print(f"{len(list(docs.rglob('*.html')))} pages, {len(wrong)} wrong links")
    sys.exit(bool(wrong))
