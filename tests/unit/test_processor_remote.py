"""Processors that are Python code of the model directory: with `trust_remote_code=True`, observed like all others."""

import json

import numpy as np
import pytest
from PIL import Image

from adapter_models import HALF, square
from kit import error_of, noise
from mmrender.errors import ProcessorError
from mmrender.media.processors.registry import load_processor
from mmrender.renderer import Renderer
from mmrender.testing.parity import check_parity
from remote_models import pattern, tiles

pytest.importorskip("transformers", reason="runs processors by Transformers")

SIZES = [(64, 64), (30, 300), (300, 30), (200, 100), (17, 19)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiles(tmp_path_factory.mktemp("remote") / "tiles")


@pytest.fixture(scope="module")
def renderer(directory):
    return Renderer.from_pretrained(directory, image_backend="pil", trust_remote_code=True)


@pytest.fixture(scope="module")
def reference(directory):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory, trust_remote_code=True)


def shown(*images):
    parts = [
        part
        for image in images
        for part in ({"type": "image", "image": image}, {"type": "text", "text": "between"})
    ]
    return [{"role": "user", "content": [{"type": "text", "text": "before"}, *parts]}]


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[1:2], SIZES, SIZES[:1] * 3])
def test_prompts_and_tensors_equal_those_of_the_directorys_code(renderer, reference, sizes):
    images = [noise(seed, *size) for seed, size in enumerate(sizes)]
    rendered = renderer.render(shown(*images))
    text = reference.apply_chat_template(shown(*images), tokenize=False)
    expected = reference(text=text, images=[images], return_tensors="np", add_special_tokens=False)
    assert rendered.token_ids == expected["input_ids"].reshape(-1).tolist()
    tensors = [item.tensors() for item in rendered.multi_modal_data.mm_items["image"]]
    assert {name for each in tensors for name in each} == {"pixel_values", "tile_counts"}
    for name in ("pixel_values", "tile_counts"):
        joined = np.concatenate([each[name] for each in tensors])
        assert joined.dtype == expected[name].dtype
        np.testing.assert_array_equal(joined, expected[name])


def test_parity_runs_the_directorys_code_on_both_sides(directory):
    report = check_parity(directory, image_backend="pil", cases=8, trust_remote_code=True)
    assert (report.mismatch, report.not_compared) == (None, None)
    assert report.images > 0
    assert (
        "is code of the model directory" in check_parity(directory, image_backend="pil", cases=1).not_compared
    )


def test_text_that_looks_like_a_placeholder_stays_text(renderer):
    rendered = renderer.render([{"role": "user", "content": "before <image> <tile> after"}])
    special = {renderer.tokenizer.token_id(token) for token in ("<image>", "<tile>", "<atom>")}
    assert not special & set(rendered.token_ids)


def test_without_the_flag_no_code_runs(tmp_path, sentence):
    directory = tiles(tmp_path / "model")
    for file in directory.glob("*.py"):
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{file.read_text()}")
    renderer = Renderer.from_pretrained(directory, image_backend="pil")
    renderer.render([{"role": "user", "content": "before"}])
    error = error_of(ProcessorError, renderer.render, shown(Image.new("RGB", (8, 8))))
    assert error == sentence
    assert not (tmp_path / "ran").exists()


def test_code_of_the_directory_comes_before_native_families_and_classes_of_the_same_name(tmp_path):
    directory = tiles(tmp_path / "model")
    for name, changes in (
        ("processor_config.json", {"processor_class": "LlavaProcessor"}),
        (
            "preprocessor_config.json",
            {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2},
        ),
    ):
        settings = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**settings, **HALF, **changes, "size": square(28)}))
    trusted = load_processor(directory, image_backend="pil", trust_remote_code=True)
    assert trusted.name == "TileImageProcessor"
    assert (
        trusted.geometry(200, 100).num_tokens
        == load_processor(tiles(tmp_path / "other"), image_backend="pil", trust_remote_code=True)
        .geometry(200, 100)
        .num_tokens
    )


def test_a_placeholder_of_several_tokens_is_refused(tmp_path, sentence):
    directory = pattern(tmp_path / "model")
    options = {"image_backend": "pil", "trust_remote_code": True}
    error = error_of(ProcessorError, Renderer.from_pretrained, directory, **options)
    assert error.replace(str(directory), "MODEL") == sentence


def test_identities_follow_the_code_and_not_the_name_of_the_directory(tmp_path):
    options = {"image_backend": "pil", "trust_remote_code": True}
    digests = []
    for name, more in (("a", ""), ("b", ""), ("c", "\n# changed\n")):
        directory = tiles(tmp_path / name)
        with (directory / "image_processing_tiles.py").open("a") as file:
            file.write(more)
        digests.append(load_processor(directory, **options).settings_digest)
    assert digests[0] == digests[1] != digests[2]
