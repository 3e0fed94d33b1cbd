"""For losses that couple rows: the backbone runs a few rows at a time, head and loss see all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from .asking import NoDropout
from ..foundation.foreign import (
    BatchNorm, tree_flatten, tree_map, tree_unflatten)
from ..foundation.mixins import set_for_now

__all__ = ['chunked_modules', 'in_chunks', 'RowsOfAll']

def _rows_in(nest) -> int | None:
    "First dimension of the first tensor of a nest."
    tensors = (leaf for leaf in tree_flatten(nest)[0] if torch.is_tensor(leaf))
    return next((len(tensor) for tensor in tensors if tensor.dim()), None)

def _gives_rows(inputs, outputs, batch_rows: int) -> bool:
    rows = _rows_in(inputs)
    if not rows or rows % batch_rows: # as (1, rows, size), where rows attend to rows
        return False
    tensors = [leaf for leaf in tree_flatten(outputs)[0] if torch.is_tensor(leaf)]
    return bool(tensors) and all(
        tensor.dim() and len(tensor) and len(tensor) % rows == 0 for tensor in tensors)

def _topmost(module: nn.Module, name: str, cuttable: dict, without) -> list[str]:
    if not any(True for _ in module.parameters()):
        return []
    couples = any(isinstance(part, BatchNorm) for part in module.modules())
    if cuttable.get(module) and not couples and name not in without:
        return [name]
    return [found for child, part in module.named_children()
            for found in _topmost(part, f"{name}.{child}".lstrip("."), cuttable, without)]

def chunked_modules(
    model: nn.Module,
    run: Callable, # computes a loss of a batch with the model, once
    batch_rows: int, # of this batch
    without: Collection[str] = (), # names of submodules that are cut inside instead
) -> list[str]: # names of submodules; "" is the model itself
    "The topmost modules that can take the rows of a batch in chunks."
    cuttable = {}
    def note(module, args, kwargs, outputs):
        before = cuttable.get(module, True)
        cuttable[module] = before and _gives_rows((args, kwargs), outputs, batch_rows)
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        run()
    return _topmost(model, "", cuttable, without)

def _named_arguments(forward: Callable, args: tuple, kwargs: dict) -> dict:
    "Arguments by name, so that rows and masks are found."
    signature = inspect.signature(forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL and named.get(name):
            raise TypeError("a module that takes any number of arguments")
    return named

def _has_rows(value, rows: int) -> bool:
    "Whether all tensors of an argument have an entry for each row."
    tensors = [leaf for leaf in tree_flatten(value)[0] if torch.is_tensor(leaf)]
    return bool(tensors) and all(leaf.dim() and len(leaf) == rows for leaf in tensors)

def _taken(values: dict, rows: torch.Tensor, width: int | None = None) -> dict:
    "Some rows of all arguments; only so many columns of those that are as wide as the mask."
    columns = values["attention_mask"].shape[-1] if width else None
    def of(leaf):
        if not torch.is_tensor(leaf):
            return leaf
        leaf = leaf[rows.to(leaf.device)]
        is_wide = width and leaf.dim() > 1 and leaf.shape[1] == columns
        return leaf[:, :width] if is_wide else leaf
    return tree_map(of, values)

def _lengths(mask: torch.Tensor) -> torch.Tensor: # (rows,), on the CPU
    "Columns of each row up to its last one that the mask does not hide."
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return ((mask != 0) * columns).amax(1).clamp(min=1).cpu()

def _chunks_of(lengths: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    "Row numbers of each chunk, of one row or of at most so many tokens."
    order = lengths.argsort(descending=True, stable=True)
    chunks, start = [], 0
    while start < len(order):
        stop = start + max(1, tokens // int(lengths[order[start]]))
        chunks.append(order[start:stop])
        start = stop
    return chunks

def _put_back(parts: tuple, order: torch.Tensor, widths: list[int], width: int):
    "Outputs of all chunks as one tensor, in the order of the rows, as wide as untrimmed."
    if not torch.is_tensor(parts[0]) or not parts[0].dim():
        return parts[0]
    if parts[0].dim() > 1 and [part.shape[1] for part in parts] == widths:
        parts = [nn.functional.pad(p, [0, 0] * (p.dim() - 2) + [0, width - p.shape[1]])
                 for p in parts]
    by_row = torch.cat(tuple(parts)).unflatten(0, (len(order), -1))
    return by_row[order.to(by_row.device)].flatten(0, 1)

def _has_one_entry_a_row(outputs, chunks: list) -> bool:
    "Whether every output of a chunk has as many entries as the chunk has rows."
    return all(len(leaf) == len(chunk) for flat, chunk in zip(outputs, chunks)
               for leaf in flat if torch.is_tensor(leaf) and leaf.dim())

def _width(values: dict) -> int:
    "Columns of the widest argument."
    return max((leaf.shape[1] for leaf in tree_flatten(values)[0]
                if torch.is_tensor(leaf) and leaf.dim() > 1), default=1)

class _InChunks:
    "The `forward` of one module while it runs in chunks."
    def __init__(self, usual: Callable, tokens: int, gather, trims: bool):
        self.usual, self.tokens, self.gather, self.trims = usual, tokens, gather, trims
        self.__signature__ = inspect.signature(usual)

    def __call__(self, *args, **kwargs):
        arguments = _named_arguments(self.usual, args, kwargs)
        rows = _rows_in(arguments)
        values = {k: v for k, v in arguments.items() if _has_rows(v, rows)}
        self.shared = {k: v for k, v in arguments.items() if k not in values}
        if not self.gather:
            return self._run(values, rows)
        own = self.gather.own_rows(rows)
        return tree_map(self.gather, self._run(_taken(values, own), len(own)))

    def _run(self, values, rows: int):
        mask = values.get("attention_mask")
        trims = self.trims and torch.is_tensor(mask) and mask.dim() == 2
        # untrimmed rows are all as wide as the batch
        width = mask.shape[1] if trims else _width(values)
        lengths = _lengths(mask) if trims else torch.full((rows,), width)
        chunks = _chunks_of(lengths, self.tokens)
        widths = [int(lengths[chunk].max()) for chunk in chunks]
        taken = [_taken(values, chunk, most if trims else None)
                 for chunk, most in zip(chunks, widths)]
        outputs, shape = zip(*map(tree_flatten, map(self._run_chunk, taken)))
        if trims and not _has_one_entry_a_row(outputs, chunks):
            self.trims = False # entries of tokens cannot be put back in their places
            return self._run(values, rows)
        order = torch.cat(chunks).argsort()
        whole = [_put_back(parts, order, widths, width) for parts in zip(*outputs)]
        return tree_unflatten(whole, shape[0])

    def _run_chunk(self, values):
        if not torch.is_grad_enabled():
            return self.usual(**values, **self.shared)
        return checkpoint(self.usual, use_reentrant=False, context_fn=_same_dropout,
                          **values, **self.shared)

def _same_dropout() -> tuple:
    "Contexts of the forward pass and of its repetition: dropout is off in both or none."
    return nullcontext(), NoDropout() if NoDropout.active else nullcontext()

@contextmanager
def in_chunks(
    model: nn.Module,
    names: list[str], # of submodules, from `chunked_modules`
    tokens: int, # most in a chunk: rows x longest row
    gather=None, # a `RowsOfAll`: outputs of all processes are put together
    trims: bool = True, # chunks are only as wide as their longest row
) -> Iterator[None]:
    "While it lasts, these modules run their rows in chunks, and again in backward."
    with ExitStack() as modules:
        for module in map(model.get_submodule, names):
            cut = _InChunks(module.forward, tokens, gather, trims)
            modules.enter_context(set_for_now(module, forward=cut))
        yield

class _Gather(torch.autograd.Function):
    "Rows of all processes; backward: the sum of all gradients of one's own rows."
    @staticmethod
    def forward(ctx, tensor, places, rank, rows_of_all):
        ctx.rows_of_all, ctx.own = rows_of_all, places[rank]
        sizes = list(map(len, places))
        missing = tensor.new_zeros(max(sizes) - len(tensor), *tensor.shape[1:])
        padded = torch.cat([tensor, missing])
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded.contiguous())
        everyones = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        for part, size, place in zip(parts, sizes, places):
            everyones[place.to(tensor.device)] = part[:size]
        return everyones

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.rows_of_all.loss_is_known:
            raise RuntimeError("the loss computes gradients itself, which it cannot over "
                               "several processes")
        gradient = gradient.clone(memory_format=torch.contiguous_format) # others read it
        dist.all_reduce(gradient)
        return gradient[ctx.own.to(gradient.device)], None, None, None

class RowsOfAll:
    "Gathers the outputs of a module that has run this process's rows."
    def __init__(self,
        sizes: list[list[int]], # rows of each micro-batch, by process
        rank: int, # of this process
    ):
        self.rank, self.number, owners = rank, len(sizes), []
        self.loss_is_known = False # before, no gradient may come back through it
        for turn in zip_longest(*sizes, fillvalue=0): # in the order of an uncut batch
            for process, rows in enumerate(turn):
                owners += [process] * rows
        self.owners = torch.tensor(owners) # the process of each row

    def _places(self, each: int) -> list[torch.Tensor]:
        "Where the entries of each process are, with `each` entries for a row."
        owners = self.owners.repeat_interleave(each)
        return [(owners == process).nonzero().flatten() for process in range(self.number)]

    def own_rows(self,
        rows: int, # of a tensor that holds those of all, or several entries for each row
    ) -> torch.Tensor: # int64, numbers of this process's entries
        return self._places(rows // len(self.owners))[self.rank]

    def __call__(self, leaf):
        if not torch.is_tensor(leaf) or not leaf.dim():
            return leaf
        each = len(leaf) // len(self._places(1)[self.rank])
        return _Gather.apply(leaf, self._places(each), self.rank, self)
