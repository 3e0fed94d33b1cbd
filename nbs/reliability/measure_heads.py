"""What transformers' Trainer makes of the gradient of each head, and whether `ExactLossMixin` is right for it.

    python measure_heads.py --family bert --output heads.csv    # minutes
    python measure_heads.py --output heads.csv --workers 4      # all heads: an hour on two cores
"""

import argparse
import copy
import faulthandler
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir

import pandas as pd
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm
from test_trainer import StepReader
from tiny_models import (
    WIDTH, CannotBuild, collate_rows, head_classes, head_kind, learnable_rows, reason,
    tiny_model)
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from prompt_packing.accumulation_loss import ExactLossMixin, LossFacts
from prompt_packing.accumulation_loss.audit import compare_gradients, pop_gradient
from prompt_packing.foundation.private_apis import BatchNorm, set_sync, tree_map
from prompt_packing.foundation.private_apis import override

# one step of a Trainer

class ExactTrainer(ExactLossMixin, transformers.Trainer):
    "Transformers' Trainer with exact losses."

def collator_of(
    model: PreTrainedModel,
    width: int = WIDTH, # of every text, in tokens
) -> Callable: # rows -> batch
    "Pads texts, and shifts targets to the decoder as `DataCollatorForSeq2Seq` does."
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    names = inspect.signature(model.forward).parameters

    def collate(rows):
        batch = collate_rows(rows, width)
        if shift and "decoder_input_ids" in names and "labels" in batch:
            batch["decoder_input_ids"] = shift(labels=batch["labels"])
        return batch

    return collate

def quiet_trainer(
    model: PreTrainedModel,
    trainer_class: type = Trainer, # or one derived from it
    collator: Callable | None = None, # rows -> batch
    rows: Sequence[dict] | None = None, # all of them are one step
    **arguments, # of `TrainingArguments`
) -> Trainer:
    "A Trainer that takes one step, changes no weight and writes no file."
    args = TrainingArguments(
        gettempdir(), max_steps=1, learning_rate=0.0, optim="sgd", max_grad_norm=0.0,
        save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, log_level="error", remove_unused_columns=False,
        prediction_loss_only=True, **arguments)
    trainer = trainer_class(
        model, args, data_collator=collator, train_dataset=rows, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer

def trained_step(
    trainer_class: type, # transformers' Trainer, or one derived from it
    model: PreTrainedModel, # without dropout
    rows: Sequence[dict], # all of them are one step
    accumulation: int = 1, # micro-batches, of which the last may have fewer rows
    **arguments, # of `TrainingArguments`
) -> tuple[dict[str, torch.Tensor], Trainer]: # gradient by parameter; after the step
    "The gradient of one step, as the optimizer gets it."
    trainer = quiet_trainer(
        model, trainer_class, collator_of(model), rows,
        per_device_train_batch_size=-(-len(rows) // accumulation),
        gradient_accumulation_steps=accumulation, **arguments)
    reader = StepReader(model)
    with register_optimizer_step_post_hook(reader):
        trainer.train()
    model.zero_grad(set_to_none=True)
    return reader.gradients[0], trainer

def gradient_of_two(model: PreTrainedModel, rows: Sequence[dict]) -> dict:
    """The average of two processes' gradients, each with half of the rows.

    They are simulated, since what transformers does with several processes is arithmetic: labels
    are counted over all, the loss is multiplied by their number, gradients averaged."""
    trainer, half, collate = quiet_trainer(model), len(rows) // 2, collator_of(model)
    batches = [collate(rows[:half]), collate(rows[half:])]
    taken, items = trainer.get_batch_samples(iter(batches), 2, trainer.args.device)
    with override(trainer.accelerator.state, num_processes=2):
        for batch in taken:
            set_sync(trainer.accelerator, batch is taken[-1])
            trainer.current_gradient_accumulation_steps = 1
            trainer.training_step(model, batch, items)
    return pop_gradient(model, scale=2)

# the head's own loss

def own_gradient(
    model: PreTrainedModel, rows: Sequence[dict], micro_batches: int = 1
) -> dict:
    "The gradient of the mean of the model's own losses over equal micro-batches."
    model.train()
    collate, size = collator_of(model), len(rows) // micro_batches
    for start in range(0, size * micro_batches, size):
        loss = model(**collate(rows[start:start + size]))["loss"]
        (loss.sum() / micro_batches).backward()
    return pop_gradient(model)

def own_loss(model: PreTrainedModel, rows: Sequence[dict]) -> float:
    "The model's own loss of all rows, in eval mode."
    model.eval()
    with torch.no_grad():
        return float(model(**collator_of(model)(rows))["loss"])

def evaluated_loss(
    trainer_class: type, model: PreTrainedModel, rows: Sequence[dict], batch_size: int
) -> float: # NaN where the Trainer reports none
    "`eval_loss` of a Trainer."
    trainer = quiet_trainer(model, trainer_class, collator_of(model), rows,
                            per_device_eval_batch_size=batch_size)
    return trainer.evaluate().get("eval_loss", float("nan"))

SETS = dict( # name -> lengths of rows, in tokens
    equal=[WIDTH] * 8,
    unequal=[4, 12, 7, 5, 12, 9, 4, 6, 11, 12],
    rebalanced=[4, 12, 7, 5, 12, 9, 4, 6, 11, 12, 5, 8],
)
ARGUMENTS = dict( # name -> what their Trainer is given
    equal={}, unequal={}, rebalanced=dict(train_sampling_strategy="batch_rebalance"))
MICRO_BATCHES = 4 # micro-batches of a step
WRONG = 1e-3 # a ratio or a cosine this far from 1 is wrong; rounding is far below
TINY_SMOOTHING = 1e-8
COLUMNS = """
    model family kind equal_ratio equal_cosine unequal_ratio unequal_cosine
    processes_ratio processes_cosine rebalanced_ratio rebalanced_cosine
    smoothing_ratio smoothing_cosine one_batch_ratio one_batch_cosine
    eval_1 eval_4 eval_10 exact_equal_error exact_unequal_error
    exact_rebalanced_error exact_float64_error exact_strategy exact_message exact_eval_4
    counted reads_count batch_norm random couples_rows sees_padding cause
    not_built seconds transformers date""".split()

def compared(name: str, right: dict, other: dict) -> dict[str, float]:
    "Ratio and cosine as two columns."
    found = compare_gradients(right, other)
    return {f"{name}_ratio": found["ratio"], f"{name}_cosine": found["cosine"]}

def facts_of_head(model: PreTrainedModel, equal: Sequence[dict]) -> dict[str, bool]:
    "What there is to know of a head before a Trainer has it."
    first, again = own_gradient(model, equal), own_gradient(model, equal)
    micro_batched = own_gradient(model, equal, MICRO_BATCHES)
    batch, trainer = collator_of(model)(equal), quiet_trainer(model)
    items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)[1]
    counted = items is not None and bool(trainer.model_accepts_loss_kwargs)
    return dict(
        counted=counted,
        reads_count=counted and reads_count(model, batch, items),
        batch_norm=any(isinstance(m, BatchNorm) for m in model.modules()),
        random=compare_gradients(first, again)["error"] > 1e-4,
        # of equal micro-batches the mean gradient has one direction, whatever is averaged
        couples_rows=compare_gradients(first, micro_batched)["cosine"] < 1 - 1e-4,
        sees_padding=sees_padding(model, equal[:2]),
    )

@torch.no_grad()
def sees_padding(model: PreTrainedModel, rows: Sequence[dict]) -> bool:
    "Whether the loss of full rows changes when two columns of padding are added."
    if not has_lengths(rows):
        return False
    losses = []
    for width in (WIDTH, WIDTH + 2):
        try:
            output = model(**collator_of(model, width)(rows))
        except (RuntimeError, ValueError, IndexError): # takes one width only
            return True
        losses.append(float(output["loss"]))
    return abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0])

def reads_count(model: PreTrainedModel, batch: dict, items: torch.Tensor) -> bool:
    "Whether the loss halves when num_items_in_batch is doubled."
    losses = []
    for count in (items, 2 * items):
        torch.manual_seed(0)
        with torch.no_grad():
            losses.append(float(model(**batch, num_items_in_batch=count)["loss"]))
    return losses[0] != losses[1]

def has_lengths(rows: Sequence[dict]) -> bool:
    "Whether `batch_rebalance` can tell long rows from short ones."
    return "input_ids" in rows[0] and rows[0]["input_ids"].dim() == 1

def stock_columns(model: PreTrainedModel, rows: dict, one: dict) -> dict:
    "What transformers' Trainer makes of this head; `one`: its gradients of one batch."
    row, unequal = {}, rows["unequal"]
    for name, right in one.items():
        split, _ = trained_step(Trainer, model, rows[name], MICRO_BATCHES, **ARGUMENTS[name])
        row |= compared(name, right, split)
    row |= compared("processes", one["equal"], gradient_of_two(model, rows["equal"]))
    own = own_gradient(model, unequal)
    row |= compared("one_batch", own, one["unequal"])
    if can_smooth(model, unequal):
        smoothed, _ = trained_step(
            Trainer, model, unequal, MICRO_BATCHES, label_smoothing_factor=TINY_SMOOTHING)
        row |= compared("smoothing", own, smoothed)
    full = own_loss(model, unequal)
    for batch_size in (1, 4, 10):
        loss = evaluated_loss(Trainer, model, unequal, batch_size)
        row[f"eval_{batch_size}"] = loss / full
    return row

def can_smooth(model: PreTrainedModel, rows: Sequence[dict]) -> bool:
    "Whether a model without labels gives logits that labels can be compared with."
    batch = collator_of(model)(rows)
    labels = batch.pop("labels", None)
    if not torch.is_tensor(labels) or labels.is_floating_point():
        return False
    with torch.no_grad():
        try:
            output = model(**batch)
        # a decoder whose inputs are the labels, a model that needs targets to train
        except (ValueError, TypeError, AttributeError, RuntimeError):
            return False
    logits = output["logits"] if "logits" in output else None
    return torch.is_tensor(logits) and logits.shape[:-1] == labels.shape

def exact_columns(
    model: PreTrainedModel,
    rows: dict, # of each set
    one: dict, # of each set, the gradient of one batch
    is_random: bool, # the loss; what is off is then no rounding
) -> dict: # columns of the table
    "What `ExactLossMixin` makes of this head."
    row, facts = {}, []
    for name, right in one.items():
        error, facts_of_set = exact_error(model, rows[name], right, name)
        row[f"exact_{name}_error"] = error
        facts.append(facts_of_set)
        if error > WRONG and not is_random:
            in_double = float64_error(model, rows[name], name)
            row["exact_float64_error"] = max(
                row.get("exact_float64_error", 0.0), in_double)
    texts = [str(message) for each in facts for message in each.messages
             if message.kind != "exact"]
    row["exact_strategy"] = " ".join(dict.fromkeys(str(each.strategy) for each in facts))
    row["exact_message"] = texts[0][:160] if texts else ""
    loss = evaluated_loss(ExactTrainer, model, rows["unequal"], 4)
    row["exact_eval_4"] = loss / own_loss(model, rows["unequal"])
    return row

def exact_error(
    model: PreTrainedModel,
    rows: Sequence[dict],
    right: dict, # the gradient of one batch
    name: str, # of the set
) -> tuple[float, LossFacts]:
    "How far its step is from one batch, and the facts of its loss."
    exact, trainer = trained_step(ExactTrainer, model, rows, MICRO_BATCHES, **ARGUMENTS[name])
    error = compare_gradients(right, exact)["error"]
    if error > WRONG:
        own = own_gradient(model, rows)
        error = min(error, compare_gradients(own, exact)["error"])
    return error, trainer.loss_facts

def float64_error(
    model: PreTrainedModel, rows: Sequence[dict], name: str
) -> float: # NaN for a model that computes in float32 whatever its weights are
    "The same error where rounding is a billion times smaller."
    def double(value):
        is_number = torch.is_tensor(value) and value.is_floating_point()
        return value.double() if is_number else value

    model = copy.deepcopy(model).double()
    rows = [tree_map(double, row) for row in rows]
    try:
        right, _ = trained_step(Trainer, model, rows)
        return exact_error(model, rows, right, name)[0]
    except RuntimeError:
        return float("nan")

def is_off(row: dict, name: str) -> bool:
    "Whether the gradient of this setting is another one; `False` where none was taken."
    ratio, cosine = row.get(f"{name}_ratio"), row.get(f"{name}_cosine")
    if ratio is None or ratio != ratio:
        return False
    return abs(ratio - 1) > WRONG or cosine < 1 - WRONG

def cause_of(
    row: dict, # the columns of a head
) -> str: # "right", or why it is not
    "Why a Trainer's gradient of this head depends on how the step was split."
    off = [name for name in ("equal", "unequal", "processes", "rebalanced")
           if is_off(row, name)]
    if row["random"]:
        return "the loss is random"
    if off and row["batch_norm"]:
        return "batch normalization: each micro-batch has statistics of its own"
    if off and row["couples_rows"]:
        return "the loss compares the rows of a batch"
    if off and not row["counted"]:
        return "nothing is counted: every micro-batch has the same weight"
    if off and not row["reads_count"]:
        return "ignores num_items_in_batch"
    if off:
        return "a part of the loss ignores num_items_in_batch"
    if is_off(row, "one_batch"):
        return "right, but labels are counted that are no targets"
    return "right"

def facts_of_class(model_class: type) -> dict:
    "What is known of a class without running it, and when it was measured."
    return dict(
        model=model_class.__name__, kind=head_kind(model_class),
        family=model_class.__module__.split(".")[-2],
        transformers=transformers.__version__, date=time.strftime("%Y-%m-%d"))

def measure_head(
    model_class: type, # of transformers
) -> dict: # the columns of the table
    """A row of the table. What cannot be built has its reason in `not_built`.

    `seconds` are those of the processor, which another program does not change."""
    start, row = time.process_time(), facts_of_class(model_class)
    try:
        model = tiny_model(model_class)
        rows = {name: learnable_rows(model, lengths) for name, lengths in SETS.items()}
        if not has_lengths(rows["rebalanced"]):
            del rows["rebalanced"]
        row |= facts_of_head(model, rows["equal"])
        one = {name: trained_step(Trainer, model, rows[name])[0] for name in rows}
        row |= stock_columns(model, rows, one)
        row["cause"] = cause_of(row)
        row |= exact_columns(model, rows, one, row["random"])
    except CannotBuild as error:
        row["not_built"] = str(error)
    # code of hundreds of authors under a Trainer: whatever it raises is what is listed
    except Exception as error:
        row["not_built"] = f"fails in training: {reason(error)}"
    row["seconds"] = round(time.process_time() - start, 1)
    return row

PATIENCE = 10 # times the limit, by the clock, for a process that waits for something

def limit_memory(gigabytes: float):
    "Let this process fail, not the machine, when a model needs too much."
    try:
        import resource
    except ImportError: # Windows has no such limit
        return
    resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 2**30),) * 2)

def limit_time(seconds: float):
    "End this process after so much time of the processor, from now on."
    # by the clock in any case: Windows has no other timer
    faulthandler.dump_traceback_later(PATIENCE * seconds, exit=True)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)

def serve(seconds: float, gigabytes: float):
    "Read a class a line, write its row a line, until there are no more."
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    limit_memory(gigabytes)
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with redirect_stdout(sys.stderr):
        for line in sys.stdin.read().splitlines():
            module, name = line.split()
            model_class = getattr(import_module(module), name)
            # a Trainer collects garbage after each run: seconds for a heap of all of
            # transformers, which will never be garbage
            gc.collect()
            gc.freeze()
            limit_time(seconds)
            print(json.dumps(measure_head(model_class)), file=rows, flush=True)

def measured_rows(
    classes: Sequence[type], seconds: float, gigabytes: float
) -> Iterator[dict]: # one of each class, in this order
    "The rows of classes, or the reason why there is none, from processes that may die."
    code = f"from measure_heads import serve\nserve({seconds}, {gigabytes})"
    # no GPU: its memory would be counted as this process's
    quiet = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    waiting = list(classes)
    while waiting:
        start = time.perf_counter()
        with subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code], text=True, env=quiet,
                cwd=Path(__file__).parent, # where Python finds this file
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL) as process:
            names = [f"{value.__module__} {value.__name__}\n" for value in waiting]
            with suppress(BrokenPipeError): # it died before it read them
                process.stdin.writelines(names)
                process.stdin.close()
            for line in process.stdout:
                start = time.perf_counter()
                waiting.pop(0)
                yield json.loads(line)
        if process.returncode == -signal.SIGINT: # Ctrl-C
            raise KeyboardInterrupt
        if waiting: # it died at the first of them
            taken = time.perf_counter() - start
            yield facts_of_class(waiting.pop(0)) | dict(
                not_built=why_dead(process.returncode, taken, seconds),
                seconds=round(taken, 1))

def why_dead(status: int, taken: float, seconds: float) -> str:
    "Why a process returned no row, by its status and the seconds that it ran."
    out_of_time = -getattr(signal, "SIGPROF", 0) # the status of such an end
    if status == out_of_time or taken >= PATIENCE * seconds:
        return f"took more than {seconds:g} seconds"
    return f"ended its process with status {status}, perhaps for want of memory"

def measured_models(path: Path) -> set[str]: # names of classes
    "What an earlier run has written. `ValueError`: another table, or another release."
    if not path.exists():
        return set()
    table = read_heads(path)
    if list(table) != COLUMNS:
        raise ValueError(
            f"output={str(path)!r} has other columns than a table of heads")
    others = set(table.transformers) - {transformers.__version__}
    if others:
        raise ValueError(
            f"output={str(path)!r} was made with transformers {', '.join(sorted(others))}, "
            f"and {transformers.__version__} is installed; give another file")
    return set(table.model)

def append_row(path: Path, row: dict):
    "Write a row of the table, and its header if it is the first."
    # six digits: what differs beyond them is rounding, and changes with the processor
    short = {key: float(f"{value:.6g}") if isinstance(value, float) else value
             for key, value in row.items()}
    pd.DataFrame([short], columns=COLUMNS).to_csv(
        path, mode="a", header=not path.exists(), index=False)

def read_heads(
    path: str | Path, # what `audit_heads` wrote
    names: Sequence[str] | None = None, # of classes; None: all
) -> pd.DataFrame: # one row a class
    "A table of heads from its file."
    table = pd.read_csv(path, dtype=dict(not_built=str, cause=str))
    if names is not None:
        table = table[table.model.isin(list(names))]
    return table.reset_index(drop=True)

def audit_heads(
    family: str | None = None, # a folder of transformers.models; None: all, for hours
    output: str | Path = "heads.csv", # rows are appended; those it has are not remade
    workers: int = 1, # processes that measure at the same time
    seconds: float = 60, # of the processor for one head, then its process is ended
    gigabytes: float = 12, # of address space for a process
) -> pd.DataFrame: # one row a class, columns as in `COLUMNS`
    """Run every head of the installed transformers, and write what its gradient is.

    `ValueError`: no such family, or `output` was made with another release."""
    path, classes = Path(output), head_classes(family)
    done = measured_models(path)
    missing = [value for name, value in classes.items() if name not in done]
    bar, lock = tqdm(total=len(missing), unit=" heads"), threading.Lock()
    stopped = threading.Event()

    def measure(chunk: Sequence[type]):
        for row in measured_rows(chunk, seconds, gigabytes):
            with lock:
                append_row(path, row)
                bar.update()
            if stopped.is_set():
                return

    with bar, ThreadPoolExecutor(workers) as threads:
        try:
            list(threads.map(measure, [missing[i::workers] for i in range(workers)]))
        finally: # after an error or an interruption
            stopped.set()
    return read_heads(path, classes)

def is_exact(table: pd.DataFrame) -> pd.Series: # of bool
    "Whether `ExactLossMixin` has the gradient of one batch, however it was split."
    errors = table[["exact_equal_error", "exact_unequal_error", "exact_rebalanced_error"]]
    # in float64 what was rounding is far below
    return (errors.max(axis=1) < WRONG) | (table.exact_float64_error < WRONG ** 2)

def summarize_heads(
    table: pd.DataFrame, # as `audit_heads` returns it
) -> pd.DataFrame: # a row for each kind of head and cause
    "Heads counted by kind and cause, with the median of what is off."
    ran = table[table.cause.notna()].assign(exact=is_exact(table))
    columns = dict(
        heads=("model", "size"), equal=("equal_ratio", "median"),
        unequal=("unequal_ratio", "median"), processes=("processes_ratio", "median"),
        rebalanced_cosine=("rebalanced_cosine", "median"), eval_1=("eval_1", "median"),
        exact=("exact", "sum"))
    return ran.groupby(["cause", "kind"]).agg(**columns).reset_index().sort_values(
        ["cause", "heads"], ascending=[True, False], ignore_index=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", help="a folder of transformers.models; none: all")
    parser.add_argument("--output", default="heads.csv", help="rows are appended")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    print(summarize_heads(audit_heads(**vars(parser.parse_args()))).to_string())
