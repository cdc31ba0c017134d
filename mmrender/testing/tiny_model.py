"""A tiny vision-language model, built offline in seconds: everything that a real model directory holds.

The directory has the Hub's layout and loads with `AutoTokenizer`, `AutoImageProcessor` and
`AutoModelForImageTextToText`; its architecture is Qwen3-VL with 64 hidden units and heads of 32, the smallest
that inference servers take. An image takes 16 to 256 tokens. The weights are random, so its answers are
noise. Its formats and limits are real.

Its settings and chat template are files in `data/tiny_model`; the tokenizer is trained on `data/corpus.txt`.
With one release of `tokenizers` and `torch`, equal seeds make equal files.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mmrender.errors import ModelError, importing

VOCAB_SIZE: Final = 1024

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

_DATA = files("mmrender.testing").joinpath("data")


def build_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    weights: bool = True,
    hidden_size: int = 64,
    layers: int = 2,
    patch_size: int = 16,
) -> Path:
    """Build the model directory and return its path.

    Args:
        directory: Where to write; created with its parents. It must be missing or empty.
        seed: Seeds the weights; nothing else is random.
        weights: Also write `model.safetensors` (2 MB, float32). Needs the `hf` and `torch` extras; everything
            else is built with the core dependencies.
        hidden_size: Width of the language model and of the vision tower, a multiple of 32.
        layers: Layers of each.
        patch_size: Side of a patch in pixels, even. An image takes 16 to 256 tokens of 2 by 2 patches, so a
            smaller patch makes them of smaller images.

    Raises:
        ModelError: A size is not possible; `directory` is a file, or holds something already.
        MissingDependencyError: `weights` is true and an extra is missing. Nothing is written.
    """
    if weights:
        purpose, otherwise = "building the tiny model's weights", "pass weights=False"
        for package, extra in (("torch", "torch"), ("transformers", "hf")):
            with importing(package, extra, purpose, otherwise=otherwise):
                __import__(package)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        # It may be somebody's model.
        raise ModelError(
            "cannot build a model here",
            where=str(directory),
            expected="a missing or empty directory",
            got="one that holds files" if directory.is_dir() else "a file",
            remedy="Name another directory, or remove it first",
        )
    for name, value, unit in (
        ("hidden_size", hidden_size, 32),
        ("layers", layers, 1),
        ("patch_size", patch_size, 2),
    ):
        if value < 1 or value % unit:
            raise ModelError(
                "a size is not possible", where=name, expected=f"a multiple of {unit}", got=str(value)
            )
    directory.mkdir(parents=True, exist_ok=True)
    for file in _DATA.joinpath("tiny_model").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    _set_sizes(directory, hidden_size, layers, patch_size)
    train_tokenizer().save(str(directory / "tokenizer.json"))
    if weights:
        _write_weights(directory, seed)
    return directory


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens, special and added ones included, on the shipped text."""
    tokenizer = train_byte_pairs(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(ADDED_TOKENS))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED_TOKENS])
    return tokenizer


def train_byte_pairs(vocab_size: int, *more: str) -> Tokenizer:
    """Train a byte-level BPE without added tokens on the lines of the shipped text, and on `more`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    corpus = _DATA.joinpath("corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([*corpus.splitlines(keepends=True), *more], trainer)
    return tokenizer


def _set_sizes(directory: Path, hidden_size: int, layers: int, patch_size: int) -> None:
    """Write sizes into the settings. Files whose sizes do not change stay as they are."""
    heads, inner = hidden_size // 32, 2 * hidden_size
    text = {"hidden_size": hidden_size, "intermediate_size": inner, "num_hidden_layers": layers}
    vision = {"hidden_size": hidden_size, "out_hidden_size": hidden_size, "intermediate_size": inner}
    pixels = {"shortest_edge": 64 * patch_size**2, "longest_edge": 1024 * patch_size**2}
    sizes: dict[str, dict[str, Any]] = {
        "config.json": {
            "text_config": {**text, "num_attention_heads": heads},
            "vision_config": {**vision, "depth": layers, "num_heads": heads, "patch_size": patch_size},
        },
        "preprocessor_config.json": {"patch_size": patch_size, "size": pixels},
        "video_preprocessor_config.json": {"patch_size": patch_size, "size": pixels},
    }
    for name, changes in sizes.items():
        settings = json.loads((directory / name).read_text())
        changed = json.loads(json.dumps(settings))
        for key, value in changes.items():
            changed[key] = {**changed[key], **value} if isinstance(value, dict) else value
        if changed != settings:
            (directory / name).write_text(json.dumps(changed, indent=2) + "\n")


def _write_weights(directory: Path, seed: int) -> None:
    """Write `model.safetensors` for the directory's `config.json`."""
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
    # Not `save_pretrained`, which rewrites the configuration files too.
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
