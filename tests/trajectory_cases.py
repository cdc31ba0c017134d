"""Building blocks for trajectory tests: a small media item, steps of several kinds, and trees of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mmrender.spans import MultiModalData, PlaceholderRange

PAD = 9


@dataclass(frozen=True)
class Picture:
    """A media item of `nbytes` bytes whose pixels follow from its identity."""

    identity: str
    modality: str = "image"
    nbytes: int = 64


@dataclass
class Tokens:
    prompt_ids: Any
    completion_ids: Any
    multi_modal_data: Any


@dataclass(frozen=True)
class Step:
    tokens: Any
    response: Any = None
    reward: float = 0.0


def sidecar(*entries: tuple[str, int, int], spans: Any = None) -> MultiModalData:
    """A sidecar of `(name, offset, length)` entries."""
    return MultiModalData.of(
        (PlaceholderRange(offset, length, spans), Picture(name)) for name, offset, length in entries
    )


def step(prompt: list[int], completion: list[int], mm: Any, **rest: Any) -> dict[str, Any]:
    """A step as rollout libraries write it: two token blocks that hold the same."""
    block = {"prompt_ids": prompt, "completion_ids": completion, "multi_modal_data": mm}
    response = {"id": "r", "message": {"role": "assistant", "tokens": dict(block)}}
    return {"tokens": block, "response": response, **rest}


def turns(count: int, *, new_tokens: int = 20, image_tokens: int = 8) -> list[dict[str, Any]]:
    """A plain rollout in which every turn adds one image."""
    steps: list[dict[str, Any]] = []
    prompt: list[int] = [1, 2, 3]
    mm = MultiModalData()
    for turn in range(count):
        offset = len(prompt)
        prompt = prompt + [PAD] * image_tokens + [100 + turn] * new_tokens
        mm = mm.merged(sidecar((f"picture-{turn}", offset, image_tokens)))
        completion = [200 + turn] * 5
        steps.append(step(prompt, completion, mm))
        prompt = prompt + completion
    return steps


def mapping_sidecar(mm: MultiModalData) -> dict[str, Any]:
    """The same sidecar as plain data."""
    return {
        "mm_hashes": {key: list(value) for key, value in mm.mm_hashes.items()},
        "mm_placeholders": {
            key: [{"offset": entry.offset, "length": entry.length} for entry in value]
            for key, value in mm.mm_placeholders.items()
        },
        "mm_items": {
            key: [
                {"pixel_values": np.full((2, 3), len(item.identity), np.float32), "id": item.identity}
                for item in value
            ]
            for key, value in mm.mm_items.items()
        },
    }


def as_mapping(node: Any) -> Any:
    """A step, with the objects that lead to its token blocks turned into dicts, as unpacking gives it."""
    if isinstance(node, Step | Tokens | SimpleNamespace):
        found = {f.name: getattr(node, f.name) for f in fields(node)} if is_dataclass(node) else vars(node)
        return {key: as_mapping(value) for key, value in found.items()}
    if isinstance(node, Mapping):
        return {key: as_mapping(value) for key, value in node.items()}
    return [as_mapping(entry) for entry in node] if isinstance(node, list) else node


Segment = int | tuple[str, int]
"""A run of a conversation: a text token, or an image by name and number of placeholder tokens."""


def rendered(segments: list[Segment]) -> tuple[list[int], MultiModalData]:
    """Token ids and sidecar of a conversation."""
    ids: list[int] = []
    entries = []
    for segment in segments:
        if isinstance(segment, int):
            ids.append(segment)
        else:
            name, length = segment
            spans = ((0, length),) if length % 2 else None
            entries.append((PlaceholderRange(len(ids), length, spans), Picture(name)))
            ids.extend([PAD] * length)
    return ids, MultiModalData.of(entries)


_segments = st.lists(
    st.one_of(st.integers(10, 14), st.tuples(st.sampled_from("ABCD"), st.integers(1, 3))), max_size=6
)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[Segment], list[int], int | None]]:
    """A tree of conversations: `(segments, completion, parent)` per step, every kind of turn among them."""
    found: list[tuple[list[Segment], list[int], int | None]] = []
    for index in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(["extend", "branch", "drop", "reorder", "repeat", "root"]))
        parent = None if index == 0 or kind == "root" else index - 1
        if parent is not None and kind == "branch":
            parent = draw(st.integers(0, index - 1))
        segments: list[Segment] = [] if parent is None else [*found[parent][0], *found[parent][1]]
        if kind == "drop":
            segments = [segment for segment in segments if draw(st.booleans())]
        elif kind == "reorder":
            segments = draw(st.permutations(segments))
        elif kind == "repeat":
            segments = [*segments, *(segment for segment in segments if not isinstance(segment, int))]
        added = draw(_segments)
        completion = draw(st.lists(st.integers(20, 23), max_size=4))
        found.append(([*segments, *added], completion, parent))
    return found


@st.composite
def trajectories(draw: st.DrawFn) -> list[Any]:
    """A trajectory whose steps are mappings or objects, with one, two or no token blocks."""
    tree = draw(conversations())
    named = draw(st.booleans())
    plain = draw(st.booleans())
    ids_as = draw(st.sampled_from([list, tuple, np.array]))
    steps = []
    for segments, completion, parent in tree:
        prompt, mm = rendered(segments)
        mm_form: Any = mapping_sidecar(mm) if plain else mm
        block = {
            "prompt_ids": np.array(prompt, np.int64) if ids_as is np.array else ids_as(prompt),
            "completion_ids": list(completion),
            "multi_modal_data": draw(st.sampled_from([mm_form, mm_form, None])),
        }
        second = None
        if draw(st.booleans()):
            second = SimpleNamespace(message=SimpleNamespace(role="assistant", tokens={**block}))
        kind = draw(st.sampled_from(["mapping", "objects", "no tokens"]))
        if kind == "objects":
            steps.append(Step(Tokens(**block), second))
            continue
        entry: dict[str, Any] = {
            "tokens": None if kind == "no tokens" else block,
            "response": second,
            "reward": 1.0,
        }
        if named:
            entry["parent"] = parent
        steps.append(entry)
    return steps
