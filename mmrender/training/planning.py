"""Which samples go into which micro-batch of which rank, before any image is expanded.

All ranks take equally many micro-batches. In every step all ranks have images or none has, and the
micro-batches of a step cost about the same, since the slowest of them is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.errors import BatchError
from mmrender.training.batch import TrainingBatch
from mmrender.training.collation import collate
from mmrender.training.families import ModelFamily
from mmrender.training.packing import balance, compute_cost, first_fit_decreasing
from mmrender.training.placing import image_key
from mmrender.trajectory.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one packed row, by index, and whether a dummy image joins them."""

    samples: tuple[int, ...]
    dummy: bool = False


StepPlan = tuple[MicroBatch, ...]
"""One micro-batch for each rank."""


@dataclass(frozen=True, slots=True)
class _Bin:
    samples: tuple[int, ...]
    tokens: int
    cost: float
    images: bool


def plan_steps(
    samples: Sequence[TrainingSample],
    family: ModelFamily,
    *,
    ranks: int,
    max_tokens: int,
    dummy_tokens: int = 0,
    hidden_size: int = 4096,
) -> list[StepPlan]:
    """Give every sample to one micro-batch of one rank.

    Samples are packed by first-fit decreasing; those with images share a bin only if their tensors can be
    joined. If the bins do not go round, the costliest are split between samples, and if that is not enough,
    some ranks get an empty micro-batch, which `collate_micro_batch` makes a padding row or a dummy alone.

    Args:
        samples: All samples of an optimizer step, the same on every rank.
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
    sidecars = [sample.multi_modal_data.mm_items.values() for sample in samples]
    items = [[item for held in sidecar for item in held] for sidecar in sidecars]
    keys = [(image_key(held, family) or frozenset()) if held else None for held in items]
    lengths = [len(sample) for sample in samples]

    def made(members: Sequence[int]) -> _Bin:
        own = [lengths[index] for index in members]
        images = any(items[index] for index in members)
        return _Bin(tuple(members), sum(own), compute_cost(own, hidden_size=hidden_size), images)

    bins = [made(members) for members in first_fit_decreasing(lengths, max_tokens, keys=keys)]
    while len(bins) % ranks and any(len(one.samples) > 1 for one in bins):
        largest = max((one for one in bins if len(one.samples) > 1), key=lambda one: one.cost)
        bins.remove(largest)
        costs = [compute_cost([lengths[index]], hidden_size=hidden_size) for index in largest.samples]
        bins += [made([largest.samples[place] for place in half]) for half in balance(costs, 2)]
    return _by_rank(_steps(bins, ranks, max_tokens - dummy_tokens), ranks)


def _steps(bins: Sequence[_Bin], ranks: int, room: int) -> list[list[tuple[_Bin, bool]]]:
    """Group bins of like cost, those with images apart; say of each whether it needs a dummy."""
    empty = _Bin((), 0, 0.0, False)
    ordered = sorted(bins, key=lambda one: -one.cost)
    with_images, without = [b for b in ordered if b.images], [b for b in ordered if not b.images]
    missing = -len(with_images) % ranks
    joining = [one for one in reversed(without) if one.tokens <= room][:missing]
    joining += [empty] * (missing - len(joining))
    without = [one for one in without if not any(one is other for other in joining)]
    without += [empty] * (-len(without) % ranks)
    whole = [(one, False) for one in with_images] + [(one, True) for one in joining]
    whole += [(one, False) for one in without]
    return [whole[start : start + ranks] for start in range(0, len(whole), ranks)]


def _by_rank(steps: Sequence[Sequence[tuple[_Bin, bool]]], ranks: int) -> list[StepPlan]:
    """Give the costliest bin of each step to the rank that has had least so far."""
    totals = [0.0] * ranks
    plan = []
    for step in steps:
        order = sorted(range(ranks), key=totals.__getitem__)
        given: dict[int, MicroBatch] = {}
        for rank, (one, dummy) in zip(order, sorted(step, key=lambda entry: -entry[0].cost), strict=True):
            totals[rank] += one.cost
            given[rank] = MicroBatch(one.samples, dummy)
        plan.append(tuple(given[rank] for rank in range(ranks)))
    return plan


def collate_micro_batch(
    samples: Sequence[TrainingSample],
    micro_batch: MicroBatch,
    family: ModelFamily,
    *,
    pad_token_id: int,
    dummy: TrainingSample | None = None,
    **options: Any,
) -> TrainingBatch:
    """Build one micro-batch of a plan: a packed row.

    An empty one is a padding row, with advantages, rewards and router choices where the samples have them, so
    that all ranks compute alike.

    Args:
        samples: Those that the plan was made for.
        micro_batch: Which of them.
        family: What the model takes.
        pad_token_id: What fills rows.
        dummy: The sample of one image and no loss, see `mmrender.training.dummy`.
        options: As for `collate`.

    Raises:
        BatchError: The plan needs a dummy and there is none, or as `collate`.
    """
    held = [samples[index] for index in micro_batch.samples]
    if micro_batch.dummy:
        if dummy is None:
            raise BatchError(
                "this micro-batch has no image, and others of its step have",
                where="dummy",
                expected="a sample of one image",
                got="None",
                remedy="Make one with smallest_dummy or blank_dummy",
            )
        held.append(dummy)
    rows = [list(range(len(held)))]
    # A sample in no row lends an empty micro-batch its form.
    return collate(held or samples[:1], family, pad_token_id=pad_token_id, rows=rows, **options)
