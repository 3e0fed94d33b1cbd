"""Made-up texts, images and sounds and tiny random models, for scripts without a network.

    python data.py FOLDER        # writes FOLDER/data, FOLDER/even and FOLDER/models, the same each time

Words are drawn from a Zipf distribution, and the lengths of texts from a log-normal one.
An image and a sound are a pattern of their class with noise.
Models have random weights, no dropout, and float64 unless their name says otherwise, so
that two runs of the same computation agree to many digits."""
import csv
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 1500
SPECIAL = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
               sep_token="[SEP]", mask_token="[MASK]")
MORE_TOKENS = ["</s>", "<s>", "<eod>", "<|im_start|>", "<|im_end|>", "<|prompter|>",
               "<|assistant|>", "[PAD2]"]
ROWS_OF_SPLIT = dict(train=92, validation=41, test=41) # no batches of 16 or 5 fill them


class Texts:
    "A seeded source of made-up words and of texts of all lengths."

    def __init__(self, seed=0):
        self.random = np.random.RandomState(seed)
        parts = [a + b for a in "b c d f g k l m n p r s t v z th st".split()
                 for b in "a e i o u ai ou an er".split()]
        words = {"".join(self.random.choice(parts, size=1 + self.random.poisson(1)))
                 for _ in range(4 * VOCABULARY)}
        self.words = ["the", "a", *sorted(words, key=lambda w: (len(w), w))][:VOCABULARY]
        share = 1 / (np.arange(len(self.words)) + 2.7)
        self.share = share / share.sum()

    def words_of(self, shortest, longest):
        "Many short texts, few long ones."
        size = int(np.clip(self.random.lognormal(2.7, 0.7), shortest, longest))
        return [str(word) for word in self.random.choice(self.words, size=size, p=self.share)]

    def text(self, shortest=3, longest=60):
        return " ".join(self.words_of(shortest, longest))

    def number(self, below):
        return int(self.random.randint(below))


def write(path, rows):
    "Rows as csv, lines of text, JSON lines, or one JSON object {data: rows}."
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".txt":
        path.write_text("\n".join(rows), "utf-8")
    elif path.parent.name == "qa":
        path.write_text(json.dumps(dict(data=rows)), "utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), "utf-8")


def question(texts, i):
    words = texts.words_of(8, 90)
    start = texts.number(len(words) - 2)
    context, answer = " ".join(words), " ".join(words[start:start + 2])
    return dict(id=str(i), title="t", context=context, question="what is " + words[start],
                answers=dict(text=[answer], answer_start=[context.index(answer)]))


def endings(texts, i):
    words = texts.words_of(6, 40)
    row = dict(sent1=" ".join(words[:4]), sent2=words[4], label=texts.number(4))
    return row | {f"ending{j}": texts.text(2, 12) for j in range(4)}


def tagged(texts, i):
    "The tag is that of the first letter."
    tags = dict(a="B-A", b="B-B", c="I-A", d="O")
    words = texts.words_of(3, 60)
    return dict(tokens=words, ner_tags=[tags.get(word[0], "O") for word in words])


def tag_numbers(texts, i):
    row = tagged(texts, i)
    return row | dict(ner_tags=["O B-A I-A B-B".split().index(tag) for tag in row["ner_tags"]])


def labelled(texts, i):
    text = texts.text()
    return dict(sentence=text, label=sorted({w[0] for w in text.split()} & set("abt")) or ["z"])


def summary(texts, i):
    words = texts.words_of(8, 80)
    return dict(text=" ".join(words), summary=" ".join(words[:2 + texts.number(10)]))


def translation(texts, i):
    row = summary(texts, i)
    return dict(translation=dict(en=row["text"], ro=row["summary"], fr=row["summary"]))


def chat(texts, i):
    turns = []
    for _ in range(1 + texts.number(2)):
        turns += [dict(role="user", content=texts.text(3, 12)),
                  dict(role="assistant", content=texts.text(3, 40))]
    return dict(messages=turns)


def steps(texts, i):
    "Steps of a solution; a right one has an even number of letters."
    completions = [texts.text(3, 12) for _ in range(1 + texts.number(4))]
    return dict(prompt=texts.text(3, 8), completions=completions,
                labels=[len(step) % 2 == 0 for step in completions])


# folder: (ending of its files, a row of it)
ROWS = {
    "sentence": ("csv", lambda t, i: dict(sentence=t.text(), label=t.number(2))),
    "pair": ("csv", lambda t, i: dict(
        sentence1=t.text(3, 40), sentence2=t.text(3, 40), label=i % 2)),
    "lines": ("txt", lambda t, i: t.text(9, 80)),
    "tagged": ("json", tagged),
    "tag_numbers": ("json", tag_numbers),
    "multilabel": ("json", labelled),
    "reviews": ("json", lambda t, i: dict(text=t.text(), label=t.number(2))),
    "posts": ("json", lambda t, i: dict(answers=dict(text=[t.text(), t.text()]))),
    "qa": ("json", question),
    "endings": ("json", endings),
    "summary": ("json", summary),
    "translation": ("json", translation),
    "chat": ("json", chat),
    "text": ("json", lambda t, i: dict(text=t.text())),
    "completion": ("json", lambda t, i: dict(prompt=t.text(3, 12), completion=t.text())),
    "preference": ("json", lambda t, i: dict(
        prompt=t.text(3, 8), chosen=t.text(), rejected=t.text())),
    "reward": ("json", lambda t, i: dict(chosen=t.text(), rejected=t.text())),
    "kto": ("json", lambda t, i: dict(
        prompt=t.text(3, 8), completion=t.text(), label=bool(t.number(2)))),
    "steps": ("json", steps),
    "triplet": ("json", lambda t, i: dict(
        anchor=t.text(), positive=t.text(), negative=t.text())),
    "questions": ("json", lambda t, i: dict(question=t.text(3, 12), answer=t.text())),
    "scored": ("json", lambda t, i: dict(
        sentence1=t.text(), sentence2=t.text(), score=float(t.random.rand()))),
    "entailment": ("json", lambda t, i: dict(
        premise=t.text(), hypothesis=t.text(), label=t.number(3))),
    "duplicates": ("json", lambda t, i: dict(
        sentence1=t.text(), sentence2=t.text(), label=t.number(2))),
    "instruction": ("json", lambda t, i: dict(
        instruction=t.text(3, 12), input=t.text(3, 8) if i % 3 == 0 else "", output=t.text())),
}


def spans(texts, i):
    "Words and (first, last, type) of entities."
    words = texts.words_of(3, 30)
    return dict(tokenized_text=words, ner=[
        (at, at, "one" if word[0] == "b" else "two")
        for at, word in enumerate(words) if word[0] in "bt"] or [(0, 0, "two")])


# of a second source, so that those above stay as they are; no tokenizer is trained on them
MORE_ROWS = {
    "speech": ("json", lambda t, i: dict(
        audio=sound(t, i % 3), text=t.text(2, 4), label=i % 3)),
    "spans": ("json", spans)}
CLASSES = ["one", "two", "three"]


def sound(texts, kind):
    "A tone of this class with noise, half a second at most."
    size = int(np.clip(texts.random.lognormal(8.2, 0.4), 2000, 8000))
    wave = np.sin(np.arange(size) * (0.02 + 0.03 * kind)) + texts.random.randn(size) * 0.5
    return dict(array=[round(float(value), 3) for value in wave], sampling_rate=16000)


def image(texts, kind):
    "32 x 32 pixels: stripes of this class with noise."
    rows = 128 + 60 * np.sin(np.arange(32) * (0.2 + 0.3 * kind))[:, None, None]
    pixels = rows + texts.random.randn(32, 32, 3) * 40
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def tokenizer_of(lines, kind):
    "A word-level tokenizer with the special tokens that models of this kind put."
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(lines, trainers.WordLevelTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL.values(), *MORE_TOKENS]))
    id_of = words.token_to_id
    settings = dict(SPECIAL)
    templates = {
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ["[CLS]", "[SEP]"]),
        "seq2seq": ("$A </s>", "$A $B </s>", ["</s>"]),
        "xlnet": ("$A [SEP] [CLS]:2", "$A [SEP] $B:1 [SEP]:1 [CLS]:2", ["[CLS]", "[SEP]"])}
    if kind in templates:
        single, pair, special = templates[kind]
        words.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(t, id_of(t)) for t in special])
    if kind in ("bert", "xlnet"):
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if kind == "xlnet":
        settings["padding_side"] = "left"
    if kind in ("seq2seq", "causal"):
        settings |= dict(eos_token="</s>", bos_token="<s>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=128, **settings)
    if kind == "causal":
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|> assistant "
            "{% generation %}{{ m['content'] }} <|im_end|>{% endgeneration %} "
            "{% else %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")
    return tokenizer


def models_of():
    "Folder: (kind of its tokenizer, a function that makes the model)."
    sizes = dict(vocab_size=VOCABULARY, pad_token_id=0)
    tokens = dict(bos_token_id=6, eos_token_id=5)
    small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                 intermediate_size=32, max_position_embeddings=160)
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def make(model, config, **settings):
        return lambda: getattr(transformers, model)(
            getattr(transformers, config)(**sizes, **settings))
    bert = make("BertForMaskedLM", "BertConfig", **small, **quiet, classifier_dropout=0.0)
    distilbert = make(
        "DistilBertForMaskedLM", "DistilBertConfig", dim=16, n_layers=2, n_heads=2,
        hidden_dim=32, max_position_embeddings=160, dropout=0.0, attention_dropout=0.0,
        seq_classif_dropout=0.0, qa_dropout=0.0)
    roberta = make("RobertaForMaskedLM", "RobertaConfig", **small, **quiet,
                   classifier_dropout=0.0, bos_token_id=2, eos_token_id=3)
    llama = make("LlamaForCausalLM", "LlamaConfig", **small, **tokens)
    gpt2 = make("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2,
                n_positions=160, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **tokens)
    bart = make(
        "BartForConditionalGeneration", "BartConfig", d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, max_position_embeddings=160,
        decoder_start_token_id=5, forced_eos_token_id=5, **tokens)
    t5 = make("T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=32,
              num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0,
              eos_token_id=5)
    xlnet = make("XLNetLMHeadModel", "XLNetConfig", d_model=16, n_layer=1, n_head=2,
                 d_inner=32, dropout=0.0, summary_last_dropout=0.0, start_n_top=2, end_n_top=2)
    reward = make("LlamaForSequenceClassification", "LlamaConfig", **small, **tokens,
                  num_labels=1)
    modernbert = make("ModernBertForMaskedLM", "ModernBertConfig", **small, cls_token_id=2,
                      sep_token_id=3, bos_token_id=2, eos_token_id=3, global_attn_every_n_layers=2,
                      local_attention=16)
    steps = make("LlamaForTokenClassification", "LlamaConfig", **small, **tokens, num_labels=2)
    return {
        "bert": ("bert", bert), "bert-float32": ("bert", bert),
        "t5-float32": ("seq2seq", t5),
        "distilbert": ("bert", distilbert), "roberta": ("bert", roberta),
        "gpt2": ("causal", gpt2), "llama": ("causal", llama), "llama-float32": ("causal", llama),
        "llama-reward": ("causal", reward), "llama-steps": ("causal", steps),
        "bart": ("seq2seq", bart), "t5": ("seq2seq", t5), "modernbert": ("bert", modernbert),
        "xlnet": ("xlnet", xlnet)}


def pattern_models():
    "Folder: a model for images or sounds and what prepares its inputs."
    small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                 intermediate_size=32, num_labels=len(CLASSES))
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    image_size = dict(height=32, width=32)
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, patch_size=8, **small, **quiet))
    wav2vec2 = dict(
        conv_dim=(16, 16, 16), conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4),
        feat_extract_norm="layer", num_feat_extract_layers=3, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, classifier_proj_size=16)
    wave = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=264, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=50, max_target_positions=80, dropout=0.0,
        pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257,
        begin_suppress_tokens=None, suppress_tokens=None))
    mels = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return {
        "vit": (vit, transformers.ViTImageProcessor(size=image_size)),
        "wav2vec2": (transformers.Wav2Vec2ForSequenceClassification(
            transformers.Wav2Vec2Config(**small, **wav2vec2)), wave),
        "whisper": (whisper, mels)}


def whisper_tokenizer():
    "One token for each byte."
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>",
               "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    return transformers.WhisperTokenizer(
        vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[],
        additional_special_tokens=special[1:], pad_token=special[0])


def letters_tokenizer(folder):
    "One token for each capital letter."
    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    path = folder / "vocab.json"
    path.write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}), "utf-8")
    return transformers.Wav2Vec2CTCTokenizer(str(path))


def write_images(folder, texts, counts):
    "Images in a folder for each class, as `imagefolder` of datasets reads them."
    for split, count in counts.items():
        for i in range(count):
            path = folder / split / CLASSES[i % 3] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image(texts, i % 3).save(path)


def main(folder):
    texts, lines = Texts(), []
    for name, (ending, row) in ROWS.items():
        for split, count in ROWS_OF_SPLIT.items():
            rows = [row(texts, i) for i in range(count)]
            lines += [word for each in rows for word in json.dumps(each).split('"')]
            even = rows[:count // 16 * 16] # as many on each of two processes
            write(folder / "data" / name / f"{split}.{ending}", rows)
            write(folder / "even" / name / f"{split}.{ending}", even)
    texts = Texts(seed=1)
    for name, (ending, row) in MORE_ROWS.items():
        for split, count in ROWS_OF_SPLIT.items():
            rows = [row(texts, i) for i in range(count)]
            write(folder / "data" / name / f"{split}.{ending}", rows)
    write_images(folder / "data" / "images", texts, ROWS_OF_SPLIT)
    for name, (kind, make) in models_of().items():
        torch.manual_seed(0)
        model = make() if kind == "xlnet" or name.endswith("32") else make().double()
        with torch.no_grad():
            for values in model.parameters():
                if values.dim() > 1:
                    values.mul_(4) # so that predictions of random weights differ
        model.save_pretrained(folder / "models" / name)
        tokenizer_of(lines, kind).save_pretrained(folder / "models" / name)
    torch.manual_seed(0)
    for name, (model, processor) in pattern_models().items():
        model.double().save_pretrained(folder / "models" / name)
        processor.save_pretrained(folder / "models" / name)
    whisper_tokenizer().save_pretrained(folder / "models" / "whisper")
    letters_tokenizer(folder / "models" / "wav2vec2").save_pretrained(
        folder / "models" / "wav2vec2")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
