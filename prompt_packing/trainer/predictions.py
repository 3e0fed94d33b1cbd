"""An evaluation batch in parts under a budget; its loss, logits and labels come back in order."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..accumulation_loss.looks import FAILURES, short
from ..bucketing.cut import cut_rows
from ..foundation.foreign import tree_flatten, tree_map
from ..foundation.rows import StepRows
from ..packed_sequence.nests import pad_nest

__all__ = ["joined_predictions", "why_not_joined", "why_not_in_parts", "PartPredictions"]


def _joined(values: tuple, rows: list[int], order: torch.Tensor):
    "A leaf of all parts in the order of the rows; a number for a whole batch is the first's."
    if not torch.is_tensor(values[0]):
        return values[0]
    # `.squeeze()` of one row's output has no dimension for rows
    values = [v[None] if n == 1 and not v.dim() else v for v, n in zip(values, rows)]
    each = {len(v) / n if v.dim() else 0 for v, n in zip(values, rows)}
    if len(each) > 1 or not each <= {*range(1, 1 + int(max(each)))}:
        return values[0]
    shape = [max(sizes) for sizes in zip(*(v.shape[1:] for v in values))]
    wide = torch.cat([_widened(v, shape) for v in values])
    return wide.unflatten(0, (sum(rows), -1))[order].flatten(0, 1)


def _widened(values: torch.Tensor, shape: list[int]) -> torch.Tensor:
    "Padded with -100, as transformers pads predictions between batches."
    missing = [n for size, most in zip(values.shape[:0:-1], shape[::-1])
               for n in (0, most - size)]
    return torch.nn.functional.pad(values, missing, value=-100) if any(missing) else values


def joined_predictions(
    made: list[tuple], # (loss, logits, labels) of each part
    parts: list[np.ndarray], # the rows of each part
    weights: list | None = None, # of the losses; None: their rows
) -> tuple: # the same of all rows, in their order
    """Loss, logits and labels of a batch from those of its parts.

    A leaf with several entries for each row has them together, and a `PackedSequence`
    becomes padded rows, as `PackedSequenceMixin` makes of a whole batch's."""
    order = torch.from_numpy(np.argsort(np.concatenate(parts)))
    rows = [len(part) for part in parts]
    losses, logits, labels = zip(*map(pad_nest, made))
    loss = None
    if losses[0] is not None:
        weights = weights or rows
        total = sum(weights) or 1.0
        loss = sum(w * each for w, each in zip(weights, losses) if w) / total
    logits = tree_map(lambda *leaves: _joined(leaves, rows, order), *logits)
    labels = tree_map(lambda *leaves: _joined(leaves, rows, order), *labels)
    return loss, logits, labels


def why_not_joined(
    whole: tuple, # (loss, logits, labels) of a few rows
    made: list[tuple], # the same of parts of them
    parts: list[np.ndarray], # the rows of each part
) -> str: # '' where the joined parts are the whole
    "What differs between the outputs of rows in one batch and in parts."
    try:
        joined = joined_predictions(made, parts)
    except FAILURES as error:
        return f"outputs of parts cannot be joined ({short(error)})"
    pairs = zip(("predictions", "labels"), pad_nest(whole)[1:], joined[1:])
    for name, one, other in pairs:
        (leaves, shape), (others, other_shape) = tree_flatten(one), tree_flatten(other)
        if str(shape) != str(other_shape):
            return f"{name} of parts have another structure"
        for x, y in zip(leaves, others):
            if torch.is_tensor(x) and x.shape != y.shape:
                return f"{name} of shape {tuple(x.shape)} are {tuple(y.shape)} in parts"
            if torch.is_tensor(x) and not _near(x, y):
                return f"{name} of a row depend on the other rows of its batch"
    return ""


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    "Equal but for rounding, where neither was padded."
    if not x.is_floating_point():
        return bool(((x == y) | (y == -100)).all())
    real = ~((y == -100) | x.isnan())
    largest = x.abs()[real].amax() if real.any() else 1.0
    most = 1e-4 if torch.finfo(x.dtype).eps < 1e-5 else 3e-2
    return bool(((x - y).abs()[real] <= most * largest + 1e-7).all())


def why_not_in_parts(
    predict: Callable, # batch -> (loss, logits, labels)
    few: StepRows, # rows of an evaluation, two at least
) -> str: # '' where parts give the same
    "Predict a few rows, whole and in two parts: why that is not the same."
    parts = [np.arange(1), np.arange(1, len(few))]
    whole = predict(few.take())
    try:
        made = [predict(few.take(part)) for part in parts]
    except FAILURES as error:
        return f"a part of one fails alone ({short(error)})"
    return why_not_joined(whole, made, parts)


class PartPredictions:
    "Predicts evaluation batches in parts, where a few rows came out the same in parts."
    def __init__(self,
        token_budget: int, # most tokens computed at once
        pass_cost: int, # fixed cost of a pass, in tokens
        say: Callable, # takes a message, once each
    ):
        self.token_budget, self.pass_cost, self.say = token_budget, pass_cost, say
        self.why_whole: str | None = None # '': parts do; None: not tried

    def parts(self, lengths: np.ndarray) -> list[np.ndarray]: # row numbers
        parts = cut_rows(lengths, self.token_budget, pass_cost=self.pass_cost)
        return [np.sort(part) for part in parts]

    def try_parts(self, predict: Callable, few: StepRows, loss_is_of_parts: bool):
        "Before the first batch is cut."
        self.why_whole = "the loss of some rows is not that of parts of them"
        if loss_is_of_parts:
            self.why_whole = why_not_in_parts(predict, few) if len(few) > 1 else ""
        if self.why_whole:
            self.say(f"evaluation batches are predicted whole: {self.why_whole}")

    def __call__(self, predict: Callable, rows: StepRows, parts: list, mean) -> tuple:
        "Loss, logits and labels of all rows; mean: an `EvaluationMean` that notes losses."
        before = len(mean.parts)
        made = [predict(rows.take(part)) for part in parts]
        noted = mean.parts[before:]
        weights = None
        if len(noted) == len(parts) and not mean.by_rows:
            weights = [float(weight) for _, weight, _ in noted]
        return joined_predictions(made, parts, weights)
