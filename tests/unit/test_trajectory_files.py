"""Files of trajectories: what was appended survives a torn tail, and damage costs its own record."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

import mmcodecs
from item_cases import same_tensors
from kit import assistant, error_of, shown
from mmrender import Trajectory
from mmrender.errors import TrajectoryError
from mmrender.trajectory import (
    RoutedExperts,
    TrajectoryReader,
    TrajectoryWriter,
    load_trajectories,
    save_trajectories,
)
from mmrender.trajectory.tree import trajectories_from_wire, trajectories_to_wire
from tree_cases import A, assert_same, recorded, sidecar

RECORDED = Path(__file__).parents[1] / "data/trajectories"
SHOWS_A = sidecar((1, A))
PROMPT = [1, *[9] * 6, 2]


def rollout(name, token=5):
    trajectory = Trajectory(name, extra={"env": "grid"})
    messages = [{"role": "user", "content": [shown(b"\x89PNG")]}]
    trajectory.append(
        PROMPT,
        [token],
        logprobs=[-0.5],
        multi_modal_data=SHOWS_A,
        messages=messages,
        finish_reason="stop",
        reward=1.0,
        extra={"note": "ä"},
        routed_experts=RoutedExperts(np.ones((8, 2, 2), np.uint8)),
    )
    return trajectory


def test_trajectories_survive_a_file_with_and_without_images_of_messages(tmp_path):
    path = tmp_path / "run.mmc"
    first, group = rollout("a"), [rollout("b", 6), rollout("c", 7)]
    assert save_trajectories(path, [first, group]) == 2
    read = load_trajectories(path)
    for old, new in zip([first, *group], read, strict=True):
        # Without the image, whose pixels are in the item.
        assert new.steps[0].messages == [{"role": "user", "content": [shown(None)]}]
        assert same_tensors(old.items[0], new.items[0])
        assert new.steps[0].routed_experts == old.steps[0].routed_experts
    records = TrajectoryReader(path)
    assert [[t.trajectory_id for t in record] for record in records] == [["a"], ["b", "c"]]
    assert records[-1][1].trajectory_id == "c"
    with pytest.raises(IndexError):
        records[2]
    (sample,) = rollout("a").samples(require_logprobs=False)
    for other in (sample, [sample]):
        error = error_of(TrajectoryError, save_trajectories, tmp_path / "other", [other])
        assert error == f"{tmp_path}/other: a file holds trajectories alone - got TrainingSample"
    save_trajectories(tmp_path / "run", [rollout("a")], media_sources="keep")
    assert_same(rollout("a"), load_trajectories(tmp_path / "run")[0])


def test_files_from_before_tools_were_kept_are_read():
    (read,) = load_trajectories(RECORDED / "without_tools.mmr")
    assert [step.tools for step in read.steps] == [None, None]
    assert [sample.tools for sample in read.samples()] == [None]
    assert read.steps[1].token_ids.tolist() == [1, 2, *[9] * 6, 3, 20, 21, 4, 22]
    assert read.steps[0].messages[1] == assistant("!")


@pytest.mark.parametrize("version", [3, 4])
def test_files_of_earlier_versions_are_read(version, tmp_path):
    group = recorded(limited=version == 4)
    save_trajectories(tmp_path / "now", [group])
    now = load_trajectories(tmp_path / "now")
    read = load_trajectories(RECORDED / f"version_{version}.mmr")
    for old, new in zip(read, [*now, now[0]], strict=True):
        assert_same(old, new)


def test_a_file_is_taken_up_again(tmp_path):
    with TrajectoryWriter(tmp_path / "run", sync=True) as file:
        assert (file.append(rollout("a")), file.append(rollout("b"))) == (0, 1)
    with TrajectoryWriter(tmp_path / "run") as file:
        assert file.append(rollout("c")) == 2
        assert len(file) == 3
        error = error_of(TrajectoryError, TrajectoryWriter, tmp_path / "run")
        assert "another writer has the file open" in error
    assert [trajectory.trajectory_id for trajectory in load_trajectories(tmp_path / "run")] == ["a", "b", "c"]


@pytest.mark.parametrize("lost", [1, 70, 500])
def test_a_torn_record_costs_nothing_that_was_appended_before(tmp_path, lost):
    path = tmp_path / "run"
    writer = mmcodecs.RecordWriter(path)
    trajectories = TrajectoryWriter(tmp_path / "other")
    trajectories.append(rollout("a"))
    trajectories.append(rollout("b"))
    content = (tmp_path / "other").read_bytes()  # not closed: there is no index
    writer.close()
    trajectories.close()
    path.write_bytes(content[:-lost])
    reader = TrajectoryReader(path)
    assert [[t.trajectory_id for t in record] for record in reader] == [["a"]]
    assert reader.torn_bytes > 0
    with TrajectoryWriter(path) as file:
        file.append(rollout("c"))
    assert [trajectory.trajectory_id for trajectory in load_trajectories(path)] == ["a", "c"]


@pytest.mark.parametrize(
    ("spoil", "left", "message"),
    [
        (lambda starts, data: data[:-70], ["a", "b"], ": torn after 2 records - "),
        (lambda starts, data: flipped(data, starts[1] + 900), ["a", "c"], "[1]: left out, damaged - got "),
        (
            lambda starts, data: flipped(data, starts[1] + 17),
            ["a", "c"],
            "the header of a message is damaged",
        ),
        (lambda starts, data: flipped(data, starts[0] + 3), ["b", "c"], "the header of a message is damaged"),
    ],
    ids=["torn", "damaged", "header", "first header"],
)
def test_loading_says_what_is_lost_and_gives_the_rest(tmp_path, spoil, left, message):
    path, starts = tmp_path / "run", []
    with TrajectoryWriter(path) as file:
        for name in "abc":
            starts.append(path.stat().st_size)
            file.append(rollout(name))
    path.write_bytes(spoil(starts, path.read_bytes()))
    with pytest.warns(RuntimeWarning) as warned:
        found = load_trajectories(path)
    assert [trajectory.trajectory_id for trajectory in found] == left
    assert len(warned) == 1
    assert message in str(warned[0].message)


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def with_new_fields(value):
    """Plain data with a field more in every mapping that is no mapping of names of the caller's."""
    if isinstance(value, list):
        return [with_new_fields(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: with_new_fields(one) for key, one in value.items()} | {"from_a_newer_writer": [1, {"a": 2}]}


def test_fields_of_a_newer_writer_do_not_break_a_reader():
    trajectory = rollout("a")
    wire = trajectories_to_wire([trajectory], share=False)
    table = msgspec.msgpack.decode(wire["table"].tobytes())
    for row in table["trajectories"]:
        for step in row["steps"]:
            step["media"] = [[*medium, *[None] * (4 - len(medium)), "newer"] for medium in step["media"]]
    table = with_new_fields(table) | {"messages": table["messages"]}
    newer = {
        **wire,
        "table": np.frombuffer(msgspec.msgpack.encode(table), np.uint8),
        "items": with_new_fields(wire["items"]),
        "newer": 1,
    }
    (read,) = trajectories_from_wire(newer)
    (expected,) = trajectories_from_wire(wire)
    assert_same(expected, read)


def test_one_record_is_read_by_memory_map(tmp_path):
    save_trajectories(tmp_path / "run", [rollout("a"), rollout("b")])
    item = TrajectoryReader(tmp_path / "run")[1][0].items[0]
    assert not item.frames.flags.owndata
    assert not item.frames.flags.writeable
    assert item.frames.ctypes.data % 64 == 0


def test_files_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "text").write_text("x" * 200)
    for open_it in (TrajectoryReader, TrajectoryWriter):
        error = error_of(TrajectoryError, open_it, tmp_path / "text")
        assert error.startswith(
            f"{tmp_path / 'text'}: this file of trajectories cannot be used - got byte 0: not a record file"
        )
    with mmcodecs.RecordWriter(tmp_path / "other") as file:
        file.append({"format": "something else"})
        file.append({"format": "more"})
    with pytest.raises(TrajectoryError, match="does not hold trajectories that this release can read"):
        load_trajectories(tmp_path / "other")
    content = bytearray((tmp_path / "other").read_bytes())
    content[100] ^= 1
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(TrajectoryError, match="this file of trajectories cannot be used"):
        load_trajectories(tmp_path / "other")


def test_what_cannot_be_stored_is_refused_and_the_file_goes_on(tmp_path):
    bad = rollout("bad")
    bad.extra["image"] = Image.new("RGB", (2, 2))
    with TrajectoryWriter(tmp_path / "run") as file:
        file.append(rollout("a"))
        error = error_of(TrajectoryError, file.append, bad)
        assert error.startswith(
            f"{tmp_path / 'run'}[1]: a trajectory cannot be stored - got $.extras.trajectories[0].image:"
        )
        file.append(rollout("b"))
    assert len(load_trajectories(tmp_path / "run")) == 2
