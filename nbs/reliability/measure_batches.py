"""Runs the cases of `batches_cases.py`, for `side_by_side.ipynb`.

python measure_batches.py [--more] [KIND OR NAME ...]
torchrun --nproc_per_node 2 measure_batches.py OUT.json REFERENCES.pt"""

import contextlib
import copy
import inspect
import io
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from transformers.trainer_callback import PrinterCallback

import batches_cases as cases
from batches_cases import CASES, Case
from prompt_packing import Trainer, TrainingArguments
from prompt_packing.accumulation_loss import ExactLossMixin
from prompt_packing.accumulation_loss.loss_facts import Exactness
from prompt_packing.packed_sequence import PackedSequenceMixin


class Exact(ExactLossMixin, transformers.Trainer):
    "transformers' Trainer with the mixin and nothing else."


STEP, STEPS = 12, 7  # rows of a step, steps; the last one has five rows


class Packs(PackedSequenceMixin, transformers.Trainer):
    "What computes with a PackedSequence at all."


class Rows(Dataset):
    "Each reading makes new rows, as reading files does."

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return copy.deepcopy(self.rows[i])


class Stream(IterableDataset):
    "The same without indices of rows."

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (copy.deepcopy(row) for row in self.rows)


class Messages(logging.Handler):
    "What the library logs meanwhile."

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logger.addHandler(self)
        return self

    def __exit__(self, *error):
        logger.removeHandler(self)


logger = logging.getLogger("prompt_packing")
TRAINERS = []  # of the run that is under setting


def warnings_of(trainers):
    "The messages that a gradient or an evaluation loss is not exact, or not verified."
    facts = [each.loss_facts for each in trainers if isinstance(each, ExactLossMixin)]
    return [
        str(message)
        for each in facts
        for message in each.messages
        if message.kind != Exactness.EXACT
    ]


def model_of(case: Case):
    "The case's model; its loss is inside where the case says so."
    base = case.model

    class WithLoss(base):
        def forward(self, *args, **b):
            out = super().forward(*args, **b)
            made = case.function(
                out,
                b,
                SimpleNamespace(model=super_of(self), memory=self.memory, count=None),
            )
            return dict(loss=made) | out

    torch.manual_seed(0)
    model = WithLoss() if case.how == "forward" else base()
    model.memory = {}
    return model


class super_of:
    "The model without its loss: calls of it do not come back."

    def __init__(self, model):
        self.__dict__["model"] = model

    def __getattr__(self, name):
        return getattr(self.model, name)


def trainer_of(case: Case, kind, rows, data=Rows, **more):
    "A Trainer for a case, and the gradients of its steps."
    model, gradients, memory = model_of(case), [], {}
    if case.collate is cases.packed_sequences:
        kind = {transformers.Trainer: Packs, Exact: Trainer}.get(kind, kind)

    class Keeps(torch.optim.SGD):
        def step(self, closure=None):
            each = [
                p.grad if p.grad is not None else torch.zeros_like(p)
                for p in model.parameters()
            ]
            gradients.append(torch.cat([g.detach().flatten() for g in each]))
            super().step()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        bare = self.accelerator.unwrap_model(model)
        is_args = isinstance(inputs, tuple)
        fields = vars(inputs) if hasattr(inputs, "__dataclass_fields__") else inputs
        out = model(*inputs) if is_args else model(**fields)
        s = SimpleNamespace(
            step=self.state.global_step, model=bare, memory=memory, count=num_items_in_batch
        )
        made = case.function(out, inputs, s)
        return (made, out) if return_outputs else made

    def loss_func(out, labels, num_items_in_batch=None):
        s = SimpleNamespace(model=model, memory=memory, count=num_items_in_batch)
        return case.function(out, out["b"] | dict(labels=labels), s)

    given = dict(case.given)
    members = dict(
        _get_train_sampler=lambda self, *a: SequentialSampler(self.train_dataset)
    )
    if case.how == "compute_loss":
        members["compute_loss"] = compute_loss
    if case.how == "loss_func":
        forward = model.forward
        model.forward = lambda **b: forward(**b) | dict(b=b)
        given["compute_loss_func"] = loss_func
    ours = issubclass(kind, Trainer)
    args = (TrainingArguments if ours else transformers.TrainingArguments)(
        tempfile.mkdtemp(),
        **dict(
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            max_grad_norm=0,
            remove_unused_columns=False,
            lr_scheduler_type="constant",
            log_level="error",
            logging_strategy="no",
            label_names=["labels"],
        )
        | more
        | case.args,
    )
    collate = case.collate() if inspect.isclass(case.collate) else case.collate
    made = type("T", (kind,), members)(
        model,
        args,
        train_dataset=data(rows),
        eval_dataset=Rows(rows),
        data_collator=collate,
        optimizers=(Keeps(model.parameters(), lr=0.05), None),
        **given,
    )
    made.remove_callback(PrinterCallback)
    TRAINERS.append(made)
    return made, gradients


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def gradients(case, kind, steps=STEPS, **more):
    trainer, made = trainer_of(
        case,
        kind,
        cases.make_rows(STEP * (steps - 1) + (5 if steps == STEPS else STEP)),
        max_steps=steps,
        **more,
    )
    seed()
    trainer.train()
    return made


def flat(tree) -> list:
    "The leaves of a tree of arrays and numbers."
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        return [leaf for child in tree for leaf in flat(child)]
    return (
        []
        if tree is None
        else [
            np.asarray(tree, np.float64)
            if np.ndim(tree) or isinstance(tree, (float, int, bool))
            else tree
        ]
    )


def metrics(case, kind, **more):
    "Losses and metrics of an evaluation."
    case = copy.copy(case)
    case.args = dict(case.args)
    sets, first = case.args.pop("eval_sets", 1), case.args.pop("eval_on_start", False)
    trainer, _ = trainer_of(case, kind, cases.make_rows(30), **more)
    seed()
    if sets == 2:
        other = [r | dict(group=r["group"] + 4) for r in cases.make_rows(30)]
        trainer.eval_dataset = dict(a=trainer.eval_dataset, b=Rows(other))
    found = [trainer.evaluate()]
    if first:
        trainer.state.global_step = 3
        found.append(trainer.evaluate())
    return [
        np.array(
            [v for f in found for k, v in sorted(f.items()) if k.endswith(("loss", "of"))]
        )
    ]


def predictions(case, kind, **more):
    trainer, _ = trainer_of(case, kind, cases.make_rows(30), **more)
    seed()
    made = trainer.predict(trainer.eval_dataset)
    of = [v for k, v in made.metrics.items() if k.endswith(("loss", "of"))]
    return [*flat(made.predictions), *flat(made.label_ids), np.array(of)]


def error(right, found) -> float:
    "The largest relative error of a list of arrays; -100 in place of padding is none."
    if len(right) != len(found):
        return float("inf")
    worst = 0.0
    for r, f in zip(right, found):
        r, f = np.asarray(r, np.float64), np.asarray(f, np.float64)
        if r.shape != f.shape:
            return float("inf")
        keep = ~((f == -100) | (r == -100) | (np.isnan(r) & np.isnan(f)))
        if not keep.any():
            continue
        size = max(float(np.linalg.norm(r[keep])), 1e-6)
        away = float(np.linalg.norm(f[keep] - r[keep])) / size
        worst = max(worst, away if away == away else float("inf"))
    return worst


def split_evaluation(run, rows, tokens):
    "Batches of so many rows, split into micro-batches of at most so many tokens."
    args = dict(per_device_eval_batch_size=rows, token_budget=tokens, micro_batch_overhead=0)
    return run, Trainer, args


SETTINGS = {  # kind of case -> stock, and other settings that should compute the same
    "loss": dict(
        stock=(gradients, transformers.Trainer, dict(per_device_train_batch_size=STEP)),
        accumulated=(
            gradients,
            Exact,
            dict(per_device_train_batch_size=3, gradient_accumulation_steps=4),
        ),
        budget_26=(
            gradients,
            Trainer,
            dict(
                per_device_train_batch_size=6,
                gradient_accumulation_steps=2,
                token_budget=26,
                micro_batch_overhead=0,
            ),
        ),
        budget_64=(
            gradients,
            Trainer,
            dict(per_device_train_batch_size=STEP, token_budget=64, micro_batch_overhead=0),
        ),
    ),
    "evaluation": dict(
        stock=(metrics, transformers.Trainer, dict(per_device_eval_batch_size=30)),
        batches=(metrics, Exact, dict(per_device_eval_batch_size=7)),
        budget_26=split_evaluation(metrics, 8, 26),
        budget_64=split_evaluation(metrics, 30, 64),
    ),
    "prediction": dict(
        stock=(predictions, transformers.Trainer, dict(per_device_eval_batch_size=30)),
        budget_26=split_evaluation(predictions, 30, 26),
        budget_64=split_evaluation(predictions, 30, 64),
    ),
}
SETTINGS["collator"] = SETTINGS["loss"]
stock = SETTINGS["loss"]["stock"]
MORE = dict(  # other loaders of the rows of a training
    stock=stock,
    one_row=(
        gradients,
        Trainer,
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=12),
    ),
    workers=(
        gradients,
        Trainer,
        dict(
            per_device_train_batch_size=STEP,
            token_budget=64,
            micro_batch_overhead=0,
            dataloader_num_workers=2,
        ),
    ),
    stream=(
        gradients,
        Trainer,
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=3, data=Stream),
    ),
)
# on two processes: full steps, since accelerate fills the last one up
TWO = dict(
    accumulated=(
        gradients,
        Exact,
        dict(
            steps=6,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            ddp_timeout=60,
        ),
    ),
    budget_26=(
        gradients,
        Trainer,
        dict(
            steps=6,
            per_device_train_batch_size=6,
            token_budget=26,
            micro_batch_overhead=0,
            ddp_timeout=60,
        ),
    ),
)


def tolerance(case):
    if case.sixteen_bits:
        return 2**-7  # rounding in bfloat16
    return 1e-4 if case.kind == "prediction" else 1e-5


def outcome(case, run, right):
    "exact, warned, silent or crash; the error; the messages."
    TRAINERS.clear()
    with Messages() as logged:
        try:
            made = run()
        except Exception as reason:
            if os.environ.get("SHOW"):
                import traceback

                traceback.print_exc()
            return "crash", float("inf"), f"{type(reason).__name__}: {reason}"[:300]
    away = error(right, made)
    texts = [t for t in logged.texts if case.kind == "prediction" or "token_budget=" not in t]
    warned = warnings_of(TRAINERS)
    text = " | ".join(warned or texts)
    if warned:
        return "warned", away, text
    if case.random:  # other numbers are drawn: only messages can be judged
        return "random", away, text
    return ("exact" if away <= tolerance(case) else "silent"), away, text


def references(names, file):
    "The results of transformers on one process, for several."
    run, kind, args = stock
    with contextlib.redirect_stdout(io.StringIO()):
        torch.save({name: run(CASES[name], kind, steps=6, **args) for name in names}, file)


def measure_two(file, out):
    "On each of two processes; the first one writes the table."
    lines = []
    for name, right in torch.load(file).items():
        run, _, args = TWO["accumulated"]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run(CASES[name], transformers.Trainer, **args)
        except Exception as reason:
            print(f"{name}: fails with transformers: {type(reason).__name__}"[:300])
            continue
        for setting, (run, kind, args) in TWO.items():
            with contextlib.redirect_stdout(io.StringIO()):
                result, away, text = outcome(
                    CASES[name], lambda: run(CASES[name], kind, **args), right
                )
            lines.append(
                dict(
                    kind=CASES[name].kind,
                    name=name,
                    setting=setting,
                    outcome=result,
                    error=away,
                    text=text,
                )
            )
            if os.environ["RANK"] == "0":
                print(
                    f"{name[:38]:38s} {setting:11s} {result:6s} {away:8.1e} {text[:150]}",
                    flush=True,
                )
    if os.environ["RANK"] == "0":
        with open(out, "w") as f:
            json.dump(lines, f)


def measure(names, show=print, settings=None):
    "A line of a table for each case and setting."
    lines = []
    for name in names:
        case, right = CASES[name], None
        table = settings or SETTINGS[case.kind]
        (run, kind, args), others = (
            table["stock"],
            {k: v for k, v in table.items() if k != "stock"},
        )
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                right = run(case, kind, **args)
        except Exception as reason:
            if os.environ.get("SHOW"):
                import traceback

                traceback.print_exc()
            show(
                f"{name}: fails with transformers: {type(reason).__name__}: {reason}"[:300]
            )
            continue
        for setting, (run, kind, args) in others.items():
            start = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                result, away, text = outcome(case, lambda: run(case, kind, **args), right)
            lines.append(
                dict(
                    kind=case.kind,
                    name=name,
                    setting=setting,
                    outcome=result,
                    error=away,
                    text=text,
                )
            )
            show(
                f"{case.kind[:5]} {name[:38]:38s} {setting:11s} {result:6s} {away:8.1e} {time.process_time() - start:4.1f}s {text[: int(os.environ.get('WIDTH', 110))]}"
            )
    return lines


def setup():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logger.setLevel("WARNING")
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)


if __name__ == "__main__":
    setup()
    if "RANK" in os.environ:
        measure_two(sys.argv[2], sys.argv[1])
        sys.exit()
    wanted = [name for name in sys.argv[1:] if name != "--more"]
    chosen = [n for n in CASES if not wanted or {n, CASES[n].kind} & {*wanted}]
    measure(
        chosen, lambda text: print(text, flush=True), MORE if "--more" in sys.argv else None
    )
