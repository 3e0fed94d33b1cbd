"""Run the code cells of pages as one who installed the package alone: python .ci/alone.py nbs/tour.ipynb"""
import json
import re
import sys
from pathlib import Path

# what only developers install
for name in ("nbdev", "fastcore", "execnb", "nbformat", "optuna", "hypothesis", "distributed"):
    sys.modules[name] = None
for page in sys.argv[1:]:
    names = {"__name__": "__main__"}
    for cell in json.loads(Path(page).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not re.search(r"^#\| (slow|eval: false)", source, re.M):
            exec(compile(source, f"{page}::{cell['id']}", "exec"), names)
