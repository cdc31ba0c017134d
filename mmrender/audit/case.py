"""One sample that differs, and the trials that may explain it.

A trial is a substitution: the trainer's program runs once more with one intermediate of the sampler's, or
with one setting. If it then produces the sampler's numbers, the difference is in that stage.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Comparison, Decode, Float32Array, sampled_runs
from mmrender.audit.trainer import InputChange, ModelChange, TrainerModel
from mmrender.caching import cached_property
from mmrender.errors import PlaceholderError
from mmrender.media.item import TensorItem, TensorSpec, expand_into, tensor_specs
from mmrender.media.levels import cast
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, TensorDtype, common_prefix
from mmrender.trajectory.sample import TrainingSample

_T = TypeVar("_T")
Weights: TypeAlias = Mapping[str, Any]
"""Tensors by the names of the model's parameters, or of some of them."""
Edit: TypeAlias = tuple[int, int, "Sequence[int] | TrainingSample"]
"""Start and end of a part of a sample, and its replacement."""
Array: TypeAlias = npt.NDArray[Any]
_CHANGED: Final = frozenset({"pixel_values", "pixel_values_videos", "input_features"})
_MAX_ROWS: Final = 256
"""Rows of logits that are kept: 150 MB for a vocabulary of 150,000."""
_SECTIONS: Final = 26
_PATIENCE: Final = 8
"""Sections after which the minimum is given up if it leaves half."""
_NEARER: Final = 0.95
"""Maximum share of the differences under a number that is a step nearer."""
_FINE: Final = np.array([-0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2])
"""Logarithms of factors of the trainer's number, beside which the sampler's may be."""
_NEAR: Final = (1.02, 1 / 1.02, 1.5, 1 / 1.5)
"""Factors of the trainer's number that show whether another explains more."""


class Trial(NamedTuple):
    """One substitution, and its statement if it explains the sample.

    Attributes:
        statement: The finding, maybe with `{}` for the completions that numbers fit, which else follow it.
        sample: The changed sample, with the sampler's numbers at its loss mask; None for unchanged.
        inputs: Change of the model's inputs.
        positions: Change of their positions alone, which runs beside others in a batch.
        model: Change of the model.
        place: Where it is, as of "layer 3 of the language model".
        since: Index of the first token whose log-probability may change.
        fitted: Number of the sampler's numbers that were used to find it.
        parts: A trial for each completion that differs, of which it consists.
        row: Name of its row.
        expected: Numbers of one completion that follow from the trainer's own distribution without a forward:
            float32 `(m,)`, aligned to the view; NaN for tokens without expectation.
    """

    statement: str
    sample: TrainingSample | None = None
    inputs: InputChange | None = None
    positions: InputChange | None = None
    model: ModelChange | None = None
    place: str = ""
    since: int = 0
    fitted: int = 0
    parts: "Sequence[Trial]" = ()
    row: str = ""
    expected: Any = None

    @property
    def is_alone(self) -> bool:
        """Whether it cannot share a batch with others."""
        return bool(self.parts or self.inputs or self.model)


@dataclass(frozen=True, eq=False)
class Case:
    """One sample that differs, and all data that may help to explain it.

    Attributes:
        compared: Sampler against trainer.
        trainer: The model.
        tolerance: In nats. Smaller differences are arithmetic.
        peers: Comparisons of all other samples.
        others: Items that an image may have been mistaken for.
        decode: Text of token ids.
        sources: Images before processing, by identity of their items.
        weights: Other weights that may have sampled, by name.
        alternatives: The sample as something else builds it, by name.
    """

    compared: Comparison
    trainer: TrainerModel
    tolerance: float
    peers: Sequence[Comparison] = ()
    others: Sequence[MediaItem] = ()
    decode: Decode | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Weights] = field(default_factory=dict)
    alternatives: Mapping[str, TrainingSample] = field(default_factory=dict)
    _memory: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return what was made under a key, made the first time."""
        if key not in self._memory:
            self._memory[key] = make()
        made: _T = self._memory[key]
        return made

    @property
    def sample(self) -> TrainingSample:
        """The sample as the trainer has it."""
        return self.compared.sample

    @cached_property
    def departure(self) -> int:
        """Index into `compared.positions` of the first token that differs, or differs most."""
        first = self.compared.first_departure(self.tolerance)
        return int(np.abs(self.compared.difference).argmax()) if first is None else first

    @cached_property
    def position(self) -> int:
        """Index of the first token that differs."""
        return int(self.compared.positions[self.departure])

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The completions, as runs `[start, stop)` of sampled tokens."""
        return sampled_runs(self.sample.loss_mask)

    def prompt_of(self, number: int) -> tuple[int, int]:
        """Return the prompt of a completion since the one before, as a run `[start, stop)`."""
        return self.runs[number - 1][1] if number else 0, self.runs[number][0]

    @cached_property
    def head(self) -> TrainingSample:
        """The sample up to the end of its first completion that differs."""
        return cut(self.sample, self.runs[self.departing_runs[0]][1])

    def shortened(self, trial: Trial) -> Trial | None:
        """Return a trial on the sample's head alone; None if that is the whole sample, or malformed."""
        if trial.parts:
            return trial.parts[0]
        runs = self.runs if trial.sample is None else sampled_runs(trial.sample.loss_mask)
        # Runs in which a trial changes nothing may be left out of its sample.
        at = max(0, self.departing_runs[0] - len(self.runs) + len(runs))
        if at + 1 >= len(runs):
            return None
        try:
            return trial._replace(
                sample=self.head if trial.sample is None else cut(trial.sample, runs[at][1])
            )
        except PlaceholderError:  # an image was cut, and the model refuses the whole sample
            return None

    def of_run(self, number: int) -> TrainingSample:
        """Return the sample with the loss mask of one completion."""
        start, stop = self.runs[number]
        mask = np.zeros(len(self.sample), np.bool_)
        mask[start:stop] = self.sample.loss_mask[start:stop]
        return replace(self.sample, loss_mask=mask)

    @cached_property
    def departing_runs(self) -> list[int]:
        """Indices of the completions with a token that differs."""
        beyond = self.compared.beyond(self.tolerance)
        return [number for number in range(len(self.runs)) if beyond[self.rows_of(number)].any()]

    def rows_of(self, number: int) -> slice:
        """Return the tokens of a completion, as indices into `compared.positions`."""
        return slice(*np.searchsorted(self.compared.positions, self.runs[number]))

    @cached_property
    def free(self) -> npt.NDArray[np.bool_]:
        """Marks the tokens of prompts, placeholders left out."""
        return outside_media(self.sample) & ~self.sample.loss_mask

    @cached_property
    def suspects(self) -> list[MediaSpan]:
        """Images that may be at fault. Those that the first differing token was the first to see come first.

        An image is left out if several tokens that saw it agree before that token.
        """
        new = self.compared.suspects(self.departure)
        seen = [span for span in self.sample.media_spans if span.start < self.position and span not in new]
        agreeing = self.compared.positions[: self.departure]
        return [*new, *(span for span in seen if int((agreeing > span.start).sum()) <= 3)]

    def image_at(self, place: int) -> int | None:
        """Return the index of the image that begins or ends at a token."""
        spans = self.sample.media_spans
        return next((span.position for span in spans if place in (span.start, span.stop)), None)

    def token_of(self, trial: Trial) -> int:
        """Return the index of the first token that is another or elsewhere, or of the first that differs."""
        if trial.positions is not None or trial.inputs is not None:
            return trial.since or self.position
        ids = self.sample.token_ids if trial.sample is None else trial.sample.token_ids
        first = common_prefix(self.sample.token_ids, ids)
        return first if first < min(len(ids), len(self.sample)) else self.position

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
        marks = np.zeros(len(self.compared.positions), np.bool_)
        for number in self.departing_runs:
            marks[self.rows_of(number)] = True
        return np.flatnonzero(marks)[:_MAX_ROWS]

    def run(self, trials: Sequence[Trial]) -> list[Comparison | None]:
        """Compare the sampler with the trainer under each trial; None if the model refuses one."""
        batch = [(one.sample or self.sample, one.positions) for one in trials if not one.is_alone]
        batched = iter(self.trainer.sampled_of_many(*map(list, zip(*batch, strict=True))) if batch else ())
        out: list[Comparison | None] = []
        for trial in trials:
            sample = trial.sample or self.sample
            if trial.parts:
                values = self._joined(self.run(trial.parts))
            elif trial.is_alone:
                changed = self.trainer.changed(inputs=trial.inputs, model=trial.model)
                (values,) = changed.sampled_of_many([sample])
            else:
                values = next(batched)
            out.append(None if values is None else Comparison.of(sample, values))
        return out

    def rest(self, varied: Comparison) -> Float32Array | None:
        """Return the numbers of all tokens under a trial that has the last ones; None if it lacks these."""
        own = self.compared
        start = max(0, len(own.positions) - len(varied.positions))
        if not np.array_equal(varied.sampler, own.sampler[start:], equal_nan=True):
            return None
        return np.concatenate([own.trainer[:start], varied.trainer])

    def _joined(self, parts: Sequence[Comparison | None]) -> Float32Array | None:
        """Return the trainer's log-probabilities, those of completions that differ from their own trials."""
        values = self.compared.trainer.copy()
        for number, one in zip(self.departing_runs, parts, strict=True):
            if one is None:
                return None
            values[self.rows_of(number)] = one.trainer
        return values

    def after(self, trial: Trial, compared: Comparison) -> "Case | None":
        """Return the case that is left after a trial, to be explained by a second cause."""
        if not compared.beyond(self.tolerance).any() or self.rest(compared) is None or trial.parts:
            return None
        trainer = self.trainer.changed(inputs=trial.inputs or trial.positions, model=trial.model)
        return replace(self, compared=compared, trainer=trainer)


class ChangedItem(TensorItem, frozen=True, eq=False, kw_only=True, tag="changed"):
    """A media item whose pixels, features of audio, or grid, are changed after it made them.

    Attributes:
        item: The item.
        change: New pixels or features, of the same shape, from old ones and the item's grid.
    """

    item: Any
    change: Callable[[Float32Array, tuple[int, ...]], Any]

    @classmethod
    def of(cls, item: MediaItem, change: Callable[..., Any], grid: tuple[int, ...] = ()) -> "ChangedItem":
        """Return an item with a change, or with another grid."""
        return cls(
            # No real item has this identity, so the changed pixels are taken for no other item's.
            identity=f"{id(change):016x}{item.identity[16:]}",
            size=item.size,
            grid=grid or item.grid,
            expansion=item.expansion,
            modality=item.modality,
            item=item,
            change=change,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the item."""
        return int(self.item.nbytes)

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        return tensor_specs(self.item, dtype)

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the item's tensors into arrays, with the pixels changed."""
        expand_into(self.item, out, dtype)
        for name in _CHANGED & out.keys():
            pixels = self.change(self.item.tensors()[name], self.item.grid)
            out[name][...] = cast(np.ascontiguousarray(pixels, np.float32), dtype)
        if self.grid != self.item.grid:
            out[f"{self.modality}_grid_thw"][0] = self.grid


def with_items(sample: TrainingSample, items: Iterable[tuple[MediaSpan, MediaItem]]) -> TrainingSample:
    """Return a sample whose spans hold other items of as many tokens."""
    # By place, since items need not be hashable.
    given = {(span.start, span.modality): item for span, item in items}
    entries = [(one.range, given.get((one.start, one.modality), one.item)) for one in sample.media_spans]
    return replace(sample, multi_modal_data=MultiModalData.of(entries))


def part(sample: TrainingSample, start: int, stop: int, *, sampled: bool = True) -> TrainingSample:
    """Return the tokens `[start, stop)` with the media that begin there. Prompt tokens unless `sampled`."""
    spans = [span for span in sample.media_spans if start <= span.start < stop]
    data = MultiModalData.of([(span.range.shifted(-start), span.item) for span in spans])
    ids, numbers = sample.token_ids[start:stop], sample.logprobs
    if not sampled or numbers is None:
        return replace(plain(ids), multi_modal_data=data)
    return TrainingSample(ids, sample.loss_mask[start:stop], numbers[start:stop], data)


def cut(sample: TrainingSample, stop: int) -> TrainingSample:
    """Return the first tokens of a sample."""
    return replace(part(sample, 0, stop), allowed=sample.aligned.cut(0, stop).allowed)


def outside_media(sample: TrainingSample) -> npt.NDArray[np.bool_]:
    """Mark the tokens outside images and clips."""
    marks = np.ones(len(sample), np.bool_)
    for span in sample.media_spans:
        marks[span.start : span.stop] = False
    return marks


def plain(ids: Sequence[int] | npt.NDArray[Any]) -> TrainingSample:
    """Return prompt tokens without media."""
    tokens = np.asarray(ids, np.int32)
    return TrainingSample(tokens, np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32))


def joined(parts: Sequence[TrainingSample], sample: TrainingSample) -> TrainingSample:
    """Return one sample of several parts, under the name of `sample`."""
    data, offset = MultiModalData(), 0
    for one in parts:
        data, offset = data.merged(one.multi_modal_data.shifted(offset)), offset + len(one)
    columns = [(one.token_ids, one.loss_mask, one.logprobs) for one in parts]
    ids, mask, numbers = (np.concatenate(column) for column in zip(*columns, strict=True))
    return TrainingSample(ids, mask, numbers, data, sample_id=sample.sample_id)


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


def minimum(
    losses: Callable[[Sequence[float]], Sequence[float]],
    low: float,
    high: float,
    *,
    points: int,
    enough: float,
    own: float = 0.0,
) -> float:
    """Return the minimum of a function of positive numbers, given several at once, between two bounds.

    A grid of `points`, finer around `own`, then golden sections around its best point if the loss there is
    below `enough`.
    """
    grid = np.linspace(np.log(low), np.log(high), points)
    if own > 0:
        grid = np.unique(np.concatenate([grid, np.log(own) + _FINE]).clip(np.log(low), np.log(high)))
    found = losses(np.exp(grid).tolist())
    best, ratio = int(np.argmin(found)), (np.sqrt(5) - 1) / 2
    if found[best] >= enough:
        return float(np.exp(grid[best]))
    ends = [float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])]
    inner = [ends[1] - ratio * (ends[1] - ends[0]), ends[0] + ratio * (ends[1] - ends[0])]
    lost = [*losses(np.exp(inner).tolist())]
    for number in range(_SECTIONS):
        if number == _PATIENCE and min(lost) >= enough / 2:
            break  # the minimum is not near 0
        worse = int(lost[0] < lost[1])  # this end moves to the nearer inner point
        ends[worse], inner[worse], lost[worse] = inner[worse], inner[1 - worse], lost[1 - worse]
        inner[1 - worse] = ends[worse] + ratio * (ends[1 - worse] - ends[worse])
        (lost[1 - worse],) = losses([float(np.exp(inner[1 - worse]))])
    return float(np.exp(sum(ends) / 2))


def fitted_number(
    case: Case, make: Callable[[float], Trial], low: float, high: float, own: float, *near: float
) -> float | None:
    """Return the number that explains the differences best; None if none near `own` explains more."""
    if not np.isfinite(case.compared.sampler).all() or make(low).since > case.position:
        return None

    def losses(values: Sequence[float]) -> list[float]:
        trials = [make(value) for value in values]
        found = case.run([case.shortened(trial) or trial for trial in trials])
        return [np.inf if one is None else one.rms for one in found]

    is_short = case.shortened(make(own)) is not None
    before = (case.compared.before(len(case.head)) if is_short else case.compared).rms
    if min(losses(near or [own * factor for factor in _NEAR])) > _NEARER * before:
        return None
    return minimum(losses, low, high, points=9, enough=0.7 * before, own=0.0 if near else own)


def fitted(
    case: Case, make: Callable[[float], Trial], low: float, high: float, own: float, *near: float
) -> Iterator[Trial]:
    """Yield the trial with the number that a search finds, if there is one."""
    value = fitted_number(case, make, low, high, own, *near)
    if value is not None:
        yield make(value)._replace(fitted=1)
