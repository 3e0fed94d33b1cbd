"""`token_budget="auto"`: peak memory at a few small shapes, and the largest budget that fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.utils import logging


_logger = logging.get_logger(__name__)

__all__ = ['kept_bytes', 'peak_of', 'fit_memory', 'budget_for', 'free_bytes', 'measured_budget']

class kept_bytes(saved_tensors_hooks):
    "While it lasts, the bytes of storages that autograd keeps are counted."
    def __init__(self):
        self.storages = {}
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def _note(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def besides(self, model) -> int: # bytes that are not those of parameters
        own = {t.untyped_storage().data_ptr()
               for t in [*model.parameters(), *model.buffers()]}
        return sum(n for pointer, n in self.storages.items() if pointer not in own)

def peak_of(
    run: Callable, # computes forward and backward of a batch
    batch,
    model: torch.nn.Module,
    device: torch.device,
) -> int: # bytes
    "Bytes that one pass needs besides the parameters."
    memory = torch.get_device_module(device)
    if not hasattr(memory, "reset_peak_memory_stats"): # the CPU's, and Apple's GPUs'
        with kept_bytes() as kept:
            run(batch)
        return kept.besides(model)
    torch.accelerator.synchronize()
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    run(batch)
    torch.accelerator.synchronize()
    return memory.max_memory_allocated(device) - before

def fit_memory(
    shapes: list[tuple[int, int]], # (rows, longest) of three batches or more
    peaks: list[int], # bytes of each
) -> np.ndarray: # a, b, c: bytes, for each token, for each pair of tokens of a row
    "The three numbers of the formula, none below 0."
    from scipy.optimize import nnls
    rows, longest = np.array(shapes, float).T
    terms = np.stack([np.ones(len(rows)), rows * longest, rows * longest ** 2], 1)
    scale = np.array(peaks, float) # relative errors count
    units = terms.max(0)
    return nnls(terms / units / scale[:, None], np.ones(len(rows)))[0] / units

def budget_for(
    fit: np.ndarray, # from `fit_memory`
    free: float, # bytes
    longest: int, # tokens in the longest row
) -> int: # at least one longest row
    "The largest token budget whose dearest micro-batch fits."
    a, b, c = fit
    each = b + c * longest # bytes for each token, in rows of this length
    return max(int((free - a) / each) if each else longest, longest)

def free_bytes(
    model: torch.nn.Module,
    device: torch.device,
    share: float = 0.9, # of what is free; the rest is for fragments and other programs
) -> float:
    "Memory for activations."
    if device.type == "cpu":
        free = psutil.virtual_memory().available
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        memory = torch.get_device_module(device)
        free, _ = memory.mem_get_info(device)
        free += memory.memory_reserved(device) - memory.memory_allocated(device)
    trained = [p for p in model.parameters() if p.requires_grad and p.grad is None]
    return share * free - 3 * sum(p.numel() * p.element_size() for p in trained)

def measured_budget(
    rows, # `StepRows` of a step
    lengths: np.ndarray, # of each
    run: Callable, # computes forward and backward of a batch
    model: torch.nn.Module,
    device: torch.device,
) -> int:
    "`token_budget` for \"auto\", said in one line."
    order = lengths.argsort()
    short, middle, long = (int(order[i]) for i in (0, len(order) // 2, -1))
    samples = [[short], [middle] * 4, [long], [long] * 3]
    trials = [rows.take(numbers) for numbers in samples]
    run(trials[0]) # the first one allocates
    peaks = [peak_of(run, trial, model, device) for trial in trials]
    fit = fit_memory([(len(numbers), int(lengths[numbers[0]])) for numbers in samples], peaks)
    free, longest = free_bytes(model, device), int(lengths[long])
    budget = budget_for(fit, free, longest)
    _logger.warning(f"token_budget='auto': {budget:,} tokens; {free / 1e9:.1f} GB are free, "
                    f"and a token in a row of {longest:,} takes "
                    f"{(fit[1] + fit[2] * longest) / 1e3:,.0f} KB")
    return budget
