"""Kinds of conversations in a session: main, subagents, compactions and side calls.

An agent makes calls besides its own conversation: titles, summaries, judges, agents that it starts. Each
root of the tree has a kind, and the steps after it have the same kind unless the agent's headers name
another. The trainer selects by kind.

Headers decide first. Then the main conversation is the first root with tools, or the first root if none has
tools. A root that repeats recorded answers, as turns or as text, goes on from a summary or makes one. Roots
with the tools or the system message of the main conversation belong to it. Other roots with tools are
subagents, and roots without tools are side calls.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from mmcodecs.structs import ready
from mmrender.gateway.call import Call, Kind
from mmrender.gateway.digests import Digest, digest_of, folded, texts_of
from mmrender.gateway.matching import EXTRA, Place
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.step import Step
from mmrender.trajectory.tree import Trajectory

TRAINED: Final[tuple[Kind, ...]] = ("main", "subagent", "compaction")
"""Kinds that are trained on by default."""
_MIN_ANSWER: Final = 8
"""Minimum length of an answer that makes an equal text a repetition, in characters."""
_MIN_QUOTED: Final = 40
"""Minimum length of an answer that is looked for inside of texts, in characters."""


Record: TypeAlias = dict[str, Any]
"""The gateway's record of a step, in its `extra`."""


class Root(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about a root that its kind depends on. They are kept with the step.

    Attributes:
        tools: Digest of the tools, None without tools.
        system: Digest of the text of its system messages, None without them.
        has_form: Whether the answer must have a form, such as a JSON schema.
        repeats: Whether it repeats turns of other conversations.
        retells: Whether its text contains a recorded answer.
    """

    tools: Digest | None
    system: Digest | None
    has_form: bool = False
    repeats: bool = False
    retells: bool = False


def root_of(call: Call, place: Place, steps: Sequence[Step]) -> Root:
    """Return the facts about a call that begins a conversation."""
    systems = [message.text for message in call.messages if message.role in ("system", "developer")]
    texts = [
        folded(part)
        for index, message in enumerate(call.messages)
        if message.role in ("user", "assistant") and index not in place.borrowed
        for part in texts_of(message)
    ]
    return Root(
        tools=place.record.tools if call.tools else None,
        system=digest_of(systems) if systems else None,
        has_form="structured_outputs" in call.sampling_params,
        repeats=bool(place.borrowed),
        retells=_retells(texts, steps),
    )


def _retells(texts: Sequence[str], steps: Sequence[Step]) -> bool:
    """Whether one of some texts is a recorded answer, or contains one that is long enough."""
    whole = "\n".join(texts)
    answers = {folded(_answer_text(step)) for step in steps}
    return any(
        len(answer) >= _MIN_ANSWER and (answer in texts or (len(answer) >= _MIN_QUOTED and answer in whole))
        for answer in answers
    )


def _answer_text(step: Step) -> str:
    content = step.new_messages[-1].get("content") if step.new_messages else None
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def settle_kinds(trajectory: Trajectory) -> None:
    """Decide the kind of each step from all roots so far, and set it as `extra["gateway"]["kind"]`."""
    extras = ((step.index, step.extra.get(EXTRA, {})) for step in trajectory.steps)
    records = {index: record for index, record in extras if "matching" in record}
    main = _main_root(records.values())
    main_root = None if main is None else msgspec.convert(main["root"], ready(Root))
    for record in records.values():
        if (named := _named_kind(record)) is not None:
            record["kind"] = named
        elif "root" not in record:
            record["kind"] = records[record["from"]]["kind"]
        elif main_root is None or record is main:
            record["kind"] = "main"
        else:
            record["kind"] = _kind_of_root(msgspec.convert(record["root"], ready(Root)), main_root)


def note_kind(trajectory: Trajectory, step: Step) -> None:
    """Set the kind of a new step. A new root may change the kinds of earlier steps."""
    record = step.extra[EXTRA]
    if "root" in record:
        settle_kinds(trajectory)
    else:
        record["kind"] = _named_kind(record) or kind_of(trajectory.steps[record["from"]])


def _named_kind(record: Record) -> Kind | None:
    """Kind by the agent's headers."""
    origin = record.get("origin") or {}
    kind: Kind | None = origin.get("kind")
    if kind in (None, "main") and (origin.get("agent") or origin.get("parent_agent")):
        return "subagent"
    return None if kind == "main" else kind


def _main_root(records: Iterable[Record]) -> Record | None:
    """Return the first root with tools that no summary begins, or else the first that fits best."""
    roots = [record for record in records if "root" in record and _named_kind(record) is None]
    with_tools = (each for each in roots if each["root"]["tools"] and not each["root"].get("retells"))
    without_form = (each for each in roots if not each["root"].get("has_form"))
    return next(with_tools, None) or next(without_form, None) or next(iter(roots), None)


def _kind_of_root(root: Root, main: Root) -> Kind:
    """Kind of another root than the main one."""
    is_same = root.tools == main.tools if root.tools is not None else root.system == main.system
    if root.has_form and not is_same:
        return "side"
    if root.retells or (root.repeats and root.tools != main.tools):
        return "compaction"
    if is_same or (root.tools is not None and root.system == main.system):
        return "main"
    return "subagent" if root.tools is not None else "side"


def kind_of(step: Step) -> Kind:
    """Return the kind of a step. A step that no gateway recorded is of the main conversation."""
    kind: Kind = step.extra.get(EXTRA, {}).get("kind", "main")
    return kind


def select_samples(
    trajectory: Trajectory, kinds: Collection[Kind] = TRAINED, *, require_logprobs: bool = True
) -> list[TrainingSample]:
    """Return the samples of a trajectory that train on steps of these kinds only, each token once.

    Raises:
        TrajectoryError: Log probabilities are required and missing.
    """
    return trajectory.samples(require_logprobs=require_logprobs, trains=lambda step: kind_of(step) in kinds)
