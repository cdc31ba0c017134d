"""`Trajectory`: the steps of a rollout as a tree, each token, image and message stored once.

```python
trajectory = Trajectory("task-17/3")
first = trajectory.append(prompt_ids, response.completion_ids, logprobs=response.logprobs,
                          multi_modal_data=rendered.multi_modal_data)
trajectory.append(next_prompt_ids, more.completion_ids, logprobs=more.logprobs,
                  multi_modal_data=bridged.multi_modal_data)
[branch.sample() for branch in trajectory.branches()]
```

Every step is given whole and stored as what it adds. Where it belongs is found by its tokens: it starts from
the step that shares the longest prefix with it, its media included. So a next turn extends the one before, a
retry or a sibling starts at the end of their common prompt, and a conversation whose history was summarised
or dropped starts where the tokens part.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np

from mmrender.errors import TrajectoryError
from mmrender.spans import MediaItem, MultiModalData
from mmrender.trajectory.append_checks import (
    check_agreement,
    checked_entries,
    checked_experts,
    checked_ids,
    checked_logprobs,
    checked_versions,
)
from mmrender.trajectory.branch import Branch
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.packed import Int32Array
from mmrender.trajectory.routed_rows import rows_beyond
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.shared_prefix import (
    NOTHING_SHARED,
    MediaEntry,
    SharedPrefix,
    entries_from,
    shared_prefix,
)
from mmrender.trajectory.sidecars import same_item
from mmrender.trajectory.tree_step import Step, read_extra, read_reward

_REMEMBERED: Final = 4
"""Steps whose whole sequence is kept at hand; those of others are put together when asked for."""


class Trajectory:
    """A tree of steps.

    Not for use from several threads at once.

    Args:
        trajectory_id: Names it, for messages, samples and deduplication on the way to a trainer.
        extra: What the caller keeps beside it; text keys.

    Attributes:
        trajectory_id: As given.
        reward: Of the rollout as a whole, or None.
        error: Why the rollout ended early, or None.
        extra: A copy of what was given.
    """

    def __init__(self, trajectory_id: str = "", *, extra: Mapping[str, Any] | None = None) -> None:
        self.trajectory_id = trajectory_id
        self.reward: float | None = None
        self.error: str | None = None
        self.extra = read_extra(extra, "extra")
        self._steps: list[Step] = []
        self._items: dict[tuple[str, type], MediaItem] = {}
        self._recent: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Trajectory({self.trajectory_id!r}, {len(self)} steps, {len(self._items)} media items)"

    def __getstate__(self) -> dict[str, Any]:
        # A step names its parent by index: pickling a chain of objects would recurse once for each turn.
        steps = [
            {entry.name: getattr(step, entry.name) for entry in fields(step)}
            | {"parent": None if step.parent is None else step.parent.index, "_sequence": None}
            for step in self._steps
        ]
        return {**self.__dict__, "_steps": steps, "_recent": deque(), "_items": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _steps=[])
        for values in state["_steps"]:
            parent = values["parent"]
            self.restore(Step(**{**values, "parent": None if parent is None else self._steps[parent]}))

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in the order in which they were appended."""
        return tuple(self._steps)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """The distinct media items, in the order in which they were first shown."""
        return tuple(self._items.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct media items and of all tokens."""
        return sum(item.nbytes for item in self.items) + sum(step.own_ids.nbytes for step in self._steps)

    def append(
        self,
        prompt_ids: Any,
        completion_ids: Any = (),
        *,
        logprobs: Any = None,
        multi_modal_data: MultiModalData | None = None,
        parent: Step | None = None,
        messages: Sequence[Any] | None = None,
        finish_reason: str | None = None,
        routed_experts: RoutedExperts | None = None,
        weight_versions: Sequence[WeightVersionSpan] = (),
        reward: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Step:
        """Add one call of the model.

        Args:
            prompt_ids: The whole prompt: a list, tuple or integer array.
            completion_ids: What was sampled, stop token included.
            logprobs: One finite number for each sampled token; None if there are none.
            multi_modal_data: Sidecar of the whole prompt.
            parent: The step to start from; None finds the one that shares the longest prefix.
            messages: The whole conversation that the tokens stand for, what was sampled included.
            finish_reason: Why sampling ended.
            routed_experts: Router choices of prompt and completion; rows that earlier steps brought are
                dropped.
            weight_versions: Which weights sampled which tokens of the completion.
            reward: A number, or one for each sampled token.
            extra: What to keep beside the step; text keys.

        Raises:
            TrajectoryError: Something does not fit the tokens or the parent. The trajectory is as it was.
        """
        where = f"steps[{len(self)}]"
        prompt = checked_ids(prompt_ids, f"{where}.prompt_ids")
        completion = checked_ids(completion_ids, f"{where}.completion_ids")
        entries = checked_entries(multi_modal_data, len(prompt), f"{where}.multi_modal_data")
        parent, shared = self._start(prompt, entries, parent, where)
        if parent is not None:
            check_agreement(parent, shared, where)
        keep = shared.length
        sequence = np.concatenate([prompt, completion])
        experts = checked_experts(
            routed_experts, len(sequence), self._known_experts(), f"{where}.routed_experts"
        )
        conversation = list(messages) if messages is not None else []
        messages_keep = _shared_messages(parent, conversation)
        step = Step(
            index=len(self),
            parent=parent,
            keep=keep,
            own_ids=_frozen(sequence[keep:].copy()),
            added=len(prompt) - keep,
            own_entries=tuple(self._interned(entries_from(entries, keep))),
            logprobs=checked_logprobs(logprobs, len(completion), f"{where}.logprobs"),
            finish_reason=finish_reason,
            own_routed_experts=rows_beyond(
                experts, parent.brought_experts() if parent is not None else (), keep
            ),
            weight_versions=checked_versions(weight_versions, len(completion), f"{where}.weight_versions"),
            messages_keep=messages_keep,
            new_messages=tuple(conversation[messages_keep:]),
            _reward=read_reward(reward, len(completion), f"{where}.reward"),
            extra=read_extra(extra, f"{where}.extra"),
        )
        self.restore(step)
        self._remember(step, sequence)
        return step

    def find(
        self, prompt_ids: Any, multi_modal_data: MultiModalData | None = None
    ) -> tuple[Step | None, int]:
        """Return the step that a prompt would start from, and how many tokens they share.

        Raises:
            TrajectoryError: Token ids or sidecar are malformed.
        """
        prompt = checked_ids(prompt_ids, "prompt_ids")
        entries = checked_entries(multi_modal_data, len(prompt), "multi_modal_data")
        parent, shared = self._longest(prompt, entries)
        return parent, shared.length

    def children(self, step: Step) -> list[Step]:
        """Return the steps that start from `step`."""
        return [other for other in self._steps if other.parent is step]

    def branches(self) -> list[Branch]:
        """Return, in order, the sequences that no later step extends: one for each last step of a line.

        A retry, a sibling and a compacted conversation each end a branch of their own.
        """
        extended = {
            step.parent.index
            for step in self._steps
            if step.parent is not None and step.keep == len(step.parent)
        }
        tips = [step for step in self._steps if step.index not in extended]
        return [Branch(self.trajectory_id, index, tip) for index, tip in enumerate(tips)]

    def samples(self, *, once: bool = True, require_logprobs: bool = True) -> list[TrainingSample]:
        """Return one sample for each branch that has something to train on.

        Args:
            once: Train on each sampled token in the first branch that holds it only. Otherwise tokens that
                branches share are trained on in each of them.
            require_logprobs: Refuse sampled tokens without log probabilities, instead of giving them 0.0.

        Raises:
            TrajectoryError: Log probabilities are required and missing.
        """
        trained: dict[int, int] = {}
        samples = []
        for branch in self.branches():
            sample = branch.sample(trained=trained if once else None, require_logprobs=require_logprobs)
            if sample.loss_mask.any():
                samples.append(sample)
        return samples

    def _start(
        self, prompt: Int32Array, entries: Sequence[MediaEntry], parent: Step | None, where: str
    ) -> tuple[Step | None, SharedPrefix]:
        if parent is None:
            return self._longest(prompt, entries)
        if not self._holds(parent):
            raise TrajectoryError(
                "the parent is no step of this trajectory",
                where=f"{where}.parent",
                expected=f"one of {len(self)} steps",
                got=repr(parent)[:80],
            )
        return parent, shared_prefix(0, parent.token_ids, parent.entries, prompt, entries)

    def _holds(self, step: Any) -> bool:
        return isinstance(step, Step) and step.index < len(self) and self._steps[step.index] is step

    def _longest(self, prompt: Int32Array, entries: Sequence[MediaEntry]) -> tuple[Step | None, SharedPrefix]:
        """Compare a prompt with all steps; each token that is stored is looked at once at most."""
        best: Step | None = None
        found = NOTHING_SHARED
        all_shared: list[SharedPrefix] = []
        for step in self._steps:
            shared = NOTHING_SHARED if step.parent is None else all_shared[step.parent.index]
            if step.parent is None or shared.length >= step.keep:
                shared = shared_prefix(step.keep, step.own_ids, step.own_entries, prompt, entries)
            all_shared.append(shared)
            if shared.tokens > found.tokens:
                best, found = step, shared
        # Tokens that the step has from its own parent are that one's.
        while best is not None and best.parent is not None and found.length <= best.keep:
            best = best.parent
        return (best, found) if found.tokens else (None, found)

    def _known_experts(self) -> RoutedExperts | None:
        held = (step.own_routed_experts for step in self._steps)
        return next((experts for experts in held if experts is not None), None)

    def _interned(self, entries: Sequence[MediaEntry]) -> list[MediaEntry]:
        return [
            MediaEntry(found, self._items.get((item.identity, type(item)), item)) for found, item in entries
        ]

    def _unseen(self, entries: Sequence[MediaEntry]) -> tuple[MediaItem, ...]:
        keys = {(entry.item.identity, type(entry.item)): entry.item for entry in entries}
        return tuple(item for key, item in keys.items() if key not in self._items)

    def restore(self, step: Step) -> None:
        """Add a step that was stored; whoever read it has checked it."""
        step.new_items = self._unseen(step.own_entries)
        for item in step.new_items:
            self._items[item.identity, type(item)] = item
        self._steps.append(step)

    def _remember(self, step: Step, sequence: Int32Array) -> None:
        step._sequence = _frozen(sequence)
        self._recent.append(step)
        if len(self._recent) > _REMEMBERED:
            self._recent.popleft()._sequence = None


def _shared_messages(parent: Step | None, messages: Sequence[Any]) -> int:
    known = parent.messages if parent is not None else []
    keep = 0
    while keep < min(len(known), len(messages)) and same_item(known[keep], messages[keep]):
        keep += 1
    return keep


def _frozen(array: Int32Array) -> Int32Array:
    array.flags.writeable = False
    return array
