"""From the plain form back to trajectories. The form may come from elsewhere, so all of it is checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.media.wire import items_from_wire, ranges_from_array
from mmrender.trajectory.append_checks import (
    check_ranges,
    checked_experts,
    checked_ids,
    checked_logprobs,
    checked_versions,
)
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.message_wire import read_message
from mmrender.trajectory.packed import Int32Array, PoolReader, check_keep
from mmrender.trajectory.row_chunks import read_rows
from mmrender.trajectory.shared_prefix import MediaEntry, entries_before
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_packing import StepRow
from mmrender.trajectory.tree_step import Step, read_extra, read_reward

_MAX_TOKENS: Final = 1 << 26
"""Most tokens that the steps of one form may have together; on the wire, roots may share theirs."""
_TRAJECTORY: Final = ("id", "steps", "reward", "error", "extra")
_DETAILS: Final = ("finish_reason", "reward", "weight_versions")
_ARRAYS: Final[Mapping[str, tuple[Any, int]]] = {
    "steps": (np.int32, len(StepRow._fields)),
    "tokens": (np.int32, 0),
    "logprobs": (np.float32, 0),
    "message_rows": (np.int32, 0),
    "placeholders": (np.int32, 4),
    "spans": (np.int32, 2),
}
"""dtype, and number of columns, 0 for an array of one dimension."""


class TreeUnpacker:
    """Reads one plain form.

    Raises:
        TrajectoryError: Its arrays or lists are malformed.
        MediaError: An item or a placeholder range is.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        arrays = {name: _array(fields[name], name) for name in _ARRAYS}
        self._rows = arrays["steps"].tolist()
        self._trajectories = _list(fields["trajectories"], "trajectories")
        self._details = read_rows(fields["details"], "packed.details")
        self._experts = _by_step(fields["experts"], "experts", 3, len(self._rows))
        self._extras = _by_step(fields["extras"], "extras", 2, len(self._rows))
        rows = enumerate(read_rows(fields["messages"], "packed.messages"))
        self._messages = [read_message(row, f"packed.messages[{index}]") for index, row in rows]
        self._items = items_from_wire(fields["items"], where="packed.items")
        self._media = ranges_from_array(
            arrays["placeholders"], arrays["spans"], len(self._items), "packed.placeholders"
        )
        self._media_taken = 0
        self._tokens = PoolReader(arrays["tokens"], "tokens")
        self._logprobs = PoolReader(arrays["logprobs"], "logprobs")
        self._message_rows = PoolReader(arrays["message_rows"], "message_rows")
        self._steps: list[Step] = []
        self._total = 0
        self._experts_before: RoutedExperts | None = None

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories.

        Raises:
            TrajectoryError: Something in the form does not fit.
        """
        if len(self._details) != len(self._rows):
            raise _misfit("details are not as many as steps", "details", len(self._rows), len(self._details))
        values = enumerate(self._trajectories)
        found = [self._trajectory(value, f"packed.trajectories[{index}]") for index, value in values]
        for name, used, held in (
            ("steps", len(self._steps), len(self._rows)),
            ("placeholders", self._media_taken, len(self._media)),
        ):
            if used != held:
                raise _misfit("rows are left over", name, used, held)
        for pool in (self._tokens, self._logprobs, self._message_rows):
            pool.finish()
        return found

    def _trajectory(self, value: Any, where: str) -> Trajectory:
        if not isinstance(value, Mapping) or set(value) != set(_TRAJECTORY):
            raise _damaged("a trajectory is malformed", where, ", ".join(_TRAJECTORY), value)
        left = len(self._rows) - len(self._steps)
        count = value["steps"]
        if type(count) is not int or not 0 <= count <= left:
            raise _damaged("a number of steps is malformed", f"{where}.steps", f"0..{left}", count)
        name = _text(value["id"], f"{where}.id")
        trajectory = Trajectory(name, extra=read_extra(value["extra"], f"{where}.extra"))
        trajectory.error = None if value["error"] is None else _text(value["error"], f"{where}.error")
        reward = read_reward(value["reward"], None, f"{where}.reward")
        trajectory.reward = None if reward is None else float(reward)
        first = len(self._steps)
        self._experts_before = None
        for index in range(count):
            step = self._step(first, index)
            trajectory.restore(step)
            self._steps.append(step)
        return trajectory

    def _step(self, first: int, index: int) -> Step:
        number = first + index
        where, beside = f"packed.steps[{number}]", f"packed.details[{number}]"
        row = StepRow(*self._rows[number])
        base = self._base(row, first, number, where)
        parent = base if row.parent >= 0 else None
        keep = row.keep if parent is not None else 0
        own, added = self._own_ids(row, None if parent is not None else base, where)
        details = _details(self._details[number], beside)
        logprobs = self._logprobs.take(row.sampled, f"{where}.logprobs") if row.logprobs else None
        finish = details.get("finish_reason")
        return Step(
            index=index,
            parent=parent,
            keep=keep,
            own_ids=own,
            added=added,
            own_entries=self._entries(row, base, keep + added, where),
            logprobs=checked_logprobs(logprobs, row.sampled, f"{where}.logprobs"),
            finish_reason=None if finish is None else _text(finish, f"{beside}.finish_reason"),
            own_routed_experts=self._own_experts(number, keep + len(own)),
            weight_versions=_versions(details, row.sampled, f"{beside}.weight_versions"),
            messages_keep=row.messages_keep,
            new_messages=self._new_messages(row, parent, where),
            _reward=read_reward(details.get("reward"), row.sampled, f"{beside}.reward"),
            extra=self._extra(number),
        )

    def _base(self, row: StepRow, first: int, number: int, where: str) -> Step | None:
        """Return the step whose first tokens are kept: the parent, or for a root that of another tree."""
        base: Step | None = None
        if row.parent >= 0:
            if not first <= row.parent < number or row.base != row.parent:
                expected = f"an earlier step of its trajectory, {first}..{number - 1}"
                raise _damaged("a parent is malformed", f"{where}.parent", expected, row.parent)
            base = self._steps[row.parent]
        elif row.base >= 0:
            base = self._steps[row.base] if row.base < first else None
            if base is None or base.parent is not None:
                expected = "-1 or the root of an earlier trajectory"
                raise _damaged("a base is malformed", f"{where}.base", expected, row.base)
        check_keep(row.keep, 0 if base is None else len(base), f"{where}.keep")
        if base is not None:
            _check_not_cut(base, row.keep, f"{where}.keep")
        return base

    def _own_ids(self, row: StepRow, base: Step | None, where: str) -> tuple[Int32Array, int]:
        """Return a step's own tokens, and how many of them belong to the prompt."""
        if min(row.added, row.sampled) < 0:
            got = f"{row.added} and {row.sampled}"
            raise _damaged("a number of tokens is negative", where, "0 or more", got)
        own = self._tokens.take(row.added + row.sampled, f"{where}.tokens")
        own = checked_ids(own, f"{where}.tokens")
        kept = row.keep if base is not None else 0
        self._total += kept + len(own)
        if self._total > _MAX_TOKENS:
            raise _damaged("there are too many tokens", where, f"at most {_MAX_TOKENS} in all", self._total)
        if base is not None and kept:
            own = np.concatenate([base.own_ids[:kept], own])
        own.flags.writeable = False
        return own, kept + row.added

    def _entries(
        self, row: StepRow, base: Step | None, prompt_length: int, where: str
    ) -> tuple[MediaEntry, ...]:
        left = len(self._media) - self._media_taken
        if not 0 <= row.media <= left:
            raise _damaged("a number of media is malformed", f"{where}.media", f"0..{left}", row.media)
        taken = self._media[self._media_taken : self._media_taken + row.media]
        self._media_taken += row.media
        entries = [MediaEntry(found, self._items[index]) for index, found in taken]
        check_ranges(entries, row.keep, prompt_length, f"{where}.media")
        if row.parent < 0 and base is not None:
            entries = [*entries_before(base.own_entries, row.keep), *entries]
        return tuple(entries)

    def _own_experts(self, number: int, length: int) -> RoutedExperts | None:
        if number not in self._experts:
            return None
        where, (start, rows) = self._experts[number]
        if not isinstance(rows, np.ndarray) or type(start) is not int:
            raise _damaged("routed experts are malformed", where, "an integer and an array", [start, rows])
        try:
            experts = RoutedExperts(rows, start)
        except TrajectoryError as error:
            error.where = f"{where}.{(error.where or '').rpartition('.')[2]}"
            raise
        self._experts_before = checked_experts(experts, length, self._experts_before, where)
        return experts

    def _extra(self, number: int) -> dict[str, Any]:
        if number not in self._extras:
            return {}
        where, (extra,) = self._extras[number]
        return read_extra(extra, where)

    def _new_messages(self, row: StepRow, parent: Step | None, where: str) -> tuple[Any, ...]:
        known = 0 if parent is None else parent.messages_keep + len(parent.new_messages)
        check_keep(row.messages_keep, known, f"{where}.messages_keep")
        rows = self._message_rows.take(row.messages, f"{where}.messages").tolist()
        for index in rows:
            if not 0 <= index < len(self._messages):
                expected = f"a row below {len(self._messages)}"
                raise _damaged("a message is not in the table", f"{where}.messages", expected, index)
        return tuple(self._messages[index] for index in rows)


def _check_not_cut(base: Step, keep: int, where: str) -> None:
    """Raise if the first `keep` tokens of a step end inside a medium."""
    step = base
    while step.parent is not None and keep <= step.keep:
        step = step.parent
    before = entries_before(step.own_entries, keep)
    if before and before[-1].stop > keep:
        span = f"[{before[-1].offset}, {before[-1].stop})"
        raise _damaged("a medium is kept in part", where, f"no position within {span}", keep)


def _details(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not set(value) <= set(_DETAILS):
        raise _damaged("details of a step are malformed", where, f"some of {', '.join(_DETAILS)}", value)
    return value


def _by_step(value: Any, name: str, width: int, steps: int) -> dict[int, tuple[str, list[Any]]]:
    """Return the rows of a table whose first column is a step, and their paths, by step."""
    found: dict[int, tuple[str, list[Any]]] = {}
    last = -1
    for index, row in enumerate(_list(value, name)):
        where = f"packed.{name}[{index}]"
        if not isinstance(row, list | tuple) or len(row) != width or type(row[0]) is not int:
            raise _damaged("a row of a table is malformed", where, f"a step and {width - 1} more", row)
        if not last < row[0] < steps:
            raise _damaged("a row is of no later step", where, f"{last + 1}..{steps - 1}", row[0])
        last = row[0]
        found[last] = where, list(row[1:])
    return found


def _versions(details: Mapping[str, Any], count: int, where: str) -> tuple[WeightVersionSpan, ...]:
    flat = details.get("weight_versions", [])
    if not isinstance(flat, list | tuple) or len(flat) % 3:
        raise _damaged("weight versions are malformed", where, "triples of version, start, stop", flat)
    return checked_versions([tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)], count, where)


def _array(value: Any, name: str) -> npt.NDArray[Any]:
    dtype, columns = _ARRAYS[name]
    rest = (columns,) if columns else ()
    if isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim and value.shape[1:] == rest:
        return value
    shape = f"[n, {columns}]" if columns else "[n]"
    raise _damaged("an array is malformed", f"packed.{name}", f"{np.dtype(dtype).name} {shape}", value)


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _damaged("a table is malformed", f"packed.{name}", "a list", value)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _damaged("a text is malformed", where, "text", value)
    return value


def _misfit(problem: str, name: str, expected: int, got: int) -> TrajectoryError:
    return TrajectoryError(problem, where=f"packed.{name}", expected=str(expected), got=str(got))


def _damaged(problem: str, where: str, expected: str, got: Any) -> TrajectoryError:
    if isinstance(got, np.ndarray):
        text = f"{got.dtype} {list(got.shape)}"
    elif isinstance(got, Mapping):
        text = ", ".join(map(str, got)) or "no fields"
    else:
        text = repr(got)[:80]
    return TrajectoryError(problem, where=where, expected=expected, got=text)
