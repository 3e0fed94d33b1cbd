"""Execute notebooks as nbdev_test does (its flags respected, one process each) and keep their outputs.

    python .ci/execute.py [--flags "slow"] [--force] nbs/bucketing.ipynb ...

A notebook whose front matter says `skip_exec: true` is executed only with --force.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

root = Path(__file__).resolve().parent.parent


def execute(fname, skip_flags, force):
    "Run `fname` in this process and write its outputs back; the first exception is printed and ends it."
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor

    os.environ["IN_TEST"] = "1"
    sys.path.insert(0, str(root))
    processed = NBProcessor(fname, procs=FrontmatterProc, process=True).nb
    skip = str(getattr(processed, "frontmatter_", {}).get("skip_exec", False)).lower() == "true"
    if skip and not force: return print(f"{fname}: skip_exec")
    directives = {c.id: getattr(c, "directives_", None) or {} for c in processed.cells if c.cell_type == "code"}

    def passed_over(cell):
        if cell.cell_type != "code": return True
        found = directives.get(cell.id, {})
        return found.get("eval:", [""])[0].lower() == "false" or bool(skip_flags & found.keys())

    shell, nb = CaptureShell(fname), read_nb(fname)
    os.chdir(fname.parent)
    for cell in nb.cells:
        if cell.cell_type == "code" and not passed_over(cell): cell.outputs = []
    try: shell.run_all(nb, exc_stop=True, preproc=passed_over)
    except Exception: sys.exit(shell.prettytb(fname=fname))
    for cell in nb.cells:
        if cell.cell_type == "code": cell.outputs = [o for o in map(tidy, cell.get("outputs", [])) if o.get("output_type") != "stream" or "".join(o["text"]).strip()]
    write_nb(nb, fname)


def tidy(output):
    "Drop what differs from run to run and says nothing: memory addresses, progress bars, carriage returns."
    text = json.dumps(output)
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", text)
    output = json.loads(text)
    if output.get("output_type") == "stream":
        output["text"] = [line for line in output["text"] if "\r" not in line and not re.search(r"\d+%\||it/s", line)]
    return output


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--flags", default="", help="flags whose cells run although settings.ini skips them")
    parser.add_argument("--force", action="store_true", help="run notebooks that say skip_exec too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        from nbdev.config import get_config
        skip_flags = set(get_config().tst_flags.split()) - set(args.flags.split())
        return execute(args.notebooks[0].resolve(), skip_flags, args.force)
    failed = 0
    for nb in args.notebooks:
        start = time.time()
        command = [sys.executable, __file__, "--here", "--flags", args.flags, *(["--force"] if args.force else []), str(nb)]
        code = subprocess.run(command).returncode
        failed += code != 0
        print(f"{'FAILED' if code else 'ran'} {nb} in {time.time() - start:.0f} s", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__": main()
