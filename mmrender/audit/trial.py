"""Variations, and changes of a sample in one respect.

A variation is one way in which the sampler may have differed from the trainer. Its trials apply it to one
image, to all images or to the whole rollout. If the trainer's model then produces the sampler's numbers, and
under no other variation, the cause is found.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Comparison, Decode, Float32Array, sampled_runs
from mmrender.audit.trainer import InputChange, ModelChange, TrainerModel
from mmrender.caching import cached_property
from mmrender.media.levels import cast
from mmrender.sidecar import Framework, MediaItem, MediaSpan, MultiModalData, TensorDtype
from mmrender.trajectory.sample import TrainingSample

PixelChange: TypeAlias = Callable[[Float32Array, tuple[int, ...]], Float32Array]
"""New pixels from old ones and the item's grid."""
Weights: TypeAlias = Mapping[str, Any]
"""Tensors by the names of the model's parameters, or of some of them."""
Edit: TypeAlias = tuple[int, int, "Sequence[int] | TrainingSample"]
"""Start and end of a part of a sample, and its replacement."""

_SECTIONS: Final = 30


class Trial(NamedTuple):
    """One change, and its statement if it fits.

    Attributes:
        statement: The finding if it fits.
        sample: The changed sample, with the sampler's log-probabilities of its loss mask; None for unchanged.
        inputs: Change of the model's inputs.
        model: Change of the model.
        image: Index of the image it is about.
        token: Index of the token it is about, in the trainer's sample.
        since: Index of the first token whose log-probability may change.
        until: Index after the last token that it must explain; None for all.
        fitted: Number of the sampler's numbers that were used to find it.
    """

    statement: str
    sample: TrainingSample | None = None
    inputs: InputChange | None = None
    model: ModelChange | None = None
    image: int | None = None
    token: int | None = None
    since: int = 0
    until: int | None = None
    fitted: int = 0


@dataclass(frozen=True)
class Case:
    """One sample that differs, and all data that may help to explain it.

    Attributes:
        compared: Sampler against trainer.
        departure: Index into `compared.positions` of the first token that differs.
        trainer: The model.
        tolerance: In nats. Smaller differences are arithmetic.
        peers: Comparisons of all other samples.
        others: Items that an image may have been mistaken for.
        decode: Text of token ids.
        sources: Images as they were before processing, by identity of their items.
        weights: Other weights that may have sampled, by name.
        alternatives: The sample as something else would have built it, by name.
    """

    compared: Comparison
    departure: int
    trainer: TrainerModel
    tolerance: float
    peers: Sequence[Comparison] = ()
    others: Sequence[MediaItem] = ()
    decode: Decode | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Weights] = field(default_factory=dict)
    alternatives: Mapping[str, TrainingSample] = field(default_factory=dict)

    @property
    def sample(self) -> TrainingSample:
        """The sample as the trainer has it."""
        return self.compared.sample

    @cached_property
    def position(self) -> int:
        """Index of the first token that differs."""
        return int(self.compared.positions[self.departure])

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The completions, as runs `[start, stop)` of sampled tokens."""
        return sampled_runs(self.sample.loss_mask)

    @cached_property
    def departing_runs(self) -> list[int]:
        """Indices of the completions with a token that differs."""
        beyond = self.compared.positions[self.compared.beyond(self.tolerance)]
        return [
            number
            for number, (start, stop) in enumerate(self.runs)
            if ((beyond >= start) & (beyond < stop)).any()
        ]

    @cached_property
    def suspects(self) -> list[MediaSpan]:
        """Images that may be at fault. Those that the first differing token was the first to see come first.

        An image is left out if several tokens that saw it agree before that token.
        """
        new = self.compared.suspects(self.departure)
        seen = [span for span in self.sample.media_spans if span.start < self.position and span not in new]
        agreeing = self.compared.positions[: self.departure]
        doubtful = [span for span in seen if int((agreeing > span.start).sum()) <= 3]
        return [*new, *doubtful]

    @cached_property
    def logits(self) -> Any:
        """Logits at the sampled tokens of the completions that differ, `rows` of them: float32."""
        return self.trainer.logits_at(self.sample, self.compared.positions[self.rows]).float()

    @cached_property
    def everything(self) -> Float32Array:
        """The trainer's log-probability of every token, of the prompt's too; 0.0 for the first."""
        whole = replace(self.sample, loss_mask=np.ones(len(self.sample), np.bool_))
        return np.append(np.float32(0), self.trainer.sampled_logprobs(whole)[1:])

    @cached_property
    def rows(self) -> npt.NDArray[np.intp]:
        """Indices into `compared.positions` of the tokens that `logits` are of, some hundred at most."""
        positions = self.compared.positions
        held = np.zeros(len(positions), np.bool_)
        for number in self.departing_runs:
            start, stop = self.runs[number]
            held |= (positions >= start) & (positions < stop)
        return np.flatnonzero(held)[:_MOST_ROWS]


_MOST_ROWS = 256
"""Rows of logits that are kept: 150 MB for a vocabulary of 150,000."""


@dataclass(frozen=True)
class Variation:
    """A kind of difference between sampler and trainer.

    Attributes:
        name: Names it in findings.
        cause: Its kind of cause.
        about: Its description, for the documentation.
        trials: Changes to try for a case.
    """

    name: str
    cause: Cause
    about: str
    trials: Callable[[Case], Iterable[Trial]]


class ChangedItem:
    """A media item whose pixels are changed after it made them, and its grid if one is given."""

    def __init__(
        self, item: MediaItem, change: PixelChange, *, grid: tuple[int, int, int] | None = None
    ) -> None:
        self.item, self.change = item, change
        # No real item has this identity, so the changed pixels are taken for no other item's.
        self.identity = f"{item.identity}-changed-{id(change):x}"
        self.modality, self.size, self.grid = item.modality, item.size, grid or item.grid
        self.expansion, self.nbytes = item.expansion, item.nbytes

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Return the item's tensors with the pixels changed."""
        tensors = dict(self.item.tensors("float32"))
        name = next(key for key in ("pixel_values", "pixel_values_videos") if key in tensors)
        pixels = np.ascontiguousarray(self.change(tensors[name], self.item.grid), np.float32)
        tensors[name] = cast(pixels, dtype)
        if self.grid != self.item.grid:
            tensors[f"{self.modality}_grid_thw"] = np.array([self.grid], np.int64)
        if framework == "numpy":
            return tensors
        import torch

        out = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}
        if dtype == "bfloat16":
            out[name] = out[name].view(torch.bfloat16)
        return out


def with_items(sample: TrainingSample, items: Iterable[tuple[MediaSpan, MediaItem]]) -> TrainingSample:
    """Return a sample whose spans hold other items of as many tokens."""
    # Spans are compared by place: items need not be hashable.
    given = {span.start: item for span, item in items}
    entries = [(one.range, given.get(one.start, one.item)) for one in sample.media_spans]
    return replace(sample, multi_modal_data=MultiModalData.of(entries))


def part(sample: TrainingSample, start: int, stop: int, *, sampled: bool = True) -> TrainingSample:
    """Return the tokens `[start, stop)` with the media that begin there. Prompt tokens unless `sampled`."""
    entries = [
        (span.range.shifted(-start), span.item) for span in sample.media_spans if start <= span.start < stop
    ]
    numbers = None if sample.logprobs is None else sample.logprobs[start:stop]
    if not sampled or numbers is None:
        return replace(plain(sample.token_ids[start:stop]), multi_modal_data=MultiModalData.of(entries))
    own, mask = sample.token_ids[start:stop], sample.loss_mask[start:stop]
    return TrainingSample(own, mask, numbers, MultiModalData.of(entries))


def plain(ids: Sequence[int] | npt.NDArray[Any]) -> TrainingSample:
    """Return prompt tokens without media."""
    tokens = np.asarray(ids, np.int32)
    return TrainingSample(tokens, np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32))


def joined(parts: Iterable[TrainingSample], sample: TrainingSample) -> TrainingSample:
    """Return one sample of several parts, under the name of `sample`."""
    held = list(parts)
    offsets = np.cumsum([0, *map(len, held)])
    entries = [
        (place.shifted(int(offset)), item)
        for one, offset in zip(held, offsets, strict=False)
        for modality, items in one.multi_modal_data.mm_items.items()
        for place, item in zip(one.multi_modal_data.mm_placeholders[modality], items, strict=True)
    ]
    return TrainingSample(
        np.concatenate([one.token_ids for one in held]),
        np.concatenate([one.loss_mask for one in held]),
        np.concatenate([one.logprobs for one in held if one.logprobs is not None]),
        MultiModalData.of(sorted(entries, key=lambda entry: entry[0].offset)),
        sample_id=sample.sample_id,
    )


def edited(sample: TrainingSample, edits: Iterable[Edit]) -> TrainingSample:
    """Return a sample with parts replaced by other prompt tokens, or by parts of samples. Edits rise."""
    parts, done = [], 0
    for start, stop, new in edits:
        parts += [part(sample, done, start), new if isinstance(new, TrainingSample) else plain(new)]
        done = stop
    return joined([*parts, part(sample, done, len(sample))], sample)


def with_sampled(
    sample: TrainingSample, start: int, ids: Sequence[int] | npt.NDArray[Any], *, stop: int = 0
) -> TrainingSample:
    """Return a sample with the sampled tokens from `start` on replaced by `ids`.

    Tokens after these and before `stop` are unknown, and leave the loss mask.
    """
    tokens, mask = sample.token_ids.copy(), sample.loss_mask.copy()
    tokens[start : start + len(ids)] = ids
    mask[start + len(ids) : stop] = False
    return replace(sample, token_ids=tokens, loss_mask=mask)


def scopes(case: Case) -> Iterator[tuple[list[tuple[int, int]], str]]:
    """Yield the completions that a change may be limited to, and their name."""
    if len(case.runs) == 1:
        yield case.runs, "the completion"
        return
    yield case.runs, "all completions"
    for number in case.departing_runs:
        yield [case.runs[number]], f"completion {number}"


def least(loss: Callable[[float], float], low: float, high: float, *, points: int, enough: float) -> float:
    """Return the minimum of a function of one positive number between two bounds.

    A grid of `points`, then golden sections around the best of them. If its loss is not below `enough`, that
    point is returned.
    """
    grid = np.linspace(np.log(low), np.log(high), points)
    losses = [loss(float(np.exp(at))) for at in grid]
    best = int(np.argmin(losses))
    left, right = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, points - 1)])
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(_SECTIONS if losses[best] < enough else 0):
        one, two = right - ratio * (right - left), left + ratio * (right - left)
        left, right = (left, two) if loss(float(np.exp(one))) < loss(float(np.exp(two))) else (one, right)
    return float(np.exp((left + right) / 2 if losses[best] < enough else grid[best]))
