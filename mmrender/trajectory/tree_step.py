"""`Step`: one call of the model, stored as what it adds to the step that it starts from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.spans import MediaItem, MultiModalData
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.packed import Int32Array
from mmrender.trajectory.routed_rows import assembled_experts
from mmrender.trajectory.shared_prefix import MediaEntry, entries_before


class Part(NamedTuple):
    """What a step contributes to the sequence of a later one: its own tokens up to the position `stop`."""

    step: "Step"
    stop: int

    @property
    def whole(self) -> bool:
        """Whether all its tokens are in the sequence."""
        return self.stop == len(self.step)

    @property
    def sampled(self) -> tuple[int, int]:
        """Positions `[start, stop)` of its sampled tokens in the sequence; empty where none is."""
        return self.step.prompt_length, max(self.step.prompt_length, self.stop)


@dataclass(eq=False, slots=True, repr=False)
class Step:
    """One prompt and what was sampled after it. Made by `Trajectory.append`, and not changed after.

    `reward` and `extra` may be set later; everything else is fixed, its arrays are read-only.

    Attributes:
        index: Position in `Trajectory.steps`.
        parent: The step that this one starts from, None for a root.
        keep: Number of leading tokens that it shares with the parent's prompt and completion.
        own_ids: Tokens after those: the rest of the prompt, then the completion; int32.
        added: How many of `own_ids` belong to the prompt.
        own_entries: Media that begin after the first `keep` tokens, in prompt order.
        new_items: Those of them that are not in the trajectory before this step, each once.
        logprobs: One for each sampled token, float32, or None where the engine gave none.
        finish_reason: Why sampling ended: `stop`, `length`, `abort`, or what the engine says.
        own_routed_experts: Router choices that are not known from the parent; positions count from the first
            token of the prompt.
        weight_versions: Spans over the completion.
        messages_keep: Number of leading messages that it shares with the parent's conversation.
        new_messages: The messages after those, what was sampled included.
        reward: One number for the step, one for each sampled token, or None.
        extra: What the caller keeps beside it.
    """

    index: int
    parent: "Step | None"
    keep: int
    own_ids: Int32Array
    added: int
    own_entries: tuple[MediaEntry, ...] = ()
    new_items: tuple[MediaItem, ...] = ()
    logprobs: npt.NDArray[np.float32] | None = None
    finish_reason: str | None = None
    own_routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    messages_keep: int = 0
    new_messages: tuple[Any, ...] = ()
    _reward: "float | npt.NDArray[np.float32] | None" = None
    extra: dict[str, Any] = field(default_factory=dict)
    _sequence: Int32Array | None = None

    def __len__(self) -> int:
        return self.keep + len(self.own_ids)

    def __bool__(self) -> bool:
        return True  # a step without tokens is a step: `if step.parent` asks whether there is one

    def __repr__(self) -> str:
        start = "a root" if self.parent is None else f"{self.keep} tokens of step {self.parent.index}"
        own = f"{self.added} of the prompt, {len(self.completion_ids)} sampled, {len(self.own_entries)} media"
        return f"Step({self.index}: {start}; {own})"

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self.keep + self.added

    @property
    def prompt_delta(self) -> Int32Array:
        """Prompt tokens that the parent does not have, int32."""
        return self.own_ids[: self.added]

    @property
    def completion_ids(self) -> Int32Array:
        """Sampled tokens, int32."""
        return self.own_ids[self.added :]

    @property
    def token_ids(self) -> Int32Array:
        """Prompt and completion, int32, read-only."""
        if self._sequence is not None:
            return self._sequence
        pieces = [step.own_ids[: stop - step.keep] for step, stop in self.parts()]
        whole: Int32Array = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        whole.flags.writeable = False
        return whole

    @property
    def prompt_ids(self) -> Int32Array:
        """The whole prompt, int32, read-only."""
        return self.token_ids[: self.prompt_length]

    @property
    def reward(self) -> "float | npt.NDArray[np.float32] | None":
        """One number for the step, or one for each sampled token as float32, or None."""
        return self._reward

    @reward.setter
    def reward(self, value: "float | Sequence[float] | npt.NDArray[Any] | None") -> None:
        self._reward = read_reward(value, len(self.completion_ids), f"steps[{self.index}].reward")

    @property
    def previous(self) -> "Step | None":
        """The last step whose prompt and completion this one's prompt begins with, None if there is none."""
        whole = [part.step for part in self.parts()[:-1] if part.whole]
        return whole[-1] if whole else None

    @property
    def entries(self) -> list[MediaEntry]:
        """All media of the prompt, in prompt order."""
        return [entry for step, stop in self.parts() for entry in entries_before(step.own_entries, stop)]

    @property
    def multi_modal_data(self) -> MultiModalData:
        """The sidecar of the whole prompt; items are shared with all steps that show them."""
        return MultiModalData.of(self.entries)

    @property
    def messages(self) -> list[Any]:
        """The whole conversation, what was sampled included."""
        messages: list[Any] = []
        for step in reversed(list(self._ancestry())):
            messages = [*messages[: step.messages_keep], *step.new_messages]
        return messages

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Router choices of the prompt and completion, put together from the steps that brought them.

        For each position the row of the step whose engine call met it first, which for a sampled token is
        the call that sampled it. Positions before the first gapless run are left out.
        """
        return assembled_experts(self.brought_experts())

    def brought_experts(self) -> list[tuple[RoutedExperts, int]]:
        """Return, from the root on, the router choices of each step and how far the sequence is its own."""
        parts = ((part.step.own_routed_experts, part.stop) for part in self.parts())
        return [(experts, stop) for experts, stop in parts if experts is not None]

    def parts(self) -> list[Part]:
        """Return what each step on the way from the root contributes to this one's sequence, this one last.

        Steps that contribute no token are left out, this one excepted.
        """
        parts = [Part(self, len(self))]
        stop = self.keep
        for step in self._ancestry():
            if step is not self and stop > step.keep:
                parts.append(Part(step, stop))
            stop = min(stop, step.keep)
        parts.reverse()
        return parts

    def _ancestry(self) -> Iterator["Step"]:
        step: Step | None = self
        while step is not None:
            yield step
            step = step.parent


def read_reward(value: Any, count: int | None, where: str) -> "float | npt.NDArray[np.float32] | None":
    """Return a reward as a number, or as float32 `[count]` unless `count` is None.

    Raises:
        TrajectoryError: It is neither a finite number nor one for each sampled token.
    """
    if value is None:
        return None
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array("", np.str_)
    shapes: list[tuple[int, ...]] = [()] if count is None else [(), (count,)]
    if array.dtype.kind != "f" or array.shape not in shapes or not np.isfinite(array).all():
        several = "" if count is None else f", or {count} of them, one for each sampled token"
        raise TrajectoryError(
            "a reward is malformed",
            where=where,
            expected=f"a finite number{several}",
            got=repr(value)[:80],
        )
    if array.ndim == 0:
        return float(array)
    rewards = array.astype(np.float32)
    rewards.flags.writeable = False
    return rewards


def read_extra(value: Any, where: str) -> dict[str, Any]:
    """Return a copy of a mapping with text keys.

    Raises:
        TrajectoryError: It is none.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TrajectoryError("extra is no mapping with text keys", where=where, got=repr(value)[:80])
    return dict(value)
