import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mmrender.errors import MediaError
from mmrender.media.levels import Floats, Integers, Levels, PixelArithmetic, cast, compacted, expanded
from mmrender.media.processors.adapter import parse_expansion
from mmrender.media.processors.patches import PatchItem, PatchLayout, smart_resize
from mmrender.sidecar import Repeat, Text
from reference_processors import expansion_text

SIDES = st.integers(1, 4000)
UNIT = st.floats(0.0625, 1.0, width=32)
CHANNELS = st.tuples(UNIT, UNIT, UNIT)
ARITHMETIC = st.builds(
    PixelArithmetic,
    mean=CHANNELS,
    std=CHANNELS,
    rescale=st.sampled_from([1 / 255, 1 / 256, 1 / 127.5, 0.00392156862745098, 1.0]),
    backend=st.sampled_from(["torch", "pil"]),
)


@given(SIDES, SIDES, st.sampled_from([28, 32]), st.integers(1, 2000), st.integers(2, 60))
def test_resized_sides_are_whole_tokens_within_the_bounds(
    height: int, width: int, factor: int, low: int, span: int
) -> None:
    bounds = {"min_pixels": low * factor**2, "max_pixels": low * span * factor**2}
    ratio = max(height, width) / min(height, width)
    if ratio > 200:
        with pytest.raises(MediaError):
            smart_resize(height, width, factor=factor, **bounds)
        return
    resized = smart_resize(height, width, factor=factor, **bounds)
    framed = smart_resize(height, width, factor=factor, frames=2, **bounds)
    for sides in (resized, framed):
        assert all(side >= factor and side % factor == 0 for side in sides)
    rounded = round(height / factor) * round(width / factor) * factor**2
    area = resized[0] * resized[1]
    if rounded <= bounds["max_pixels"]:
        assert area >= bounds["min_pixels"]
    elif min(resized) > factor:  # A side never goes below one token, whatever that does to the area.
        assert area <= bounds["max_pixels"]


@given(ARITHMETIC)
def test_whole_arrays_follow_the_table(arithmetic: PixelArithmetic) -> None:
    levels = np.random.default_rng(0).permutation(np.arange(512) % 256).astype(np.uint8)
    table = arithmetic.table()
    for channel in range(3):
        for dtype in ("float32", "float16", "bfloat16"):
            for count in (512, 511):
                storage = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
                out = np.empty(count, storage)
                arithmetic.write(levels[:count], channel, dtype, out)
                expected = cast(table[channel], dtype)[levels[:count]]
                np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


@given(ARITHMETIC.filter(lambda arithmetic: arithmetic.backend == "torch"))
def test_table_of_the_torch_back_end_is_torchs_own(arithmetic: PixelArithmetic) -> None:
    scale = 1.0 / arithmetic.rescale
    mean, std = (torch.tensor(values) * scale for values in (arithmetic.mean, arithmetic.std))
    levels = torch.arange(256, dtype=torch.uint8).to(torch.float32).expand(3, -1).clone()
    expected = levels.sub_(mean[:, None]).div_(std[:, None])
    np.testing.assert_array_equal(arithmetic.table(), expected.numpy())


@given(arrays.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_rounding_is_torchs(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    half = torch.from_numpy(cast(values, "float16").copy())
    brain = torch.from_numpy(cast(values, "bfloat16").view(np.int16).copy()).view(torch.bfloat16)
    for ours, theirs in ((half, tensor.to(torch.float16)), (brain, tensor.to(torch.bfloat16))):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@hypothesis_settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([2, 14, 16]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    ARITHMETIC,
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_patches_by_the_definition(
    rows: int, columns: int, patch: int, merge: int, temporal: int, arithmetic: PixelArithmetic, dtype: str
) -> None:
    layout = PatchLayout(patch, merge, temporal)
    size = height, width = rows * patch * merge, columns * patch * merge
    planes = np.random.default_rng(rows).integers(0, 256, (1, 3, height, width), dtype=np.uint8)
    grid = (1, height // patch, width // patch)
    common = {"identity": "", "size": size, "grid": grid, "expansion": ()}
    item = PatchItem(**common, frames=planes, layout=layout, arithmetic=arithmetic)
    normalised = np.stack([cast(arithmetic.table()[c], dtype)[planes[0, c]] for c in range(3)])
    cut = normalised.reshape(3, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    repeated = np.repeat(cut[:, :, :, :, :, None], temporal, axis=5)
    expected = repeated.reshape(grid[1] * grid[2], -1)
    got = item.tensors(dtype)["pixel_values"]
    assert got.dtype == (np.uint16 if dtype == "bfloat16" else np.dtype(dtype))
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


@hypothesis_settings(max_examples=60)
@given(ARITHMETIC, st.integers(0, 4), st.randoms(use_true_random=False))
def test_normalised_tiles_are_kept_as_levels(arithmetic: PixelArithmetic, tiles: int, random: object) -> None:
    levels = np.random.default_rng(tiles).integers(0, 256, (1, tiles + 1, 3, 6, 5), dtype=np.uint8)
    values = np.stack([arithmetic.table()[c][levels[..., c, :, :]] for c in range(3)], axis=-3)
    values[0, -1] = 0.0
    kept = compacted(values, arithmetic)
    assert isinstance(kept, Levels)
    assert kept.values.nbytes == values[0, :-1].nbytes // 4
    np.testing.assert_array_equal(expanded(kept, "float32").view(np.uint32), values.view(np.uint32))


ODD = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(arrays.arrays(np.float32, (2, 3, 3, 2), elements=ODD), ARITHMETIC)
def test_any_floats_come_back_as_they_were(values: np.ndarray, arithmetic: PixelArithmetic) -> None:
    kept = compacted(values, arithmetic)
    assert isinstance(kept, Levels | Floats)
    np.testing.assert_array_equal(expanded(kept, "float32").view(np.uint32), values.view(np.uint32))


@given(
    st.sampled_from([np.int64, np.int32, np.uint8, np.bool_]).flatmap(
        lambda dtype: arrays.arrays(
            dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
        )
    )
)
def test_any_integers_come_back_as_they_were(values: np.ndarray) -> None:
    kept = compacted(values, None)
    assert isinstance(kept, Integers)
    again = expanded(kept, "bfloat16")
    assert again.dtype == values.dtype
    np.testing.assert_array_equal(again, values)
    assert kept.values.nbytes <= values.nbytes


PIECES = st.lists(st.sampled_from(["<i>", "<i><i><i>", "<row>", "\n", "i", "<", "<i", "\n\n<i>", ".+", "é"]))


@given(PIECES.map("".join))
def test_expansions_are_cut_without_loss(text: str) -> None:
    expansion = parse_expansion(text, "<i>")
    assert expansion_text(expansion) == text
    assert all(piece.count > 0 for piece in expansion if isinstance(piece, Repeat))
    assert all(piece.text and "<i>" not in piece.text for piece in expansion if isinstance(piece, Text))
    assert sum(piece.count for piece in expansion if isinstance(piece, Repeat)) == text.count("<i>")
