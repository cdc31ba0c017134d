"""The tiny model directory: complete, reproducible, and what Transformers takes."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer

from kit import assistant, error_of, shown, user
from mmrender import Renderer
from mmrender.errors import MissingDependencyError, ModelError
from mmrender.testing.tiny_model import (
    ADDED_TOKENS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tiny_model,
    train_tokenizer,
)

TRAINED = train_tokenizer()
CONFIGS = ("config", "generation_config", "preprocessor_config", "video_preprocessor_config")
WITHOUT_WEIGHTS = {
    "chat_template.jinja",
    *[f"{name}.json" for name in (*CONFIGS, "tokenizer", "tokenizer_config")],
}
TOOL = {"type": "function", "function": {"name": "crop", "parameters": {"type": "object"}}}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def apply(directory: Path, messages: list[dict[str, object]], **options: object) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_files_and_size_with_weights_and_without(tiny_model: Path, tmp_path: Path) -> None:
    built = contents(tiny_model)
    assert set(built) == WITHOUT_WEIGHTS | {"model.safetensors"}
    assert sum(map(len, built.values())) < 5_000_000
    built.pop("model.safetensors")
    assert contents(build_tiny_model(tmp_path / "new" / "model", weights=False)) == built


def test_vocabulary() -> None:
    vocabulary = TRAINED.get_vocab()
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))
    for token in (*SPECIAL_TOKENS, *ADDED_TOKENS):
        assert TRAINED.encode(f"a{token}b").ids[1] == vocabulary[token]
    decoded = TRAINED.decode([vocabulary["<|im_end|>"], vocabulary["<think>"]])
    assert decoded == "<think>"  # special tokens are skipped, the merely added ones are kept


@settings(max_examples=100)
@given(st.text(max_size=80))
def test_any_text_round_trips(text: str) -> None:
    normal = TRAINED.normalizer.normalize_str(text)
    assert TRAINED.decode(TRAINED.encode(text).ids, skip_special_tokens=False) == normal


@settings(max_examples=60)
@given(st.lists(st.text(max_size=12) | st.sampled_from((*SPECIAL_TOKENS, *ADDED_TOKENS)), max_size=6))
def test_transformers_encodes_as_the_file_does(tiny_model: Path, pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    text = "".join(pieces)
    expected = AutoTokenizer.from_pretrained(tiny_model)(text)["input_ids"]
    assert Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(text).ids == expected


def test_transformers_loads_every_weight_and_sees_the_picture(tiny_model: Path) -> None:
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model, loading = AutoModelForImageTextToText.from_pretrained(tiny_model, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    processor = AutoImageProcessor.from_pretrained(tiny_model, backend="pil")

    def logits(colour: str) -> torch.Tensor:
        features = processor(images=[Image.new("RGB", (256, 128), colour)], return_tensors="pt")
        count = int(features["image_grid_thw"].prod()) // processor.merge_size**2
        assert count == 8 * 4
        ids = tokenizer("<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>What?")["input_ids"]
        tokens = torch.tensor([ids])
        types = (tokens == model.config.image_token_id).int()
        with torch.no_grad():
            return model(input_ids=tokens, mm_token_type_ids=types, **features).logits[0, -1]

    assert (logits("red") - logits("blue")).abs().max() > 1e-3


def test_seed_decides_the_weights_and_spares_the_callers_randomness(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    same, again, other = (
        build_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert contents(same) == contents(again)
    assert contents(same)["model.safetensors"] != contents(other)["model.safetensors"]


def test_sizes_are_what_was_asked_for(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    small = build_tiny_model(tmp_path / "small", hidden_size=96, layers=1, patch_size=8)
    model = AutoModelForImageTextToText.from_pretrained(small)
    assert (model.lm_head.in_features, len(model.model.language_model.layers)) == (96, 1)
    rendered = Renderer.from_pretrained(small).render(
        [{"role": "user", "content": [shown(Image.new("RGB", (64, 64)))]}]
    )
    (place,) = rendered.multi_modal_data.mm_placeholders["image"]
    assert place.length == 16
    with pytest.raises(
        ModelError, match=r"^hidden_size: a size is not possible - expected a multiple of 32, got 40$"
    ):
        build_tiny_model(tmp_path / "odd", hidden_size=40)


def test_template_writes_a_whole_conversation(tiny_model: Path) -> None:
    crop = [
        {"type": "function", "function": {"name": "crop", "arguments": {"left": left}}} for left in (0.5, 0)
    ]
    said = {"content": "Closer.", "reasoning_content": "Too small.", "tool_calls": crop}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Look closely."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", **said},
        {"role": "tool", "content": [{"type": "image"}]},
        {"role": "tool", "content": "nothing there"},
        assistant("A cow."),
        user("Sure?"),
    ]
    assert apply(tiny_model, messages, tools=[TOOL], add_generation_prompt=True) == (
        "<|im_start|>system\nLook closely.\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "crop", "parameters": {"type": "object"}}}\n</tools>\n'
        "To call one, write its name and arguments as JSON:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nToo small.\n</think>\n\nCloser.\n"
        '<tool_call>\n{"name": "crop", "arguments": {"left": 0.5}}\n</tool_call>\n'
        '<tool_call>\n{"name": "crop", "arguments": {"left": 0}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>\n</tool_response>\n"
        "<tool_response>\nnothing there\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nA cow.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("role", "content", "refusal"),
    [
        ("critic", "Bad.", "knows no role critic"),
        ("system", "Late.", "takes a system message only at the start"),
        ("user", [{"type": "audio"}], "knows no content part of type audio"),
    ],
)
def test_template_refuses(tiny_model: Path, role: str, content: object, refusal: str) -> None:
    from jinja2 import TemplateError

    with pytest.raises(TemplateError, match=f"^This template {refusal}$"):
        apply(tiny_model, [user("Hi"), {"role": role, "content": content}])


def test_a_directory_that_holds_files_is_refused(tmp_path: Path, sentence: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    refused = error_of(ModelError, build_tiny_model, tmp_path, weights=False)
    assert refused.replace(str(tmp_path), "FOLDER") == sentence
    assert contents(tmp_path) == {"model.safetensors": b"precious"}


def test_weights_need_the_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert error_of(MissingDependencyError, build_tiny_model, tmp_path / "model") == sentence
    assert not (tmp_path / "model").exists()
