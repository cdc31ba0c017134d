"""Trajectories over the codec: damage is named, pixels are views, messages lose no text."""

import copy

import numpy as np
import pytest
from PIL import Image

import mmcodecs
from item_cases import patch_item
from mmrender.errors import InputError, TrajectoryError
from mmrender.messages import ImagePart, Message, TextPart, ToolCall
from mmrender.spans import MultiModalData, PlaceholderRange
from mmrender.trajectory import (
    RoutedExperts,
    Trajectory,
    WeightVersionSpan,
    trajectories_from_wire,
    trajectories_to_wire,
    trajectory_from_wire,
    trajectory_to_wire,
)
from mmrender.trajectory.row_chunks import read_rows, write_rows
from tree_cases import assert_same

A, B = patch_item(seed=1), patch_item(seed=2)
PAD = [9] * 6


def sidecar(*entries):
    return MultiModalData.of((PlaceholderRange(offset, 6), item) for offset, item in entries)


def rollout(name="t"):
    trajectory = Trajectory(name, extra={"env": "grid", "seeds": np.arange(3)})
    trajectory.append(
        [1, 2, *PAD, 3],
        [20, 21],
        logprobs=[-1, -2],
        multi_modal_data=sidecar((2, A)),
        routed_experts=RoutedExperts(np.ones((10, 2, 4), np.uint8)),
        weight_versions=[WeightVersionSpan("v1", 0, 2)],
        messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        finish_reason="stop",
        reward=[0.5, 1.0],
    )
    trajectory.append(
        [1, 2, *PAD, 3, 20, 21, 4, *PAD], [22], logprobs=[-3], multi_modal_data=sidecar((2, A), (12, B))
    )
    trajectory.append([1, 2, *PAD, 3], [23], logprobs=[-4], multi_modal_data=sidecar((2, A)), reward=1)
    return trajectory


def plain(trajectory):
    return mmcodecs.decode(mmcodecs.encode(trajectory_to_wire(trajectory)), copy=True)


def test_pixels_and_router_choices_are_views_of_the_message():
    trajectory = Trajectory("t")
    rows = np.zeros((9, 8, 8), np.uint8)
    shows = sidecar((2, A))
    trajectory.append([1, 2, *PAD, 3], [4], multi_modal_data=shows, routed_experts=RoutedExperts(rows))
    message = mmcodecs.encode(trajectory_to_wire(trajectory))
    read = trajectory_from_wire(mmcodecs.decode(message))
    memory = np.frombuffer(message, np.uint8)
    assert np.shares_memory(read.items[0].frames, memory)
    assert np.shares_memory(read.steps[0].own_experts.data, memory)


def test_packing_copies_no_pixels():
    trajectory = rollout()
    wire = trajectory_to_wire(trajectory)
    frames = wire["items"]["items"][0]["frames"]
    assert isinstance(frames, mmcodecs.Shared)
    assert frames.value is A.frames
    assert trajectory_to_wire(trajectory, share=False)["items"]["items"][0]["frames"] is A.frames


def test_a_trajectory_grows_on_after_it_was_read():
    trajectory = trajectory_from_wire(plain(rollout()))
    step = trajectory.append([1, 2, *PAD, 3, 23, 5], [6], logprobs=[-1], multi_modal_data=sidecar((2, A)))
    assert (step.parent.index, step.keep, step.new_items) == (2, 10, ())


def test_rollouts_of_a_group_share_their_first_prompt():
    group = [rollout("a"), rollout("b"), rollout("c")]
    wire = trajectories_to_wire(group)
    assert wire["steps"][:, 1].tolist() == [-1, 0, 0, 0, 3, 3, 0, 6, 6]
    own = len(rollout().steps[0].own_ids)
    assert len(wire["tokens"]) == 3 * sum(len(step.own_ids) for step in rollout().steps) - 2 * (own - 2)
    assert len(wire["items"]["items"]) == 2
    for old, new in zip(group, trajectories_from_wire(mmcodecs.decode(mmcodecs.encode(wire))), strict=True):
        assert_same(old, new)


def test_a_group_whose_images_differ_shares_what_is_before_them():
    first, second = Trajectory("a"), Trajectory("b")
    first.append([1, 2, *PAD, 3], [4], logprobs=[-1], multi_modal_data=sidecar((2, A)))
    second.append([1, 2, *PAD, 3], [4], logprobs=[-1], multi_modal_data=sidecar((2, B)))
    wire = trajectories_to_wire([first, second])
    assert wire["steps"][1, 1:4].tolist() == [0, 2, 7]
    for old, new in zip([first, second], trajectories_from_wire(wire), strict=True):
        assert_same(old, new)


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
        {"type": "image", "image": Image.new("RGB", (2, 2))},
        {"type": "text", "text": "data: not a URL of an image alone?"},
        {"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}},
        {"type": "video", "video": [b"a", b"b"]},
        np.zeros((2, 2, 3), np.uint8),
    ],
}


def test_messages_travel_without_their_images_by_default():
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[LOOSE, CANONICAL])
    loose, canonical = trajectory_from_wire(plain(trajectory)).steps[0].messages
    assert [part.get("image_url") for part in loose["content"][:2]] == [
        {"url": None},
        {"url": "https://example.org/a.png"},
    ]
    assert loose["content"][2:] == [
        {"type": "image", "image": None},
        LOOSE["content"][3],
        {"type": "image", "source": {"type": "base64", "data": None, "media_type": "image/png"}},
        {"type": "video", "video": None},
        {"type": "image"},
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
    read = trajectory_from_wire(plain(trajectory))
    assert read.steps[2].messages == [call]
    assert [message["content"] for message in read.steps[0].messages] == texts
    assert read.steps[1].messages[0]["content"] == parts


def test_messages_may_keep_their_images():
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[CANONICAL, {"weights": np.arange(3)}])
    read = trajectory_from_wire(
        mmcodecs.decode(mmcodecs.encode(trajectory_to_wire(trajectory, media_sources="keep")))
    )
    assert read.steps[0].messages[0] == CANONICAL
    assert read.steps[0].messages[1]["weights"].tolist() == [0, 1, 2]
    trajectory.append([1, 2, 3], [4], messages=[CANONICAL, {"weights": np.arange(3)}, LOOSE])
    with pytest.raises(TrajectoryError) as error:
        trajectory_to_wire(trajectory, media_sources="keep")
    assert str(error.value).startswith(
        "trajectories[0].steps[1].messages[2]: a message holds something that has no plain form - got $"
    )
    assert str(error.value).endswith("Give media as bytes or URLs, or pack with media_sources='drop'")


def test_a_message_that_holds_itself_is_refused():
    message: dict = {"role": "user"}
    message["content"] = [message]
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[message])
    with pytest.raises(TrajectoryError) as error:
        trajectory_to_wire(trajectory)
    assert str(error.value) == (
        "trajectories[0].steps[0].messages[0]: a message is nested too deeply, or holds itself"
    )


def test_sources_are_dropped_or_kept():
    with pytest.raises(TrajectoryError) as error:
        trajectories_to_wire([], media_sources="hash")
    assert str(error.value) == (
        "media_sources: there is no such treatment of sources - expected 'drop' or 'keep', got 'hash'"
    )


def row(step, column, value):
    names = ("parent", "base", "keep", "added", "sampled", "media", "logprobs", "messages_keep", "messages")
    return lambda wire: wire["steps"].__setitem__((step, names.index(column)), value)


def rows(name, change):
    """Damage of a table that is written as chunks."""

    def damage(wire):
        table = read_rows(wire[name], name)
        change(table)
        wire[name] = write_rows(table, name)

    return damage


def detail(step, **fields):
    return rows("details", lambda table: table[step].update(fields))


DAMAGE = {
    "format": (lambda w: w.update(format="x"), "packed: these are no trajectories that can be read - expected format 'mmrender.trees', version 1, got format 'x', version 1. Write and read with the same release of mmrender"),
    "version": (lambda w: w.update(version=2), "packed: these are no trajectories that can be read - expected format 'mmrender.trees', version 1, got format 'mmrender.trees', version 2. Write and read with the same release of mmrender"),
    "fields": (lambda w: w.pop("spans"), "packed: the plain form of trajectories has other fields - expected details, experts, extras, format, items, logprobs, message_rows, messages, placeholders, spans, steps, tokens, trajectories, version, got details, experts, extras, format, items, logprobs, message_rows, messages, placeholders, steps, tokens, trajectories, version"),
    "pool": (lambda w: w.update(tokens=w["tokens"].astype(np.int64)), "packed.tokens: an array is malformed - expected int32 [n], got int64 [20]"),
    "columns": (lambda w: w.update(steps=w["steps"][:, :8]), "packed.steps: an array is malformed - expected int32 [n, 9], got int32 [3, 8]"),
    "table": (lambda w: w.update(details=3), "packed.details: a table is malformed - expected a list of chunks, got 3"),
    "chunk": (lambda w: w.update(details=[w["details"][0].view(np.int8)]), "packed.details[0]: a chunk of a table is malformed - expected uint8 [n], got int8 [159]"),
    "chunk of text": (lambda w: w.update(details=[np.frombuffer(mmcodecs.encode("x"), np.uint8)]), "packed.details[0]: a chunk of a table is malformed - expected a list, got str"),
    "details": (rows("details", lambda table: table.pop()), "packed.details: details are not as many as steps - expected 3, got 2"),
    "parent": (row(1, "parent", 1), "packed.steps[1].parent: a parent is malformed - expected an earlier step of its trajectory, 0..0, got 1"),
    "base": (row(1, "base", -1), "packed.steps[1].parent: a parent is malformed - expected an earlier step of its trajectory, 0..0, got 0"),
    "root": (row(0, "base", 0), "packed.steps[0].base: a base is malformed - expected -1 or the root of an earlier trajectory, got 0"),
    "keep": (row(1, "keep", 12), "packed.steps[1].keep: more is kept than the reference holds - expected 0..11, got 12"),
    "half an image": (row(1, "keep", 5), "packed.steps[1].keep: a medium is kept in part - expected no position within [2, 8), got 5"),
    "negative": (row(1, "added", -1), "packed.steps[1]: a number of tokens is negative - expected 0 or more, got '-1 and 1'"),
    "many tokens": (row(2, "sampled", 5), "packed.steps[2].tokens: more is taken from the pool of tokens than it holds - expected 0..1, got 5"),
    "left over": (row(2, "sampled", 0), "packed.tokens: a pool holds rows that no step uses - expected 19, got 20"),
    "token": (lambda w: w["tokens"].__setitem__(3, -4), "packed.steps[0].tokens[3]: a token id is negative - got -4"),
    "media": (row(2, "media", 1), "packed.steps[2].media: a number of media is malformed - expected 0..0, got 1"),
    "less media": (row(1, "media", 0), "packed.placeholders: rows are left over - expected 1, got 2"),
    "range": (lambda w: w["placeholders"].__setitem__((1, 1), 13), "packed.steps[1].media.image at token 13: a media range does not lie inside the prompt - expected tokens within [0, 18), got [13, 19). Trim the sidecar together with the tokens"),
    "range before": (lambda w: w["placeholders"].__setitem__((1, 1), 10), "packed.steps[1].media.image at token 10: two media ranges overlap - expected 11 or more, got 10"),
    "logprobs": (row(1, "logprobs", 0), "packed.logprobs: a pool holds rows that no step uses - expected 3, got 4"),
    "nan": (lambda w: w["logprobs"].__setitem__(2, np.nan), "packed.steps[1].logprobs[0]: a log probability is not finite - got nan"),
    "messages": (lambda w: w["message_rows"].__setitem__(1, 7), "packed.steps[0].messages: a message is not in the table - expected a row below 2, got 7"),
    "messages kept": (row(1, "messages_keep", 3), "packed.steps[1].messages_keep: more is kept than the reference holds - expected 0..2, got 3"),
    "message": (rows("messages", lambda table: table.__setitem__(0, ["pickle", 1])), "packed.messages[0]: a row of the message table is malformed - expected 'message' or 'plain', and its content, got ['pickle', 1]"),
    "canonical": (rows("messages", lambda table: table.__setitem__(0, ["message", {"role": "x"}])), "packed.messages[0]: a message is malformed - got Invalid enum value 'x' - at `$.role`"),
    "detail": (detail(0, more=1), "packed.details[0]: details of a step are malformed - expected some of finish_reason, reward, weight_versions, got finish_reason, reward, weight_versions, more"),
    "finish": (detail(0, finish_reason=1), "packed.details[0].finish_reason: a text is malformed - expected text, got 1"),
    "reward": (detail(0, reward="x"), "packed.details[0].reward: a reward is malformed - expected a finite number, or 2 of them, one for each sampled token, got 'x'"),
    "versions": (detail(0, weight_versions=["a", 0]), "packed.details[0].weight_versions: weight versions are malformed - expected triples of version, start, stop, got ['a', 0]"),
    "version span": (detail(0, weight_versions=["a", 0, 9]), "packed.details[0].weight_versions[0]: a span of a weight version is malformed - expected version, start and stop within sampled tokens [0, 2), got ('a', 0, 9)"),
    "experts": (lambda w: w.update(experts=[[0, 0]]), "packed.experts[0]: a row of a table is malformed - expected a step and 2 more, got [0, 0]"),
    "experts twice": (lambda w: w["experts"].append(w["experts"][0]), "packed.experts[1]: a row is of no later step - expected 1..2, got 0"),
    "other rows": (lambda w: w.update(experts=[w["experts"][0], [1, 0, np.zeros((18, 2, 3), np.uint8)]]), "packed.experts[1]: routed experts have another form than in earlier steps - expected uint8 [rows, 2, 4], got uint8 [rows, 2, 3]"),
    "no rows": (lambda w: w.update(experts=[[0, 0, None]]), "packed.experts[0]: routed experts are malformed - expected an integer and an array, got [0, None]"),
    "rows": (lambda w: w.update(experts=[[0, 0, np.zeros((3, 2, 2), np.uint8)]]), "packed.experts[0]: the rows of routed experts do not fit the tokens - expected rows to position 10 or 11, got positions [0, 3)"),
    "row dtype": (lambda w: w.update(experts=[[0, 0, np.zeros((10, 2, 2))]]), "packed.experts[0].data: routed experts have the wrong form - expected integers of shape (rows, layers, top_k), got float64 [10, 2, 2]"),
    "extra": (lambda w: w.update(extras=[[1, [1]]]), "packed.extras[0]: extra is no mapping with text keys - got [1]"),
    "trajectory": (lambda w: w["trajectories"].__setitem__(0, {"id": "x"}), "packed.trajectories[0]: a trajectory is malformed - expected id, steps, reward, error, extra, got id"),
    "count": (lambda w: w["trajectories"][0].update(steps=4), "packed.trajectories[0].steps: a number of steps is malformed - expected 0..3, got 4"),
    "fewer": (lambda w: w["trajectories"][0].update(steps=2), "packed.steps: rows are left over - expected 2, got 3"),
    "id": (lambda w: w["trajectories"][0].update(id=3), "packed.trajectories[0].id: a text is malformed - expected text, got 3"),
    "outcome": (lambda w: w["trajectories"][0].update(reward=[1.0]), "packed.trajectories[0].reward: a reward is malformed - expected a finite number, got [1.0]"),
    "item": (lambda w: w["items"]["items"][0].update(kind="x"), "packed.items[0].kind: an item is of an unknown kind - expected patches, processed, reference, got 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage):
    wire = copy.deepcopy(plain(rollout()))
    change, message = DAMAGE[damage]
    change(wire)
    with pytest.raises(InputError) as error:
        trajectory_from_wire(wire)
    assert str(error.value) == message


def test_a_damaged_chunk_is_named():
    wire = plain(rollout())
    wire["messages"][0] = wire["messages"][0][:-20]
    with pytest.raises(TrajectoryError, match=r"^packed.messages\[0\]: a chunk of a table is damaged - got "):
        trajectory_from_wire(wire)


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
                {"role": "assistant", "content": "", "tool_calls": calls * 3},
            ]
            step = trajectory.append(ids, [turn + 2], logprobs=[-1.0], messages=messages, reward=1.0)
            ids = step.token_ids.tolist()
        group.append(trajectory)
    read = trajectories_from_wire(mmcodecs.decode(mmcodecs.encode(trajectories_to_wire(group))))
    assert [len(trajectory) for trajectory in read] == [32] * 64
    assert read[-1].steps[-1].messages == group[-1].steps[-1].messages


def test_a_group_is_no_single_trajectory():
    with pytest.raises(TrajectoryError) as error:
        trajectory_from_wire(trajectories_to_wire([rollout(), rollout()]))
    assert str(error.value) == (
        "packed.trajectories: the plain form holds a group - expected one trajectory, got 2. Use trajectories_from_wire"
    )
    with pytest.raises(TrajectoryError, match="these are no trajectories that can be read"):
        trajectories_from_wire([1])


def test_few_bytes_cannot_become_many_tokens(monkeypatch):
    """Roots share tokens on the wire, so a form could claim to share far more than it holds."""
    monkeypatch.setattr("mmrender.trajectory.tree_unpacking._MAX_TOKENS", 1 << 12)
    wire = trajectories_to_wire([])
    first, again = [-1, -1, 0, 600, 0, 0, 0, 0, 0], [-1, 0, 600, 0, 0, 0, 0, 0, 0]
    wire["steps"] = np.array([first] + [again] * 9, np.int32)
    wire["tokens"] = np.ones(600, np.int32)
    wire["details"] = write_rows([{}] * 10, "details")
    wire["trajectories"] = [{"id": "", "steps": 1, "reward": None, "error": None, "extra": {}}] * 10
    with pytest.raises(TrajectoryError) as error:
        trajectories_from_wire(wire)
    assert str(error.value) == (
        "packed.steps[6]: there are too many tokens - expected at most 4096 in all, got 4200"
    )
