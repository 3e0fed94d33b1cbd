"""A model of any class of transformers with some ten thousand weights, and rows that its head can learn from"""

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice, product
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel, ResNetConfig

def modeling_modules(
    family: str = "*", # a folder of transformers.models, such as "bert"
) -> Iterator: # modules
    "Every modeling file of the installed transformers, or those of one family."
    folder = Path(transformers.__file__).parent / "models"
    for file in sorted(folder.glob(f"{family}/modeling_*.py")):
        try:
            yield import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except ImportError: # needs a package that is not installed
            continue

def takes_targets(model_class: type) -> bool: # any model class
    "Whether `forward` has an argument that makes it compute a loss."
    names = inspect.signature(model_class.forward).parameters
    return any(
        "label" in name or name in ("start_positions", "return_loss") for name in names
    )

def head_classes(
    family: str | None = None, # a folder of transformers.models; None: all
) -> dict[str, type]: # by name
    "The classes of transformers that compute a loss. `ValueError`: no such family."
    classes = {}
    for module in modeling_modules(family or "*"):
        for name, value in vars(module).items():
            if not inspect.isclass(value) or value.__module__ != module.__name__:
                continue
            if issubclass(value, PreTrainedModel) and takes_targets(value):
                classes[name] = value
    if not classes:
        raise ValueError(
            f"family={family!r}: transformers {transformers.__version__} has no folder "
            "of this name with a head in transformers/models; take one such as 'bert'"
        )
    return classes

VOCABULARY = 64 # tokens
SPECIAL_TOKENS = dict(
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1
)

def small_sizes(
    width: int, # of hidden states
    heads: int, # of attention
) -> dict: # attribute of a configuration -> its value
    "Small values for everything that configurations call a size."
    sizes = [ # several families call the same thing differently
        (VOCABULARY, "vocab_size"),
        (width, """
            hidden_size d_model n_embd dim embed_dim emb_dim embedding_size model_dim
            word_embed_proj_dim encoder_hidden_size decoder_hidden_size projection_dim
            encoder_embed_dim decoder_embed_dim pooler_hidden_size text_embed_dim
            d_latents"""),
        # four of one and two of the other are a width
        (width // 8, "coordinate_size"),
        (width // 4, "shape_size"),
        (2 * width, """
            intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff
            dim_feedforward n_inner mlp_dim hidden_dim moe_intermediate_size
            ffn_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size
            mamba_d_ssm"""),
        (heads, """
            num_attention_heads n_head n_heads num_heads num_key_value_heads
            encoder_attention_heads decoder_attention_heads num_encoder_attention_heads
            num_decoder_attention_heads attention_heads num_self_attention_heads
            num_cross_attention_heads"""),
        (width // heads, """
            head_dim d_kv d_head dim_head qk_nope_head_dim qk_rope_head_dim v_head_dim
            kv_lora_rank q_lora_rank hidden_size_per_layer_input attention_head_size
            mamba_d_head"""),
        (2 * (width // heads), "qk_head_dim"),
        # a state-space layer is twice as wide, and a head of it as wide as elsewhere
        (2 * heads, "mamba_n_heads"),
        (2, """
            num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
            num_decoder_layers num_encoder_layers depth num_block
            num_self_attends_per_block"""),
        (64, """
            max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
            max_target_positions"""),
        (4, "num_experts num_local_experts n_routed_experts"),
        (2, "num_experts_per_tok moe_topk zero_expert_num"),
        (1, "n_group topk_group first_k_dense_replace mamba_n_groups n_groups expand"),
        (16, "mamba_d_state mamba_chunk_size chunk_size classifier_proj_size"),
        (32, "image_size"),
        (8, "patch_size rotary_dim num_latents attention_window"),
        (4, "window_size block_size"),
        (6, "num_queries num_detection_tokens"),
        (8, "num_conv_pos_embeddings"),
        (2, "num_conv_pos_embedding_groups num_feat_extract_layers"),
        ((16, 16), "conv_dim"),
        ((5, 4), "conv_stride"),
        ((10, 8), "conv_kernel"),
        (0.0, "mask_time_prob mask_feature_prob"),
        (False, "apply_spec_augment output_router_logits use_cache axial_pos_embds"),
    ]
    named = {name: value for value, names in sizes for name in names.split()}
    return named | SPECIAL_TOKENS

# needed where the default is None and the real value is computed from other sizes
EVEN_IF_NONE = ("head_dim", "num_key_value_heads", "num_experts_per_tok",
                "n_routed_experts", "vocab_size", *SPECIAL_TOKENS)

def small_value(name: str, old, sizes: dict):
    "The small value of an attribute, or the old one."
    if isinstance(old, float) and "drop" in name:
        return 0.0
    key = "vocab_size" if name.endswith("vocab_size") else name
    if key not in sizes or old is None and name not in EVEN_IF_NONE:
        return old
    new = sizes[key]
    if isinstance(new, tuple) and not isinstance(old, (list, tuple)):
        return old # a size for each layer in one family is a single size in another
    if isinstance(old, (list, tuple)) and isinstance(new, int):
        return type(old)([new] * min(len(old), 4))
    return new

def shrink_config(
    config: PretrainedConfig, # changed in place, nested ones too
    sizes: dict, # attribute -> value, as `small_sizes` gives them
) -> PretrainedConfig: # the same; a ResNet for a backbone of the package timm
    "Make a configuration small by the names of its attributes."
    if config.model_type == "timm_backbone":
        return ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
            layer_type="basic", out_indices=config.out_indices)
    for name, old in list(vars(config).items()):
        if isinstance(old, PretrainedConfig):
            setattr(config, name, shrink_config(old, sizes))
        else:
            setattr(config, name, small_value(name, old, sizes))
    shrink_lists(config, sizes)
    return config

def shrink_lists(config: PretrainedConfig, sizes: dict):
    "Lists for each layer, or for each half of a head, are shortened to its size."
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) > 2:
            different = list(dict.fromkeys(kinds))[:2] # one layer of each kind
            setattr(config, name, (different + kinds)[:2])
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope:
        turned = sizes["head_dim"] * rope.get("partial_rotary_factor", 1)
        half = int(turned) // 2
        third = half // 3 # of time, height and width; most families have a default of
        rope["mrope_section"] = [half - 2 * third, third, third] # their own in code

MOST_WEIGHTS = 30_000_000 # a larger one would take minutes for a step

class CannotBuild(ValueError):
    "Why there is no tiny model of a class, or no row that it can learn from."

def reason(error: Exception) -> str:
    "An error in one line: its kind, its text, and where in transformers it arose."
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    file = os.path.basename(place.filename)
    return f"{type(error).__name__}: {text} ({file}:{place.lineno})"

def tiny_config(model_class: type, sizes: dict) -> PretrainedConfig:
    "A small configuration of this class."
    config = shrink_config(model_class.config_class(), sizes)
    for name, value in SPECIAL_TOKENS.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    two = ("QuestionAnswering", "PreTraining", "NextSentence")
    config.num_labels = 2 if any(word in model_class.__name__ for word in two) else 5
    return config

def sized_model(model_class: type, sizes: dict) -> PreTrainedModel:
    "A model of these sizes. Whatever the code of a class raises is raised."
    with torch.device("meta"):
        empty = model_class(tiny_config(model_class, sizes))
    weights = sum(p.numel() for p in empty.parameters())
    if weights > MOST_WEIGHTS:
        raise CannotBuild(f"still has {weights:,} weights")
    torch.manual_seed(0)
    model = model_class(tiny_config(model_class, sizes))
    for module in model.modules():
        if isinstance(module, nn.Dropout): # some classes have a rate in code
            module.p = 0.0
    return model.train()

WIDTH = 12 # of a padded text, in tokens

def tokens(length: int) -> torch.Tensor:
    "Token ids that are no special ones, and at the end that of the end."
    ids = torch.randint(3, VOCABULARY, (length,))
    ids[-1] = SPECIAL_TOKENS["eos_token_id"] # some heads look for it
    return ids

def some_masked(length: int) -> torch.Tensor:
    "Targets of a masked language model: two of three."
    labels = torch.randint(3, VOCABULARY, (length,))
    labels[::3] = -100
    return labels

# what a name of a class contains -> the kind of its head; the first that fits
KINDS = {
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
    "TokenClassification": "token classification",
    "NextSentence": "next sentence prediction",
    "SequenceClassification": "sequence classification",
    "MaskedLM": "masked language model",
    "PreTraining": "pre-training",
    "Pretraining": "pre-training",
    "CTC": "speech recognition",
    "RNNT": "speech recognition",
    "TDT": "speech recognition",
    "ImageClassification": "image classification",
    "VideoClassification": "image classification",
    "XVector": "audio classification",
    "AudioClassification": "audio classification",
    "AudioFrame": "audio frame classification",
    "KeypointDetection": "other",
    "Detection": "object detection",
    "Detr": "object detection",
    "Segmentation": "dense prediction",
    "Matting": "dense prediction",
    "Depth": "dense prediction",
    "Estimation": "dense prediction",
    "CausalLM": "causal language model",
    "LMHead": "causal language model",
    "ConditionalGeneration": "conditional generation",
}

def head_kind(model_class: type) -> str: # any model class
    "What kind of head a class has, by its name and by what its `forward` takes."
    names = inspect.signature(model_class.forward).parameters
    if "return_loss" in names and "labels" not in names:
        return "contrastive"
    for part, kind in KINDS.items():
        if part in model_class.__name__:
            return kind
    return "other"

def drawn(
    classes: int, # numbers below it are drawn
    *shape: int | None, # None: the length of the row
    first: int = 0, # number that is drawn
) -> Callable[[int], torch.Tensor]: # from the length of a row
    "Classes or tokens at random."
    def draw(length: int) -> torch.Tensor:
        return torch.randint(
            first, classes, [length if size is None else size for size in shape])
    return draw

def noise(*shape: int) -> Callable[[int], torch.Tensor]:
    "Numbers at random, whatever the length of the row."
    return lambda length: torch.randn(*shape)

def some_of(*shape: int) -> Callable[[int], torch.Tensor]:
    "Classes of which several may be right."
    return lambda length: torch.randint(2, shape).float()

def target_choices(kind: str, config: PretrainedConfig) -> list[dict[str, Callable]]:
    "Columns of targets, the likeliest first: name -> function of the length of a row."
    classes, sizes = config.num_labels, image_sizes(config)
    one_class = dict(labels=drawn(classes))
    one_of_two = dict(labels=drawn(2))
    several_classes = dict(labels=some_of(classes))
    class_of_tokens = dict(labels=drawn(classes, None))
    next_tokens = dict(labels=drawn(VOCABULARY, None, first=3))
    masked_tokens = dict(labels=some_masked)
    transcript = dict(labels=drawn(20, 3, first=3))
    # of each frame of a sound, of which there are some number
    frames = [dict(labels=some_of(n, classes)) for n in (18, 19, 9, 20, 49, 99)]
    pixels = [dict(labels=drawn(classes, size, size)) for size in sizes]
    depths = [dict(labels=lambda length, size=size: torch.rand(size, size))
              for size in sizes]
    pairs = dict(return_loss=lambda length: True)
    return {
        "question answering": [dict(
            start_positions=lambda length: torch.randint(length, ()),
            end_positions=lambda length: torch.randint(length, ()))],
        "multiple choice": [one_of_two],
        "token classification": [class_of_tokens],
        "next sentence prediction": [one_of_two],
        "sequence classification": [one_class],
        "masked language model": [masked_tokens],
        "pre-training": [
            masked_tokens | dict(next_sentence_label=drawn(2),
                                 sentence_order_label=drawn(2)), next_tokens],
        "speech recognition": [transcript],
        "image classification": [one_class, several_classes],
        "audio classification": [one_class],
        "audio frame classification": frames,
        "object detection": [dict(labels=lambda length: dict(
            class_labels=torch.randint(classes, (2,)),
            boxes=torch.rand(2, 4) * 0.4 + 0.3))],
        "dense prediction": pixels + depths,
        "causal language model": [next_tokens],
        "conditional generation": [next_tokens, transcript],
        "contrastive": [pairs],
        "other": [next_tokens, one_class, class_of_tokens, transcript, several_classes,
                  pairs],
    }[kind]

def image_sizes(config: PretrainedConfig) -> list[int]:
    "Sizes of pictures to try: that of the configuration first."
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", getattr(vision, "image_size", None))
    if isinstance(size, (list, tuple)):
        size = size[0]
    first = [size] if isinstance(size, int) else []
    return list(dict.fromkeys(first + [32, 64, 224]))

def pictures(config: PretrainedConfig) -> list[dict[str, Callable]]:
    "Pictures, then films."
    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    frames = getattr(vision, "num_frames", getattr(config, "frames_per_clip", 2))
    sizes = image_sizes(config)
    return [dict(pixel_values=noise(channels, size, size)) for size in sizes] + [
        {key: noise(frames, 3, size, size)}
        for key in ("pixel_values", "pixel_values_videos") for size in sizes]

def sounds(config: PretrainedConfig) -> list[dict[str, Callable]]:
    "Waves, then spectrograms in the layouts that are in use."
    def size_called(*names: str, default: int) -> int:
        values = [getattr(config, name, None) for name in names]
        return next((value for value in values if isinstance(value, int)), default)

    bands = size_called(
        "num_mel_bins", "feature_size", "input_feat_per_channel",
        "feature_projection_input_dim", "input_dim", default=80)
    frames = 2 * size_called("max_source_positions", default=64)
    longest = size_called("max_length", default=100)
    waves = (400,), (3_200,), (16_000,), (longest, bands)
    spectrograms = (bands, frames), (frames, bands), (100, bands), (bands, 3_000)
    return [dict(input_values=noise(*shape)) for shape in waves] + [
        dict(input_features=noise(*shape)) for shape in spectrograms]

SOUND_KEYS = {"input_values", "input_features"}

def input_choices(model_class: type, config: PretrainedConfig) -> list[dict[str, Callable]]:
    "Columns of inputs, the likeliest first: name -> function of the length of a row."
    if "MultipleChoice" in model_class.__name__:
        return [dict(
            input_ids=lambda length: torch.stack([tokens(length), tokens(length)]),
            attention_mask=lambda length: torch.ones(2, length, dtype=torch.long))]
    names = inspect.signature(model_class.forward).parameters.keys()
    text = dict(
        input_ids=tokens, attention_mask=lambda length: torch.ones(length, dtype=torch.long),
        bbox=lambda length: torch.zeros(length, 4, dtype=torch.long))
    texts = [text] if "input_ids" in names else []
    media = [columns for columns in pictures(config) + sounds(config)
             if columns.keys() <= names]
    both = [text | medium for text, medium in product(texts, media)]
    # two towers need both; a model that can look at pictures can do without them
    choices = both + texts if "return_loss" in names else texts + both
    choices += media + ([dict(inputs=tokens)] if "inputs" in names else [])
    if any(key in model_class.main_input_name for key in SOUND_KEYS):
        choices.sort(key=lambda columns: not columns.keys() <= SOUND_KEYS)
    return choices

PADDING = dict(input_ids=0, inputs=0, attention_mask=0, labels=-100, bbox=0)

def padded(key: str, value: torch.Tensor, width: int) -> torch.Tensor:
    "A text, its mask, its boxes or its labels at full width; the rest as it is."
    if key not in PADDING or not value.dim() or value.is_floating_point():
        return value
    dimension = 0 if key == "bbox" else value.dim() - 1
    missing = width - value.shape[dimension]
    if missing <= 0: # or labels of pixels
        return value
    after = (0, 0, 0, missing) if key == "bbox" else (0, missing)
    return pad(value, after, value=PADDING[key])

def collate_rows(
    rows: list[dict], # as `learnable_rows` makes them
    width: int = WIDTH, # of every text, in tokens
) -> dict: # a batch
    "Rows as one batch, texts padded to one width on the right."
    batch = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if torch.is_tensor(first):
            batch[key] = torch.stack([padded(key, value, width) for value in values])
        else:
            batch[key] = values if isinstance(first, dict) else first
    return batch

def check_loss(model: PreTrainedModel, batch: dict):
    "`ValueError` where the model gives no finite loss with a gradient."
    output = model(**batch)
    loss = output["loss"] if "loss" in output else None
    if loss is None:
        raise ValueError("no loss is returned")
    if loss.numel() != 1 or not loss.isfinite():
        raise ValueError(f"a loss of shape {tuple(loss.shape)}, or not finite")
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss.sum(), weights, allow_unused=True)
    length = sum(float(g.abs().sum()) for g in gradients if g is not None)
    if not 0 < length < float("inf"):
        raise ValueError("the loss has no gradient, or none that is finite")

MOST_TRIES = 40 # of inputs and targets

def drawn_row(columns: dict[str, Callable], length: int) -> dict:
    "A row of these columns, of so many tokens."
    return {name: draw(length) for name, draw in columns.items()}

@lru_cache(maxsize=8) # `tiny_model` has tried them already
def row_maker(
    model: PreTrainedModel, # as `tiny_model` makes it
) -> Callable[[int], dict]: # from the length of a row to a row
    """The first of the likely inputs and targets that give a loss with a gradient.

    `CannotBuild` says why there are none."""
    model_class, failure = type(model), None
    names = inspect.signature(model_class.forward).parameters
    choices = product(input_choices(model_class, model.config),
                      target_choices(head_kind(model_class), model.config))
    for inputs, targets in islice(choices, MOST_TRIES):
        columns = {name: draw for name, draw in (inputs | targets).items()
                   if name in names}
        make_row = partial(drawn_row, columns)
        try:
            check_loss(model, collate_rows([make_row(6), make_row(WIDTH)]))
            # the last micro-batch of a step may have one row, which batch
            # normalization refuses where a picture shrinks to one pixel
            with torch.no_grad():
                model(**collate_rows([make_row(WIDTH)]))
            return make_row
        # as in `tiny_model`: whatever it raises is the reason that is listed
        except Exception as error:
            failure = failure or error
    if failure is None:
        raise CannotBuild("forward takes no input that is known here")
    raise CannotBuild(reason(failure)) from failure

def learnable_rows(
    model: PreTrainedModel, # as `tiny_model` makes it
    lengths: list[int], # of the rows, in tokens; only texts have them
) -> list[dict]: # rows of tensors
    "Rows with random inputs and targets for this model. `CannotBuild` says why not."
    torch.manual_seed(1)
    make_row = row_maker(model)
    torch.manual_seed(1)
    return [make_row(length) for length in lengths]

def tiny_model(
    model_class: type, # of transformers
) -> PreTrainedModel: # in training mode, without dropout
    """A small model of this class with random weights. `CannotBuild` says why not.

    Of three sets of sizes it has the first with which it can learn from a row: some
    divide a width by six, or add the heads to it."""
    failures = []
    for width, heads in ((32, 2), (64, 4), (96, 8)):
        try:
            model = sized_model(model_class, small_sizes(width, heads))
            with torch.random.fork_rng(devices=[]):
                row_maker(model)
            return model
        # code of hundreds of authors, with sizes that it has never seen: whatever it
        # raises is the reason that is listed
        except Exception as error:
            failures.append(error)
    for failure in failures:
        if isinstance(failure, CannotBuild): # it was built, and has no row
            raise failure
    raise CannotBuild(reason(failures[0])) from failures[0]
