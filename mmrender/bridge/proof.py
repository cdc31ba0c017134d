"""Proof that a bridge's tail does not depend on earlier messages.

The tail is rendered after histories that differ from the skeleton in one respect each, and then in several at
once. A template that looks back writes another tail, and the smallest change that still shows the difference
names the respect.

A history only counts if the completion could have followed it: a history whose turn ends in another stop
token than the sampled one is not evidence. If the sampled stop token, or the roles of the conversation, show
that the conversation is of that kind, the history takes the skeleton's place, with its own proof.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from mmrender.bridge.histories import Reads, Variation, all_variations, variations, varied_skeleton
from mmrender.bridge.tail import (
    ONE_EACH,
    WITH_REASONING,
    BridgedTurn,
    ExtendedHistory,
    MediaCounts,
    NotBridged,
    NotPrinted,
    ProbeHistory,
    Tails,
)
from mmrender.errors import TemplateError, TemplateLimitError
from mmrender.messages import Message, Role
from mmrender.rendering import unprinted_messages
from mmrender.sidecar import common_prefix
from mmrender.template.text import plain

_COMBINATIONS = 24
"""Number of histories that differ in several respects at once. Any two respects meet in a quarter of them."""
_SHARE = 0.5
_MEDIA_PROBES: tuple[MediaCounts, ...] = tuple(
    tuple(number * count for count in counts) for counts in ONE_EACH for number in (1, 2)
)
"""One and two media of each modality."""

NeedKind: TypeAlias = Literal[
    "other stop", "token in prompt", "token in turn", "no content", "roles", "reasoning", "other opening"
]

_IS_POSSIBLE: Mapping[NeedKind, Callable[[BridgedTurn, Sequence[Any]], bool]] = {
    "other stop": lambda sampled, usual: sampled.stop_id not in usual,
    "token in prompt": lambda sampled, ids: any(token in sampled.prompt for token in ids),
    "token in turn": lambda sampled, ids: any(token in sampled.answer_ids for token in ids),
    "no content": lambda sampled, _: not sampled.answer_ids,
    "roles": lambda sampled, roles: sampled.roles is None or {*roles} <= {*sampled.roles},
    "reasoning": lambda sampled, states: sampled.reasoning in states,
    "other opening": lambda sampled, usual: not any(map(sampled.begins_with, usual)),
}
"""Whether a sampled turn may meet a need, by its kind."""


class Need(NamedTuple):
    """A condition that a conversation must meet to have had a history.

    Attributes:
        kind: Meaning of `values`. `other stop`: the stop tokens of the skeleton's turn, which the history's
            turn does not end in. `token in prompt` and `token in turn`: added tokens that the template writes
            there, one of which is present, but not in the skeleton. `no content`: the template prints no
            content of the turn. `roles`: roles that the skeleton lacks. `reasoning`: states of the turn's
            reasoning. `other opening`: the beginning of the skeleton's turn, which the history's lacks.
        values: See `kind`.
    """

    kind: NeedKind
    values: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Objection:
    """A history after which the template writes another tail.

    Attributes:
        reason: The respect that the template looks at.
        needs: Conditions that a conversation with this history meets. Without any, all conversations may
            have it.
        variation: Index of the variation that makes it if all histories with its stop token, or its roles,
            have its tail, or -1.
        stop_id: The stop token of its turn.
    """

    reason: str
    needs: tuple[Need, ...] = ()
    variation: int = -1
    stop_id: int | None = None

    def applies(self, sampled: BridgedTurn) -> bool:
        """Whether a sampled turn may have followed this history."""
        return all(_IS_POSSIBLE[need.kind](sampled, need.values) for need in self.needs)

    def needed(self, kind: NeedKind) -> tuple[Any, ...] | None:
        """Values of one kind of need, or None without that need."""
        return next((need.values for need in self.needs if need.kind == kind), None)

    def is_certain(self, sampled: BridgedTurn) -> bool:
        """Whether a sampled turn shows that it followed a history like this one, which applies to it."""
        if self.variation < 0:
            return False
        if self.needed("reasoning") is not None:
            return True
        if self.needed("other stop") is not None:
            return sampled.last_id is not None and sampled.last_id == self.stop_id
        roles = self.needed("roles")
        return roles is not None and sampled.roles is not None and {*roles} <= {*sampled.roles}


@dataclass(frozen=True)
class Proof:
    """Findings about extensions of one shape.

    Attributes:
        objections: Histories whose tail is not the skeleton's.
        counts_media: Whether the tail depends on the number of earlier media, so that the skeleton
            must have the same number.
    """

    objections: tuple[Objection, ...]
    counts_media: bool = False


class TailProver:
    """Proves one extension of a conversation.

    Args:
        tails: Renders and cuts tails.
        reads: Texts and fields that the template tests.
        extension: The new messages.
        media: Media of the skeleton. None until the tail is found to depend on their number.
        base: Indexes of variations that the skeleton includes.
    """

    def __init__(
        self,
        tails: Tails,
        reads: Reads,
        extension: Sequence[Message],
        media: MediaCounts | None,
        base: Sequence[int] = (),
    ) -> None:
        self._tails = tails
        self._reads = reads
        self._extension = extension
        self._media = media
        self._base = base
        self._skeleton = varied_skeleton(extension, tails.profile, reads, media, base)
        self._usual = self._extended(self._skeleton)

    def prove(self, *, against_rewriting: bool) -> Proof:
        """Prove it. With `against_rewriting`, earlier turns must also stay as the template wrote them."""
        try:
            self._usual.tail  # noqa: B018 - raises if there is none
        except TemplateLimitError:
            raise  # the template may be faster the next time
        except TemplateError as error:
            reason = f"the template does not take this extension after a short conversation: {error}"
            return Proof((Objection(reason),))
        except NotBridged as refusal:
            return Proof((Objection(str(refusal)),))
        for count in _MEDIA_PROBES if self._media is None else ():
            history = varied_skeleton(self._extension, self._tails.profile, self._reads, count, self._base)
            if self._compare(self._extended(history)) == "another tail":
                return Proof((), counts_media=True)
        omitted = unprinted_messages(self._usual.text, self._extension, len(self._skeleton.messages))
        reasons = [f"the template does not print the text of new_messages[{index}]" for index in omitted]
        objections = tuple(map(Objection, reasons)) or self._objections()
        if against_rewriting:
            objections += tuple(dict.fromkeys(self._rewriting()))
        return Proof(objections)

    def _extended(self, history: ProbeHistory) -> ExtendedHistory:
        return ExtendedHistory(self._tails, history, self._extension)

    def _changed(self, chosen: Iterable[Variation]) -> ExtendedHistory:
        """The skeleton with several variations, and the extension after it."""
        history = self._skeleton
        for variation in chosen:
            history = variation.of(history)
        return self._extended(history)

    def _objections(self) -> tuple[Objection, ...]:
        """Histories with another tail, up to the first that every conversation may have had."""
        combinable: list[Variation] = []
        objections: list[Objection] = []
        endings: list[tuple[set[Role], int | None, str | None]] = []
        respects = all_variations(self._extension, self._tails.profile, self._reads, self._media)
        for index, variation in enumerate(respects):
            varied = self._changed([variation])
            difference = self._compare(varied) if self._is_possible(variation, varied) else None
            if difference is None:
                continue
            stop_id, text = varied.ending
            endings.append((self._new_roles(varied.history), stop_id, text))
            if difference != "the same":
                needs = self._needs(variation, varied, stop_id, difference)
                objections.append(Objection(_depends_on([variation]), needs, index, stop_id))
                if not needs:
                    return tuple(objections)
            elif variation.combines:
                combinable.append(variation)
        objections = [
            objection if _is_decided(objection, endings) else replace(objection, variation=-1)
            for objection in objections
        ]
        # Several at once, for templates that look at two things together.
        source = random.Random(0)  # noqa: S311 - the same combinations every time
        for _ in range(_COMBINATIONS):
            chosen = [variation for variation in combinable if source.random() < _SHARE]
            if self._changes_tail(chosen):
                for variation in list(chosen):
                    fewer = [other for other in chosen if other is not variation]
                    chosen = fewer if self._changes_tail(fewer) else chosen
                varied = self._changed(chosen)
                # Each respect is necessary, so a turn that is not reasoning alone has the usual tail.
                alone = _is_reasoning_alone(varied)
                needs = (Need("reasoning", ("alone",)),) if alone else self._differences(varied)
                objections.append(Objection(_depends_on(chosen), needs))
                combinable = [variation for variation in combinable if variation not in chosen]
        return tuple(objections)

    def _needs(
        self, variation: Variation, varied: ExtendedHistory, stop_id: int | None, difference: str
    ) -> tuple[Need, ...]:
        """Conditions for a history with another tail."""
        ends = self._tails.profile.end_ids
        usual = self._usual.tail.end.token_id
        other_stop = Need("other stop", tuple(sorted(ends if usual is None else ends | {usual})))
        if variation.is_reasoning_alone:
            # If the template writes no stop token after the turn, the turn was sampled without one.
            needs = (Need("reasoning", ("alone",)),)
            return needs if stop_id is not None else (other_stop, *needs)
        differences = self._differences(varied)
        return (other_stop, *differences) if difference == "another stop" else differences

    def _differences(self, varied: ExtendedHistory) -> tuple[Need, ...]:
        """Conditions that show in a history's turn, in its prompt, or in its roles."""
        usual, roles = self._usual, self._new_roles(varied.history)
        # Arguments may write tokens of their own, which calls of the same kind need not have.
        if any(call.arguments for call in varied.history.assistant.tool_calls):
            calls = [
                msgspec.structs.replace(call, arguments={}) for call in varied.history.assistant.tool_calls
            ]
            varied = self._extended(varied.history.answering(tool_calls=tuple(calls)))
        begins_otherwise = varied.sampled and not varied.sampled.startswith(usual.opening)
        needs = [
            Need("other opening", (usual.opening,) if begins_otherwise else ()),
            Need("roles", tuple(sorted(roles))),
            Need("token in turn", tuple(sorted(varied.turn_ids - usual.turn_ids))),
            Need("token in prompt", tuple(sorted(varied.prompt_ids - usual.prompt_ids))),
        ]
        silent = [Need("no content")] if usual.prints_content and not varied.prints_content else []
        return (*silent, *[need for need in needs if need.values])

    def _new_roles(self, history: ProbeHistory) -> set[Role]:
        """Roles that the skeleton lacks."""
        known = {message.role for message in self._skeleton.messages}
        return {message.role for message in history.messages} - known

    def _changes_tail(self, chosen: Iterable[Variation]) -> bool:
        return self._compare(self._changed(chosen)) == "another tail"

    def _is_possible(self, variation: Variation, varied: ExtendedHistory) -> bool:
        """Whether a conversation may differ in this respect, and the template prints it as text."""
        if "content" in variation.answer and not self._skeleton.assistant.has_text:
            # The skeleton has no content, as before the call that ends the completion.
            return False
        try:
            return not variation.in_parts or "'type'" not in varied.text
        except TemplateError:
            return False

    def _compare(self, varied: ExtendedHistory) -> Literal["the same", "another tail", "another stop"] | None:
        """Compare the tail after a history, from the stop token on. None if the template refuses it."""
        usual = self._usual.tail
        expected = usual.text[usual.end.start :]
        try:
            tail = varied.tail
        except TemplateError:
            return None
        except NotPrinted:
            return "the same" if varied.text.endswith(expected) else "another tail"
        except NotBridged:
            return "another tail"
        if tail.text[tail.end.start :] == expected:
            return "the same"
        # A stop token that opens the next turn does not show how this one ended.
        usual_id = None if usual.end.is_opener else usual.end.token_id
        stop_id = tail.end.closer_id if tail.end.token_id is None else tail.end.token_id
        return "another stop" if stop_id not in (None, usual_id) and usual_id is not None else "another tail"

    def _rewriting(self) -> Iterator[Objection]:
        """Histories whose earlier turns the template writes differently once the extension follows."""
        if self._tails.profile.reads_clock:
            yield Objection("the template writes the date, which may have changed since")
            return
        why = "the template would write earlier turns differently once this extension follows"
        keeps_reasoning = False
        respects = variations(self._extension, self._tails.profile)
        for variation in [Variation(looks_at=""), *respects]:
            history = variation.of(self._skeleton)
            alone, later = ExtendedHistory(self._tails, history, ()), self._extended(history)
            if not self._is_possible(variation, later):
                continue
            try:
                prompt, text = plain(alone.prompt), plain(later.text[: later.stop])
                is_kept = text.startswith(plain(alone.text[: alone.stop]))
            except (TemplateError, NotBridged):
                continue
            reason = f"{why} (seen by varying {variation.looks_at})" if variation.looks_at else why
            tokens = tuple(sorted(alone.prompt_ids - self._usual.prompt_ids))
            in_prompt = (Need("token in prompt", tokens),) if tokens else ()
            shared = common_prefix(prompt, text)
            if shared < min(later.turn.begin, len(prompt)):
                yield Objection(reason, in_prompt)
                continue
            with_reasoning = alone.reasoning in WITH_REASONING
            states: tuple[str, ...] = ()
            if shared < len(prompt):
                states = WITH_REASONING if with_reasoning else ("none", "empty")
            elif with_reasoning:
                states = () if is_kept else WITH_REASONING
            elif alone.answer != later.answer:
                states = ("none", "empty")
            else:
                states = ("empty",) if later.reasoning == "none" else ("none",)
            if states:
                yield Objection(reason, (Need("reasoning", states), *in_prompt))
            keeps_reasoning |= with_reasoning and not states
        if not keeps_reasoning:
            yield Objection(why, (Need("reasoning", WITH_REASONING),))


def _depends_on(chosen: Iterable[Variation]) -> str:
    names = " together with ".join(dict.fromkeys(variation.looks_at for variation in chosen))
    return f"the template's text for this extension depends on {names}"


def _is_reasoning_alone(history: ExtendedHistory) -> bool:
    try:
        return history.reasoning == "alone"
    except (TemplateError, NotBridged):
        return False


def _is_decided(objection: Objection, endings: Iterable[tuple[set[Role], int | None, str | None]]) -> bool:
    """Whether every history seen with the objection's stop token, or with its roles, has its tail.

    `endings` are the new roles of a history, its stop token, and its tail from there on.
    """
    if objection.needed("reasoning") is not None:
        return True
    roles = {*(objection.needed("roles") or ())}
    is_by_stop = objection.needed("other stop") is not None
    texts = {
        text
        for new_roles, stop_id, text in endings
        if (stop_id == objection.stop_id if is_by_stop else roles and roles <= new_roles)
    }
    return len(texts) == 1 and None not in texts
