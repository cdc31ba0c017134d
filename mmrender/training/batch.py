"""`TrainingBatch`: rows of tokens with everything aligned to them, and the images that belong to each row.

A row holds one sample and padding, or several packed samples. Images are rows of `TensorList`, so taking rows
takes their images along. A batch is never changed; slices are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from mmrender.errors import BatchError
from mmrender.training._torch import torch
from mmrender.training.families import ModelFamily
from mmrender.training.joining import joined_fields
from mmrender.training.padding import ALIGNED, check_multiple, filler_experts, padding_rows
from mmrender.training.tensor_list import TensorList, row_places

PaddingSide: TypeAlias = Literal["left", "right"]


class Segment(NamedTuple):
    """One sample's tokens in its row: `[start, start + length)`."""

    start: int
    length: int
    sample_id: str

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.length


Rows: TypeAlias = tuple[tuple[Segment, ...], ...]
"""The samples in each row."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Rows to train on. Built by `mmrender.training.collation`.

    A row without a segment is a padding row: a single pad token that is attended to, since attention and
    position functions of some models fail on rows without any, and no loss, image or placeholder.

    Attributes:
        family: What the model takes.
        pad_token_id: What fills rows.
        padding_side: Where it does.
        packed: Whether rows may hold several samples, kept apart by position ids instead of a mask.
        segments: The samples in each row.
        input_ids: int64 `(rows, width)`.
        attention_mask: bool `(rows, width)`: what is no padding.
        loss_mask: bool `(rows, width)`: tokens to train on, as targets of the token before them.
        logprobs: float32 `(rows, width)`: what the sampler said of each token, 0.0 where it sampled none;
            None where the samples have none.
        token_types: int64 `(rows, width)`: 0 text, 1 image, 2 video, from placeholder ranges.
        positions: int64 `(axes, rows, width)`: time, height and width for models with M-RoPE, else one axis.
        fields: Images and videos by keyword of the model.
        advantages: float32 `(rows, width)`, or None.
        rewards: As `advantages`.
        routed_experts: Integers `(rows, width, layers, top_k)`, or None. Where the engine gave no row (the
            last token of a sample, and padding) stand the experts 0 to top_k - 1.
    """

    family: ModelFamily
    pad_token_id: int
    padding_side: PaddingSide
    packed: bool
    segments: Rows
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor | None
    token_types: torch.Tensor
    positions: torch.Tensor
    fields: Mapping[str, TensorList] = field(default_factory=dict)
    advantages: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def width(self) -> int:
        """Tokens of a row, padding included."""
        return int(self.input_ids.shape[1])

    @property
    def sample_ids(self) -> list[str]:
        """Names of the samples, row by row."""
        return [segment.sample_id for row in self.segments for segment in row]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return sum(segment.length for row in self.segments for segment in row)

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sample, row by row."""
        return [segment.length for row in self.segments for segment in row]

    def cu_seqlens(self, row: int = 0) -> Any:
        """Return where the sequences of a row begin, and its width: int32 `(sequences + 1,)`.

        This is what variable-length attention kernels take. Padding counts as a sequence of its own.
        """
        bounds = {0, self.width}
        for segment in self.segments[row]:
            bounds |= {segment.start, segment.stop}
        return torch.tensor(sorted(bounds), dtype=torch.int32, device=self.input_ids.device)

    def model_inputs(self, *, mask_dtype: Any = None, kept_apart: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward; see `mmrender.training.inputs`."""
        from mmrender.training.inputs import model_inputs

        return model_inputs(self, mask_dtype=mask_dtype, kept_apart=kept_apart)

    def split(self, values: Any) -> list[Any]:
        """Cut a tensor `(rows, width, ...)`, such as losses, into one view `(tokens, ...)` for each sample.

        Raises:
            BatchError: The tensor is not aligned to the batch.
        """
        if tuple(values.shape[:2]) != (len(self), self.width):
            raise BatchError(
                "a tensor is not aligned to the batch",
                where="values",
                expected=f"{[len(self), self.width]} first",
                got=str(list(values.shape)),
            )
        return [values[row, s.start : s.stop] for row, segments in enumerate(self.segments) for s in segments]

    def rows(self, start: int, stop: int) -> TrainingBatch:
        """Return the rows `[start, stop)` as views."""
        taken = slice(start, stop)
        return self._taken(self.segments[taken], lambda t, dim: t[taken] if dim == 0 else t[:, taken], taken)

    def select(self, indices: Sequence[int]) -> TrainingBatch:
        """Return the rows of these indices, in their order; a copy.

        Raises:
            BatchError: An index is no integer, such as one of a mask.
            IndexError: There is no such row.
        """
        places = row_places(indices, len(self))
        gather = torch.tensor(places, dtype=torch.int64, device=self.input_ids.device)
        segments = tuple(self.segments[place] for place in places)
        return self._taken(segments, lambda t, dim: t.index_select(dim, gather), places)

    def with_padding_rows(self, count: int) -> TrainingBatch:
        """Return the batch with that many padding rows after its own."""
        if count <= 0:
            return self
        return TrainingBatch.cat([self, padding_rows(self, count)])

    def chunk(self, parts: int) -> list[TrainingBatch]:
        """Cut into that many batches of equal numbers of rows, one for each data-parallel rank.

        Padding rows fill up the last ones.

        Raises:
            BatchError: `parts` is not positive.
        """
        if parts < 1:
            raise BatchError("a batch is cut into one part or more", where="parts", got=str(parts))
        size = -(-len(self) // parts)
        whole = self.with_padding_rows(size * parts - len(self))
        return [whole.rows(size * part, size * (part + 1)) for part in range(parts)]

    def micro_batches(self, max_tokens: int) -> list[TrainingBatch]:
        """Cut into batches of at most `max_tokens` tokens, padding included; rows of like length share one.

        Raises:
            BatchError: A row is longer.
        """
        lengths = [self._used(row) for row in range(len(self))]
        order = sorted(range(len(self)), key=lambda row: (-lengths[row], row))
        if order and lengths[order[0]] > max_tokens:
            raise BatchError(
                "a row does not fit a micro-batch, and samples are not split",
                where=f"row {order[0]}",
                expected=f"at most {max_tokens} tokens",
                got=str(lengths[order[0]]),
            )
        batches, start = [], 0
        while start < len(order):
            count = max(1, max_tokens // max(1, lengths[order[start]]))
            batches.append(self.select(sorted(order[start : start + count])).trim())
            start += count
        return batches

    def trim(self, multiple: int = 1) -> TrainingBatch:
        """Cut off the columns that are padding in every row; the width stays a multiple of `multiple`.

        Raises:
            BatchError: `multiple` is not positive.
        """
        check_multiple(multiple)
        used = max((self._used(row) for row in range(len(self))), default=0)
        width = min(self.width, -(-used // multiple) * multiple)
        cut = slice(0, width) if self.padding_side == "right" else slice(self.width - width, self.width)
        trimmed = self._map(lambda t, dim: t[:, cut] if dim == 0 else t[:, :, cut], self.fields)
        return replace(trimmed, segments=_shifted(self.segments, -cut.start))

    def widened(self, width: int) -> TrainingBatch:
        """Return the rows filled up to `width` tokens."""
        extra = width - self.width
        if extra <= 0:
            return self
        right = self.padding_side == "right"
        ends = (0, extra) if right else (extra, 0)
        pad = torch.nn.functional.pad
        changed: dict[str, Any] = {
            name: pad(getattr(self, name), ends, value=fill)
            for name, fill in {**ALIGNED, "input_ids": self.pad_token_id, "positions": 0}.items()
            if getattr(self, name) is not None
        }
        experts = self.routed_experts
        if experts is not None:
            filler = filler_experts(experts).expand(len(self), extra, *experts.shape[2:])
            changed["routed_experts"] = torch.cat([experts, filler] if right else [filler, experts], dim=1)
        return replace(self, **changed, segments=_shifted(self.segments, 0 if right else extra))

    @staticmethod
    def cat(batches: Sequence[TrainingBatch]) -> TrainingBatch:
        """Return all rows, filled up to the widest; batches with images and without may be mixed.

        Raises:
            BatchError: There is no batch, or they differ in family, padding, packing, optional tensors or
                the trailing dimensions of their images.
        """
        if not batches:
            raise BatchError("no batches to join", where="batches")
        first = batches[0]
        for index, batch in enumerate(batches):
            for name in ("family", "pad_token_id", "padding_side", "packed"):
                if getattr(batch, name) != getattr(first, name):
                    raise _differing(index, name, getattr(first, name), getattr(batch, name))
            for name in ("logprobs", "advantages", "rewards", "routed_experts"):
                given = [getattr(one, name) is not None for one in (first, batch)]
                if given[0] != given[1]:
                    raise _differing(index, name, *("given" if one else "none" for one in given))
        width = max(batch.width for batch in batches)
        wide = [batch.widened(width) for batch in batches]
        joined = {
            name: torch.cat([getattr(batch, name) for batch in wide], dim=1 if name == "positions" else 0)
            for name in first._tensors()
        }
        fields = joined_fields(
            [batch.fields for batch in batches], [len(batch) for batch in batches], first.family
        )
        segments = tuple(row for batch in wide for row in batch.segments)
        return replace(first, segments=segments, fields=fields, **joined)

    def to(self, device: Any = None, dtype: Any = None, *, non_blocking: bool = False) -> TrainingBatch:
        """Return the batch on a device, with pixels in a dtype. What is aligned to tokens keeps its dtype."""
        fields = {
            name: rows.to(device, dtype, non_blocking=non_blocking) for name, rows in self.fields.items()
        }
        # Not `or`: a device may be given by number, and the first one is 0.
        return self._map(
            lambda t, _: t.to(device=t.device if device is None else device, non_blocking=non_blocking),
            fields,
        )

    def pin_memory(self) -> TrainingBatch:
        """Return the batch in page-locked memory, as a data loader of torch asks for."""
        fields = {name: rows.pin_memory() for name, rows in self.fields.items()}
        return self._map(lambda t, _: t.pin_memory(), fields)

    def _tensors(self) -> Iterator[str]:
        for name in ("input_ids", *ALIGNED, "positions", "routed_experts"):
            if getattr(self, name) is not None:
                yield name

    def _map(self, change: Callable[[Any, int], Any], fields: Mapping[str, TensorList]) -> TrainingBatch:
        """Change each tensor, given with the dimension of its rows."""
        changed = {
            name: change(getattr(self, name), 1 if name == "positions" else 0) for name in self._tensors()
        }
        return replace(self, fields=fields, **changed)

    def _taken(
        self, segments: Rows, take: Callable[[Any, int], Any], places: slice | list[int]
    ) -> TrainingBatch:
        fields = {name: rows[places] for name, rows in self.fields.items()}
        return replace(self._map(take, fields), segments=segments)

    def _used(self, row: int) -> int:
        """Columns that a row needs."""
        if not self.segments[row]:
            return 1
        right = self.padding_side == "right"
        return self.segments[row][-1].stop if right else self.width - self.segments[row][0].start


def _shifted(rows: Rows, by: int) -> Rows:
    return tuple(tuple(segment._replace(start=segment.start + by) for segment in row) for row in rows)


def _differing(index: int, name: str, expected: Any, got: Any) -> BatchError:
    return BatchError(
        "batches differ", where=f"batches[{index}].{name}", expected=str(expected)[:200], got=str(got)[:200]
    )
