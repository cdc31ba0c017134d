"""From trajectories to their packed form.

Steps are taken in order. Each is written against a base, an earlier step of the same packed form: the step
that it continues, unless another one shares more of its prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from mmrender.trajectory.deltas import NO_IDS, PrefixIndex, TokenPool, common_prefix, read_ids, read_mask
from mmrender.trajectory.packed import (
    FORMAT,
    VERSION,
    Int32Array,
    PackedBlock,
    PackedIds,
    PackedMask,
    PackedStep,
    PackedTrajectories,
    to_plain,
)
from mmrender.trajectory.sidecars import Entries, SidecarPacker
from mmrender.trajectory.steps import (
    BLOCK_PATHS,
    SIDECAR_KEY,
    Path,
    as_fields,
    at_path,
    get_field,
    has_field,
    parent_of,
)

BLOCK_KEYS: Final = ("prompt_ids", "completion_ids", SIDECAR_KEY)
MASKS: Final = {"prompt_mask": "prompt", "completion_mask": "completion"}
"""Masks of a token block, and the packed field of the token ids that each belongs to."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a step leaves for others to refer to: its whole sequence, its completion, its placeholders."""

    sequence: Int32Array = field(default_factory=lambda: NO_IDS)
    completion: Int32Array = field(default_factory=lambda: NO_IDS)
    entries: Entries = field(default_factory=dict)


class _Ids(NamedTuple):
    ids: Int32Array
    form: str


class _Block(NamedTuple):
    path: Path
    fields: dict[str, Any]
    prompt: _Ids | None
    completion: _Ids | None
    where: str


def _read_blocks(step: Any, where: str) -> list[_Block]:
    blocks = []
    for path in BLOCK_PATHS:
        node = at_path(step, path)
        if node is None or not any(has_field(node, key) for key in BLOCK_KEYS):
            continue
        place = ".".join((where, *path))
        fields = as_fields(node, place)
        prompt, completion = (
            None if fields.get(key) is None else _Ids(*read_ids(fields[key], f"{place}.{key}"))
            for key in ("prompt_ids", "completion_ids")
        )
        blocks.append(_Block(path, fields, prompt, completion, place))
    return blocks


def _hollow(node: Any, path: Path, where: str) -> dict[str, Any]:
    """Return the fields of `node`, with `None` at `path` and dicts on the way there."""
    fields = as_fields(node, where)
    name, *rest = path
    fields[name] = _hollow(fields[name], tuple(rest), f"{where}.{name}") if rest else None
    return fields


class Packer:
    """Packs trajectories into one form; used once."""

    def __init__(self) -> None:
        self._steps: list[PackedStep] = []
        self._known: list[Known] = []
        self._tokens = TokenPool()
        self._sidecars = SidecarPacker()
        self._index = PrefixIndex()

    def pack(self, trajectories: Sequence[Sequence[Any]], name: Callable[[int, int], str]) -> dict[str, Any]:
        """Return the packed form; `name` gives the path of a step for messages."""
        for number, trajectory in enumerate(trajectories):
            first = len(self._steps)
            for index, step in enumerate(trajectory):
                self._add(step, first, index, name(number, index))
        placeholders, spans = self._sidecars.pools()
        form = PackedTrajectories(
            format=FORMAT,
            version=VERSION,
            items=self._sidecars.items,
            tokens=self._tokens.array(),
            placeholders=placeholders,
            spans=spans,
            steps=self._steps,
            lengths=[len(trajectory) for trajectory in trajectories],
        )
        plain: dict[str, Any] = to_plain(form)
        return plain

    def _add(self, step: Any, first: int, index: int, where: str) -> None:
        blocks = _read_blocks(step, where)
        parent = parent_of(step, index, where)
        base = self._base(blocks, -1 if parent is None else first + parent)
        known = self._known[base] if base >= 0 else Known()
        rest = as_fields(step, where)
        packed = {}
        for block in blocks:
            rest = _hollow(rest, block.path, where)
            packed[".".join(block.path)], known = self._block(block, known)
        self._index.add(known.sequence, len(self._steps))
        self._steps.append(PackedStep(base, rest, packed))
        self._known.append(known)

    def _base(self, blocks: list[_Block], parent: int) -> int:
        prompt = next((block.prompt.ids for block in blocks if block.prompt), None)
        if prompt is None:
            return parent
        shared = 0
        if parent >= 0:
            sequence = self._known[parent].sequence
            shared = common_prefix(prompt, sequence)
            if shared == len(sequence):
                return parent
        other = self._index.find(prompt)
        if other >= 0 and common_prefix(prompt, self._known[other].sequence) > shared:
            return other
        return parent

    def _block(self, block: _Block, known: Known) -> tuple[PackedBlock, Known]:
        rest = dict(block.fields)
        packed = PackedBlock(rest)
        sequence, completion, entries = known.sequence, known.completion, known.entries
        if block.prompt:
            packed.prompt = self._ids("prompt_ids", block.prompt, sequence, rest)
            own = block.completion.ids if block.completion else NO_IDS
            sequence = np.concatenate([block.prompt.ids, own])
        if block.completion:
            packed.completion = self._ids("completion_ids", block.completion, completion, rest)
            completion = block.completion.ids
        if rest.get(SIDECAR_KEY) is not None:
            packed.sidecar, entries = self._sidecars.add(
                rest[SIDECAR_KEY], entries, f"{block.where}.{SIDECAR_KEY}"
            )
            rest[SIDECAR_KEY] = None
        packed.masks = _take_masks(rest, block)
        return packed, Known(sequence, completion, entries)

    def _ids(self, key: str, ids: _Ids, reference: Int32Array, rest: dict[str, Any]) -> PackedIds:
        rest[key] = None
        return self._tokens.add(ids.ids, ids.form, reference)


def _take_masks(rest: dict[str, Any], block: _Block) -> dict[str, PackedMask]:
    masks = {}
    for key, owner in MASKS.items():
        ids: _Ids | None = get_field(block, owner)
        mask = read_mask(rest.get(key)) if ids is not None and rest.get(key) is not None else None
        # A mask that does not fit its token ids is not understood, and so carried as it is.
        if mask is not None and ids is not None and len(rest[key]) == len(ids.ids):
            masks[key] = mask
            rest[key] = None
    return masks
