"""Random trainings on one engine, one after the other: none may wait for ever.

    torchrun --nproc_per_node 2 sharded_stress.py fsdp2 --seed 3 --trainings 8

Heads, budgets, accumulation, the number of rows (so that a process has none in the last
step, or a micro-batch less) and the order of evaluations and steps are drawn. A training
that takes more than a minute prints where each process waits, and ends the program.
With `--bad 3` the collator of the second process fails from its fourth call on: all
processes must end, with its error.
"""
import argparse
import faulthandler
import itertools
import math
import os
import random
import tempfile

import torch
import transformers

from sharded_training import (
    HEADS, VARIANTS, collator, contrastive_loss, end, engine_options, make_model,
    make_rows, shard_on_cpus)

SECONDS = 60  # of a training; DeepSpeed builds an op in its first one, ever


def draw(seed):
    "What one training is made of."
    draws = random.Random(seed)
    case = dict(
        head=draws.choice(HEADS),
        variant=draws.choice(["plain", "plain", "bf16", "checkpointing", "frozen"]),
        rows=draws.randint(5, 50), batch=draws.randint(1, 6),
        accumulate=draws.choice([1, 2, 3, 5]),
        token_budget=draws.choice([None, 8, 20, 60, 400]),
        micro_batch_overhead=draws.choice([None, 0, 16]),
        eval_first=draws.random() < 0.3, eval_last=draws.random() < 0.3,
        eval_steps=draws.choice([None, 1, 2]), eval_rows=draws.randint(1, 20),
        drop_last=draws.random() < 0.2, shuffles=draws.random() < 0.5,
        rows_per_step=draws.choice([None, None, 12]))
    if case["rows_per_step"]:  # which plans its own batches
        case["accumulate"] = 1
    if case["drop_last"]:  # one batch for each process at least
        case["rows"] = max(case["rows"], 2 * case["batch"])
    return case


def train(engine, case, bad=math.inf):
    "As it was drawn; the number of steps."
    from prompt_packing import Trainer, TrainingArguments
    model, layer = make_model(case["head"], case["variant"])
    calls = itertools.count()
    rows, collate = make_rows(case["head"])[:case["rows"]], collator(case["head"])
    samples = dict(train_sampling_strategy="random" if case["shuffles"] else "sequential")
    if case["rows_per_step"]:
        samples = dict(rows_per_step=case["rows_per_step"])
    evaluates = dict(eval_strategy="steps", eval_steps=case["eval_steps"]) if (
        case["eval_steps"]) else {}
    if case["token_budget"]:
        samples |= dict(token_budget=case["token_budget"],
                        micro_batch_overhead=case["micro_batch_overhead"])

    def fails(some):
        if torch.distributed.get_rank() == 1 and next(calls) >= bad:
            raise ValueError("this row cannot be collated")
        return collate(some)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=case["batch"],
            per_device_eval_batch_size=case["batch"], optim="sgd", learning_rate=0.01,
            gradient_accumulation_steps=case["accumulate"], num_train_epochs=2,
            report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
            logging_strategy="no", dataloader_drop_last=case["drop_last"], max_grad_norm=1.0,
            **engine_options(engine, layer), **VARIANTS[case["variant"]], **samples,
            **evaluates)
        loss = contrastive_loss if case["head"] == "contrastive" else None
        trainer = Trainer(model, args, train_dataset=rows, data_collator=fails,
                          eval_dataset=rows[:case["eval_rows"]], compute_loss_func=loss)
        if case["eval_first"] and engine == "ddp":  # the others prepare for training alone
            trainer.evaluate()
        trainer.train()
        if case["eval_last"]:
            trainer.evaluate()
    return trainer.state.global_step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainings", type=int, default=8)
    parser.add_argument("--bad", type=int, default=math.inf,
                        help="calls of the collator before it fails")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for a training")
    given = parser.parse_args()
    if given.engine == "fsdp2":
        shard_on_cpus()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    is_first = int(os.environ["RANK"]) == 0
    for seed in range(given.trainings):
        case = draw(1000 * given.seed + seed)
        if is_first:
            print("begun", case, flush=True)
        seconds = 5 * given.seconds if given.engine.startswith("zero") else given.seconds
        faulthandler.dump_traceback_later(seconds, exit=True)
        steps = train(given.engine, case, given.bad)
        faulthandler.cancel_dump_traceback_later()
        if is_first:
            print("ended after", steps, "steps", flush=True)
    end()


if __name__ == "__main__":
    main()
