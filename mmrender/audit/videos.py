"""Variations of the video that the sampler saw: other frames, another order of them, or other times."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from blake3 import blake3

from mmrender.audit.report import described
from mmrender.audit.trial import Case, Trial, Variation, with_items
from mmrender.media.processors.patches import PatchItem
from mmrender.media.video import DEFAULT_FPS
from mmrender.sidecar import MediaSpan

_MOST_FRAMES: Final = 32
_FACTORS: Final = (0.5, 2.0, 0.25, 4.0)


def _videos(case: Case) -> Iterator[tuple[MediaSpan, PatchItem]]:
    for span in case.suspects:
        if isinstance(span.item, PatchItem) and span.modality == "video":
            yield span, span.item


def _with_frames(case: Case, span: MediaSpan, item: PatchItem, text: str, order: Sequence[int]) -> Trial:
    frames = np.ascontiguousarray(item.frames[list(order)])
    other = msgspec.structs.replace(item, frames=frames, identity=_identity(item, text))
    statement = f"the sampler saw {described(span)} {text}"
    return Trial(statement, with_items(case.sample, [(span, other)]), since=span.start)


def _identity(item: PatchItem, text: str) -> str:
    """Return an identity that no real item has, so that the changed one is taken for no other."""
    return blake3(f"{item.identity} {text}".encode()).hexdigest()


def _order(case: Case) -> Iterator[Trial]:
    for span, item in _videos(case):
        count = len(item.frames)
        places = list(range(count))
        orders = {"with its frames in reverse order": places[::-1]}
        orders["with each frame one place later"] = [0, *places[:-1]]
        temporal = item.layout.temporal
        orders["with the frames of each time step exchanged"] = [
            place for start in places[::temporal] for place in places[start : start + temporal][::-1]
        ]
        for place in places[: min(count - 1, _MOST_FRAMES)]:
            exchanged = [*places[:place], place + 1, place, *places[place + 2 :]]
            orders[f"with frames {place} and {place + 1} exchanged"] = exchanged
        for text, order in orders.items():
            if order != places:
                yield _with_frames(case, span, item, text, order)


def _lost(case: Case) -> Iterator[Trial]:
    for span, item in _videos(case):
        count = len(item.frames)
        places = list(range(count))
        chosen = {
            f"without frame {place}": [*places[:place], *places[place + 1 :], places[-1]]
            for place in places[:_MOST_FRAMES]
        }
        chosen |= {f"with frame {place} in the place of each": [place] * count for place in (0, count - 1)}
        chosen["with every other frame twice"] = [place // 2 * 2 for place in places]
        for text, order in chosen.items():
            if order != places:
                yield _with_frames(case, span, item, text, order)


def _times(case: Case) -> Iterator[Trial]:
    for span, item in _videos(case):
        if (known := item.second_per_grid) is None:
            continue
        lasting = {f"{factor:g} times as long": known * factor for factor in _FACTORS}
        lasting["a second"] = 1.0
        lasting[f"as long as at {DEFAULT_FPS:g} frames a second"] = item.layout.temporal / DEFAULT_FPS
        for text, seconds in lasting.items():
            other = msgspec.structs.replace(item, second_per_grid=seconds, identity=_identity(item, text))
            statement = f"the sampler took a time step of {described(span)} to last {text}"
            yield Trial(statement, with_items(case.sample, [(span, other)]), since=span.start)


VIDEO_VARIATIONS: Final = (
    Variation("frame order", "pixels", "frames of a video reordered or shifted", _order),
    Variation("frame lost", "pixels", "a frame of a video dropped, or one repeated", _lost),
    Variation("video times", "positions", "another duration of a video's time steps", _times),
)
