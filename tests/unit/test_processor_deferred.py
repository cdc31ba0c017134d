"""A processor that is loaded with the first image: what text and errors are like before and after."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from adapter_models import HALF, TOKENS, _write, model, square
from kit import error_of, user
from mmrender.errors import MissingDependencyError, ProcessorError
from mmrender.media.processor import ProcessorFiles
from mmrender.media.processors.adapted_videos import AdaptedVideoProcessor, _video_tensors
from mmrender.media.processors.registry import DeferredProcessor, load_processor
from mmrender.media.processors.watched import WatchedProcessor, errors_named
from mmrender.media.video import Timeline
from mmrender.model.files import ModelDir
from mmrender.renderer import Renderer
from mmrender.sidecar import Repeat, Text

PICTURE = Image.new("RGB", (64, 48), "red")


def opened(directory: Path, **options: object) -> Renderer:
    return Renderer.from_pretrained(directory, image_backend="pil", **options)


def shown(*images: Image.Image) -> list[dict[str, object]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": "before"}, *parts]}]


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("rule", ["text", "parse"])
def test_media_tokens_in_content_are_text_before_the_processor_is_loaded_and_after(name, rule, tmp_path):
    renderer = opened(model(name, tmp_path / name), content_special_tokens=rule, memo_bytes=0)
    said = [{"role": role, "content": f"before {token} after"} for role in ("system", "user", "assistant")
            for token in TOKENS[name]]  # fmt: skip
    before = renderer.render(said).token_ids
    assert isinstance(renderer.media.processor, DeferredProcessor)
    assert not {renderer.tokenizer.token_id(token) for token in TOKENS[name]} & set(before)
    with_image = renderer.render(shown(PICTURE))
    assert not isinstance(renderer.media.processor, DeferredProcessor)
    assert with_image.multi_modal_data
    assert renderer.render(said).token_ids == before


def test_media_tokens_that_processor_config_names_are_text(tmp_path):
    directory = model("pixtral", tmp_path)
    settings = json.loads((directory / "processor_config.json").read_text())
    (directory / "processor_config.json").write_text(json.dumps({**settings, "video_token": "</s>"}))
    renderer = opened(directory, content_special_tokens="parse")
    assert isinstance(renderer.media.processor, DeferredProcessor)
    assert "</s>" in renderer.media.processor.placeholder_tokens


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Blip2Processor", "moves or drops the text around an image"),
        ("InstructBlipProcessor", "has parts beside an image processor and a tokenizer"),
    ],
)
def test_the_true_reason_why_a_processor_is_refused(name, why, tmp_path):
    image = {**HALF, "image_processor_type": "BlipImageProcessor", "size": square(32), "resample": 3}
    processor = {"processor_class": name, "num_query_tokens": 4}
    with pytest.raises(ProcessorError, match=why):
        load_processor(_write(tmp_path, image, processor, []), image_backend="pil")


def test_a_processor_that_reads_settings_of_its_video_part_is_built_and_numbers_images(tmp_path):
    names = {f"{part}_{side}_token": f"<{part}{side}>" for part in ("image", "slice", "image_id")
             for side in ("start", "end")}  # fmt: skip
    names |= {"image_token": "<image>", "video_token": "<video>"}
    image = {**HALF, "image_processor_type": "MiniCPMV4_6ImageProcessor"}
    processor = {"processor_class": "MiniCPMV4_6Processor"}
    directory = _write(tmp_path, image, processor, [*names.values()], extra_special_tokens=names)
    with pytest.raises(ProcessorError, match="writes equal images of one prompt differently"):
        load_processor(directory, image_backend="pil")


def test_the_placeholder_of_templates_need_not_be_the_token_of_features(tmp_path):
    image = {**HALF, "image_processor_type": "GotOcr2ImageProcessor", "size": square(28), "resample": 3}
    processor = {"processor_class": "QianfanOCRProcessor", "image_seq_length": 4}
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<ctx>"}
    tokens = ["<image>", *names.values()]
    directory = _write(tmp_path, image, processor, tokens, extra_special_tokens=names)
    loaded = load_processor(directory, image_backend="pil")
    assert loaded.placeholder == {"image": "<image>"}
    expected = Text("<img>"), Repeat("<ctx>", 4), Text("</img>")
    assert loaded.geometry(28, 28).expansion == expected


class Words:
    """A tokenizer with an id for each character."""

    def __call__(self, text: str | list[str], **_: object) -> dict[str, np.ndarray]:
        return {"input_ids": np.array([[ord(character) for character in "".join(text)]])}


class Whole:
    """A processor of videos whose tokens around a placeholder are the template's, or its own as well.

    It samples 32 frames of a video, unless its frames are sampled already.
    """

    video_token = "<video>"

    def __init__(self, replaced: str = "<video>", most: int = 2, numbers: bool = False) -> None:
        self.tokenizer, self.replaced, self.most, self.numbers = Words(), replaced, most, numbers

    def __call__(
        self, text: str, videos: list[np.ndarray], do_sample_frames: bool = True, **_: object
    ) -> dict[str, np.ndarray]:
        if len(videos) > self.most:
            raise ValueError("too many")
        if do_sample_frames and len(videos[0]) < 32:
            raise ValueError("fewer frames than it samples")
        for number in range(len(videos)):
            text = text.replace(self.replaced, f"{number if self.numbers else 0} s<v><Video><Video></v>", 1)
        output = self.tokenizer(text.replace("<Video>", "<video>"))
        kinds = {"kinds_of_tokens": np.zeros_like(output["input_ids"])}
        return {**output, **kinds, "pixel_values_videos": np.ones((8, 4)), "seconds": np.ones(1)}


def watching(whole: Whole, video_text: str = "<v><video></v>") -> AdaptedVideoProcessor:
    files = ProcessorFiles(ModelDir(Path()), {}, {}, {})
    videos = AdaptedVideoProcessor(files, video_text)
    videos._watched = WatchedProcessor(lambda: whole, files)
    return videos


def test_of_a_video_no_tensor_with_a_value_for_each_token_is_kept():
    videos = watching(Whole())
    run = videos._run(np.zeros((2, 4, 4, 3), np.uint8), Timeline(2.0, None, indices=(0, 1)))
    assert videos._pieces(run.text, videos.covers)[1] == ["0 s<v><video><video></v>"]
    assert set(_video_tensors(run)) == {"pixel_values_videos", "seconds"}


@pytest.mark.parametrize("text", ["<v><video></v>", "<video>"])
def test_an_expansion_covers_the_tokens_around_a_video_that_the_processor_replaces(text):
    videos = watching(Whole(text))
    assert videos.covers == (("<v>", "</v>") if text != "<video>" else ("", ""))
    assert videos.takes_several


def test_videos_that_are_numbered_are_refused_and_a_second_one_where_one_is_taken():
    assert not watching(Whole(most=1)).takes_several
    numbering = watching(Whole(numbers=True))
    with pytest.raises(ProcessorError, match="writes equal videos of one prompt differently"):
        assert numbering.takes_several


def test_text_and_its_bridge_do_not_load_the_processor_for_images(tmp_path):
    renderer = opened(model("pixtral", tmp_path))
    prompt = renderer.render_ids([user("before")])
    renderer.bridge_to_next_turn(prompt, renderer.get_stop_token_ids()[-1:], [user("after")])
    assert isinstance(renderer.media.processor, DeferredProcessor)


def test_a_model_whose_tokens_text_cannot_know_is_loaded_at_once(tmp_path):
    directory = model("pixtral", tmp_path)
    (directory / "config.json").unlink()
    renderer = opened(directory)
    assert renderer.media.processor.placeholder == {"image": "[IMG]"}
    assert not isinstance(renderer.media.processor, DeferredProcessor)


def test_a_processor_that_replaces_another_token_is_refused_at_the_first_image(tmp_path, sentence):
    renderer = opened(model("pixtral", tmp_path, written="[IMG_END]"))
    for _ in range(2):
        assert error_of(ProcessorError, renderer.render, shown(PICTURE)) == sentence


def test_a_processor_with_tokens_that_text_has_not_known_is_refused(tmp_path, sentence):
    renderer = opened(model("pixtral", tmp_path))
    processor = renderer.media.processor
    assert isinstance(processor, DeferredProcessor)
    tokens = frozenset({"[IMG]", "[IMG_BREAK]"})
    processor._build = lambda: SimpleNamespace(
        name="Odd", placeholder={"image": "[IMG]"}, placeholder_tokens=tokens
    )
    assert error_of(ProcessorError, renderer.media.require_processor, "messages[3]") == sentence


def test_settings_that_cannot_be_used_leave_text_alone(tmp_path):
    directory = model("gemma3", tmp_path)
    settings = json.loads((directory / "processor_config.json").read_text())
    settings["image_processor"]["image_processor_type"] = "UnheardOfImageProcessor"
    (directory / "processor_config.json").write_text(json.dumps(settings))
    renderer = opened(directory)
    assert renderer.render([user("before")]).token_ids
    with pytest.raises(ProcessorError):
        renderer.media.require_processor()
    with pytest.raises(ProcessorError):
        load_processor(directory, image_backend="pil")


def test_a_package_is_named_if_an_image_needs_it(tmp_path, monkeypatch):
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    renderer = opened(model("smolvlm", tmp_path))
    assert renderer.render(shown(PICTURE)).multi_modal_data
    assert processing_smolvlm.num2words is None
    with pytest.raises(MissingDependencyError, match="got no scipy here"), errors_named("image"):
        raise ImportError("no scipy\n here")


def test_a_back_end_that_a_family_lacks_is_not_recommended(tmp_path, monkeypatch, sentence):
    directory = model("pixtral", tmp_path)
    settings = json.loads((directory / "processor_config.json").read_text())
    settings["image_processor"]["image_processor_type"] = "Llama4ImageProcessorFast"
    (directory / "processor_config.json").write_text(json.dumps(settings))
    assert error_of(ProcessorError, opened(directory).render, shown(PICTURE)) == sentence
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        MissingDependencyError, match=r"needs torchvision.* Install it with: pip install torchvision$"
    ):
        Renderer.from_pretrained(directory).render(shown(PICTURE))


def test_old_releases_of_transformers_are_named(tmp_path, monkeypatch, sentence):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.0.0")
    monkeypatch.setitem(sys.modules, "transformers.image_processing_backends", None)
    problem = error_of(MissingDependencyError, opened(model("pixtral", tmp_path)).render, shown(PICTURE))
    assert problem == sentence
