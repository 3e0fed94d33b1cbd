// The words that readers type find their page among the first three, a page of use before any
// source: `node .ci/tests/search.js`, on the site that .ci/docs.py has built, with its own index
// and the code of its own search.
const fs = require("fs"), path = require("path");
const docs = path.join(__dirname, "../../_docs");
const read = (...place) => fs.readFileSync(path.join(docs, ...place), "utf8");

const PAGES = { // what is typed: pages that answer it
  "padding": "bucketing/index", "LSTM": "recurrent/index tutorials/recurrent_models",
  "gradient accumulation": "accumulation_loss/index", "prompt tuning": "prompt_tuning/index",
  "LoRA": "guides/peft", "SFTTrainer": "guides/trl",
  "multiple GPUs": "guides/multi_gpu", "multi gpu": "guides/multi_gpu",
  "resume": "guides/checkpoints", "out of memory": "bucketing/index trainer/index troubleshooting",
  "OOM": "bucketing/index troubleshooting", "speed up": "bucketing/index",
  "packing": "bucketing/index bucketing/packing",
  "csv": "compare/index tutorials/csv_to_predictions",
  "contrastive": "accumulation_loss/index guides/sentence_transformers",
  "eval loss": "accumulation_loss/index", "streaming": "guides/large_corpora",
  "checkpoint": "guides/checkpoints", "frozen": "frozen_weights/index",
  "PackedSequence": "packed_sequence/index", "token budget": "trainer/index bucketing/index",
  "group_by_length": "guides/coming_from bucketing/index",
  "predict": "compare/index trainer/index tutorials/csv_to_predictions",
  "class weights": "accumulation_loss/index", "DPO": "guides/trl", "MLM": "trainer/index",
  "CTC": "reliability/gradients reliability/side_by_side",
  "gpt2 prompt": "prompt_tuning/index", "SFTTrainer padding_free": "guides/trl",
  "eval loss batch size": "accumulation_loss/index", "custom collator": "trainer/index",
  "contrastive gradient accumulation": "accumulation_loss/index",
  "large corpus": "guides/large_corpora bucketing/corpus", "soft prompt": "prompt_tuning/index",
  "mixed precision": "bucketing/index trainer/index", "NaN loss": "troubleshooting bucketing/index",
  "early stopping": "guides/checkpoints", "wandb": "guides/checkpoints",
  "Windows": "index troubleshooting", "install": "index guides/quickstart",
  "learning rate": "accumulation_loss/index bucketing/index prompt_tuning/index",
  "torch.compile": "trainer/index bucketing/index index", "bf16": "bucketing/index trainer/index",
  "how many prompt tokens should I use": "prompt_tuning/index",
  "does it work with LoRA": "guides/peft", "resume training on another number of gpus":
  "guides/multi_gpu guides/checkpoints", "how to stop and resume a stream": "guides/large_corpora"};

const QUESTIONS = { // whole questions, written by somebody who had not read the pages
  "transformers trainer gpu mostly padding wasted compute variable length":
    "guides/quickstart index bucketing/index benchmarks/measure",
  "fine-tuning slow because of padding tokens how to batch by length": "bucketing/index",
  "pack multiple sequences into one row without cross contamination attention":
    "bucketing/index bucketing/packing packed_sequence/index",
  "flash attention varlen cu_seqlens position_ids packing huggingface":
    "bucketing/index bucketing/packing packed_sequence/index",
  "group_by_length alternative max tokens per batch": "bucketing/index",
  "dynamic batch size by number of tokens dataloader pytorch": "bucketing/index",
  "eval loss changes when I change per_device_eval_batch_size": "accumulation_loss/index",
  "gradient accumulation loss wrong average of averages": "accumulation_loss/index",
  "train loss different when gradient_accumulation_steps changed": "accumulation_loss/index",
  "how many times faster is packing than padding":
    "bucketing/index benchmarks/steps trainer/index benchmarks/measure",
  "does packing change the training loss / accuracy":
    "bucketing/index benchmarks/steps trainer/index benchmarks/measure",
  "LoRA only save adapter resume training packed": "guides/peft",
  "train only embeddings freeze the rest transformer gradients":
    "frozen_weights/index prompt_tuning/index",
  "frozen model activation memory not reduced why": "frozen_weights/index prompt_tuning/index",
  "soft prompt tuning own number of virtual tokens": "prompt_tuning/index",
  "prompt tuning packed sequences virtual tokens per example": "prompt_tuning/index",
  "train on 200GB jsonl that does not fit in RAM": "guides/large_corpora",
  "streaming iterable dataset length bucketing": "guides/large_corpora",
  "memory map tokenized dataset lengths index": "guides/large_corpora",
  "resume training with different number of gpus checkpoint":
    "guides/checkpoints guides/multi_gpu guides/large_corpora",
  "resume mid epoch dataloader state sampler position":
    "guides/checkpoints guides/multi_gpu guides/large_corpora",
  "torchrun ranks get different number of batches hang": "guides/multi_gpu",
  "deepspeed zero3 fsdp dynamic batch sizes tokens": "guides/multi_gpu",
  "CUDA out of memory at random step longest batch": "troubleshooting bucketing/index",
  "packed LSTM tagger without pad_packed_sequence": "recurrent/index packed_sequence/index",
  "pack_padded_sequence slow bidirectional lstm alternative":
    "recurrent/index packed_sequence/index",
  "multi label classification csv fine tune bert predictions file":
    "tutorials/csv_to_predictions compare/index",
  "use with TRL SFTTrainer packing DPO preference pairs": "guides/trl",
  "bf16 fp16 mixed precision packed attention nan": "trainer/index bucketing/index",
  "estimate gpu hours / cost before training":
    "guides/quickstart index bucketing/index benchmarks/measure"};

const theme = {exports: {}}, waiting = [];
new Function("module", "exports", read("site_libs/fuse/fuse.min.js"))(theme, theme.exports);
global.window = {Fuse: theme.exports};
global.document = {addEventListener: (_, function_) => waiting.push(function_)};
const source = fs.readFileSync(path.join(__dirname, "../../nbs/search.html"), "utf8");
new Function(source.match(/<script>([^]*?)<\/script>/)[1])();
waiting.forEach((function_) => function_());
const keys = [["title", 2], ["section", 2], ["text", 1]].map(([name, weight]) => ({name, weight}));
const search = new window.Fuse(JSON.parse(read("search.json")), {
  keys, ignoreLocation: true, threshold: 0.3, minMatchCharLength: 2}); // as smalldocs has it

let right = 0;
for (const [query, pages] of [...Object.entries(PAGES), ...Object.entries(QUESTIONS)]) {
  const found = search.search(query, {limit: 20}).map(({item}) => item);
  const hits = found.map((item) => item.href.replace(".html", ""));
  const isUse = found.length && !found[0].title.startsWith("Source: ");
  const isThere = isUse && hits.slice(0, 3).some(
    (hit) => pages.split(" ").includes(hit.split("#")[0]));
  right += isThere;
  console.log(isThere ? "ok  " : "MISS", query.padEnd(22), hits.slice(0, 3).join("  "));
}
const all = Object.keys(PAGES).length + Object.keys(QUESTIONS).length;
console.log(`${right} of ${all}`);
process.exit(right < all - 7 ? 1 : 0);
