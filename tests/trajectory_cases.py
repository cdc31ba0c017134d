"""Building blocks for trajectory tests: a small media item, steps of several kinds, and trees of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mmrender.sidecar import MultiModalData, PlaceholderRange
from tree_cases import PAD, calls


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


def sidecar(*entries: tuple[str, int, int]) -> MultiModalData:
    """A sidecar of `(name, offset, length)` entries."""
    return MultiModalData.of(
        (PlaceholderRange(offset, length), Picture(name)) for name, offset, length in entries
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


@st.composite
def trajectories(draw: st.DrawFn) -> list[Any]:
    """A trajectory whose steps are mappings or objects, with one, two or no token blocks."""
    tree = draw(calls())
    named = draw(st.booleans())
    plain = draw(st.booleans())
    ids_as = draw(st.sampled_from([list, tuple, np.array]))
    steps = []
    for call in tree:
        mm_form: Any = mapping_sidecar(call.sidecar) if plain else call.sidecar
        block = {
            "prompt_ids": ids_as(call.prompt),
            "completion_ids": call.completion,
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
            entry["parent"] = call.parent
        steps.append(entry)
    return steps
