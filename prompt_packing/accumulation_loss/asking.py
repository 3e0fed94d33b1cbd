"""Compute a loss only to look at it: dropout off, every number put back afterwards, and what it writes or sends noted."""
from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import set_seed

from ..foundation.foreign import write_count

__all__ = ["NoDropout", "Watch", "undisturbed", "versions", "last_parameter",
           "only_graph_of", "is_sharded"]

_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
             "feature_dropout", "feature_alpha_dropout"}


class NoDropout(TorchFunctionMode):
    """While it lasts, dropout gives its input back, wherever it is called.

    No module's `training` is touched, since losses may look at it."""
    active = 0 # how many are entered

    def __enter__(self):
        NoDropout.active += 1
        return super().__enter__()

    def __exit__(self, *error):
        NoDropout.active -= 1
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class Watch(TorchDispatchMode):
    """Notes which parameters are written to while it lasts, and how often processes talk.

    A parameter is copied before its first write, also one by way of `.data`, which no
    version counter shows; `put_back` undoes the writes."""
    def __init__(self, model: nn.Module):
        super().__init__()
        self.collectives = 0
        parameters = [p for p in model.parameters() if not isinstance(p, DTensor)]
        self._parameters = {p.untyped_storage().data_ptr(): p for p in parameters}
        self._data = [(p, p.data) for p in parameters] # to see `p.data = x`
        self._before = {} # address -> its values before the first write

    @property
    def writes(self) -> int: # parameters that were written to or replaced
        replaced = sum(p.data_ptr() != data.data_ptr() for p, data in self._data)
        return len(self._before) + replaced

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives += 1
        for argument, value in zip(func._schema.arguments, args):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written:
                self._keep(value if isinstance(value, (list, tuple)) else [value])
        return func(*args, **(kwargs or {}))

    def _keep(self, tensors):
        for tensor in tensors:
            address = torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr()
            if address in self._parameters and address not in self._before:
                self._before[address] = self._parameters[address].detach().clone()

    def put_back(self):
        with torch.no_grad():
            for parameter, data in self._data:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for address, values in self._before.items():
                self._parameters[address].data.copy_(values)


@contextmanager
def undisturbed(
    model: nn.Module, # its modules keep their modes
    seed: int = 0, # of all random numbers meanwhile
    watch: Watch | None = None, # of forward passes, whose writes are undone
) -> Iterator[None]:
    "Without dropout; random states, buffers, gradients are afterwards what they were."
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    python, of_numpy = random.getstate(), np.random.get_state()
    device = next(model.parameters(), torch.empty(0)).device
    several = [] if device.type == "cpu" else [device.index or 0]
    kind = {} if device.type == "cpu" else dict(device_type=device.type)
    try:
        with torch.random.fork_rng(several, **kind), NoDropout():
            set_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        if watch is not None:
            watch.put_back()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient


def is_sharded(model: nn.Module) -> bool:
    "Whether parameters lie in shards on several processes."
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def versions(model: nn.Module) -> dict: # parameter -> (address, writes)
    "What changes where a parameter is written to in place, or given other data."
    return {p: (p.data_ptr(), write_count(p)) for p in model.parameters()
            if not isinstance(p, DTensor)}


# an evaluation reads weights with as little of the graph as there can be

def last_parameter(
    loss: torch.Tensor, # with its graph
) -> torch.Tensor | None: # a parameter
    "The parameter all of whose uses are nearest to the loss."
    waiting = _uses(loss.grad_fn)
    ready = [loss.grad_fn]
    while ready: # nodes all of whose uses have been passed, breadth first
        node = ready.pop(0)
        if hasattr(node, "variable"):
            return node.variable
        for parent, _ in node.next_functions:
            if parent is None:
                continue
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)
    return None


def _uses(node) -> dict:
    "How often each node of a graph is used by the others."
    counts, stack = {node: 0}, [node]
    while stack:
        for parent, _ in stack.pop().next_functions:
            if parent is None:
                continue
            if parent not in counts:
                counts[parent] = 0
                stack.append(parent)
            counts[parent] += 1
    return counts


@contextmanager
def only_graph_of(
    model: nn.Module,
    parameter: torch.Tensor | None, # of the model; None: all that can
) -> Iterator[None]:
    "While it lasts, a graph is kept from this parameter on, one of those that train."
    before = [(p, p.requires_grad) for p in model.parameters()]
    frozen = not any(required for _, required in before)
    for p, required in before:
        can = p.is_floating_point() if frozen else required
        p.requires_grad_(can and (parameter is None or p is parameter))
    try:
        with torch.enable_grad():
            yield
    finally:
        for p, required in before:
            p.requires_grad_(required)
