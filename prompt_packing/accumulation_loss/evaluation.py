"""`eval_loss` as the loss of the whole data set as one batch."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from .asking import last_parameter, only_graph_of
from .facts import Findings, LossFacts, Way
from .looks import FAILURES, Asker, ways_of_parts
from .processes import AllProcesses
from .reading import Unreadable, WeightReader
from ..foundation.foreign import tree_map
from ..foundation.mixins import set_for_now
from ..foundation.rows import (
    IndexedRows, LazyBatch, RowLengths, Rows, StepRows, first_size, hand_over_rows, indexed,
    same_numbers, seeded, take_back)

__all__ = ["EvaluationMean", "EvaluationRows", "ways_of_evaluation", "ExactEvaluation"]


class EvaluationMean:
    "Sums of the losses of an evaluation and of their weights."
    def __init__(self,
        facts: LossFacts,
        filters: bool = True, # losses that are not finite are left out
        reads: bool = True, # False for sharded models, whose parameters are elsewhere
    ):
        self.reads = reads and facts.way not in (Way.CHUNKS, Way.ROWS)
        self.takes_count = facts.takes_count
        self.filters = filters
        self.reader = WeightReader()
        self.parts = [] # (loss, weight, rows), where they were computed
        self.by_rows = False # transformers' mean over batches
        self.is_sum = False # the losses of batches add up
        self.last = None # the parameter from which a graph is kept
        self.is_settled = False # a look has said how losses go together
        self.paused = False # rows that are copies of others do not count

    def make_by(self, ways: list[Way]):
        "As a look at some rows allows: weights as read, or transformers' mean."
        self.is_settled = True
        if Way.WEIGHS not in ways:
            self.reads, self.by_rows, self.is_sum = False, True, Way.ADDS in ways

    def noted(self, compute_loss: Callable) -> Callable:
        "`compute_loss` of a Trainer, whose losses are added here."
        def compute_and_note(model, inputs, *args, **kwargs):
            if self.paused:
                return compute_loss(model, inputs, *args, **kwargs)
            rows = first_size(inputs) # compute_loss may take the labels out
            reads = self.reads and not torch.is_inference_mode_enabled()
            with only_graph_of(model, self.last) if reads else nullcontext():
                made = compute_loss(model, inputs, *args, **kwargs)
            loss = made[0] if isinstance(made, tuple) else made
            weight = self._weight_of(loss) if reads else None
            if weight is None and self.takes_count:
                weight = kwargs.get("num_items_in_batch")
            if weight is None:
                self.by_rows, weight = True, 1.0
            self.parts.append((loss.detach(), weight, rows or 1))
            return tree_map(_detached, made)
        return compute_and_note

    def _weight_of(self, loss: torch.Tensor) -> float | None:
        "As read; None, and no more is read, where the graph does not have it."
        if self.last is None and loss.grad_fn is not None:
            self.last = last_parameter(loss)
        try:
            weight = self.reader(loss)
            # a sum is larger for more rows, and compares with nothing
            self.is_sum = self.is_sum or self.reader.is_sum
            if not self.is_sum:
                return weight
        except Unreadable:
            pass
        self.reads = False
        return None

    def sums(self) -> tuple[float, float]:
        "Losses times weights, and weights, in float64."
        numbers = [list(map(float, part)) for part in self.parts]
        losses, weights, rows = torch.tensor(numbers, dtype=torch.float64).view(-1, 3).T
        weights = rows if self.by_rows else weights
        used = weights != 0
        if self.filters:
            used &= losses.isfinite()
        return float((losses * weights)[used].sum()), float(weights[used].sum())

    def mean(self, sum_over_processes: Callable) -> float | None:
        "The loss of the whole data set; None where nothing was added."
        value, weight = map(float, sum_over_processes(*self.sums()))
        return value / weight if weight else None


def _detached(leaf):
    return leaf.detach() if torch.is_tensor(leaf) else leaf


@dataclass
class EvaluationRows:
    "The loader of an evaluation, whose batches know their rows."
    loader: object
    lazily: bool # batches are cut under a budget: collated only if somebody reads them
    main_input: str

    def __post_init__(self):
        self.collate = hand_over_rows(self.loader, makes_batches=not self.lazily)
        self.lengths = RowLengths(self.collate, self.main_input)
        self.rows: StepRows | None = None # of the batch under way
        self.seen = StepRows([], self.collate) # of several batches, where they are small

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        for each in self.loader:
            self.rows = None
            if isinstance(each, Rows):
                self.rows = StepRows(each.rows, self.collate)
                if len(self.seen) < 6:
                    self.seen.rows = self.seen.rows + each.rows
                each = LazyBatch(each, self.collate) if self.lazily else each.batch
            yield each

    def close(self):
        "Let the loader hand over batches again."
        take_back(self.loader)

    def few(self, budget: int | None = None) -> StepRows: # at most six
        "Short rows and long ones, so that parts differ in width; short ones under a budget."
        rows = self.rows if self.rows is not None and len(self.rows) > 5 else self.seen
        lengths = self.lengths(rows.rows)
        order = np.argsort(lengths, kind="stable")
        number = min(6, len(order))
        chosen = order[np.linspace(0, len(order) - 1, number).astype(int)]
        if budget and number * int(lengths[chosen].max()) > budget:
            chosen = order[:number]
            while len(chosen) > 2 and len(chosen) * int(lengths[chosen].max()) > budget:
                chosen = chosen[:-1]
        return rows.some(chosen)


def ways_of_evaluation(asker: Asker, sample: StepRows) -> list[Way]:
    "How the losses of two parts of a few rows make that of all."
    asker.part = lambda rows, numbers: rows.take(numbers) # nothing is packed
    try:
        whole = asker.whole(sample)
        with seeded(1):
            draws = not same_numbers(whole, asker.prepare(sample.take()))
        uncut = asker.run([whole])
    except FAILURES: # without labels there is no loss that a cut could change
        return [Way.ADDS, Way.WEIGHS]
    if draws and first_size(whole) == len(sample):
        sample = IndexedRows(whole, len(sample))
    order = torch.randperm(len(sample), generator=torch.Generator().manual_seed(1)).tolist()
    # two rows or more in a part: that of one row has no partner, and no gradient
    first = 2 if len(sample) > 3 else 1
    deals = [[range(first), range(first, len(sample))], [order[:first], order[first:]]]
    return ways_of_parts(asker, sample, deals, uncut)[0]


class ExactEvaluation:
    "One evaluation: what its batches weigh, found out before the first of them."
    def __init__(self, findings: Findings, loader, mean: EvaluationMean):
        self.findings, self.loader, self.mean = findings, loader, mean

    def settle(self,
        ways: list | None, # what an evaluation before has found
        ask: Callable, # some rows -> ways
        budget: int | None, # most tokens computed at once
    ) -> list | None:
        "How the losses of batches make that of all."
        if self.mean.is_settled or self.loader.rows is None or len(self.loader.seen) < 2:
            return ways
        if ways is None:
            with set_for_now(self.mean, paused=True):
                ways = ask(self.loader.few(budget))
        self.mean.make_by(ways)
        return ways

    def loss(self, processes: AllProcesses) -> float | None: # None: there is none
        "The loss of the data set; where it is a mean over batches, that is said."
        mean = self.mean
        by_rows, batches = processes.sum(float(mean.by_rows), float(len(mean.parts)))
        mean.by_rows = bool(by_rows)
        value = mean.mean(processes.sum)
        if mean.by_rows and batches > 1:
            self.findings.say(_sum_of_batches if mean.is_sum else _mean_of_batches)
        return value

    def real_rows(self, inputs, accelerator: Accelerator) -> tuple:
        """Whether a batch ends with rows that accelerate copied, and the rows before them.

        It fills the last batch with rows from the start of the data set, whose
        predictions are dropped later; the loss has to do without them."""
        rows, state = self.loader.rows, accelerator.gradient_state
        size = first_size(inputs) if rows is None else len(rows)
        # `remainder`: real rows of the last batch of all processes, dealt by rank
        is_last = accelerator.num_processes > 1 and state.end_of_dataloader
        if not is_last or not size or state.remainder <= 0:
            return False, None
        real = min(max(state.remainder - accelerator.process_index * size, 0), size)
        if real in (0, size):
            return real == 0, None
        numbers = list(range(real))
        return True, indexed(inputs, numbers, size) if rows is None else rows.take(numbers)


_mean_of_batches = (
    "what an evaluation batch weighs cannot be read from its loss, so batches are weighted "
    "by their rows, as in transformers: the evaluation loss depends on the batch size")

_sum_of_batches = (
    "the loss is a sum, which is larger for more rows: the evaluation loss is a mean over "
    "batches, as in transformers, and depends on the batch size")
