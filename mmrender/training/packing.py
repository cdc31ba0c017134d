"""Assignment of samples to micro-batches and ranks, before any image is expanded.

A sample is never split. Bins are filled by first-fit decreasing, which needs at most 11/9 of the fewest
possible bins and two thirds of one more (Dosa, 2007); parts are balanced by giving the costliest item first
to the part that has least (Graham, 1969), and then by exchanges with the costliest part.

All ranks take equally many micro-batches. In every step all ranks have images or none has: sharded training
gathers the weights of the vision tower on every rank or on none, so a rank without images would block the
others. Such a rank gets a dummy, a sample of one small image and no loss, which takes the whole way through
the model. The micro-batches of a step cost about the same, since the slowest of them is waited for.
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError
from mmrender.media.item import ReferenceItem, tensor_specs
from mmrender.sidecar import MultiModalData
from mmrender.training.batch import TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import ModelFamily
from mmrender.training.fields import ExpandOptions
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.sample import TrainingSample

_EVEN: Final = 1e-3
"""Parts whose costliest is above the mean by no more are even enough."""
_ANY: Final = -1
"""The kind of a bin that takes samples of every kind."""


def first_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, keys: Sequence[Hashable | None] | None = None
) -> list[list[int]]:
    """Put samples into bins of at most `capacity` tokens.

    Args:
        lengths: Tokens of each sample.
        capacity: Tokens of a bin.
        keys: For each sample what all samples of its bin must share, such as the kinds of its image tensors;
            None lets any share a bin.

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
    numbers: dict[Hashable, int] = {}
    keys = [None] * len(lengths) if keys is None else keys
    kinds = [_ANY if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
    # There are never more bins than samples.
    room, kind = np.zeros(len(lengths), np.int64), np.full(len(lengths), _ANY, np.int64)
    bins: list[list[int]] = []
    for index in order:
        used = len(bins)
        fits = room[:used] >= lengths[index]
        if kinds[index] != _ANY:
            fits &= (kind[:used] == _ANY) | (kind[:used] == kinds[index])
        found = int(fits.argmax()) if fits.any() else used
        if found == used:
            bins.append([])
            room[found] = capacity
        bins[found].append(index)
        room[found] -= lengths[index]
        kind[found] = kind[found] if kinds[index] == _ANY else kinds[index]
    return [sorted(members) for members in bins]


def compute_cost(lengths: Sequence[int], hidden_size: int) -> float:
    """Return the relative cost of sequences side by side in a row: `sum of n + n**2 / (12 * hidden_size)`.

    Per layer a token costs about `24 * hidden_size**2` operations in projections, and causal attention
    `2 * hidden_size` for each token before it. The unit is the projections of one token.
    """
    return float(sum(length + length**2 / (12 * hidden_size) for length in lengths))


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Distribute items over parts of equal counts (to one) so that the costliest part costs little.

    Returns:
        Indices by part, rising within a part.

    Raises:
        BatchError: `parts` is not positive.
    """
    if parts < 1:
        raise BatchError("items are given to one part or more", where="parts", got=str(parts))
    size, larger = divmod(len(costs), parts)  # so many parts hold one more than the others
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
    """Exchange items of the costliest part for cheaper ones of others, while that lowers the largest cost."""
    loads = np.array([costs[part].sum() for part in members])
    for _ in costs:
        top = int(loads.argmax())
        if loads[top] <= loads.mean() * (1 + _EVEN):
            return
        own = costs[members[top]]
        best = float(loads[top]) * (1 - 1e-9)
        found: tuple[int, int, int] | None = None
        for other, part in enumerate(members):
            if not part or other == top:
                continue
            order = np.argsort(costs[part])
            theirs = costs[part][order]
            # Both would cost the same if half of their difference moved: the two nearest to that are tried.
            after = np.searchsorted(theirs, own - (loads[top] - loads[other]) / 2)
            near = np.clip(after[:, None] + [-1, 0], 0, len(part) - 1)
            moved = own[:, None] - theirs[near]
            larger = np.maximum(loads[top] - moved, loads[other] + moved)
            if larger.min() < best:
                mine, side = divmod(int(larger.argmin()), 2)
                best, found = float(larger.min()), (other, mine, int(order[near[mine, side]]))
        if found is None:
            return
        other, mine, its = found
        members[top][mine], members[other][its] = members[other][its], members[top][mine]
        for changed in (top, other):
            loads[changed] = costs[members[changed]].sum()


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The size of a sample, by which it is planned, and its place in a file: plain data of few bytes.

    Attributes:
        length: Its tokens.
        trained: Tokens in its loss mask.
        media: Its media items.
        tensors: Name, dtype and shape of each distinct kind of tensor that its items expand to.
        smallest: Tokens of its smallest item, and bytes of that; None without items.
        version: Weights that sampled its last token, or None.
        record: Number of its record in a file of trajectories; a group is a record.
        item: Its number in the record.
    """

    length: int
    trained: int
    media: int = 0
    tensors: frozenset[tuple[str, str, tuple[int, ...]]] = frozenset()
    smallest: tuple[int, int] | None = None
    version: str | None = None
    record: int = 0
    item: int = 0

    @classmethod
    def of(cls, sample: TrainingSample, *, record: int = 0, item: int = 0) -> "Descriptor":
        """Describe a sample; items are not expanded, except those of classes from elsewhere."""
        spans = sample.media_spans
        known = [span.item for span in spans if not isinstance(span.item, ReferenceItem)]
        specs = [entry for one in known for entry in tensor_specs(one).items()]
        return cls(
            len(sample),
            int(sample.loss_mask.sum()),
            len(spans),
            frozenset((name, str(spec.dtype), tuple(spec.shape)) for name, spec in specs),
            min(((span.range.length, span.item.nbytes) for span in spans), default=None),
            sample.weight_versions[-1].version if sample.weight_versions else None,
            record,
            item,
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one packed row, by index, and whether a dummy image joins them."""

    samples: tuple[int, ...]
    dummy: bool = False


StepPlan: TypeAlias = tuple[MicroBatch, ...]
"""One micro-batch for each rank."""


class _Bin(NamedTuple):
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

    There are as many steps as first-fit decreasing needs, and the samples are spread over their rows by cost,
    the costliest first, so that the ranks of a step have about as much to do. Those with images share a row
    only if their tensors can be joined. A rank without samples gets an empty micro-batch, which
    `collate_micro_batch` makes a padding row or a dummy alone.

    Args:
        samples: Descriptors of all samples of an optimizer step, the same on every rank.
        family: What the model takes.
        ranks: Number of data-parallel ranks.
        max_tokens: Most tokens of a micro-batch, a dummy included.
        dummy_tokens: Length of the dummy, if samples with images and without may meet.
        hidden_size: Of the model, for the cost of a row; see `compute_cost`.

    Raises:
        BatchError: A sample is longer than `max_tokens`, or `ranks` is not positive.
    """
    if ranks < 1:
        raise BatchError("micro-batches are planned for one rank or more", where="ranks", got=str(ranks))
    keys = [_image_key(sample, family) if sample.media else None for sample in samples]
    lengths = [sample.length for sample in samples]

    def made(members: Sequence[int]) -> _Bin:
        own = [lengths[index] for index in members]
        images = any(samples[index].media for index in members)
        return _Bin(tuple(members), sum(own), compute_cost(own, hidden_size), images)

    fewest = first_fit_decreasing(lengths, max_tokens, keys=keys)
    # As many steps as the fewest bins need, and the samples spread evenly over all of their bins.
    costs = [compute_cost([length], hidden_size) for length in lengths]
    count = -(-len(fewest) // ranks)
    level = partial(_levelled, lengths, costs, keys, ranks=ranks, steps=count, capacity=max_tokens)
    found = [level(by_step=by_step) for by_step in (False, True)]
    planned: list[list[list[_Bin]]] = []
    for filled in filter(None, found) if any(found) else [fewest]:
        bins = [made(members) for members in filled]
        while len(bins) % ranks and any(len(one.samples) > 1 for one in bins):
            largest = max((one for one in bins if len(one.samples) > 1), key=lambda one: one.cost)
            bins.remove(largest)
            own = [costs[index] for index in largest.samples]
            bins += [made([largest.samples[place] for place in half]) for half in balance(own, 2)]
        planned.append(_steps(bins, ranks, max_tokens - dummy_tokens))
    totals, plan = [0.0] * ranks, []
    # The slowest rank of each step is waited for.
    for step in min(planned, key=lambda steps: sum(max(one.cost for one in step) for step in steps)):
        # The costliest bin of each step goes to the rank that has had least so far.
        order = sorted(range(ranks), key=totals.__getitem__)
        given = dict(zip(order, sorted(step, key=lambda one: -one.cost), strict=True))
        totals = [total + given[rank].cost for rank, total in enumerate(totals)]
        plan.append(tuple(MicroBatch(given[rank].samples, given[rank].dummy) for rank in range(ranks)))
    return plan


def _levelled(
    lengths: Sequence[int],
    costs: Sequence[float],
    keys: Sequence[Hashable | None],
    *,
    ranks: int,
    steps: int,
    capacity: int,
    by_step: bool,
) -> list[list[int]] | None:
    """Give each sample, the costliest first, to the bin of least cost that takes it; None if none does.

    `by_step`: a step with a sample above the mean of the bins that are left is filled to that sample's cost
    first, since its other ranks wait for it.
    """
    count = ranks * steps
    loads, room = np.zeros(count), np.full(count, capacity, np.int64)
    kind: list[Hashable | None] = [None] * count
    bins: list[list[int]] = [[] for _ in range(count)]
    left = sorted(range(len(lengths)), key=lambda index: -costs[index])
    for start in range(0, count, ranks):
        mean = sum(costs[index] for index in left) / (count - start)
        is_step = by_step and bool(left) and costs[left[0]] > mean and start + ranks < count
        height, stop = (costs[left[0]], start + ranks) if is_step else (np.inf, count)
        later = []
        for index in left:
            fits = (room[start:stop] >= lengths[index]) & (loads[start:stop] + costs[index] <= height)
            if keys[index] is not None:
                fits &= np.array([one is None or one == keys[index] for one in kind[start:stop]])
            if not fits.any():
                later.append(index)
                continue
            found = start + int(np.where(fits, loads[start:stop], np.inf).argmin())
            bins[found].append(index)
            loads[found] += costs[index]
            room[found] -= lengths[index]
            kind[found] = kind[found] if keys[index] is None else keys[index]
        left = later
        if stop == count:
            break
    return None if left else [sorted(members) for members in bins if members]


def _image_key(sample: Descriptor, family: ModelFamily) -> Hashable:
    """Return what samples must agree in to share a batch: keywords, kinds and unpadded dimensions."""
    found: set[Any] = set()
    for name, dtype, whole in sample.tensors:
        rule = family.rule(name)
        if rule.layout != "counts":
            shape = rule.trailing(whole)
            found.add((name, dtype, len(shape) if rule.padded else shape))
    return frozenset(found)


def _steps(bins: Sequence[_Bin], ranks: int, room: int) -> list[list[_Bin]]:
    """Group bins of like cost, those with images apart, and give dummies where some have images."""
    ordered = sorted(bins, key=lambda one: -one.cost)
    with_images = [one for one in ordered if one.images]
    missing = -len(with_images) % ranks
    # The cheapest bins without images fill up the last step that has images.
    joining = [one for one in reversed(ordered) if not one.images and one.tokens <= room][:missing]
    without = [one for one in ordered if not one.images and one not in joining]
    joining += [_Bin()] * (missing - len(joining))
    without += [_Bin()] * (-len(without) % ranks)
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

    An empty one is a padding row, with the optional fields that the samples have, so that all ranks compute
    alike. Raises as `collate`.

    Args:
        samples: Those that the plan was made for, or by index those of the micro-batch, and for an empty one
            any.
        micro_batch: Which of them.
        family: What the model takes.
        pad_token_id: What fills rows.
        dummy: A sample of one image and no loss, from `smallest_dummy`.
        multiple: Makes the width a multiple of this.
        **options: As for `collate`.

    Raises:
        BatchError: The plan needs a dummy and there is none.
    """
    held = [samples[index] for index in micro_batch.samples]
    if micro_batch.dummy:
        if dummy is None:
            problem = "this micro-batch has no image, and others of its step have"
            remedy = "Make a sample of one image with smallest_dummy"
            raise BatchError(problem, where="dummy", remedy=remedy)
        held.append(dummy)
    return collate(
        # A sample in no row gives an empty micro-batch its fields.
        held or [*(samples.values() if isinstance(samples, Mapping) else samples)][:1],
        family,
        pad_token_id=pad_token_id,
        rows=[list(range(len(held)))],
        multiple=multiple,
        **options,
    )


def smallest_dummy(
    samples: Sequence[TrainingSample], *, like: TrainingSample | None = None
) -> TrainingSample | None:
    """Return a sample of the smallest image in the samples, alone and without a loss.

    Needs neither processor nor tokenizer. None where no sample has an image: then no rank needs a dummy. A
    process without images of the data makes one of a recorded conversation that shows a black square.

    Args:
        samples: Where to look.
        like: The dummy has the optional fields of this sample; None for those of the sample it is from.
    """
    found = [(sample, span) for sample in samples for span in sample.media_spans]
    if not found:
        return None
    sample, span = min(found, key=lambda entry: (entry[1].range.length, entry[1].item.nbytes))
    like = like or sample
    count = span.range.length
    zeros = np.zeros(count, np.float32)
    experts = None
    if like.routed_experts is not None:
        _, layers, top_k = like.routed_experts.shape
        choices = np.arange(top_k, dtype=like.routed_experts.dtype)
        experts = RoutedExperts(np.broadcast_to(choices, (count, layers, top_k)))
    return TrainingSample(
        token_ids=sample.token_ids[span.start : span.stop],
        loss_mask=np.zeros(count, np.bool_),
        logprobs=None if like.logprobs is None else zeros,
        multi_modal_data=MultiModalData.of([(replace(span.range, offset=0), span.item)]),
        rewards=None if like.rewards is None else zeros,
        advantages=None if like.advantages is None else zeros,
        loss_weights=None if like.loss_weights is None else zeros,
        routed_experts=experts,
        sample_id="dummy",
    )
