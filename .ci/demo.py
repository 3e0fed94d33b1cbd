"""Run the code cells of a page with plain Python, without development tools: python .ci/demo.py nbs/tour.ipynb"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # pictures go to files
names = {"__name__": "__main__"}
for cell in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"{sys.argv[1]}::{cell['id']}", "exec"), names)
