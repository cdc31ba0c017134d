"""Directories of Mistral's own format render as mistral-common encodes requests."""

import json
import random
import shutil
from pathlib import Path

import pytest
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from adapter_models import CLIP
from kit import data_url, error_of, noise
from mmrender.errors import TemplateMissingError, TemplateRefusedError
from mmrender.model.convert import open_model
from mmrender.renderer import Renderer
from mmrender.testing.parity import check_parity
from other_formats import NOUNS, sample_texts, write_tekken

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {"é": {"type": "string"}}, "required": ["é"]},
        },
    }
    for name, text in (("look_up", "Looks é up."), ("add", ""))
]


def conversation(source):
    """Messages and tools as agents send them; texts hold everything but special tokens."""
    words = iter(sample_texts(40, seed=source.randrange(1 << 30)))

    def text():
        return next(word for word in words if word.strip())

    messages = [{"role": "system", "content": text()}] if source.random() < 0.5 else []
    tools = TOOLS if source.random() < 0.5 else None
    for turn in range(source.randrange(1, 4)):
        content = text()
        if source.random() < 0.3:
            content = [{"type": "text", "text": content}, {"type": "text", "text": text()}]
        messages.append({"role": "user", "content": content})
        for _ in range(source.randrange(3) if tools else 0):
            names = [f"call{turn}{source.randrange(1000, 9999)}" for _ in range(source.randrange(1, 3))]
            calls = [
                {"id": name, "type": "function", "function": {"name": "look_up", "arguments": f'{{"é": "{source.choice(NOUNS)}"}}'}}
                for name in names
            ]  # fmt: skip
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": name, "name": "look_up", "content": text()} for name in names
            ]
        messages.append({"role": "assistant", "content": text()})
    return messages[: len(messages) - (source.random() < 0.5)], tools


def compare(folder, count, *, refuses_json):
    """Number of conversations with the tokens of mistral-common; old tokenizers print JSON results parsed."""
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    reference = MistralTokenizer.from_file(folder / "tekken.json", mode=ValidationMode.agnostic)
    source, compared = random.Random(0), 0
    for _ in range(count):
        messages, tools = conversation(source)
        try:
            request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
            expected = reference.encode_chat_completion(request).tokens
        except MistralCommonException:  # an order of roles that it does not take
            continue
        if refuses_json and any(
            message["role"] == "tool" and is_json(message["content"]) for message in messages
        ):
            with pytest.raises(TemplateRefusedError, match="mistral-common parses the JSON"):
                renderer.render(messages, tools=tools)
            continue
        assert renderer.render_ids(messages, tools=tools) == expected, messages
        compared += 1
    return compared


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return text.strip()[:1] in ("{", "[", '"') or not text.strip().strip("0123456789.eE+-")
    return True


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_requests_have_the_tokens_of_mistral_common(tmp_path, version):
    assert compare(write_tekken(tmp_path, version=version), 200, refuses_json=version == "v3") > 100


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_published_vocabularies_have_the_tokens_of_mistral_common(tmp_path, name):
    import mistral_common

    published = Path(mistral_common.__file__).parent / "data" / name
    if not published.is_file():
        pytest.skip(f"this release of mistral-common has no {name}")
    shutil.copy(published, tmp_path / "tekken.json")
    assert compare(tmp_path, 60, refuses_json=True) > 30


def test_the_directorys_own_template_counts_first(tmp_path):
    folder = write_tekken(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert Renderer.from_pretrained(folder).render_text([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_a_template_that_is_not_equal_to_requests_is_refused_by_name(tmp_path, monkeypatch):
    from mmrender.model import mistral

    folder = write_tekken(tmp_path)
    monkeypatch.setenv("MMRENDER_CACHE", "off")
    generate = mistral.convert_tokenizer_to_chat_template
    monkeypatch.setattr(mistral, "convert_tokenizer_to_chat_template", lambda file: generate(file) + "\n.")
    error = error_of(TemplateMissingError, Renderer.from_pretrained, folder)
    assert error.startswith(
        f"{folder}: the model lacks a chat template, and none equals the requests of mistral-common - got its "
        "template differs from its encoding of [{'role': 'user', 'content': "
    )
    assert error.endswith(". Pass chat_template=<Jinja text>")
    given = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert (
        Renderer.from_pretrained(folder, chat_template=given).render_text([{"role": "user", "content": "hi"}])
        == "hi"
    )


def test_stop_tokens_and_names_are_those_of_mistral_common(tmp_path):
    folder = write_tekken(tmp_path)
    renderer = Renderer.from_pretrained(folder)
    assert renderer.get_stop_token_ids() == [2]
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert open_model(folder).special_tokens == names
    bridged = renderer.bridge_to_next_turn(
        renderer.render_ids([{"role": "user", "content": "hi"}]),
        [*renderer.tokenizer.encode(" Hello."), 2],
        [{"role": "user", "content": "and?"}],
    )
    assert bridged is not None, renderer.why_not_bridged
    whole = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": " Hello."},
        {"role": "user", "content": "and?"},
    ]
    assert bridged.token_ids == renderer.render_ids(whole)


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_generated_conversations_equal_those_of_transformers(tmp_path, version):
    report = check_parity(write_tekken(tmp_path, version=version), image_backend="pil", cases=40)
    assert (report.mismatch, report.not_compared, report.cases) == (None, None, 40)


def test_images_have_the_tokens_of_mistral_common(tmp_path):
    pytest.importorskip("cv2", reason="mistral-common counts the tokens of images by opencv")
    folder = write_tekken(tmp_path, version="v3", multimodal={"image_patch_size": 16, "max_image_size": 128})
    image = {**CLIP, "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 128}}
    image |= {"patch_size": {"height": 16, "width": 16}, "resample": 3}
    settings = {"processor_class": "PixtralProcessor", "patch_size": 16, "spatial_merge_size": 1}
    (folder / "processor_config.json").write_text(json.dumps({**settings, "image_processor": image}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": 10}))
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    reference = MistralTokenizer.from_file(folder / "tekken.json", mode=ValidationMode.agnostic)
    for seed, size in enumerate([(64, 64), (30, 300), (300, 30), (200, 100), (17, 19)]):
        shown = [
            {"type": "image_url", "image_url": {"url": data_url(noise(seed, *size))}}
            for _ in range(1 + seed % 2)
        ]
        messages = [{"role": "user", "content": [*shown, {"type": "text", "text": "What is it? [IMG]"}]}]
        request = ChatCompletionRequest.from_openai(messages=messages)
        assert renderer.render_ids(messages) == reference.encode_chat_completion(request).tokens, size
