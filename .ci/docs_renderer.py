"""`show_doc` as the site shows it: signature, docstring, and a table of the parameters' docments."""
import inspect

from fastcore.docments import DocmentTbl
from nbdev.showdoc import BasicMarkdownRenderer


class TableRenderer(BasicMarkdownRenderer):
    "nbdev's renderer, followed by the parameters as a table."
    def __init__(self, sym, *args, **kwargs):
        try: inspect.signature(sym, eval_str=True)
        except NameError: sym.__signature__ = inspect.signature(sym)  # a foreign base class's annotations that have no names here
        except (ValueError, TypeError): pass
        super().__init__(sym, *args, **kwargs)

    def _repr_markdown_(self):
        try: table = str(DocmentTbl(self.sym))
        except Exception: table = ""   # builtins and the like have no docments
        return super()._repr_markdown_() + ("\n\n" + table if table else "")
