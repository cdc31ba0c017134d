"""What must hold of a step before it joins a trajectory. Each error says which step and which token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.spans import MultiModalData
from mmrender.trajectory.deltas import NO_IDS, read_ids
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.packed import Int32Array
from mmrender.trajectory.shared_prefix import MediaEntry, SharedPrefix, entries_of
from mmrender.trajectory.tree_step import Step


def checked_ids(value: Any, where: str) -> Int32Array:
    """Return token ids as int32.

    Raises:
        TrajectoryError: They are no flat integers of 32 bits, or one is negative.
    """
    ids, _ = read_ids(value, where) if value is not None else (NO_IDS, "list")
    negative = np.flatnonzero(ids < 0)
    if len(negative):
        at = int(negative[0])
        raise TrajectoryError("a token id is negative", where=f"{where}[{at}]", got=str(ids[at]))
    return ids


def checked_logprobs(value: Any, count: int, where: str) -> npt.NDArray[np.float32] | None:
    """Return log probabilities as float32 `[count]`, None if none were given.

    Raises:
        TrajectoryError: There is not one for each sampled token, or one is not finite.
    """
    if value is None:
        return None
    try:
        logprobs = np.array(value, np.float32)
    except (TypeError, ValueError):
        logprobs = np.zeros((0, 0), np.float32)
    if logprobs.shape != (count,):
        shape = list(logprobs.shape) if logprobs.ndim == 1 else type(value).__name__
        raise TrajectoryError(
            "there is not one log probability for each sampled token",
            where=where,
            expected=f"numbers [{count}]",
            got=str(shape),
        )
    odd = np.flatnonzero(~np.isfinite(logprobs))
    if len(odd):
        at = int(odd[0])
        raise TrajectoryError(
            "a log probability is not finite", where=f"{where}[{at}]", got=str(logprobs[at])
        )
    logprobs.flags.writeable = False
    return logprobs


def checked_entries(sidecar: Any, prompt_length: int, where: str) -> list[MediaEntry]:
    """Return the media of a sidecar, in prompt order.

    Raises:
        TrajectoryError: It is no sidecar with items, its lists do not belong together, or ranges overlap or
            leave the prompt.
    """
    if sidecar is None:
        return []
    if not isinstance(sidecar, MultiModalData):
        raise TrajectoryError(
            "this is no sidecar", where=where, expected="MultiModalData", got=type(sidecar).__name__
        )
    for modality in {**sidecar.mm_hashes, **sidecar.mm_placeholders, **sidecar.mm_items}:
        _check_lists(sidecar, modality, where)
    entries = entries_of(sidecar)
    check_ranges(entries, 0, prompt_length, where)
    return entries


def check_ranges(entries: Sequence[MediaEntry], start: int, prompt_length: int, where: str) -> None:
    """Raise unless the ranges of `entries` lie within `[start, prompt_length)`, in order and apart.

    Raises:
        TrajectoryError: One does not.
    """
    for entry in entries:
        path = f"{where}.{entry.item.modality} at token {entry.offset}"
        if entry.offset < 0 or entry.range.length < 1 or entry.stop > prompt_length:
            raise TrajectoryError(
                "a media range does not lie inside the prompt",
                where=path,
                expected=f"tokens within [0, {prompt_length})",
                got=f"[{entry.offset}, {entry.stop})",
                remedy="Trim the sidecar together with the tokens",
            )
        if entry.offset < start:
            raise TrajectoryError(
                "two media ranges overlap", where=path, expected=f"{start} or more", got=str(entry.offset)
            )
        start = entry.stop


def _check_lists(sidecar: MultiModalData, modality: str, where: str) -> None:
    hashes = sidecar.mm_hashes.get(modality, ())
    ranges = sidecar.mm_placeholders.get(modality, ())
    items = sidecar.mm_items.get(modality, ())
    if not len(hashes) == len(ranges) == len(items):
        raise TrajectoryError(
            "hashes, placeholders and items of a sidecar must be equally many",
            where=f"{where}.{modality}",
            got=f"{len(hashes)} hashes, {len(ranges)} placeholders, {len(items)} items",
        )
    for index, (digest, item) in enumerate(zip(hashes, items, strict=True)):
        if getattr(item, "identity", None) != digest:
            raise TrajectoryError(
                "a hash does not belong to its item",
                where=f"{where}.{modality}[{index}]",
                expected=repr(getattr(item, "identity", None)),
                got=repr(digest),
            )


def check_agreement(parent: Step, shared: SharedPrefix, where: str) -> None:
    """Raise unless prompt and parent hold the same media wherever their tokens agree.

    Raises:
        TrajectoryError: One of them holds a medium that the other lacks; a range may cover sampled tokens.
    """
    if shared.conflict is None:
        return
    entry, known = shared.conflict
    span = f"tokens [{entry.offset}, {entry.stop})"
    if known:
        raise TrajectoryError(
            f"the sidecar lacks a medium that steps[{parent.index}] shows at the same tokens",
            where=f"{where}.multi_modal_data",
            expected=f"{entry.item.modality} {entry.item.identity[:12]} at {span}",
            got="no range there",
            remedy="Carry the sidecar of earlier turns along with their tokens",
        )
    for step, stop in parent.parts():
        start = step.prompt_length
        if start < min(entry.stop, stop) and entry.offset < stop:
            raise TrajectoryError(
                "a media range covers sampled tokens",
                where=f"{where}.multi_modal_data",
                expected=f"no range within tokens [{start}, {stop}), which steps[{step.index}] sampled",
                got=f"{entry.item.modality} at {span}",
                remedy="Shift the ranges of new media by the length of prompt and completion",
            )
    raise TrajectoryError(
        f"the sidecar has a medium that steps[{parent.index}] lacks at the same tokens",
        where=f"{where}.multi_modal_data",
        expected="no range there",
        got=f"{entry.item.modality} {entry.item.identity[:12]} at {span}",
        remedy="Append every step with the sidecar of its whole prompt",
    )


def checked_experts(value: Any, length: int, known: RoutedExperts | None, where: str) -> RoutedExperts | None:
    """Return router choices that fit a sequence of `length` tokens.

    Raises:
        TrajectoryError: They leave the sequence, end before its last token but one, or have other layers,
            experts a token or dtype than those of earlier steps.
    """
    if value is None:
        return None
    if not isinstance(value, RoutedExperts):
        raise TrajectoryError(
            "these are no routed experts", where=where, expected="RoutedExperts", got=type(value).__name__
        )
    # The last token is never fed back, so an engine need not have a row for it.
    if not max(0, length - 1) <= value.stop <= length or value.start > length:
        raise TrajectoryError(
            "the rows of routed experts do not fit the tokens",
            where=where,
            expected=f"rows to position {max(0, length - 1)} or {length}",
            got=f"positions [{value.start}, {value.stop})",
        )
    if known is not None and (known.shape[1:] != value.shape[1:] or known.dtype != value.dtype):
        raise TrajectoryError(
            "routed experts have another form than in earlier steps",
            where=where,
            expected=f"{known.dtype} [rows, {known.shape[1]}, {known.shape[2]}]",
            got=f"{value.dtype} [rows, {value.shape[1]}, {value.shape[2]}]",
        )
    return value


def checked_versions(value: Sequence[Any], count: int, where: str) -> tuple[WeightVersionSpan, ...]:
    """Return spans of weight versions.

    Raises:
        TrajectoryError: They are not in order, overlap, or leave the completion of `count` tokens.
    """
    spans = []
    end = 0
    for index, entry in enumerate(value):
        try:
            version, start, stop = entry
        except (TypeError, ValueError):
            version, start, stop = "", -1, -1
        typed = isinstance(version, str) and isinstance(start, int) and isinstance(stop, int)
        if not typed or not end <= start <= stop <= count:
            raise TrajectoryError(
                "a span of a weight version is malformed",
                where=f"{where}[{index}]",
                expected=f"version, start and stop within sampled tokens [{end}, {count})",
                got=repr(tuple(entry) if isinstance(entry, tuple) else entry)[:80],
            )
        spans.append(WeightVersionSpan(version, start, stop))
        end = stop
    return tuple(spans)
