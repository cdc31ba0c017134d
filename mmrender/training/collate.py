"""Samples become a batch: padded, one sample in a row, or packed, several in a row.

Samples may come from anywhere, so everything that a batch relies on is checked here, once: placeholders
against items, image tokens against placeholders, finite values, router choices, and that all samples have the
same fields.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack, get_args

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError, PlaceholderError, check_count, check_option
from mmrender.media.processors.patches import time_steps
from mmrender.sidecar import MediaSpan, MultiModalData
from mmrender.training.batch import OPTIONAL, PER_TOKEN, PaddingSide, TrainingBatch
from mmrender.training.families import ModelFamily
from mmrender.training.fields import ExpandOptions, collate_fields, media_of, pins
from mmrender.training.positions import mrope_position_ids
from mmrender.training.segments import Rows, Segment, token_numbers
from mmrender.training.tensor_list import torch
from mmrender.trajectory.engine_data import check_allowed
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.step import are_finite

Places: TypeAlias = list[tuple[int, Segment, TrainingSample]]
"""Each sample with its row and its segment there."""


def collate(
    samples: Sequence[TrainingSample],
    family: ModelFamily,
    *,
    pad_token_id: int,
    rows: Sequence[Sequence[int]] | None = None,
    padding_side: PaddingSide = "right",
    width: int | None = None,
    multiple: int = 1,
    **options: Unpack[ExpandOptions],
) -> TrainingBatch:
    """Build a batch, with the images expanded straight into it.

    Args:
        samples: Recorded conversations, or rollouts. If all rows are empty, they still say which of
            log-probabilities, advantages, rewards and router choices the batch has.
        family: The model's inputs.
        pad_token_id: The token that fills rows. Not the token of an image.
        rows: Indices of the samples to pack into each row, such as from `first_fit_decreasing`. An empty row
            becomes a padding row, and a sample in no row is left out. None puts each sample in a row of its
            own and builds a padded batch.
        padding_side: The side on which rows are filled.
        width: Tokens of a row; None for the longest row's.
        multiple: Makes the width a multiple of this.
        **options: Dtype of images, and place of the batch. See `ExpandOptions`.

    Raises:
        BatchError: There is no sample and no row, samples differ in the fields they have, something is not
            aligned to their tokens, an image's token lies outside the placeholders, a row is longer than
            `width`, a sample is in two rows, the family refuses the layout or is not proved with such
            media, or an option has a wrong value.
        PlaceholderError: The placeholders of a sample do not fit its items or its tokens.
        TrajectoryError: A token is not among the tokens that could be sampled there.
    """
    check_option("padding_side", padding_side, get_args(PaddingSide), error=BatchError)
    check_count("multiple", multiple, error=BatchError)
    if pad_token_id in family.feature_token_ids.values():
        raise BatchError("the pad token marks images", where="pad_token_id", got=str(pad_token_id))
    packed = rows is not None
    family.check_layout("packed" if packed else padding_side)
    rows = [[index] for index in range(len(samples))] if rows is None else rows
    if not rows:
        raise BatchError("a batch has one row or more", where="samples", got="none")
    segments, full = _layout(samples, rows, width, multiple, padding_side)
    sidecars = [sample.multi_modal_data.mm_hashes for sample in samples]
    kinds = {kind for hashes in sidecars for kind in hashes if hashes[kind]}
    family.check_media(kinds)
    if len(kinds) > 1:
        samples = _of_one_kind(samples, family)
    places = [
        (row, segment, samples[index])
        for row, members in enumerate(rows)
        for segment, index in zip(segments[row], members, strict=True)
    ]
    media = [[media_of(samples, index) for index in row] for row in rows]
    for _, segment, sample in places:
        _check_sample(sample, segment.sample_id, family)
        _check_same_fields(sample, segment.sample_id, places[0])
    fields = collate_fields(media, family, **options)
    device, pin = options.get("device"), pins(options.get("pin_memory"))
    like = places[0][2] if places else next(iter(samples), None)
    arrays = _arrays(places, (len(rows), full), like)
    arrays["input_ids"][~arrays["attention_mask"]] = pad_token_id
    for row, members in enumerate(rows):
        if not members:
            arrays["attention_mask"][row, 0 if padding_side == "right" else -1] = True
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if family.mrope is None:
        tensors["positions"] = token_numbers(segments, tensors["input_ids"])[None]
    else:
        names = {name: name for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        names["video_second_per_grid"] = "second_per_grid_ts"  # Qwen's omni models call it so
        # Seconds of items of other classes are on the device, as their other floats.
        grids = {as_: fields[name].values.cpu().numpy() for name, as_ in names.items() if name in fields}
        bounds = [[(segment.start, segment.length) for segment in row] for row in segments]
        positions = mrope_position_ids(arrays["token_types"], family.mrope, segments=bounds, **grids)
        tensors["positions"] = torch.from_numpy(positions)
    if pin:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    batch = TrainingBatch(
        family=family,
        pad_token_id=pad_token_id,
        padding_side=padding_side,
        packed=packed,
        segments=segments,
        fields=fields,
        **tensors,
    )
    return batch if device is None else batch.to(device, non_blocking=pin)


def usable(
    samples: Sequence[TrainingSample], family: ModelFamily
) -> tuple[list[TrainingSample], dict[str, str]]:
    """Return the samples that a batch takes, and the reason against each other one, by its name.

    A token that was sampled in place of an image, a placeholder that does not fit, or a value that is not
    finite costs its own sample this way, and not the batch. Samples must still agree in their fields.
    """
    kept, left_out = [], {}
    for index, sample in enumerate(samples):
        name = sample.sample_id or f"samples[{index}]"
        try:
            media_of(samples, index)
            _check_sample(sample, name, family)
            kept.append(sample)
        except (BatchError, PlaceholderError) as error:
            left_out[name] = str(error)
    return kept, left_out


def _layout(
    samples: Sequence[TrainingSample],
    rows: Sequence[Sequence[int]],
    width: int | None,
    multiple: int,
    side: PaddingSide,
) -> tuple[Rows, int]:
    """Return the segments of each row, and the tokens of a row."""
    seen: set[int] = set()
    for row, members in enumerate(rows):
        for index in members:
            if not 0 <= index < len(samples) or index in seen:
                raise BatchError(
                    "a sample is in two rows" if index in seen else "there is no such sample",
                    where=f"rows[{row}]",
                    expected=f"each of 0..{len(samples) - 1} once",
                    got=str(index),
                )
            seen.add(index)
    lengths = [sum(len(samples[index]) for index in row) for row in rows]
    longest = max(1, *lengths)
    if width is not None and longest > width:
        raise BatchError(
            "a row is longer than the batch is wide",
            where=f"rows[{lengths.index(longest)}]",
            expected=f"at most {width} tokens",
            got=str(longest),
            remedy="Truncate its samples, or leave the width open",
        )
    full = -(-(width or longest) // multiple) * multiple
    layout = []
    for members, length in zip(rows, lengths, strict=True):
        start, segments = 0 if side == "right" else full - length, []
        for index in members:
            sample = samples[index]
            segments.append(
                Segment(
                    start=start,
                    length=len(sample),
                    sample_id=sample.sample_id or f"samples[{index}]",
                    weight_versions=sample.weight_versions,
                    allowed=sample.allowed,
                    extra=sample.extra,
                    prompt_length=int(sample.loss_mask.argmax()) if sample.loss_mask.any() else len(sample),
                )
            )
            start += len(sample)
        layout.append(tuple(segments))
    return tuple(layout), full


def _of_one_kind(samples: Sequence[TrainingSample], family: ModelFamily) -> Sequence[TrainingSample]:
    """Return samples with images and videos as images, one a time step, if the model finds both by one token.

    Such a model takes either images or videos in one forward, with the same result. See `PatchItem.steps`.
    """
    if not any(_has_videos_of_image_tokens(sample, family) for sample in samples):
        return samples
    converted = []
    for index, sample in enumerate(samples):
        name, spans = media_of(samples, index)
        images: list[MediaSpan] = []
        for span in spans:
            steps = [span] if span.modality != "video" else time_steps(span)
            if steps is None:
                raise BatchError(
                    f"{family.model_type} finds images and videos by the same token, and cannot tell them "
                    "apart in one forward",
                    where=f"{name}.{span.where}",
                    expected="frames with text between their time steps, which can go as images",
                    got=f"{len(span.range.embed_spans or ())} runs of {span.item!r}",
                    remedy="Put images and videos into different batches",
                )
            images += steps
        sidecar = MultiModalData.of((image.range, image.item) for image in images)
        converted.append(replace(sample, multi_modal_data=sidecar))
    return converted


def _has_videos_of_image_tokens(sample: TrainingSample, family: ModelFamily) -> bool:
    for place in sample.multi_modal_data.mm_placeholders.get("video", ())[:1]:
        token = sample.token_ids[place.offset : place.offset + place.length][place.is_embed][0]
        return bool(token == family.feature_token_ids.get("image"))
    return False


def _check_sample(sample: TrainingSample, name: str, family: ModelFamily) -> None:
    """Check everything about one sample that models rely on.

    Models find the places of features by token id, so a pad token that was sampled or typed would take the
    features of an image, and shift the features of all images after it.
    """
    types, ids = sample.mm_token_type_ids, sample.token_ids
    if len(ids) == 0:
        raise BatchError("a sample is without tokens", where=name)
    if family.max_sample_tokens is not None and len(ids) > family.max_sample_tokens:
        raise BatchError(
            f"beyond {family.max_sample_tokens} tokens a sample of {family.model_type} changes the logits of "
            "other samples of its batch, as rotary embeddings that follow the longest sample do",
            where=name,
            expected=f"at most {family.max_sample_tokens} tokens",
            got=str(len(ids)),
            remedy="Truncate the sample, or leave it out, as `usable` does",
        )
    if sample.loss_mask[0]:
        problem = "nothing predicts the first token of a sample"
        raise BatchError(problem, where=f"{name}.loss_mask[0]", expected="False", got="True")
    for span in sample.media_spans:
        if (trained := np.flatnonzero(sample.loss_mask[span.start : span.stop])).size:
            raise BatchError(
                f"a token of {span.where} is trained on, but models do not sample it",
                where=f"{name}.loss_mask[{span.start + int(trained[0])}]",
                expected="False for every token of a placeholder",
                got="True",
            )
    for key in ("logprobs", "advantages", "rewards"):
        values = getattr(sample, key)
        if values is not None and not (finite := are_finite(values)).all():
            place = int(finite.argmin())
            raise BatchError("a value is not finite", where=f"{name}.{key}[{place}]", got=str(values[place]))
    if sample.allowed:
        check_allowed(sample.allowed, ids, f"{name}.allowed")
    experts = sample.routed_experts
    if experts is not None and (experts.start != 0 or experts.stop not in (len(ids) - 1, len(ids))):
        raise BatchError(
            "router choices do not cover the tokens",
            where=f"{name}.routed_experts",
            expected=f"rows for the tokens 0 to {len(ids) - 2} or {len(ids) - 1}",
            got=f"{experts.start} to {experts.stop - 1}",
        )
    if family.prefix and np.count_nonzero(np.diff(sample.loss_mask)) > 1:
        raise BatchError(
            "a prompt of this family sees itself in both directions, so a sample has only one",
            where=f"{name}.loss_mask",
            got="tokens without a loss between tokens with one",
            remedy="Make a sample of each step, such as build_training_sample(completion_start=...)",
        )
    features = list(family.feature_token_ids.values())
    if features and (stray := np.flatnonzero(np.isin(ids, features) & (types == 0))).size:
        raise BatchError(
            "a feature token of images lies outside every placeholder",
            where=f"{name}.token_ids[{stray[0]}]",
            expected="feature tokens within placeholders only",
            got=f"token {ids[stray[0]]}, sampled or typed",
            remedy="Leave the sample out, as `usable` does, or truncate it before this token: "
            "the model cannot take it as text",
        )
    image = family.feature_token_ids.get("image")
    if image is not None and (wrong := np.flatnonzero((types == 1) & (ids != image))).size:
        raise BatchError(
            "a placeholder has another token than the feature token of images",
            where=f"{name}.token_ids[{wrong[0]}]",
            expected=str(image),
            got=str(ids[wrong[0]]),
        )


def _check_same_fields(
    sample: TrainingSample, name: str, reference: tuple[int, Segment, TrainingSample]
) -> None:
    """Check that a sample has the fields of the first sample of the batch."""
    _, segment, first = reference
    for key in OPTIONAL:
        expected, got = ("none" if getattr(one, key) is None else "some" for one in (first, sample))
        if got != expected:
            raise BatchError(
                "samples of one batch have the same fields",
                where=f"{name}.{key}",
                expected=f"{expected}, as {segment.sample_id} has",
                got=got,
            )
    experts, expected_experts = sample.routed_experts, first.routed_experts
    if experts is None or expected_experts is None:
        return
    if experts.shape[1:] != expected_experts.shape[1:]:
        raise BatchError(
            "router choices are of different models",
            where=f"{name}.routed_experts",
            expected=f"(layers, top_k) = {expected_experts.shape[1:]}, as the first sample has",
            got=str(experts.shape[1:]),
        )


def _arrays(
    places: Places, shape: tuple[int, int], like: TrainingSample | None
) -> dict[str, npt.NDArray[Any]]:
    """Return arrays aligned to tokens, `(rows, width)`, router choices `(rows, width, layers, top_k)`.

    They are the optional arrays of `like`, also if no sample is placed.
    """
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.full(shape, fill, np.float32 if isinstance(fill, float) else None)
        for name, fill in {**PER_TOKEN, "input_ids": 0}.items()
        if name not in OPTIONAL or getattr(like, name, None) is not None
    }
    if like is not None and like.routed_experts is not None:
        experts = [sample.routed_experts for *_, sample in places] or [like.routed_experts]
        narrow = all(one is None or one.dtype == np.uint8 for one in experts)
        _, layers, top_k = like.routed_experts.shape
        choices = np.arange(top_k, dtype=np.uint8 if narrow else np.int32)  # distinct, as a router's are
        arrays["routed_experts"] = np.broadcast_to(choices, (*shape, layers, top_k)).copy()
    named = arrays.keys() - {"input_ids", "attention_mask", "token_types"}
    for row, segment, sample in places:
        place = slice(segment.start, segment.start + segment.length)
        arrays["input_ids"][row, place] = sample.token_ids
        arrays["attention_mask"][row, place] = True
        arrays["token_types"][row, place] = sample.mm_token_type_ids
        for name in named:
            values: Any = getattr(sample, name)
            values = values.data if name == "routed_experts" else values
            arrays[name][row, segment.start : segment.start + len(values)] = values
    return arrays
