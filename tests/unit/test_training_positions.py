"""M-RoPE positions: a layout by hand, images that touch, and grids that do not fit."""

import numpy as np

from mmrender.training.positions import MRope, mrope_position_ids

ROPE = MRope(merge=2, frames_apart=True)


def test_two_images_that_touch_stay_two_and_nothing_has_no_positions() -> None:
    got = mrope_position_ids([[1, 1, 1, 1, 0]], ROPE, image_grid_thw=[[1, 2, 4], [1, 4, 2]])
    assert got[:, 0].tolist() == [[0, 0, 2, 2, 4], [0, 0, 2, 3, 4], [0, 1, 2, 2, 4]]
    assert mrope_position_ids(np.zeros((2, 0), np.int64), ROPE).shape == (3, 2, 0)
    assert mrope_position_ids([[0, 0]], ROPE, segments=[[]]).tolist() == [[[0, 0]]] * 3
