"""Faults between sampler and trainer, as pipelines have them, to see what each does and what the audit says.

- `shifted`: loss masks are moved by one token.
- `stale`: pictures are those of the game before.
- `retokenized`: sampled tokens are decoded and encoded again.
- `parsed`: the rest is encoded again, special tokens in what a tool said included.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np

from mmrender import TrainingSample
from mmrender.model.tokenizer import Tokenizer
from mmrender.sidecar import MultiModalData
from mmrender.trajectory.engine_data import AllowedTokens

Fault = Callable[[TrainingSample], TrainingSample]


def fault_of(name: str, tokenizer: Tokenizer) -> Fault:
    """Return the fault of this name; that of no name leaves samples as they are."""
    faults: dict[str, Fault] = {
        "": lambda sample: sample,
        "shifted": shifted,
        "stale": Stale(),
        "retokenized": partial(encoded_again, tokenizer=tokenizer, sampled=True),
        "parsed": partial(encoded_again, tokenizer=tokenizer, sampled=False),
    }
    if name not in faults:
        raise SystemExit(f"there is no fault {name!r}; there are {', '.join(filter(None, faults))}")
    return faults[name]


_MOVED: Final = ("loss_mask", "logprobs", "advantages")


def shifted(sample: TrainingSample) -> TrainingSample:
    """Move what is aligned to sampled tokens by one token."""
    moved = {name: np.roll(getattr(sample, name), -1) for name in _MOVED if getattr(sample, name) is not None}
    # A token that was not allowed could not have been sampled, which a batch would refuse.
    allowed = [
        each._replace(start=each.start - 1, stop=each.stop - 1) for each in sample.allowed if each.forbids
    ]
    return replace(sample, **moved, allowed=tuple(allowed))


class Stale:
    """Gives each game the pictures of the board before."""

    def __init__(self) -> None:
        self._shown: list[tuple[Any, ...]] = []

    def __call__(self, sample: TrainingSample) -> TrainingSample:
        """Replace the pictures by those that the last sample of another board had in the same places."""
        spans = sample.media_spans
        items = tuple(span.item for span in spans)
        own = tuple(item.identity for item in items)
        if not self._shown or own != tuple(item.identity for item in self._shown[-1]):
            self._shown = [*self._shown[-1:], items]
        before = self._shown[0]
        ranges = sample.multi_modal_data.mm_placeholders["image"]
        pictures = [*before[: len(items)], *items[len(before) :]]
        return replace(sample, multi_modal_data=MultiModalData.of(zip(ranges, pictures, strict=True)))


def encoded_again(sample: TrainingSample, *, tokenizer: Tokenizer, sampled: bool) -> TrainingSample:
    """Decode what was sampled, or what was not, and encode it again, pictures left alone.

    Where a part has another number of tokens, values that belong to tokens are cut or filled with zeros.
    """
    parts = list(_parts(sample))
    ids: list[int] = []
    arrays: dict[str, list[Any]] = {name: [] for name in _MOVED if getattr(sample, name) is not None}
    places: list[int] = []
    allowed: list[AllowedTokens] = []
    for start, stop, kind in parts:
        own = before = sample.token_ids[start:stop].tolist()
        if kind == ("sampled" if sampled else "text"):
            own = tokenizer.encode(tokenizer.decode(before))
        elif kind == "picture":
            places.append(len(ids))
        limits = [each for each in sample.allowed if start <= each.start and each.stop <= stop]
        if own == before:
            by = len(ids) - start
            allowed += [each._replace(start=each.start + by, stop=each.stop + by) for each in limits]
        else:  # what each token was chosen among is known no more, but for what no token could be
            whole = {"start": len(ids), "stop": len(ids) + len(own)}
            allowed += [each._replace(**whole) for each in limits if each.forbids]
        ids += own
        for name, values in arrays.items():
            kept = getattr(sample, name)[start:stop][: len(own)]
            fill = kind == "sampled" if name == "loss_mask" else 0
            values.append(np.pad(kept, (0, len(own) - len(kept)), constant_values=fill))
    ranges = sample.multi_modal_data.mm_placeholders.get("image", ())
    items = [span.item for span in sample.media_spans]
    moved = [place.shifted(at - place.offset) for place, at in zip(ranges, places, strict=True)]
    return replace(
        sample,
        token_ids=np.array(ids, np.int32),
        multi_modal_data=MultiModalData.of(zip(moved, items, strict=True)),
        **{name: np.concatenate(values) for name, values in arrays.items()},
        rewards=None,
        loss_weights=None,
        weight_versions=(),
        allowed=tuple(allowed),
    )


def _parts(sample: TrainingSample) -> Iterator[tuple[int, int, str]]:
    """Yield the parts of a sample: start, stop, and `picture`, `sampled` or `text`."""
    kinds = np.where(sample.loss_mask, "sampled", "text").astype(object)
    for number, span in enumerate(sample.media_spans):
        kinds[span.start : span.stop] = number
    start = 0
    for kind, run in groupby(kinds.tolist()):
        stop = start + len(list(run))
        yield start, stop, kind if isinstance(kind, str) else "picture"
        start = stop
