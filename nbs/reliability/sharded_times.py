"""Times of a step, ours beside stock's, on one engine, started by torchrun.

    torchrun --nproc_per_node 2 sharded_times.py fsdp2 OUT --pairs 7

Trains in pairs, each with transformers' Trainer and with ours, and begins with the other
one in every second pair. Each step has the same rows in the same four micro-batches on
each process; with a contrastive loss ours computes that of the full batch. Writes a line
for each training to OUT/ENGINE.csv: seconds for each of steps 9 to 15, which are settled
(verifications at the start are over by then, and the next is in step 16), and seconds of
processor time of the first process.
"""
import argparse
import os
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
import transformers

from sharded_training import (
    collator, contrastive_loss, end, engine_options, shard_on_cpus)

MICRO_BATCHES, ROWS, TOKENS = 4, 8, 32  # of a step; of a micro-batch; of a row
FIRST, LAST = 9, 15  # steps that are timed


class Timed(transformers.TrainerCallback):
    "Seconds, and seconds of the processor, of the timed steps."
    def now(self):
        return time.perf_counter(), time.process_time()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == FIRST - 1:
            self.begin = self.now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == LAST:
            self.end = self.now()

    def each_step(self):
        steps = LAST - FIRST + 1
        return [(end - begin) / steps for begin, end in zip(self.begin, self.end)]


def make_model(head):
    size = dict(
        vocab_size=200, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=64, pad_token_id=0)
    transformers.set_seed(7)
    if head == "language model":
        config = transformers.LlamaConfig(**size, num_key_value_heads=4)
        return transformers.LlamaForCausalLM(config), "LlamaDecoderLayer"
    config = transformers.BertConfig(
        **size, num_labels=8 if head == "contrastive" else 3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config), "BertLayer"


def make_rows(head, number):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 200, (number, TOKENS), generator=generator).tolist()
    is_lm = head == "language model"
    return [dict(input_ids=row, labels=row if is_lm else row[0] % 3) for row in ids]


def train(library, engine, head):
    model, layer = make_model(head)
    timed = Timed()
    rows = make_rows(head, ROWS * MICRO_BATCHES * LAST * int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            folder, per_device_train_batch_size=ROWS, max_steps=LAST,
            gradient_accumulation_steps=MICRO_BATCHES, optim="sgd", learning_rate=0.01,
            report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
            logging_strategy="no", **engine_options(engine, layer))
        loss = dict(compute_loss_func=contrastive_loss) if head == "contrastive" else {}
        trainer = library.Trainer(model, args, train_dataset=rows, callbacks=[timed],
                                  data_collator=collator(head), **loss)
        trainer.train()
    return timed.each_step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    if given.engine == "fsdp2":
        shard_on_cpus()
    import prompt_packing
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    libraries = dict(stock=transformers, ours=prompt_packing)
    lines = []
    for head in ("language model", "classifier", "contrastive"):
        for pair in range(given.pairs):
            for who in list(libraries)[::-1 if pair % 2 else 1]:
                seconds, of_processor = train(libraries[who], given.engine, head)
                lines.append(dict(engine=given.engine, head=head, pair=pair, who=who,
                                  seconds=seconds, of_processor=of_processor))
    if int(os.environ["RANK"]) == 0:
        pd.DataFrame(lines).to_csv(given.out / f"{given.engine}.csv", index=False)
    end()


if __name__ == "__main__":
    main()
