"""Building blocks for tests of trajectory trees: conversations as segments, and random trees of them."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from item_cases import audio_item, patch_item, processed_item
from mmrender import Trajectory
from mmrender.media.encoded import ReferenceItem
from mmrender.messages import ImagePart, Message, TextPart, ToolCall
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange, Repeat
from mmrender.trajectory import AllowedTokens, RoutedExperts, WeightVersionSpan
from mmrender.trajectory.conversation import same_value

PAD = 9
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}]

Segment = int | tuple[str, int]
"""A run of a conversation: a text token, or an image, clip or film by name and number of placeholder tokens."""


@lru_cache(maxsize=64)
def item(name: str, length: int = 3) -> MediaItem:
    """A media item whose placeholder has `length` tokens: three classes, each content its own."""
    seed = 10 * ord(name) + length
    if name in "EF":
        expansion = (Repeat("<|audio|>", length),) if name == "E" else (Repeat("<|audio|>", 1),)
        return msgspec.structs.replace(audio_item(seed=seed), expansion=expansion)
    if name in "CD" and length == 3:  # one of its tokens stands for no features
        expansion = (Repeat("<image>", 2), Repeat("<sep>", 1, embeds=False))
        return msgspec.structs.replace(processed_item(seed=seed), expansion=expansion)
    patches = patch_item(32, 32 * length, seed=seed)
    return ReferenceItem.of(patches, b"PNG" * 100, length) if name == "B" else patches


def rendered(segments: list[Any]) -> tuple[list[int], MultiModalData]:
    """Token ids and sidecar of a conversation."""
    ids: list[int] = []
    entries = []
    for segment in segments:
        if isinstance(segment, int):
            ids.append(segment)
        else:
            name, length = segment
            spans = ((0, 2),) if name in "CD" and length == 3 else None
            place = PlaceholderRange(len(ids), length, spans)
            if name == "F" and length > 1:  # a film with its sound track, of which the last token is
                frames = msgspec.structs.replace(
                    item("A", length - 1), modality="video", identity=f"{length:064x}"
                )
                entries.append((replace(place, embed_spans=((0, length - 1),)), frames))
                place = replace(place, embed_spans=((length - 1, length),))
            entries.append((place, item(name, length)))
            ids.extend([PAD] * length)
    return ids, MultiModalData.of(entries)


A, B = patch_item(seed=1), patch_item(seed=2)


def sidecar(*entries: tuple[int, MediaItem], length: int = 6) -> MultiModalData:
    """A sidecar of items of one length, each with its offset."""
    return MultiModalData.of((PlaceholderRange(offset, length), item) for offset, item in entries)


class Call:
    """One call of the model as a caller has it: everything whole."""

    def __init__(
        self, segments: list[Segment], completion: list[int], number: int, parent: int | None = None
    ) -> None:
        self.segments = segments
        self.parent = parent
        self.completion = completion
        self.prompt, self.sidecar = rendered(segments)
        self.logprobs = [-0.5 - 0.25 * (number + index) for index in range(len(completion))]
        self.messages: list[Any] = [{"role": "user", "content": str(segment)} for segment in segments]
        self.experts: RoutedExperts | None = None
        self.number = number

    def experts_for(self, start: int) -> RoutedExperts:
        """Router choices from position `start`; each row tells its call and position."""
        rows = max(0, len(self.prompt) + len(self.completion) - 1 - start)
        data = np.zeros((rows, 2, 3), np.uint8)
        data[:] = (self.number * 7 + np.arange(start, start + rows) % 200)[:, None, None] % 256
        return RoutedExperts(data, start)

    def allowed(self) -> list[AllowedTokens]:
        """What the first half of the completion was chosen among, and what the rest was not; for some calls."""
        half, count = len(self.completion) // 2, len(self.completion)
        if self.number % 2 or not count:
            return []
        forbidden = AllowedTokens(half, count, (3, 4), True)
        return [AllowedTokens(0, half, (20, 21, 22)), forbidden] if half else [forbidden]

    def append_to(self, trajectory: Trajectory, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "prompt_ids": self.prompt,
            "completion_ids": self.completion,
            "logprobs": self.logprobs,
            "multi_modal_data": self.sidecar,
            "messages": self.messages,
            "tools": (None, [], TOOLS, [*TOOLS, {"name": "look"}])[self.number // 2 % 4],
            "finish_reason": "stop" if self.completion else None,
            "routed_experts": self.experts,
            "weight_versions": [WeightVersionSpan(f"v{self.number}", 0, len(self.completion))],
            "allowed": self.allowed(),
            "reward": None if self.number % 3 == 0 else float(self.number),
            "extra": {"number": self.number} if self.number % 2 else None,
        }
        return trajectory.append(**(fields | changes))


_segments = st.lists(
    st.one_of(st.integers(10, 13), st.tuples(st.sampled_from("ABCDEF"), st.integers(1, 3))), max_size=5
)
_KINDS = ["extend", "branch", "retry", "resume", "drop", "reorder", "swap image", "repeat", "root", "failed"]


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    """Calls of one rollout: next turns, retries, branches, histories that lose or reorder turns, failures."""
    found: list[Call] = []
    for index in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(_KINDS))
        before, parent = None, None
        segments: list[Segment] = []
        if found and kind != "root":
            parent = draw(st.integers(0, index - 1)) if kind == "branch" else index - 1
            before = found[parent]
            segments = [*before.segments, *before.completion]
        if kind == "retry" and before is not None:
            segments = list(before.segments)
        elif kind == "resume" and before is not None:
            segments = [*before.segments, *before.completion[: draw(st.integers(0, 2))]]
        elif kind == "drop":
            segments = [segment for segment in segments if draw(st.booleans())]
        elif kind == "reorder":
            segments = draw(st.permutations(segments))
        elif kind == "swap image":
            segments = [
                s if isinstance(s, int) else (draw(st.sampled_from("ABCDEF")), s[1]) for s in segments
            ]
        elif kind == "repeat":
            segments = [*segments, *(segment for segment in segments if not isinstance(segment, int))]
        if kind not in ("retry", "resume"):
            segments = [*segments, *draw(_segments)]
        completion = [] if kind == "failed" else draw(st.lists(st.integers(20, 22), max_size=3))
        call = Call(segments, completion, index, parent)
        if draw(st.booleans()):
            call.experts = call.experts_for(draw(st.integers(0, max(0, len(call.prompt) - 1))))
        found.append(call)
    return found


def grown(rollout: list[Call], name: str = "t") -> Trajectory:
    """The trajectory of a rollout's calls."""
    trajectory = Trajectory(name, extra={"env": "grid"})
    for call in rollout:
        call.append_to(trajectory)
    return trajectory


def recorded(*, limited: bool) -> list[Trajectory]:
    """The trajectories in the recorded files of versions 3, without allowed tokens, and 4."""
    first = Call([10, ("A", 2), 11], [20, 21, 22], 2)
    first.experts = first.experts_for(0)
    shown = ImagePart("https://x.org/a.png"), ImagePart(b"PNG")
    pixels = {"type": "image", "image": np.arange(6, dtype=np.uint8)}
    first.messages = [
        Message(role="user", content=(TextPart("look"), *shown)),
        {"role": "user", "content": [pixels, "t"], "n": 1.0},
        {"role": "assistant", "content": "x" * 5000, "logits": np.arange(300, dtype=np.float32)},
    ]
    second = Call([*first.segments, *first.completion, 12, ("C", 3)], [20, 21], 4)
    call = ToolCall("zoom", {"x": [1, None, True]}, "c")
    second.messages = [*first.messages, Message(role="assistant", tool_calls=(call,))]
    retry = Call(first.segments, [22], 3)
    retry.messages = first.messages[:2]
    rollout = [first, second, retry]
    for each in () if limited else rollout:
        each.allowed = list  # type: ignore[method-assign]
    group = [grown(rollout, "a"), grown(rollout[:1], "b")]
    group[0].reward, group[1].error = 0.5, "out of time"
    return group


def same_array(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    return bool(first.dtype == second.dtype and np.array_equal(first, second))


def assert_same(first: Trajectory, second: Trajectory) -> None:
    """Both trees have equal steps, in everything that a consumer may look at."""
    assert first.trajectory_id == second.trajectory_id
    assert (first.reward, first.error) == (second.reward, second.error)
    assert same_value(first.extra, second.extra)
    assert len(first) == len(second)
    for old, new in zip(first.steps, second.steps, strict=True):
        assert (old.parent and old.parent.index) == (new.parent and new.parent.index)
        assert (old.index, old.keep, old.added) == (new.index, new.keep, new.added)
        assert same_array(old.own_ids, new.own_ids)
        assert same_array(old.token_ids, new.token_ids)
        assert same_array(old.prompt_ids, new.prompt_ids)
        assert old.multi_modal_data == new.multi_modal_data
        assert old.own_media == new.own_media
        assert old.new_items == new.new_items
        assert same_array(old.logprobs, new.logprobs)
        assert old.routed_experts == new.routed_experts
        assert old.weight_versions == new.weight_versions
        assert old.allowed == new.allowed
        assert same_value(old.messages, new.messages)
        assert old.tools == new.tools
        assert old.finish_reason == new.finish_reason
        assert same_value(old.extra, new.extra)
        assert same_array(np.asarray(old.reward), np.asarray(new.reward))
    assert first.items == second.items
    for left, right in zip(first.samples(), second.samples(), strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "rewards"):
            assert same_array(getattr(left, name), getattr(right, name)), name
        assert left.multi_modal_data == right.multi_modal_data
        assert left.weight_versions == right.weight_versions
        assert left.allowed == right.allowed
        assert left.tools == right.tools


def wire_bound(trajectories: list[Trajectory]) -> int:
    """Most bytes for distinct images, and for everything else once for each rollout; all of it linear."""
    images = {item.identity: item.nbytes for each in trajectories for item in each.items}
    steps = [step for each in trajectories for step in each.steps]
    return (
        1500
        + sum(images.values())
        + sum(8 * (len(step.own_ids) + len(step.completion_ids)) for step in steps)
        + sum(step.own_experts.data.nbytes for step in steps if step.own_experts)
        + sum(400 + 120 * len(step.new_messages) + 40 * len(step.own_media) for step in steps)
        + sum(2000 + 1500 * len(each.items) for each in trajectories)
    )
