"""From the packed form back to trajectories. The form may come from elsewhere, so all of it is checked."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmrender.errors import TrajectoryError
from mmrender.trajectory.deltas import NO_IDS, expand_ids, restore_ids, restore_mask
from mmrender.trajectory.packed import Int32Array, PackedBlock, PackedIds, PackedStep, PoolReader, from_plain
from mmrender.trajectory.packing import MASKS, Known
from mmrender.trajectory.sidecars import SidecarUnpacker
from mmrender.trajectory.steps import BLOCK_PATHS, SIDECAR_KEY, Path


class Unpacker:
    """Reads one packed form.

    Raises:
        TrajectoryError: It is no packed form, or its outline is damaged.
    """

    def __init__(self, packed: Mapping[str, Any]) -> None:
        self._form = from_plain(packed)
        self._tokens = PoolReader(self._form.tokens, "tokens")
        self._sidecars = SidecarUnpacker(self._form.items, self._form.placeholders, self._form.spans)
        self._known: list[Known] = []

    def trajectories(self) -> list[list[dict[str, Any]]]:
        """Return the steps of every trajectory.

        Raises:
            TrajectoryError: A step refers to something that is not there.
        """
        steps = iter([self._step(step, index) for index, step in enumerate(self._form.steps)])
        self._tokens.finish()
        self._sidecars.finish()
        return [[next(steps) for _ in range(length)] for length in self._form.lengths]

    def _step(self, packed: PackedStep, index: int) -> dict[str, Any]:
        where = f"packed.steps[{index}]"
        if not -1 <= packed.base < index:
            raise TrajectoryError(
                "a base is no earlier step",
                where=f"{where}.base",
                expected=f"-1..{index - 1}",
                got=str(packed.base),
            )
        known = self._known[packed.base] if packed.base >= 0 else Known()
        step = packed.rest
        blocks = dict(packed.blocks)
        for path in BLOCK_PATHS:
            block = blocks.pop(".".join(path), None)
            if block is not None:
                fields, known = self._block(block, known, ".".join((where, *path)))
                step = _filled(step, path, fields, where)
        if blocks:
            raise TrajectoryError("a step has unknown blocks", where=where, got=", ".join(sorted(blocks)))
        self._known.append(known)
        return step

    def _block(self, packed: PackedBlock, known: Known, where: str) -> tuple[dict[str, Any], Known]:
        fields = packed.rest
        sequence, completion, entries = known.sequence, known.completion, known.entries
        prompt = own = NO_IDS
        if packed.prompt is not None:
            prompt = self._ids(packed.prompt, sequence, f"{where}.prompt_ids")
            fields["prompt_ids"] = restore_ids(prompt, packed.prompt.form, where)
        if packed.completion is not None:
            own = completion = self._ids(packed.completion, completion, f"{where}.completion_ids")
            fields["completion_ids"] = restore_ids(own, packed.completion.form, where)
        if packed.prompt is not None:
            sequence = np.concatenate([prompt, own])
        if packed.sidecar is not None:
            fields[SIDECAR_KEY], entries = self._sidecars.expand(
                packed.sidecar, entries, f"{where}.{SIDECAR_KEY}"
            )
        for key, mask in packed.masks.items():
            limit = len(prompt if MASKS.get(key) == "prompt" else own)
            fields[key] = restore_mask(mask, limit, f"{where}.{key}")
        return fields, Known(sequence, completion, entries)

    def _ids(self, packed: PackedIds, reference: Int32Array, where: str) -> Int32Array:
        return expand_ids(packed, reference, self._tokens, where)


def _filled(node: Any, path: Path, value: Any, where: str) -> dict[str, Any]:
    """Return `node` with `value` at `path`; the dicts on the way are copied."""
    name, *rest = path
    if not isinstance(node, dict) or name not in node:
        raise TrajectoryError(
            "there is no place for a token block", where=f"{where}.rest", expected=".".join(path)
        )
    return {**node, name: _filled(node[name], tuple(rest), value, f"{where}.{name}") if rest else value}
