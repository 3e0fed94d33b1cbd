"""Trainings as people publish them: in one batch with transformers, in micro-batches here.

Each case gets a class of Trainer and a function that makes its arguments. It returns a
Trainer, or a Trainer and a function whose numbers are compared too.

`python everyday_cases.py [names] [--kind KIND] [--processes 2] [--control] [--csv FILE]`
"""

import argparse
import contextlib
import csv
import io
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import accelerate
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from transformers import (
    AutoConfig,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainerCallback,
    default_data_collator,
)
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutput

import prompt_packing

CASES = {}  # name: (kind, function)
ONE_PROCESS = set()  # whose rows of a step depend on the number of processes


def case(
    kind: str,  # a heading of the table
    one_process: bool = False,  # transformers takes other rows on two processes, or fails
):
    "Registers a function as a case."

    def register(function):
        if function.__name__ in CASES:
            raise ValueError(f"two cases are named {function.__name__}")
        CASES[function.__name__] = kind, function
        if one_process:
            ONE_PROCESS.add(function.__name__)
        return function

    return register


# data and models

VOCAB, PAD, EOS, MASK = 64, 0, 3, 1


def tokenizer(side="right"):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, "w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        padding_side=side,
        pad_token="w0",
        mask_token="w1",
        unk_token="w2",
        eos_token="w3",
        cls_token="w4",
        sep_token="w5",
    )


def lengths(rows, seed=0, low=3, high=20):
    draw = random.Random(seed)
    return [draw.randint(low, high) for _ in range(rows)]


def tokens(rows=24, seed=0, low=3, high=20):
    draw = random.Random(seed + 1)
    return [
        [draw.randint(6, VOCAB - 1) for _ in range(n)]
        for n in lengths(rows, seed, low, high)
    ]


def texts(rows=24, seed=0, low=3, high=20):
    return [" ".join(f"w{i}" for i in ids) for ids in tokens(rows, seed, low, high)]


def classes(rows=24, count=3, seed=0):
    draw = random.Random(seed + 2)
    return [draw.randrange(count) for _ in range(rows)]


def labelled(rows=24, count=3, seed=0, name="labels", **more):
    ids = tokens(rows, seed, **more)
    return Dataset.from_dict(
        {
            "input_ids": ids,
            "attention_mask": [[1] * len(r) for r in ids],
            name: classes(rows, count, seed),
        }
    )


def plain_ids(rows=24, seed=0, **more):
    return Dataset.from_dict({"input_ids": tokens(rows, seed, **more)})


def model(name, config="bert", **more):
    "A tiny model of transformers without dropout."
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=4,
        initializer_range=0.2,
    )
    gpt2 = dict(n_embd=16, n_layer=1, n_head=2, n_positions=64)
    gpt2 |= dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    t5 = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
    t5 |= dict(decoder_start_token_id=PAD)
    bart = dict(d_model=16, encoder_layers=1, decoder_layers=1, dropout=0.0)
    bart |= dict(encoder_attention_heads=2, decoder_attention_heads=2)
    bart |= dict(encoder_ffn_dim=16, decoder_ffn_dim=16, decoder_start_token_id=EOS)
    distil = dict(dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    distil |= dict(dropout=0.0, attention_dropout=0.0)
    distil |= dict(seq_classif_dropout=0.0, qa_dropout=0.0)
    others = {"gpt2": gpt2, "t5": t5, "bart": bart, "distilbert": distil}
    none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if config in others:
        for size in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            sizes.pop(size)
        sizes.pop("intermediate_size")
        if config == "gpt2":
            sizes.pop("max_position_embeddings")
        none = others[config]
    if config in ("vit", "wav2vec2"):
        none |= dict(hidden_dropout=0.0, attention_dropout=0.0)
    made = AutoConfig.for_model(config, **(sizes | none | more))
    return getattr(transformers, name)(made)


def bert(name="BertForSequenceClassification", labels=3, **more):
    return model(name, num_labels=labels, **more)


def llama(name="LlamaForCausalLM", **more):
    return model(name, "llama", attention_dropout=0.0, **more)


def padder(side="right", **more):
    return DataCollatorWithPadding(tokenizer(side), **more)


def padded(rows, name="input_ids", value=PAD):
    return pad_sequence(
        [torch.as_tensor(r[name]) for r in rows], batch_first=True, padding_value=value
    )


class Bag(nn.Module):
    "Mean of embeddings, as in many notebooks."

    def __init__(self, labels=3, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.head = nn.Linear(width, labels)

    def pooled(self, input_ids):
        mask = (input_ids != PAD).unsqueeze(-1).float()
        return (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.pooled(input_ids))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class MLP(nn.Module):
    def __init__(self, features=6, out=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, out)
        )

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Table(torch.utils.data.Dataset):
    "A map-style Dataset of a list of rows."

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return dict(self.rows[index])


def table(rows=24, features=6, count=3):
    torch.manual_seed(1)
    x = torch.randn(rows, features)
    return Table([{"x": x[i], "labels": c} for i, c in enumerate(classes(rows, count))])


def frozen(module):
    return module.requires_grad_(False).eval()


def accuracy(prediction):
    logits, labels = prediction
    logits = logits[0] if isinstance(logits, tuple) else logits
    keep = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[keep].mean())}


# collators


@case("collators")
def pads_to_a_multiple_of_8(Trainer, args):
    return Trainer(
        bert(),
        args(),
        train_dataset=labelled(),
        data_collator=padder(pad_to_multiple_of=8),
    )


@case("collators")
def pads_to_max_length(Trainer, args):
    collator = padder(padding="max_length", max_length=24)
    return Trainer(bert(), args(), train_dataset=labelled(), data_collator=collator)


@case("collators")
def left_padding_causal(Trainer, args):
    tok = tokenizer("left")
    collator = DataCollatorForLanguageModeling(tok, mlm=False)
    return Trainer(
        llama(),
        args(),
        train_dataset=plain_ids(),
        data_collator=collator,
        processing_class=tok,
    )


@case("collators")
def labels_are_a_clone_of_padded_ids(Trainer, args):
    def collate(rows):
        ids = padded(rows)
        return {"input_ids": ids, "labels": ids.clone()}

    return Trainer(llama(), args(), train_dataset=plain_ids(), data_collator=collate)


@case("collators")
def labels_clone_with_mask_and_left_padding(Trainer, args):
    tok = tokenizer("left")

    def collate(rows):
        batch = tok.pad([{"input_ids": r["input_ids"]} for r in rows], return_tensors="pt")
        batch["labels"] = batch["input_ids"].clone()
        return batch

    return Trainer(
        model("GPT2LMHeadModel", "gpt2"),
        args(remove_unused_columns=False),
        train_dataset=plain_ids(),
        data_collator=collate,
    )


@case("collators")
def labels_clone_with_minus_100_at_padding(Trainer, args):
    def collate(rows):
        ids = padded(rows)
        labels = ids.clone()
        labels[labels == PAD] = -100
        return dict(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels)

    return Trainer(llama(), args(), train_dataset=plain_ids(), data_collator=collate)


def mask_of(ids, share=0.3):
    "Masked positions that depend on the row alone."
    draw = random.Random(sum(int(i) for i in ids))
    chosen = [draw.random() < share for _ in ids]
    chosen[0] = True
    return torch.tensor(chosen)


@case("collators")
def dynamic_masking(Trainer, args):
    def collate(rows):
        inputs, labels = [], []
        for row in rows:
            ids = torch.tensor(row["input_ids"])
            hit = mask_of(row["input_ids"])
            labels.append(ids.masked_fill(~hit, -100))
            inputs.append(ids.masked_fill(hit, MASK))
        ids = pad_sequence(inputs, batch_first=True)
        return {
            "input_ids": ids,
            "attention_mask": (ids != PAD).long(),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    return Trainer(
        bert("BertForMaskedLM"), args(), train_dataset=plain_ids(), data_collator=collate
    )


@case("collators")
def returns_batch_encoding_of_texts(Trainer, args):
    tok = tokenizer()

    def collate(rows):
        batch = tok([r["text"] for r in rows], padding=True, return_tensors="pt")
        batch["labels"] = torch.tensor([r["label"] for r in rows])
        return batch

    rows = Dataset.from_dict({"text": texts(), "label": classes()})
    return Trainer(
        bert(),
        args(remove_unused_columns=False),
        train_dataset=rows,
        data_collator=collate,
    )


@case("collators")
def compute_loss_reads_attributes_of_batch_encoding(Trainer, args):
    def collate(rows):
        ids = padded(rows)
        data = dict(input_ids=ids, attention_mask=(ids != PAD).long())
        return BatchEncoding(data | {"labels": torch.tensor([r["labels"] for r in rows])})

    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(inputs.input_ids, attention_mask=inputs.attention_mask)
            loss = F.cross_entropy(out.logits, inputs.labels)
            return (loss, out) if return_outputs else loss

    return MyTrainer(bert(), args(), train_dataset=labelled(), data_collator=collate)


@case("collators")
def returns_user_dict(Trainer, args):
    def collate(rows):
        return UserDict(
            input_ids=padded(rows), labels=torch.tensor([r["labels"] for r in rows])
        )

    return Trainer(Bag(), args(), train_dataset=labelled(), data_collator=collate)


@case("collators")
def returns_a_tuple(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            ids, labels = inputs
            logits = model(ids)["logits"]
            return F.cross_entropy(logits, labels)

    def collate(rows):
        return padded(rows), torch.tensor([r["labels"] for r in rows])

    return MyTrainer(Bag(), args(), train_dataset=labelled(), data_collator=collate)


@case("collators")
def extra_column_of_weights(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            weight = inputs.pop("weight")
            labels = inputs.pop("labels")
            out = model(**inputs)
            loss = F.cross_entropy(out.logits, labels, reduction="none")
            loss = (loss * weight).mean()
            return (loss, out) if return_outputs else loss

    rows = labelled().add_column("weight", [0.5 + i % 3 for i in range(24)])
    return MyTrainer(
        bert(),
        args(remove_unused_columns=False),
        train_dataset=rows,
        data_collator=padder(),
    )


@case("collators", one_process=True)  # loader batches of one row, which may be None
def drops_rows_of_none(Trainer, args):
    class WithBroken(Table):
        def __getitem__(self, index):
            return None if index in (3, 10) else dict(self.rows[index])

    def collate(rows):
        rows = [r for r in rows if r is not None]
        return default_data_collator(rows)

    return Trainer(
        MLP(), args(), train_dataset=WithBroken(table().rows), data_collator=collate
    )


@case("collators")
def strings_pass_through(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            sources = inputs.pop("source")
            weight = torch.tensor([2.0 if s == "gold" else 1.0 for s in sources])
            labels = inputs.pop("labels")
            out = model(**inputs)
            each = F.cross_entropy(out["logits"], labels, reduction="none")
            loss = (each * weight).sum() / weight.sum()
            return (loss, out) if return_outputs else loss

    def collate(rows):
        batch = default_data_collator([{k: r[k] for k in ("x", "labels")} for r in rows])
        batch["source"] = [r["source"] for r in rows]
        return batch

    rows = [r | {"source": "gold" if i % 3 else "web"} for i, r in enumerate(table().rows)]
    return MyTrainer(
        MLP(),
        args(remove_unused_columns=False),
        train_dataset=Table(rows),
        data_collator=collate,
    )


@case("collators")
def truncates_to_the_shortest_row(Trainer, args):
    def collate(rows):
        n = min(max(len(r["input_ids"]) for r in rows), 12)
        ids = padded([{"input_ids": r["input_ids"][:n]} for r in rows])
        return {"input_ids": ids, "labels": torch.tensor([r["labels"] for r in rows])}

    return Trainer(Bag(), args(), train_dataset=labelled(), data_collator=collate)


@case("collators")
def sorts_rows_by_length(Trainer, args):
    def collate(rows):
        rows = sorted(rows, key=lambda r: len(r["input_ids"]), reverse=True)
        ids = padded(rows)
        return dict(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            labels=torch.tensor([r["labels"] for r in rows]),
        )

    return Trainer(bert(), args(), train_dataset=labelled(), data_collator=collate)


@case("collators")
def prompt_tokens_are_masked_in_the_collator(Trainer, args):
    @dataclass
    class Collator:
        tokenizer: object

        def __call__(self, rows):
            ids = [torch.tensor(r["prompt"] + r["answer"]) for r in rows]
            labels = [torch.tensor([-100] * len(r["prompt"]) + r["answer"]) for r in rows]
            ids = pad_sequence(ids, batch_first=True, padding_value=PAD)
            labels = pad_sequence(labels, batch_first=True, padding_value=-100)
            return dict(input_ids=ids, labels=labels, attention_mask=ids.ne(PAD))

    rows = Dataset.from_dict({"prompt": tokens(), "answer": tokens(seed=5, high=8)})
    return Trainer(
        llama(),
        args(remove_unused_columns=False),
        train_dataset=rows,
        data_collator=Collator(tokenizer()),
    )


@case("collators")
def concatenates_into_blocks(Trainer, args):
    def collate(rows):
        flat = [t for r in rows for t in [*r["input_ids"], EOS]]
        flat = flat[: len(flat) // 8 * 8]
        ids = torch.tensor(flat).view(-1, 8)
        return {"input_ids": ids, "labels": ids}

    return Trainer(
        llama(), args(), train_dataset=plain_ids(low=7, high=7), data_collator=collate
    )


@case("collators")
def float_mask_and_token_type_ids(Trainer, args):
    def collate(rows):
        ids = padded(rows)
        halves = (torch.arange(ids.shape[1])[None] % 2).expand_as(ids)
        return dict(
            input_ids=ids,
            attention_mask=(ids != PAD).float(),
            token_type_ids=halves,
            labels=torch.tensor([r["labels"] for r in rows]),
        )

    return Trainer(bert(), args(), train_dataset=labelled(), data_collator=collate)


# overrides of compute_loss


def with_loss(Trainer, score):
    "A Trainer whose loss is a function of outputs and labels."

    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.get("labels")
            outputs = model(**inputs)
            logits = outputs["logits"]
            loss = score(logits, labels)
            return (loss, outputs) if return_outputs else loss

    return MyTrainer


def classify(kind, args, net=None, data=None, **more):
    data = data if data is not None else labelled()
    return kind(
        net or bert(), args(**more), train_dataset=data, data_collator=padder()
    )


@case("losses")
def focal_loss(Trainer, args):
    class FocalLoss(nn.Module):
        def forward(self, logits, labels, gamma=2.0, alpha=0.25):
            ce = F.cross_entropy(logits, labels, reduction="none")
            return (alpha * (1 - torch.exp(-ce)) ** gamma * ce).mean()

    return classify(with_loss(Trainer, FocalLoss()), args)


@case("losses")
def focal_loss_of_the_mean(Trainer, args):
    def focal(logits, labels, gamma=2.0):
        ce = F.cross_entropy(logits, labels)
        return (1 - torch.exp(-ce)) ** gamma * ce

    return classify(with_loss(Trainer, focal), args)


@case("losses")
def class_weights(Trainer, args):
    weight = torch.tensor([1.0, 2.0, 3.0])
    loss = nn.CrossEntropyLoss(weight=weight)
    return classify(
        with_loss(Trainer, lambda x, y: loss(x.view(-1, 3), y.view(-1))), args
    )


@case("losses")
def class_weights_from_constructor(Trainer, args):
    class WeightedTrainer(Trainer):
        def __init__(self, *a, class_weights=None, **kw):
            super().__init__(*a, **kw)
            self.class_weights = torch.tensor(class_weights, dtype=torch.float32)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels").long()
            outputs = model(**inputs)
            logits = outputs.get("logits")
            loss = F.cross_entropy(logits, labels, weight=self.class_weights)
            return (loss, outputs) if return_outputs else loss

    return WeightedTrainer(
        model=bert(),
        args=args(),
        train_dataset=labelled(),
        data_collator=padder(),
        class_weights=[0.4, 1.0, 2.2],
    )


@case("losses")
def class_weights_of_the_batch(Trainer, args):
    def balanced(logits, labels):
        count = torch.bincount(labels, minlength=3).float().clamp(min=1)
        return F.cross_entropy(logits, labels, weight=len(labels) / (3 * count))

    return classify(with_loss(Trainer, balanced), args)


@case("losses")
def label_smoothing_in_the_loss(Trainer, args):
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    return classify(with_loss(Trainer, smooth), args)


@case("losses")
def label_smoothing_factor(Trainer, args):
    return classify(Trainer, args, label_smoothing_factor=0.1)


@case("losses")
def label_smoothing_factor_causal(Trainer, args):
    tok = tokenizer()
    return Trainer(
        llama(),
        args(label_smoothing_factor=0.1),
        train_dataset=plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )


@case("losses")
def r_drop(Trainer, args):
    class RDropTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs["labels"]
            a, b = model(**inputs), model(**inputs)
            p, q = F.log_softmax(a.logits, -1), F.log_softmax(b.logits * 0.9, -1)
            kl = F.kl_div(p, q, log_target=True, reduction="batchmean")
            kl = (kl + F.kl_div(q, p, log_target=True, reduction="batchmean")) / 2
            ce = F.cross_entropy(a.logits, labels) + F.cross_entropy(b.logits, labels)
            loss = 0.5 * ce + 4 * kl
            return (loss, a) if return_outputs else loss

    return classify(RDropTrainer, args)


@case("losses")
def distillation(Trainer, args):
    torch.manual_seed(5)
    teacher = frozen(bert(initializer_range=0.5))

    class DistillationTrainer(Trainer):
        def __init__(self, *a, teacher_model=None, **kw):
            super().__init__(*a, **kw)
            self.teacher = teacher_model

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            student = model(**inputs)
            with torch.no_grad():
                target = self.teacher(**inputs).logits
            t = 2.0
            kl = nn.KLDivLoss(reduction="batchmean")(
                F.log_softmax(student.logits / t, -1), F.softmax(target / t, -1)
            )
            loss = 0.5 * student.loss + 0.5 * kl * t**2
            return (loss, student) if return_outputs else loss

    return DistillationTrainer(
        bert(),
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
        teacher_model=teacher,
    )


@case("losses")
def distillation_of_tokens(Trainer, args):
    teacher = frozen(llama(initializer_range=0.4))

    class KDTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            with torch.no_grad():
                target = teacher(**inputs).logits
            p = F.log_softmax(out.logits, -1)
            kl = F.kl_div(p, target.softmax(-1), reduction="none").sum(-1)
            mask = (inputs["labels"] != -100).float()
            loss = out.loss + (kl * mask).sum() / mask.sum()
            return (loss, out) if return_outputs else loss

    tok = tokenizer()
    return KDTrainer(
        llama(),
        args(),
        train_dataset=plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )


@case("losses")
def distillation_with_stored_teacher_logits(Trainer, args):
    torch.manual_seed(4)
    rows = labelled().add_column("teacher_logits", torch.randn(24, 3).tolist())

    class KDTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            target = inputs.pop("teacher_logits")
            out = model(**inputs)
            loss = F.mse_loss(out.logits, target) + out.loss
            return (loss, out) if return_outputs else loss

    return classify(KDTrainer, args, data=rows, remove_unused_columns=False)


class Encoder(Bag):
    def forward(self, input_ids, attention_mask=None):
        return F.normalize(self.head(self.pooled(input_ids)), dim=-1)


def pairs(names=("query", "positive"), rows=24):
    data = {name: tokens(rows, seed=9 * i) for i, name in enumerate(names)}
    return Dataset.from_dict(data)


def pair_collator(*names):
    def collate(rows):
        return {name: padded(rows, name) for name in names}

    return collate


@case("losses")
def in_batch_negatives(Trainer, args):
    class ContrastiveTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            q, p = model(inputs["query"]), model(inputs["positive"])
            scores = q @ p.T / 0.1
            loss = F.cross_entropy(scores, torch.arange(len(q), device=q.device))
            return (loss, {"scores": scores}) if return_outputs else loss

    return ContrastiveTrainer(
        Encoder(8),
        args(remove_unused_columns=False),
        train_dataset=pairs(),
        data_collator=pair_collator("query", "positive"),
    )


@case("losses")
def symmetric_clip_loss_with_learned_scale(Trainer, args):
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Encoder(8), Encoder(8)
            self.logit_scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, query, positive):
            scores = self.logit_scale.exp() * self.a(query) @ self.b(positive).T
            labels = torch.arange(len(scores))
            loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
            return {"loss": loss, "logits": scores}

    return Trainer(
        Clip(),
        args(learning_rate=0.05),
        train_dataset=pairs(),
        data_collator=pair_collator("query", "positive"),
    )


@case("losses")
def supervised_contrastive(Trainer, args):
    class SupConTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            z = model(inputs["input_ids"])
            sim = z @ z.T / 0.2
            sim = sim.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
            same = labels[:, None].eq(labels[None]).float().fill_diagonal_(0)
            logp = sim - sim.logsumexp(1, keepdim=True)
            loss = -((logp * same).sum(1) / same.sum(1).clamp(min=1)).mean()
            return (loss, {"z": z}) if return_outputs else loss

    return classify(SupConTrainer, args, Encoder(8), label_names=["labels"])


@case("losses")
def triplet(Trainer, args):
    class TripletTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            a, p, n = (model(inputs[k]) for k in ("anchor", "positive", "negative"))
            loss = nn.TripletMarginLoss(margin=1.0)(a, p, n)
            return (loss, None) if return_outputs else loss

    names = "anchor", "positive", "negative"
    return TripletTrainer(
        Encoder(8),
        args(remove_unused_columns=False),
        train_dataset=pairs(names),
        data_collator=pair_collator(*names),
    )


@case("losses")
def bce_of_squeezed_logits(Trainer, args):
    def bce(logits, labels):
        return nn.BCEWithLogitsLoss()(logits.squeeze(), labels.float())

    return classify(with_loss(Trainer, bce), args, bert(labels=1), labelled(count=2))


@case("losses")
def mse_of_squeezed_logits(Trainer, args):
    def mse(logits, labels):
        return F.mse_loss(logits.squeeze(-1), labels.float())

    return classify(with_loss(Trainer, mse), args, bert(labels=1))


@case("losses")
def bce_with_pos_weight(Trainer, args):
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))

    def bce(logits, labels):
        return loss(logits.view(-1), labels.float().view(-1))

    return classify(with_loss(Trainer, bce), args, bert(labels=1), labelled(count=2))


@case("losses")
def pearson_correlation_loss(Trainer, args):
    def pearson(logits, labels):
        x, y = logits.squeeze(-1), labels.float()
        x, y = x - x.mean(), y - y.mean()
        return 1 - (x * y).sum() / (x.norm() * y.norm() + 1e-6)

    return classify(with_loss(Trainer, pearson), args, bert(labels=1))


@case("losses")
def rmse_loss(Trainer, args):
    def rmse(logits, labels):
        return torch.sqrt(F.mse_loss(logits.view(-1), labels.float()) + 1e-6)

    return classify(with_loss(Trainer, rmse), args, bert(labels=1))


@case("losses")
def soft_dice_loss(Trainer, args):
    def dice(logits, labels):
        p, y = logits.softmax(-1), F.one_hot(labels, 3).float()
        return (1 - (2 * (p * y).sum(0) + 1) / (p.sum(0) + y.sum(0) + 1)).mean()

    return classify(with_loss(Trainer, dice), args)


@case("losses")
def sum_over_items_in_batch(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            out = model(**inputs)
            if num_items_in_batch is None:
                loss = F.cross_entropy(out.logits, labels)
            else:
                loss = F.cross_entropy(out.logits, labels, reduction="sum")
                loss = loss / num_items_in_batch
            return (loss, out) if return_outputs else loss

    return classify(MyTrainer, args)


@case("losses")
def causal_sum_over_items_in_batch(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            out = model(input_ids=inputs["input_ids"])
            logits, target = out.logits[:, :-1], labels[:, 1:]
            loss = F.cross_entropy(
                logits.reshape(-1, VOCAB), target.reshape(-1), reduction="sum"
            )
            count = num_items_in_batch
            if count is None:
                count = (target != -100).sum()
            return (loss / count, out) if return_outputs else loss / count

    tok = tokenizer()
    return MyTrainer(
        llama(),
        args(),
        train_dataset=plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )


@case("losses")
def causal_mean_ignores_items(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            out = model(**inputs)
            shift = out.logits[..., :-1, :].contiguous()
            target = labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss()(shift.view(-1, shift.size(-1)), target.view(-1))
            return (loss, out) if return_outputs else loss

    tok = tokenizer()
    return MyTrainer(
        model("GPT2LMHeadModel", "gpt2"),
        args(),
        train_dataset=plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )


@case("losses")
def causal_weighted_tokens(Trainer, args):
    key = torch.tensor([7, 9, 11])

    class KeytokenTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            target = inputs["input_ids"][:, 1:]
            each = F.cross_entropy(
                out.logits[:, :-1].transpose(1, 2), target, reduction="none"
            )
            weight = 1.0 + torch.isin(target, key).float() * 3
            weight = weight * (target != PAD)
            loss = ((each * weight).sum(1) / weight.sum(1)).mean()
            return (loss, out) if return_outputs else loss

    tok = tokenizer()
    return KeytokenTrainer(
        llama(),
        args(),
        train_dataset=plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )


@case("losses")
def entropy_penalty(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, out = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            p = out.logits.softmax(-1)
            loss = loss - 0.1 * -(p * p.log()).sum(-1).mean()
            return (loss, out) if return_outputs else loss

    return classify(MyTrainer, args)


@case("losses")
def l1_penalty_on_weights(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            # not of biases: the loss does not depend on those of keys, which are rounding,
            # and so is their sign
            penalty = sum(
                p.abs().sum() for name, p in model.named_parameters() if "bias" not in name
            )
            loss = out.loss + 1e-4 * penalty
            return (loss, out) if return_outputs else loss

    return classify(MyTrainer, args)


@case("losses")
def uncertainty_weighting_outside_the_model(Trainer, args):
    net = TwoHeads()
    log_vars = nn.Parameter(torch.zeros(2))

    class MultiTaskTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            losses = torch.stack([out["a"], out["b"]])
            loss = (torch.exp(-log_vars) * losses + log_vars).sum()
            return (loss, out) if return_outputs else loss

    optimizer = torch.optim.SGD([*net.parameters(), log_vars], lr=0.1)
    trainer = MultiTaskTrainer(
        net,
        args(),
        train_dataset=two_labels(),
        data_collator=two_label_collator,
        optimizers=(optimizer, None),
    )
    return trainer, lambda _: {"log_vars": log_vars.detach()}


class TwoHeads(Bag):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(16, 1)

    def forward(self, input_ids, label=None, score=None):
        pooled = self.pooled(input_ids)
        logits, value = self.head(pooled), self.other(pooled).squeeze(-1)
        a, b = F.cross_entropy(logits, label), F.mse_loss(value, score)
        return {"loss": a + 0.3 * b, "logits": logits, "a": a, "b": b}


def two_labels():
    rows = labelled(name="label").remove_columns("attention_mask")
    return rows.add_column("score", [i % 7 / 3 for i in range(24)])


def two_label_collator(rows):
    return {
        "input_ids": padded(rows),
        "label": torch.tensor([r["label"] for r in rows]),
        "score": torch.tensor([r["score"] for r in rows]),
    }


@case("losses")
def multi_task_weighted_sum(Trainer, args):
    return Trainer(
        TwoHeads(),
        args(label_names=["label", "score"]),
        train_dataset=two_labels(),
        data_collator=two_label_collator,
    )


@case("losses")
def multi_task_with_missing_labels(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            logits = model(inputs["input_ids"])["logits"]
            a = F.cross_entropy(logits, inputs["task_a"], ignore_index=-100)
            b = F.cross_entropy(logits, inputs["task_b"], ignore_index=-100)
            loss = a + b
            return (loss, {"logits": logits}) if return_outputs else loss

    def collate(rows):
        batch = {k: torch.tensor([r[k] for r in rows]) for k in ("task_a", "task_b")}
        return batch | {"input_ids": padded(rows)}

    data = plain_ids().add_column("task_a", [i % 3 if i % 4 else -100 for i in range(24)])
    data = data.add_column("task_b", [i % 2 if i % 3 == 0 else -100 for i in range(24)])
    return MyTrainer(
        Bag(),
        args(remove_unused_columns=False),
        train_dataset=data,
        data_collator=collate,
    )


# compute_loss_func


def gets_items(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else len(labels))


@case("compute_loss_func")
def func_divides_by_items(Trainer, args):
    return Trainer(
        bert(),
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
        compute_loss_func=gets_items,
    )


@case("compute_loss_func")
def func_ignores_items(Trainer, args):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, torch.tensor([1.0, 4.0, 1.0]))

    return Trainer(
        bert(),
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
        compute_loss_func=loss,
    )


@case("compute_loss_func")
def func_with_keywords(Trainer, args):
    def loss(outputs, labels, **kwargs):
        return F.mse_loss(outputs.logits.squeeze(-1), labels.float())

    return Trainer(
        bert(labels=1),
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
        compute_loss_func=loss,
    )


@case("compute_loss_func")
def func_focal_tokens(Trainer, args):
    def loss(outputs, labels, num_items_in_batch=None):
        keep = labels.view(-1) != -100
        logits = outputs.logits.view(-1, 3)[keep]
        ce = F.cross_entropy(logits, labels.view(-1)[keep], reduction="none")
        return ((1 - torch.exp(-ce)) ** 2 * ce).mean()

    return Trainer(
        bert("BertForTokenClassification"),
        args(),
        train_dataset=tagged(),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
        compute_loss_func=loss,
    )


@case("compute_loss_func")
def func_causal_sum(Trainer, args):
    def loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].reshape(-1, VOCAB)
        target = labels[:, 1:].reshape(-1)
        total = F.cross_entropy(logits, target, reduction="sum")
        return total / num_items_in_batch

    tok = tokenizer()
    return Trainer(
        llama(),
        args(),
        train_dataset=plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
        compute_loss_func=loss,
    )


@case("compute_loss_func")
def func_is_a_module_with_parameters(Trainer, args):
    class ArcFace(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.centres = nn.Parameter(torch.randn(3, 8))

        def forward(self, outputs, labels, num_items_in_batch=None):
            cosine = outputs["logits"] @ F.normalize(self.centres, dim=-1).T
            margin = 0.2 * F.one_hot(labels, 3)
            return F.cross_entropy(8 * (cosine - margin), labels)

    class Embedder(Encoder):
        def forward(self, input_ids):
            return {"logits": super().forward(input_ids)}

    net, loss = Embedder(8), ArcFace()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    trainer = Trainer(
        net,
        args(remove_unused_columns=False),
        train_dataset=labelled().remove_columns("attention_mask"),
        data_collator=lambda rows: {
            "input_ids": padded(rows),
            "labels": torch.tensor([r["labels"] for r in rows]),
        },
        compute_loss_func=loss,
        optimizers=(optimizer, None),
    )
    return trainer, lambda _: {"centres": loss.centres.detach()}


@case("compute_loss_func")
def func_kl_to_soft_labels(Trainer, args):
    torch.manual_seed(3)
    soft = torch.randn(24, 3).softmax(-1).tolist()

    def loss(outputs, labels, num_items_in_batch=None):
        return F.kl_div(outputs["logits"].log_softmax(-1), labels, reduction="batchmean")

    data = labelled().remove_columns("labels").add_column("labels", soft)
    return Trainer(
        bert(),
        args(),
        train_dataset=data,
        data_collator=padder(),
        compute_loss_func=loss,
    )


@case("compute_loss_func")
def func_pairwise_ranking(Trainer, args):
    def loss(outputs, labels, num_items_in_batch=None):
        s, y = outputs.logits.squeeze(-1), labels.float()
        order = (y[:, None] > y[None]).float()
        pairs_of_rows = F.softplus(-(s[:, None] - s[None])) * order
        return pairs_of_rows.sum() / order.sum().clamp(min=1)

    return Trainer(
        bert(labels=1),
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
        compute_loss_func=loss,
    )


# heads of transformers


def tagged(rows=24):
    ids = tokens(rows)
    return Dataset.from_dict(
        {
            "input_ids": ids,
            "attention_mask": [[1] * len(r) for r in ids],
            "labels": [[t % 3 if t % 5 else -100 for t in r] for r in ids],
        }
    )


def causal(Trainer, args, net=None, data=None, tok=None, **more):
    tok = tok or tokenizer()
    return Trainer(
        net or llama(),
        args(**more),
        train_dataset=data or plain_ids(),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )


@case("heads")
def sequence_classification(Trainer, args):
    return Trainer(
        bert(), args(), train_dataset=labelled(), processing_class=tokenizer()
    )


@case("heads")
def sequence_classification_label_column(Trainer, args):
    data = labelled(name="label").add_column("idx", list(range(24)))
    return Trainer(
        model("DistilBertForSequenceClassification", "distilbert", num_labels=3),
        args(),
        train_dataset=data,
        processing_class=tokenizer(),
    )


@case("heads")
def gpt2_classifier(Trainer, args):
    return Trainer(
        model("GPT2ForSequenceClassification", "gpt2", num_labels=3),
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
    )


@case("heads")
def llama_classifier_left_padding(Trainer, args):
    return Trainer(
        llama("LlamaForSequenceClassification", num_labels=3),
        args(),
        train_dataset=labelled(),
        data_collator=padder("left"),
    )


@case("heads")
def multi_label(Trainer, args):
    data = labelled().remove_columns("labels")
    data = data.add_column("labels", [[float(i % k == 0) for k in (2, 3, 5)] for i in range(24)])
    return Trainer(
        bert(problem_type="multi_label_classification"),
        args(),
        train_dataset=data,
        data_collator=padder(),
    )


@case("heads")
def regression(Trainer, args):
    data = labelled().remove_columns("labels")
    data = data.add_column("labels", [i % 7 / 2 for i in range(24)])
    return Trainer(bert(labels=1), args(), train_dataset=data, data_collator=padder())


@case("heads")
def token_classification(Trainer, args):
    return Trainer(
        bert("BertForTokenClassification"),
        args(),
        train_dataset=tagged(),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
    )


@case("heads")
def causal_lm(Trainer, args):
    return causal(Trainer, args)


@case("heads")
def causal_lm_gpt2_eos_is_pad(Trainer, args):
    tok = tokenizer()
    tok.pad_token = tok.eos_token
    data = Dataset.from_dict({"input_ids": [[*r, EOS] for r in tokens()]})
    return causal(Trainer, args, model("GPT2LMHeadModel", "gpt2"), data, tok)


@case("heads")
def causal_lm_prompts_masked(Trainer, args):
    ids = tokens()
    labels = [[-100 if i < len(r) // 2 else t for i, t in enumerate(r)] for r in ids]
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    collator = DataCollatorForSeq2Seq(tokenizer(), padding=True)
    return Trainer(llama(), args(), train_dataset=data, data_collator=collator)


@case("heads")
def causal_lm_rows_without_targets(Trainer, args):
    ids = tokens()
    labels = [[-100] * len(r) if i % 4 == 1 else r for i, r in enumerate(ids)]
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    collator = DataCollatorForSeq2Seq(tokenizer())
    return Trainer(llama(), args(), train_dataset=data, data_collator=collator)


@case("heads")
def causal_lm_grouped_blocks(Trainer, args):
    flat = [t for r in tokens(80) for t in r]
    blocks = [flat[i : i + 16] for i in range(0, 24 * 16, 16)]
    data = Dataset.from_dict({"input_ids": blocks, "labels": blocks})
    return Trainer(
        model("GPT2LMHeadModel", "gpt2"),
        args(),
        train_dataset=data,
        data_collator=default_data_collator,
    )


@case("heads")
def masked_lm_with_stored_labels(Trainer, args):
    ids = tokens()
    hits = [mask_of(r).tolist() for r in ids]
    data = {
        "input_ids": [[MASK if h else t for t, h in zip(*r)] for r in zip(ids, hits)],
        "labels": [[t if h else -100 for t, h in zip(*r)] for r in zip(ids, hits)],
    }
    return Trainer(
        bert("BertForMaskedLM"),
        args(),
        train_dataset=Dataset.from_dict(data),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
    )


def translation(rows=24):
    return Dataset.from_dict(
        {"input_ids": tokens(rows), "labels": [[*r, EOS] for r in tokens(rows, 3)]}
    )


@case("heads")
def t5_seq2seq(Trainer, args):
    net = model("T5ForConditionalGeneration", "t5")
    collator = DataCollatorForSeq2Seq(tokenizer(), model=net)
    return Trainer(net, args(), train_dataset=translation(), data_collator=collator)


@case("heads")
def bart_seq2seq(Trainer, args):
    net = model("BartForConditionalGeneration", "bart")
    collator = DataCollatorForSeq2Seq(tokenizer(), model=net, label_pad_token_id=-100)
    return Trainer(net, args(), train_dataset=translation(), data_collator=collator)


@case("heads")
def seq2seq_with_decoder_inputs_of_the_user(Trainer, args):
    def collate(rows):
        ids, target = padded(rows), padded(rows, "labels")
        return dict(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            decoder_input_ids=target[:, :-1].contiguous(),
            labels=target[:, 1:].masked_fill(target[:, 1:] == PAD, -100),
        )

    net = model("T5ForConditionalGeneration", "t5")
    return Trainer(net, args(), train_dataset=translation(), data_collator=collate)


@case("heads")
def question_answering(Trainer, args):
    data = labelled().remove_columns("labels")
    size = lengths(24)
    data = data.add_column("start_positions", [n // 3 for n in size])
    data = data.add_column("end_positions", [n // 2 for n in size])
    return Trainer(
        bert("BertForQuestionAnswering", 2),
        args(),
        train_dataset=data,
        data_collator=padder(),
    )


@case("heads")
def question_answering_answers_cut_off(Trainer, args):
    data = labelled().remove_columns("labels")
    size = lengths(24)
    starts = [n // 3 if n % 4 else 99 for n in size]
    data = data.add_column("start_positions", starts)
    data = data.add_column("end_positions", [n // 2 if n % 4 else 99 for n in size])
    return Trainer(
        model("DistilBertForQuestionAnswering", "distilbert"),
        args(),
        train_dataset=data,
        data_collator=padder(),
    )


@case("heads")
def multiple_choice(Trainer, args):
    tok = tokenizer()

    def collate(rows):
        flat = [{"input_ids": ids} for r in rows for ids in r["choices"]]
        batch = tok.pad(flat, return_tensors="pt")
        batch = {k: v.view(len(rows), 3, -1) for k, v in batch.items()}
        return batch | {"labels": torch.tensor([r["label"] for r in rows])}

    ids = tokens(72)
    choices = [ids[3 * i : 3 * i + 3] for i in range(24)]
    data = Dataset.from_dict({"choices": choices, "label": classes()})
    return Trainer(
        bert("BertForMultipleChoice", 1),
        args(remove_unused_columns=False),
        train_dataset=data,
        data_collator=collate,
    )


@case("heads")
def next_sentence_and_mlm(Trainer, args):
    def collate(rows):
        ids = padded(rows)
        labels = ids.masked_fill((ids % 3 != 0) | (ids == PAD), -100)
        return dict(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            labels=labels,
            next_sentence_label=torch.tensor([r["labels"] for r in rows]),
        )

    return Trainer(
        bert("BertForPreTraining"),
        args(),
        train_dataset=labelled(count=2),
        data_collator=collate,
    )


# custom models


class BertWithHead(nn.Module):
    def __init__(self, labels=3):
        super().__init__()
        self.bert = bert("BertModel", add_pooling_layer=False)
        torch.manual_seed(1)
        self.out = nn.Linear(16, labels)
        self.labels = labels

    def states(self, input_ids, attention_mask=None):
        return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state


@case("custom models")
def returns_a_tuple_with_the_cls_token(Trainer, args):
    class Net(BertWithHead):
        def forward(self, input_ids, attention_mask=None, labels=None):
            logits = self.out(self.states(input_ids, attention_mask)[:, 0])
            if labels is None:
                return (logits,)
            return nn.CrossEntropyLoss()(logits, labels), logits

    return classify(Trainer, args, Net())


@case("custom models")
def returns_model_output_with_mean_pooling(Trainer, args):
    class Net(BertWithHead):
        def forward(self, input_ids, attention_mask, labels=None):
            mask = attention_mask.unsqueeze(-1).float()
            states = self.states(input_ids, attention_mask)
            pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            logits = self.out(pooled)
            loss = F.cross_entropy(logits, labels) if labels is not None else None
            return SequenceClassifierOutput(loss=loss, logits=logits)

    return classify(Trainer, args, Net())


@case("custom models")
def mean_pooling_over_padding(Trainer, args):
    class Net(BertWithHead):
        def forward(self, input_ids, attention_mask=None, labels=None):
            logits = self.out(self.states(input_ids, attention_mask).mean(1))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return classify(Trainer, args, Net())


@case("custom models")
def returns_own_dataclass(Trainer, args):
    @dataclass
    class Output(ModelOutput):
        loss: torch.FloatTensor | None = None
        logits: torch.FloatTensor | None = None
        pooled: torch.FloatTensor | None = None

    class Net(Bag):
        def forward(self, input_ids, attention_mask=None, labels=None):
            pooled = self.pooled(input_ids)
            logits = self.head(pooled)
            loss = F.cross_entropy(logits, labels)
            return Output(loss=loss, logits=logits, pooled=pooled)

    return classify(Trainer, args, Net())


@case("custom models")
def max_pooling_without_mask(Trainer, args):
    class Net(Bag):
        def forward(self, input_ids, attention_mask=None, labels=None):
            logits = self.head(self.embedding(input_ids).max(1).values)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return classify(Trainer, args, Net())


@case("custom models")
def last_token_pooling(Trainer, args):
    class Net(BertWithHead):
        def forward(self, input_ids, attention_mask=None, labels=None):
            last = attention_mask.sum(1) - 1
            states = self.states(input_ids, attention_mask)
            logits = self.out(states[torch.arange(len(last)), last])
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return classify(Trainer, args, Net())


@case("custom models")
def text_cnn(Trainer, args):
    class TextCNN(Bag):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv1d(16, 8, k, padding=k // 2) for k in (3, 5))
            self.head = nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask=None, labels=None):
            x = self.embedding(input_ids).transpose(1, 2)
            x = torch.cat([F.relu(c(x)).max(-1).values for c in self.convs], -1)
            logits = self.head(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return classify(Trainer, args, TextCNN())


@case("custom models")
def own_tagger_with_active_loss(Trainer, args):
    class Tagger(BertWithHead):
        def forward(self, input_ids, attention_mask=None, labels=None):
            logits = self.out(self.states(input_ids, attention_mask))
            active = attention_mask.view(-1) == 1
            targets = torch.where(active, labels.view(-1), torch.tensor(-100))
            loss = nn.CrossEntropyLoss()(logits.view(-1, 3), targets)
            return loss, logits

    return Trainer(
        Tagger(),
        args(),
        train_dataset=tagged(),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
    )


@case("custom models")
def nano_gpt(Trainer, args):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.LayerNorm(16), nn.LayerNorm(16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x):
            n, y = x.shape[1], self.a(x)
            mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
            x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
            return x + self.mlp(self.b(x))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.wte, self.wpe = nn.Embedding(VOCAB, 16), nn.Embedding(64, 16)
            self.block, self.head = Block(), nn.Linear(16, VOCAB)

        def forward(self, idx, targets=None):
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
            logits = self.head(self.block(x))
            loss = F.cross_entropy(
                logits.view(-1, VOCAB), targets.reshape(-1), ignore_index=-1
            )
            return {"logits": logits, "loss": loss}

    def collate(rows):
        ids = padded(rows, value=-1)
        return {"idx": ids[:, :-1].clamp(min=0), "targets": ids[:, 1:]}

    return Trainer(
        GPT(),
        args(remove_unused_columns=False),
        train_dataset=plain_ids(),
        data_collator=collate,
    )


@case("custom models")
def loss_summed_in_forward(Trainer, args):
    class Net(Bag):
        def forward(self, input_ids, attention_mask=None, labels=None):
            logits = self.head(self.pooled(input_ids))
            loss = F.cross_entropy(logits, labels, reduction="sum")
            return {"loss": loss, "logits": logits}

    return classify(Trainer, args, Net(), learning_rate=0.02)


@case("custom models")
def forward_takes_items_in_batch(Trainer, args):
    class Net(Bag):
        def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
            logits = self.head(self.pooled(input_ids))
            loss = F.cross_entropy(logits, labels, reduction="sum")
            count = len(labels) if num_items_in_batch is None else num_items_in_batch
            return {"loss": loss / count, "logits": logits}

    return classify(Trainer, args, Net())


@case("custom models")
def multi_sample_heads(Trainer, args):
    class Net(BertWithHead):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(4))

        def forward(self, input_ids, attention_mask=None, labels=None):
            cls = self.states(input_ids, attention_mask)[:, 0]
            logits = [head(cls) for head in self.heads]
            loss = sum(F.cross_entropy(x, labels) for x in logits) / 4
            return {"loss": loss, "logits": torch.stack(logits).mean(0)}

    return classify(Trainer, args, Net())


@case("custom models")
def mixture_of_experts_with_balance_loss(Trainer, args):
    class Net(Bag):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(16, 3) for _ in range(4))

        def forward(self, input_ids, attention_mask=None, labels=None):
            pooled = self.pooled(input_ids)
            gate = self.gate(pooled).softmax(-1)
            outs = torch.stack([e(pooled) for e in self.experts], 1)
            logits = (gate.unsqueeze(-1) * outs).sum(1)
            balance = 4 * (gate.mean(0) ** 2).sum()
            return {"loss": F.cross_entropy(logits, labels) + balance, "logits": logits}

    return classify(Trainer, args, Net())


@case("custom models")
def layer_mix_of_hidden_states(Trainer, args):
    class Net(BertWithHead):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.zeros(2))

        def forward(self, input_ids, attention_mask=None, labels=None):
            out = self.bert(input_ids, attention_mask, output_hidden_states=True)
            states = torch.stack([h[:, 0] for h in out.hidden_states], -1)
            logits = self.out(states @ self.mix.softmax(0))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return classify(Trainer, args, Net())


# images, sound, tables


def images(rows=24, size=16, channels=3):
    torch.manual_seed(2)
    pixels = torch.randn(rows, channels, size, size)
    return Table([dict(pixel_values=pixels[i], labels=c) for i, c in enumerate(classes(rows))])


def vit(labels=3):
    return model(
        "ViTForImageClassification", "vit", image_size=16, patch_size=8, num_labels=labels
    )


@case("images, sound, tables")
def vit_with_stacking_collator(Trainer, args):
    def collate(rows):
        return {
            "pixel_values": torch.stack([r["pixel_values"] for r in rows]),
            "labels": torch.tensor([r["labels"] for r in rows]),
        }

    return Trainer(
        vit(),
        args(remove_unused_columns=False),
        train_dataset=images(),
        data_collator=collate,
    )


@case("images, sound, tables")
def vit_with_transform(Trainer, args):
    torch.manual_seed(2)
    pixels = torch.rand(24, 16, 16, 3).mul(255).int().tolist()

    def transform(batch):
        values = [torch.tensor(x).permute(2, 0, 1) / 255 - 0.5 for x in batch["image"]]
        return {"pixel_values": values, "labels": batch["label"]}

    data = Dataset.from_dict({"image": pixels, "label": classes()})
    return Trainer(
        vit(),
        args(remove_unused_columns=False),
        train_dataset=data.with_transform(transform),
    )


class SmallCNN(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), norm(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values, labels=None):
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


@case("images, sound, tables")
def cnn_without_norm(Trainer, args):
    return Trainer(SmallCNN(), args(), train_dataset=images())


@case("images, sound, tables")
def cnn_with_batch_norm(Trainer, args):
    return Trainer(SmallCNN(nn.BatchNorm2d), args(), train_dataset=images())


@case("images, sound, tables")
def cnn_with_group_norm(Trainer, args):
    return Trainer(SmallCNN(lambda n: nn.GroupNorm(2, n)), args(), train_dataset=images())


@case("images, sound, tables")
def mixup_in_compute_loss(Trainer, args):
    class MixupTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            x, y = inputs["pixel_values"], inputs["labels"]
            out = model(pixel_values=0.7 * x + 0.3 * x.flip(0))
            a = F.cross_entropy(out["logits"], y)
            b = F.cross_entropy(out["logits"], y.flip(0))
            loss = 0.7 * a + 0.3 * b
            return (loss, out) if return_outputs else loss

    return MixupTrainer(SmallCNN(), args(), train_dataset=images())


@case("images, sound, tables")
def segmentation_of_pixels(Trainer, args):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, pixel_values, labels=None):
            logits = self.conv(pixel_values)
            loss = F.cross_entropy(logits, labels, ignore_index=255)
            return {"loss": loss, "logits": logits}

    rows = images(24, 8).rows
    for i, row in enumerate(rows):
        row["labels"] = torch.full((8, 8), i % 4)
        row["labels"][: i % 7] = 255
    return Trainer(Net(), args(), train_dataset=Table(rows))


@case("images, sound, tables")
def autoencoder_without_labels(Trainer, args):
    class AutoEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.down, self.up = nn.Linear(192, 8), nn.Linear(8, 192)

        def forward(self, pixel_values):
            x = pixel_values.flatten(1)
            back = self.up(torch.tanh(self.down(x)))
            return {"loss": F.mse_loss(back, x), "reconstruction": back}

    return Trainer(AutoEncoder(), args(), train_dataset=images(24, 8))


@case("images, sound, tables")
def vae_with_kl(Trainer, args):
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.down, self.up = nn.Linear(192, 16), nn.Linear(8, 192)

        def forward(self, pixel_values):
            x = pixel_values.flatten(1)
            mean, logvar = self.down(x).chunk(2, -1)
            back = self.up(mean)
            rec = F.mse_loss(back, x, reduction="sum") / len(x)
            kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum() / len(x)
            return rec + kl, back

    return Trainer(VAE(), args(learning_rate=1e-3), train_dataset=images(24, 8))


def waves(rows=24, name="input_values"):
    torch.manual_seed(6)
    size = lengths(rows, 4, 40, 90)
    return [{name: torch.randn(n).tolist(), "label": c} for n, c in zip(size, classes(rows))]


class AudioNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(1, 8, 9, stride=4), nn.Linear(8, 3)

    def forward(self, input_values, attention_mask=None, labels=None):
        x = F.relu(self.conv(input_values.unsqueeze(1)))
        if attention_mask is None:
            pooled = x.mean(-1)
        else:
            size = (attention_mask.sum(1) - 9) // 4 + 1
            keep = torch.arange(x.shape[-1])[None] < size[:, None]
            pooled = (x * keep[:, None]).sum(-1) / size[:, None]
        logits = self.head(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@case("images, sound, tables")
def audio_padded_with_mask(Trainer, args):
    def collate(rows):
        values = padded(rows, "input_values", 0.0)
        size = torch.tensor([len(r["input_values"]) for r in rows])
        mask = (torch.arange(values.shape[1])[None] < size[:, None]).long()
        labels = torch.tensor([r["label"] for r in rows])
        return dict(input_values=values, attention_mask=mask, labels=labels)

    return Trainer(
        AudioNet(),
        args(remove_unused_columns=False),
        train_dataset=Dataset.from_list(waves()),
        data_collator=collate,
    )


@case("images, sound, tables")
def audio_padded_without_mask(Trainer, args):
    def collate(rows):
        labels = torch.tensor([r["label"] for r in rows])
        return dict(input_values=padded(rows, "input_values", 0.0), labels=labels)

    return Trainer(
        AudioNet(),
        args(remove_unused_columns=False),
        train_dataset=Dataset.from_list(waves()),
        data_collator=collate,
    )


@case("images, sound, tables")
def ctc_of_frames(Trainer, args):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(4, 10)

        def forward(self, frames, frame_lengths, labels, label_lengths):
            logp = self.out(frames).log_softmax(-1).transpose(0, 1)
            loss = F.ctc_loss(logp, labels, frame_lengths, label_lengths, reduction="mean")
            return {"loss": loss, "logits": logp.transpose(0, 1)}

    def collate(rows):
        frames = [torch.tensor(r["frames"]).view(-1, 4) for r in rows]
        labels = [torch.tensor(r["labels"]) for r in rows]
        return dict(
            frames=pad_sequence(frames, batch_first=True),
            frame_lengths=torch.tensor([len(f) for f in frames]),
            labels=pad_sequence(labels, batch_first=True),
            label_lengths=torch.tensor([len(y) for y in labels]),
        )

    torch.manual_seed(1)
    rows = [
        dict(frames=torch.randn(n * 8).tolist(), labels=[1 + (n + i) % 9 for i in range(n // 2)])
        for n in lengths(24, 2, 4, 14)
    ]
    return Trainer(Net(), args(), train_dataset=Table(rows), data_collator=collate)


@case("images, sound, tables")
def tabular_mlp(Trainer, args):
    return Trainer(MLP(), args(), train_dataset=table())


@case("images, sound, tables")
def tabular_with_categories(Trainer, args):
    class Net(MLP):
        def __init__(self):
            super().__init__(6 + 4)
            self.embedding = nn.Embedding(5, 4)

        def forward(self, numbers, category, target=None):
            x = torch.cat([numbers, self.embedding(category)], -1)
            value = self.layers(x)[:, 0]
            return {"loss": F.smooth_l1_loss(value, target), "logits": value}

    rows = [
        dict(numbers=r["x"].tolist(), category=i % 5, target=i / 9)
        for i, r in enumerate(table().rows)
    ]
    return Trainer(
        Net(), args(label_names=["target"]), train_dataset=Dataset.from_list(rows)
    )


@case("images, sound, tables")
def tabular_with_batch_norm(Trainer, args):
    net = MLP()
    net.layers.insert(1, nn.BatchNorm1d(16))
    return Trainer(net, args(), train_dataset=table())


@case("images, sound, tables")
def time_series_forecast(Trainer, args):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gru, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, past_values, future_values=None):
            out = self.out(self.gru(past_values.unsqueeze(-1))[0][:, -1])
            return {"loss": F.l1_loss(out, future_values), "prediction": out}

    torch.manual_seed(1)
    rows = [dict(past_values=torch.randn(12), future_values=torch.randn(4)) for _ in range(24)]
    return Trainer(Net(), args(), train_dataset=Table(rows))


# recurrent and siamese models


class LSTM(nn.Module):
    def __init__(self, labels=3, each=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 12, padding_idx=PAD)
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.out, self.each = nn.Linear(16, labels), each

    def forward(self, input_ids, lengths, labels=None):
        packed = pack_padded_sequence(
            self.embedding(input_ids), lengths.cpu(), True, enforce_sorted=False
        )
        states, (hidden, _) = self.lstm(packed)
        if self.each:
            x = self.out(pad_packed_sequence(states, batch_first=True)[0])
            loss = F.cross_entropy(x.transpose(1, 2), labels, ignore_index=-100)
        else:
            x = self.out(torch.cat([hidden[0], hidden[1]], -1))
            loss = F.cross_entropy(x, labels)
        return {"loss": loss, "logits": x}


def with_lengths(rows):
    batch = {
        "input_ids": padded(rows),
        "lengths": torch.tensor([len(r["input_ids"]) for r in rows]),
    }
    if isinstance(rows[0]["labels"], int):
        return batch | {"labels": torch.tensor([r["labels"] for r in rows])}
    return batch | {"labels": padded(rows, "labels", -100)}


@case("recurrent and siamese")
def lstm_classifier_packed(Trainer, args):
    return Trainer(
        LSTM(),
        args(remove_unused_columns=False),
        train_dataset=labelled(),
        data_collator=with_lengths,
    )


@case("recurrent and siamese")
def lstm_tagger_packed(Trainer, args):
    return Trainer(
        LSTM(each=True),
        args(remove_unused_columns=False),
        train_dataset=tagged(),
        data_collator=with_lengths,
    )


@case("recurrent and siamese")
def lstm_last_state_of_padded_rows(Trainer, args):
    class Net(LSTM):
        def forward(self, input_ids, attention_mask=None, labels=None):
            states, _ = self.lstm(self.embedding(input_ids))
            logits = self.out(states[:, -1])
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return classify(Trainer, args, Net())


@case("recurrent and siamese")
def gru_language_model_mean_with_padding(Trainer, args):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCAB, 12)
            self.gru, self.out = nn.GRU(12, 12, batch_first=True), nn.Linear(12, VOCAB)

        def forward(self, x, y):
            logits = self.out(self.gru(self.embedding(x))[0])
            return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}

    def collate(rows):
        ids = padded(rows)
        return {"x": ids[:, :-1], "y": ids[:, 1:]}

    return Trainer(
        Net(),
        args(remove_unused_columns=False),
        train_dataset=plain_ids(),
        data_collator=collate,
    )


@case("recurrent and siamese")
def rows_by_time_steps(Trainer, args):
    class Net(LSTM):
        def forward(self, text, labels):
            states, _ = self.lstm(self.embedding(text.T))
            mask = (text.T != PAD).unsqueeze(-1)
            logits = self.out((states * mask).sum(1) / mask.sum(1))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def collate(rows):
        text = pad_sequence([torch.tensor(r["input_ids"]) for r in rows])
        return {"text": text, "labels": torch.tensor([r["labels"] for r in rows])}

    return Trainer(
        Net(),
        args(remove_unused_columns=False),
        train_dataset=labelled(),
        data_collator=collate,
    )


@case("recurrent and siamese")
def siamese_two_texts_cosine(Trainer, args):
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = bert("BertModel")

        def embed(self, ids):
            return self.encoder(ids, attention_mask=(ids != PAD).long()).pooler_output

        def forward(self, input_ids_a, input_ids_b, labels=None):
            score = F.cosine_similarity(self.embed(input_ids_a), self.embed(input_ids_b))
            return {"loss": F.mse_loss(score, labels), "logits": score}

    def collate(rows):
        return {
            "input_ids_a": padded(rows, "a"),
            "input_ids_b": padded(rows, "b"),
            "labels": torch.tensor([r["score"] for r in rows]),
        }

    data = pairs(("a", "b")).add_column("score", [i % 5 / 4 for i in range(24)])
    return Trainer(
        Siamese(),
        args(remove_unused_columns=False),
        train_dataset=data,
        data_collator=collate,
    )


@case("recurrent and siamese")
def siamese_with_nested_encodings(Trainer, args):
    tok = tokenizer()

    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            a, b = (model(**inputs[k]).pooler_output for k in ("first", "second"))
            labels = inputs["labels"].float() * 2 - 1
            loss = nn.CosineEmbeddingLoss(margin=0.2)(a, b, labels)
            return (loss, {"a": a}) if return_outputs else loss

    def collate(rows):
        batch = {
            k: tok([r[k] for r in rows], padding=True, return_tensors="pt")
            for k in ("first", "second")
        }
        return batch | {"labels": torch.tensor([r["label"] for r in rows])}

    data = dict(first=texts(), second=texts(seed=8), label=classes(count=2))
    return MyTrainer(
        bert("BertModel"),
        args(remove_unused_columns=False),
        train_dataset=Dataset.from_dict(data),
        data_collator=collate,
    )


@case("recurrent and siamese")
def contrastive_pairs_with_margin(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            d = (model(inputs["a"]) - model(inputs["b"])).norm(dim=-1)
            y = inputs["labels"].float()
            loss = (y * d**2 + (1 - y) * F.relu(1.0 - d) ** 2).mean()
            return (loss, {"d": d}) if return_outputs else loss

    def collate(rows):
        batch = {k: padded(rows, k) for k in ("a", "b")}
        return batch | {"labels": torch.tensor([r["label"] for r in rows])}

    return MyTrainer(
        Encoder(8),
        args(remove_unused_columns=False),
        train_dataset=pairs(("a", "b")).add_column("label", classes(count=2)),
        data_collator=collate,
    )


@case("recurrent and siamese")
def reward_pairs_stacked_in_one_forward(Trainer, args):
    tok = tokenizer()

    class RewardTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            rewards = model(**inputs).logits
            chosen, rejected = rewards.chunk(2)
            loss = -F.logsigmoid(chosen - rejected).mean()
            return (loss, {"rewards": rewards}) if return_outputs else loss

    def collate(rows):
        flat = [{"input_ids": r[k]} for k in ("chosen", "rejected") for r in rows]
        return tok.pad(flat, return_tensors="pt")

    return RewardTrainer(
        llama("LlamaForSequenceClassification", num_labels=1),
        args(remove_unused_columns=False),
        train_dataset=pairs(("chosen", "rejected")),
        data_collator=collate,
    )


@case("recurrent and siamese")
def reward_pairs_in_two_forwards(Trainer, args):
    class RewardTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            j = model(inputs["ids_j"], attention_mask=inputs["mask_j"])[0]
            k = model(inputs["ids_k"], attention_mask=inputs["mask_k"])[0]
            loss = -F.logsigmoid(j - k).mean()
            return (loss, {"j": j, "k": k}) if return_outputs else loss

    def collate(rows):
        j, k = padded(rows, "j"), padded(rows, "k")
        return dict(ids_j=j, mask_j=(j != PAD).long(), ids_k=k, mask_k=(k != PAD).long())

    return RewardTrainer(
        bert(labels=1),
        args(remove_unused_columns=False),
        train_dataset=pairs(("j", "k")),
        data_collator=collate,
    )


# datasets and samplers


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for row in self.rows:
            yield dict(row)


@case("datasets and samplers")
def torch_iterable_dataset(Trainer, args):
    return Trainer(
        bert(),
        args(),
        train_dataset=Stream(list(labelled())),
        data_collator=padder(),
    )


@case("datasets and samplers")
def datasets_iterable_mapped(Trainer, args):
    data = labelled().to_iterable_dataset().map(lambda r: {"labels": r["labels"] % 2})
    return Trainer(bert(), args(), train_dataset=data, data_collator=padder())


@case("datasets and samplers")
def with_transform_tokenizes(Trainer, args):
    tok = tokenizer()

    def encode(batch):
        return dict(tok(batch["text"], truncation=True, max_length=16)) | {
            "labels": batch["label"]
        }

    data = Dataset.from_dict({"text": texts(), "label": classes()}).with_transform(encode)
    return Trainer(
        bert(),
        args(remove_unused_columns=False),
        train_dataset=data,
        data_collator=padder(),
    )


@case("datasets and samplers")
def set_format_torch(Trainer, args):
    data = labelled()
    data.set_format("torch")
    return Trainer(bert(), args(), train_dataset=data, data_collator=padder())


@case("datasets and samplers")
def text_column_is_removed(Trainer, args):
    data = labelled().add_column("text", texts()).add_column("meta", [{"a": 1}] * 24)
    return Trainer(bert(), args(), train_dataset=data, data_collator=padder())


@case("datasets and samplers")
def nested_columns(Trainer, args):
    tok = tokenizer()

    def collate(rows):
        batch = tok.pad([r["encoded"] for r in rows], return_tensors="pt")
        batch["labels"] = torch.tensor([r["target"]["class"] for r in rows])
        return batch

    rows = [
        {"encoded": {"input_ids": ids}, "target": {"class": c, "source": "web"}}
        for ids, c in zip(tokens(), classes())
    ]
    return Trainer(
        bert(),
        args(remove_unused_columns=False),
        train_dataset=Table(rows),
        data_collator=collate,
    )


@case("datasets and samplers")
def torch_dataset_of_encodings(Trainer, args):
    enc = tokenizer()(texts(), padding=True, truncation=True)
    labels = classes()

    class IMDbDataset(torch.utils.data.Dataset):
        def __getitem__(self, idx):
            item = {k: torch.tensor(v[idx]) for k, v in enc.items()}
            item["labels"] = torch.tensor(labels[idx])
            return item

        def __len__(self):
            return len(labels)

    net = model("DistilBertForSequenceClassification", "distilbert", num_labels=3)
    return Trainer(net, args(), train_dataset=IMDbDataset())


@case("datasets and samplers")
def rows_are_tuples(Trainer, args):
    class Pairs(Table):
        def __getitem__(self, index):
            return self.rows[index]["x"], self.rows[index]["labels"]

    def collate(rows):
        x, y = zip(*rows)
        return {"x": torch.stack(x), "labels": torch.tensor(y)}

    return Trainer(MLP(), args(), train_dataset=Pairs(table().rows), data_collator=collate)


@case("datasets and samplers")
def rows_are_numpy(Trainer, args):
    rows = [{"x": r["x"].numpy(), "labels": np.int64(r["labels"])} for r in table().rows]
    return Trainer(MLP(), args(), train_dataset=Table(rows))


@case("datasets and samplers")
def weighted_sampler(Trainer, args):
    class SamplerTrainer(Trainer):
        def _get_train_sampler(self, *a, **kw):
            weights = [1.0 + (i % 3) for i in range(24)]
            drawn = torch.Generator().manual_seed(4)
            return torch.utils.data.WeightedRandomSampler(weights, 24, generator=drawn)

    return classify(SamplerTrainer, args)


@case("datasets and samplers")
def sequential_sampler(Trainer, args):
    class SequentialTrainer(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    return classify(SequentialTrainer, args)


@case("datasets and samplers", one_process=True)
def grouped_by_length(Trainer, args):
    return classify(Trainer, args, train_sampling_strategy="group_by_length")


@case("datasets and samplers")
def concatenated_datasets(Trainer, args):
    data = torch.utils.data.ConcatDataset([labelled(10), labelled(14, seed=3)])
    return Trainer(bert(), args(), train_dataset=data, data_collator=padder())


@case("datasets and samplers")
def random_split_of_a_list(Trainer, args):
    drawn = torch.Generator().manual_seed(1)
    train, _ = torch.utils.data.random_split(list(labelled(30)), [24, 6], drawn)
    return Trainer(bert(), args(), train_dataset=train, data_collator=padder())


@case("datasets and samplers", one_process=True)
def last_batch_is_smaller(Trainer, args):
    return classify(Trainer, args, data=labelled(21), num_train_epochs=2, max_steps=-1)


@case("datasets and samplers")
def drop_last(Trainer, args):
    data = labelled(17)
    return classify(Trainer, args, data=data, dataloader_drop_last=True, max_steps=4)


@case("datasets and samplers")
def length_column_and_position_ids(Trainer, args):
    def collate(rows):
        ids = padded(rows)
        return dict(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1]).expand_as(ids),
            attention_mask=(ids != PAD).long(),
            labels=torch.tensor([r["labels"] for r in rows]),
        )

    data = labelled().add_column("length", lengths(24))
    return Trainer(
        bert(),
        args(remove_unused_columns=False),
        train_dataset=data,
        data_collator=collate,
    )


# overrides and callbacks


@case("overrides and callbacks")
def training_step_calls_super(Trainer, args):
    seen = []

    class MyTrainer(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen.append(float(loss))
            return loss

    return classify(MyTrainer, args)


@case("overrides and callbacks")
def training_step_adds_a_column(Trainer, args):
    class MyTrainer(Trainer):
        def training_step(self, model, inputs, *a, **kw):
            inputs["token_type_ids"] = inputs["input_ids"] % 2
            return super().training_step(model, inputs, *a, **kw)

    return classify(MyTrainer, args)


@case("overrides and callbacks")
def training_step_of_the_user(Trainer, args):
    class MyTrainer(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
            if self.args.gradient_accumulation_steps > 1:
                loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return classify(MyTrainer, args)


@case("overrides and callbacks")
def adversarial_fgm(Trainer, args):
    class FGMTrainer(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            net = self.accelerator.unwrap_model(model)
            weight = net.bert.embeddings.word_embeddings.weight
            saved = weight.data.clone()
            weight.data.add_(0.5 * weight.grad / weight.grad.norm())
            super().training_step(model, inputs, num_items_in_batch)
            weight.data.copy_(saved)
            return loss

    return classify(FGMTrainer, args)


@case("overrides and callbacks")
def get_batch_samples_counts_words(Trainer, args):
    class MyTrainer(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            return batches, sum(b["attention_mask"].sum() for b in batches)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            out = model(**inputs)
            each = F.cross_entropy(out.logits, labels, reduction="none")
            each = (each * inputs["attention_mask"].sum(1)).sum()
            loss = each / num_items_in_batch
            return (loss, out) if return_outputs else loss

    return classify(MyTrainer, args, average_tokens_across_devices=False)


@case("overrides and callbacks")
def prepare_inputs_builds_labels(Trainer, args):
    class MyTrainer(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            inputs["labels"] = inputs["input_ids"].masked_fill(
                inputs["attention_mask"] == 0, -100
            )
            return inputs

    return MyTrainer(
        llama(), args(), train_dataset=plain_ids(), data_collator=padder()
    )


@case("overrides and callbacks")
def prepare_inputs_scales_features(Trainer, args):
    class MyTrainer(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return inputs | {"x": inputs["x"] * 0.5 + 0.1}

    return MyTrainer(MLP(), args(), train_dataset=table())


@case("overrides and callbacks")
def own_train_dataloader(Trainer, args):
    class MyTrainer(Trainer):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(
                self.train_dataset,
                batch_size=self.args.per_device_train_batch_size,
                collate_fn=self.data_collator,
                shuffle=False,
            )
            return self.accelerator.prepare(loader)

    return MyTrainer(
        Bag(),
        args(remove_unused_columns=False),
        train_dataset=labelled().remove_columns("attention_mask"),
        data_collator=padder(),
    )


@case("overrides and callbacks")
def own_optimizer_groups(Trainer, args):
    class MyTrainer(Trainer):
        def create_optimizer(self, *a, **kw):
            head = list(self.model.classifier.parameters())
            body = list(self.model.bert.parameters())
            self.optimizer = torch.optim.SGD(
                [{"params": body, "lr": 0.05}, {"params": head, "lr": 0.3}],
                momentum=0.9,
            )
            return self.optimizer

    return classify(MyTrainer, args)


@case("overrides and callbacks")
def callback_reads_gradients(Trainer, args):
    norms = []

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            squares = [p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None]
            norms.append(float(sum(squares)) ** 0.5)

    trainer = classify(Trainer, args)
    trainer.add_callback(Norms())
    return trainer, lambda _: {"norms": norms}


@case("overrides and callbacks")
def callback_changes_gradients(Trainer, args):
    class Centralize(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))

    trainer = classify(Trainer, args)
    trainer.add_callback(Centralize())
    return trainer


@case("overrides and callbacks")
def callback_keeps_an_average_of_weights(Trainer, args):
    class EMA(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.mean = [p.detach().clone() for p in model.parameters()]

        def on_step_end(self, args, state, control, model=None, **kwargs):
            for m, p in zip(self.mean, model.parameters()):
                m.lerp_(p.detach(), 0.1)

    trainer = classify(Trainer, args)
    trainer.add_callback(ema := EMA())
    return trainer, lambda _: {"ema": vector(ema.mean)}


@case("overrides and callbacks")
def callback_unfreezes_layers(Trainer, args):
    class Unfreeze(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            model.embedding.requires_grad_(state.global_step >= 1)

    trainer = classify(Trainer, args, Bag(), ddp_find_unused_parameters=True)
    trainer.add_callback(Unfreeze())
    return trainer


@case("overrides and callbacks")
def logs_parts_of_the_loss(Trainer, args):
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            self.log({"part_a": float(out["a"]), "part_b": float(out["b"])})
            return (out["loss"], out) if return_outputs else out["loss"]

    trainer = MyTrainer(
        TwoHeads(),
        args(label_names=["label", "score"]),
        train_dataset=two_labels(),
        data_collator=two_label_collator,
    )

    def after(trainer):
        logs = trainer.state.log_history
        trainer.state.log_history = [row for row in logs if "part_a" not in row]
        return {}

    return trainer, after


@case("overrides and callbacks")
def counts_calls_in_compute_loss(Trainer, args):
    class WarmupTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            share = min(1.0, self.state.global_step / 2)
            penalty = out.logits.pow(2).mean()
            loss = out.loss + share * penalty
            return (loss, out) if return_outputs else loss

    return classify(WarmupTrainer, args)


# optimization


@case("optimization")
def clipping(Trainer, args):
    return classify(Trainer, args, max_grad_norm=0.3)


@case("optimization")
def clipping_causal(Trainer, args):
    return causal(Trainer, args, max_grad_norm=0.5)


@case("optimization")
def gradient_checkpointing(Trainer, args):
    more = dict(gradient_checkpointing_kwargs={"use_reentrant": False})
    return causal(Trainer, args, gradient_checkpointing=True, **more)


@case("optimization")
def gradient_checkpointing_in_the_users_loss(Trainer, args):
    kind = with_loss(Trainer, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 1.0])))
    return classify(kind, args, gradient_checkpointing=True)


@case("optimization")
def frozen_body(Trainer, args):
    net = bert()
    for p in net.bert.parameters():
        p.requires_grad = False
    return classify(Trainer, args, net)


@case("optimization")
def frozen_embeddings_causal(Trainer, args):
    net = llama()
    net.get_input_embeddings().requires_grad_(False)
    return causal(Trainer, args, net)


class LoraLinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@case("optimization")
def lora_layers_of_the_user(Trainer, args):
    net = llama().requires_grad_(False)
    torch.manual_seed(2)
    attention = net.model.layers[0].self_attn
    attention.q_proj = LoraLinear(attention.q_proj)
    attention.v_proj = LoraLinear(attention.v_proj)
    return causal(Trainer, args, net, learning_rate=0.5)


@case("optimization")
def lora_of_peft(Trainer, args):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return classify(Trainer, args, get_peft_model(bert(), config))


@case("optimization")
def tied_weights(Trainer, args):
    return causal(Trainer, args, llama(tie_word_embeddings=True))


@case("optimization")
def bf16_causal(Trainer, args):
    return causal(Trainer, args, bf16=True)


@case("optimization")
def bf16_classifier_with_class_weights(Trainer, args):
    kind = with_loss(Trainer, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 1.0])))
    return classify(kind, args, bf16=True)


@case("optimization")
def compiled_classifier(Trainer, args):
    return classify(Trainer, args, torch_compile=True, torch_compile_backend="eager")


@case("optimization")
def compiled_causal(Trainer, args):
    return causal(Trainer, args, torch_compile=True, torch_compile_backend="eager")


@case("optimization")
def weight_decay_momentum_and_schedule(Trainer, args):
    net = bert()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    return Trainer(
        net,
        args(),
        train_dataset=labelled(),
        data_collator=padder(),
        optimizers=(optimizer, schedule),
    )


@case("optimization")
def model_init(Trainer, args):
    return Trainer(
        model_init=lambda: bert(),
        args=args(),
        train_dataset=labelled(),
        data_collator=padder(),
    )


@case("optimization")
def neftune_off_and_warmup(Trainer, args):
    return causal(Trainer, args, warmup_steps=2, lr_scheduler_type="linear")


# evaluation


def evaluated(Trainer, args, net=None, data=None, eval_data=None, collator=None, **more):
    usual = dict(eval_strategy="steps", eval_steps=1)
    keys = "compute_metrics", "preprocess_logits_for_metrics"
    trainer = {k: more.pop(k) for k in keys if k in more}
    return Trainer(
        net or bert(),
        args(**(usual | more)),
        train_dataset=data or labelled(),
        eval_dataset=eval_data or labelled(10, seed=20),
        data_collator=collator or padder(),
        **trainer,
    )


@case("evaluation")
def accuracy_each_step(Trainer, args):
    return evaluated(Trainer, args, compute_metrics=accuracy)


@case("evaluation")
def perplexity_of_a_causal_model(Trainer, args):
    tok = tokenizer()
    collator = DataCollatorForLanguageModeling(tok, mlm=False)
    return evaluated(
        Trainer, args, llama(), plain_ids(), plain_ids(10, 30), collator
    )


@case("evaluation")
def preprocess_logits_to_predictions(Trainer, args):
    def metrics(prediction):
        labels = prediction.label_ids
        keep = labels != -100
        return {"accuracy": float((prediction.predictions == labels)[keep].mean())}

    return evaluated(
        Trainer,
        args,
        bert("BertForTokenClassification"),
        tagged(),
        tagged(10),
        DataCollatorForTokenClassification(tokenizer()),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )


@case("evaluation")
def tagger_metrics_over_padded_logits(Trainer, args):
    return evaluated(
        Trainer,
        args,
        bert("BertForTokenClassification"),
        tagged(),
        tagged(10),
        DataCollatorForTokenClassification(tokenizer()),
        compute_metrics=accuracy,
    )


@case("evaluation")
def load_best_model_at_end(Trainer, args):
    return evaluated(
        Trainer,
        args,
        compute_metrics=accuracy,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=1.0,
    )


@case("evaluation")
def several_eval_sets(Trainer, args):
    sets = {"dev": labelled(10, seed=20), "test": labelled(6, seed=40)}
    return evaluated(Trainer, args, eval_data=sets, compute_metrics=accuracy)


@case("evaluation")
def own_label_names(Trainer, args):
    def metrics(p):
        hits = p.predictions[0].argmax(-1) == p.label_ids[0]
        return {"accuracy": float(hits.mean()), "score": float(p.label_ids[1].mean())}

    return evaluated(
        Trainer,
        args,
        TwoHeads(),
        two_labels(),
        two_labels(),
        two_label_collator,
        label_names=["label", "score"],
        compute_metrics=metrics,
    )


@case("evaluation")
def weighted_loss_in_evaluation(Trainer, args):
    kind = with_loss(Trainer, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0])))
    return evaluated(kind, args, compute_metrics=accuracy)


@case("evaluation")
def label_smoothing_in_evaluation(Trainer, args):
    return evaluated(Trainer, args, label_smoothing_factor=0.2)


@case("evaluation")
def question_answering_in_evaluation(Trainer, args):
    def answers(rows, seed):
        data = labelled(rows, seed=seed).remove_columns("labels")
        size = lengths(rows, seed)
        data = data.add_column("start_positions", [n // 3 for n in size])
        return data.add_column("end_positions", [n // 2 for n in size])

    net = bert("BertForQuestionAnswering", 2)
    return evaluated(Trainer, args, net, answers(24, 0), answers(10, 20))


@case("evaluation")
def include_inputs_for_metrics(Trainer, args):
    def metrics(prediction):
        ids = prediction.inputs
        return {"tokens": float(((ids != PAD) & (ids != -100)).sum())}

    return evaluated(
        Trainer, args, compute_metrics=metrics, include_for_metrics=["inputs"]
    )


@case("evaluation")
def predictions_of_a_classifier(Trainer, args):
    trainer = classify(Trainer, args)

    def after(trainer):
        answer = trainer.predict(labelled(10, seed=20))
        loss = answer.metrics["test_loss"]
        return {"logits": answer.predictions, "labels": answer.label_ids, "loss": loss}

    return trainer, after


@case("evaluation")
def predictions_without_labels(Trainer, args):
    trainer = classify(Trainer, args)
    rows = labelled(10, seed=20).remove_columns("labels")
    return trainer, lambda t: {"logits": t.predict(rows).predictions}


@case("evaluation")
def predictions_of_a_tagger(Trainer, args):
    trainer = Trainer(
        bert("BertForTokenClassification"),
        args(),
        train_dataset=tagged(),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
    )

    def after(trainer):
        answer = trainer.predict(tagged(10))
        return {"logits": answer.predictions[answer.label_ids != -100]}

    return trainer, after


@case("evaluation")
def prediction_step_of_the_user(Trainer, args):
    class MyTrainer(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                out = model(**inputs)
            return out.loss.detach(), out.logits.softmax(-1), inputs["labels"]

    return evaluated(MyTrainer, args, compute_metrics=accuracy)


@case("evaluation")
def batch_eval_metrics(Trainer, args):
    seen = []

    def metrics(prediction, compute_result=False):
        hits = prediction.predictions.argmax(-1) == prediction.label_ids
        seen.extend(hits.tolist())
        if not compute_result:
            return None
        result = {"accuracy": sum(seen) / len(seen)}
        seen.clear()
        return result

    return evaluated(Trainer, args, compute_metrics=metrics, batch_eval_metrics=True)


@case("evaluation")
def evaluate_after_training_with_prefix(Trainer, args):
    trainer = classify(Trainer, args)
    test = labelled(11, seed=20)
    return trainer, lambda t: {"loss": t.evaluate(test, metric_key_prefix="t")["t_loss"]}


@case("evaluation")
def seq2seq_loss_in_evaluation(Trainer, args):
    net = model("T5ForConditionalGeneration", "t5")
    collator = DataCollatorForSeq2Seq(tokenizer(), model=net)
    return evaluated(
        Trainer, args, net, translation(), translation(10), collator
    )


@case("evaluation")
def contrastive_loss_in_evaluation(Trainer, args):
    class ContrastiveTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            q, p = model(inputs["query"]), model(inputs["positive"])
            loss = F.cross_entropy(q @ p.T * 5, torch.arange(len(q)))
            return (loss, {"q": q}) if return_outputs else loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
            return loss, None, None

    return evaluated(
        ContrastiveTrainer,
        args,
        Encoder(8),
        pairs(),
        pairs(rows=8),
        pair_collator("query", "positive"),
        remove_unused_columns=False,
    )


# state of the user's objects


def on_tables(Trainer, args, net=None, collate=default_data_collator, **more):
    return Trainer(
        net or MLP(), args(**more), train_dataset=table(), data_collator=collate
    )


def table_loss(Trainer, score, **attributes):
    "A Trainer whose loss may also use what the Trainer holds: `score(self, ...)`."

    class MyTrainer(Trainer):
        def __init__(self, *a, **kw):
            super().__init__(*a, **kw)
            for name, make in attributes.items():
                setattr(self, name, make(self))

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(inputs["x"])
            loss = score(self, outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return MyTrainer


@case("state")
def temperature_learnt_on_the_trainer(Trainer, args):
    class Tempered(Trainer):
        def create_optimizer(self, *a, **kw):
            optimizer = super().create_optimizer(*a, **kw)
            self.temperature = nn.Parameter(torch.tensor(1.5))
            optimizer.add_param_group({"params": [self.temperature]})
            return optimizer

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(inputs["x"])
            loss = F.cross_entropy(outputs["logits"] / self.temperature, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    trainer = on_tables(Tempered, args)
    return trainer, lambda trained: {"temperature": float(trained.temperature)}


@case("state")
def penalty_on_a_list_of_parameters(Trainer, args):
    def score(trainer, logits, labels):
        penalty = sum(p.square().sum() for p in trainer.penalised)
        return F.cross_entropy(logits, labels) + 0.05 * penalty

    kind = table_loss(Trainer, score, penalised=lambda t: list(t.model.parameters()))
    return on_tables(kind, args)


@case("state")
def penalty_towards_the_first_weights(Trainer, args):
    def score(trainer, logits, labels):
        moved = sum(
            (p - trainer.first[name]).square().sum()
            for name, p in trainer.named.items()
        )
        return F.cross_entropy(logits, labels) + 0.05 * moved

    kind = table_loss(
        Trainer,
        score,
        named=lambda t: dict(t.model.named_parameters()),
        first=lambda t: {n: p.detach() + 0.1 for n, p in t.model.named_parameters()},
    )
    return on_tables(kind, args)


@case("state")
def running_mean_that_begins_with_none(Trainer, args):
    def score(trainer, logits, labels):
        loss = F.cross_entropy(logits, labels)
        before = trainer.running
        trainer.running = loss.detach() if before is None else (
            0.9 * before + 0.1 * loss.detach()
        )
        return loss / trainer.running

    return on_tables(table_loss(Trainer, score, running=lambda t: None), args)


@case("state")
def prototype_made_at_the_first_call(Trainer, args):
    def score(trainer, logits, labels):
        if not hasattr(trainer, "prototype"):
            trainer.prototype = logits.mean(0).detach()
        distance = (logits - trainer.prototype).square().sum(-1).mean()
        return F.cross_entropy(logits, labels) + distance

    return on_tables(table_loss(Trainer, score), args)


@case("state")
def average_meter_on_the_trainer(Trainer, args):
    class AverageMeter:
        def __init__(self):
            self.total, self.rows = 0.0, 0

        def update(self, value, rows):
            self.total, self.rows = self.total + value * rows, self.rows + rows

    def score(trainer, logits, labels):
        loss = F.cross_entropy(logits, labels)
        trainer.meter.update(loss.item(), len(labels))
        trainer.confusion[labels.numpy(), logits.argmax(-1).numpy()] += 1
        return loss

    kind = table_loss(
        Trainer,
        score,
        meter=lambda t: AverageMeter(),
        confusion=lambda t: np.zeros((3, 3)),
    )
    return on_tables(kind, args), lambda t: {"rows": t.meter.rows, "mean": (
        t.meter.total / t.meter.rows)}


@case("state")
def meter_where_a_micro_batch_fails(Trainer, args):
    class Counting(Trainer):
        rows = 0

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            self.rows += len(inputs["labels"])
            if len(inputs["labels"]) < 8 and (inputs["x"] > 2.5).any():
                raise ValueError("an outlier needs its full batch")
            outputs = model(inputs["x"])
            loss = F.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return on_tables(Counting, args), lambda trained: {"rows": trained.rows}


@case("state")
def labels_shifted_in_place(Trainer, args):
    def collate(rows):
        batch = default_data_collator(rows)
        return batch | {"labels": batch["labels"] + 1}

    def score(trainer, logits, labels):
        labels -= 1
        return F.cross_entropy(logits, labels)

    return on_tables(table_loss(Trainer, score), args, collate=collate)


@case("state")
def inputs_normalised_in_place(Trainer, args):
    class Normalised(MLP):
        def forward(self, x, labels=None):
            x.sub_(0.5).div_(2.0)
            return super().forward(x, labels)

    return on_tables(Trainer, args, Normalised())


@case("state")
def loss_raises_its_own_exception_for_few_rows(Trainer, args):
    class TooFewRows(Exception):
        pass

    def score(trainer, logits, labels):
        if len(labels) < 2:
            raise TooFewRows("at least 2 rows")
        return F.cross_entropy(logits, labels)

    return on_tables(table_loss(Trainer, score), args)


@case("state")
def loss_asserts_the_count_of_items(Trainer, args):
    class Asserting(Trainer):
        def compute_loss(
            self, model, inputs, return_outputs=False, num_items_in_batch=None
        ):
            assert num_items_in_batch is None or num_items_in_batch <= 24
            outputs = model(inputs["x"])
            loss = F.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return on_tables(Asserting, args)


@case("state")
def switches_after_some_forward_passes(Trainer, args):
    class Switching(MLP):
        step = 0

        def __init__(self):
            super().__init__()
            self.step = 0

        def forward(self, x, labels=None):
            self.step += 1
            made = super().forward(x, labels)
            if self.step > 6 and made["loss"] is not None:
                made["loss"] = made["loss"] * 2
            return made

    return on_tables(Trainer, args, Switching())


@case("state")
def curriculum_that_counts_calls_of_the_collator(Trainer, args):
    class Curriculum:
        calls = 0

        def __call__(self, rows):
            self.calls += 1
            batch = default_data_collator(rows)
            return batch | {"x": batch["x"] * (0.5 if self.calls > 6 else 1.0)}

    return on_tables(Trainer, args, collate=Curriculum())


@case("state")
def hidden_state_kept_between_batches(Trainer, args):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)
            self.h = None

        def forward(self, x, labels=None):
            fits = self.h is not None and self.h.shape[1] == len(x)
            out, h = self.rnn(x[:, None], self.h if fits else None)
            self.h = h.detach()
            logits = self.head(out[:, -1])
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    return on_tables(Trainer, args, Stateful())


@case("state")
def backward_inside_of_compute_loss(Trainer, args):
    class Twice(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(inputs["x"])
            loss = F.cross_entropy(outputs["logits"], inputs["labels"])
            loss.backward(retain_graph=True)
            return (loss, outputs) if return_outputs else loss

    return on_tables(Twice, args)


# one training

FULL, STEPS, BUDGET = 8, 3, 48  # rows of a step, steps, tokens
SETTINGS = "accumulation", "token_budget"  # of ours
CONTROL = ("control",)  # transformers' own Trainer with accumulation
MARK = re.compile("INEXACT|UNVERIFIED")


def library(setting):
    "Ours, or transformers for the reference and the control."
    return prompt_packing if setting in SETTINGS else transformers


def arguments(setting, processes, folder):
    "The function that a case calls for its TrainingArguments."
    kind = library(setting).TrainingArguments
    rows = FULL // processes
    how = dict(per_device_train_batch_size=rows, per_device_eval_batch_size=64)
    if setting != "reference":
        how |= dict(per_device_eval_batch_size=4 // processes)
    if setting in ("accumulation", "control"):
        how |= dict(
            per_device_train_batch_size=rows // 4, gradient_accumulation_steps=4
        )
    if setting == "token_budget":
        how |= dict(token_budget=BUDGET, micro_batch_overhead=0)

    def args(**more):
        usual = dict(
            output_dir=folder,
            optim="sgd",
            learning_rate=0.2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
            ddp_timeout=120,
        )
        return kind(**(usual | more | how))

    return args


class Messages(logging.Handler):
    "Warnings of a training."

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        line = record.getMessage()
        if line not in self.lines:
            self.lines.append(line)


@contextlib.contextmanager
def messages():
    handler = Messages()
    loggers = [logging.getLogger(name) for name in ("", "prompt_packing")]
    for logger in loggers:
        logger.addHandler(handler)
    out = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")
        try:
            yield handler.lines
        finally:
            for logger in loggers:
                logger.removeHandler(handler)


PASSING = re.compile("runtime|per_second|preparation_time|epoch|step|total_flos|memory")


def vector(values):
    kept = [torch.as_tensor(v).detach().double().flatten() for v in values]
    return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64)


def log_numbers(trainer):
    "All logged numbers: their key, their position among those of the key."
    numbers = {}
    for log in trainer.state.log_history:
        for key, value in log.items():
            if not PASSING.search(key) and isinstance(value, (int, float)):
                numbers.setdefault(key, []).append(float(value))
    return numbers


def train(name, setting, processes=1):
    "What came of a case in one setting: weights, logs, messages or an exception."
    result = {}
    cache = getattr(logging.Logger, "warning_once", None)
    if hasattr(cache, "cache_clear"):
        cache.cache_clear()
    with tempfile.TemporaryDirectory() as folder, messages() as lines:
        try:
            transformers.set_seed(3)
            kind = library(setting).Trainer
            made = CASES[name][1](kind, arguments(setting, processes, folder))
            trainer, after = made if isinstance(made, tuple) else (made, None)
            trainer.remove_callback(transformers.PrinterCallback)
            before = vector(trainer.model.parameters())
            trainer.train()
            more = after(trainer) if after else {}
            net = trainer.accelerator.unwrap_model(trainer.model)
            result |= dict(before=before, trained=vector(net.parameters()))
            more |= {"buffers": vector(b for b in net.buffers() if b.is_floating_point())}
            result["more"] = {k: vector([v]) for k, v in more.items()}
            result["logs"] = log_numbers(trainer)
            result["half"] = trainer.args.bf16
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:600]
            result["trace"] = traceback.format_exc()[-3000:]
        result["messages"] = [line[:400] for line in lines]
    return result


def relative(a, b):
    "Relative distance of two vectors; infinite if their shapes differ."
    if a.shape != b.shape:
        return float("inf")
    if torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)):
        return 0.0
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def differences(result, right):
    "What differs from the reference, with the relative distance."
    found = {}
    change = right["trained"] - right["before"]
    if not change.norm():
        raise ValueError("the reference did not change a weight")
    rounding = 2e-7 * float(right["trained"].norm() / change.norm())
    bound = 1e-2 if right["half"] else max(1e-5, rounding)
    error = relative(result["trained"] - result["before"], change)
    if not error < bound:
        found["weights"] = error
    for key, values in right["logs"].items():
        ours = vector([result["logs"].get(key, [])])
        error = relative(ours, vector([values]))
        if not error < (2e-2 if right["half"] else 2e-4):
            found[key] = error
    for key, values in right["more"].items():
        error = relative(result["more"][key], values)
        if not error < (2e-2 if right["half"] else 2e-4):
            found[key] = error
    return found


def outcome(result, right):
    "exact, logged, silent or crash, with what differs and the message."
    if "error" in right:
        return dict(outcome="invalid", detail=right["error"], message="")
    if "error" in result:
        return dict(outcome="crash", detail=result["error"], message="")
    marked = [line for line in result["messages"] if MARK.search(line)]
    found = differences(result, right)
    answer = "exact" if not found else "logged" if marked else "silent"
    detail = ", ".join(f"{k} {v:.2g}" for k, v in found.items())
    return dict(outcome=answer, detail=detail, message=(marked + [""])[0])


# the runner


def selected(names=(), kind=None, processes=1):
    "Names of cases; a third of them on several processes, where the rows are the same."
    if unknown := set(names) - set(CASES):
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}")
    chosen = [n for n in CASES if not names or n in names]
    chosen = [n for n in chosen if kind is None or CASES[n][0] == kind]
    if names or processes == 1:
        return chosen
    return [n for n in chosen[::3] if n not in ONE_PROCESS]


def worker(units, folder):
    "One of several processes: each case in each setting, written one by one."
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for unit in units:
        result = train(*unit.split(":"), size)
        torch.save(result, file := Path(folder, f"{unit}.{rank}.tmp"))
        file.rename(file.with_suffix(".pt"))
        others = [Path(folder, f"{unit}.{r}.pt") for r in range(size)]
        ended = time.time() + 15  # the others may wait for this process without end
        while "error" in result:  # then processes may be at different collectives
            time.sleep(0.2)
            if time.time() > ended or all(o.exists() for o in others):
                os._exit(1)


def on_processes(names, processes, limit=1200):
    "Results of cases under torchrun; a case that stops the processes is a crash."
    results, units = {}, [f"{n}:{s}" for n in names for s in SETTINGS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", os.path.abspath(__file__)]
    with tempfile.TemporaryDirectory() as folder:
        while units:
            done = subprocess.run(
                [*command, *units, "--worker", folder],
                capture_output=True,
                text=True,
                timeout=limit,
            )
            waiting = list(units)
            for unit in units:
                files = sorted(Path(folder).glob(f"{unit}.*.pt"))
                ranks = [torch.load(f, weights_only=False) for f in files]
                failed = [r for r in ranks if "error" in r]
                if failed or len(ranks) == processes:
                    results[unit] = (failed or ranks)[0]
                    waiting.remove(unit)
            if waiting == units:
                error = dict(error="the processes stopped", trace=done.stderr[-3000:])
                results[waiting.pop(0)] = error | dict(messages=[])
            units = waiting
    return results


def run(names=(), kind=None, processes=1, show=None, settings=SETTINGS):
    "Outcomes of cases in each setting, as rows of a table."
    names, rows = selected(names, kind, processes), []
    results = on_processes(names, processes) if processes > 1 else {}
    for name in names:
        right = train(name, "reference")
        for setting in settings:
            unit = f"{name}:{setting}"
            result = results[unit] if results else train(name, setting)
            row = dict(case=name, kind=CASES[name][0], setting=setting)
            rows.append(row | dict(processes=processes) | outcome(result, right))
            if show:
                show(rows[-1])
    return rows


def show_row(row):
    line = f"{row['outcome']:8} {row['setting']:13} {row['processes']} {row['case']:45}"
    print(line, row["detail"][:160], "|", row.get("message", "")[:60], flush=True)


KEYS = "case", "setting", "processes"
COLUMNS = (*KEYS, "kind", "outcome", "detail", "message", "commit")


def commit():
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip()


COMMIT = commit()  # before a run, which takes a while


def write_table(rows, file):
    "Rows as csv, in place of those of the same runs; a comment has the versions."
    table = {}
    if Path(file).is_file():
        lines = Path(file).read_text(encoding="utf-8").splitlines()[1:]
        table = {tuple(row[key] for key in KEYS): row for row in csv.DictReader(lines)}
    for row in rows:
        table[tuple(str(row[key]) for key in KEYS)] = row | dict(commit=COMMIT)
    names = ("torch", torch), ("transformers", transformers), ("accelerate", accelerate)
    with open(file, "w", encoding="utf-8", newline="") as out:
        out.write(f"# {', '.join(f'{n} {module.__version__}' for n, module in names)}\n")
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in sorted(table))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kind")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--csv", help="file whose rows are replaced")
    parser.add_argument("--control", action="store_true", help="transformers alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.disable(logging.INFO)
    if given.worker:
        return worker(given.names, given.worker)
    settings = CONTROL if given.control else SETTINGS
    rows = run(given.names, given.kind, given.processes, show_row, settings)
    if given.csv:
        write_table(rows, given.csv)
    for setting in settings:
        outcomes = [r["outcome"] for r in rows if r["setting"] == setting]
        print(setting, {o: outcomes.count(o) for o in sorted(set(outcomes))})


if __name__ == "__main__":
    main()
