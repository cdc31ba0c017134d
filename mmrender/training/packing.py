"""Assignment of samples to micro-batches and ranks, before any image is expanded.

A sample is never split. Bins are filled by first-fit decreasing, which needs at most 11/9 of the smallest
possible number of bins and two thirds of one more (Dosa, 2007). Parts are balanced by assigning the costliest
item first to the cheapest part (Graham, 1969), and then by exchanges with the costliest part.

All ranks take equally many micro-batches. In every step either all ranks have images or none: sharded
training gathers the weights of the vision tower on every rank or on none, so a rank without images would
block the rest. It gets a dummy, a sample of one small image and no loss, which takes the whole way through
the model. The micro-batches of a step cost about the same, since the slowest of them is waited for.
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError, check_count
from mmrender.sidecar import MultiModalData
from mmrender.training.batch import OPTIONAL, PER_TOKEN, TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import ModelFamily
from mmrender.training.fields import ExpandOptions
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.index import Descriptor as Descriptor  # noqa: PLC0414 - exported
from mmrender.trajectory.sample import TrainingSample

_EVEN: Final = 1e-3
"""Relative excess of the costliest part over the mean at which exchanges end."""
_ANY: Final = -1
"""The kind of a sample that shares a bin with samples of every kind."""


class _Bins:
    """Bins of at most `capacity` tokens, each with samples of one key."""

    def __init__(
        self, lengths: Sequence[int], keys: Sequence[Hashable | None], capacity: int, count: int
    ) -> None:
        numbers: dict[Hashable, int] = {}
        self._kinds = [_ANY if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
        self._lengths = lengths
        self._room, self._kind = np.full(count, capacity), np.full(count, _ANY)
        self._members: list[list[int]] = [[] for _ in range(count)]

    def fits(self, index: int, bins: slice) -> npt.NDArray[np.bool_]:
        """Return which of some bins take a sample."""
        fits = self._room[bins] >= self._lengths[index]
        if self._kinds[index] != _ANY:
            fits &= (self._kind[bins] == _ANY) | (self._kind[bins] == self._kinds[index])
        return fits

    def put(self, index: int, number: int) -> None:
        """Put a sample into a bin that takes it."""
        self._members[number].append(index)
        self._room[number] -= self._lengths[index]
        if self._kinds[index] != _ANY:
            self._kind[number] = self._kinds[index]

    def members(self) -> list[list[int]]:
        """Return the samples of each bin in use, rising."""
        return [sorted(members) for members in self._members if members]


def first_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, keys: Sequence[Hashable | None] | None = None
) -> list[list[int]]:
    """Put samples into bins of at most `capacity` tokens.

    Args:
        lengths: Tokens of each sample.
        capacity: Tokens of a bin.
        keys: For each sample a key that all samples of its bin share, such as the kinds of its image tensors.
            A sample without key fits any bin, and without `keys` all do.

    Returns:
        Indices by bin, rising within a bin. Every index is in one bin.

    Raises:
        BatchError: A sample is longer than a bin.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > capacity:
        raise BatchError(
            "a sample does not fit a bin, and samples are not split",
            where=f"lengths[{order[0]}]",
            expected=f"at most {capacity} tokens",
            got=str(lengths[order[0]]),
            remedy="Truncate it, or raise the budget",
        )
    # There are never more bins than samples.
    bins = _Bins(lengths, [None] * len(lengths) if keys is None else keys, capacity, len(lengths))
    used = 0
    for index in order:
        number = int(bins.fits(index, slice(used + 1)).argmax())  # a bin that is not in use takes any sample
        bins.put(index, number)
        used = max(used, number + 1)
    return bins.members()


def compute_cost(lengths: Sequence[int], hidden_size: int) -> float:
    """Return the relative cost of the sequences of a row: `sum of n + n**2 / (12 * hidden_size)`.

    Per layer a token costs about `24 * hidden_size**2` operations in projections, and causal attention
    `2 * hidden_size` for each token before it. The unit is the projections of one token.
    """
    return float(sum(length + length**2 / (12 * hidden_size) for length in lengths))


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Distribute items over parts of equal counts (to one) so that the costliest part is cheap.

    Returns:
        Indices by part, rising within a part.

    Raises:
        BatchError: `parts` is not positive.
    """
    check_count("parts", parts, error=BatchError)
    size, larger = divmod(len(costs), parts)  # `larger` parts have one item more than `size`
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cost, part = heapq.heappop(heap)
        while len(members[part]) >= size + (larger > 0):  # it is full, and stays so
            cost, part = heapq.heappop(heap)
        larger -= len(members[part]) == size
        members[part].append(index)
        heapq.heappush(heap, (cost + costs[index], part))
    _exchange(np.asarray(costs, np.float64), members)
    return [sorted(part) for part in members]


def _exchange(costs: npt.NDArray[np.float64], members: list[list[int]]) -> None:
    """Exchange items of the costliest part for cheaper ones, as long as that lowers the largest cost."""
    loads = np.array([costs[part].sum() for part in members])
    for _ in costs:
        top = int(loads.argmax())
        if loads[top] <= loads.mean() * (1 + _EVEN):
            return
        items = costs[members[top]]
        best = float(loads[top]) * (1 - 1e-9)
        exchange: tuple[int, int, int] | None = None
        for other, part in enumerate(members):
            if not part or other == top:
                continue
            order = np.argsort(costs[part])
            theirs = costs[part][order]
            # Both would cost the same if half of their difference moved: the two nearest items are tried.
            after = np.searchsorted(theirs, items - (loads[top] - loads[other]) / 2)
            near = np.clip(after[:, None] + [-1, 0], 0, len(part) - 1)
            moved = items[:, None] - theirs[near]
            larger = np.maximum(loads[top] - moved, loads[other] + moved)
            if larger.min() < best:
                item, side = divmod(int(larger.argmin()), 2)
                best, exchange = float(larger.min()), (other, item, int(order[near[item, side]]))
        if exchange is None:
            return
        other, item, place = exchange
        members[top][item], members[other][place] = members[other][place], members[top][item]
        for changed in (top, other):
            loads[changed] = costs[members[changed]].sum()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one packed row, by index, and whether a dummy image joins them."""

    samples: tuple[int, ...]
    dummy: bool = False


StepPlan: TypeAlias = tuple[MicroBatch, ...]
"""One micro-batch for each rank."""


class _Row(NamedTuple):
    samples: tuple[int, ...] = ()
    tokens: int = 0
    cost: float = 0.0
    images: bool = False
    dummy: bool = False


def plan_steps(
    samples: Sequence[Descriptor],
    family: ModelFamily,
    *,
    ranks: int,
    max_tokens: int,
    dummy_tokens: int = 0,
    hidden_size: int = 4096,
) -> list[StepPlan]:
    """Assign every sample to one micro-batch of one rank.

    There are as many steps as first-fit decreasing needs. The samples are spread over their rows by cost, the
    costliest first, so that the ranks of a step have about as much to do. Samples with images share a row
    only if their tensors can be joined. A rank without samples gets an empty micro-batch, which
    `collate_micro_batch` makes a padding row or a dummy alone.

    Args:
        samples: Descriptors of all samples of an optimizer step, the same on every rank.
        family: The model's inputs.
        ranks: Number of data-parallel ranks.
        max_tokens: Maximum number of tokens of a micro-batch, a dummy included.
        dummy_tokens: Length of the dummy, if samples with images and without may meet.
        hidden_size: The model's, for the cost of a row. See `compute_cost`.

    Raises:
        BatchError: A sample is longer than `max_tokens`, or `ranks` is not positive.
    """
    check_count("ranks", ranks, error=BatchError)
    lengths = [sample.length for sample in samples]
    costs = [compute_cost([length], hidden_size) for length in lengths]
    keys = [_image_key(sample, family) if sample.media else None for sample in samples]

    def row(members: Sequence[int]) -> _Row:
        return _Row(
            tuple(members),
            sum(lengths[index] for index in members),
            compute_cost([lengths[index] for index in members], hidden_size),
            any(samples[index].media for index in members),
        )

    fewest = first_fit_decreasing(lengths, max_tokens, keys=keys)
    count = -(-len(fewest) // ranks) * ranks
    levelled = [
        _levelled(costs, _Bins(lengths, keys, max_tokens, count), count, ranks, by_step=by_step)
        for by_step in (False, True)
    ]
    candidates: list[list[list[_Row]]] = []
    for assignment in filter(None, levelled) if any(levelled) else [fewest]:
        rows = [row(members) for members in assignment]
        while len(rows) % ranks and any(len(one.samples) > 1 for one in rows):
            largest = max((one for one in rows if len(one.samples) > 1), key=lambda one: one.cost)
            rows.remove(largest)
            halves = balance([costs[index] for index in largest.samples], 2)
            rows += [row([largest.samples[place] for place in half]) for half in halves]
        candidates.append(_steps(rows, ranks, max_tokens - dummy_tokens))
    totals, plan = [0.0] * ranks, []
    # The slowest rank of each step is waited for.
    for step in min(candidates, key=lambda steps: sum(max(one.cost for one in step) for step in steps)):
        # The costliest row of each step goes to the rank with the smallest total so far.
        order = sorted(range(ranks), key=totals.__getitem__)
        assigned = dict(zip(order, sorted(step, key=lambda one: -one.cost), strict=True))
        totals = [total + assigned[rank].cost for rank, total in enumerate(totals)]
        plan.append(tuple(MicroBatch(assigned[rank].samples, assigned[rank].dummy) for rank in range(ranks)))
    return plan


def _levelled(
    costs: Sequence[float], bins: _Bins, count: int, ranks: int, *, by_step: bool
) -> list[list[int]] | None:
    """Put each sample, the costliest first, into the cheapest bin that takes it; None if a sample is left.

    `by_step`: a step with a sample above the mean of the remaining bins is filled to that sample's cost
    first, since its further ranks wait for it.
    """
    loads = np.zeros(count)
    left = sorted(range(len(costs)), key=lambda index: -costs[index])
    for start in range(0, count, ranks):
        mean = sum(costs[index] for index in left) / (count - start)
        is_step = by_step and bool(left) and costs[left[0]] > mean and start + ranks < count
        height, stop = (costs[left[0]], start + ranks) if is_step else (np.inf, count)
        window, later = slice(start, stop), []
        queue = [(0.0, number) for number in range(start, stop)]  # the cheapest bin first, which mostly fits
        for index in left:
            while loads[queue[0][1]] != queue[0][0]:  # the bin has been put into since
                heapq.heappop(queue)
            load, number = queue[0]
            if load + costs[index] > height:
                later.append(index)
                continue
            if not bins.fits(index, slice(number, number + 1))[0]:
                fits = bins.fits(index, window) & (loads[window] + costs[index] <= height)
                if not fits.any():
                    if stop == count:
                        return None
                    later.append(index)
                    continue
                number = start + int(np.where(fits, loads[window], np.inf).argmin())
            bins.put(index, number)
            loads[number] += costs[index]
            heapq.heappush(queue, (float(loads[number]), number))
        left = later
        if stop == count:
            break
    return None if left else bins.members()


def _image_key(sample: Descriptor, family: ModelFamily) -> Hashable:
    """Return the keywords, kinds and unpadded dimensions that samples of one batch share."""
    key: set[Any] = set()
    for name, dtype, whole in sample.tensors:
        rule = family.rule(name)
        if rule.layout != "counts":
            shape = rule.trailing(whole)
            key.add((name, dtype, len(shape) if rule.padded else shape))
    return frozenset(key)


def _steps(rows: Sequence[_Row], ranks: int, room: int) -> list[list[_Row]]:
    """Group rows of like cost into steps, with dummies if only some ranks of a step have images."""
    ordered = sorted(rows, key=lambda one: -one.cost)
    with_images = [one for one in ordered if one.images]
    missing = -len(with_images) % ranks
    # The cheapest rows without images fill up the last step that has images.
    joining = [one for one in reversed(ordered) if not one.images and one.tokens <= room][:missing]
    without = [one for one in ordered if not one.images and one not in joining]
    joining += [_Row()] * (missing - len(joining))
    without += [_Row()] * (-len(without) % ranks)
    whole = [*with_images, *(one._replace(dummy=True) for one in joining), *without]
    return [whole[start : start + ranks] for start in range(0, len(whole), ranks)]


def collate_micro_batch(
    samples: Sequence[TrainingSample] | Mapping[int, TrainingSample],
    micro_batch: MicroBatch,
    family: ModelFamily,
    *,
    pad_token_id: int,
    dummy: TrainingSample | None = None,
    multiple: int = 1,
    **options: Unpack[ExpandOptions],
) -> TrainingBatch:
    """Build one micro-batch of a plan: a packed row.

    An empty one is a padding row with the optional fields of the samples, so that all ranks compute the same.
    Raises as `collate`.

    Args:
        samples: All samples of the plan, or by index the samples of the micro-batch, any one if it is empty.
        micro_batch: The indices of its samples.
        family: The model's inputs.
        pad_token_id: The token that fills rows.
        dummy: A sample of one image and no loss, from `smallest_dummy`.
        multiple: Makes the width a multiple of this.
        **options: As for `collate`.

    Raises:
        BatchError: The plan needs a dummy, and `dummy` is None.
    """
    members = [samples[index] for index in micro_batch.samples]
    if micro_batch.dummy:
        if dummy is None:
            problem = "this micro-batch lacks the image that its step needs on every rank"
            remedy = "Make a sample of one image with smallest_dummy"
            raise BatchError(problem, where="dummy", remedy=remedy)
        members.append(dummy)
    return collate(
        # An empty micro-batch takes its fields from a sample in no row.
        members or [*(samples.values() if isinstance(samples, Mapping) else samples)][:1],
        family,
        pad_token_id=pad_token_id,
        rows=[list(range(len(members)))],
        multiple=multiple,
        **options,
    )


def smallest_dummy(
    samples: Sequence[TrainingSample], *, like: TrainingSample | None = None
) -> TrainingSample | None:
    """Return a sample of the smallest image in the samples, alone and without a loss.

    Needs neither processor nor tokenizer. None if the samples are without images, since ranks then need
    none. A process without images of the data makes one of a recorded conversation that shows a black
    square.

    Args:
        samples: Samples to take the image from.
        like: The dummy has the optional fields of this sample; None for the fields of the image's sample.
    """
    media = [(sample, span) for sample in samples for span in sample.media_spans]
    if not media:
        return None
    sample, span = min(media, key=lambda pair: (pair[1].range.length, pair[1].item.nbytes))
    like = like or sample
    count = span.range.length
    zeros: dict[str, Any] = {
        name: np.zeros(count, np.float32)
        for name in OPTIONAL
        if name in PER_TOKEN and getattr(like, name) is not None
    }
    experts = None
    if like.routed_experts is not None:
        _, layers, top_k = like.routed_experts.shape
        choices = np.arange(top_k, dtype=like.routed_experts.dtype)
        experts = RoutedExperts(np.broadcast_to(choices, (count, layers, top_k)))
    return TrainingSample(
        token_ids=sample.token_ids[span.start : span.stop],
        loss_mask=np.zeros(count, np.bool_),
        multi_modal_data=MultiModalData.of(
            # A video may share its range with its sound track.
            (replace(each.range, offset=0), each.item)
            for each in sample.media_spans
            if each.start == span.start
        ),
        routed_experts=experts,
        sample_id="dummy",
        **zeros,
    )
