import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kit import error_of
from mmrender.errors import MissingDependencyError, ModelError, ProcessorError
from mmrender.media.load import load_image
from mmrender.media.processor import MediaProcessor, ProcessorFiles
from mmrender.media.processors.patches import PatchProcessor
from mmrender.media.processors.registry import load_processor
from mmrender.renderer import Renderer
from mmrender.sidecar import Repeat

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}


def directory(tmp_path: Path, **files: object) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def load(tmp_path: Path, image: dict[str, object], **files: object) -> PatchProcessor:
    processor = load_processor(directory(tmp_path, preprocessor_config=image, **files), image_backend="pil")
    assert isinstance(processor, PatchProcessor)
    return processor


def test_nested_settings_come_before_a_file_of_their_own(tmp_path):
    nested = {"image_processor": {**QWEN, "patch_size": 14}, "processor_class": "Qwen3VLProcessor"}
    files = ProcessorFiles.read(directory(tmp_path, preprocessor_config=QWEN, processor_config=nested))
    assert (files.image["patch_size"], files.processor_class) == (14, "Qwen3VLProcessor")


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
def test_back_end_suffixes_name_the_same_processor(tmp_path, suffix):
    processor = load(tmp_path, {**QWEN, "image_processor_type": f"Qwen2VLImageProcessor{suffix}"})
    assert processor.name == "Qwen2VLImageProcessor"
    assert isinstance(processor, MediaProcessor)


def test_both_spellings_of_the_pixel_bounds(tmp_path, sentence):
    by_size = load(tmp_path, {**QWEN, "size": {"shortest_edge": 3136, "longest_edge": 100352}})
    spelled_out = {key: value for key, value in QWEN.items() if key != "size"}
    by_name = load(tmp_path, {**spelled_out, "min_pixels": 3136, "max_pixels": 100352})
    assert by_size.settings_digest == by_name.settings_digest
    assert by_size.geometry(2000, 1000).grid != load(tmp_path, QWEN).geometry(2000, 1000).grid
    assert load(tmp_path, {**QWEN, "max_pixels": 262144}).max_pixels == 262144
    problem = error_of(ProcessorError, load, tmp_path, {**QWEN, "size": {"height": 448, "width": 448}})
    assert problem.replace(str(tmp_path), "FOLDER") == sentence


def test_defaults_of_the_family_where_the_files_are_silent(tmp_path):
    processor = load(tmp_path, {"image_processor_type": "Glm4vImageProcessor"})
    assert (processor.min_pixels, processor.max_pixels) == (112 * 112, 28 * 28 * 15000)
    assert processor.placeholder == {"image": "<|image|>", "video": "<|video|>"}


@pytest.mark.parametrize("whole", ["Dots3NoteProcessor", "ColQwen2Processor", "unknown"])
def test_a_whole_processor_of_another_class_is_not_native(tmp_path, whole):
    files = ProcessorFiles.read(directory(tmp_path, preprocessor_config={**QWEN, "processor_class": whole}))
    assert PatchProcessor.from_files(files, "pil") is None


def test_tokenizer_settings_name_the_placeholder(tmp_path):
    processor = load(tmp_path, QWEN, tokenizer_config={"extra_special_tokens": {"image_token": "<|pic|>"}})
    assert processor.placeholder["image"] == "<|pic|>"
    assert processor.geometry(64, 64).expansion == (Repeat("<|pic|>", 64),)
    assert processor.placeholder_tokens == {"<|pic|>", "<|video_pad|>"}


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "expected JSON, got Expecting"), ("[1]", "expected a JSON object, got list")]
)
def test_file_that_is_no_json_object(tmp_path, text, problem):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(text)
    caught = error_of(ModelError, load_processor, tmp_path, image_backend="pil")
    assert caught.startswith(f"{file}: cannot read preprocessor_config.json - {problem}")


def test_text_only_model_and_unknown_back_end(tmp_path, sentence):
    assert load_processor(directory(tmp_path, config={"model_type": "llama"}), image_backend="pil") is None
    with pytest.raises(ProcessorError) as caught:
        load_processor(tmp_path, image_backend="cuda")
    assert str(caught.value) == sentence


def test_torch_is_asked_for_with_the_first_image_that_it_resizes(tmp_path, monkeypatch, sentence):
    processor = load_processor(directory(tmp_path, preprocessor_config=QWEN))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError) as caught:
        processor.process(load_image(np.zeros((400, 301, 3), np.uint8)))
    assert str(caught.value) == sentence


def test_text_renders_without_the_packages_that_images_need(shared_models, monkeypatch, sentence):
    messages = [{"role": "user", "content": [{"type": "text", "text": "<image> in text"}]}]
    expected = Renderer.from_pretrained(shared_models / "idefics3", image_backend="pil").render(messages)
    monkeypatch.setitem(sys.modules, "transformers", None)
    renderer = Renderer.from_pretrained(shared_models / "idefics3", image_backend="pil")
    assert renderer.render(messages).token_ids == expected.token_ids
    for _ in range(2):
        with pytest.raises(MissingDependencyError) as caught:
            renderer.render([*messages, {"role": "user", "content": [Image.new("RGB", (8, 8))]}])
        assert str(caught.value) == sentence


def test_each_setting_and_the_back_end_are_part_of_the_identity(tmp_path):
    torch = load_processor(directory(tmp_path, preprocessor_config=QWEN))
    digests = {torch.settings_digest, load(tmp_path, QWEN).settings_digest}
    for change in ({"patch_size": 14}, {"image_std": [0.5, 0.5, 0.4]}, {"max_pixels": 10**6}):
        digests.add(load(tmp_path, {**QWEN, **change}).settings_digest)
    assert len(digests) == 5
