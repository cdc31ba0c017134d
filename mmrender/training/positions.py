"""M-RoPE position ids: time, height and width of every token, as the Qwen-VL and GLM-4V models number them.

A text token has one number on all three axes. An image's tokens have those of their place in the merged grid,
counted from where the text before has come to; the text after continues by the longer side of the grid.
Each segment of a packed row starts at zero. Source: `get_rope_index` of Transformers 5.23 in
`models/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_5,glm4v}`; unlike there, an image ends where its grid ends, so two
images that touch stay two, and a grid too many or too few is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError
from mmrender.tokens.token_types import TOKEN_TYPES

IntArray: TypeAlias = npt.NDArray[np.int64]
SPLIT_FRAMES: Final = frozenset(
    {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"}
)
"""Model types whose videos stand frame by frame, each after its time stamp."""


@dataclass(frozen=True, slots=True)
class MRope:
    """How one family numbers tokens.

    Attributes:
        merge: Side in patches of the square that becomes one token (`vision_config.spatial_merge_size`).
        frames_apart: Whether each time step of a video is a run of its own, with text between.
        tokens_per_second: Positions a second of video takes, for families that number time in seconds.
    """

    merge: int
    frames_apart: bool
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class _Runs:
    """Feature tokens of one modality, one run for each grid.

    Attributes:
        starts: First token of each run, `(n,)`.
        grids: Merged grids `(t, h, w)`, `(n, 3)`.
        intervals: Positions between time steps, float32 `(n,)`.
    """

    starts: IntArray
    grids: IntArray
    intervals: npt.NDArray[np.float32]

    @property
    def sizes(self) -> IntArray:
        return np.asarray(self.grids.prod(1), np.int64)


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
        token_types: `mm_token_type_ids`, `(rows, width)`: 0 text, 1 image, 2 video.
        rope: How the family numbers tokens.
        image_grid_thw: Grids in patches, `(images, 3)`, of all rows in order.
        video_grid_thw: The same of the videos.
        second_per_grid_ts: Seconds a time step of each video lasts, `(videos,)`; 1 where not given. Only
            for families with `tokens_per_second`.
        segments: `(start, length)` of the sequences in each row; one that fills the row where not given.

    Raises:
        BatchError: Grids and runs of feature tokens do not match one for one, or a grid is not divisible by
            the merge.
    """
    types = np.asarray(token_types)
    rows, width = types.shape
    segments = [[(0, width)]] * rows if segments is None else segments
    spans = [(row * width + a, n) for row, own in enumerate(segments) for a, n in own if n]
    owner = np.full(rows * width, -1, np.int64)  # the segment that each token belongs to
    for number, (start, length) in enumerate(spans):
        owner[start : start + length] = number
    inside = owner >= 0
    flat = np.where(inside, types.reshape(-1), 0)
    advance = (inside & (flat == 0)).astype(np.int64)
    found = []
    for modality, grids in (("image", image_grid_thw), ("video", video_grid_thw)):
        merged, intervals = _merged(modality, grids, second_per_grid_ts, rope)
        tokens = np.flatnonzero(flat == TOKEN_TYPES[modality])
        _check_count(modality, tokens, merged, width)
        ends = np.cumsum(merged.prod(1))
        starts, lasts = tokens[ends - merged.prod(1)], tokens[ends - 1]
        _check_whole(modality, (starts, lasts, owner), merged, width)
        runs = _Runs(starts, merged, intervals)
        advance[runs.starts + runs.sizes - 1] = runs.grids[:, 1:].max(1, initial=0)
        found.append(runs)
    before = np.cumsum(advance) - advance
    firsts = np.array([start for start, _ in spans], np.int64)
    base = before - np.append(before[np.minimum(firsts, flat.size - 1)], 0)[owner]
    out = np.where(inside, base, 0)[None].repeat(3, axis=0)
    for runs in found:
        _add_places(out, runs)
    return out.reshape(3, rows, width)


def _merged(modality: str, grids: Any, seconds: Any, rope: MRope) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Return the grids in tokens, and the positions between their time steps."""
    array = np.asarray(np.zeros((0, 3)) if grids is None else grids, np.int64)
    intervals = np.ones(len(array), np.float32)
    if modality == "video" and rope.tokens_per_second is not None:
        each = np.ones(len(array), np.float32) if seconds is None else np.asarray(seconds, np.float32)
        intervals = np.float32(rope.tokens_per_second) * each
    merged = array // np.array([1, rope.merge, rope.merge])
    bad = np.flatnonzero((array[:, 1:] % rope.merge).any(1) | (array < 1).any(1))
    if len(bad):
        raise BatchError(
            "a grid cannot be merged whole",
            where=f"{modality}_grid_thw[{bad[0]}]",
            expected=f"(t, h, w) of 1 or more, height and width divisible by {rope.merge}",
            got=str(array[bad[0]].tolist()),
        )
    if modality == "video" and rope.frames_apart:
        steps = merged[:, 0]
        merged, intervals = merged.repeat(steps, axis=0), intervals.repeat(steps)
        merged[:, 0] = 1
    return merged, intervals


def _check_count(modality: str, tokens: IntArray, merged: IntArray, width: int) -> None:
    """Check that grids and feature tokens are equally many."""
    covered = int(merged.prod(1).sum())
    if covered < len(tokens):
        place = int(tokens[covered])
        raise BatchError(
            f"{modality} tokens without a grid",
            where=f"row {place // width}, token {place % width}",
            expected=f"{modality}_grid_thw for all {len(tokens)} {modality} tokens",
            got=f"{len(merged)} grids for {covered}",
        )
    if covered > len(tokens):
        ends = np.cumsum(merged.prod(1))
        raise BatchError(
            f"a grid without {modality} tokens",
            where=f"{modality}_grid_thw, run {int(np.searchsorted(ends, len(tokens), 'right'))}",
            expected=f"grids for {len(tokens)} {modality} tokens",
            got=f"{len(merged)} grids for {covered}",
        )


def _check_whole(
    modality: str, bounds: tuple[IntArray, IntArray, IntArray], merged: IntArray, width: int
) -> None:
    """Check that the tokens of each grid are one run within one segment."""
    starts, lasts, owner = bounds
    sizes = merged.prod(1)
    broken = np.flatnonzero((lasts - starts + 1 != sizes) | (owner[starts] != owner[lasts]))
    if len(broken):
        run, place = int(broken[0]), int(starts[broken[0]])
        raise BatchError(
            f"the tokens of one {modality} grid are not one run",
            where=f"row {place // width}, token {place % width}",
            expected=f"{int(sizes[run])} {modality} tokens in a row",
            got=f"the last of them at row {int(lasts[run]) // width}, token {int(lasts[run]) % width}",
        )


def _add_places(out: IntArray, runs: _Runs) -> None:
    """Add each feature token's place in its grid to the position where its run starts."""
    sizes = runs.sizes
    local = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    _, height, width = (np.repeat(side, sizes) for side in runs.grids.T)
    time = local // (height * width)
    # torch multiplies an integer range by a float in float32, and cuts towards zero.
    spaced = (time.astype(np.float32) * np.repeat(runs.intervals, sizes)).astype(np.int64)
    tokens = local + np.repeat(runs.starts, sizes)
    out[0, tokens] += spaced
    out[1, tokens] += local // width % height
    out[2, tokens] += local % width
