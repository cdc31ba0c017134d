"""Trajectories over the codec: damage is named, pixels are views, messages lose no text."""

import copy
import pickle
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

import mmcodecs
from kit import assistant, error_of, shown, user
from mmrender import Trajectory
from mmrender.errors import InputError, PlaceholderError, TrajectoryError
from mmrender.messages import ImagePart, Message, TextPart, ToolCall
from mmrender.trajectory import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.tree import trajectories_from_wire, trajectories_to_wire
from mmrender.trajectory.wire import StepRow, Table, TrajectoryRow
from tree_cases import TOOLS, A, B, assert_same, sidecar

PAD = [9] * 6


def rollout(name="t"):
    trajectory = Trajectory(name, extra={"env": "grid", "seeds": np.arange(3)})
    trajectory.append(
        [1, 2, *PAD, 3],
        [20, 21],
        logprobs=[-1, -2],
        multi_modal_data=sidecar((2, A)),
        routed_experts=RoutedExperts(np.ones((10, 2, 4), np.uint8)),
        weight_versions=[WeightVersionSpan("v1", 0, 2)],
        messages=[user("?"), assistant("!")],
        finish_reason="stop",
        reward=[0.5, 1.0],
    )
    trajectory.append(
        [1, 2, *PAD, 3, 20, 21, 4, *PAD], [22], logprobs=[-3], multi_modal_data=sidecar((2, A), (12, B))
    )
    trajectory.append([1, 2, *PAD, 3], [23], logprobs=[-4], multi_modal_data=sidecar((2, A)), reward=1)
    return trajectory


def table_of(wire):
    return msgspec.msgpack.decode(wire["table"].data, type=Table)


def plain(trajectory):
    return mmcodecs.decode(mmcodecs.encode(trajectories_to_wire([trajectory])), copy=True)


def test_no_pixels_and_router_choices_are_copied():
    trajectory = Trajectory("t")
    rows = np.zeros((9, 8, 8), np.uint8)
    shows = sidecar((2, A))
    trajectory.append([1, 2, *PAD, 3], [4], multi_modal_data=shows, routed_experts=RoutedExperts(rows))
    message = mmcodecs.encode(trajectories_to_wire([trajectory]))
    read = trajectories_from_wire(mmcodecs.decode(message))[0]
    memory = np.frombuffer(message, np.uint8)
    assert np.shares_memory(read.items[0].frames, memory)
    assert np.shares_memory(read.steps[0].own_experts.data, memory)
    trajectory = rollout()
    wire = trajectories_to_wire([trajectory])
    frames = wire["items"]["items"][0]["frames"]
    assert isinstance(frames, mmcodecs.Shared)
    assert frames.value is A.frames
    assert trajectories_to_wire([trajectory], share=False)["items"]["items"][0]["frames"] is A.frames


def test_a_trajectory_grows_on_after_it_was_read():
    trajectory = trajectories_from_wire(plain(rollout()))[0]
    step = trajectory.append([1, 2, *PAD, 3, 23, 5], [6], logprobs=[-1], multi_modal_data=sidecar((2, A)))
    assert (step.parent.index, step.keep, step.new_items) == (2, 10, ())


def test_rollouts_of_a_group_share_their_first_prompt():
    group = [rollout("a"), rollout("b"), rollout("c")]
    wire = trajectories_to_wire(group)
    steps = [step for row in table_of(wire).trajectories for step in row.steps]
    assert [step.base for step in steps] == [None, 0, 0, 0, 3, 3, 0, 6, 6]
    own = len(rollout().steps[0].own_ids)
    stored = 3 * sum(len(step.own_ids) for step in rollout().steps) - 2 * (own - 2)
    assert sum(len(step.tokens) for step in steps) == 4 * stored
    assert len(wire["items"]["items"]) == 2
    for old, new in zip(group, trajectories_from_wire(mmcodecs.decode(mmcodecs.encode(wire))), strict=True):
        assert_same(old, new)


def with_tools(name="t"):
    """Steps with the same tools, none, others, and those whose keys come in another order."""
    trajectory = Trajectory(name)
    turned = [{"function": TOOLS[0]["function"], "type": "function"}]
    for count, tools in enumerate((TOOLS, copy.deepcopy(TOOLS), None, [], turned, TOOLS)):
        trajectory.append([1] * (count + 1), tools=tools)
    return trajectory


def test_steps_with_equal_tools_share_them_also_on_the_wire():
    group = [with_tools("a"), with_tools("b")]
    wire = trajectories_to_wire(group)
    assert [list(tools) for tools in table_of(wire).tools] == [TOOLS, [], TOOLS]
    rows = [[step.tools for step in row.steps] for row in table_of(wire).trajectories]
    assert rows == [[0, 0, None, 1, 2, 0]] * 2
    read = trajectories_from_wire(mmcodecs.decode(mmcodecs.encode(wire)))
    for old, new in zip(group, read, strict=True):
        assert_same(old, new)
        for steps in (old.steps, new.steps, pickle.loads(pickle.dumps(old)).steps):
            assert steps[0].tools is steps[1].tools is steps[5].tools
            assert [list(steps[4].tools[0]), steps[2].tools, steps[3].tools] == [
                ["function", "type"],
                None,
                (),
            ]
    table = msgspec.msgpack.decode(trajectories_to_wire([rollout()])["table"].data)
    assert "tools" not in {*table, *table["trajectories"][0]["steps"][0]}


CANONICAL = Message(
    role="assistant",
    content=(TextPart("see"), ImagePart(b"\x89PNG")),
    reasoning_content="hm",
    tool_calls=(ToolCall("zoom", {"x": 1.5, "tags": ["a"]}, "c1"),),
    extra={"weight": 1},
)
LOOSE = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        shown(Image.new("RGB", (2, 2))),
        {"type": "text", "text": "data: not a URL of an image alone?"},
        {"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}},
        {"type": "video", "video": [b"a", b"b"]},
        np.zeros((2, 2, 3), np.uint8),
        shown(Path("/a.png")),
        {"type": "video", "video": ["/1.png", Path("/2.png")]},
    ],
}


def test_messages_travel_without_their_images_by_default():
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[LOOSE, CANONICAL])
    loose, canonical = trajectories_from_wire(plain(trajectory))[0].steps[0].messages
    assert [part.get("image_url") for part in loose["content"][:2]] == [
        {"url": None},
        {"url": "https://example.org/a.png"},
    ]
    assert loose["content"][2:] == [
        shown(None),
        LOOSE["content"][3],
        {"type": "image", "source": {"type": "base64", "data": None, "media_type": "image/png"}},
        {"type": "video", "video": None},
        {"type": "image"},
        shown("/a.png"),
        {"type": "video", "video": ["/1.png", "/2.png"]},
    ]
    assert canonical == Message(
        role="assistant",
        content=(TextPart("see"), ImagePart(None)),
        reasoning_content="hm",
        tool_calls=CANONICAL.tool_calls,
        extra={"weight": 1},
    )


def test_text_of_messages_is_never_taken_for_an_image():
    texts = ["data: 3, 4, 5", "DATA:", "data:image is how a URL begins", "data:text/csv,1,2"]
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[{"role": "user", "content": text} for text in texts])
    parts = [{"type": "text", "text": text} for text in texts]
    trajectory.append([1, 2, 3], [4], messages=[{"role": "user", "content": parts}])
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"url": "data:,1"}}]}
    trajectory.append([1, 2, 3, 4, 5], [6], messages=[call])
    read = trajectories_from_wire(plain(trajectory))[0]
    assert read.steps[2].messages == [call]
    assert [message["content"] for message in read.steps[0].messages] == texts
    assert read.steps[1].messages[0]["content"] == parts


def test_messages_may_keep_their_images(sentence):
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[CANONICAL, {"weights": np.arange(3)}])
    read = Trajectory.from_bytes(trajectory.to_bytes(media_sources="keep"))
    assert read.steps[0].messages[0] == CANONICAL
    assert read.steps[0].messages[1]["weights"].tolist() == [0, 1, 2]
    trajectory.append([1, 2, 3], [4], messages=[CANONICAL, {"weights": np.arange(3)}, LOOSE])
    assert error_of(TrajectoryError, trajectories_to_wire, [trajectory], media_sources="keep") == sentence


def test_messages_that_cannot_travel(sentence):
    message: dict = {"role": "user"}
    message["content"] = [message]
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[message])
    assert error_of(TrajectoryError, trajectories_to_wire, [trajectory]) == sentence
    assert error_of(TrajectoryError, trajectories_to_wire, [], media_sources="hash") == sentence


def row(step, **fields):
    """Damage a step, or with None the trajectory."""

    def damage(wire):
        table = msgspec.msgpack.decode(wire["table"].data)
        (trajectory,) = table["trajectories"]
        (trajectory if step is None else trajectory["steps"][step]).update(fields)
        wire["table"] = np.frombuffer(msgspec.msgpack.encode(table), np.uint8)

    return damage


def numbers(*values, dtype=np.int32):
    return np.array(values, dtype).tobytes()


STEP = "trajectories[0].steps[{}]"
DAMAGE = {
    "dtype": lambda w: w.update(table=w["table"].astype(np.float32)),
    "cut": lambda w: w.update(table=w["table"][:-1]),
    "negative": row(1, added=-1),
    "finish": row(0, finish_reason=9),
    "fields": lambda w: w.pop("items"),
    "format": lambda w: w.update(format="x"),
    "outcome": row(None, reward=np.inf),
    "reward": row(0, reward=[1.0]),
    "messages": row(0, messages=[7]),
    "version span": row(0, weight_versions=[["v1", 0, 9]]),
    "allowed": row(0, allowed=[[0, 2, 3, False]]),
    "tools": row(0, tools=1),
    "deep": lambda w: w.update(table=np.frombuffer(b"\x83\xactrajectories\x90\xa8messages\x90\xa5tools\x91\x91\x81\xa1x" + b"\x91" * 100_000 + b"\x90", np.uint8)),
    "no step": lambda w: w["extras"].update({"trajectories[3]": {}}),
    "other rows": lambda w: w["experts"].update({STEP.format(1): (0, np.zeros((18, 2, 3), np.uint8))}),
    "no rows": lambda w: w["experts"].update({STEP.format(1): (0, None)}),
    "base": row(1, base=1),
    "keep": row(1, keep=12),
    "half an image": row(1, keep=5),
    "bytes": row(2, tokens=b"12345"),
    "added": row(2, added=5),
    "token": row(2, tokens=numbers(-4)),
    "item": row(1, media=[[7, 12, 6]]),
    "range": row(1, media=[[1, 13, 6]]),
    "range before": row(1, media=[[1, 10, 6]]),
    "nan": row(1, logprobs=numbers(np.nan, dtype=np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage, sentence):
    wire = copy.deepcopy(plain(rollout()))
    DAMAGE[damage](wire)
    text = error_of((InputError, PlaceholderError), trajectories_from_wire, wire)
    # msgspec's words change with its releases.
    assert (text.partition(" - got ")[0] if "trajectories are malformed" in text else text) == sentence


def test_a_damaged_message_is_named():
    for damage, said in (
        ([b"\xc1"], "a message is damaged - got "),
        ([True], "a message is damaged - got "),
        ([True, {"role": "x"}], "Invalid enum value 'x'"),
        ([bytes(mmcodecs.encode_frames([True, {"role": "x"}])[0])], "Invalid enum value 'x'"),
    ):
        wire = plain(rollout())
        table = Table(table_of(wire).trajectories, [damage])
        wire["table"] = np.frombuffer(msgspec.msgpack.encode(table), np.uint8)
        with pytest.raises(TrajectoryError, match="^wire.messages.0.: .*" + said):
            trajectories_from_wire(wire)


def test_frames_and_bytes_for_other_transports():
    trajectory = rollout()
    frames = trajectory.to_frames()
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), A.frames) for frame in frames)
    assert_same(trajectory, Trajectory.from_frames([bytes(frame) for frame in frames]))
    assert_same(trajectory, Trajectory.from_bytes(bytes(trajectory.to_bytes())))
    with pytest.raises(mmcodecs.CodecError):
        Trajectory.from_bytes(b"junk")
    with pytest.raises(TrajectoryError, match="the message holds a group - expected one, got 2"):
        Trajectory.from_bytes(mmcodecs.encode(trajectories_to_wire([rollout(), rollout()])))


def test_large_groups_fit_one_message():
    """More small values than a reader of the codec takes in one head."""
    group = []
    for number in range(64):
        trajectory = Trajectory(str(number))
        ids: list[int] = [1]
        messages: list[dict] = []
        for turn in range(32):
            calls = [{"id": "x", "function": {"name": "zoom", "arguments": "{}"}}]
            messages = [
                *messages,
                {"role": "user", "content": [{"type": "text", "text": f"{number}.{turn}"}]},
                assistant("", tool_calls=calls * 3),
            ]
            step = trajectory.append(ids, [turn + 2], logprobs=[-1.0], messages=messages, reward=1.0)
            ids = step.token_ids.tolist()
        group.append(trajectory)
    read = trajectories_from_wire(mmcodecs.decode(mmcodecs.encode(trajectories_to_wire(group))))
    assert [len(trajectory) for trajectory in read] == [32] * 64
    assert read[-1].steps[-1].messages == group[-1].steps[-1].messages


def test_few_bytes_cannot_become_many_tokens(monkeypatch):
    """Roots share tokens on the wire, so a form could claim to share far more than it holds."""
    monkeypatch.setattr("mmrender.trajectory.wire._MAX_TOKENS", 1 << 12)
    wire = trajectories_to_wire([])
    first = StepRow(added=600, tokens=bytes(2400))
    rows = [TrajectoryRow("0", [first]), *[TrajectoryRow("1", [StepRow(base=0, keep=600)])] * 9]
    wire["table"] = np.frombuffer(msgspec.msgpack.encode(Table(rows, [])), np.uint8)
    with pytest.raises(TrajectoryError, match=r"the number of tokens is wrong - .* at most 4096"):
        trajectories_from_wire(wire)


@pytest.mark.parametrize("dtype", ["datetime64[s]", "object", "float16", "bool", "int8"])
def test_a_table_of_another_dtype_is_malformed(dtype):
    wire = trajectories_to_wire([Trajectory()])
    wire["table"] = np.zeros(9, dtype)
    expected = (
        rf"^wire: .* expected an array of uint8 \(bytes,\), got {re.escape(str(np.dtype(dtype)))} \(9,\)$"
    )
    with pytest.raises(TrajectoryError, match=expected):
        trajectories_from_wire(wire)
