"""Samples become a batch: padded, one sample in a row, or packed, several in a row."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError
from mmrender.training._torch import torch
from mmrender.training.aligned import check_samples, placed_experts
from mmrender.training.batch import PaddingSide, Rows, Segment, TrainingBatch
from mmrender.training.families import ModelFamily
from mmrender.training.fields import Fields, collate_fields
from mmrender.training.mm_kwargs import name_of
from mmrender.training.padding import check_multiple
from mmrender.training.placing import placed_items
from mmrender.training.positions import mrope_position_ids
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
        samples: What to train on. Those in no row still say, where all rows are empty, which of advantages,
            rewards and router choices the batch has.
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
        BatchError: There is no sample and no row; samples differ in what they hold; something is not aligned
            to their tokens; placeholders and items do not match; an image's token stands outside of the
            placeholders; a row is longer than `width`; a sample stands in two rows; or an option has no such
            value.
    """
    names = [name_of(sample, index) for index, sample in enumerate(samples)]
    packed = rows is not None
    rows = [[index] for index in range(len(samples))] if rows is None else rows
    _check_rows(rows, len(samples))
    _check_form(padding_side, multiple)
    layout = _Layout.of(samples, names, rows, width=width, multiple=multiple, side=padding_side)
    items = [[placed_items(samples[index], names[index]) for index in row] for row in rows]
    check_samples([(sample, span.sample_id) for _, span, sample in layout.places], family, pad_token_id)
    pin = torch.cuda.is_available() if pin_memory is None else pin_memory
    fields = collate_fields(items, family, dtype=dtype, pin_memory=pin, executor=executor)
    arrays = _arrays(
        layout, pad_token_id, layout.places[0][2] if layout.places else next(iter(samples), None)
    )
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
        logprobs=tensors.pop("logprobs", None),
        **tensors,
    )
    return batch if device is None else batch.to(device, non_blocking=pin)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each sample stands: its row, and its segment there.

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
        names: Sequence[str],
        rows: Sequence[Sequence[int]],
        *,
        width: int | None,
        multiple: int,
        side: PaddingSide,
    ) -> "_Layout":
        lengths = [sum(len(samples[index]) for index in row) for row in rows]
        full = _width(lengths, width, multiple)
        places: list[tuple[int, Segment, TrainingSample]] = []
        segments = []
        for row, (members, used) in enumerate(zip(rows, lengths, strict=True)):
            start = 0 if side == "right" else full - used
            own: list[Segment] = []
            for index in members:
                own.append(Segment(start, len(samples[index]), names[index]))
                places.append((row, own[-1], samples[index]))
                start = own[-1].stop
            segments.append(tuple(own))
        return cls(places, tuple(segments), full, side)


def _check_rows(rows: Sequence[Sequence[int]], count: int) -> None:
    if not rows:
        raise BatchError("a batch has one row or more", where="samples", got="none")
    seen: set[int] = set()
    for row, members in enumerate(rows):
        for index in members:
            if not 0 <= index < count or index in seen:
                problem = "a sample stands in two rows" if index in seen else "there is no such sample"
                expected = f"each of 0..{count - 1} once"
                raise BatchError(problem, where=f"rows[{row}]", expected=expected, got=str(index))
            seen.add(index)


def _check_form(padding_side: str, multiple: int) -> None:
    if padding_side not in ("left", "right"):
        raise BatchError(
            "rows are filled on one side",
            where="padding_side",
            expected="left or right",
            got=repr(padding_side),
        )
    check_multiple(multiple)


def _width(lengths: Sequence[int], width: int | None, multiple: int) -> int:
    longest = max(1, *lengths) if lengths else 1
    if width is not None and longest > width:
        raise BatchError(
            "a row is longer than the batch is wide",
            where=f"rows[{max(range(len(lengths)), key=lengths.__getitem__)}]",
            expected=f"at most {width} tokens",
            got=str(longest),
            remedy="Truncate its samples, or leave the width open",
        )
    return -(-(width or longest) // multiple) * multiple


def _arrays(layout: _Layout, pad_token_id: int, first: TrainingSample | None) -> dict[str, npt.NDArray[Any]]:
    """Return what is aligned to tokens, `(rows, width)`, router choices `(rows, width, layers, top_k)`.

    The first sample says which optional arrays there are, also where no sample is placed.
    """
    shape = (len(layout.segments), layout.width)
    out: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full(shape, pad_token_id, np.int64),
        "attention_mask": np.zeros(shape, np.bool_),
        "loss_mask": np.zeros(shape, np.bool_),
        "token_types": np.zeros(shape, np.int64),
    }
    given = [name for name in ("logprobs", "advantages", "rewards") if getattr(first, name, None) is not None]
    out |= {name: np.zeros(shape, np.float32) for name in given}
    for row, span, sample in layout.places:
        place = slice(span.start, span.stop)
        out["input_ids"][row, place] = sample.token_ids
        out["attention_mask"][row, place] = True
        out["token_types"][row, place] = sample.mm_token_type_ids
        for name in ("loss_mask", *given):
            out[name][row, place] = getattr(sample, name)
    for row, spans in enumerate(layout.segments):
        if not spans:
            out["attention_mask"][row, 0 if layout.side == "right" else -1] = True
    if first is not None and first.routed_experts is not None:
        out["routed_experts"] = placed_experts(layout.places, shape, first.routed_experts)
    return out


def _positions(
    types: npt.NDArray[np.int64],
    segments: Rows,
    fields: Fields,
    family: ModelFamily,
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
