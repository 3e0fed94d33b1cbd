"""`ExactLossMixin`: the gradient of a step is that of its uncut batch, for any loss."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .asking import is_sharded
from .custom import check_was_called, use_named_loss
from .evaluation import (
    EvaluationMean, EvaluationRows, ExactEvaluation, ways_of_evaluation)
from .facts import Findings, Kind, LossFacts
from .passes import TrainerPasses, why_not_exact
from .processes import AllProcesses
from .step import Step, filled_up, is_filler
from .steps import Steps
from ..foundation.mixins import check_order, set_for_now
from ..foundation.rows import (
    LazyBatch, RowLengths, Rows, StepRows, hand_over_rows, take_back)

__all__ = ["RowSource", "OneStep", "ExactLossMixin"]


class RowSource:
    "The training loader as a source of rows, and the steps that are made of them."
    def __init__(self, findings: Findings, processes: AllProcesses, main_input: str):
        self.findings, self.processes, self.main_input = findings, processes, main_input
        self.loader = None # of training
        self.collate = None # the user's, where rows are handed over
        self.cut: Callable | None = None # `StepRows` -> parts
        self.ended = None # the iterator that has ended on all processes
        self.last_batch = None # of this process
        self.has_fillers = False # among the batches of the step

    def open(self,
        loader, # of training
        cut: Callable | None, # `StepRows` -> parts; None: steps are not cut
        in_worker: Callable | None, # the same in a worker, where a batch is a step
    ) -> Callable | None: # the user's collator; None: batches come ready-made
        "From here on the loader hands over rows."
        self.loader, self.cut = loader, cut
        # without a budget the loader makes its batches as ever, and rows come along
        self.collate = hand_over_rows(loader, makes_batches=cut is None, cut=in_worker)
        return self.collate

    def close(self):
        if self.loader is not None:
            take_back(self.loader)
        self.loader = self.collate = None

    def step(self, taken: list, width: int, count_of: Callable, count) -> tuple:
        """The step of what a loader gave, and the batches for transformers' loop.

        No step: no process has a batch left. Processes with fewer get fillers."""
        rows, parts, batches = None, None, taken
        if taken and all(isinstance(batch, Rows) for batch in taken):
            rows = StepRows.of(taken, self.collate)
            batches = [each.batch for each in taken]
            if self.cut is not None:
                batches = [LazyBatch(each, self.collate) for each in taken]
                in_worker = taken[0].parts if len(taken) == 1 else None
                parts = in_worker or self.cut(rows)
            count = count_of(parts or batches)
        elif taken and self.cut is not None:
            self.findings.say(_not_cut, Kind.EXACT)
        has_any = bool(batches)
        if self.processes.number > 1:
            counted, total, some = self.processes.sum(
                float(count is not None), 0 if count is None else count, float(len(batches)))
            count, has_any = (total.float() if counted else None), bool(some)
        if not has_any:
            return None, []
        filled = filled_up(batches, width, self.last_batch, self.main_input)
        self.last_batch = filled[-1]
        self.has_fillers = len(batches) < len(filled)
        step = Step(filled[-max(len(batches), 1):], count, is_of_loop=True, rows=rows,
                    parts=parts)
        return step, filled


class OneStep:
    "The step under way, from transformers' loop or from a loop of your own."
    def __init__(self, steps: Steps, source: RowSource):
        self.steps, self.source, self.findings = steps, source, steps.findings
        self.step: Step | None = None
        self.has_ended = False # and the next one of transformers' loop has not begun

    def start(self, step: Step | None):
        "A step whose micro-batches come next."
        if self.step is not None and not self.step.was_seen:
            self.findings.say("training_step of this Trainer does not call "
                              "super().training_step, so its gradients are not corrected")
        self.step, self.has_ended = step, False

    def take(self, model, inputs, count, is_last: bool, accumulates: bool):
        "A micro-batch: its loss for the log, 0 for all but the last of a step."
        passes = self.steps.passes
        if self.source.has_fillers and is_filler(inputs):
            return passes.nothing()
        step = self._step_of(inputs, count, accumulates)
        step.was_seen = True
        if step.way is None and is_last and self._is_one_batch(step):
            self._end(step)
            return passes.stock_step(model, inputs, count, alone=True)
        if step.way is None and not self.findings.facts.communicates:
            self.steps.begin(model, step)
        if self.findings.facts.communicates:
            if is_last:
                self._end(step)
            return passes.stock_step(model, inputs, count, alone=False)
        if not step.waits_for_last:
            self.steps.compute_parts(model, step, self._parts_of(step, inputs))
        elif is_last:
            self.steps.compute(model, step)
        if not is_last:
            return passes.nothing()
        loss = self.steps.end(model, step)
        self._end(step)
        return passes.nothing() + loss

    def _step_of(self, inputs, count, accumulates: bool) -> Step:
        "The step that a batch belongs to: all calls up to the one that synchronizes."
        if self.step is None: # a loop of your own, or one call more than micro-batches
            if self.has_ended and accumulates:
                self.findings.say(_called_again)
            self.step = Step([inputs], count)
        elif not self.step.holds(inputs):
            self.step.take(inputs)
        elif self.step.rows is not None and self.step.has_changed(inputs):
            self.step.rows = None # its batches are what is computed
        return self.step

    def _is_one_batch(self, step: Step) -> bool:
        "Whether transformers computes this step exactly."
        alone = self.steps.processes.number == 1 and len(step.batches) == 1
        return alone and not self.steps.passes.cuts

    def _parts_of(self, step: Step, inputs) -> list:
        "Of a micro-batch that is computed at once."
        if not isinstance(inputs, LazyBatch) or inputs.was_changed or step.rows is None:
            return [inputs]
        return self.source.cut(StepRows(inputs.rows.rows, step.rows.collate)) or [inputs]

    def _end(self, step: Step):
        self.step, self.has_ended = None, step.is_of_loop


_called_again = (
    "training_step is called again after the last micro-batch of a step: the gradient of "
    "that call is added as that of one batch")

_not_cut = (
    "batches come ready-made from their loader, so token_budget and pack do not cut them: "
    "let the loader collate rows")


class ExactLossMixin:
    """The gradient of an optimizer step is that of its uncut batch, for any loss.

    Put it before a Trainer: `class T(ExactLossMixin, transformers.Trainer)`. The
    reference is what transformers computes if all rows of the step, of all processes,
    are one batch, made by your collator. Logged and evaluation losses are those of uncut
    batches, too. `loss_facts` says what was found out. Override
    `count_targets(self, model, inputs)` to say yourself what weighs a batch. Where a
    loss cannot be exact a message says so, once; with `strict_loss = True` in your class
    that is a `ValueError`.

    In the order of a run: `set_initial_training_values` once (the loader hands over
    rows), `get_batch_samples` once a step (rows become micro-batches and parts),
    `training_step` once a micro-batch (the last one ends the step), `prediction_step`
    once an evaluation batch, `_save_optimizer_and_scheduler` once a checkpoint."""
    strict_loss = False
    # true while a loss is computed only to look at it: a `compute_loss` that records
    # things should skip these
    is_asking = False
    count_targets = None # or a method: (model, inputs) -> tensor of one number

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        check_order(cls, ExactLossMixin)

    def __init__(self, *args, **kwargs):
        self.findings, self._exact_evaluation = Findings(self.strict_loss), None
        self._eval_ways = None # as the first evaluation has found
        super().__init__(*args, **kwargs)
        self._named_loss = None if self.model is None else use_named_loss(self.model)
        self._exact_off = why_not_exact(self.accelerator, self.args)
        if self._exact_off:
            self.findings.say("steps are computed by transformers' Trainer, uncut and "
                              f"with its losses: {self._exact_off}")
        self._begin_run()

    def _begin_run(self):
        before = type(self).__mro__[:type(self).__mro__.index(ExactLossMixin)]
        overridden = any("training_step" in vars(base) for base in before)
        passes = TrainerPasses(self, super().training_step, overridden)
        processes = AllProcesses(self.accelerator)
        self._steps = Steps(self.findings, passes, processes)
        self._source = RowSource(self.findings, processes, passes.main_input)
        self._one_step = OneStep(self._steps, self._source)

    @property
    def loss_facts(self) -> LossFacts:
        return self.findings.facts

    def cuts_steps(self) -> bool: # with `TokenBudgetMixin`
        "Whether a step may be computed in other parts than its micro-batches."
        cuts = getattr(super(), "cuts_steps", None)
        return cuts is not None and cuts()

    def make_part(self, rows: StepRows, numbers):
        "A part of a step as it is computed: packed, for example."
        make = getattr(super(), "make_part", None)
        return rows.take(numbers) if make is None else make(rows, numbers)

    def set_initial_training_values(self, args, dataloader, *rest):
        needs_rows = self.cuts_steps() or args.gradient_accumulation_steps > 1 or \
            self.accelerator.num_processes > 1
        if needs_rows and not self._exact_off:
            collate = self._source.open(dataloader, *self._cuts(dataloader))
            self.row_lengths = self._steps.looks.lengths = RowLengths(
                collate, self._source.main_input)
        return super().set_initial_training_values(args, dataloader, *rest)

    def _cuts(self, dataloader) -> tuple: # in this process, and in the loader's workers
        if not self.cuts_steps():
            return None, None

        def cut(rows):
            is_whole = self.loss_facts.way == "chunks" or self.loss_facts.communicates
            if is_whole or self._steps.passes.overridden:
                return None
            return self.cut_step(rows)
        return cut, self.cut_in_worker(dataloader)

    def get_batch_samples(self, epoch_iterator, num_batches, *args, **kwargs):
        "The micro-batches of this process, as many as the step has."
        # transformers asks once for each step that it still expects of the epoch
        if epoch_iterator is self._source.ended:
            return [], None
        if self._exact_off:
            return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        # counted here and summed below: transformers does not count where a process has
        # no batch, and the others would wait for it
        with set_for_now(self.args, average_tokens_across_devices=False):
            taken, count = super().get_batch_samples(
                epoch_iterator, num_batches, *args, **kwargs)
            step, batches = self._source.step(
                taken, num_batches, self._steps.passes.count, count)
        self._one_step.start(step)
        if step is None:
            self._source.ended = epoch_iterator
            return [], None
        return batches, step.count

    def _get_num_items_in_batch(self, batches, *args, **kwargs):
        "As transformers', of batches; of rows nothing is known yet."
        if batches and isinstance(batches[0], Rows):
            return None
        return super()._get_num_items_in_batch(batches, *args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        "Forward and backward of a micro-batch, or of the whole step with its last one."
        if self._exact_off:
            return super().training_step(model, inputs, num_items_in_batch)
        named = self._named_loss if self.compute_loss_func is None else None
        calls = named.calls if named else 0
        is_last = self.accelerator.sync_gradients
        loss = self._one_step.take(model, inputs, num_items_in_batch, is_last,
                                   self.args.gradient_accumulation_steps > 1)
        if named and is_last: # the last micro-batch is no filler
            check_was_called(self.model, named, calls)
        return loss

    def floating_point_ops(self, inputs):
        if not isinstance(inputs, LazyBatch) or inputs.rows.batch is not None:
            return super().floating_point_ops(inputs)
        # of the parts of a step, with its last micro-batch; nobody collates for it
        made, self._steps.made_parts = self._steps.made_parts, []
        return sum(super(ExactLossMixin, self).floating_point_ops(part) for part in made)

    def _run_epoch(self, *args, **kwargs):
        # a callback may have stopped the epoch before in the middle of a step
        self.model_wrapped.zero_grad()
        return super()._run_epoch(*args, **kwargs)

    def _inner_training_loop(self, *args, **kwargs):
        self._begin_run()
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._source.close()

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
        "As transformers', with the loss of the whole data set as one batch."
        if self._exact_off:
            return super().evaluation_loop(
                dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        # transformers generates for a whole batch, and pads what comes out
        lazily = self.cuts_steps() and not getattr(
            self.args, "predict_with_generate", False)
        loader = EvaluationRows(dataloader, lazily, self._source.main_input)
        mean = EvaluationMean(self.loss_facts, self.args.logging_nan_inf_filter,
                              not is_sharded(self.model))
        evaluation = ExactEvaluation(self.findings, loader, mean)
        try:
            with set_for_now(self, _exact_evaluation=evaluation):
                output = super().evaluation_loop(
                    loader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            loader.close()
        loss = evaluation.loss(self._steps.processes)
        if f"{metric_key_prefix}_loss" in output.metrics and loss is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        "As transformers'; the loss and what it is a mean over are noted."
        evaluation, passes = self._exact_evaluation, self._steps.passes
        if evaluation is None:
            return super().prediction_step(
                model, inputs, prediction_loss_only, *args, **kwargs)

        def ask(rows):
            return ways_of_evaluation(self._steps.looks.asker(model, None), rows)
        self._eval_ways = evaluation.settle(self._eval_ways, ask, passes.token_budget)
        mean = evaluation.mean
        mean.paused, real = evaluation.real_rows(inputs, self.accelerator)
        with passes.as_one_step(), set_for_now(
                self, compute_loss=mean.noted(self.compute_loss)):
            made = super().prediction_step(
                model, inputs, prediction_loss_only, *args, **kwargs)
            if real is not None:
                mean.paused = False
                super().prediction_step(model, real, True, *args, **kwargs)
        return made

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = json.dumps(self._steps.state_dict())
            Path(output_dir, "loss_facts.json").write_text(state)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        file = Path(checkpoint or "", "loss_facts.json")
        if checkpoint is not None and file.is_file():
            self._steps.load_state_dict(json.loads(file.read_text()))
