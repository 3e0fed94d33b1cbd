"""Planned steps, ready-made batches and streams as the loaders of a Trainer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm
from transformers.trainer_utils import seed_worker
from transformers.utils import logging

from ..bucketing.collating import PaddedCollator, TokenRows, dataset_lengths
from ..bucketing.cut import deal_packed_rows, deal_rows
from ..bucketing.steps import StepPlan, plan_steps
from ..bucketing.packed_rows import PackingWay, pack_batch
from ..foundation.foreign import tree_map
from ..foundation.rows import RowLengths, StepRows, seeded
from .cutting import Part
from .place import StreamPlace

_logger = logging.get_logger(__name__)

__all__ = ['measured_lengths', 'StepSampler', 'PlannedSteps', 'pins_memory', 'reading_options',
           'data_seed', 'planned_loader', 'in_memory', 'stream_loader', 'leave_on_host',
           'sent_to_device', 'packed_part']

def measured_lengths(
    dataset, # rows by number
    column: str, # of lengths, if there is one
    collate: Callable, # measures rows where no cheap rule agrees with it
    model, # whose `main_input_name` counts
) -> np.ndarray: # (rows,)
    "Tokens in each row; rows are read one by one where nothing else says it."
    names = getattr(dataset, "column_names", None) or ()
    if hasattr(dataset, "lengths") or column in names:
        return dataset_lengths(dataset, column)
    measure = RowLengths(collate, getattr(model, "main_input_name", "input_ids"))
    starts = tqdm(range(0, len(dataset), 1024), desc="Reading lengths",
                  disable=len(dataset) < 10_000)
    lengths = []
    with seeded(): # data sets that draw numbers draw the same ones in training
        for start in starts:
            stop = min(start + 1024, len(dataset))
            lengths.append(measure([dataset[i] for i in range(start, stop)]))
    lengths = np.concatenate(lengths)
    if lengths.min() < 1:
        row = int(lengths.argmin())
        raise ValueError(f"row {row} has no tokens: leave empty rows out")
    return lengths

class StepSampler:
    "A batch sampler: this process's rows of every optimizer step of an epoch."
    deal_cost = 256 # of a pass, in tokens: the same on every machine

    def __init__(self,
        lengths: np.ndarray, # tokens in each row
        rank: int = 0, # index of this process
        world_size: int = 1, # number of processes
        token_budget: int | None = None,
        pack: int | None = None, # tokens in a packed row
        **plan, # of `plan_steps`
    ):
        self.lengths, self.plan_options = lengths, plan
        self.rank, self.world_size = rank, world_size
        self.token_budget, self.pack = token_budget, pack
        self.set_epoch(0)

    def set_epoch(self, epoch: int):
        self.plan: StepPlan = plan_steps(self.lengths, epoch=epoch, **self.plan_options)

    def __len__(self) -> int: # optimizer steps of an epoch
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self.plan)):
            rows = _StepRows(self.rows_of_step(number))
            rows.place = self.plan.epoch, number, self.rank
            yield rows

    def rows_of_step(self, number: int) -> list[int]:
        "Row numbers of one step on this process. Raises `ValueError` if there is none."
        rows = self.plan[number]
        if self.world_size == 1:
            return rows.tolist()
        mine = self._dealt(self.lengths[rows])[self.rank]
        if len(mine) == 0:
            raise ValueError(f"step {number} has {len(rows)} rows for {self.world_size} "
                             "processes: make rows_per_step or tokens_per_step larger")
        return rows[mine].tolist()

    def _dealt(self, lengths: np.ndarray) -> list[np.ndarray]:
        if not self.pack:
            deal = deal_rows(lengths, self.world_size, self.token_budget,
                             pass_cost=self.deal_cost)
            return [_flat(parts) for parts in deal]
        deal = deal_packed_rows(lengths, self.world_size, self.pack, self.token_budget,
                                pass_cost=self.deal_cost)
        return [_flat([_flat(part) for part in parts]) for parts in deal]

def _flat(arrays: list) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)

class _StepRows(list):
    "Row numbers of one step, and where in the training it is."
    place: tuple[int, int, int] # epoch, step of the epoch, process

class _SeededRows(Dataset):
    "Rows for worker processes, in which random numbers depend on the step alone."
    def __init__(self, dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: _StepRows):
        sequence = np.random.SeedSequence([self.seed, *rows.place])
        seed = int(sequence.generate_state(1)[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        read = getattr(self.dataset, "__getitems__", None)
        return [self.dataset[i] for i in rows] if read is None else read(list(rows))

class PlannedSteps(DataLoader):
    "The loader of planned steps: transformers sets its epoch."
    def set_epoch(self, epoch: int):
        self.batch_sampler.set_epoch(epoch)

def pins_memory(args) -> bool:
    "Whether loaders pin batches: if they are to, and the device can read pinned memory."
    return args.dataloader_pin_memory and args.device.type not in ("cpu", "mps")

def reading_options(args, is_training: bool) -> dict:
    "Keyword arguments of `DataLoader` that transformers' arguments ask for."
    options = dict(num_workers=args.dataloader_num_workers,
                   prefetch_factor=args.dataloader_prefetch_factor,
                   persistent_workers=args.dataloader_persistent_workers,
                   pin_memory=pins_memory(args),
                   generator=torch.Generator().manual_seed(data_seed(args)),
                   # newer than the oldest transformers that we work with
                   multiprocessing_context=getattr(
                       args, "dataloader_multiprocessing_context", None),
                   in_order=getattr(args, "dataloader_in_order", True))
    if is_training:
        options["worker_init_fn"] = partial(
            seed_worker, rank=args.process_index, num_workers=args.dataloader_num_workers)
    return options

def data_seed(args) -> int:
    return args.seed if args.data_seed is None else args.data_seed

def planned_loader(
    dataset, # rows by number, without the columns that the model does not take
    lengths: np.ndarray, # tokens in each row
    collate: Callable,
    args, # `TrainingArguments`
    token_budget: int | None,
) -> PlannedSteps:
    "The optimizer steps of `rows_per_step` or `tokens_per_step`."
    window = dict(window=args.bucket_window) if args.bucket_window else {}
    sampler = StepSampler(
        lengths, args.process_index, args.world_size, token_budget, args.pack,
        rows_per_step=args.rows_per_step or None,
        tokens_per_step=args.tokens_per_step or None, seed=data_seed(args), **window)
    if args.process_index == 0:
        _logger.info(f"{len(lengths):,} rows in {len(sampler):,} steps an epoch")
    rows = in_memory(dataset, collate)
    if args.dataloader_num_workers:
        rows = _SeededRows(rows, data_seed(args))
    return PlannedSteps(rows, batch_sampler=sampler, collate_fn=collate,
                        **reading_options(args, True))

def in_memory(dataset, collate: Callable):
    "The columns as they lie in memory, where data set and collator allow that."
    if not isinstance(collate, PaddedCollator) or not hasattr(dataset, "remove_columns"):
        return dataset
    try:
        return TokenRows(dataset)
    except TypeError as reason:
        _logger.info(f"rows are read one by one: {reason}")
        return dataset

def _first(batches): return batches[0]

class _InOrder:
    "Batch numbers 0, 1, 2 ... `count` of them, or without end."
    def __init__(self, count: int | None): self.count = count

    def __iter__(self):
        numbers = itertools.count() if self.count is None else range(self.count)
        return ([number] for number in numbers)

    def __len__(self):
        if self.count is None:
            raise TypeError("a stream without end has no length")
        return self.count

def stream_loader(stream, args, is_training: bool) -> DataLoader:
    "A loader of a stream's batches."
    if args.dataloader_num_workers:
        _logger.warning_once("A stream reads ahead by itself: dataloader_num_workers "
                             "is not used for it.")
    if not is_training:
        return DataLoader(_OnePass(stream), batch_size=None)
    ends = getattr(stream, "finite", True) and args.max_steps <= 0
    return DataLoader(
        StreamPlace(stream, endless=not ends), collate_fn=_first,
        batch_sampler=_InOrder(stream.count_batches() if ends else None),
        generator=torch.Generator()) # dropout keeps its numbers

class _OnePass(IterableDataset):
    def __init__(self, stream): self.stream = stream
    def __iter__(self): return iter(self.stream)

def leave_on_host(
    loader: DataLoader, # as accelerate has prepared it
) -> None:
    "Batches of this loader are not moved to the device."
    if isinstance(loader, DataLoaderShard):
        loader.device = None

def sent_to_device(
    batch, # of tensors on the CPU
    args, # `TrainingArguments`
    non_blocking: bool, # go on before the copy has arrived
): # the batch on the device; packed sequences stay where they are
    "A batch is sent to the device."
    device, pin = args.device, pins_memory(args)
    def sent(leaf):
        if not torch.is_tensor(leaf) or leaf.device == device:
            return leaf
        if pin and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()
        return leaf.to(device, non_blocking=non_blocking)
    return batch if device.type == "cpu" else tree_map(sent, batch)

def packed_part(
    rows: StepRows,
    part: Part, # with a layout
    way: PackingWay, # of the model
):
    "Rows laid end to end."
    lengths = np.array([len(rows.rows[i]["input_ids"]) for i in part.numbers])
    return pack_batch(rows.take(part.numbers), part.layout, None, way, lengths=lengths)
