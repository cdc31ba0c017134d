"""M-RoPE position ids: time, height and width of every token, as the Qwen-VL and GLM-4V models number them.

A text token has the same number on all three axes. An image's tokens are numbered by their place in the
merged grid, counted from the number that the text before it has reached. The text after it continues from
there plus the longer side of the grid; Qwen's omni models count the time of a video, too. Tokens of audio are
numbered as text. A video and its sound track, whose tokens alternate, are both numbered from the start of
their run, and text continues after whichever of them is written last. Each segment of a packed row starts at
zero.

Source: `get_rope_index` of Transformers 5.23 in
`models/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_5,glm4v,qwen2_5_omni,qwen3_omni_moe}`. In
contrast, an image ends with its grid, so two images that touch stay two, and a grid too many or too few is an
error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError
from mmrender.sidecar import TOKEN_TYPES

IntArray: TypeAlias = npt.NDArray[np.int64]
SPLIT_FRAMES: Final = frozenset(
    {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"}
)
"""Model types whose videos are written frame by frame, each after its time stamp."""
OMNI: Final = frozenset({"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"})
"""Model types of Qwen's omni models."""
MROPE: Final = SPLIT_FRAMES | OMNI | {"qwen2_vl", "qwen2_5_vl"}
"""Model types that number tokens on three axes."""


@dataclass(frozen=True, slots=True)
class MRope:
    """Rule by which one family numbers tokens.

    Attributes:
        merge: Side in patches of the square that becomes one token (`vision_config.spatial_merge_size`).
        frames_apart: Whether each time step of a video is a run of its own, with text between.
        tokens_per_second: Positions a second of video takes, for families that number time in seconds.
        counts_time: Whether text continues after the time of a video, if that is longer than its sides.
        is_whole: Whether times are cut to whole positions. Models that do not cut them take floats, which
            batches do not hold.
        joins_edges: Whether each pair of tokens around a video with a sound track has one position.
    """

    merge: int
    frames_apart: bool
    tokens_per_second: float | None = None
    counts_time: bool = False
    is_whole: bool = True
    joins_edges: bool = False


def mrope_position_ids(
    token_types: npt.ArrayLike,
    rope: MRope,
    *,
    image_grid_thw: npt.ArrayLike | None = None,
    video_grid_thw: npt.ArrayLike | None = None,
    second_per_grid_ts: npt.ArrayLike | None = None,
    segments: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> IntArray:
    """Return position ids, int64 `(3, rows, width)`: time, height and width. Tokens of no segment have 0.

    Args:
        token_types: `mm_token_type_ids`, `(rows, width)`: 0 text, 1 image, 2 video, 3 audio.
        rope: How the family numbers tokens.
        image_grid_thw: Grids in patches, `(images, 3)`, of all rows in order.
        video_grid_thw: The same of the videos.
        second_per_grid_ts: Seconds a time step of each video lasts, `(videos,)`, by default 1. Only for
            families with `tokens_per_second`.
        segments: `(start, length)` of the sequences in each row, None for one that fills the row.

    Raises:
        BatchError: Grids and runs of feature tokens do not match one for one, a grid is not divisible by the
            merge, or the family numbers a video in parts of positions.
    """
    types = np.asarray(token_types)
    rows, width = types.shape
    segments = [[(0, width)]] * rows if segments is None else segments
    spans = [(row * width + start, n) for row, own in enumerate(segments) for start, n in own if n]
    owner = np.full(rows * width, -1, np.int64)  # the segment that each token belongs to
    for number, (start, length) in enumerate(spans):
        owner[start : start + length] = number
    inside = owner >= 0
    flat = np.where(inside, types.reshape(-1), 0)
    is_text = (flat == 0) | (flat == TOKEN_TYPES["audio"])
    advance = (inside & is_text).astype(np.int64)
    joint = _with_sound(flat, owner) if rope.counts_time else []
    local = np.zeros((3, flat.size), np.int64)  # positions within a run, from its start
    for modality, values, seconds in (
        ("image", image_grid_thw, None),
        ("video", video_grid_thw, second_per_grid_ts),
    ):
        tokens, grids, intervals = _runs(
            modality, values, seconds, rope, flat=flat, owner=owner, width=width, joint=joint
        )
        sides = grids[:, 1:].max(1, initial=0)
        if rope.counts_time:
            sides = np.maximum(sides, ((grids[:, 0] - 1) * intervals).astype(np.int64) + 1)
        sizes = grids.prod(1)
        advance[tokens[np.cumsum(sizes) - 1]] = sides
        place = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        _, height, width_ = (np.repeat(side, sizes) for side in grids.T)
        time = place // (height * width_)
        # torch multiplies an integer range by a float in float32, and cuts towards zero.
        local[0, tokens] = (time.astype(np.float32) * np.repeat(intervals, sizes)).astype(np.int64)
        local[1, tokens] = place // width_ % height
        local[2, tokens] = place % width_
    for start, stop in joint:
        kinds = flat[start:stop]
        sound = start + np.flatnonzero(kinds == TOKEN_TYPES["audio"])
        local[:, sound] = np.arange(len(sound))
        last = start + int(np.flatnonzero(kinds != kinds[-1])[-1]) + 1
        advance[start:stop] = 0
        advance[stop - 1] = local[:, last:stop].max() + 1
        for edge in (start - 2, stop) if rope.joins_edges else ():
            if 0 <= edge < flat.size and owner[edge] == owner[start]:
                advance[edge] = 0
    before = np.cumsum(advance) - advance
    firsts = np.array([start for start, _ in spans], np.int64)
    base = before - np.append(before[np.minimum(firsts, flat.size - 1)], 0)[owner]
    out: IntArray = np.where(inside, base + local, 0)
    return out.reshape(3, rows, width)


def _with_sound(flat: IntArray, owner: IntArray) -> list[tuple[int, int]]:
    """Return the runs `[start, stop)` in which tokens of a video and of its sound track alternate."""
    sound = TOKEN_TYPES["audio"]
    moving = (flat == TOKEN_TYPES["video"]) | (flat == sound)
    changes = np.flatnonzero((moving[1:] != moving[:-1]) | (owner[1:] != owner[:-1])) + 1
    bounds = [0, *changes.tolist(), flat.size]
    runs = [(start, stop) for start, stop in pairwise(bounds) if start < stop and moving[start]]
    return [(start, stop) for start, stop in runs if 0 < np.sum(flat[start:stop] == sound) < stop - start]


def _runs(
    modality: str,
    grid_thw: Any,
    seconds: Any,
    rope: MRope,
    *,
    flat: IntArray,
    owner: IntArray,
    width: int,
    joint: Sequence[tuple[int, int]],
) -> tuple[IntArray, IntArray, npt.NDArray[np.float32]]:
    """Find the run of feature tokens of each grid of one modality.

    `flat` are the token types of all rows, and `owner` the segments that tokens belong to. `joint` are runs
    that a video shares with its sound track. Returns the feature tokens of all grids, each merged grid
    `(n, 3)`, and the positions between its time steps `(n,)`.
    """
    array = np.asarray(np.zeros((0, 3)) if grid_thw is None else grid_thw, np.int64)
    bad = np.flatnonzero((array[:, 1:] % rope.merge).any(1) | (array < 1).any(1))
    if len(bad):
        raise BatchError(
            "a grid cannot be merged whole",
            where=f"{modality}_grid_thw[{bad[0]}]",
            expected=f"(t, h, w) of 1 or more, height and width divisible by {rope.merge}",
            got=str(array[bad[0]].tolist()),
        )
    grids = array // np.array([1, rope.merge, rope.merge])
    intervals = np.ones(len(grids), np.float32)
    if modality == "video" and rope.tokens_per_second is not None:
        lasting = intervals if seconds is None else np.asarray(seconds, np.float32)
        intervals = np.float32(rope.tokens_per_second) * lasting
        parts = np.flatnonzero(intervals % 1)
        if len(parts) and not rope.is_whole:
            raise BatchError(
                "this family numbers the time steps of the video in parts of positions",
                where=f"second_per_grid_ts[{parts[0]}]",
                expected=f"a whole number of positions for each step, {rope.tokens_per_second:g} a second",
                got=f"{intervals[parts[0]]:g}",
                remedy="Sample the video's frames at another rate",
            )
    if modality == "video" and rope.frames_apart:
        steps = grids[:, 0]
        grids, intervals = grids.repeat(steps, axis=0), intervals.repeat(steps)
        grids[:, 0] = 1
    sizes = grids.prod(1)
    ends = np.cumsum(sizes)
    covered = int(sizes.sum())
    tokens = np.flatnonzero(flat == TOKEN_TYPES[modality])
    if covered != len(tokens):
        run = int(np.searchsorted(ends, len(tokens), "right"))
        where = f"{modality}_grid_thw, run {run}"
        if covered < len(tokens):
            where = f"row {tokens[covered] // width}, token {tokens[covered] % width}"
        raise BatchError(
            f"{modality} tokens and grids do not match",
            where=where,
            expected=f"grids for {len(tokens)} {modality} tokens",
            got=f"{len(grids)} grids for {covered}",
        )
    starts, lasts = tokens[ends - sizes], tokens[ends - 1]
    lengths = lasts - starts + 1
    for start, stop in joint if modality == "video" else ():
        within = (starts >= start) & (lasts < stop)
        if np.count_nonzero(within) == 1:
            lengths[within] = sizes[within]
    broken = np.flatnonzero((lengths != sizes) | (owner[starts] != owner[lasts]))
    if len(broken):
        run, place = int(broken[0]), int(starts[broken[0]])
        raise BatchError(
            f"the tokens of one {modality} grid are not one run",
            where=f"row {place // width}, token {place % width}",
            expected=f"{int(sizes[run])} {modality} tokens in a row",
            got=f"the last of them at row {int(lasts[run]) // width}, token {int(lasts[run]) % width}",
        )
    return tokens, grids, intervals
