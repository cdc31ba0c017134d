"""The law of the library: text, ids, placeholder ranges and pixels equal the reference's, to the last bit.

`make parity` runs the same comparison with hundreds of conversations and both image back ends.
"""

import json
import random
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from adapter_models import ADAPTER_FAMILIES, HALF, TEMPLATE, _write, square
from bridge_cases import REAL
from kit import conversations
from mmrender.media.processors.adapter import TransformersProcessor
from mmrender.media.processors.registry import load_processor
from mmrender.testing import reference
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.testing.difference import first_difference, parts_of_batch
from mmrender.testing.parity import RULES, ParityPair, check_parity
from mmrender.testing.reference import has_reference_backend
from mmrender.testing.reports import ParityReport
from mmrender.testing.shrinking import shrink
from small_models import build_engine

ALIKE = ("qwen2_5_vl", "qwen3_vl")
"""Left to `make parity`: the naive renderer is compared with the first, and a model here has all parts of the second."""
CASES = 4
"""Conversations of each model."""
BACKENDS = [
    "pil",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(
            not has_reference_backend("torch"),
            reason="the reference's torch back end needs torchvision; `make parity` installs it",
        ),
    ),
]
IMAGES = sample_images(random.Random(1), 4, largest=160)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in REAL if name not in ALIKE])
def test_generated_conversations_equal_the_reference(with_small_tiles, name, backend):
    report = check_parity(with_small_tiles(name), image_backend=backend, cases=CASES, seed=7)
    assert (report.mismatch, report.not_compared) == (None, None)
    assert report.outcome == "equal"
    assert report.cases == CASES
    assert report.images > 0
    assert report.pixel_values > 0
    assert report.refused < report.cases


@pytest.fixture(scope="module")
def pair(tiny_model):
    """The tiny model, which needs no folder beside the checkout."""
    return ParityPair(tiny_model, "pil")


@settings(max_examples=20)
@given(data=st.data(), rules=st.sampled_from(RULES))
def test_any_conversation_of_the_tiny_model_equals_the_reference(pair, data, rules):
    made = conversations(pair.profile, images=IMAGES, literals=pair.literals, odd=True)
    messages, options = data.draw(made)
    assert pair.difference(rules, messages, options) is None


@settings(max_examples=15)
@given(text=st.text(max_size=60), role=st.sampled_from(["system", "user", "assistant", "tool"]))
def test_any_text_in_any_role_equals_the_reference(pair, text, role):
    before = [{"role": "user", "content": "a"}] if role in ("assistant", "tool") else []
    after = [] if role == "user" else [{"role": "user", "content": "b"}]
    assert pair.difference("parse", [*before, {"role": role, "content": text}, *after], {}) is None


LISTS_ONLY = """{{ bos_token }}{% for m in messages %}{{ m.role }}: {% for p in m.content %}
{%- if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}</s>{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
IMAGE_TOKENS = {"gemma3": "<start_of_image>", "pixtral": "[IMG]", "mllama": "<|image|>"}


@pytest.mark.parametrize("name", ADAPTER_FAMILIES)
def test_batches_padded_or_not_of_a_template_that_takes_lists_only(name, tmp_path):
    """The template is in a file that only processors read."""
    directory = written_by(name, tmp_path / name)
    report = check_parity(directory, image_backend="pil", cases=5, seed=1)
    assert (report.mismatch, report.not_compared) == (None, None)
    assert report.images > 0


def written_by(name, directory):
    """A model directory of an adapted family, with a vocabulary of its kind and a template."""
    ADAPTER_FAMILIES[name](directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    build_engine(tokens).save(str(directory / "tokenizer.json"))
    template = LISTS_ONLY.replace("IMAGE", IMAGE_TOKENS.get(name, "<image>"))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return directory


def test_a_tensor_that_only_the_second_picture_of_a_size_lacks_is_found(tmp_path, monkeypatch):
    honest = TransformersProcessor._tensors

    def lossy(self, image, copies):
        return {name: value for name, value in honest(self, image, copies).items() if "local" not in name}

    directory = written_by("deepseek_ocr2", tmp_path / "model")
    load_processor(directory, image_backend="pil")  # its own proofs find no fault
    monkeypatch.setattr(TransformersProcessor, "_prove", lambda *_: None)
    monkeypatch.setattr(TransformersProcessor, "_tensors", lossy)
    report = check_parity(directory, image_backend="pil", cases=16)
    assert report.outcome == "differs"
    assert "local" in report.mismatch.difference.what


def test_a_model_whose_images_cannot_be_compared_is_not_equal(tiny_model, monkeypatch):
    def refuse(*_, **__):
        raise ImportError("needs a package")

    monkeypatch.setattr(reference, "build_reference_processor", refuse)
    report = check_parity(tiny_model, image_backend="pil", cases=2)
    assert (report.outcome, report.not_compared, report.mismatch) == ("not compared", "needs a package", None)
    assert (report.cases, report.images) == (2, 0)


def test_a_model_that_cannot_be_opened_is_not_equal(tmp_path):
    report = check_parity(tmp_path, image_backend="pil", cases=2)
    assert report.outcome == "not compared"
    assert report.not_compared.startswith("TokenizerError: ")


@given(text=st.text("ab<|", max_size=40), at=st.integers(0, 40))
def test_a_shrunken_value_holds_nothing_but_the_fault(text, at):
    faulty = [{"role": "user", "content": text[:at] + "!" + text[at:]}, {"role": "assistant", "more": [text]}]
    shrunken = shrink(faulty, lambda value: "!" in json.dumps(value))
    assert shrunken == [{"role": "user", "content": "!"}]


def test_special_tokens_that_slip_through_are_found_and_shown_in_little(pair, monkeypatch):
    monkeypatch.setitem(pair.renderers, "default", pair.renderers["parse"])
    said = [{"type": "text", "text": "Look <|im_end|> there."}, {"type": "text", "text": "And here."}]
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "Fine <|im_end|>."}]
    found = pair.difference("default", messages, {"add_generation_prompt": False})
    assert found.what == "special tokens"
    assert "<|im_end|><|im_end|>" in found.ours
    mismatch = pair.smallest(3, "default", found, messages, {"add_generation_prompt": False})
    assert mismatch.messages == [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
    assert mismatch.options == {}


def _example(pair):
    maker = ConversationMaker(pair.profile, IMAGES, (), max_turns=2, tools=False)
    source = random.Random(0)
    while True:
        messages, options = maker.make(source)
        rendered = pair.renderers["parse"].render(messages, **options)
        if rendered.multi_modal_data:
            return rendered, pair.reference.render(messages, **options)


def test_a_difference_is_found_wherever_it_is(pair):
    rendered, expected = _example(pair)
    pixels = expected.tensors["pixel_values"].copy()
    pixels[0, 0] = np.nextafter(pixels[0, 0], np.float32(9))
    without_grid = {key: value for key, value in expected.tensors.items() if key != "image_grid_thw"}

    def ours(**changes):
        return replace(rendered, **changes), expected

    def theirs(**tensors):
        return rendered, replace(expected, tensors={**expected.tensors, **tensors})

    assert first_difference(pair.renderers["parse"], rendered, expected) is None
    for what, sides in {
        "text": ours(text=rendered.text.replace("user", "usex", 1)),
        "token ids": ours(token_ids=[*rendered.token_ids[:-1], 0]),
        "placeholder ranges": ours(multi_modal_data=rendered.multi_modal_data.shifted(1)),
        "pixel_values": theirs(pixel_values=pixels),
        "tensor image_grid_thw": (rendered, replace(expected, tensors=without_grid)),
        "tensor image_masks": theirs(image_masks=np.zeros((3, 4))),
    }.items():
        assert first_difference(pair.renderers["parse"], *sides)[0] == what


LOOKS = "{% for m in messages %}{{ m.content }}{% if '<|im_end|>' in m.content %}<|im_start|>{% endif %}{% endfor %}"


def test_what_a_template_makes_of_a_token_is_not_judged(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model, tmp_path / "looking")
    (directory / "chat_template.jinja").write_text(LOOKS)
    looking = ParityPair(directory, "pil")
    report = ParityReport("looking", "pil")
    messages = [{"role": "user", "content": "x<|im_end|>"}]
    assert looking.difference("default", messages, {}, report) is None
    assert looking.difference("default", [{"role": "user", "content": "x<|im_start|>"}], {}, report) is None
    assert (report.replaced, report.unjudged) == (2, 1)


BACKWARDS = """{% for m in messages | reverse %}{% for p in m.content %}
{%- if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"""


def test_images_are_those_of_the_parts_that_the_template_writes(tiny_model, tmp_path, monkeypatch):
    """The reference pairs placeholders and images by number alone."""
    directory = shutil.copytree(tiny_model, tmp_path / "backwards")
    (directory / "chat_template.jinja").write_text(BACKWARDS)
    backwards, report = ParityPair(directory, "pil"), ParityReport("backwards", "pil")
    asked = [[{"type": "image", "image": image}, {"type": "text", "text": "x"}] for image in IMAGES[:3]]
    messages = [{"role": "user", "content": content} for content in asked]
    assert backwards.difference("parse", messages, {}, report) is None
    assert report.reordered == 1
    wrong = [*messages[1:], messages[0]]
    honest = backwards.renderers["parse"].render
    monkeypatch.setattr(backwards.renderers["parse"], "render", lambda _, **options: honest(wrong, **options))
    assert backwards.difference("parse", messages, {}) is not None


def test_a_token_that_only_the_reference_has_is_named_and_not_written(tiny_model, tmp_path):
    """Transformers' class for a tokenizer may add one, with an id that the model lacks."""
    directory = shutil.copytree(tiny_model, tmp_path / "invented")
    engine = build_engine(
        ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    engine.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    report = check_parity(directory, image_backend="pil", cases=12)
    assert (report.mismatch, list(report.invented)) == (None, ["<|endoftext|>"])
    assert "the reference adds <|endoftext|>, in no file of the model and no text" in report.notes()


REFUSED = {
    "Idefics2Processor": ("writes an image differently beside other text", "Idefics2ImageProcessor"),
    "Blip2Processor": ("moves or drops the text around an image", "SiglipImageProcessor"),
    "NoSuchProcessor": ("has no tokenizer|does not join|cannot be built", "SiglipImageProcessor"),
}


def without_images(directory, image, processor):
    """A model whose processor of images is refused, with a template and the token of an image."""
    image = {
        **HALF,
        "image_processor_type": "SiglipImageProcessor",
        "size": square(32),
        "resample": 3,
        **image,
    }
    _write(directory, image, processor, ["<image>"])
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", "<image>"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"image_token_id": tokenizer.token_to_id("<image>")}))
    return check_parity(directory, image_backend="pil", cases=8)


@pytest.mark.parametrize("name", REFUSED)
def test_text_of_a_model_whose_images_are_refused_is_compared(name, tmp_path):
    """With its processor, or with its tokenizer if there is no processor."""
    why, kind = REFUSED[name]
    sizes = {"size": {"shortest_edge": 56, "longest_edge": 112}} if "Idefics" in kind else {}
    processor = {"processor_class": name} | ({"num_query_tokens": 4} if "Blip" in name else {})
    report = without_images(tmp_path / "model", {"image_processor_type": kind, **sizes}, processor)
    assert report.mismatch is None
    assert re.search(why, report.not_compared)
    assert report.tokens > 0


def test_a_model_whose_text_is_refused_too_is_not_compared(tmp_path):
    """ColPali's processor takes each letter of a prompt for a prompt."""
    processor = {"processor_class": "ColPaliProcessor"}
    report = without_images(tmp_path / "model", {"image_seq_length": 4}, processor)
    assert (report.mismatch, report.cases) == (None, 0)
    assert "Only one of text or images" in report.not_compared
    assert "refuses a prompt without images" in report.not_compared


@pytest.mark.parametrize(("padding", "fits"), [(0, True), (1, True), ([0, 1], False)])
def test_items_are_parts_of_a_batch_that_is_padded_with_one_value(padding, fits):
    items = [np.array([[3, 0, 5]]), np.array([[7]])]
    batch = np.array([[3, 0, 5], [7, 9, 9]])
    batch[1, 1:] = padding
    parts = parts_of_batch(items, batch)
    assert (parts is not None) is fits
    if parts is not None:
        assert all(np.array_equal(part, item) for part, item in zip(parts, items, strict=True))


def test_videos_that_only_the_reference_refuses_are_left_out(pair, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("one frame")

    video = {"type": "video", "video": np.zeros((1, 8, 8, 3), np.uint8), "fps": 1.0}
    monkeypatch.setattr(pair.reference, "render", refuse)
    monkeypatch.setattr(pair, "renderers", {"default": SimpleNamespace(render=len)})
    assert pair.reference_refusal(video) == "RuntimeError: one frame"
    monkeypatch.setattr(pair, "renderers", {"default": SimpleNamespace(render=refuse)})
    assert pair.reference_refusal(video) is None
