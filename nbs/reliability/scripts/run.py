"""Public training scripts, as they are and with this library; what differs.

    python run.py [SETUP ...] [--arms imports,budget] [--mirrors FOLDER] [--work FOLDER]

Scripts come from GitHub at the commits of manifest.json, or from bare clones
MIRRORS/owner+name/repo. Prints a line for each run and difference, and writes the rows of
these set-ups into ../scripts.csv. Exit status 1 where a difference has no reason in the
manifest. The page scripts.ipynb says what is compared, and how to add a set-up."""
import argparse
import atexit
import csv
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

os.environ |= dict(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
    WANDB_DISABLED="true", CUDA_VISIBLE_DEVICES="", TRL_EXPERIMENTAL_SILENCE="1")
here = Path(__file__).resolve().parent
root = here.parents[2]
COLUMNS = ["setup", "repository", "path", "arm", "outcome", "messages", "differences",
           "reason", "versions", "commit"]
PACKAGES = ["transformers", "torch", "accelerate", "datasets", "peft", "trl",
            "sentence-transformers"]


@dataclass(frozen=True)
class Arm:
    "How one run of a script is made. A step has the same rows in all."
    is_ours: bool = True
    accumulation: int = 1
    has_budget: bool = False
    evaluation_rows: int | None = None # in a batch, where the set-up leaves it open
    processes: int = 1


ARMS = {
    "stock": Arm(is_ours=False),
    "imports": Arm(),
    "budget": Arm(has_budget=True, evaluation_rows=5),
    "accumulation": Arm(accumulation=4, evaluation_rows=5),
    "both": Arm(accumulation=4, has_budget=True, evaluation_rows=5),
    "stock_accumulation": Arm(is_ours=False, accumulation=4, evaluation_rows=5),
    "processes": Arm(processes=2),
    "stock_processes": Arm(is_ours=False, processes=2)}
RESUMED = { # who writes the first checkpoint, who goes on from it
    "resume": ("imports", "imports"), "resume_budget": ("budget", "budget"),
    "resume_from_stock": ("stock", "imports"), "resume_in_stock": ("imports", "stock"),
    "resume_stock": ("stock", "stock")}
OURS = ["Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"]
MIXINS = """from dataclasses import dataclass
from prompt_packing import ExactLossMixin
from prompt_packing.trainer import BudgetArguments, ExactResumeMixin, TokenBudgetMixin
"""
MIXED = """from {module} import {trainer}, {arguments}
@dataclass
class {arguments}(BudgetArguments, {arguments}): pass
class {trainer}(ExactLossMixin, TokenBudgetMixin, ExactResumeMixin, {trainer}): pass
"""


# ---- the manifest

def read_manifest(path):
    "The manifest with each set-up complete: `like` filled in, names replaced by what they name."
    manifest, setups = json.loads(path.read_text("utf-8")), {}
    for entry in manifest["setups"]:
        like = setups.get(entry.get("like"), {})
        setup = {**{k: v for k, v in like.items() if k != "arms"}, **entry}
        repository, commit = manifest["sources"][setup["source"]]
        setup |= dict(repository=repository, commit=commit)
        if "args" in entry:
            setup["args"] = shlex.split(entry["args"].format(**manifest["arguments"]))
        more = shlex.split(entry.get("more_args", "").format(**manifest["arguments"]))
        setup["args"] = setup.get("args", []) + more
        if "edits" in entry or "more_edits" in entry:
            edits = entry.get("edits", like.get("edits", [])) + entry.get("more_edits", [])
            setup["edits"] = [pair for each in edits for pair in (
                manifest["edits"][each] if isinstance(each, str) else [each])]
        if isinstance(entry.get("in_code"), str):
            setup["in_code"] = manifest["in_code"][entry["in_code"]]
        if "more_in_code" in entry:
            setup["in_code"] = setup["in_code"] | entry["more_in_code"]
        setups[entry["name"]] = setup
    return manifest | dict(setups=setups)


# ---- scripts

def source_url(repository, commit, path):
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{quote(path)}"


def from_github(repository, commit, path):
    url = source_url(repository, commit, path)
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            return page.read().decode("utf-8")
    except OSError as error: # no network, or no such file
        sys.exit(f"Cannot fetch {url}: {error}. Without a network, pass --mirrors FOLDER, "
                 f"with a bare clone in FOLDER/{repository.replace('/', '+')}/repo.")


def from_mirror(repository, commit, path, mirrors):
    mirror = f"{mirrors}/{repository.replace('/', '+')}/repo"
    shown = subprocess.run(["git", "-C", mirror, "show", f"{commit}:{path}"],
                           capture_output=True, text=True)
    if shown.returncode:
        sys.exit(f"Cannot read {path} at {commit} in {mirror}: {shown.stderr.strip()}")
    return shown.stdout


def source_text(repository, commit, path, options):
    "A file of a public repository, from a mirror, GitHub, or an earlier run."
    kept = Path(options.work, "sources", repository.replace("/", "+"), commit, path)
    if not kept.exists():
        if options.mirrors:
            text = from_mirror(repository, commit, path, options.mirrors)
        else:
            text = from_github(repository, commit, path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, "utf-8")
    text = kept.read_text("utf-8")
    return code_of_notebook(json.loads(text)) if path.endswith(".ipynb") else text


def code_of_notebook(notebook):
    "Its code cells as one script, without shell commands and magics."
    lines = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines += [line for line in "".join(cell["source"]).splitlines()
                      if not re.match(r"\s*[!%]", line)] + [""]
    return "\n".join(lines)


def with_our_imports(text, mixed_names):
    "After each import of a Trainer or its arguments, an import of the same name from us."
    def more(match):
        indent, module, imported = match[1], match[2], re.sub(r"#.*", "", match[3])
        names = set(re.findall(r"\w+", imported))
        line = match[0]
        if found := [name for name in OURS if name in names and "transformers" == module[:12]]:
            line += f"{indent}from prompt_packing.trainer import {', '.join(found)}\n"
        if found := [name for name in mixed_names if name in names]:
            line += f"{indent}from mixed import {', '.join(found)}\n"
        return line
    text = re.sub(r"^( *)from ([\w.]+) import (\([^)]*\)|[^\n(]*)\n", more, text, flags=re.M)
    used = rf"\btransformers\.({'|'.join(OURS)})\b"
    if re.search(used, text):
        text = re.sub(used, r"prompt_packing.trainer.\1", text)
        text = re.sub(r"^( *)import transformers\n", r"\g<0>\1import prompt_packing.trainer\n",
                      text, flags=re.M)
    return text


def arguments_in_code(text, name, settings):
    "The first call of the class of arguments, with these settings in place of its own."
    for key in settings:
        text = re.sub(rf"^ +{key} ?=.*,[^\n]*\n", "", text, flags=re.M)
    given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return re.sub(rf"(?<!class )\b{name}\(", lambda m: f"{m[0]}**dict({given}), ", text)


def write_script(setup, arm, settings, folder, options):
    "The script and its neighbours in the folder; returns the name of the script."
    mixed = setup.get("trainers", []) # [module, Trainer, arguments]
    mixed_names = [name for _, *names in mixed for name in names]
    for path in [setup["path"], *setup.get("beside", [])]:
        text = source_text(setup["repository"], setup["commit"], path, options)
        for old, new in setup.get("edits", []):
            text = re.sub(old, new, text)
        if "in_code" in setup and path == setup["path"]:
            name = mixed[0][2] if mixed else setup.get("arguments_class", "TrainingArguments")
            text = arguments_in_code(text, name, setup["in_code"] | settings)
        if arm.is_ours:
            text = with_our_imports(text, mixed_names)
        (folder / Path(path).name).with_suffix(".py").write_text(text, "utf-8")
    if arm.is_ours and mixed:
        parts = [MIXED.format(module=m, trainer=t, arguments=a) for m, t, a in mixed]
        (folder / "mixed.py").write_text(MIXINS + "".join(parts), "utf-8")
    return Path(setup["path"]).with_suffix(".py").name


# ---- runs

def settings_of(setup, arm):
    rows = setup.get("rows", 16) // arm.accumulation // arm.processes
    evaluation = setup.get("evaluation_rows") or arm.evaluation_rows or 64
    settings = dict(
        per_device_train_batch_size=rows, gradient_accumulation_steps=arm.accumulation,
        per_device_eval_batch_size=evaluation // arm.processes)
    if arm.has_budget:
        settings |= dict(token_budget=setup.get("budget", 256), micro_batch_overhead=32)
    return settings


def run(setup, name, arm, options, checkpoint=None):
    "Run one arm in a folder of its own; (folder, exit status, last line of stderr)."
    folder = Path(options.work, setup["name"], name).resolve()
    if checkpoint is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = Path(options.work, "made").resolve()
        (folder / "data").symlink_to(made / setup.get("data", "data"))
        (folder / "models").symlink_to(made / "models")
        for metric in Path(options.work, "metrics").iterdir():
            (folder / metric.name).symlink_to(metric.resolve())
    settings = settings_of(setup, arm)
    script = write_script(setup, arm, settings, folder, options)
    arguments = list(setup["args"])
    if "in_code" not in setup:
        arguments += [word for pair in settings.items() for word in ("--" + pair[0], pair[1])]
    if checkpoint:
        arguments += ["--resume_from_checkpoint", checkpoint]
    status = in_processes(folder, script, arguments, arm.processes, options.timeout)
    lines = (folder / "stderr0.txt").read_text(errors="replace").strip().splitlines()
    return folder, status, lines[-1][:200] if status and lines else ""


def run_stock(setup, name, options):
    "A run without this library, or what an earlier call left of it."
    folder = Path(options.work, setup["name"], name).resolve()
    if options.keep_stock and (folder / "record.pt").exists():
        return folder, 0, ""
    return run(setup, name, ARMS[name], options)


def run_resumed(setup, name, options):
    "Train, keep the first checkpoint alone, go on from it."
    first, second = [ARMS[arm] for arm in RESUMED[name]]
    folder, status, error = run(setup, name, first, options)
    if status:
        return folder, status, error
    checkpoint, *later = sorted((folder / "out").glob("checkpoint-*"),
                                key=lambda path: int(path.name.split("-")[1]))
    for path in later:
        shutil.rmtree(path)
    return run(setup, name, second, options, f"out/{checkpoint.name}")


def in_processes(folder, script, arguments, processes, timeout):
    "Exit status of the driver in forks, which need not import the libraries again."
    children, port = [], 20000 + os.getpid() % 20000
    for rank in range(processes):
        environment = dict(PYTHONPATH=str(root), TRACKIO_DIR=str(folder))
        if processes > 1:
            environment |= dict(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes),
                LOCAL_WORLD_SIZE=str(processes), MASTER_ADDR="localhost",
                MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
        child = os.fork()
        if not child:
            in_child(folder, script, arguments, rank, environment, timeout)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next(filter(None, codes), 0)


def in_child(folder, script, arguments, rank, environment, timeout):
    code = 1
    try:
        signal.alarm(timeout)
        os.chdir(folder)
        os.environ.update(environment)
        sys.path.insert(0, str(root))
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            file = os.open(f"{name}{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
        sys.argv = ["driver.py", "record.pt", script, *map(str, arguments)]
        runpy.run_path(str(here / "driver.py"), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(bool(error.code))
    except BaseException: # whatever ends a script is printed, as Python does
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- comparison

TIMES = re.compile("runtime|per_second|_time$|jit_compilation|total_flos|seconds")
OUR_FILES = re.compile(r"data_position\.json|loss_facts\.json|manifest\.json|token_budget\.json|rng_before_"
                       r"|generators_")
TEXTS = ("predict_results.txt", "predict_predictions.json", "eval_predictions.json",
         "generated_predictions.txt", "predictions.txt")


def distance(one, other):
    "Largest difference of two numbers or tensors, relative to the larger one."
    import torch
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape:
            return float("inf")
        scale = one.abs().max().clamp(min=1e-12) if one.numel() else 1
        return float((one - other).abs().max() / scale) if one.numel() else 0.0
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        if one != one and other != other:
            return 0.0
        return abs(one - other) / max(abs(one), abs(other), 1e-12)
    return 0.0 if one == other else float("inf")


def distance_of_weights(right, left, tolerance):
    """The largest of all tensors; below float64, where gradients that should be zero are
    rounding, the length of all differences relative to the way from the first weights."""
    one, other = right["weights"], left["weights"]
    if tolerance <= 1e-5:
        return max([distance(values, other[name]) for name, values in one.items()], default=0)
    start = right["initial"]
    far = sum(float((one[name] - other[name]).square().sum()) for name in one)
    way = sum(float((one[name] - start[name]).square().sum()) for name in one)
    return (far / max(way, 1e-24)) ** 0.5


def differing_keys(one, other, tolerance, ignored):
    "(key, text, distance) of what differs in two dictionaries of numbers."
    for key in sorted(one.keys() | other.keys()):
        if TIMES.search(key) or key in ignored:
            continue
        if key not in one or key not in other:
            yield key, "extra" if key in other else "missing", float("inf")
        elif (far := distance(one[key], other[key])) > tolerance:
            yield key, f"{one[key]} {other[key]}", far


def compare_trainers(right, left, tolerance, ignored):
    "Differences of two records of the driver, as lines."
    if len(right) != len(left):
        return [f"{len(right)} Trainers, {len(left)}"]
    lines = []
    for number, (one, other) in enumerate(zip(right, left)):
        at = f"trainer {number} " if len(right) > 1 else ""
        parts = "steps max_steps epoch best best_step tokens flos".split()
        lines += [f"{at}{key} {text}" for key, text, _ in differing_keys(
            {key: one[key] for key in parts}, {key: other[key] for key in parts},
            tolerance, ignored)]
        if one["weights"].keys() != other["weights"].keys():
            lines.append(f"{at}names of weights")
        else:
            far = distance_of_weights(one, other, tolerance)
            if not far <= tolerance:
                lines.append(f"{at}weights {far:.0e}")
        if len(one["log"]) != len(other["log"]):
            lines.append(f"{at}log lines {len(one['log'])} {len(other['log'])}")
        worst = {}
        for a, b in zip(one["log"], other["log"]):
            for key, text, far in differing_keys(a, b, tolerance, ignored):
                if far > worst.get(key, ("", -1))[1]:
                    worst[key] = text, far
        lines += [f"{at}log: {key} {text} ({far:.0e})" for key, (text, far) in worst.items()]
    return lines


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def compare_folders(right, left, tolerance, ignored):
    "Differences of the output folders: names of files, results, predictions."
    if not right.exists() or not left.exists():
        return []
    lines, (one, other) = [], (files_in(right), files_in(left))
    one, other = [{re.sub(r"rng_state_\d", "rng_state", name) for name in names}
                  for names in (one, other)] # a file for each process
    extra = {name for name in other - one if not OUR_FILES.search(name)}
    if extra:
        lines.append("files extra " + ", ".join(sorted(extra)[:6]))
    if one - other:
        lines.append("files missing " + ", ".join(sorted(one - other)[:6]))
    if "all_results.json" in one & other:
        both = [json.loads((f / "all_results.json").read_text()) for f in (right, left)]
        lines += [f"all_results: {key} {text}"
                  for key, text, _ in differing_keys(*both, tolerance, ignored)]
    lines += [f"file {name} differs" for name in TEXTS if name in one & other
              and (right / name).read_bytes() != (left / name).read_bytes()]
    return lines


def compare(setup, name, right, left):
    "Differences of a run of this arm (left) from the stock run."
    import torch
    records = [torch.load(folder / "record.pt", weights_only=False) for folder in (right, left)]
    is_whole = name == "imports"
    tolerance = setup.get("tolerance", 1e-6 if is_whole else 1e-5)
    ignored = set() if is_whole else {"flos", "total_flos"} # less padding
    if name in ("accumulation", "both", "stock_accumulation"):
        ignored.add("epoch") # transformers counts it in loader batches
    lines = compare_trainers(*records, tolerance, ignored)
    lines += compare_folders(right / "out", left / "out", tolerance, ignored)
    codes = sorted({code for record in records[1] for code in record["messages"]} - {""})
    return lines, codes


def reason_of(manifest, setup, arm, line):
    "Why this difference is expected; '' for one that is not."
    for known in manifest["known"]:
        patterns = known["setup"], known["arm"], known["line"]
        if all(re.search(p, x) for p, x in zip(patterns, (setup, arm, line))):
            return known["why"]
    return ""


# ---- all of it

def prepare(manifest, options):
    "Data, models and metrics in the folder of the work."
    made = Path(options.work, "made")
    if not (made / "models" / "whisper" / "tokenizer.json").exists():
        subprocess.run([sys.executable, here / "data.py", made], check=True,
                       stderr=subprocess.DEVNULL)
    repository, commit = manifest["sources"]["evaluate"]
    for path in manifest["metrics"]:
        file = Path(options.work, *Path(path).parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source_text(repository, commit, path, options), "utf-8")


def row_of(setup, arm, outcome, lines=(), reasons=(), codes=(), **stamp):
    return dict(setup=setup["name"], repository=setup["repository"], path=setup["path"],
                arm=arm, outcome=outcome, messages=" ".join(codes),
                differences="; ".join(map(key_of, lines)), reason="; ".join(dict.fromkeys(reasons)),
                **stamp)


def rows_of(manifest, setup, options, stamp):
    "Run a set-up; a row of the table for each arm."
    right, status, error = run_stock(setup, "stock", options)
    print(f"{setup['name']:34} stock {error}", flush=True)
    if status:
        yield row_of(setup, "stock", "stock fails", [error], **stamp)
        return
    for name in setup.get("arms", "imports budget accumulation".split()):
        if options.arms and name not in options.arms.split(","):
            continue
        begin, codes = time.time(), []
        if name in RESUMED:
            left, status, error = run_resumed(setup, name, options)
        else:
            left, status, error = run(setup, name, ARMS[name], options)
        if status:
            lines = [f"crash {error}"]
        else:
            lines, codes = compare(setup, name, right, left)
            other = setup.get("references", {}).get(name)
            if lines and other:
                lines = unlike(lines, setup, name, other, left, options)
        reasons = [reason_of(manifest, setup["name"], name, line) for line in lines]
        outcome = "unexplained" if not all(reasons) else "difference" if lines else "equal"
        print(f"{'':34} {name:18} {outcome} {' '.join(codes)} {time.time() - begin:.0f} s")
        for line, why in zip(lines, reasons):
            print(f"{'':36} {line[:200]}{'' if why else ' NEW'}")
        print(*(f"{'':36} [{why}]" for why in dict.fromkeys(filter(None, reasons))),
              sep="\n", end="\n" * any(reasons), flush=True)
        yield row_of(setup, name, outcome, lines, filter(None, reasons), codes, **stamp)


def unlike(lines, setup, name, other, left, options):
    """Of these differences from the stock run, those that another stock run has, too: a
    metric that is averaged over forward passes is that of stock with the same batches."""
    folder, status, error = run_stock(setup, other, options)
    if status:
        return [*lines, f"{other} fails: {error}"]
    also = {key_of(line) for line in compare(setup, name, folder, left)[0]}
    return [line for line in lines if key_of(line) in also]


def key_of(line):
    "`log: eval_loss` of `log: eval_loss 2.13 2.14 (5e-03)`."
    return re.sub(r" (-?[\d.]|nan|None|inf).*", "", line)


def write_table(path, rows, setups):
    "Replace the rows of these set-ups and arms; the order is that of the manifest."
    old = []
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    again = {row["setup"] for row in rows} # a failure of the stock script is the latest one
    old = [row for row in old if row["arm"] != "stock" or row["setup"] not in again]
    table = {(row["setup"], row["arm"]): row for row in [*old, *rows]}
    order = {name: i for i, name in enumerate(setups)}
    keys = sorted((key for key in table if key[0] in order), key=lambda key: order[key[0]])
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in keys)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setups", nargs="*", help="default: all of the manifest")
    parser.add_argument("--arms", help="of a set-up's, with commas between; default: all")
    parser.add_argument("--mirrors", help="folder of bare clones; default: GitHub")
    parser.add_argument("--work", default=root / "runs" / "scripts", help="folder of runs")
    parser.add_argument("--keep-stock", action="store_true", help="use the stock runs of "
                        "an earlier call, of the same data, manifest and packages")
    parser.add_argument("--csv", type=Path, default=here.parent / "scripts.csv")
    parser.add_argument("--timeout", type=int, default=300, help="seconds of a run")
    options = parser.parse_args()
    os.environ["HF_HOME"] = str(Path(options.work, "home").resolve())
    manifest = read_manifest(here / "manifest.json")
    names = options.setups or list(manifest["setups"])
    if unknown := [name for name in names if name not in manifest["setups"]]:
        parser.error(f"no set-up {', '.join(unknown)}; there are "
                     f"{', '.join(manifest['setups'])}")
    prepare(manifest, options)
    for name in manifest["imports"]: # once for all scripts; not this library
        import_module(name)
    commit = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True).stdout.strip()
    stamp = dict(versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
                 commit=commit)
    begin, outcomes = time.time(), []
    for name in names:
        rows = list(rows_of(manifest, manifest["setups"][name], options, stamp))
        write_table(options.csv, rows, manifest["setups"])
        outcomes += [row["outcome"] for row in rows]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    print(f"{counts}; {time.time() - begin:.0f} s")
    sys.exit("unexplained" in outcomes)


if __name__ == "__main__":
    main()
