"""`Trajectory`: the steps of a rollout as a tree, each token, image and message stored once.

```python
trajectory = Trajectory()
trajectory.append_turn(turn)               # as `generate` returned it
trajectory.append_turn(next_turn)          # its prompt was bridged from the turn before
samples = trajectory.samples()
frames = trajectory.to_frames()            # for a transport of your own: Trajectory.from_frames(frames)
```

Every step is passed whole and stored as an addition. Its place is found by its tokens and media: a next turn
extends the step before, a retry or a sibling starts at the end of their common prompt, and a conversation
with a summarised history starts at the first token that differs.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

import numpy as np

import mmcodecs
from mmrender.errors import PlaceholderError, TrajectoryError, check_option
from mmrender.notebook import Drawn
from mmrender.sidecar import MediaItem, MultiModalData
from mmrender.trajectory.conversation import MediaSources, shared_messages
from mmrender.trajectory.engine_data import (
    AllowedTokens,
    RoutedExperts,
    SampledTurn,
    WeightVersionSpan,
    new_rows,
)
from mmrender.trajectory.newest import Newest
from mmrender.trajectory.prefix import find_place
from mmrender.trajectory.sample import RESTRICTED, SAMPLER, TrainingSample
from mmrender.trajectory.step import (
    Branch,
    Step,
    check_extra,
    check_ids,
    check_numbers,
    check_tools,
)
from mmrender.trajectory.wire import FORMAT, Reader, TrajectoryRow, Writer


class Trajectory(Drawn):
    """A tree of steps.

    Not for use from several threads at once.

    Args:
        trajectory_id: Name in error messages and sample ids. None makes a unique one.
        extra: Data of the caller, with text keys.

    Attributes:
        trajectory_id: The name.
        reward: Of the rollout as a whole, or None.
        error: Why the rollout ended early, or None.
        extra: A copy of the caller's data.
    """

    def __init__(self, trajectory_id: str | None = None, *, extra: Mapping[str, Any] | None = None) -> None:
        self.trajectory_id = uuid.uuid4().hex if trajectory_id is None else trajectory_id
        self.reward: float | None = None
        self.error: str | None = None
        self.extra = check_extra(extra, "extra")
        self._steps: list[Step] = []
        self._items: dict[tuple[str, type], MediaItem] = {}
        self._experts_form: Any = None
        self._newest: Newest | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Trajectory({self.trajectory_id!r}, {len(self)} steps, {len(self._items)} media items)"

    def __getstate__(self) -> dict[str, Any]:
        # A step names its parent by index: pickling a chain of objects would recurse once for each turn.
        steps = [
            {entry.name: getattr(step, entry.name) for entry in fields(step)}
            | {"parent": step.parent and step.parent.index, "_sequence": None, "_sidecar": None}
            for step in self._steps
        ]
        return {**self.__dict__, "_steps": steps, "_items": {}, "_newest": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _steps=[])
        for values in state["_steps"]:
            parent = values["parent"]
            self._add(Step(**{**values, "parent": None if parent is None else self._steps[parent]}))

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
        tools: Sequence[Any] | None = None,
        finish_reason: str | None = None,
        routed_experts: RoutedExperts | None = None,
        weight_versions: Sequence[WeightVersionSpan] = (),
        allowed: Sequence[AllowedTokens] = (),
        reward: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Step:
        """Add one call of the model. `append_turn` takes a sampled turn whole.

        The cost of a call that extends the newest step grows with its additions, except for one comparison of
        the tokens before.

        Args:
            prompt_ids: The whole prompt: a list, tuple or integer array.
            completion_ids: The sampled tokens, stop token included.
            logprobs: One finite number for each sampled token, or None.
            multi_modal_data: Sidecar of the whole prompt.
            parent: The step to start from. None takes the newest step if the prompt begins with all of it,
                and else the step that shares the longest prefix.
            messages: The whole conversation, the sampled message included.
            tools: The tools that the model was offered, as for `Renderer.render`, or None.
            finish_reason: Why sampling ended.
            routed_experts: Router choices of prompt and completion. Rows of earlier steps are dropped.
            weight_versions: Spans of the completion, and the weights that sampled them.
            allowed: Spans of the completion, and the token ids over which `logprobs` are normalised.
            reward: A number, or one for each sampled token.
            extra: Data to keep with the step, with text keys.

        Raises:
            TrajectoryError: Something does not fit the tokens or the parent, or a tool is not plain data. The
                trajectory is as it was.
            MessageError: A tool names no function.
            PlaceholderError: The sidecar does not hold together, or does not fit the prompt.
        """
        where = f"steps[{len(self)}]"
        if hasattr(prompt_ids, "completion_ids"):
            raise TrajectoryError(
                "a sampled turn is appended whole, with everything that its engine returned",
                where=f"{where}.prompt_ids",
                expected="token ids",
                got=type(prompt_ids).__name__,
                remedy="Call append_turn(turn)",
            )
        known = isinstance(parent, Step) and [parent] == self._steps[parent.index : parent.index + 1]
        if parent is not None and not known:
            raise TrajectoryError(
                "the parent is not a step of this trajectory",
                where=f"{where}.parent",
                expected=f"one of {len(self)} steps",
                got=repr(parent)[:80],
            )
        sidecar = MultiModalData() if multi_modal_data is None else multi_modal_data
        if not isinstance(sidecar, MultiModalData):
            raise TrajectoryError(
                "the sidecar has the wrong type",
                where=f"{where}.multi_modal_data",
                expected="MultiModalData",
                got=type(sidecar).__name__,
            )
        newest = self._newest if self._newest is not None and parent in (None, self._newest.step) else None
        place = newest.extension(prompt_ids, sidecar, where) if newest is not None else None
        if place is None:
            prompt = check_ids(prompt_ids, f"{where}.prompt_ids")
            media = sidecar.spans(len(prompt), where=f"{where}.multi_modal_data")
            place, newest = find_place(self._steps, prompt, media, parent, where), None
        parent, keep, prompt_delta, own_media = place
        completion = check_ids(completion_ids, f"{where}.completion_ids")
        experts, messages_keep = routed_experts, 0
        conversation = list(messages) if messages is not None else []
        if parent is not None:
            if isinstance(experts, RoutedExperts):
                run = parent.experts_run(keep) if newest is None else newest.experts_run
                experts = new_rows(experts, run, keep)
            if conversation:
                earlier = parent.messages if newest is None else newest.messages
                messages_keep = shared_messages(earlier, conversation)
        definitions = None if parent is None else parent.tools
        if tools is not definitions:
            definitions = None if tools is None else check_tools(tools, f"{where}.tools")
        step = Step(
            index=len(self),
            parent=parent,
            keep=keep,
            own_ids=np.concatenate([prompt_delta, completion]),
            added=len(prompt_delta),
            own_media=tuple(
                span._replace(item=self._items.get((span.item.identity, type(span.item)), span.item))
                for span in own_media
            ),
            logprobs=logprobs,
            finish_reason=finish_reason,
            own_experts=experts,
            weight_versions=tuple(weight_versions),
            allowed=tuple(allowed),
            messages_keep=messages_keep,
            new_messages=tuple(conversation[messages_keep:]),
            tools=definitions,
            _reward=reward,
            extra=check_extra(extra, f"{where}.extra"),
        )
        self._add(step)
        if newest is None:
            self.rest()
            self._newest = Newest(step)
        else:
            newest.extend(step, completion_ids)
        return step

    def append_turn(
        self,
        turn: SampledTurn,
        *,
        parent: Step | None = None,
        messages: Sequence[Any] | None = None,
        tools: Sequence[Any] | None = None,
        reward: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Step:
        """Add a sampled turn, such as `generate` returns, with all of its engine's data.

        The other arguments and errors are those of `append`. `turn.sampler`, if there is one, has facts about
        the program that sampled, which `extra["sampler"]` keeps.
        """
        known = {RESTRICTED: list(turn.restricted), SAMPLER: dict(getattr(turn, "sampler", {}))}
        if facts := {name: value for name, value in known.items() if value}:
            extra = {**facts, **check_extra(extra, f"steps[{len(self)}].extra")}
        return self.append(
            turn.prompt_ids,
            turn.completion_ids,
            logprobs=turn.logprobs,
            multi_modal_data=turn.multi_modal_data,
            parent=parent,
            messages=messages,
            tools=tools,
            finish_reason=turn.finish_reason,
            routed_experts=turn.routed_experts,
            weight_versions=turn.weight_versions,
            allowed=turn.allowed,
            reward=reward,
            extra=extra,
        )

    def branches(self) -> list[Branch]:
        """Return one branch for each step that no later step extends, in order.

        A retry, a sibling and a compacted conversation each end a branch of their own.
        """
        extended = {
            step.parent.index
            for step in self._steps
            if step.parent is not None and step.keep == len(step.parent)
        }
        tips = [step for step in self._steps if step.index not in extended]
        return [Branch(self.trajectory_id, index, tip, self.extra) for index, tip in enumerate(tips)]

    def samples(
        self,
        *,
        once: bool = True,
        require_logprobs: bool = True,
        trains: Callable[[Step], bool] | None = None,
    ) -> list[TrainingSample]:
        """Return one sample for each branch that has something to train on.

        Args:
            once: Train on each sampled token in the first branch that holds it only. Otherwise tokens that
                branches share are trained on in each of them.
            require_logprobs: Refuse sampled tokens without log probabilities, instead of giving them 0.0.
            trains: Whether to train on the tokens of a step. None trains on all.

        Raises:
            TrajectoryError: Log probabilities are required and missing.
        """
        if self._newest is not None:  # a rollout that is read has mostly ended
            self._newest.prompt = []
        trained: dict[int, int] | None = {} if once else None
        samples = [
            branch.sample(trained=trained, require_logprobs=require_logprobs, trains=trains)
            for branch in self.branches()
        ]
        return [sample for sample in samples if sample.loss_mask.any()]

    def to_frames(self, *, media_sources: MediaSources = "drop") -> list[bytearray | memoryview]:
        """Return the trajectory as frames for a transport that sends several parts, without copying pixels.

        Args:
            media_sources: `"drop"` puts None in place of images in messages, whose pixels travel in the
                items. `"keep"` carries messages as they are, with each image a second time.

        Raises:
            TrajectoryError: A message or `extra` holds something that cannot be encoded.
            MediaError: The class of a media item cannot travel.
        """
        return mmcodecs.encode_frames(trajectories_to_wire([self], media_sources=media_sources, share=False))

    @staticmethod
    def from_frames(frames: Sequence[Any]) -> "Trajectory":
        """Return the trajectory of `to_frames`, whose pixels are read-only views of the frames.

        Raises:
            CodecError: The frames are damaged.
            TrajectoryError: They hold something else, several trajectories, or another version of the format.
            MediaError: A media item is damaged.
            PlaceholderError: Placeholder ranges do not fit the tokens.
        """
        group = trajectories_from_wire(mmcodecs.decode(frames))
        if len(group) != 1:
            raise TrajectoryError(
                "the message holds a group", where="trajectories", expected="one", got=str(len(group))
            )
        return group[0]

    def to_bytes(self, *, media_sources: MediaSources = "drop") -> memoryview:
        """Return the trajectory as one buffer, otherwise as `to_frames`."""
        return mmcodecs.encode(trajectories_to_wire([self], media_sources=media_sources, share=False))

    @staticmethod
    def from_bytes(data: Any) -> "Trajectory":
        """Return the trajectory of `to_bytes`, otherwise as `from_frames`."""
        return Trajectory.from_frames(data)

    def rest(self) -> None:
        """Drop the buffers that make the next call cheap, which may be larger than the tokens."""
        if self._newest is not None:
            self._newest.step._sequence = self._newest.step._sidecar = None
            self._newest = None

    def _add(self, step: Step) -> None:
        experts, known = step.own_experts, self._experts_form
        if experts is not None:
            form = experts.dtype, experts.shape[1:]
            if known not in (None, form):
                raise TrajectoryError(
                    "routed experts have another form than in earlier steps",
                    where=f"steps[{step.index}].routed_experts",
                    expected="{} [rows, {}, {}]".format(known[0], *known[1]),
                    got="{} [rows, {}, {}]".format(form[0], *form[1]),
                )
            self._experts_form = form
        distinct = {(span.item.identity, type(span.item)): span.item for span in step.own_media}
        new = {key: item for key, item in distinct.items() if key not in self._items}
        step.new_items = tuple(new.values())
        self._items |= new
        self._steps.append(step)


def trajectories_to_wire(
    trajectories: Iterable[Trajectory], *, media_sources: MediaSources = "drop", share: bool = True
) -> dict[str, Any]:
    """Return trajectories as plain data for the codec, in which shared content is written once.

    Arrays of items and router choices are not copied.

    Args:
        trajectories: Such as the rollouts of a group.
        media_sources: As for `Trajectory.to_frames`.
        share: Whether the arrays of items are wrapped for an encoder with a table.

    Raises:
        TrajectoryError: A message holds something that cannot be encoded.
        MediaError: The class of a media item cannot travel.
    """
    check_option("media_sources", media_sources, get_args(MediaSources), error=TrajectoryError)
    writer, count, rows = Writer(media_sources), 0, []
    for number, each in enumerate(trajectories):
        if each._newest is not None:  # as in `samples`
            each._newest.prompt = []
        name, first = f"trajectories[{number}]", count
        steps = [writer.step(step, first, f"{name}.") for step in each._steps]
        writer.roots += [(first + step.index, step) for step in each._steps if step.parent is None]
        count += len(steps)
        if each.extra:
            writer.extras[name] = each.extra
        reward = None if each.reward is None else float(each.reward)
        rows.append(TrajectoryRow(each.trajectory_id, steps, reward, each.error))
    return writer.form(FORMAT, rows, share=share)


def trajectories_from_wire(wire: Any) -> list[Trajectory]:
    """Return the trajectories of `trajectories_to_wire`, with views of its arrays.

    Raises:
        TrajectoryError: The data is something else, of another version, or damaged.
        MediaError: A media item is damaged.
        PlaceholderError: Placeholder ranges do not fit the tokens.
    """
    reader, trajectories = Reader(), []
    for number, row in enumerate(reader.take(wire, FORMAT)):
        name, first = f"trajectories[{number}]", len(reader.steps)
        try:
            check_numbers(row.reward, None, "reward", reward=True)
            trajectory = Trajectory(row.id, extra=reader.extras.pop(name, None))
            trajectory.reward, trajectory.error = row.reward, row.error
            row.steps.reverse()
            while row.steps:  # each is dropped as it is read: both forms at once would be the peak of memory
                trajectory._add(reader.step(row.steps.pop(), first, f"{name}."))
        except (TrajectoryError, PlaceholderError) as error:
            error.where = f"wire.{name}.{error.where}"
            raise
        trajectories.append(trajectory)
    reader.check_used()
    return trajectories
