"""A tiny vision-language model, built offline in seconds: everything that a real model directory holds.

The directory has the Hub's layout and loads with `AutoTokenizer`, `AutoImageProcessor` and
`AutoModelForImageTextToText`; its architecture is Qwen3-VL with 64 hidden units. The weights are random, so
what it says is noise. What it accepts and refuses is real, and that is what a demonstration or a test needs.

Given one release of `tokenizers` and `torch`, equal seeds give equal files.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mmrender.errors import MissingDependencyError, ModelError

VOCAB_SIZE: Final = 1024
CONTEXT_LENGTH: Final = 8192

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Matched whole, yet not special: decoding with `skip_special_tokens` keeps them, as in Qwen's tokenizers.
ADDED_TOKENS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# How Qwen2's tokenizer cuts text before byte-pair merges; `Qwen2Tokenizer` sets the same when it loads.
PRE_TOKENIZER: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PATCH_SIZE: Final = 16
MERGE_SIZE: Final = 2
MIN_PIXELS: Final = 16 * (PATCH_SIZE * MERGE_SIZE) ** 2
"""An image takes at least 16 tokens,"""
MAX_PIXELS: Final = 256 * (PATCH_SIZE * MERGE_SIZE) ** 2
"""and at most 256."""


def build_tiny_model(directory: Path, *, seed: int = 0, weights: bool = True) -> Path:
    """Build the model directory and return its path.

    Args:
        directory: Where to write; created with its parents. It must be missing or empty.
        seed: Seeds the weights; nothing else is random.
        weights: Also write `model.safetensors` (2 MB, float32). Needs the `hf` and `torch` extras; everything
            else is built with the core dependencies.

    Raises:
        ModelError: `directory` is a file, or holds something already.
        MissingDependencyError: `weights` is true and an extra is missing. Nothing is written.
    """
    if weights:
        for package, extra in (("torch", "torch"), ("transformers", "hf")):
            try:
                __import__(package)
            except ImportError as error:
                raise MissingDependencyError.of_extra(
                    package, extra, "building the tiny model's weights", otherwise="pass weights=False"
                ) from error
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        # It may be somebody's model.
        raise ModelError(
            "cannot build a model here",
            where=str(directory),
            expected="a missing or empty directory",
            got="one that holds files" if directory.is_dir() else "a file",
            remedy="Name another directory, or remove it first",
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    for name, content in _settings(tokenizer).items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_data("chat_template.jinja"), encoding="utf-8")
    if weights:
        _write_weights(directory, seed)
    return directory


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens, special and added ones included, on the shipped text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_data("corpus.txt").splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED_TOKENS])
    return tokenizer


def _data(name: str) -> str:
    return files("mmrender.testing").joinpath("data", name).read_text(encoding="utf-8")


def _settings(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Every JSON file of the directory but the tokenizer itself, by name."""
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
    return {
        "config.json": _model_config(ids),
        "generation_config.json": {
            "bos_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
        "preprocessor_config.json": {**_pixels(), "image_processor_type": "Qwen2VLImageProcessor"},
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "extra_special_tokens": list(SPECIAL_TOKENS[1:]),
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": "<|endoftext|>",
            "processor_class": "Qwen3VLProcessor",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
        "video_preprocessor_config.json": {**_pixels(), "video_processor_type": "Qwen3VLVideoProcessor"},
    }


def _pixels() -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE_SIZE,
        "patch_size": PATCH_SIZE,
        "processor_class": "Qwen3VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS},
        "temporal_patch_size": 2,
    }


def _model_config(ids: dict[str, int]) -> dict[str, Any]:
    """Settings of the smallest Qwen3-VL whose head sizes (32) inference servers also take."""
    text = {
        "attention_bias": False,
        "bos_token_id": ids["<|endoftext|>"],
        "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": CONTEXT_LENGTH,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-6,
        # Half a head in rotary frequencies, shared among time, height and width: 6 + 5 + 5 = 16.
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "rope_theta": 5_000_000,
        "vocab_size": VOCAB_SIZE,
    }
    vision = {
        "deepstack_visual_indexes": [0],
        "depth": 2,
        "dtype": "float32",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "intermediate_size": 128,
        "model_type": "qwen3_vl",
        "num_heads": 2,
        "num_position_embeddings": 256,
        "out_hidden_size": 64,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "float32",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision,
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def _write_weights(directory: Path, seed: int) -> None:
    """Write `model.safetensors` for the `config.json` that stands in the directory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                # Unit variance in, unit variance out: with the usual 0.02 every logit would be almost equal.
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    # Not `save_pretrained`, which rewrites the configuration files beside the weights.
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
