"""The model's keyword arguments for images: from samples, from vLLM's reply, and from items by reference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from mmcodecs import CodecError
from mmrender.errors import BatchError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.levels import PixelArithmetic
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import MediaProcessor
from mmrender.media.vllm_items import FieldElem, FlatField, decode_mm_kwargs_item, join_items
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, Repeat
from mmrender.training.families import ModelFamily
from mmrender.training.fields import ExpandOptions, collate_fields, media_of, values_of_levels
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample


def collate_mm_kwargs(
    samples: Sequence[TrainingSample],
    family: ModelFamily,
    *,
    rows: Sequence[Sequence[int]] | None = None,
    **options: Unpack[ExpandOptions],
) -> dict[str, Any]:
    """Return the images of samples as the keyword arguments of their model, each distinct one expanded once.

    Args:
        samples: Their items are taken in the order of their tokens.
        family: The rules by which tensors are joined.
        rows: Indices of the samples in each row of the batch. By default each sample is a row. Makes a
            difference only for families whose tensors have a row per text, such as Idefics3.
        **options: See `ExpandOptions`.

    Returns:
        Such as `pixel_values` `(patches, features)` and `image_grid_thw` int64 `(images, 3)`, empty without
        images. Raises as `collate`.
    """
    rows = [[index] for index in range(len(samples))] if rows is None else rows
    by_row = [[media_of(samples, index) for index in row] for row in rows]
    fields = collate_fields(by_row, family, **options)
    if options.get("device") is not None:
        fields = {name: rows.to(options["device"]) for name, rows in fields.items()}
    return family.model_kwargs(fields)


_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


def decode_mm_kwargs(
    multi_modal_kwargs: Mapping[str, Sequence[str | None]],
    *,
    dtype: Any = None,
    arithmetic: PixelArithmetic | None = None,
    check_finite: bool = False,
) -> dict[str, Any]:
    """Decode the items of a prompt and join them as vLLM's engine does.

    Args:
        multi_modal_kwargs: Base64 items by modality, the `kwargs_data` of vLLM's reply.
        dtype: Of floating tensors; None keeps theirs. Integers always keep theirs.
        arithmetic: Normalises pixels that come as levels from 0 to 255, which vLLM sends since 0.28 and
            normalises itself unless it runs with `--no-mm-device-do-normalize`. A `PatchItem` of the same
            processor has it.
        check_finite: Whether to refuse floating values that are infinite or not a number, at the cost of a
            pass over them.

    Returns:
        All fields of all modalities as torch tensors. A lone item's tensors are views of its message.

    Raises:
        BatchError: An entry is None (vLLM sends the hash alone if it assumes that the receiver has it) or not
            an item, the items of a modality cannot be joined, two modalities have one field, patches come
            without a grid or with grids of another number of patches, pixels are levels and `arithmetic` is
            None, without which a model would misread them, a flat field names rows that the item does not
            have, or a value is not finite and `check_finite` is set.
    """
    out: dict[str, Any] = {}
    for modality, entries in multi_modal_kwargs.items():
        where = f"kwargs_data.{modality}"
        for name, value in _joined(entries, where).items():
            if name in out:
                raise BatchError("two modalities have one field", where=where, got=name)
            if check_finite:
                _check_finite(value, f"{where}.{name}")
            out[name] = _cast(_normalised(name, value, arithmetic), dtype)
    return out


def _joined(entries: Sequence[str | None], where: str) -> dict[str, Any]:
    """Decode the items of one modality, and join them."""
    items: list[Mapping[str, FieldElem]] = []
    for index, entry in enumerate(entries):
        at = f"{where}[{index}]"
        if entry is None:
            remedy = "Ask the server to process the image again, or turn its cache of processed images off"
            raise BatchError("an item comes as a hash, without data", where=at, remedy=remedy)
        try:
            items.append(decode_mm_kwargs_item(entry, framework="torch"))
        except CodecError as error:
            raise BatchError("an item cannot be decoded", where=at, got=str(error)) from error
    for index, item in enumerate(items):
        for name, elem in item.items():
            _check_slices(elem, f"{where}[{index}].{name}")
    try:
        parts, joined = [join_items([item]) for item in items], join_items(items)
    except CodecError as error:
        raise BatchError("items cannot be joined", where=where, got=str(error)) from error
    for index, part in enumerate(parts):
        _check_grids(part, f"{where}[{index}]")
    _check_grids(joined, where)
    return joined


def _check_slices(elem: FieldElem, where: str) -> None:
    """Check that the parts of the whole that an item names are as long as its data."""
    data, kind = elem.data, elem.field
    if not isinstance(kind, FlatField) or not isinstance(data, torch.Tensor):
        return
    parts = kind.slices if isinstance(kind.slices, tuple) else (kind.slices,)
    along = [part[kind.dim] if isinstance(part, tuple) and len(part) > kind.dim else part for part in parts]
    lengths = [
        part.stop - part.start
        for part in along
        if isinstance(part, slice) and None not in (part.start, part.stop)
    ]
    rows = data.shape[kind.dim] if kind.dim < data.ndim else 0
    # The item's own slice is unknown: slices cover the batch that it was made in.
    if lengths and len(lengths) == len(along) and rows not in lengths:
        raise BatchError(
            "an item does not have the rows that its slices name",
            where=where,
            expected=" or ".join(map(str, lengths[:4])),
            got=str(rows),
        )


def _check_finite(value: Any, where: str) -> None:
    for index, one in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(one, torch.Tensor) and one.is_floating_point() and not bool(torch.isfinite(one).all()):
            row = int((~torch.isfinite(one.reshape(len(one), -1))).any(1).nonzero()[0])
            problem = "a value is infinite or not a number"
            raise BatchError(
                problem, where=f"{where}[{index}]" if isinstance(value, list) else where, got=f"row {row}"
            )


def _check_grids(joined: Mapping[str, Any], where: str) -> None:
    """Check that flat patches come with grids, and that these cover them."""
    for name, grid_name in _GRIDS.items():
        if getattr(joined.get(name), "ndim", 0) != 2:
            continue
        grids: Any = joined.get(grid_name)
        patches, claimed = len(joined[name]), None
        if getattr(grids, "ndim", 0) == 2:
            # Sides are held to the patches first: the product of huge or negative ones may be anything.
            fits = bool(((grids >= 1) & (grids <= max(1, patches))).all())
            claimed = int(grids.prod(1).sum()) if fits else -1
        if claimed != patches:
            raise BatchError(
                "the grids do not fit the patches",
                where=f"{where}.{grid_name}",
                expected=f"(t, h, w) of each item, {patches} patches in all",
                got=str(grids)[:80] if claimed in (None, -1) else f"{claimed} patches",
            )


def _normalised(name: str, value: Any, arithmetic: PixelArithmetic | None) -> Any:
    """Return levels of patches as the model takes pixels, and other values unchanged."""
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
    levels = value.reshape(len(value), 3, -1)
    return values_of_levels(levels, arithmetic, torch.float32).reshape(value.shape)


def _cast(value: Any, dtype: Any) -> Any:
    if isinstance(value, list):
        return [_cast(entry, dtype) for entry in value]
    floating = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def resolve_references(
    samples: Sequence[TrainingSample], processor: MediaProcessor, policy: MediaPolicy | None = None
) -> list[TrainingSample]:
    """Return the samples with each reference loaded and processed again, each distinct one once.

    Args:
        samples: Those without references are returned as they are.
        processor: The model's, with the settings of the sampling side.
        policy: Limits on loading. See `MediaPolicy`.

    Raises:
        BatchError: An item is not as long as the placeholder that the server made for it.
        MediaError: A source cannot be loaded, or becomes another item than the sampler's.
        PlaceholderError: The placeholders of a sample do not fit its items or its tokens.
    """
    items: dict[tuple[str, int], MediaItem] = {}
    resolved = []
    for number, sample in enumerate(samples):
        name, spans = media_of(samples, number)
        entries = []
        for span in spans:
            item = span.item
            if isinstance(item, ReferenceItem):
                key = (item.identity, len(spans))
                if key not in items:
                    items[key] = item.resolve(processor, policy, num_images=len(spans))
                _check_length(item, items[key], span, f"{name}.mm_items[{span.modality!r}][{span.position}]")
                item = items[key]
            entries.append((span.range, item))
        has_references = any(isinstance(span.item, ReferenceItem) for span in spans)
        sidecar = MultiModalData.of(entries)
        resolved.append(replace(sample, multi_modal_data=sidecar) if has_references else sample)
    return resolved


def _check_length(reference: ReferenceItem, item: MediaItem, span: MediaSpan, where: str) -> None:
    repeats = [piece for piece in item.expansion if isinstance(piece, Repeat)]
    # Text in an expansion has a length that only a tokenizer knows.
    only_repeats = len(repeats) == len(item.expansion)
    length = sum(piece.count for piece in repeats) if only_repeats else reference.expected_length
    features = sum(piece.count for piece in repeats if piece.embeds)
    if (features, length) != (span.range.num_embeds, span.range.length):
        raise BatchError(
            "an image processed again is not as long as the server's placeholder",
            where=where,
            expected=f"{span.range.length} tokens, {span.range.num_embeds} of them for features",
            got=f"{length} and {features}",
            remedy="Server and trainer process images differently: compare their settings",
        )
