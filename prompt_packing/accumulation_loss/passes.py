"""What a Trainer does with a batch, in one place: its loss, its backward pass, its count."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType

from ..foundation.foreign import plain_forward
from ..foundation.mixins import set_for_now

__all__ = ["TrainerPasses", "why_not_exact"]


class TrainerPasses:
    "A Trainer as those see it who decide how steps are computed."
    def __init__(self,
        trainer, # with `make_part`, `cuts_steps` and `count_targets` of `ExactLossMixin`
        training_step: Callable, # transformers'
        overridden: bool, # a `training_step` of the user's may read gradients in between
    ):
        self._trainer, self._training_step = trainer, training_step
        self.overridden, self.cuts = overridden, trainer.cuts_steps()
        self.part = trainer.make_part

    @property
    def main_input(self) -> str: # of the model, for example `input_ids`
        return getattr(self._trainer.model, "main_input_name", "input_ids")

    def nothing(self) -> torch.Tensor: # the loss of a micro-batch before the last
        return torch.zeros((), device=self._trainer.args.device)

    @property
    def token_budget(self) -> int | None: # most tokens computed at once
        return getattr(self._trainer, "token_budget", None)

    def weight_of(self, batch) -> float | None: # None: to be read from the graph
        "What a batch weighs, where the user says it."
        says = self._trainer.count_targets
        return None if says is None else float(says(self._trainer.model, batch))

    def bare(self, model) -> torch.nn.Module: # without wrappers
        return self._trainer.accelerator.unwrap_model(model)

    def prepare(self, batch): # to where the model is
        return self._trainer._prepare_inputs(batch)

    def count(self, batches: list): # `num_items_in_batch` of this process's batches
        return self._trainer._get_num_items_in_batch(batches, self._trainer.args.device)

    def no_sync(self, model): # a context in which processes do not exchange gradients
        return self._trainer.accelerator.no_sync(model)

    @contextmanager
    def as_one_step(self) -> Iterator[None]:
        "While it lasts, nothing that a loss can look at says that its step is cut."
        # with `average_tokens_across_devices` transformers multiplies a loss by the
        # number of processes; losses of object detection divide by that number
        trainer = self._trainer
        with set_for_now(trainer.args, gradient_accumulation_steps=1,
                         average_tokens_across_devices=False), \
                set_for_now(trainer, current_gradient_accumulation_steps=1), \
                set_for_now(PartialState(), num_processes=1,
                            distributed_type=DistributedType.NO):
            yield

    def loss(self, bare: torch.nn.Module, batch, count) -> torch.Tensor:
        "Of a batch that is a whole step of `count` items, by a model without wrappers."
        # without autocast, which accelerate puts around `forward`: comparisons are exact
        plain = plain_forward(bare)
        forward = {} if plain is None else {"forward": plain}
        with set_for_now(self._trainer, is_asking=True), self.as_one_step(), \
                self._trainer.compute_loss_context_manager(), set_for_now(bare, **forward):
            made = self._trainer.compute_loss(bare, dict(batch), num_items_in_batch=count)
        return made[0] if isinstance(made, tuple) else made

    def backward(self, model, part, count, weigh: Callable):
        "Forward and backward of a part; weigh: its loss -> what is added to the step."
        compute_loss = self._trainer.compute_loss

        def weighed(*args, **kwargs):
            made = compute_loss(*args, **kwargs)
            loss, *rest = made if isinstance(made, tuple) else (made,)
            return (weigh(loss), *rest) if isinstance(made, tuple) else weigh(loss)
        with self.as_one_step(), set_for_now(self._trainer, compute_loss=weighed):
            # a copy, because `compute_loss` may pop labels, and looks read the part again
            self._training_step(model, dict(part), count)

    def stock_step(self, model, batch, count, alone: bool) -> torch.Tensor:
        "As transformers computes a batch; alone: where it is the whole step."
        if not alone:
            return self._training_step(model, dict(batch), count)
        with self.as_one_step(): # where others are accumulated
            return self._training_step(model, dict(batch), count)


def why_not_exact(accelerator: Accelerator, args) -> str:
    "What keeps losses as transformers computes them; '' if nothing does."
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "DeepSpeed divides gradients itself"
    cut = getattr(accelerator, "parallelism_config", None)
    if cut is not None and (cut.cp_enabled or cut.sp_enabled):
        return "context or sequence parallelism gives each process a part of every row"
    if args.n_gpu > 1:
        return "torch.nn.DataParallel gives a loss for each GPU; start one process for " \
               "each with torchrun"
    return ""
