"""What is known of a loss, and how its steps are computed: one record that prints."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum

import torch
from transformers.utils import logging

from ..foundation.rows import first_size

__all__ = ["Way", "Kind", "Message", "LossFacts", "Findings", "target_counts"]

_logger = logging.get_logger(__name__)


class Way(str, Enum):
    "How the steps of a loss are computed."
    UNKNOWN = "unknown" # nothing is known yet: a step that is cut is computed whole
    ADDS = "adds" # the losses of the parts add up
    WEIGHS = "weighs" # each part is weighed by the denominator of its mean
    CHUNKS = "chunks" # the model runs in chunks of rows, the loss sees all of them
    ROWS = "rows" # parts are weighed by their rows, which is not exact

    __str__ = str.__str__


_WORDS = {
    Way.UNKNOWN: "nothing is known yet: a step in several parts is computed whole",
    Way.ADDS: "the losses of the parts add up",
    Way.WEIGHS: "each part is weighed by the denominator of its mean, read from the graph",
    Way.CHUNKS: "the model runs in chunks of rows; head and loss see the whole step",
    Way.ROWS: "parts are weighed by their rows, which is not exact",
}


class Kind(str, Enum):
    "What a message says of the gradients."
    EXACT = "exact" # they are right, and something else is worth knowing
    NOT_EXACT = "not exact"
    NOT_CHECKED = "not checked" # nobody can know

    __str__ = str.__str__


@dataclass(frozen=True)
class Message:
    "What was said of a loss, once."
    kind: Kind
    text: str

    def __str__(self) -> str:
        words = "" if self.kind is Kind.EXACT else f"{self.kind.upper()}: "
        return words + self.text

    def __contains__(self, words: str) -> bool:
        return words in str(self)


@dataclass(frozen=True)
class LossFacts:
    "What is known of a loss, and how its steps are computed."
    way: Way = Way.UNKNOWN
    takes_count: bool = False # divides by `num_items_in_batch`
    draws: bool = False # with other random numbers it is another loss, dropout aside
    collator_draws: bool = False # random numbers: parts are entries of its batch
    communicates: bool = False # between processes, by itself
    moves: bool = False # a forward pass writes into parameters
    ordered: bool = False # rows of a ready-made batch depend on their places in it
    verified: tuple[str, ...] = () # signatures of terms that a look has seen
    constant: float | None = None # what every part is divided by, where parts add up
    uneven: bool = False # it was seen that parts of different weight make the whole
    unit: float = 1.0 # a power of two that weights are divided by
    mean_over: str = "" # in words, where a count of the batch is what was read
    per_count: float = 0.0 # weight for each thing of `mean_over`
    chunked: tuple[str, ...] | None = None # modules that run in chunks; None: not tried
    trims: bool = True # chunks may be only as wide as their longest row
    checks: int = 0 # looks that said something
    messages: tuple[Message, ...] = () # once each

    def __str__(self):
        lines = [_WORDS[self.way]]
        if self.mean_over:
            lines.append(f"mean over {self.mean_over}")
        if self.way is Way.CHUNKS:
            shown = [name or "the model" for name in self.chunked[:4]]
            if len(self.chunked) > 4:
                shown.append(f"{len(self.chunked) - 4} more")
            lines.append("in chunks: " + ", ".join(shown))
        lines += [f"{name} = {getattr(self, name)}" for name in (
            "takes_count", "draws", "collator_draws", "checks")]
        return "\n".join([*lines, *(f"said: {message}" for message in self.messages)])

    @property
    def is_exact(self) -> bool: # as far as was looked; what `strict_loss` asks for
        return all(message.kind is Kind.EXACT for message in self.messages)

    @property
    def is_of_parts(self) -> bool: # as a look has found, and not for want of a better way
        return self.way in (Way.ADDS, Way.WEIGHS)

    def state_dict(self) -> dict: # JSON-safe
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping) -> LossFacts:
        known = {f.name: state[f.name] for f in fields(cls) if f.name in state}
        lists = {k: tuple(v) for k, v in known.items() if isinstance(v, (list, tuple))}
        messages = tuple(Message(Kind(m["kind"]), m["text"]) for m in known["messages"])
        return cls(**known | lists | dict(way=Way(known["way"]), messages=messages))


class Findings:
    "The facts of one training as they grow; a message is logged when it is new."
    def __init__(self,
        strict: bool = False, # raise `ValueError` where a loss is not known to be exact
    ):
        self.facts, self.strict = LossFacts(), strict

    def set(self, facts: LossFacts | None = None, **changes):
        self.facts = replace(facts or self.facts, **changes)

    def say(self, text: str, kind: Kind = Kind.NOT_EXACT):
        "Say something about the loss, once."
        message = Message(kind, text)
        if message in self.facts.messages:
            return
        self.set(messages=(*self.facts.messages, message))
        if self.strict and not self.facts.is_exact:
            raise ValueError(str(message))
        _logger.warning(str(message))

    def give_up(self,
        reason: str,
        reads: bool, # the graph has a weight for each part
    ):
        "What is left where no way is exact: the count, weights that can be read, or rows."
        way = Way.WEIGHS if reads else Way.ROWS
        if self.facts.takes_count:
            way = Way.ADDS
        words = "the losses of the parts are added, which is not exact" \
            if way is Way.ADDS else _WORDS[way]
        self.set(way=way, chunked=())
        self.say(f"{reason}: {words}")


def target_counts(batch: Mapping) -> dict[str, float]:
    "Things in a batch that losses are means over, by their names."
    counts = {"rows": first_size(batch) or 1}
    mask = batch.get("attention_mask")
    if torch.is_tensor(mask) and mask.dim() == 2:
        counts["tokens"] = (mask != 0).sum()
    for key, labels in batch.items():
        if "label" not in str(key) or not torch.is_tensor(labels):
            continue
        if labels.is_floating_point():
            counts[f"numbers in {key}"] = torch.isfinite(labels).sum()
            continue
        counts[f"{key} that are not -100"] = (labels != -100).sum()
        if labels.dim() > 1:
            rest = labels[..., 1:] != -100
            counts[f"{key} that are not -100, but each row's first"] = rest.sum()
    return {name: float(count) for name, count in counts.items()}
