"""A training on one engine that is killed at a step and resumed, started by torchrun.

    torchrun --nproc_per_node 2 --max-restarts 1 sharded_resume.py fsdp2 OUT --kill 7

Trains a classifier with dropout for twelve steps in three epochs, with a checkpoint of the
engine's own kind every third step, and writes its final weights to OUT/end.pt. The second
process kills itself, by SIGKILL, before the step that `--kill` names, once.
With `--rows` a step has 24 rows on any number of processes, and nothing draws random
numbers, so that another number of processes can continue it; `--stock` trains the same
with transformers.
"""
import argparse
import os
import signal
from pathlib import Path

import torch
import transformers

from sharded_training import (
    ROWS, collator, end, engine_options, make_rows, shard_on_cpus, weights_of)


class KilledAt(transformers.TrainerCallback):
    def __init__(self, step, mark):
        self.step, self.mark = step, mark

    def on_step_begin(self, args, state, control, **kwargs):
        is_due = state.global_step == self.step and not self.mark.exists()
        if is_due and args.process_index == args.world_size - 1:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill", type=int, help="before this step")
    parser.add_argument("--state", default="FULL_STATE_DICT", help="of FSDP2")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rows", action="store_true", help="fix the rows of a step")
    parser.add_argument("--stock", action="store_true")
    given = parser.parse_args()
    if given.engine == "fsdp2":
        shard_on_cpus()
    import prompt_packing
    library = transformers if given.stock else prompt_packing
    torch.set_num_threads(1)
    transformers.set_seed(7)
    dropout = 0.0 if given.rows else 0.1
    model = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))
    options = engine_options(given.engine, "BertLayer")
    if given.engine == "fsdp2":
        options["fsdp_config"]["state_dict_type"] = given.state
    world = int(os.environ.get("WORLD_SIZE", 1))
    if given.stock:
        options |= dict(per_device_train_batch_size=ROWS // world)
    else:
        options |= dict(token_budget=60, micro_batch_overhead=16)
        options |= dict(rows_per_step=ROWS) if given.rows else dict(
            per_device_train_batch_size=ROWS // world // 3, gradient_accumulation_steps=3)
    args = library.TrainingArguments(
        str(given.out / "run"), num_train_epochs=3, learning_rate=1e-2, save_steps=3,
        report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=1, bf16=given.bf16,
        **options)
    trainer = library.Trainer(model, args, train_dataset=make_rows("classifier"),
                              data_collator=collator("classifier"),
                              callbacks=[KilledAt(given.kill, given.out / "killed")])
    trainer.train(resume_from_checkpoint=any((given.out / "run").glob("checkpoint-*")))
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    weights = weights_of(trainer.model)
    if args.process_index == 0:
        weights = {name.removeprefix("module."): w for name, w in weights.items()}
        torch.save((weights, losses), given.out / "end.pt")
    end()


if __name__ == "__main__":
    main()
