"""Items against the reference image processors: pixels bit for bit, grids and token counts equal."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

import mmcodecs
from adapter_models import ADAPTER_FAMILIES
from item_cases import same_tensors
from mmrender.errors import MediaError
from mmrender.media import pixels
from mmrender.media.load import load_image
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import MediaProcessor
from mmrender.media.processors.adapter import TransformersProcessor, _first_of
from mmrender.media.processors.registry import load_processor
from mmrender.media.wire import item_from_wire, item_to_wire
from mmrender.testing.reference import (
    has_reference_backend,
    import_torchvision,
    load_reference_image_processor,
)
from reference_processors import (
    ADAPTED_MODELS,
    PATCH_MODELS,
    TorchReplica,
    expansion_text,
    reference_processor,
)

BACKENDS: tuple[ImageBackend, ...] = ("torch", "pil")
PHOTOS = ("cow_in_beach.jpg", "kiwi.jpg", "lilly.jpg", "sunflower.jpg")
EXTREMES = ((1, 1), (1, 200), (200, 1), (1, 201), (2500, 13), (13, 2500), (31, 33), (56, 56), (1700, 9))
few = hypothesis_settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
many = hypothesis_settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def picture(height: int, width: int) -> Image.Image:
    """Return smooth and noisy halves: resampling rounds differently on each."""
    rng = np.random.default_rng(height * 10_007 + width)
    values = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    values[: height // 2] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    return Image.fromarray(values, "RGB")


def assert_equal_to_reference(processor: MediaProcessor, reference: Any, image: Image.Image) -> None:
    try:
        expected = reference(image, return_tensors="pt")
    except ValueError:
        with pytest.raises(MediaError):
            processor.process(load_image(image))
        return
    item = processor.process(load_image(image))
    got = item.tensors(framework="torch")
    assert torch.equal(got["image_grid_thw"], expected["image_grid_thw"])
    assert got["pixel_values"].dtype == expected["pixel_values"].dtype
    assert (got["pixel_values"] - expected["pixel_values"]).abs().max() == 0
    for dtype in ("bfloat16", "float16"):
        rounded = expected["pixel_values"].to(getattr(torch, dtype))
        assert torch.equal(item.tensors(dtype, framework="torch")["pixel_values"], rounded)
    assert item.nbytes * 8 == expected["pixel_values"].nbytes


def loaded(directory: Path, backend: ImageBackend) -> MediaProcessor:
    processor = load_processor(directory, image_backend=backend)
    assert processor is not None
    return processor


@pytest.fixture(params=[(name, backend) for name in PATCH_MODELS for backend in BACKENDS], ids="-".join)
def native(request: pytest.FixtureRequest, shared_models: Path) -> tuple[MediaProcessor, Any]:
    name, backend = request.param
    return loaded(shared_models / name, backend), reference_processor(shared_models / name, backend)


@few
@given(height=st.integers(1, 700), width=st.integers(1, 700))
def test_pixels_of_any_size(native: tuple[MediaProcessor, Any], height: int, width: int) -> None:
    assert_equal_to_reference(*native, picture(height, width))


@pytest.mark.parametrize("size", [*EXTREMES, *PHOTOS], ids=str)
def test_pixels_of_extreme_sizes_and_of_photographs(
    native: tuple[MediaProcessor, Any], size: tuple[int, int] | str, shared_images: Path
) -> None:
    image = Image.open(shared_images / size).convert("RGB") if isinstance(size, str) else picture(*size)
    assert_equal_to_reference(*native, image)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_of_an_image_in_several_blocks(
    shared_models: Path, backend: ImageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a picture of over 16 MiB is; blocks and bands are smaller here."""
    directory, block_size = shared_models / "qwen2_5_vl", Image.core.get_block_size()
    monkeypatch.setattr(pixels, "_STRIP_PIXELS", 1 << 16)
    Image.core.set_block_size(1 << 18)
    try:
        image = picture(511, 453)
        assert pixels.raw_pixels(image) is None
        assert_equal_to_reference(loaded(directory, backend), reference_processor(directory, backend), image)
    finally:
        Image.core.set_block_size(block_size)


@pytest.mark.parametrize("name", PATCH_MODELS)
def test_geometry_without_pixels(name: str, shared_models: Path) -> None:
    reference = load_reference_image_processor(shared_models / name, "pil")
    processor = loaded(shared_models / name, "pil")

    @many
    @given(height=st.integers(1, 2500), width=st.integers(1, 2500))
    def compare(height: int, width: int) -> None:
        try:
            patches = reference.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(MediaError):
                processor.geometry(height, width)
            return
        geometry = processor.geometry(height, width)
        assert np.prod(geometry.grid) == patches
        assert geometry.num_tokens == patches // reference.merge_size**2

    compare()


@pytest.mark.skipif(not has_reference_backend("torch"), reason="needs torchvision")
@pytest.mark.parametrize("name", PATCH_MODELS)
def test_replica_equals_the_torchvision_back_end(name: str, shared_models: Path) -> None:
    real = load_reference_image_processor(shared_models / name, "torch")
    replica = TorchReplica(load_reference_image_processor(shared_models / name, "pil"))
    for size in ((300, 200), (64, 64), (1000, 37), (513, 1025)):
        expected, got = (processor(picture(*size), return_tensors="pt") for processor in (real, replica))
        assert torch.equal(expected["pixel_values"], got["pixel_values"])
        assert torch.equal(expected["image_grid_thw"], got["image_grid_thw"])


@pytest.fixture(
    scope="module",
    params=[
        (name, b)
        for name in (*ADAPTED_MODELS, *ADAPTER_FAMILIES)
        for b in BACKENDS
        if has_reference_backend(b)
    ],
    ids="-".join,
)
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TransformersProcessor, Any]:
    name, backend = request.param
    if name in ADAPTED_MODELS:
        directory = request.getfixturevalue("with_small_tiles")(name)
    else:
        directory = ADAPTER_FAMILIES[name](tmp_path_factory.mktemp("adapted") / name)
    if backend == "torch":
        import_torchvision()
    processor = load_processor(directory, image_backend=backend)
    assert isinstance(processor, TransformersProcessor)
    return processor, load_reference_image_processor(directory, backend)


@few
@given(height=st.integers(1, 500), width=st.integers(1, 500))
def test_adapted_tensors(adapted: tuple[TransformersProcessor, Any], height: int, width: int) -> None:
    processor, reference = adapted
    image = picture(height, width)
    options = {"crop_to_patches": True} if "GotOcr2" in processor.name else {}
    try:
        expected = reference([[image]], return_tensors="pt", **options)
    except (ValueError, ZeroDivisionError):
        with pytest.raises(MediaError):
            processor.process(load_image(image))
        return
    item = processor.process(load_image(image))
    assert item.compact
    got = item.tensors(framework="torch")
    assert set(got) == set(expected) - {"num_patches", "rows", "cols", "num_crops", "num_tiles"}
    for key, values in got.items():
        assert values.dtype == expected[key].dtype
        assert torch.equal(values, expected[key])
    rounded = item.tensors("bfloat16", framework="torch")["pixel_values"]
    assert torch.equal(rounded, expected["pixel_values"].to(torch.bfloat16))


def test_another_picture_of_a_size_has_all_tensors(tmp_path: Path) -> None:
    """Images larger than a tile have `pixel_values_local`; all probes are smaller than a tile."""
    directory = ADAPTER_FAMILIES["deepseek_ocr2"](tmp_path / "model")
    settings = directory / "processor_config.json"
    settings.write_text(settings.read_text().replace('"tile_size": 256', '"tile_size": 768'))
    processor, reference = loaded(directory, "pil"), load_reference_image_processor(directory, "pil")
    for degrees in (0, 180, 0):
        image = picture(800, 1600).rotate(degrees)
        expected = reference([[image]], return_tensors="np")
        got = processor.process(load_image(image)).tensors()
        assert set(got) == set(expected) == {"pixel_values", "pixel_values_local", "num_local_patches"}
        for name, values in got.items():
            np.testing.assert_array_equal(values, expected[name])


def test_the_first_of_several_copies_has_its_rows_of_every_tensor() -> None:
    tiles = np.arange(12).reshape(6, 2)
    tensors = {
        "one row each": np.array([[7], [8]]),
        "three rows each": np.concatenate([tiles[:3], tiles[:3]]),
        "rows of all": tiles,
        "a count": np.array(2),
        "an odd number of rows": np.arange(3),
    }
    shares = _first_of(tensors, 2)
    assert {name: values.tolist() for name, values in shares.items()} == {
        "one row each": [[7]],
        "three rows each": tiles[:3].tolist(),
    }


def test_adapted_items_survive_the_wire(adapted: tuple[TransformersProcessor, Any]) -> None:
    item = adapted[0].process(load_image(picture(210, 330)))
    read = item_from_wire(mmcodecs.decode(mmcodecs.encode(item_to_wire(item))))
    assert read == item
    assert same_tensors(read, item)


SHORT_SIDES = st.integers(20, 400)


@few
@given(height=SHORT_SIDES, width=SHORT_SIDES)
def test_adapted_expansion(adapted: tuple[TransformersProcessor, Any], height: int, width: int) -> None:
    """The processor's own ids for a text with the placeholder are the ids of the text we expand it to."""
    processor, _ = adapted
    reference = processor._watched.reference
    placeholder = processor.placeholder["image"]
    text = expansion_text(processor.geometry(height, width).expansion)
    whole = reference(text=["before " + placeholder + " after"], images=[[picture(height, width)]])
    affixes = processor.affixes("none", images=True)
    at = affixes.start([(7, 7 + len(text))])
    written = f"before {text} after"
    written = written[:at] + affixes.opening + written[at:] + affixes.ending
    expected = reference.tokenizer(written)["input_ids"]
    assert list(whole["input_ids"][0]) == expected


def test_tiles_depend_on_company(tmp_path: Path) -> None:
    directory = ADAPTER_FAMILIES["llava_onevision"](tmp_path / "model")
    processor = loaded(directory, "pil")
    assert processor.depends_on_image_count
    image = picture(90, 150)
    read = load_image(image)
    alone, together = processor.process(read), processor.process(read, num_images=2)
    assert alone.identity != together.identity
    assert together.identity == processor.process(read, num_images=5).identity
    assert processor.geometry(90, 150).expansion == alone.expansion
    assert processor.geometry(90, 150, num_images=2).expansion == together.expansion != alone.expansion
    reference = load_reference_image_processor(directory, "pil")
    expected = reference([[image, picture(33, 44), image]], return_tensors="np")
    got = together.tensors()
    np.testing.assert_array_equal(got["pixel_values"][0], expected["pixel_values"][0])
    assert got["image_sizes"].tolist() == [[90, 150]]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gemma3", "\n\n<start_of_image>{16}<end_of_image>\n\n"),
        ("pixtral", "{4}[IMG_BREAK]{4}[IMG_END]"),
        ("llava", "{16}"),
    ],
)
def test_expansions_a_person_can_read(name: str, shape: str, tmp_path: Path) -> None:
    pieces = loaded(ADAPTER_FAMILIES[name](tmp_path / name), "pil").geometry(32, 64).expansion
    assert "".join(getattr(piece, "text", f"{{{getattr(piece, 'count', 0)}}}") for piece in pieces) == shape


def test_threads_that_learn_sizes_at_once_leave_the_processor_as_it_was(tmp_path: Path) -> None:
    directory = ADAPTER_FAMILIES["pixtral"](tmp_path / "pixtral")
    shared, alone = (loaded(directory, "pil") for _ in range(2))
    assert isinstance(shared, TransformersProcessor)
    parts = shared._watched.reference.tokenizer, shared._watched.reference.image_processor
    sizes = [(32 + 8 * index, 48) for index in range(32)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda size: shared.geometry(*size), sizes))
    assert found == [alone.geometry(*size) for size in sizes]
    assert (shared._watched.reference.tokenizer, shared._watched.reference.image_processor) == parts
