"""Samples become a batch: padded, one sample in a row, or packed, several in a row.

Samples may come from anywhere, so what a batch relies on is checked here, once: placeholders against items,
image tokens against placeholders, finite values, router choices, and that all samples have the same fields.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError
from mmrender.training.batch import OPTIONAL, PER_TOKEN, PaddingSide, TrainingBatch, check_multiple
from mmrender.training.families import ModelFamily
from mmrender.training.fields import Fields, collate_fields, media_of
from mmrender.training.positions import mrope_position_ids
from mmrender.training.segments import Rows, Segment
from mmrender.training.tensor_list import torch
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.sample import TrainingSample


def collate(
    samples: Sequence[TrainingSample],
    family: ModelFamily,
    *,
    pad_token_id: int,
    rows: Sequence[Sequence[int]] | None = None,
    padding_side: PaddingSide = "right",
    width: int | None = None,
    multiple: int = 1,
    dtype: Any = torch.float32,
    device: Any = None,
    pin_memory: bool | None = None,
    executor: Executor | None = None,
) -> TrainingBatch:
    """Build a batch; the images are expanded straight into it.

    Args:
        samples: Recorded conversations, or rollouts. Those in no row still say, where all rows are empty,
            which of log-probabilities, advantages, rewards and router choices the batch has.
        family: What the model takes.
        pad_token_id: What fills rows; not the token of an image.
        rows: Indices of the samples to pack into each row, as `first_fit_decreasing` gives them. An empty
            row becomes a padding row, and a sample in no row is left out. None puts each sample in a row of
            its own and builds a padded batch.
        padding_side: Where rows are filled.
        width: Tokens of a row; None for those of the longest.
        multiple: Makes the width a multiple of this.
        dtype: Of pixels: torch's float32, float16 or bfloat16.
        device: Where the batch goes.
        pin_memory: Whether to build it in page-locked memory; None for where CUDA is available.
        executor: Threads that share the expansion of images.

    Raises:
        BatchError: There is no sample and no row; samples differ in the fields they have; something is not
            aligned to their tokens; an image's token lies outside the placeholders; a row is longer than
            `width`; a sample is in two rows; or an option has no such value.
        PlaceholderError: The placeholders of a sample do not fit its items or its tokens.
    """
    packed = rows is not None
    rows = [[index] for index in range(len(samples))] if rows is None else rows
    _check_options(rows, len(samples), padding_side, multiple)
    media = [[media_of(samples, index) for index in row] for row in rows]
    layout = _Layout.of(samples, rows, width=width, multiple=multiple, side=padding_side)
    _check_samples(layout, family, pad_token_id)
    pin = torch.cuda.is_available() if pin_memory is None else pin_memory
    fields = collate_fields(media, family, dtype=dtype, pin_memory=pin, executor=executor)
    like = layout.places[0][2] if layout.places else next(iter(samples), None)
    arrays = _arrays(layout, pad_token_id, like)
    arrays["positions"] = _positions(arrays["token_types"], layout.segments, fields, family)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if pin:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    batch = TrainingBatch(
        family=family,
        pad_token_id=pad_token_id,
        padding_side=padding_side,
        packed=packed,
        segments=layout.segments,
        fields=fields,
        **tensors,
    )
    return batch if device is None else batch.to(device, non_blocking=pin)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The place of each sample: its row, and its segment there.

    Attributes:
        places: `(row, segment, sample)`.
        segments: The same, by row.
        width: Tokens of a row.
        side: Where rows are filled.
    """

    places: list[tuple[int, Segment, TrainingSample]]
    segments: Rows
    width: int
    side: PaddingSide

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainingSample],
        rows: Sequence[Sequence[int]],
        *,
        width: int | None,
        multiple: int,
        side: PaddingSide,
    ) -> "_Layout":
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
        places: list[tuple[int, Segment, TrainingSample]] = []
        segments = []
        for row, (members, used) in enumerate(zip(rows, lengths, strict=True)):
            start = 0 if side == "right" else full - used
            own: list[Segment] = []
            for index in members:
                sample = samples[index]
                name = sample.sample_id or f"samples[{index}]"
                own.append(Segment(start, len(sample), name, sample.weight_versions, sample.extra))
                places.append((row, own[-1], sample))
                start = own[-1].stop
            segments.append(tuple(own))
        return cls(places, tuple(segments), full, side)


def _check_options(rows: Sequence[Sequence[int]], count: int, padding_side: str, multiple: int) -> None:
    if not rows:
        raise BatchError("a batch has one row or more", where="samples", got="none")
    seen: set[int] = set()
    for row, members in enumerate(rows):
        for index in members:
            if not 0 <= index < count or index in seen:
                problem = "a sample is in two rows" if index in seen else "there is no such sample"
                expected = f"each of 0..{count - 1} once"
                raise BatchError(problem, where=f"rows[{row}]", expected=expected, got=str(index))
            seen.add(index)
    if padding_side not in ("left", "right"):
        raise BatchError(
            "rows are filled on one side",
            where="padding_side",
            expected="left or right",
            got=repr(padding_side),
        )
    check_multiple(multiple)


def _check_samples(layout: _Layout, family: ModelFamily, pad_token_id: int) -> None:
    """Check each sample, and that all have the same fields."""
    if pad_token_id in family.feature_token_ids.values():
        raise BatchError(
            "the pad token stands for images",
            where="pad_token_id",
            expected=f"none of {sorted(family.feature_token_ids.values())}",
            got=str(pad_token_id),
        )
    for _, segment, sample in layout.places:
        name = segment.sample_id
        if len(sample) == 0:
            raise BatchError("a sample has no token", where=name)
        if sample.loss_mask[0]:
            raise BatchError(
                "the first token of a sample has no token before it to be predicted from",
                where=f"{name}.loss_mask[0]",
                expected="False",
                got="True",
            )
        for key in ("logprobs", "advantages", "rewards"):
            values = getattr(sample, key)
            if values is not None and not np.isfinite(values).all():
                place = int(np.flatnonzero(~np.isfinite(values))[0])
                raise BatchError(
                    "a value is not finite",
                    where=f"{name}.{key}[{place}]",
                    expected="a number",
                    got=str(values[place]),
                )
        _check_feature_tokens(sample, name, family)
        _, first_segment, first = layout.places[0]
        for key in OPTIONAL:
            wanted, given = getattr(first, key) is not None, getattr(sample, key) is not None
            if wanted != given:
                raise BatchError(
                    "samples of one batch have the same fields",
                    where=f"{name}.{key}",
                    expected=f"{'some' if wanted else 'none'}, as {first_segment.sample_id} has",
                    got="some" if given else "none",
                )
        if sample.routed_experts is not None and first.routed_experts is not None:
            _check_experts(sample.routed_experts, first.routed_experts, len(sample), name)


def _check_feature_tokens(sample: TrainingSample, name: str, family: ModelFamily) -> None:
    """Check that tokens which stand for features are those of the placeholders, and no others.

    Models find the places of features by token id, so a pad token that was sampled or typed would take the
    features of an image, and shift those of all images after it.
    """
    feature_ids = family.feature_token_ids
    if not feature_ids:
        return
    types = sample.mm_token_type_ids
    stray = np.flatnonzero(np.isin(sample.token_ids, list(feature_ids.values())) & (types == 0))
    if len(stray):
        place = int(stray[0])
        raise BatchError(
            "a token that stands for images lies outside every placeholder",
            where=f"{name}.token_ids[{place}]",
            expected="such tokens within placeholders only",
            got=f"token {sample.token_ids[place]}, sampled or typed",
            remedy="Leave the sample out, or truncate it before this token: the model cannot take it as text",
        )
    if "image" not in feature_ids:
        return
    wrong = np.flatnonzero((types == 1) & (sample.token_ids != feature_ids["image"]))
    if len(wrong):
        place = int(wrong[0])
        raise BatchError(
            "a placeholder holds another token than the one that stands for images",
            where=f"{name}.token_ids[{place}]",
            expected=str(feature_ids["image"]),
            got=str(sample.token_ids[place]),
        )


def _check_experts(experts: RoutedExperts, first: RoutedExperts, length: int, name: str) -> None:
    if experts.start != 0 or experts.stop not in (length - 1, length):
        raise BatchError(
            "router choices do not cover the tokens",
            where=f"{name}.routed_experts",
            expected=f"rows for the tokens 0 to {length - 2} or {length - 1}",
            got=f"{experts.start} to {experts.stop - 1}",
        )
    if experts.shape[1:] != first.shape[1:]:
        raise BatchError(
            "router choices are of different models",
            where=f"{name}.routed_experts",
            expected=f"(layers, top_k) = {first.shape[1:]}, as the first sample has",
            got=str(experts.shape[1:]),
        )


def _arrays(layout: _Layout, pad_token_id: int, like: TrainingSample | None) -> dict[str, npt.NDArray[Any]]:
    """Return arrays aligned to tokens, `(rows, width)`, router choices `(rows, width, layers, top_k)`.

    `like` says which optional arrays there are, also where no sample is placed.
    """
    shape = (len(layout.segments), layout.width)
    given = [name for name in OPTIONAL if getattr(like, name, None) is not None]
    dtypes = {"attention_mask": np.bool_, "loss_mask": np.bool_, "token_types": np.int64}
    out: dict[str, npt.NDArray[Any]] = {
        name: np.full(shape, fill, dtypes.get(name, np.float32))
        for name, fill in PER_TOKEN.items()
        if name in dtypes or name in given
    }
    out["input_ids"] = np.full(shape, pad_token_id, np.int64)
    if like is not None and like.routed_experts is not None:
        experts = [sample.routed_experts for *_, sample in layout.places] or [like.routed_experts]
        narrow = all(one is None or one.dtype == np.uint8 for one in experts)
        _, layers, top_k = like.routed_experts.shape
        choices = np.arange(top_k, dtype=np.uint8 if narrow else np.int32)  # distinct, as a router's are
        out["routed_experts"] = np.broadcast_to(choices, (*shape, layers, top_k)).copy()
    for row, segment, sample in layout.places:
        place = slice(segment.start, segment.stop)
        out["input_ids"][row, place] = sample.token_ids
        out["attention_mask"][row, place] = True
        out["token_types"][row, place] = sample.mm_token_type_ids
        for name in ("loss_mask", *given):
            if name != "routed_experts":
                out[name][row, place] = getattr(sample, name)
        if sample.routed_experts is not None:
            data = sample.routed_experts.data
            out["routed_experts"][row, segment.start : segment.start + len(data)] = data
    for row, segments in enumerate(layout.segments):
        if not segments:
            out["attention_mask"][row, 0 if layout.side == "right" else -1] = True
    return out


def _positions(
    types: npt.NDArray[np.int64], segments: Rows, fields: Fields, family: ModelFamily
) -> npt.NDArray[np.int64]:
    spans = [[(segment.start, segment.length) for segment in row] for row in segments]
    if family.mrope is not None:
        given = {
            name: fields[name].values.numpy()
            for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            if name in fields
        }
        return mrope_position_ids(types, family.mrope, segments=spans, **given)
    out = np.zeros((1, *types.shape), np.int64)
    for row, row_spans in enumerate(spans):
        for start, length in row_spans:
            out[0, row, start : start + length] = np.arange(length)
    return out
