"""One optimizer step: its micro-batches, what its parts weighed, and what stands in for missing ones."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .chunks import RowsOfAll
from .facts import LossFacts, Way, target_counts
from .reading import Unreadable, WeightReader
from ..foundation.rows import StepRows, first_size, state_of

__all__ = ["Step", "UNEVEN", "WeightsSeen", "set_aside", "add_back", "drop_gradients",
           "multiply_gradients", "Weightless", "is_filler", "filled_up"]


@dataclass
class Step:
    "One optimizer step, and how far it has come."
    batches: list # that are computed
    count: float | torch.Tensor | None # `num_items_in_batch`
    is_of_loop: bool = False # transformers' loop took its micro-batches
    rows: StepRows | None = None # of this process; None: its batches came ready-made
    way: Way | None = None # in which it is computed; None: not begun
    parts: list | None = None # in which it is computed; None: its micro-batches
    waits_for_last: bool = False # nothing is computed before the last micro-batch
    was_seen: bool = False # by `training_step`
    kept: list = field(default_factory=list) # gradients from before the step
    gather: RowsOfAll | None = None # of the rows of other processes
    failure: str = "" # why it cannot be computed in this way

    def __post_init__(self):
        self.collated = self.batches # whatever an override of `training_step` passes on
        self.states = {id(b): state_of(b) for b in self.batches} if self.rows else {}

    def begin(self, way: Way):
        "From nothing, in this way."
        self.way, self.failure, self.gather = way, "", None
        self.weight, self.loss = 0.0, 0.0 # of its parts so far
        self.reader = WeightReader()
        self.weights = [] # (weight, loss, part) of each part
        self.signatures = set() # of the terms of its parts

    def has_changed(self, inputs) -> bool:
        "Whether an override of `training_step` has changed a batch that was made of rows."
        before = self.states.get(id(inputs))
        return before is not None and before != state_of(inputs)

    def holds(self, inputs) -> bool:
        return any(batch is inputs for batch in self.batches)

    def take(self, inputs: Mapping):
        "An override of `training_step` passes on another batch than it got."
        if self.batches is self.collated and self.is_of_loop:
            self.batches, self.rows = [], None
        has_no_batch = isinstance(self.collated[0], Weightless)
        self.batches = [*self.batches, Weightless(inputs) if has_no_batch else inputs]

    def weighed(self, loss: torch.Tensor, part, facts: LossFacts, weight_of) -> torch.Tensor:
        "The loss of a part times its weight; 0 if it has none, so that processes can meet."
        if self.gather is not None:
            self.gather.loss_is_known = True
        weight = 0.0
        if not isinstance(part, Weightless):
            weight = self._weight(loss, part, facts, weight_of)
        if not weight:
            return 0 * loss.nan_to_num(0.) # a mean over nothing
        self.weight += weight
        self.loss += loss.detach() * weight
        return loss * weight

    def _weight(self, loss, part, facts: LossFacts, weight_of) -> float:
        if self.way in (Way.CHUNKS, Way.ROWS):
            return 1.0 if self.way is Way.CHUNKS else float(first_size(part) or 1)
        weight = weight_of(part)
        if weight is None:
            try:
                weight = self.reader(loss)
            except Unreadable as reason:
                if self.way is Way.WEIGHS:
                    self.failure = self.failure or f"the loss cannot be read ({reason})"
            self.signatures.add(self.reader.signature)
        if self.way is Way.WEIGHS and weight is None:
            return 0.0
        self.weights.append((weight, loss.detach(), part))
        return 1.0 if self.way is Way.ADDS else weight / facts.unit

    def is_new(self, facts: LossFacts) -> bool:
        "Whether a loss has other terms than those that looks have verified."
        return bool(facts.verified) and not self.signatures <= {*facts.verified, ""}


UNEVEN = "weights differ for the first time" # which a look can settle


@dataclass
class WeightsSeen:
    "The weights of a run so far."
    smallest: float = float("inf")
    largest: float = 0.0

    def doubt(self, step: Step, facts: LossFacts) -> str:
        "Why a weight of this step may be wrong; '' if none may."
        if step.way is Way.ADDS:
            return _doubt_in_sum(step, facts)
        return self._doubt_in_mean(step, facts) if step.way is Way.WEIGHS else ""

    def _doubt_in_mean(self, step: Step, facts: LossFacts) -> str:
        """What was read is the divisor of a loss, and that may be a bound of it, as in
        `total / count.clamp(min=1)` of a part without a target. A weight is believed
        where a count of the batch says the same, or where it is one of many."""
        reason = ""
        for weight, loss, part in step.weights:
            counted = None
            if facts.mean_over: # packed rows have no mask to count tokens by
                counted = target_counts(part).get(facts.mean_over)
            if counted is not None:
                is_doubtful = abs(weight - facts.per_count * counted) > 1e-5 * abs(weight)
            else:
                is_light = weight <= 1 < self.largest or weight < self.smallest * (1 - 1e-5)
                is_doubtful = weight and (is_light or float(loss) == 0)
            if is_doubtful:
                reason = "the weight that was read for a part may be a bound of it"
        for weight, *_ in step.weights:
            self.smallest = min(self.smallest, weight)
            self.largest = max(self.largest, weight)
        if not facts.uneven and self.largest - self.smallest > 1e-5 * self.largest:
            reason = UNEVEN
        return reason


def _doubt_in_sum(step: Step, facts: LossFacts) -> str:
    "Parts that add up are divided by one number: the count of the step, or a constant."
    divisors = [weight for weight, *_ in step.weights if weight]
    if not divisors or facts.constant is None and not facts.takes_count:
        return ""
    expected = divisors[0] if facts.constant is None else facts.constant
    if any(abs(each - expected) > 1e-5 * abs(expected) for each in divisors):
        return "the losses of parts are divided by different numbers"
    return ""


# gradients

def set_aside(model: nn.Module) -> list[tuple]: # for `add_back`
    "Parameters with their gradients, which they no longer have."
    kept = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    drop_gradients(model)
    return kept


def add_back(kept: list[tuple]):
    for parameter, gradient in kept:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def drop_gradients(model: nn.Module):
    for parameter in model.parameters():
        parameter.grad = None


def multiply_gradients(model: nn.Module, factor: float):
    if factor == 1.0:
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# processes with fewer batches than others

_NOTHING = torch.zeros(0, dtype=torch.long) # of which transformers counts tokens


def is_filler(batch: Mapping) -> bool:
    "Whether it stands in for a batch that the data set did not have."
    return any(value is _NOTHING for value in batch.values())


class Weightless(dict):
    "A batch computed with weight 0."


def filled_up(
    batches: list, # of this process
    width: int, # micro-batches of a step
    last: Mapping | None, # the last batch that this process had
    main_input: str, # of the model, for example `input_ids`
) -> list: # `width` micro-batches
    """A step's micro-batches, with fillers first. Raises `RuntimeError` without any batch.

    The last micro-batch, with which transformers steps, is then a real one."""
    if not batches and last is None:
        raise RuntimeError("this process has no batch and others have: give each some")
    batches = batches or [Weightless(last)]
    if len(batches) == width: # a `LazyBatch` is not read
        return batches
    filler = dict(batches[0]) | {main_input: _NOTHING, "attention_mask": _NOTHING}
    return [filler] * (width - len(batches)) + batches
