"""Words that readers type in a search, by page: those that the page itself does not use.

A page is ranked by the words of a query that it has, in its prose, its code or here; rare words
count most, and words that stand side by side, in the order of the query, count again. So whole
queries are listed, small words included.
"""

KEYWORDS = {
    "index": (
        "install, requirements, github, what is it, does it work on GPU, CUDA, "
        "variable length sequences, what does it cost"),
    "guides/quickstart": (
        "getting started, example, first steps, tutorial, fine-tune a language model, "
        "fine-tune llama, gpt2, qwen, mistral, minimal example, full script"),
    "bucketing/index": (
        "speed up training, faster, slow training, GPU utilization, throughput, "
        "dynamic batching, dynamic padding, too much padding, max tokens per batch, "
        "variable length sequences, sequence packing, sample packing, padding free, "
        "document masking, cross-contamination, varlen, cu_seqlens, bucketing, "
        "attention leak between documents, effective batch size, "
        "memory usage, reduce memory, wasted compute, wasted tokens, batch size, "
        "mixed precision, bf16, fp16, flash attention, out of memory, OOM"),
    "accumulation_loss/index": (
        "num_items_in_batch, wrong loss, loss too large, loss too high, loss 4x too high, "
        "loss scales, loss different, grad norm, effective batch size, mixed precision, "
        "DDP averaging, global batch size, class weights, class imbalance, imbalanced classes, "
        "custom loss function, override compute_loss, validation loss, GradCache, "
        "in-batch negatives, contrastive loss with a large batch, focal loss, "
        "my own Trainer subclass"),
    "accumulation_loss/finished_runs": (
        "effective batch size, wrong loss, was my training wrong, bug, already trained"),
    "accumulation_loss/loss_registry": "custom loss function, my own loss, focal loss",
    "guides/multi_gpu": (
        "multi gpu, multiple GPUs, multi-node, several GPUs, distributed, torchrun, DDP, FSDP, "
        "FSDP2, fully sharded data parallel, DeepSpeed, ZeRO, accelerate launch, slurm, "
        "sharded, world size change, resume on a different number of GPUs, "
        "resume with fewer GPUs, 8 GPUs"),
    "guides/checkpoints": (
        "resume, resume from checkpoint in mid epoch, resume in the middle of an epoch, "
        "restart, continue training, preemption, preempted, slurm, crash, spot instance, "
        "early stopping, wandb, save_total_limit, determinism, deterministic, reproducible, "
        "seed reproducibility, load a checkpoint, checkpoint corrupted, "
        "different number of GPUs"),
    "guides/large_corpora": (
        "streaming, streaming dataset, IterableDataset, pretraining from scratch, "
        "large corpus, large dataset, infinite data, jsonl, 200 GB, terabytes, "
        "does not fit in memory, dataset too big for RAM, custom collator"),
    "bucketing/corpus": (
        "pretokenize, pre-tokenized, tokenize once, memory map, mmap, large corpus, jsonl"),
    "recurrent/index": (
        "RNN, GRU classifier, LSTM classifier, BiLSTM, bidirectional, pack_padded_sequence, "
        "pad_packed_sequence, variable length sequences, tagger, token classification, "
        "sequence labeling, named entity recognition, NER, POS"),
    "packed_sequence/index": (
        "pack_padded_sequence, pad_packed_sequence, pack_sequence, enforce_sorted, RNN batches"),
    "prompt_tuning/index": (
        "soft prompt, soft prompt length, number of virtual tokens, prefix tuning, p-tuning, "
        "PEFT prompt, prompt tuning is slow, few-shot, few shot classification, gpt2 prompt, "
        "how many prompt tokens, frozen language model"),
    "prompt_tuning/text_cache": "KV cache, cached activations, feature extraction",
    "compare/index": (
        "text classification, csv classification, sentiment analysis, classifier, "
        "linear probe, fine-tuning or head, multi-label classification, multilabel, "
        "regression, predict, predict on new data, inference, pipeline, confidence interval"),
    "tutorials/csv_to_predictions": (
        "text classification, excel, spreadsheet, predict on new data, inference"),
    "tutorials/which_method": (
        "few shot, small dataset, how many labelled examples, data efficiency"),
    "tasks/index": (
        "multi-label, multilabel, load a dataset, offline, without internet, air-gapped, GLUE"),
    "frozen_weights/index": (
        "freeze layers, requires_grad, LoRA base model unchanged, checksum, "
        "check weights changed, weights not updating, layer does not train"),
    "guides/trl": (
        "SFT, DPO, DPOTrainer, reward model, preference, RLHF, GRPO, KTO, instruction tuning, "
        "chat template, assistant only loss, completion only, conversations"),
    "guides/peft": "LoRA, QLoRA, adapters, adapter training, merge",
    "guides/sentence_transformers": (
        "embedding model training, embeddings, MultipleNegativesRankingLoss, bi-encoder, "
        "CachedGISTEmbedLoss, retrieval, contrastive loss, in-batch negatives, large batch, "
        "SimCSE, CLIP"),
    "guides/lightning_accelerate": (
        "pytorch lightning, own training loop, custom training loop, plain pytorch, accelerator"),
    "guides/coming_from": (
        "packing=True, padding_free, bfd, flash attention, migrate, alternatives, compared with"),
    "trainer/index": (
        "TrainingArguments, options, custom collator, data_collator, MLM, "
        "masked language model, BERT pretraining, masked language model pretraining, Seq2Seq, "
        "T5, summarization, translation, predict, torch.compile, override compute_loss, "
        "custom Trainer, use with my own Trainer subclass, token classification, vision, "
        "multimodal, mixed precision, wandb, early stopping"),
    "cli/index": "command line, shell, terminal",
    "troubleshooting": (
        "NaN loss, loss is nan, loss too high, CUDA out of memory, OOM, memory usage, error, "
        "warning, hang, stuck, slow, loss not decreasing, not learning, checkpoint corrupted, "
        "tokenizer has no pad token, pad_token, Windows, macOS, install fails"),
    "evidence": "does it work on GPU, tested, A100, H100, benchmark results",
    "benchmarks/steps": (
        "speed, speedup benchmark, throughput, seconds, tokens per second, how much faster"),
    "benchmarks/measure": (
        "speed up, speedup benchmark, how much faster, my GPU, estimate GPU hours, training time, "
        "cost of a training, benchmark my model, speech, "
        "audio, wav2vec, images"),
    "benchmarks/prompt_tuning": "prompt tuning is slow, speed of prompt tuning",
    "changelog": "renamed, breaking changes, versions",
}
