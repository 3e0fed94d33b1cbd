"""The rows of a step become the cheapest parts within a token budget, padded or packed."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..bucketing.cut import cut_packed_rows, cut_rows
from ..bucketing.packed_rows import PackingWay
from ..foundation.rows import RowLengths, StepRows

__all__ = ["Part", "StepCutter", "CutInWorker", "rounded_cost", "rows_to_time",
           "measure_pass_cost"]


@dataclass(frozen=True)
class Part:
    "Rows that are computed at once."
    numbers: np.ndarray # of the rows, int64
    layout: list | None = None # of packed rows: places in `numbers`; None: padded


@dataclass
class StepCutter:
    "The rows of a step into parts within a token budget: numbers of rows, not tensors."
    token_budget: int | None # most tokens of a part: rows x longest row
    pass_cost: Callable # () -> the fixed cost of a pass, in tokens, once it matters
    pack: int | None = None # tokens in a packed row; None: rows are padded
    way: PackingWay | None = None # how the model keeps packed rows apart
    say: Callable = print # takes a message, once each
    most_passes: Callable | None = None # passes here -> most of all processes
    has_spoken: bool = field(default=False, init=False) # of a budget that costs time

    def __call__(self, lengths: np.ndarray) -> list[Part]:
        longest = int(lengths.max())
        if self.token_budget and longest > self.token_budget:
            self.say(f"a row of {longest:,} tokens is longer than token_budget="
                     f"{self.token_budget:,}: such rows are computed alone")
        everything = np.arange(len(lengths))
        if not self.pack:
            return self._padded(everything, lengths)
        most = self.way.longest or longest
        short, long = everything[lengths <= most], everything[lengths > most]
        # processes that compute together ask as often: once here, once for their passes
        most_long = self.most_passes(len(long)) if self.most_passes else len(long)
        if most_long == 0:
            return self._packed(everything, lengths)
        self.say(f"rows of more than {most:,} tokens are padded: the model does not keep "
                 "them apart in packed rows")
        if self.most_passes:
            return self._padded(everything, lengths)
        packed = self._packed(short, lengths) if len(short) else []
        return self._padded(long, lengths) + packed

    def _padded(self, rows: np.ndarray, lengths: np.ndarray) -> list[Part]:
        cost = self.pass_cost()
        parts = self._with_equal_passes(lambda **passes: cut_rows(
            lengths[rows], self.token_budget, pass_cost=cost, **passes), len(rows))
        self._compare_with_one_pass(lengths[rows], parts, cost)
        # rows in their own order: what is not cut is computed as it came
        return [Part(np.sort(rows[part])) for part in parts]

    def _packed(self, rows: np.ndarray, lengths: np.ndarray) -> list[Part]:
        # what one pass holds is one pass, and no cost need be known
        fits = self.token_budget is None or lengths[rows].sum() <= self.token_budget
        cost = 2 ** 40 if fits else self.pass_cost()
        parts = self._with_equal_passes(lambda **passes: cut_packed_rows(
            lengths[rows], self.pack, self.token_budget, pass_cost=cost, **passes),
            len(rows))
        made = []
        for part in parts: # packed rows, each of some rows
            numbers = np.concatenate([np.asarray(each) for each in part])
            ends = np.cumsum([len(each) for each in part])
            layout = [list(range(end - len(each), end)) for end, each in zip(ends, part)]
            made.append(Part(rows[numbers], layout))
        return made

    def _with_equal_passes(self, cut: Callable, rows: int) -> list:
        "The cheapest cut, into as many parts as the process with the most has."
        parts = cut()
        if self.most_passes is None:
            return parts
        most = self.most_passes(len(parts))
        return parts if most == len(parts) else cut(passes=min(most, rows))

    def _compare_with_one_pass(self, lengths: np.ndarray, parts: list, cost: int):
        "Say once where the budget makes passes that cost more than one would."
        if self.has_spoken or len(parts) < 2 or self.token_budget is None:
            return
        computed = sum(len(part) * int(lengths[part].max()) + cost for part in parts)
        whole = len(lengths) * int(lengths.max())
        if computed > whole + cost:
            self.has_spoken = True
            self.say(f"token_budget={self.token_budget:,} cuts a step of {whole:,} tokens "
                     f"into {len(parts)} passes, and one pass would cost less: set a larger "
                     "budget if memory allows it")


class CutInWorker:
    "Rows of a step -> its parts, in a loader's workers; the same cut as anywhere else."
    def __init__(self, main_input: str, token_budget: int, pass_cost: int):
        self.main_input, self.token_budget, self.pass_cost = main_input, token_budget, pass_cost
        self.lengths = None

    def __call__(self, rows: StepRows) -> list: # batches
        self.lengths = self.lengths or RowLengths(rows.collate, self.main_input)
        parts = cut_rows(self.lengths(rows.rows), self.token_budget, pass_cost=self.pass_cost)
        return [rows.take(np.sort(part)) for part in parts]


# the fixed cost of a pass

def rounded_cost(
    cost: float, # in tokens
) -> int: # 0, or a power of 4 between 16 and 16,384
    "A cost that two measurements agree on."
    if not cost > 8:
        return 0
    return int(4 ** min(max(round(math.log(cost, 4)), 2), 7))


def rows_to_time(
    lengths: np.ndarray, # tokens in each row of a step
    token_budget: int | None,
    most_tokens: int = 320, # of the larger batch
) -> tuple[list[int], list[int]]: # row numbers of two batches
    "The shortest row, and more of the shorter rows."
    order = lengths.argsort(kind="stable").tolist()
    most = min(most_tokens, token_budget or most_tokens)
    large = order[:1]
    while len(large) < len(order) and (len(large) + 1) * lengths[order[len(large)]] <= most:
        large = order[:len(large) + 1]
    if len(large) == 1: # all rows are long: one of them, and the shortest
        large = order[-1:]
    return order[:1], large


def measure_pass_cost(
    run: Callable, # forward and backward of a batch, waited for
    small, # a batch of few tokens
    large, # a batch of more
    tokens: Callable, # batch -> tokens computed
    clock: Callable = time.process_time, # of a device's work: time.perf_counter
    rounds: int = 2,
) -> float: # in tokens
    """The fixed cost of a pass, by the time that each of two batches takes.

    The least of several times is the one that least else disturbed."""
    run(small) # what is made at a first pass is no part of the cost
    least = [math.inf, math.inf]
    for _ in range(rounds):
        for which, batch in enumerate((small, large)):
            start = clock()
            run(batch)
            least[which] = min(least[which], clock() - start)
    more = tokens(large) - tokens(small)
    per_token = (least[1] - least[0]) / more if more > 0 else 0.0
    if per_token <= 0: # nothing but the passes costs anything
        return float(tokens(large))
    return max(least[0] / per_token - tokens(small), 0.0)
