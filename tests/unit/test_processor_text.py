"""The text and tokens that a processor writes beside the template's text and expansions, with images and without."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adapter_models import TEMPLATE, chameleon, hunyuan_vl, idefics2, mllama, paligemma, pixtral
from kit import error_of, shown
from mmrender import Renderer
from mmrender.errors import MediaError, MissingDependencyError, ProcessorError
from mmrender.media.processors.registry import DeferredProcessor, load_processor
from mmrender.testing.reference import ReferenceRenderer

PICTURES = [Image.new("RGB", (64, 48), color) for color in ("red", "blue")]
SAID = {"type": "text", "text": "before"}
BARE = TEMPLATE.replace("<fake_token_around_image>PLACEHOLDER", "IMAGE")
BARE += "{% if add_generation_prompt %}assistant {% endif %}"


def written(directory: Path, placeholder: str, *, text: str = "", bos: str = "") -> Path:
    """A directory with a chat template that writes a text for an image, and may write BOS first."""
    (directory / "chat_template.jinja").write_text(bos + BARE.replace("IMAGE", text or placeholder))
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    (directory / "config.json").write_text(json.dumps({"image_token_id": ids[placeholder]}))
    return directory


def message(*images: Image.Image, role: str = "user", first: bool = False) -> dict[str, Any]:
    parts = [shown(image) for image in images]
    return {"role": role, "content": [*parts, SAID] if first else [SAID, *parts]}


TEXTS = [message()]
CONVERSATIONS = [
    TEXTS,
    [message(PICTURES[0])],
    [message(*PICTURES, first=True)],
    [message(PICTURES[0]), message(role="assistant"), message(PICTURES[1])],
]


@pytest.mark.parametrize("bos", ["", "<s>"])
@pytest.mark.parametrize(
    ("build", "placeholder"), [(chameleon, "<image>"), (mllama, "<|image|>"), (paligemma, "<image>")]
)
def test_prompts_equal_those_of_a_processor_that_adds_text(tmp_path, build, placeholder, bos):
    """BOS at the start, behind leading images or behind the last; a separator or a newline at the end."""
    directory = written(build(tmp_path), placeholder, bos=bos)
    renderer, reference = (
        Renderer.from_pretrained(directory, image_backend="pil"),
        ReferenceRenderer(directory, "pil"),
    )
    compared = 0
    for messages in CONVERSATIONS:
        for opens in (False, True):
            try:
                expected = reference.render(messages, add_generation_prompt=opens)
            except ValueError:
                with pytest.raises(ProcessorError, match="prompt without images"):
                    renderer.render(messages, add_generation_prompt=opens)
                continue
            rendered = renderer.render(messages, add_generation_prompt=opens)
            assert (rendered.text, rendered.token_ids) == (expected.text, expected.ids)
            compared += 1
    assert compared >= 6


def test_what_a_processor_adds_is_of_no_message_and_never_sampled(tmp_path):
    directory = written(chameleon(tmp_path), "<image>")
    renderer = Renderer.from_pretrained(directory, image_backend="pil")
    messages = [message(PICTURES[0]), message(role="assistant")]
    rendered = renderer.render(messages)
    separator = renderer.tokenizer.token_id("<sep>")
    assert rendered.token_ids[-1] == separator
    assert (rendered.spans[-1].message, rendered.spans[-1].kind, rendered.spans[-1].sampled) == (
        -1,
        "template",
        False,
    )
    # The prompt of the answer ends with a separator that the conversation lacks, so nothing of it was sampled.
    prompt = renderer.render(messages[:1], add_generation_prompt=True)
    assert prompt.token_ids[-1] == separator
    assert list(rendered.rewritten) == [1]
    assert not rendered.sampled_mask.any()
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids, [separator], [message()], previous_multi_modal_data=prompt.multi_modal_data
    )
    assert bridged is None


def test_a_turn_after_bos_that_the_processor_writes_is_sampled_whole_and_bridged(tmp_path):
    directory = written(mllama(tmp_path), "<|image|>")
    renderer = Renderer.from_pretrained(directory, image_backend="pil")
    messages = [message(PICTURES[0]), message(role="assistant"), message()]
    rendered, prompt = renderer.render(messages), renderer.render(messages[:1], add_generation_prompt=True)
    assert renderer.tokenizer.token(prompt.token_ids[0]) == "<s>"
    sampled = np.flatnonzero(rendered.sampled_mask)
    assert rendered.token_ids[: sampled[0]] == prompt.token_ids
    completion = [rendered.token_ids[index] for index in sampled]
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids, completion, messages[2:], previous_multi_modal_data=prompt.multi_modal_data
    )
    assert bridged.token_ids[: len(prompt) + len(completion)] == [*prompt.token_ids, *completion]


def test_text_learns_once_what_the_processor_adds(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRENDER_CACHE", str(tmp_path / "cache"))
    directory = written(mllama(tmp_path / "model"), "<|image|>")
    first = Renderer.from_pretrained(directory, image_backend="pil").render(TEXTS)
    monkeypatch.setattr(
        "mmrender.media.processors.registry.build_reference_processor",
        lambda *_, **__: pytest.fail("was built"),
    )
    again = Renderer.from_pretrained(directory, image_backend="pil")
    assert again.render(TEXTS).token_ids == first.token_ids
    assert isinstance(again.media.processor, DeferredProcessor)


def test_text_of_a_processor_that_adds_text_is_refused_without_the_packages_that_say_so(
    tmp_path, monkeypatch
):
    def missing(*_: object, **__: object) -> None:
        raise MissingDependencyError("no transformers")

    monkeypatch.setattr("mmrender.media.processors.registry.build_reference_processor", missing)
    for build, placeholder, refused in ((chameleon, "<image>", True), (mllama, "<|image|>", False)):
        directory = written(build(tmp_path / build.__name__), placeholder)
        renderer = Renderer.from_pretrained(directory, image_backend="pil")
        if refused:
            with pytest.raises(MissingDependencyError):
                renderer.render(TEXTS)
        else:
            assert renderer.render(TEXTS).token_ids


def test_a_placeholder_may_need_the_tokens_that_the_template_writes_around_it(tmp_path):
    around = "<|image_start|><|image|><|image_end|>"
    directory = written(hunyuan_vl(tmp_path), "<|image|>", text=around)
    renderer = Renderer.from_pretrained(directory, image_backend="pil")
    reference = ReferenceRenderer(directory, "pil")
    for messages in CONVERSATIONS:
        rendered, expected = renderer.render(messages), reference.render(messages)
        assert (rendered.text, rendered.token_ids) == (expected.text, expected.ids)
    assert "must be formatted as" in error_of(MediaError, load_processor, directory, image_backend="pil")


def test_a_tensor_that_counts_on_from_the_images_before_is_refused(tmp_path, monkeypatch):
    from transformers import PixtralImageProcessorPil

    honest = PixtralImageProcessorPil.__call__

    def counting(self: Any, images: Any, **options: Any) -> Any:
        output = honest(self, images, **options)
        output["rows"] = np.arange(3 * len(images[0]))[:, None]
        return output

    monkeypatch.setattr(PixtralImageProcessorPil, "__call__", counting)
    with pytest.raises(ProcessorError, match="rows of an image depends on the images before it"):
        load_processor(pixtral(tmp_path), image_backend="pil")


def test_an_image_that_depends_on_the_text_beside_it_is_refused(tmp_path):
    with pytest.raises(ProcessorError, match="writes an image differently beside other text"):
        load_processor(idefics2(tmp_path), image_backend="pil")


@pytest.mark.parametrize("build", [pixtral, mllama])
def test_opening_a_processor_processes_few_images_however_many_texts_it_is_proved_over(
    tmp_path, monkeypatch, build
):
    loaded = load_processor(build(tmp_path), image_backend="pil")
    kind = type(loaded._image_processor)
    processed = []
    whole = kind.preprocess

    def counting(self, *args, **kwargs):
        processed.append(1)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(kind, "preprocess", counting)
    load_processor(build(tmp_path), image_backend="pil")
    assert 0 < len(processed) <= 24
