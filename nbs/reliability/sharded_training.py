"""Small trainings on one engine, started by torchrun on several processes, over gloo.

    python sharded_training.py one OUT --stock       # transformers, one process, one batch
    torchrun --nproc_per_node 2 sharded_training.py fsdp2 OUT --with bf16 checkpointing

Trains each head for four steps of 24 rows and writes its final weights to
OUT/WHO-ENGINE-VARIANT-HEAD-SETTING.pt. With `--stock` transformers trains, all rows of a
step as one batch: the reference (`stock`), and the same with the rows of each step in
another order (`order1`, ...), which shows what rounding alone changes.
"""
import argparse
import os
import sys
import tempfile
from copy import deepcopy

import torch
import transformers

HEADS = ["language model", "unmasked padding", "classifier", "tagger", "contrastive"]
SETTINGS = {  # of ours: micro-batches of a step by accumulation, by a budget, by both
    "accumulation": dict(accumulate=3),
    "budget": dict(accumulate=1, token_budget=60, micro_batch_overhead=0),
    "both": dict(accumulate=3, token_budget=60, micro_batch_overhead=0),
}
VARIANTS = {  # what a training uses besides: arguments of the Trainer; `make_model` has more
    "plain": {},
    "bf16": dict(bf16=True),  # autocast; under FSDP2 and ZeRO weights are gathered in bf16
    "fp16": dict(fp16=True),  # autocast, with a loss scaler whose first step overflows
    "first step skipped": {},  # in float32: a reference for fp16
    "bf16 model": {},
    "checkpointing": dict(gradient_checkpointing=True,
                          gradient_checkpointing_kwargs=dict(use_reentrant=False)),
    "reentrant": dict(gradient_checkpointing=True,
                      gradient_checkpointing_kwargs=dict(use_reentrant=True)),
    "bf16 checkpointing": dict(bf16=True, gradient_checkpointing=True),
    "FSDP checkpointing": {},  # FSDP2's own
    "compile": dict(torch_compile=True, torch_compile_backend="aot_eager"),
    "LoRA": {},
    "frozen": {},  # embeddings and the first layer
    "sync": dict(accelerator_config=dict(
        gradient_accumulation_kwargs=dict(sync_each_batch=True))),
    "rank without rows": {},  # in the last step: batches by a loader of one's own
}
ROWS, STEPS = 24, 4  # of a step; of a training


def make_rows(head, order=0):
    "Of all steps; `order` is a seed for the order in each step, 0: as they were drawn."
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(ROWS * STEPS):
        length = int(torch.randint(3, 20, (1,), generator=generator))
        ids = torch.randint(1, 40, (length,), generator=generator).tolist()
        is_target = torch.rand(length, generator=generator) > 0.4
        masked = [i if kept else -100 for i, kept in zip(ids, is_target)]
        tags = [i % 3 if i > 0 else -100 for i in masked]
        labels = {"language model": masked, "unmasked padding": ids, "tagger": tags}
        rows.append(dict(input_ids=ids, labels=labels.get(head, ids[0] % 3)))
    if order:
        generator.manual_seed(order)
        steps = [torch.randperm(ROWS, generator=generator) + i * ROWS for i in range(STEPS)]
        rows = [rows[i] for i in torch.cat(steps)]
    return rows


def collator(head):
    fill = 0 if head == "unmasked padding" else -100

    def collate(rows):
        width = max(len(row["input_ids"]) for row in rows)

        def padded(name, value):
            return torch.tensor(
                [row[name] + [value] * (width - len(row[name])) for row in rows])

        ids = padded("input_ids", 0)
        is_of_rows = head in ("classifier", "contrastive")
        labels = torch.tensor([row["labels"] for row in rows]) if is_of_rows else (
            padded("labels", fill))
        return dict(input_ids=ids, attention_mask=(ids > 0).long(), labels=labels)
    return collate


def contrastive_loss(outputs, labels, num_items_in_batch=None):
    "Rows of one label attract each other: every row is compared with all others."
    texts = torch.nn.functional.normalize(outputs.logits, dim=-1)
    scores = (texts @ texts.T / 0.5).fill_diagonal_(-1e4)
    same = (labels[:, None] == labels).float().fill_diagonal_(0)
    return -(scores.log_softmax(1) * same).sum() / same.sum().clamp(min=1)


def make_model(head, variant="plain"):
    "The model, and the class of its layers."
    model, layer = bare_model(head)
    for weight in model.parameters():  # so that each precision begins with the same ones
        weight.data = weight.data.bfloat16().float()
    if variant == "bf16 model":
        model = model.to(torch.bfloat16)
    elif variant == "frozen":
        layers = model.model.layers if hasattr(model, "model") else model.bert.encoder.layer
        for module in (model.get_input_embeddings(), layers[0]):
            module.requires_grad_(False)
    elif variant == "LoRA":
        from peft import LoraConfig, get_peft_model
        is_lm = layer == "LlamaDecoderLayer"
        model = get_peft_model(model, LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"] if is_lm else ["query", "value"],
            modules_to_save=None if is_lm else ["classifier"]))
    return model, layer


def bare_model(head):
    size = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=48, max_position_embeddings=64, pad_token_id=0)
    transformers.set_seed(7)
    if head in ("language model", "unmasked padding"):
        config = transformers.LlamaConfig(**size, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config), "LlamaDecoderLayer"
    kind = transformers.BertForTokenClassification if head == "tagger" else (
        transformers.BertForSequenceClassification)
    config = transformers.BertConfig(
        **size, num_labels=8 if head == "contrastive" else 3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)
    return kind(config), "BertLayer"


def engine_options(engine, layer, variant="plain"):
    if engine == "fsdp2":
        return dict(fsdp=True, fsdp_config=dict(
            fsdp_version=2, transformer_layer_cls_to_wrap=[layer],
            activation_checkpointing=variant == "FSDP checkpointing"))
    if engine.startswith("zero"):
        stage = int(engine[-1])
        zero = dict(stage=stage)
        if stage == 3:  # else DeepSpeed keeps weights as small as these on every process
            zero |= dict(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0)
        return dict(deepspeed=dict(
            zero_optimization=zero, bf16=dict(enabled="auto"), train_micro_batch_size_per_gpu="auto",
            train_batch_size="auto", gradient_accumulation_steps="auto",
            gradient_clipping="auto", zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False))
    return {}


def shard_on_cpus():
    "accelerate offers FSDP2 on accelerators only; torch runs it over gloo, too."
    import accelerate.state as state
    real = state.DistributedType

    class OnCPUs:
        def __getattr__(self, name):
            return real.MULTI_CPU if name == "MULTI_NEURON" else getattr(real, name)

        def __call__(self, value):
            return real(value)
    state.DistributedType = OnCPUs()
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")


def scale_on_cpus(accelerator, engine):
    "accelerate scales losses on accelerators only; torch's scaler runs on CPUs, too."
    from accelerate.utils import get_fsdp2_grad_scaler
    make = get_fsdp2_grad_scaler if engine == "fsdp2" else torch.amp.GradScaler
    accelerator.native_amp = True
    accelerator.scaler = make(device="cpu", init_scale=2.0 ** 48, backoff_factor=2.0 ** -38)


class SkipsFirst(transformers.TrainerCallback):
    "A step without gradients changes nothing under SGD."
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            model.zero_grad()


class Batches(torch.utils.data.IterableDataset):
    "Batches that processes take in turns; the last step may have none for some."
    def __init__(self, rows, size, args, collate):
        batches = [rows[i:i + size] for i in range(0, len(rows), size)]
        self.own = batches[args.process_index::args.world_size]
        self.collate = collate

    def __iter__(self):
        return map(self.collate, self.own)


def weights_of(model):
    "The whole weights, wherever their shards are."
    parameters = dict(model.named_parameters())
    if any(hasattr(weight, "_hp_mapping") for weight in parameters.values()):
        from deepspeed.utils import safe_get_full_fp32_param
        return {name: safe_get_full_fp32_param(weight).clone()
                for name, weight in parameters.items()}
    if any(hasattr(weight, "ds_id") for weight in parameters.values()):
        import deepspeed
        if next(iter(parameters.values())).dtype != torch.float32:  # of the optimizer
            return {name: deepspeed.utils.safe_get_full_fp32_param(weight).clone()
                    for name, weight in parameters.items()}
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: weight.detach().clone() for name, weight in parameters.items()}
    return {name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight)
            .detach().clone() for name, weight in parameters.items()}


def train(library, engine, head, variant="plain", accumulate=1, order=0, **options):
    "The trainer afterwards, and the exactness of every message."
    model, layer = make_model(head, variant)
    world = int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            folder, per_device_train_batch_size=ROWS // world // accumulate,
            gradient_accumulation_steps=accumulate, max_steps=STEPS, optim="sgd",
            learning_rate=0.1, lr_scheduler_type="constant", report_to="none",
            disable_tqdm=True, use_cpu=True, save_strategy="no", max_grad_norm=0.0,
            logging_strategy="no", train_sampling_strategy="sequential",
            **engine_options(engine, layer, variant),
            **deepcopy(VARIANTS[variant]), **options)
        loss = dict(compute_loss_func=contrastive_loss) if head == "contrastive" else {}
        rows, collate = make_rows(head, order), collator(head)
        if variant == "rank without rows":  # of two, by half a step
            rows = rows[:ROWS // 2 - ROWS]
        trainer = library.Trainer(model, args, train_dataset=rows, data_collator=collate,
                                  **loss)
        if variant == "rank without rows" and library is not transformers:
            batches = Batches(rows, args.per_device_train_batch_size, args, collate)
            trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(
                batches, batch_size=None)
        if variant == "fp16":
            scale_on_cpus(trainer.accelerator, engine)
        elif variant == "first step skipped":
            trainer.add_callback(SkipsFirst())
        trainer.train()
    if variant == "fp16":  # a step that overflowed was skipped: the scale fell once
        assert trainer.accelerator.scaler.get_scale() == 2.0 ** 10
    facts = getattr(trainer, "loss_facts", None)
    kinds = [str(message.kind) for message in facts.messages] if facts else []
    return trainer, kinds


def end():
    """End this process, without the interpreter's finalization.

    A thread of gloo frees its tensors after the last collective; where the interpreter has
    ended by then, the process aborts (pytorch/pytorch#190489). `destroy_process_group`
    leaves such threads alive.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("out")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--heads", nargs="+", default=HEADS)
    parser.add_argument("--with", nargs="+", default=["plain"], dest="variants")
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS])
    given = parser.parse_args()
    if given.engine == "fsdp2":
        shard_on_cpus()
    import prompt_packing
    torch.set_num_threads(1)
    if given.stock:
        orders = range(1 if given.variants == ["plain"] else 4)
        cases = [(f"order{i}" if i else "stock", "", dict(order=i)) for i in orders]
    else:
        cases = [("ours", name, SETTINGS[name]) for name in given.settings]
    library = transformers if given.stock else prompt_packing
    for variant in given.variants:
        for head in given.heads:
            for who, setting, options in cases:
                trainer, kinds = train(library, given.engine, head, variant, **options)
                weights = weights_of(trainer.model)
                if int(os.environ.get("RANK", 0)) == 0:
                    weights = {name.replace("module.", ""): w for name, w in weights.items()}
                    name = f"{who}-{given.engine}-{variant}-{head}-{setting}"
                    torch.save((weights, kinds), f"{given.out}/{name}.pt")
    end()


if __name__ == "__main__":
    main()
