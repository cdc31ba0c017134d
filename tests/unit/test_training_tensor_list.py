"""`TensorList`: rows of different lengths in one tensor."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmcodecs
from mmrender.training import TensorList

LENGTHS = (2, 0, 3, 1)


def made(lengths: Any = LENGTHS, trailing: Any = (4,), dtype: Any = torch.float32) -> TensorList:
    count = sum(lengths) * int(np.prod(trailing))
    values = torch.arange(count).reshape(sum(lengths), *trailing).to(dtype)
    return TensorList(values, tuple(lengths))


def test_rows_and_slices_are_views() -> None:
    rows = made()
    assert [row.shape[0] for row in rows] == [2, 0, 3, 1]
    assert torch.equal(rows[-1], rows.values[5:])
    assert rows[2].data_ptr() == rows.values[2:].data_ptr()
    assert rows[1].shape == (0, 4)
    assert rows[1:3].lengths == (0, 3)
    assert rows[1:3].values.data_ptr() == rows.values[2:].data_ptr()
    assert rows[-2:] == TensorList(rows.values[2:], (3, 1))
    assert len(rows[3:1]) == 0
    assert rows[::-1].lengths == (1, 3, 0, 2)
    assert torch.equal(rows[::-1][1], rows[2])
    assert repr(rows) == "TensorList(4 rows of ['...', 4], torch.float32, lengths=(2, 0, 3, 1))"


def test_indices_of_numpy_and_torch() -> None:
    rows = made()
    for places in ([2, -1], np.array([2, -1]), torch.tensor([2, -1]), (np.int64(2), 3)):
        assert rows.select(places) == rows[places] == rows[[2, 3]]
    assert torch.equal(rows[np.int64(2)], rows[2])
    for index in (4, -5):
        with pytest.raises(IndexError):
            rows[index]
        with pytest.raises(IndexError):
            rows.select([index])


def test_to_casts_floats_only() -> None:
    ids = made(dtype=torch.int64)
    assert ids.to(torch.bfloat16) == ids
    assert ids.to("cpu", torch.bfloat16).dtype == torch.int64
    assert made(dtype=torch.bool).to(torch.float16).dtype == torch.bool
    pixels = made().to(torch.bfloat16)
    assert (pixels.dtype, pixels.lengths) == (torch.bfloat16, LENGTHS)
    assert made().to("cpu").dtype == torch.float32
    assert made().to(dtype=torch.float16).dtype == torch.float16


def test_cat_of_lists_with_images_and_without() -> None:
    rows, none = made(), TensorList.empty(2)
    joined = TensorList.cat([none, rows, none])
    assert joined.lengths == (0, 0, *LENGTHS, 0, 0)
    assert torch.equal(joined.values, rows.values)
    assert joined.trailing == (4,)
    assert all(row.shape[1:] == (4,) for row in joined)
    assert len(TensorList.cat([none, none])) == 4
    assert TensorList.cat([rows, rows]).lengths == LENGTHS * 2


def test_lists_that_differ_are_not_equal() -> None:
    others = [made((3, 0, 2, 1)), made(dtype=torch.float64), TensorList(made().values + 1, LENGTHS), [1]]
    assert all(made() != other for other in others)
    assert TensorList.empty(2, (3,)) != TensorList.empty(2, (4,))


def test_padded() -> None:
    padded = made((1, 2), (2,)).padded(-1)
    assert padded.tolist() == [[[0, 1], [-1, -1]], [[2, 3], [4, 5]]]
    rows = made((2, 2))
    assert rows.padded().data_ptr() == rows.values.data_ptr()
    assert TensorList.empty(3, (5,)).padded().shape == (3, 0, 5)


@given(
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]),
)
def test_round_trips(lengths: list[int], trailing: list[int], dtype: Any) -> None:
    rows = made(lengths, trailing, dtype)
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert copy.deepcopy(rows) == rows
    message = mmcodecs.encode(rows)
    assert mmcodecs.decode(message, framework="torch", type=TensorList) == rows
    assert TensorList.from_rows(list(rows)) == rows if lengths else True
    assert TensorList.cat([rows[:1], rows[1:]]) == rows


def test_a_pickled_slice_leaves_the_rest_behind() -> None:
    whole = made((1, 10_000))
    assert len(pickle.dumps(whole[:1])) < 2_000
    assert pickle.loads(pickle.dumps(whole[:1])) == whole[:1]
