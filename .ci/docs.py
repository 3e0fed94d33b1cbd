"""Build the site into _docs without Quarto's binary, or with `--readme` write README.md from index.ipynb.

Notebooks pass through nbdev's processors, as for Quarto; smalldocs renders them; TeX
becomes MathML, so that no page needs a script from a network; every local link and image
of the result is then looked up.
"""
import json
import re
import shutil
import sys
from collections import Counter
from inspect import signature
from urllib.parse import unquote, urldefrag

import fastcore.docments
import nbdev.serve
import smalldocs.config
import smalldocs.markdown
import smalldocs.site
from docs_renderer import is_for_use
from imports import root
from keywords import KEYWORDS
from latex2mathml.converter import convert
from nbdev.config import get_config
from prompt_packing._modidx import d as index

cfg = get_config()
SITE = cfg.doc_host + cfg.doc_baseurl
LINK = re.compile(r'\b(?:href|src)="([^"]+)"(?:><code>(\w+)(?:\(\))?</code></a>)?')
CODE = " \N{INVISIBLE SEPARATOR} " # between prose and code of a section, in the index of the search
LATER = {"benchmarks", "reliability", "evidence", "changelog"} # after guides in a search
FONT = re.compile(r"@import url\(https?://[^)]*\);?") # the text falls back to the reader's own
NOT_FOUND = f"""---
title: This page is not here
search: false
---

It may have moved: pages and folders were renamed in version 0.3. Use the search at the top, or
begin with one of these:

* [Start]({SITE}/index.html), and all guides
* [Quickstart]({SITE}/guides/quickstart.html)
* [Troubleshooting]({SITE}/troubleshooting.html): symptoms and messages
* [API reference]({SITE}/api.html): every public name
"""


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


def search_text(rules, state):
    "The prose under each heading, for the index of the search; code is kept beside it."
    parts = [{"id": "", "title": "", "text": [], "code": []}]
    for before, token in zip([None, *state.tokens], state.tokens):
        if token.type == "heading_open":
            attributes = token.meta.get("attrs")
            parts.append({"id": attributes.id if attributes else "",
                          "title": token.meta.get("text", ""), "text": [], "code": []})
        elif token.type == "inline" and not (before and before.type == "heading_open"):
            parts[-1]["text"].append(smalldocs.markdown.plain(token.children))
        elif token.type in ("fence", "code_block") and not token.info.startswith("{="):
            parts[-1]["code"].append(token.content)
    for part in parts:
        part["text"], code = (" ".join(" ".join(part[kind]).split()) for kind in ("text", "code"))
        part["text"] += CODE * bool(code) + code
    state.env["search"] = [part for part in parts if part["text"] or part["id"]]


class Site(smalldocs.site.Site):
    "Names in backticks lead to the page that defines them; a search lists pages of use first."
    def render_page(self, page):
        self.symbols = targets(page.src.with_suffix("").as_posix(), index["syms"])
        super().render_page(page)
        page.env["math"] = False # it is MathML, and needs no script of another host

    def write_search(self):
        """The index that search.html reads. Of each page it has the rank (0: for use, 1: evidence
        and changes, 2: source) and the words of readers that the page itself does not use."""
        super().write_search()
        file = self.out / "search.json"
        pages = {str(page.out): page for page in self.pages.values()}
        entries = json.loads(file.read_text(encoding="utf-8"))
        many = Counter(entry["section"] for entry in entries)
        for entry in entries:
            page = pages[entry["href"].split("#")[0]].src.with_suffix("").as_posix()
            entry["text"], _, entry["code"] = entry["text"].partition(CODE)
            entry["rank"] = 2
            if is_for_use(f"{page}.ipynb") or page == "changelog":
                entry["rank"] = int(page.split("/")[0] in LATER)
            entry["keywords"] = KEYWORDS.get(page, "")
            if entry["rank"] == 2:
                entry["title"] = f"Source: {entry['title']}"
            if many[entry["section"]] > 3: # says nothing in a list of results
                entry["section"] = ""
        file.write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")


def build():
    "The whole site; its folder, and the links that lead to no file."
    # annotations stay text: torch and transformers import names for type checkers alone
    fastcore.docments.signature = lambda symbol, eval_str=False: signature(symbol)
    proc, docs = nbdev.serve.proc_nbs(n_workers=0, force=True), root / "_docs"
    shutil.copy(root / "CHANGELOG.md", proc / "changelog.md")
    smalldocs.markdown.math_renderer = mathml
    smalldocs.markdown.Rules.search_text = search_text
    (proc / "404.md").write_text(NOT_FOUND, encoding="utf-8")
    smalldocs.markdown.looks_like_code = str.isascii # short names in lower case, too
    project = smalldocs.config.load(proc)
    project.website.update({"title": cfg.title, "site-url": SITE, "repo-url": cfg.git_url,
                            "repo-branch": cfg.branch, "description": cfg.description})
    site = Site(project, quiet=True)
    site.build()
    shutil.rmtree(docs, ignore_errors=True)
    shutil.move(proc / "_docs", docs)
    missing = docs / "404.html" # is shown at any address, so its own links begin at the site's
    missing.write_text(missing.read_text(encoding="utf-8").replace(
        "<head>", f'<head><base href="{SITE}/">', 1), encoding="utf-8")
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
