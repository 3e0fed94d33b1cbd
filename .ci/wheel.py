"""Build the wheel in a scratch folder and look at what is in it and at its requirements."""
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "."], check=True)
    wheel = ZipFile(next(Path(folder).glob("*.whl")))
names = wheel.namelist()
metadata = wheel.read(next(n for n in names if n.endswith("METADATA"))).decode()
strangers = [n for n in names if not n.startswith(("prompt_packing/", "prompt_packing-"))]
assert not strangers, f"the wheel holds {strangers}"
assert "prompt_packing/py.typed" in names, "the wheel lacks py.typed"
runtime = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
assert not [r for r in runtime if "nbdev" in r or "fastcore" in r], "a development tool is a runtime requirement"
print(f"{len(names)} files; {len(runtime)} requirements")
