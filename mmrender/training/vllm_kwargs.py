"""The tensors that vLLM's render route answers with, as keyword arguments of the model."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from mmcodecs import CodecError, decode_mm_kwargs_item
from mmcodecs.vllm_batch import join_items
from mmcodecs.vllm_items import BatchedField, FieldElem, FlatField
from mmrender.errors import BatchError
from mmrender.media.levels import PixelArithmetic
from mmrender.training._torch import torch


class MultiModalKwargs(TypedDict, total=False):
    """Keyword arguments of a model for its images and videos; families have others besides these.

    Attributes:
        pixel_values: `(patches, features)` for the Qwen family, `(tiles, 3, height, width)` for others.
        image_grid_thw: int64 `(images, 3)`.
        pixel_attention_mask: Where a tile is no padding.
        image_sizes: int64 `(images, 2)`.
        pixel_values_videos: As `pixel_values`, of videos.
        video_grid_thw: int64 `(videos, 3)`.
        second_per_grid_ts: `(videos,)`.
    """

    pixel_values: Any
    image_grid_thw: Any
    pixel_attention_mask: Any
    image_sizes: Any
    pixel_values_videos: Any
    video_grid_thw: Any
    second_per_grid_ts: Any


def decode_mm_kwargs(
    multi_modal_kwargs: Mapping[str, Sequence[str | None]],
    *,
    dtype: Any = None,
    arithmetic: PixelArithmetic | None = None,
) -> MultiModalKwargs:
    """Decode the items of a prompt and join them as vLLM's engine does.

    Args:
        multi_modal_kwargs: Base64 items by modality, the `kwargs_data` of vLLM's reply.
        dtype: Of floating tensors; None keeps theirs. Integers always keep theirs.
        arithmetic: Normalises pixels that come as levels from 0 to 255, which vLLM sends since 0.28 and
            normalises itself unless it runs with `--no-mm-device-do-normalize`. A `PatchItem` of the same
            processor has it.

    Returns:
        All fields of all modalities as torch tensors. A lone item's tensors are views of its message.

    Raises:
        BatchError: An entry is None (vLLM sends the hash alone for what it takes the receiver to hold), an
            item is no item, the items of a modality cannot be joined, two modalities have one field, or
            pixels are levels and there is no `arithmetic`, without which a model would misread them.
    """
    out: dict[str, Any] = {}
    for modality, entries in multi_modal_kwargs.items():
        items = [_decoded(entry, f"kwargs_data.{modality}[{index}]") for index, entry in enumerate(entries)]
        for name, value in _joined(items, f"kwargs_data.{modality}").items():
            if name in out:
                raise BatchError("two modalities have one field", where=f"kwargs_data.{modality}", got=name)
            out[name] = _cast(_normalised(name, value, arithmetic), dtype)
    return out  # type: ignore[return-value]


def _decoded(entry: str | None, where: str) -> dict[str, FieldElem]:
    if entry is None:
        raise BatchError(
            "an item has no data, only its hash",
            where=where,
            expected="base64 text",
            got="None",
            remedy="Ask the server to process the image anew, or turn its cache of processed images off",
        )
    try:
        item = decode_mm_kwargs_item(entry, framework="torch")
    except CodecError as error:
        raise BatchError("an item cannot be decoded", where=where, got=str(error)) from error
    for name, elem in item.items():
        if elem.data is None:
            raise BatchError("a field has no data", where=f"{where}.{name}", expected="a tensor", got="None")
    return item


def _joined(items: Sequence[Mapping[str, FieldElem]], where: str) -> Mapping[str, Any]:
    if len(items) == 1:
        return {name: _alone(elem) for name, elem in items[0].items()}
    try:
        return join_items(items)
    except CodecError as error:
        raise BatchError("items cannot be joined", where=where, got=str(error)) from error


def _alone(elem: FieldElem) -> Any:
    """What joining one item gives, without the copy that joining makes."""
    if isinstance(elem.field, BatchedField):
        return elem.data[None] if isinstance(elem.data, torch.Tensor) else [elem.data]
    if isinstance(elem.field, FlatField) and isinstance(elem.data, list):
        return list(elem.data)
    return elem.data


def _normalised(name: str, value: Any, arithmetic: PixelArithmetic | None) -> Any:
    """Pixels as the model takes them; whatever are no levels of patches is returned as it is."""
    if not name.startswith("pixel_values") or getattr(value, "dtype", None) != torch.uint8:
        return value
    if arithmetic is None or value.ndim != 2 or value.shape[1] % 3:
        raise BatchError(
            "the pixels are levels that are still to be normalised",
            where=name,
            expected="floating values" if arithmetic is None else "patches (n, 3 * m)",
            got=f"uint8 {list(value.shape)}",
            remedy="Pass the arithmetic of the model's processor, or run vLLM with "
            "--no-mm-device-do-normalize",
        )
    levels = value.numpy().reshape(len(value), 3, -1)
    out = np.empty(levels.shape, np.float32)
    for channel, table in enumerate(arithmetic.table()):
        np.take(table, levels[:, channel], out=out[:, channel], mode="clip")
    return torch.from_numpy(out.reshape(value.shape))


def _cast(value: Any, dtype: Any) -> Any:
    if isinstance(value, list):
        return [_cast(entry, dtype) for entry in value]
    floating = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value
