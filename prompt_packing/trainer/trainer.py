"""`TokenBudgetMixin`, and all mixins together as a drop-in for transformers' Trainer."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers.utils import logging

from ..accumulation_loss.asking import is_sharded, undisturbed
from ..accumulation_loss.chunks import in_chunks
from ..accumulation_loss.exact import ExactLossMixin
from ..accumulation_loss.means import NamedMeanMixin
from ..bucketing.packed_rows import PackingWay
from ..bucketing.packing import way_to_pack
from ..foundation.mixins import check_order, set_for_now
from ..foundation.rows import LazyBatch, StepRows, seeded
from ..packed_sequence.mixin import PackedSequenceMixin
from .collators import CollatorFacts, collator_for, find_collator_facts
from .cutting import (
    CutInWorker, StepCutter, measure_pass_cost, rounded_cost, rows_to_time)
from .loaders import (
    leave_on_host, measured_lengths, packed_part, pins_memory, planned_loader,
    sent_to_device, stream_loader)
from .memory import measured_budget
from .place import StreamPlace
from .predictions import PartPredictions
from .resume import ExactResumeMixin

_logger = logging.get_logger(__name__)

__all__ = ["USUAL_PASS_COST", "StepCut", "TokenBudgetMixin", "Trainer",
           "Seq2SeqTrainer"]

USUAL_PASS_COST = 256 # tokens


class StepCut:
    "The token budget and the cost of a pass of one training, found out when they matter."
    def __init__(self,
        args, # with `token_budget`, `pack`, `pass_cost`
        run: Callable, # batch -> forward and backward of it, waited for
        processes, # `AllProcesses`
        model: torch.nn.Module, # without wrappers
        way: PackingWay | None, # how it keeps packed rows apart
        say: Callable, # takes a message, once each
    ):
        self.args, self.run, self.processes = args, run, processes
        self.model, self.way, self.say = model, way, say
        self.token_budget = args.token_budget if args.token_budget != "auto" else None
        self.pass_cost = getattr(args, "pass_cost", None) # None: not known so far
        self.cutter: StepCutter | None = None

    def __call__(self, rows: StepRows, lengths: np.ndarray) -> list: # of `Part`
        "How these rows are parted."
        if self.cutter is None:
            self._find_budget(rows, lengths)
            most_passes = None
            if is_sharded(self.model): # its processes compute their passes together
                most_passes = lambda passes: max(self.processes.numbers(passes))
            self.cutter = StepCutter(
                token_budget=self.token_budget, pack=self.args.pack, way=self.way,
                pass_cost=lambda: self.cost, say=self.say, most_passes=most_passes)
            # processes measure together, so before any of them cuts
            if self.processes.number > 1 or not self.args.pack:
                self._find_cost(rows, lengths)
        self._rows = rows, lengths # of the step, if the cost is to be measured now
        return self.cutter(lengths)

    @property
    def cost(self) -> int:
        if self.pass_cost is None:
            self._find_cost(*self._rows)
        return self.pass_cost

    def _find_budget(self, rows: StepRows, lengths: np.ndarray):
        if self.token_budget is not None:
            return
        if self.args.token_budget != "auto": # of packed rows, as many as a batch has
            self.token_budget = self.args.pack * max(self.args.train_batch_size, 1)
            return
        with seeded():
            budget = measured_budget(rows, lengths, self.run, self.model, self.args.device)
        # one budget for all processes: what the fullest device can hold
        self.token_budget = min(self.processes.numbers(budget))

    def _find_cost(self, rows: StepRows, lengths: np.ndarray):
        "Measured, and the same on all processes."
        if self.pass_cost is not None:
            return
        clock = time.process_time if self.args.device.type == "cpu" else time.perf_counter
        small, large = rows_to_time(lengths, self.token_budget)
        try:
            with seeded():
                cost = measure_pass_cost(
                    lambda numbers: self.run(rows.take(numbers)), small, large,
                    lambda numbers: len(numbers) * int(lengths[numbers].max()), clock)
        # the cost only chooses the cut, so a model that fails here may still train, and
        # other processes wait in the sum below
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            cost = USUAL_PASS_COST
            self.say("what a pass costs could not be measured "
                     f"({type(error).__name__}: {error}); {cost} tokens are assumed")
        total, = self.processes.sum(float(cost))
        self.pass_cost = rounded_cost(float(total) / self.processes.number)

    def state_dict(self) -> dict: # JSON-safe
        return {"pass_cost": self.pass_cost, "token_budget": self.token_budget}

    def load_state_dict(self, state: dict):
        "What the arguments do not say is as it was in the checkpoint."
        if self.pass_cost is None:
            self.pass_cost = state["pass_cost"]
        if self.token_budget is None:
            self.token_budget = state["token_budget"]


class TokenBudgetMixin:
    """Steps by `args.rows_per_step` or `args.tokens_per_step`, cut by `args.token_budget`
    and `args.pack`; streams of rows.

    List it before the Trainer class and after `ExactLossMixin`, which makes the gradient
    of a cut step that of the uncut one:
    `class T(ExactLossMixin, TokenBudgetMixin, Trainer)`.
    Raises `TypeError` for another order, `ValueError` for a model that cannot be trained
    on packed rows, and for arguments that contradict each other.

    In the order of a run: `_get_dataloader` once a loader, `_prepare_for_training` and
    `set_initial_training_values` once, `cut_step` and `make_part` once a step,
    `prediction_step` once an evaluation batch."""
    _packing_way = None # how the model keeps packed rows apart, once training begins
    _cut: StepCut | None = None # of a training
    _cut_state: dict | None = None # from a checkpoint
    _predictions: PartPredictions | None = None # of an evaluation
    _planned = None # the loader of planned steps
    _data_place = None # a `StreamPlace`, which checkpoints hold
    collator_facts: CollatorFacts | None = None # of the last loader of rows
    _collators_found = {} # kind of data set, columns -> `CollatorFacts`
    _said = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        check_order(cls, TokenBudgetMixin)
        if issubclass(cls, transformers.Trainer):
            _check_exact_comes_first(cls)

    def cuts_steps(self) -> bool:
        args = self.args
        return bool(getattr(args, "token_budget", None) or getattr(args, "pack", None))

    @property
    def token_budget(self) -> int | None:
        """Most tokens computed at once, padding included; None where nothing is cut.

        `"auto"`, or `pack` without a budget, is a number from the first step on."""
        budget = getattr(self.args, "token_budget", None)
        return budget if isinstance(budget, int) else getattr(
            self._cut, "token_budget", None)

    def _say_once(self, text: str):
        if text not in self._said:
            self._said = (*self._said, text)
            _logger.warning(text)

    def _validate_args(self):
        if getattr(self.args, "loss_mean", None) and not isinstance(self, NamedMeanMixin):
            raise ValueError(f"loss_mean={self.args.loss_mean!r} has no effect without "
                             "NamedMeanMixin: put it after TokenBudgetMixin")
        stream = self.train_dataset
        if self.args.max_steps <= 0 and getattr(stream, "finite", False) and \
                hasattr(stream, "count_batches"):
            # transformers refuses data without a length where max_steps is not set:
            # one read of the stream counts its batches
            stream.count_batches()
        super()._validate_args()

    def _get_dataloader(self, dataset, description, *args, is_training=False, **kwargs):
        if getattr(dataset, "batch_size", 0) is None: # torch's sign for ready batches
            return stream_loader(dataset, self.args, is_training)
        if is_training and getattr(self.args, "plans_steps", False):
            return self._planned_loader(dataset, description)
        collate = self._collator_of(dataset)
        # only CPU tensors can be pinned, and a `TextCache` may keep its rows on the GPU
        pin = pins_memory(self.args) and not getattr(dataset, "on_device", False)
        with set_for_now(self, data_collator=collate), \
                set_for_now(self.args, dataloader_pin_memory=pin):
            loader = super()._get_dataloader(
                dataset, description, *args, is_training=is_training, **kwargs)
        if self.cuts_steps(): # on the CPU; parts are sent afterwards
            leave_on_host(loader)
        return loader

    def _collator_of(self, dataset):
        "The Trainer's collator, or one for rows of different lengths where those are cut."
        brings_own = getattr(dataset, "data_collator", None) is not None
        makes_steps = self.cuts_steps() or getattr(self.args, "plans_steps", False)
        if not makes_steps and not brings_own:
            return self.data_collator
        is_stream = isinstance(dataset, IterableDataset)
        first = None if is_stream or not len(dataset) else dataset[0]
        names = list(first) if hasattr(first, "keys") else None
        kind = type(dataset), tuple(names or ())
        if kind not in self._collators_found: # it runs the model
            facts = find_collator_facts(self.data_collator, dataset, self.model,
                                        self.processing_class, names, is_stream)
            # a new dict: the one of the class is shared by all Trainers
            self._collators_found = self._collators_found | {kind: facts}
        self.collator_facts = self._collators_found[kind]
        return collator_for(self.collator_facts, self.data_collator, dataset)

    def _planned_loader(self, dataset, description):
        if isinstance(dataset, IterableDataset):
            raise ValueError("rows_per_step and tokens_per_step plan steps from lengths, "
                             "and an IterableDataset has none: leave them out, or use "
                             "tokenize_corpus")
        args, collate = self.args, self._collator_of(dataset)
        lengths = measured_lengths(dataset, getattr(args, "length_column_name", "length"),
                                   collate, self.model)
        if hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description)
        return planned_loader(dataset, lengths, collate, args, self.token_budget)

    def get_total_train_batch_size(self, args) -> int:
        if not getattr(args, "plans_steps", False):
            return super().get_total_train_batch_size(args)
        # with tokens_per_step a mean, for the log alone
        steps = max(len(self._planned) if self._planned is not None else 1, 1)
        return args.rows_per_step or max(1, round(len(self.train_dataset) / steps))

    def set_initial_training_values(self, args, dataloader, *rest):
        self._planned = dataloader if getattr(args, "plans_steps", False) else None
        data = getattr(dataloader, "dataset", None)
        self._data_place = data if isinstance(data, StreamPlace) else None
        return super().set_initial_training_values(args, dataloader, *rest)

    def _prepare_for_training(self, *args, **kwargs):
        "A model that cannot be trained on packed rows is refused before the first step."
        prepared = super()._prepare_for_training(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        if getattr(self.args, "pack", None):
            mixed = dict(bf16=torch.bfloat16, fp16=torch.float16)
            self._packing_way = way_to_pack(
                model, autocast=mixed.get(self.accelerator.mixed_precision))
            _logger.info(str(self._packing_way))
        if self.cuts_steps():
            self._cut = StepCut(self.args, self.run_without_trace, self._steps.processes,
                                model, self._packing_way, self._say_once)
            if self._cut_state is not None:
                self._cut.load_state_dict(self._cut_state)
        return prepared

    def run_without_trace(self, batch):
        "Forward and backward of a batch; no gradient, no random number is left."
        passes = self._steps.passes
        model, batch = passes.bare(self.model_wrapped), passes.prepare(batch)
        with undisturbed(model), torch.enable_grad():
            passes.loss(model, batch, passes.count([batch])).backward()
        if self.args.device.type != "cpu": # time or memory is measured: wait for it
            torch.accelerator.synchronize()

    def cut_in_worker(self, dataloader) -> CutInWorker | None:
        "Where a loader's batch is the step, its workers cut and collate, if they know how."
        args, budget = self.args, self.token_budget
        knows = budget and args.pass_cost is not None and not args.pack
        is_step = args.gradient_accumulation_steps == 1 and not is_sharded(self.model)
        if knows and is_step and getattr(dataloader, "num_workers", 0):
            return CutInWorker(self._steps.passes.main_input, budget, args.pass_cost)
        return None

    def cut_step(self, rows: StepRows) -> list:
        "The parts in which these rows are computed, as the collator makes them."
        parts = []
        for part in self._cut(rows, self.row_lengths(rows.rows)):
            batch = rows.take(part.numbers) if part.layout is None else packed_part(
                rows, part, self._packing_way)
            parts.append(sent_to_device(batch, self.args, self.accelerator.non_blocking))
        return parts

    def make_part(self, rows: StepRows, numbers):
        "A few rows as a part of a step has them: packed where steps are."
        pack = getattr(self.args, "pack", None)
        few = rows.some(numbers)
        if not pack:
            return few.take()
        lengths = self.row_lengths(few.rows)
        cutter = StepCutter(None, lambda: 0, pack, self._packing_way, lambda text: None)
        if self._packing_way.longest and lengths.max() > self._packing_way.longest:
            return few.take()
        part, = cutter(lengths)
        return packed_part(few, part, self._packing_way)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        "In parts within the budget, where that changes nothing."
        def predict(batch):
            return super(TokenBudgetMixin, self).prediction_step(
                model, batch, prediction_loss_only, *args, **kwargs)
        if not isinstance(inputs, LazyBatch):
            return predict(inputs)
        loader, mean = self._exact_evaluation.loader, self._exact_evaluation.mean
        predictions = self._part_predictions()
        parts = predictions.parts(loader.lengths(loader.rows.rows))
        if len(parts) == 1:
            return predict(inputs.batch)
        bare, facts = self._steps.passes.bare(model), self.loss_facts
        if facts.way == "chunks": # head and loss see the whole batch, as in training
            with in_chunks(bare, list(facts.chunked), self.token_budget, trims=facts.trims):
                return predict(inputs.batch)
        if predictions.why_whole is None:
            with undisturbed(bare), set_for_now(self, is_asking=True), \
                    set_for_now(mean, paused=True):
                predictions.try_parts(predict, loader.few(self.token_budget),
                                      bool(self._eval_ways))
        if predictions.why_whole:
            return predict(inputs.batch)
        return predictions(predict, loader.rows, parts, mean)

    def _part_predictions(self) -> PartPredictions:
        if self._predictions is None:
            cost = getattr(self._cut, "pass_cost", None)
            cost = USUAL_PASS_COST if cost is None else cost
            if is_sharded(self.model): # processes would wait for passes that others lack
                cost = 2 ** 40
            self._predictions = PartPredictions(self.token_budget, cost, self._say_once)
        return self._predictions

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and self._cut is not None:
            Path(output_dir, "step_cut.json").write_text(json.dumps(self._cut.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        file = Path(checkpoint or "", "step_cut.json")
        if checkpoint is not None and file.is_file():
            self._cut_state = json.loads(file.read_text())
            if self._cut is not None:
                self._cut.load_state_dict(self._cut_state)


def _check_exact_comes_first(cls: type):
    order = cls.__mro__
    if ExactLossMixin in order and order.index(ExactLossMixin) < order.index(TokenBudgetMixin):
        return
    raise TypeError(
        f"{cls.__name__}: token_budget cuts steps, and ExactLossMixin keeps their gradient: "
        f"write class {cls.__name__}(ExactLossMixin, TokenBudgetMixin, ...)")


class Trainer(PackedSequenceMixin, ExactLossMixin, TokenBudgetMixin, NamedMeanMixin,
              ExactResumeMixin, transformers.Trainer):
    """`transformers.Trainer` with exact losses, token budgets and exact resume.

    With none of `token_budget`, `pack`, `rows_per_step` and `tokens_per_step` set it
    makes the batches that transformers makes. Data sets may bring their own collator
    (attribute `data_collator`) and streams their batches (attribute `batch_size = None`);
    batches may hold `PackedSequence`s."""


class Seq2SeqTrainer(PackedSequenceMixin, ExactLossMixin, TokenBudgetMixin,
                     NamedMeanMixin, ExactResumeMixin, transformers.Seq2SeqTrainer):
    "`transformers.Seq2SeqTrainer` with exact losses, token budgets and exact resume."
