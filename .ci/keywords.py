"""Words that readers type in a search, by page: synonyms and errors that the page itself says otherwise."""

KEYWORDS = {
    "index": "install, requirements, github, what is it",
    "guides/quickstart": "getting started, example, first steps, tutorial, fine-tune a language model",
    "bucketing/index": (
        "speed up training, faster, slow training, GPU utilization, throughput, dynamic batching, "
        "max tokens, sequence packing, sample packing, padding free, document masking, bucketing, "
        "batch size, mixed precision, bf16, fp16, flash attention, out of memory, OOM"),
    "accumulation_loss/index": (
        "num_items_in_batch, wrong loss, loss too large, loss scales, grad norm, mixed precision, "
        "DDP averaging, global batch size, class weights, GradCache, in-batch negatives"),
    "guides/multi_gpu": (
        "multi gpu, multiple GPUs, multi-node, several GPUs, distributed, torchrun, DDP, FSDP, "
        "DeepSpeed, ZeRO, accelerate launch"),
    "guides/checkpoints": (
        "resume, restart, preemption, crash, spot instance, early stopping, wandb, "
        "save_total_limit, determinism, reproducible, seed, load a checkpoint"),
    "guides/large_corpora": "streaming, IterableDataset, pretraining, large corpus, infinite data",
    "bucketing/corpus": "pretokenize, tokenize once, memory map, large corpus",
    "recurrent/index": "RNN, GRU, LSTM, pack_padded_sequence, variable length",
    "packed_sequence/index": "pack_padded_sequence, pack_sequence, RNN batches",
    "prompt_tuning/index": (
        "soft prompt, virtual tokens, prefix tuning, p-tuning, PEFT prompt, few-shot, gpt2 prompt, "
        "how many prompt tokens, frozen language model"),
    "prompt_tuning/text_cache": "KV cache, cached activations, feature extraction",
    "compare/index": (
        "text classification, sentiment, classifier, linear probe, fine-tuning or head, "
        "predict, pipeline, confidence interval"),
    "tutorials/csv_to_predictions": "text classification, excel, spreadsheet",
    "frozen_weights/index": "freeze layers, requires_grad, LoRA base model unchanged, checksum",
    "guides/trl": "SFT, DPO, reward model, RLHF, instruction tuning, chat template, completion only",
    "guides/peft": "LoRA, QLoRA, adapters",
    "guides/sentence_transformers": "embeddings, MultipleNegativesRankingLoss, bi-encoder, CachedGISTEmbedLoss",
    "guides/lightning_accelerate": "pytorch lightning, own training loop, accelerator",
    "guides/coming_from": "packing=True, padding_free, bfd, flash attention, migrate",
    "trainer/index": (
        "TrainingArguments, options, custom collator, data_collator, MLM, masked language model, "
        "Seq2Seq, T5, summarization, translation, predict, torch.compile, "
        "mixed precision, wandb, early stopping"),
    "cli/index": "command line, shell, terminal",
    "troubleshooting": (
        "NaN loss, CUDA out of memory, OOM, error, warning, hang, Windows, macOS, install fails"),
    "benchmarks/steps": "speed, throughput, seconds, tokens per second",
    "benchmarks/measure": "speed up, how much faster, my GPU, benchmark my model",
    "changelog": "renamed, breaking changes, versions",
}
