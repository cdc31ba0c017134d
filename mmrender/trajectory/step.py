"""`Step`: one call of the model, stored as an addition to its parent. `Branch`: one sequence of the tree.

Both produce training samples. Whole values (token ids, sidecar, messages, router choices) are put together
from the steps on the way to the root when they are read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mmcodecs.structs import ready
from mmrender.caching import LRUCache
from mmrender.content import normalize_tools
from mmrender.errors import TrajectoryError
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData
from mmrender.trajectory.aligned import Aligned, joined_spans
from mmrender.trajectory.engine_data import (
    AllowedTokens,
    RoutedExperts,
    WeightVersionSpan,
    assembled_experts,
    check_allowed,
    check_experts,
    check_versions,
    last_run,
)
from mmrender.trajectory.sample import RESTRICTED, SAMPLER, TrainingSample

Int32Array: TypeAlias = npt.NDArray[np.int32]
Tools: TypeAlias = tuple[dict[str, Any], ...]
"""Tool definitions as a template prints them: plain data, in the order of their keys."""
_NO_IDS: Final[Int32Array] = np.zeros(0, np.int32)
_LARGEST_ID: Final = np.iinfo(np.int32).max
_LARGEST: Final = 3.0e38
"""Bounds finite numbers. SGLang writes the smallest float32, -3.4e38, in place of minus infinity."""
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_TOOLS: Final[LRUCache[bytes, Tools]] = LRUCache(256)
"""Tool definitions that are shared, by the digest of their msgpack. Agents of one kind have equal ones."""


class Part(NamedTuple):
    """A step's part of a later step's sequence: its own tokens up to the position `stop`."""

    step: "Step"
    stop: int

    @property
    def whole(self) -> bool:
        """Whether all its tokens are in the sequence."""
        return self.stop == len(self.step)

    @property
    def sampled(self) -> tuple[int, int]:
        """Positions `[start, stop)` of its sampled tokens in the sequence."""
        start = self.step.keep + self.step.added
        return start, max(start, self.stop)


@dataclass(eq=False, slots=True, repr=False)
class Step:
    """One prompt and its completion. Made by `Trajectory.append`.

    `reward` and `extra` may be set later. All other fields are fixed, and their arrays read-only.

    Attributes:
        index: Position in `Trajectory.steps`.
        parent: The step that this one starts from, None for a root.
        keep: Number of leading tokens that it shares with the parent's prompt and completion.
        own_ids: The tokens after them, int32: the rest of the prompt, then the completion.
        added: Number of `own_ids` that belong to the prompt.
        own_media: Media that begin after the first `keep` tokens, in prompt order.
        new_items: Items of `own_media` that no earlier step of the trajectory shows, each once.
        logprobs: One for each sampled token, float32, or None.
        finish_reason: Why sampling ended: `stop`, `length`, `abort`, or another word of the engine.
        own_experts: Router choices that are not known from the parent, by position in the whole sequence.
        weight_versions: Spans over the completion.
        allowed: Spans over the completion with allowed token ids, over which `logprobs` are normalised.
        messages_keep: Number of leading messages that it shares with the parent's conversation.
        new_messages: The messages after them, the sampled one included.
        tools: Definitions of the tools that the model was offered, or None. Steps with equal tools share one
            object.
        reward: One number for the step, one for each sampled token, or None.
        extra: Data of the caller, with text keys.
    """

    index: int
    parent: "Step | None"
    keep: int
    own_ids: Int32Array
    added: int
    own_media: tuple[MediaSpan, ...] = ()
    new_items: tuple[MediaItem, ...] = ()
    logprobs: npt.NDArray[np.float32] | None = None
    finish_reason: str | None = None
    own_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    allowed: tuple[AllowedTokens, ...] = ()
    messages_keep: int = 0
    new_messages: tuple[Any, ...] = ()
    tools: Tools | None = None
    _reward: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    _sequence: Int32Array | None = None
    _sidecar: MultiModalData | None = None

    def __post_init__(self) -> None:
        """Check the values against the tokens."""
        where, sampled = f"steps[{self.index}]", len(self.own_ids) - self.added
        self.own_ids.flags.writeable = False
        self.logprobs = check_numbers(self.logprobs, sampled, f"{where}.logprobs")
        self._reward = check_numbers(self._reward, sampled, f"{where}.reward", reward=True)
        if self.own_experts is not None:
            check_experts(self.own_experts, len(self), f"{where}.routed_experts")
        if self.weight_versions:
            self.weight_versions = check_versions(self.weight_versions, sampled, f"{where}.weight_versions")
        if self.allowed:
            self.allowed = check_allowed(self.allowed, self.completion_ids, f"{where}.allowed")

    def __len__(self) -> int:
        return self.keep + len(self.own_ids)

    def __bool__(self) -> bool:
        return True  # a step without tokens is a step: `if step.parent` asks for a parent

    def __repr__(self) -> str:
        start = "a root" if self.parent is None else f"{self.keep} tokens of step {self.parent.index}"
        own = f"{self.added} of the prompt, {len(self.completion_ids)} sampled, {len(self.own_media)} media"
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
        reward: float | npt.NDArray[np.float32] | None = self._reward
        return reward

    @reward.setter
    def reward(self, value: "float | Sequence[float] | npt.NDArray[Any] | None") -> None:
        where = f"steps[{self.index}].reward"
        self._reward = check_numbers(value, len(self.completion_ids), where, reward=True)

    @property
    def previous(self) -> "Step | None":
        """The last step whose prompt and completion this prompt begins with, or None."""
        whole = [part.step for part in self.parts()[:-1] if part.whole]
        return whole[-1] if whole else None

    @property
    def media(self) -> list[MediaSpan]:
        """All media of the prompt, in prompt order."""
        return [span for step, stop in self.parts() for span in step.own_media if span.range.offset < stop]

    @property
    def multi_modal_data(self) -> MultiModalData:
        """The sidecar of the whole prompt. Items are shared with all steps that show them."""
        if self._sidecar is not None:
            return self._sidecar
        return MultiModalData.of((span.range, span.item) for span in self.media)

    @property
    def messages(self) -> list[Any]:
        """The whole conversation, the sampled message included."""
        messages = list(self.new_messages)
        stop, step = self.messages_keep, self.parent
        while step is not None:
            messages[:0] = step.new_messages[: max(0, stop - step.messages_keep)]
            stop, step = min(stop, step.messages_keep), step.parent
        return messages

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Router choices of prompt and completion, put together from the steps.

        Each row comes from the first engine call with this position, for a sampled token the call that
        sampled it. Positions before the last gapless run are left out.
        """
        parts = [(own, part.stop) for part in self.parts() if (own := part.step.own_experts) is not None]
        return assembled_experts(parts) if parts else None

    def experts_run(self, stop: int) -> tuple[int, int] | None:
        """Return the last gapless run of positions before `stop` whose router choices are known."""
        return last_run(
            (own.start, min(own.stop, part.stop, stop))
            for part in self.parts()
            if (own := part.step.own_experts) is not None
        )

    def parts(self) -> list[Part]:
        """Return the part of each step on the way from the root, this step last.

        Steps without a token in the sequence are left out, except this step.
        """
        parts = [Part(self, len(self))]
        stop, step = self.keep, self.parent
        while step is not None:
            if stop > step.keep:
                parts.append(Part(step, stop))
            stop, step = min(stop, step.keep), step.parent
        parts.reverse()
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One sequence of a trajectory, from the first token to the end of its last step.

    Attributes:
        trajectory_id: The trajectory's.
        index: Position in `Trajectory.branches()`.
        tip: The last step.
        extra: The trajectory's, such as a group id.
    """

    trajectory_id: str
    index: int
    tip: Step
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tip)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps whose whole prompt and completion are in the sequence, in order."""
        return tuple(part.step for part in self.tip.parts() if part.whole)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The whole sequence, int32, read-only."""
        return self.tip.token_ids

    @property
    def multi_modal_data(self) -> MultiModalData:
        """The sidecar of the whole sequence."""
        return self.tip.multi_modal_data

    def sample(
        self,
        *,
        trained: dict[int, int] | None = None,
        require_logprobs: bool = True,
        trains: Callable[["Step"], bool] | None = None,
    ) -> TrainingSample:
        """Return the sequence as a sample that trains on every token that was sampled.

        Its `extra` is the trajectory's, with `trajectory_id` and `steps`, the numbers of the steps.

        Args:
            trained: By step, the position up to which its tokens are trained on already. These are masked
                out, and the dict is brought up to date. None trains on all.
            require_logprobs: Refuse sampled tokens without log probabilities, instead of giving them 0.0.
            trains: Whether to train on the tokens of a step. None trains on all.

        Raises:
            TrajectoryError: Log probabilities are required and missing.
        """
        parts = self.tip.parts()
        trained = {} if trained is None else trained
        mask = np.zeros(len(self.tip), np.bool_)
        for part in parts:
            if trains is not None and not trains(part.step):
                continue
            (start, stop), done = part.sampled, trained.get(part.step.index, 0)
            mask[max(start, done) : stop] = True
            trained[part.step.index] = max(stop, done)
        extra = {**self.extra, "trajectory_id": self.trajectory_id}
        name = f"{self.trajectory_id}/{self.index}"
        return _sample(self.tip, parts, mask, name, require_logprobs, extra=extra)


def step_sample(step: Step, trajectory_id: str = "", *, require_logprobs: bool = True) -> TrainingSample:
    """Return one step as a sample that trains on its own completion only.

    Over all steps of a trajectory, each sampled token is trained on exactly once.

    Raises:
        TrajectoryError: Log probabilities are required and missing.
    """
    mask = np.zeros(len(step), np.bool_)
    mask[step.prompt_length :] = True
    name, length = f"{trajectory_id}/step-{step.index}", step.prompt_length
    return _sample(step, step.parts(), mask, name, require_logprobs, prompt_length=length)


def _sample(
    step: Step,
    parts: Sequence[Part],
    mask: npt.NDArray[np.bool_],
    name: str,
    require_logprobs: bool,
    *,
    extra: Mapping[str, Any] | None = None,
    prompt_length: int | None = None,
) -> TrainingSample:
    logprobs = np.zeros(len(mask), np.float32)
    pieces = []
    for part in parts:
        start, stop = part.sampled
        if part.step.logprobs is not None:
            logprobs[start:stop] = part.step.logprobs[: stop - start]
        elif require_logprobs and mask[start:stop].any():
            raise TrajectoryError(
                "sampled tokens have no log probabilities",
                where=f"steps[{part.step.index}].logprobs",
                expected=f"{stop - start} numbers",
                got="None",
                remedy="Ask the engine for them, or pass require_logprobs=False for 0.0 in their place",
            )
        if part.step.weight_versions or part.step.allowed:
            own = Aligned(weight_versions=part.step.weight_versions, allowed=part.step.allowed)
            pieces.append(own.cut(0, stop - start).shift(start))
    spans = joined_spans(pieces) if pieces else Aligned()
    logprobs[~mask] = 0.0
    extra = {**(extra or {}), "steps": tuple(part.step.index for part in parts)}
    if restricted := [part for part in parts if part.step.extra.get(RESTRICTED)]:
        extra[RESTRICTED] = tuple((*part.sampled, *part.step.extra[RESTRICTED]) for part in restricted)
    facts: dict[str, list[str]] = {}
    for part in parts:
        for fact, value in part.step.extra.get(SAMPLER, {}).items():
            facts.setdefault(fact, []).append(str(value))
    if facts:  # several values of steps that differ
        extra[SAMPLER] = {fact: ", ".join(dict.fromkeys(values)) for fact, values in facts.items()}
    return TrainingSample(
        token_ids=step.token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        multi_modal_data=step.multi_modal_data,
        rewards=_rewards(parts, len(mask)),
        routed_experts=step.routed_experts,
        weight_versions=spans.weight_versions,
        allowed=spans.allowed,
        tools=step.tools,
        prompt_length=prompt_length,
        sample_id=name,
        extra=extra,
    )


def _rewards(parts: Sequence[Part], length: int) -> npt.NDArray[np.float32] | None:
    """Place rewards: of tokens on their tokens, of a whole step on its last sampled token.

    A step without samples adds its reward to the previous sampled token, or without one to its prompt's last
    token, which no loss mask marks. One reward of a step that is in the sequence in part is left out: it
    belongs to another ending.
    """
    if all(part.step._reward is None for part in parts):
        return None
    last = -1
    rewards = np.zeros(length, np.float32)
    for part in parts:
        reward: Any = part.step._reward
        start, stop = part.sampled
        last = stop - 1 if stop > start else last
        if isinstance(reward, np.ndarray):
            rewards[start:stop] = reward[: stop - start]
        elif reward is not None and part.whole and part.stop:
            rewards[last if last >= 0 else part.stop - 1] += reward
    return rewards


def check_ids(value: Any, where: str, *, start: int = 0) -> Int32Array:
    """Return token ids as int32 of shape `(n,)`.

    Args:
        value: A flat list, tuple or integer array; None for no tokens.
        where: Path for errors.
        start: Index of the first id, for errors.

    Raises:
        TrajectoryError: They are not flat integers of 32 bits, or one is negative.
    """
    if value is None:
        return _NO_IDS
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    except (ValueError, OverflowError):  # a ragged list, or an integer beyond 64 bits
        array = None
    if array is not None and array.shape == (0,):
        return _NO_IDS
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or array.max() > _LARGEST_ID:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:80]
        raise TrajectoryError(
            "token ids must be a flat list, tuple or numpy array of integers of 32 bits", where=where, got=got
        )
    if array.min() < 0:
        at = int(np.argmax(array < 0))
        raise TrajectoryError("a token id is negative", where=f"{where}[{start + at}]", got=str(array[at]))
    return array.astype(np.int32)


def check_numbers(value: Any, count: int | None, where: str, *, reward: bool = False) -> Any:
    """Return numbers as read-only float32 `[count]`, one number as a float, None as None.

    Args:
        value: Numbers, one number or None.
        count: Number of sampled tokens. None allows one number only.
        where: Path for errors.
        reward: Whether this is a reward, which may be one number, rather than log probabilities.
    """
    if value is None:
        return None
    try:
        given = np.asarray(value)
        numbers = np.asarray(np.nan if given.dtype.kind in "SUc" else given, np.float64)
    except (TypeError, ValueError):
        numbers = np.full(1, np.nan)
    fits = numbers.shape == (count,) or (reward and numbers.ndim == 0)
    if not fits or not are_finite(numbers).all():
        expected = "" if count is None else f"{count} finite numbers, one for each sampled token"
        if reward:
            expected = f"a finite number, or {expected}" if expected else "a finite number"
        problem = "a reward is malformed" if reward else "log probabilities are malformed"
        raise TrajectoryError(problem, where=where, expected=expected, got=repr(value)[:80])
    if numbers.ndim == 0:
        return float(numbers)
    array = numbers.astype(np.float32)
    array.flags.writeable = False
    return array


def are_finite(numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which log-probabilities or rewards are finite as float32."""
    finite: npt.NDArray[np.bool_] = np.abs(numbers) < _LARGEST
    return finite


def check_extra(value: Any, where: str) -> dict[str, Any]:
    """Return a copy of a mapping with text keys, empty for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TrajectoryError("extra must be a mapping with text keys", where=where, got=repr(value)[:80])
    return dict(value)


def shared_tools(encoded: bytes) -> Tools:
    """Return tool definitions from their msgpack. Equal ones are one object, as long as they are in use."""
    decode = partial(msgspec.msgpack.decode, encoded, type=ready(Tools))
    return _TOOLS.get_or_compute(blake3(encoded).digest(), decode)


def check_tools(value: Any, where: str) -> Tools | None:
    """Return tool definitions as plain data, or None for None.

    Equal definitions with keys in the same order are one object, which trajectories share. It must not be
    changed.

    Args:
        value: As for `Renderer.render`.
        where: Path for errors.

    Raises:
        TrajectoryError: A definition is not plain data.
        MessageError: As `normalize_tools`.
    """
    tools = normalize_tools(value, where=where)
    if tools is None:
        return None
    try:
        return shared_tools(_ENCODE(tools))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        expected = "null, booleans, numbers, text, lists and objects"
        raise TrajectoryError(
            "a tool definition is not plain data", where=where, expected=expected, got=str(error)
        ) from error
