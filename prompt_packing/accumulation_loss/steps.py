"""How an optimizer step is computed: in parts while nothing speaks against them, else whole."""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

import torch

from .chunks import RowsOfAll, in_chunks
from .facts import Findings, Kind, LossFacts, Way
from .looks import FAILURES, Asker, can_be_whole, look, look_is_due, rows_to_see, short
from .passes import TrainerPasses
from .processes import AllProcesses
from .step import (
    UNEVEN, Step, Weightless, WeightsSeen, add_back, drop_gradients, multiply_gradients,
    set_aside)
from ..foundation.rows import IndexedRows, RowLengths, StepRows, first_size, seeded

__all__ = ["Looks", "Steps"]


class Looks:
    "Chooses rows of a step, and looks at the loss on them."
    def __init__(self, findings: Findings, passes: TrainerPasses, processes: AllProcesses):
        self.findings, self.passes, self.processes = findings, passes, processes
        self.lengths: RowLengths | None = None # of the rows of the training loader
        self.taken = 0 # looks so far, also those that said nothing

    def asker(self, model, count) -> Asker:
        bare, passes = self.passes.bare(model), self.passes
        return Asker(bare, lambda batch, count: passes.loss(bare, batch, count), count,
                     passes.part, passes.prepare, passes.weight_of)

    def can_join(self, step: Step) -> bool:
        "Whether one batch can be made of the step, the same on all processes."
        return not self.processes.any(step.rows is None)

    def sample(self, step: Step, number: int) -> StepRows | None:
        "Rows to look at, the same on all processes; None: nothing says what a row is."
        if not self.can_join(step):
            return self._entries(step, number)
        rows = step.rows
        lengths = self.lengths(rows.rows)
        most = min(512, self.passes.token_budget or 512)
        chosen = sorted(rows_to_see(lengths, number, most))
        kept = StepRows([rows.rows[i] for i in chosen], rows.collate,
                        [n for n in (sum(i in each for i in chosen)
                                     for each in rows.bounds()) if n])
        if self.processes.number == 1:
            return kept
        # two or three rows of each process: all look at the same ones
        everyones, _ = self.processes.rows([kept.rows[:max(2, 6 // self.processes.number)]])
        return StepRows(everyones, rows.collate)

    def _entries(self, step: Step, number: int) -> IndexedRows | None:
        "Of one ready-made batch, whose rows are entries of its tensors."
        batches = [b for b in step.batches if not isinstance(b, Weightless)] or step.batches
        few = sum(self.processes.gathered([dict(batches[number % len(batches)])]), [])
        few = self.passes.prepare(few[number % len(few)])
        size = first_size(few)
        return None if size is None else IndexedRows(few, size)

    def look(self, model, step: Step):
        "Look at rows of this step; where short ones say nothing, at others."
        can_join = self.can_join(step)
        for _ in range(2):
            sample = self.sample(step, self.taken)
            if sample is None:
                self._trust_unseen(step)
                return
            self.taken += 1
            if look(self.asker(model, step.count), self.findings, sample, can_join=can_join,
                    cuts=self.passes.cuts, processes=self.processes.number):
                return

    def _trust_unseen(self, step: Step):
        if self.findings.facts.way is Way.UNKNOWN:
            self.findings.set(way=Way.WEIGHS)
        self.findings.set(uneven=True, chunked=())
        self.findings.say(_not_rows, Kind.NOT_CHECKED)

    def way_to_be_whole(self, model, step: Step) -> Way:
        "`CHUNKS` if the loss can see the whole step, else the way that it has."
        findings = self.findings
        if not self.can_join(step):
            if findings.facts.way in (Way.UNKNOWN, Way.CHUNKS):
                findings.give_up(_not_joined, reads=True)
            return findings.facts.way
        if findings.facts.chunked is None:
            sample, asker = self.sample(step, self.taken), self.asker(model, step.count)
            can_be_whole(asker, findings, asker.whole(sample), len(sample))
        if findings.facts.chunked:
            return Way.CHUNKS
        if findings.facts.way is Way.UNKNOWN:
            findings.give_up("nothing could be found out of the loss, and the model cannot "
                             "be cut", reads=True)
        return findings.facts.way


class Steps:
    """Computes optimizer steps; a training has one of these.

    A step begins with its first micro-batch, perhaps with a look; parts are computed at
    once or with the last micro-batch; at its end gradients are divided by the weight of
    the step, and in doubt it is computed again, whole."""
    def __init__(self, findings: Findings, passes: TrainerPasses, processes: AllProcesses):
        self.findings, self.passes, self.processes = findings, passes, processes
        self.looks = Looks(findings, passes, processes)
        self.begun, self.weights = 0, WeightsSeen()
        self.is_resumed = False # and the facts of the checkpoint are not yet verified
        self.made_parts = [] # of the last step, until transformers has counted them

    def begin(self, model, step: Step):
        "A look where one is due, then the way of this step; none for transformers' own."
        self.begun += 1
        model.train() # an evaluation may have left eval mode
        # a loop of your own may bring more micro-batches than this one
        has_parts = self.processes.number > 1 or not step.is_of_loop or \
            len(step.parts or step.collated) > 1
        before, is_due = self.findings.facts, look_is_due(self.begun)
        if has_parts and (before.way is Way.UNKNOWN or self.is_resumed or is_due):
            taken = self.looks.taken
            self.looks.look(model, step)
            # a look that only verifies facts after a resume changes none that hold, so
            # that the run goes on as if it had not been interrupted
            if self.is_resumed and not is_due and self.findings.facts.way == before.way:
                self.findings.set(before)
                self.looks.taken = taken
            self.is_resumed = False
        if self.findings.facts.communicates:
            if len(step.batches) > 1:
                self.findings.say(_communicates_in_parts)
            return
        if before.uneven and before.is_of_parts and not self.findings.facts.is_of_parts:
            self.findings.say(_found_late, Kind.NOT_CHECKED)
        way = self.findings.facts.way
        if way is Way.CHUNKS and not self.looks.can_join(step):
            way = self.looks.way_to_be_whole(model, step)
        if way is Way.UNKNOWN:
            way = self.looks.way_to_be_whole(model, step) if has_parts else Way.ADDS
        step.begin(way)
        step.waits_for_last = way is Way.CHUNKS or step.parts is not None
        if step.waits_for_last and self.passes.overridden:
            self.findings.say(_gradients_come_last, Kind.NOT_CHECKED)
        step.kept = set_aside(model)

    def compute(self, model, step: Step):
        "All of a step that has begun."
        if step.way is Way.CHUNKS:
            self._compute_whole(model, step)
        else:
            self.compute_parts(model, step, step.parts or step.batches)

    def compute_parts(self, model, step: Step, parts: list):
        "Backward of some parts; only the last one synchronizes processes."
        self.made_parts = parts
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else self.passes.no_sync(model):
                self._compute_part(model, step, part)

    def _compute_part(self, model, step: Step, part):
        facts, passes = self.findings.facts, self.passes
        passes.backward(model, part, step.count,
                        lambda loss: step.weighed(loss, part, facts, passes.weight_of))

    def _compute_whole(self, model, step: Step):
        "The model in chunks of the rows of this process, the loss over the rows of all."
        facts = self.findings.facts
        try:
            rows, sizes = self.processes.rows(
                [[step.rows.rows[i] for i in numbers] for numbers in step.rows.bounds()])
            several = self.processes.number > 1
            step.gather = RowsOfAll(sizes, self.processes.rank) if several else None
            # processes draw the same numbers, since each makes the same batch
            with seeded(self.begun) if several else nullcontext():
                whole = StepRows(rows, step.rows.collate).take()
            if facts.collator_draws:
                step.count = self.passes.count([whole])
            whole = self.passes.prepare(whole)
            self.made_parts = [whole]
            with in_chunks(self.passes.bare(model), list(facts.chunked),
                           self._tokens_in_chunk(step), step.gather, facts.trims):
                self._compute_part(model, step, whole)
        except torch.OutOfMemoryError: # no fault of the chunks
            raise
        except FAILURES as error:
            step.failure = f"the whole step cannot be computed ({short(error)})"

    def _tokens_in_chunk(self, step: Step) -> int:
        "The budget, or as many as the largest micro-batch holds."
        if budget := self.passes.token_budget:
            return budget
        lengths = self.looks.lengths(step.rows.rows)
        return max(len(numbers) * int(lengths[list(numbers)].max())
                   for numbers in step.rows.bounds() if len(numbers))

    def end(self, model, step: Step) -> torch.Tensor:
        "Divide the gradients by the weight of the step; the loss of the step."
        facts = self.findings.facts
        doubt = step.failure or self.weights.doubt(step, facts)
        weight, loss, doubts, failures, new = self.processes.sum(
            step.weight, step.loss, float(bool(doubt)), float(bool(step.failure)),
            float(step.is_new(facts)))
        if doubts or new:
            doubt = doubt or ("on another process" if doubts else "")
            way = self._other_way(model, step, doubt, bool(failures))
            if way != step.way:
                drop_gradients(model)
                step.begin(way)
                self.compute(model, step)
                return self.end(model, step)
        if step.way is Way.ADDS: # parts add up; transformers averages over processes
            multiply_gradients(model, float(self.processes.number))
        else:
            by = 1 / float(weight) if weight else 0.0 # a step may have no target at all
            loss = loss * by
            multiply_gradients(model, self.processes.number * by)
        add_back(step.kept)
        return torch.as_tensor(loss, dtype=torch.float32)

    def _other_way(self, model, step: Step, doubt: str, failed: bool) -> Way:
        "How to compute a step again that may be wrong; the same on all processes."
        findings = self.findings
        if step.way is Way.CHUNKS:
            findings.give_up(doubt, reads=False)
            return findings.facts.way
        if step.way is Way.ROWS:
            return step.way
        if doubt in ("", UNEVEN): # look at what no look has seen
            self.looks.look(model, step)
            is_seen = findings.facts.uneven if doubt else not step.is_new(findings.facts)
            if findings.facts.way is not step.way or is_seen:
                return findings.facts.way
            doubt = doubt or "the loss has terms that no look could verify"
        way = self.looks.way_to_be_whole(model, step)
        if way is Way.CHUNKS and failed: # so it will be in the next step
            findings.set(way=Way.CHUNKS)
            findings.say(f"{doubt}: the model runs in chunks, head and loss see the whole "
                         "step", Kind.EXACT)
        elif failed:
            findings.give_up(doubt, reads=False)
            way = findings.facts.way
        elif way is not Way.CHUNKS and findings.facts.is_exact: # else it has been said
            findings.say(f"{doubt}, and the model cannot be cut to verify it",
                         Kind.NOT_CHECKED)
        return way

    # checkpoints

    def state_dict(self) -> dict: # JSON-safe
        return {"facts": self.findings.facts.state_dict(), "steps": self.begun,
                "looks": self.looks.taken, "weights": asdict(self.weights)}

    def load_state_dict(self, state: dict):
        self.findings.set(LossFacts.from_state_dict(state["facts"]))
        self.begun, self.weights = state["steps"], WeightsSeen(**state["weights"])
        self.looks.taken = state.get("looks", 0)
        self.is_resumed = True


_gradients_come_last = (
    "your training_step runs once for each micro-batch, and gradients exist only after the "
    "last one of a step: code in it that reads gradients earlier cannot be exact")

_communicates_in_parts = (
    "the loss communicates between processes, so it sees one micro-batch of each at a time, "
    "and not the whole step")

_found_late = (
    "earlier steps of this run weighed their parts, as earlier looks at the loss allowed, "
    "and this one does not: those steps may not be exact")

_not_joined = (
    "the loss has to see the rows of the whole step at once, and these batches came "
    "ready-made, or an override of training_step has changed them: nothing makes one of them")

_not_rows = (
    "the weights of the parts are read, and cannot be checked, since the values of a batch "
    "do not agree on a number of rows, and its loader does not give rows")
