"""Items that come from servers: vLLM's base64 ones, and those by reference."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kit import encoded, error_of, noise
from mmrender.client.vllm_fields import collate_items, layout_of
from mmrender.errors import BatchError, MediaError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.load import load_image
from mmrender.media.vllm_items import BatchedField, FieldElem, FlatField, SharedField, encode_mm_kwargs_item
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange
from mmrender.training import collate, decode_mm_kwargs, resolve_references
from mmrender.training.kwargs import collate_mm_kwargs
from training_cases import PAD_ID, PROCESSOR, family_of, patch_item, sample, tiled_item

QWEN = layout_of("Qwen3VLForConditionalGeneration")


def vllm_items(items: Any) -> list[str]:
    return [encode_mm_kwargs_item(item) for item in items]


def of_qwen(*items: MediaItem) -> list[str]:
    return vllm_items(collate_items(QWEN, [item.tensors() for item in items]))


def test_all_fields_of_all_modalities() -> None:
    image, video = [patch_item(16, 16), patch_item(16, 24, seed=1)], patch_item(24, 16, seed=2)
    tensors = video.tensors()
    as_video = {"pixel_values_videos": tensors["pixel_values"], "video_grid_thw": tensors["image_grid_thw"]}
    kwargs = decode_mm_kwargs(
        {"image": of_qwen(*image), "video": vllm_items(collate_items(QWEN, [as_video]))}
    )
    expected = collate_mm_kwargs([sample(image)], family_of("qwen3_vl"))
    assert sorted(kwargs) == ["image_grid_thw", "pixel_values", "pixel_values_videos", "video_grid_thw"]
    for name, values in expected.items():
        assert kwargs[name].dtype == values.dtype
        assert torch.equal(kwargs[name], values)
    assert kwargs["video_grid_thw"].tolist() == tensors["image_grid_thw"].tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_levels_are_normalised_or_refused(count: int) -> None:
    items = [patch_item(16, 24, seed=seed) for seed in range(count)]
    inputs = [{**item.tensors(), "pixel_values": item.levels()} for item in items]
    entries = vllm_items(collate_items(QWEN, inputs))
    kwargs = decode_mm_kwargs({"image": entries}, arithmetic=items[0].arithmetic, dtype=torch.bfloat16)
    expected = torch.cat([item.tensors("bfloat16", framework="torch")["pixel_values"] for item in items])
    assert torch.equal(kwargs["pixel_values"], expected)
    problem = error_of(BatchError, decode_mm_kwargs, {"image": entries})
    assert problem.startswith(
        "pixel_values: the pixels are levels that are still to be normalised - expected floating values, got uint8"
    )


@pytest.mark.parametrize("count", [1, 2])
def test_each_kind_of_field(count: int) -> None:
    grids = [np.array([1, 2, 2 + index]) for index in range(count)]
    tiles = [np.full((index + 1, 3), index, np.float32) for index in range(count)]
    ends = np.cumsum([0, *map(len, tiles)])
    slices = tuple((slice(int(a), int(b)),) for a, b in pairwise(ends))
    items = [
        {
            "grid": FieldElem(grid, BatchedField()),
            "tiles": FieldElem(tile, FlatField(slices)),
            "token": FieldElem(np.array(7), SharedField(count)),
        }
        for grid, tile in zip(grids, tiles, strict=True)
    ]
    kwargs: Any = decode_mm_kwargs({"image": vllm_items(items)})
    assert kwargs["grid"].tolist() == [grid.tolist() for grid in grids]
    assert kwargs["tiles"].tolist() == np.concatenate(tiles).tolist()
    assert int(kwargs["token"]) == 7


def test_a_lone_item_is_viewed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(torch, "cat", refuse)
    monkeypatch.setattr(torch, "stack", refuse)
    item = patch_item(16, 16)
    kwargs = decode_mm_kwargs({"image": of_qwen(item)})
    np.testing.assert_array_equal(kwargs["pixel_values"].numpy(), item.tensors()["pixel_values"])
    assert kwargs["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_the_dtype_of_floats_can_be_chosen() -> None:
    kwargs = decode_mm_kwargs({"image": of_qwen(patch_item(16, 16))}, dtype=torch.bfloat16)
    assert kwargs["pixel_values"].dtype == torch.bfloat16
    assert kwargs["image_grid_thw"].dtype == torch.int64
    assert decode_mm_kwargs({}) == {}
    assert decode_mm_kwargs({"image": []}) == {}


@pytest.mark.parametrize(
    "entries",
    [
        lambda: {"image": [*of_qwen(patch_item(16, 16)), None]},
        lambda: {"image": vllm_items([{"pixel_values": FieldElem(None, BatchedField())}])},
        lambda: {"image": of_qwen(patch_item(16, 16)), "video": of_qwen(patch_item(16, 16))},
    ],
    ids=["an item without data", "an item without a tensor", "a field of two modalities"],
)
def test_errors(entries: Any, sentence: Any) -> None:
    assert error_of(BatchError, decode_mm_kwargs, entries()) == sentence


def grids_of(*grids: list[int]) -> list[str]:
    """Items of 16 patches each that claim these grids."""
    items = collate_items(QWEN, [patch_item(16, 16).tensors() for _ in grids])
    for item, grid in zip(items, grids, strict=True):
        item["image_grid_thw"] = FieldElem(np.array(grid), item["image_grid_thw"].field)
    return vllm_items(items)


@pytest.mark.parametrize(
    "grid", [[1, 4, 8], [1, 2, 4], [1000, 1000, 1000], [-1, -4, 4], [1, 16, 2**60 + 1], [0, 4, 4]]
)
@pytest.mark.parametrize("count", [1, 2])
def test_grids_that_are_not_those_of_the_patches(grid: list[int], count: int, sentence: Any) -> None:
    with pytest.raises(BatchError, match="the grids do not fit the patches - expected"):
        decode_mm_kwargs({"image": grids_of(*[grid] * count)})
    assert decode_mm_kwargs({"image": grids_of(*[[1, 4, 4]] * count)})
    (item,) = collate_items(QWEN, [patch_item(16, 16).tensors()])
    del item["image_grid_thw"]
    assert error_of(BatchError, decode_mm_kwargs, {"image": vllm_items([item])}) == sentence


def test_grids_are_held_to_each_item(sentence: Any) -> None:
    """Two items may have as many patches together as their grids, and each have the other's."""
    tensors = [patch_item(16, 16).tensors(), patch_item(16, 24, seed=1).tensors()]
    items = collate_items(QWEN, tensors)
    grids = [item["image_grid_thw"] for item in items]
    items[0]["image_grid_thw"], items[1]["image_grid_thw"] = grids[::-1]
    assert error_of(BatchError, decode_mm_kwargs, {"image": vllm_items(items)}) == sentence


@pytest.mark.parametrize("lost", [1, 15])
def test_slices_beyond_the_rows_are_refused(lost: int, sentence: Any) -> None:
    items = collate_items(QWEN, [patch_item(16, 16).tensors(), patch_item(16, 24, seed=1).tensors()])
    pixels = items[1]["pixel_values"]
    items[1]["pixel_values"] = FieldElem(pixels.data[:-lost], pixels.field)
    assert error_of(BatchError, decode_mm_kwargs, {"image": vllm_items(items)}) == sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_where_asked(value: float, sentence: Any) -> None:
    tensors = patch_item(16, 16).tensors()
    tensors["pixel_values"][7, 3] = value
    entries = {"image": vllm_items(collate_items(QWEN, [tensors]))}
    assert not torch.isfinite(decode_mm_kwargs(entries)["pixel_values"]).all()
    assert error_of(BatchError, decode_mm_kwargs, entries, check_finite=True) == sentence


@pytest.mark.parametrize("entries", [["!!"], ["AAAA"]])
def test_what_is_no_item_is_named(entries: list[str]) -> None:
    with pytest.raises(BatchError, match=r"^kwargs_data\.image\[0\]: an item cannot be decoded - got "):
        decode_mm_kwargs({"image": entries})


def by_reference(made_of: bytes, **changed: Any) -> tuple[Any, MediaItem]:
    item = PROCESSOR.process(load_image(made_of))
    whole = sample([item], name="a")
    length = whole.multi_modal_data.mm_placeholders["image"][0].length
    reference = msgspec.structs.replace(ReferenceItem.of(item, made_of, length), **changed)
    ranges = whole.multi_modal_data.mm_placeholders["image"]
    return replace(whole, multi_modal_data=MultiModalData.of([(ranges[0], reference)])), item


def test_references_are_processed_again_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    resolve = ReferenceItem.resolve

    def counted(self: ReferenceItem, *args: Any, **options: Any) -> MediaItem:
        calls.append(self.identity)
        return resolve(self, *args, **options)

    monkeypatch.setattr(ReferenceItem, "resolve", counted)
    one, item = by_reference(encoded(noise(0, 30, 20)))
    plain = sample([patch_item(16, 16)])
    resolved = resolve_references([one, plain, one], PROCESSOR)
    assert calls == [item.identity]
    assert resolved[1] is plain
    np.testing.assert_array_equal(
        resolved[2].multi_modal_data.mm_items["image"][0].tensors()["pixel_values"],
        item.tensors()["pixel_values"],
    )
    assert isinstance(one.multi_modal_data.mm_items["image"][0], ReferenceItem)
    collate(resolved, family_of("qwen3_vl"), pad_token_id=PAD_ID)


def test_references_must_be_resolved_and_become_what_they_were(
    sentence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = by_reference(encoded(noise(0, 30, 20)))
    assert error_of(BatchError, collate, [one], family_of("qwen3_vl"), pad_token_id=PAD_ID) == sentence
    stale, _ = by_reference(encoded(noise(0, 30, 20)), source=encoded(noise(1, 30, 20)))
    with pytest.raises(MediaError, match="processing again gives another identity"):
        resolve_references([stale], PROCESSOR)
    one, item = by_reference(encoded(noise(0, 30, 20)))
    larger = patch_item(32, 32, seed=1)
    monkeypatch.setattr(ReferenceItem, "resolve", lambda *_, **__: larger)
    assert error_of(BatchError, resolve_references, [one], PROCESSOR) == sentence
    tiled = tiled_item((1, 3, 6, 6), 4)  # text stands between its tokens
    reference = ReferenceItem.of(tiled, encoded(noise(0, 30, 20)), 8)
    range_ = PlaceholderRange(4, 7, ((2, 4), (5, 7)))
    other = replace(
        sample([item], text=8, name="b"), multi_modal_data=MultiModalData.of([(range_, reference)])
    )
    monkeypatch.setattr(ReferenceItem, "resolve", lambda *_, **__: tiled)
    with pytest.raises(BatchError, match="expected 7 tokens, 4 of them for features, got 8 and 4"):
        resolve_references([other], PROCESSOR)
