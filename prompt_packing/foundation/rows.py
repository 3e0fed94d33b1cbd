"""A step is a list of the user's own rows; a batch is what the user's collator makes of some of them."""
from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from .foreign import pinned, tree_flatten, tree_map

__all__ = ["Rows", "RowCollator", "hand_over_rows", "take_back", "LazyBatch", "state_of",
           "StepRows", "IndexedRows", "first_size", "indexed", "copied", "same_numbers",
           "seeded", "positions", "RowLengths"]


class Rows:
    """A micro-batch as its rows, and as the batch that its loader made of them.

    It is no list and no mapping, so transformers looks for nothing in it."""
    def __init__(self,
        rows: list, # the user's examples
        batch=None, # of them, by the loader's collator; None: not made so far
        parts: list | None = None, # of the step, where a worker has made them
    ):
        self.rows, self.batch, self.parts = rows, batch, parts

    def __contains__(self, key) -> bool: # transformers asks for "labels", to count them
        return False

    def to(self, *args, **kwargs): # accelerate sends batches to the device
        self.batch = send_to_device(self.batch, *args, **kwargs)
        self.parts = send_to_device(self.parts, *args, **kwargs)
        return self

    def pin_memory(self, device=None): # and torch's loader pins them
        self.batch, self.parts = pinned(self.batch, device), pinned(self.parts, device)
        return self


class RowCollator:
    "Takes the place of a loader's `collate_fn`, and hands over the rows that it gets."
    makes_batches = False # besides: the same calls, in the same order, as without us
    cut: Callable | None = None # `StepRows` -> parts, in the process that reads the rows

    def __init__(self, collate: Callable):
        self.collate = collate

    def __getattr__(self, name: str):
        # while an object is copied or pickled it has no `collate` yet
        if name.startswith("__") or name == "collate":
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, rows):
        if not isinstance(rows, list): # columns of a data set with `__getitems__`
            return self.collate(rows)
        kept = copied(rows)
        batch = self.collate(rows) if self.makes_batches else None
        parts = self.cut(StepRows(kept, self.collate)) if self.cut else None
        return Rows(kept, batch, parts)


def _holder(dataloader) -> tuple: # an object, and the attribute that holds the collator
    "Where the user's collator is: inside accelerate's loader, and wrappers of ours."
    holder, name = getattr(dataloader, "base_dataloader", dataloader), "collate_fn"
    while hasattr(getattr(holder, name, None), "collate") and not isinstance(
            getattr(holder, name), RowCollator):
        holder, name = getattr(holder, name), "collate"
    return holder, name


def hand_over_rows(
    dataloader, # torch's, or accelerate's around one
    makes_batches: bool, # the loader, or its workers, collate as they would without us
    cut: Callable | None = None, # `StepRows` -> parts, where each of its batches is a step
) -> Callable | None: # the user's collator; None: a loader of ready-made batches
    "Let a loader hand over `Rows` from its next iteration on."
    loader = getattr(dataloader, "base_dataloader", dataloader)
    if not isinstance(loader, DataLoader) or loader.collate_fn is None:
        return None
    # batches of the data set itself, or slices of one process's batches
    makes_own = loader.batch_sampler is None and not getattr(
        loader.dataset, "yields_rows", False)
    if makes_own or hasattr(dataloader, "slice_fn"):
        return None
    holder, name = _holder(dataloader)
    if not isinstance(getattr(holder, name), RowCollator):
        setattr(holder, name, RowCollator(getattr(holder, name)))
    collator = getattr(holder, name)
    collator.makes_batches, collator.cut = makes_batches, cut
    return collator.collate


def take_back(dataloader):
    "Let a loader hand over batches again, as its owner expects."
    holder, name = _holder(dataloader)
    collator = getattr(holder, name, None)
    if isinstance(collator, RowCollator):
        setattr(holder, name, collator.collate)


def copied(rows: Iterable) -> list:
    "Shallow copies: a collator may pop labels out of a row."
    return [dict(row) if type(row) is dict else copy.copy(row) for row in rows]


class LazyBatch(MutableMapping):
    """A micro-batch of a step that is cut: collated only if somebody reads it.

    The Trainer's loop passes it to `training_step`. What is put into it or taken out
    has no effect on the parts, and `was_changed` says so."""
    def __init__(self, rows: Rows, collate: Callable):
        self.rows, self._collate, self.was_changed = rows, collate, False

    @property
    def batch(self) -> dict:
        if self.rows.batch is None:
            self.rows.batch = self._collate(copied(self.rows.rows))
        return self.rows.batch

    def __getitem__(self, key):
        return self.batch[key]

    def __iter__(self):
        return iter(self.batch)

    def __len__(self):
        return len(self.batch)

    def __setitem__(self, key, value):
        self.was_changed, self.batch[key] = True, value

    def __delitem__(self, key):
        self.was_changed = True
        del self.batch[key]


def state_of(batch: Mapping) -> dict:
    "What changes where somebody replaces a value of a batch, or writes into a tensor."
    if isinstance(batch, LazyBatch):
        return {"": batch.was_changed}
    return {key: (id(value), getattr(value, "_version", 0)) for key, value in batch.items()}


class StepRows:
    "The rows of a step, and what the collator makes of those that are asked for."
    def __init__(self,
        rows: list,
        collate: Callable, # the user's: rows -> batch
        sizes: Sequence[int] | None = None, # rows of each micro-batch, in order
    ):
        self.rows, self.collate = rows, collate
        self.sizes = list(sizes or [len(rows)])

    @classmethod
    def of(cls, micro: list[Rows], collate: Callable) -> StepRows:
        rows = [row for each in micro for row in each.rows]
        return cls(rows, collate, [len(each.rows) for each in micro])

    def __len__(self) -> int:
        return len(self.rows)

    def bounds(self) -> list[range]:
        "The numbers of the rows of each micro-batch."
        ends = np.cumsum(self.sizes).tolist()
        return [range(end - size, end) for end, size in zip(ends, self.sizes)]

    def take(self,
        numbers: Iterable[int] | None = None, # of rows, in the order wanted; None: all
    ): # what the user's collator makes of them
        chosen = self.rows if numbers is None else [self.rows[int(i)] for i in numbers]
        return self.collate(copied(chosen))

    def some(self, numbers: Iterable[int]) -> StepRows:
        return StepRows([self.rows[int(i)] for i in numbers], self.collate)


class IndexedRows(StepRows):
    "The same for a batch that came ready-made: rows are entries of its first dimension."
    def __init__(self, batch: Mapping, number: int):
        self.batch, self.rows, self.sizes = batch, range(number), [number]

    def take(self, numbers=None):
        if numbers is None:
            return self.batch
        return indexed(self.batch, [int(i) for i in numbers], len(self.rows))

    def some(self, numbers):
        numbers = list(numbers)
        return IndexedRows(self.take(numbers), len(numbers))


def first_size(batch) -> int | None:
    "The one first size of all tensors of a batch, which is its rows; None: they differ."
    if not isinstance(batch, Mapping):
        return None
    if any(isinstance(value, PackedSequence) for value in batch.values()):
        return None
    leaves = tree_flatten(dict(batch))[0]
    sizes = {len(leaf) for leaf in leaves if torch.is_tensor(leaf) and leaf.dim()}
    sizes |= {len(leaf) for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def indexed(batch, numbers: list[int], rows: int):
    "Entries of the first dimension of all that has as many as there are rows."
    index = torch.as_tensor(numbers, dtype=torch.long)

    def of(leaf):
        if torch.is_tensor(leaf) and leaf.dim() and len(leaf) == rows:
            return leaf[index.to(leaf.device)]
        if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == rows:
            return leaf[index.numpy()]
        return leaf
    return tree_map(of, dict(batch))


# collators that draw random numbers

def same_numbers(first, second) -> bool:
    "Whether two batches hold the same values."
    (some, shape), (others, other_shape) = tree_flatten(first), tree_flatten(second)
    if str(shape) != str(other_shape):
        return False
    for one, other in zip(some, others):
        if torch.is_tensor(one) and not torch.equal(one, other):
            return False
        if isinstance(one, np.ndarray) and not np.array_equal(one, other):
            return False
    return True


@contextmanager
def seeded(
    seed: int | None = None, # None: the numbers go on, and are put back afterwards
) -> Iterator[None]:
    "Random numbers on the CPU from a seed; afterwards as if none had been drawn."
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


# lengths: they choose the cut alone, so a wrong one costs time, and never exactness

def _is_ids(name, main_input: str) -> bool:
    return name == main_input or str(name).endswith(("input_ids", "labels"))


def positions(
    batch, # of one row, as the collator makes it
    main_input: str, # of the model, for example `input_ids`
) -> int: # at least 1
    "Positions that a row takes in the model."
    values = dict(batch) if isinstance(batch, Mapping) else {"": batch}
    packed = [len(v.data) for v in values.values() if isinstance(v, PackedSequence)]
    if packed:
        return max(packed)
    tensors = {k: v for k, v in values.items() if torch.is_tensor(v) and v.dim() > 1}
    ids = [v.numel() for k, v in tensors.items()
           if _is_ids(k, main_input) and not v.is_floating_point()]
    if ids:
        return max(ids)
    # frames of sound, states of a game, features: the longest of a tensor's sizes
    main = [tensors[main_input]] if main_input in tensors else tensors.values()
    return max((max(v.shape[1:]) for v in main), default=1)


class RowLengths:
    """Tokens of rows, by their ids where the collator agrees, else by what it makes of each.

    Whether it agrees is tried on four rows: a collator may cut, add or join tokens."""
    def __init__(self,
        collate: Callable, # the user's
        main_input: str = "input_ids", # of the model
        given: Callable | None = None, # row -> its length, where the user knows better
    ):
        self.collate, self.main_input, self.given = collate, main_input, given
        self.keys: tuple | None = None # of a row, whose lengths count; (): none do

    def __call__(self, rows: list) -> np.ndarray: # int64 (rows,)
        if self.given is not None:
            return np.array([self.given(row) for row in rows], np.int64)
        if self.keys is None:
            self.keys = self._find_keys(rows)
        try:
            if self.keys:
                return self._by_keys(rows)
        except (TypeError, KeyError): # rows of several kinds
            self.keys = ()
        return np.array([self._alone(row) for row in rows], np.int64)

    def _by_keys(self, rows: list) -> np.ndarray:
        lengths = [[len(row[key]) for row in rows] for key in self.keys]
        return np.array(lengths, np.int64).max(0, initial=1)

    def _alone(self, row) -> int:
        with seeded(): # what is measured draws no number of the training
            return max(1, positions(self.collate(copied([row])), self.main_input))

    def _find_keys(self, rows: list) -> tuple:
        if not isinstance(rows[0], Mapping):
            return ()
        self.keys = tuple(key for key, value in rows[0].items() if hasattr(value, "__len__")
                          and _is_ids(key, self.main_input) and not isinstance(value, str))
        if not self.keys:
            return ()
        try:
            lengths = self._by_keys(rows)
            order = lengths.argsort(kind="stable")
            few = {0, int(order[0]), int(order[-1]), int(order[len(rows) // 2])}
            agrees = all(lengths[i] == self._alone(rows[i]) for i in few)
        except (TypeError, KeyError):
            agrees = False
        return self.keys if agrees else ()
