"""A trajectory written in pieces while it grows equals the trajectory, wherever it is cut and read back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmcodecs
from kit import error_of
from mmrender import Trajectory
from mmrender.errors import TrajectoryError
from mmrender.trajectory.pieces import TrajectoryPieces
from mmrender.trajectory.tree import trajectories_to_wire
from tree_cases import TOOLS, Call, assert_same, calls, grown


def carried(piece):
    return mmcodecs.decode(mmcodecs.encode(piece))


@given(rollout=calls(), cuts=st.lists(st.sampled_from(["go on", "write", "restart"]), min_size=7, max_size=7))
def test_pieces_make_the_same_tree(rollout, cuts):
    pieces, file = TrajectoryPieces(Trajectory("t")), []
    for call, cut in zip(rollout, cuts, strict=False):
        call.append_to(pieces.trajectory)
        if cut != "go on":
            file.append(carried(pieces.next()))
        if cut == "restart":
            pieces = TrajectoryPieces.restored("t", file)
    file.append(carried(pieces.next()))
    whole = grown(rollout)
    restored = TrajectoryPieces.restored("t", file).trajectory
    for each in (pieces.trajectory, restored):
        each.extra = whole.extra
        assert_same(whole, each)


def test_items_tools_and_tokens_are_in_one_piece():
    first = Call([10, ("A", 2), 11], [20, 21], 4)
    again = Call([*first.segments, *first.completion, 12, ("A", 2)], [20], 5)
    pieces = TrajectoryPieces(Trajectory("t"))
    written = []
    for call in (first, again):
        call.append_to(pieces.trajectory, tools=TOOLS)
        written.append(pieces.next())
    assert [len(piece["items"]["items"]) for piece in written] == [1, 0]
    assert [b"zoom" in piece["table"].tobytes() for piece in written] == [True, False]
    assert pieces.next()["table"].nbytes < 40
    assert pieces.written == 2
    steps = TrajectoryPieces.restored("t", map(carried, written)).trajectory.steps
    assert steps[0].tools is steps[1].tools


def test_pixels_are_views_of_the_piece():
    trajectory = grown([Call([10, ("A", 2)], [20], 1)])
    message = mmcodecs.encode(TrajectoryPieces(trajectory).next())
    item = TrajectoryPieces.restored("t", [mmcodecs.decode(message)]).trajectory.items[0]
    assert np.shares_memory(item.frames, np.frombuffer(message, np.uint8))


def test_a_trajectory_is_no_piece_and_pieces_have_an_order():
    rollout = [Call([10, ("A", 2)], [20], 1), Call([10, ("A", 2), 20, 13], [21], 2)]
    whole = trajectories_to_wire([grown(rollout)])
    sentence = error_of(TrajectoryError, TrajectoryPieces.restored, "t", [whole])
    assert sentence.startswith("wire: the data does not hold trajectories that this release can read")
    pieces, file = TrajectoryPieces(Trajectory("t")), []
    for call in rollout:
        call.append_to(pieces.trajectory)
        file.append(carried(pieces.next()))
    with pytest.raises(TrajectoryError, match="base is malformed"):
        TrajectoryPieces.restored("t", file[1:])
