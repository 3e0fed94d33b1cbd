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
for (const [query, pages] of Object.entries(PAGES)) {
  const found = search.search(query, {limit: 20}).map(({item}) => item);
  const hits = found.map((item) => item.href.replace(".html", ""));
  const isUse = found.length && !found[0].title.startsWith("Source: ");
  const isThere = isUse && hits.slice(0, 3).some(
    (hit) => pages.split(" ").includes(hit.split("#")[0]));
  right += isThere;
  console.log(isThere ? "ok  " : "MISS", query.padEnd(22), hits.slice(0, 3).join("  "));
}
console.log(`${right} of ${Object.keys(PAGES).length}`);
process.exit(right < 40 ? 1 : 0);
