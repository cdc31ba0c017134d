"""Proof that a bridge's tail does not depend on what came before it.

The tail is rendered after histories that differ from the skeleton in a single respect each, and then in many
at once. A template that looks back writes another tail, and what it looks at is named by the smallest change
that still shows the difference.

A history counts only if the completion could have followed it: one whose turn ends in another stop token than
the one that was sampled is not evidence. And where the stop token that was sampled, or the roles of the
conversation, show that it is of such a kind, that history takes the skeleton's place, with its own proof.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from mmrender.bridge.histories import (
    NO_MEDIA,
    MediaCount,
    ProbeHistory,
    Reads,
    Variation,
    media_placements,
    skeleton,
    variations,
)
from mmrender.bridge.tail import HELD, NotBridged, NotPrinted, ReasoningState, Tails
from mmrender.errors import TemplateError, TemplateLimitError
from mmrender.messages import Message, Role
from mmrender.rendering import unprinted_messages
from mmrender.sidecar import common_prefix
from mmrender.template.text import plain

_COMBINATIONS = 24
"""Histories that differ in many respects at once. Any two respects meet in one of four."""
_SHARE = 0.5
_MEDIA_PROBES = (MediaCount(1), MediaCount(2), MediaCount(0, 1))


@dataclass(frozen=True)
class Objection:
    """A history after which the template writes another tail, and what such a history needs.

    Attributes:
        reason: What the template looks at.
        other_stop: Whether the history's turn ends in another stop token than the skeleton's.
        in_prompt: Added tokens that the template writes before such a turn and not before the skeleton's; a
            prompt without any of them has no such history.
        in_turn: The same for the turn itself, and a completion.
        is_silent: Whether the template prints no content of the turn, where it prints the skeleton's.
        roles: Roles that the skeleton lacks.
        reasoning: States of the turn's reasoning in which it stands; none: in all.
        opening: Text that such a turn does not begin with, and the skeleton's does.
        variation: Index of the variation that makes it, if all histories with its stop token, or its roles,
            have its tail; else -1.
        stop_id: The stop token of its turn.
    """

    reason: str
    other_stop: bool = False
    in_prompt: tuple[int, ...] = ()
    in_turn: tuple[int, ...] = ()
    is_silent: bool = False
    roles: tuple[Role, ...] = ()
    reasoning: tuple[ReasoningState, ...] = ()
    opening: str = ""
    variation: int = -1
    stop_id: int | None = None

    def stands(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        is_cut_off: bool,
        ended_alike: bool,
        roles: Collection[Role] | None,
        reasoning: ReasoningState,
        turn: str | None,
    ) -> bool:
        """Whether the prompt, the completion and the roles of the conversation leave such a history open.

        Args:
            prompt: Its tokens.
            completion: Its tokens, without a stop token.
            is_cut_off: Whether the completion lacked one.
            ended_alike: Whether it ended in a stop token of the skeleton's turn.
            roles: Roles of the conversation, or None where they are not known.
            reasoning: State of the completion's reasoning.
            turn: The beginning of its text; None if the prompt ends within a turn.
        """
        return not (
            (self.opening and turn is not None and self._begins(turn, is_cut_off=is_cut_off))
            or (self.reasoning and reasoning not in self.reasoning)
            or (self.other_stop and ended_alike)
            or (self.is_silent and completion)
            or (roles is not None and not set(self.roles) <= set(roles))
            or (self.in_turn and not any(token in completion for token in self.in_turn))
            or (self.in_prompt and not any(token in prompt for token in self.in_prompt))
        )

    def _begins(self, turn: str, *, is_cut_off: bool) -> bool:
        """Whether a turn has the skeleton's beginning, or is cut off within it and goes on so."""
        return turn.startswith(self.opening) or (is_cut_off and self.opening.startswith(turn))

    def is_shown(self, ended: int | None, roles: Collection[Role] | None) -> bool:
        """Whether the completion, or the conversation's roles, show that this standing history is theirs."""
        if self.variation < 0:
            return False
        if self.reasoning:
            return True
        if self.other_stop:
            return ended is not None and ended == self.stop_id
        return roles is not None and bool(self.roles) and set(self.roles) <= set(roles)

    @property
    def is_open(self) -> bool:
        """Whether no conversation rules such a history out."""
        evidence = (self.in_prompt, self.in_turn, self.roles, self.reasoning, self.opening)
        return not (self.other_stop or self.is_silent or any(evidence))


@dataclass(frozen=True)
class Proof:
    """Findings about extensions of one shape.

    Attributes:
        objections: Histories that stand against taking the tail from the skeleton.
        stop_id: The stop token that ends the skeleton's turn.
        counts_media: Whether the tail depends on the number of earlier images or videos, so that the skeleton
            has to hold as many.
    """

    objections: tuple[Objection, ...]
    stop_id: int | None
    counts_media: bool = False


class TailProver:
    """Proves one extension of a conversation.

    Args:
        tails: Renders and cuts tails.
        reads: What the template's source says that it reads.
        extension: The new messages.
        media: What the skeleton holds; None where it is not known that the tail depends on it.
        base: Indexes of variations that the skeleton holds.
    """

    def __init__(
        self,
        tails: Tails,
        reads: Reads,
        extension: Sequence[Message],
        media: MediaCount | None,
        base: Sequence[int] = (),
    ) -> None:
        self._tails = tails
        self._reads = reads
        self._extension = extension
        self._media = media
        self._base = tuple(base)
        self._history = self._skeleton(media or NO_MEDIA)

    def prove(self, *, against_rewriting: bool) -> Proof:
        """Prove it; `against_rewriting`: earlier turns must stay as the template wrote them, too."""
        try:
            self._expected = self._tails.find(self._history, self._extension)
        except TemplateLimitError:
            raise  # what took too long once may not again
        except TemplateError as error:
            reason = f"the template does not take this extension after a short conversation: {error}"
            return Proof((Objection(reason),), None)
        except NotBridged as refusal:
            return Proof((Objection(str(refusal)),), None)
        stop_id = self._expected.end.token_id
        probes = () if self._media is not None else _MEDIA_PROBES
        if any(self._follows(self._skeleton(count)) == "another tail" for count in probes):
            return Proof((), stop_id, counts_media=True)
        objections: tuple[Objection, ...] = tuple(map(Objection, self._dropped()))
        objections = objections or self._objections()
        if against_rewriting:
            objections += tuple(dict.fromkeys(self._rewriting()))
        return Proof(objections, stop_id)

    @property
    def skeleton(self) -> ProbeHistory:
        """The history whose tail is taken."""
        return self._history

    def _skeleton(self, media: MediaCount) -> ProbeHistory:
        history = skeleton(self._extension, self._tails.profile, media)
        if self._base:
            known = self._variations()
            for index in self._base:
                history = known[index].of(history)
        return history

    def _variations(self) -> list[Variation]:
        """Every variation; the indexes of all but media are those of any number of media."""
        found = variations(self._extension, self._tails.profile)
        return [*found, *self._reads.variations(), *media_placements(self._media)]

    def _objections(self) -> tuple[Objection, ...]:
        """Histories after which the tail is another; none further after one that nothing rules out."""
        taken: list[Variation] = []
        found: list[Objection] = []
        seen: list[tuple[set[Role], int | None, str | None]] = []
        for index, variation in enumerate(self._variations()):
            if not self._is_possible(variation):
                continue
            history = variation.of(self._history)
            follows = self._follows(history)
            if follows is None:
                continue
            stop_id, text = self._rest(history)
            seen.append((self._new_roles(history), stop_id, text))
            if follows in ("another tail", "another stop"):
                objection = (
                    self._unsaid(variation, stop_id)
                    if variation.is_reasoning_alone
                    else self._objection([variation], history, other_stop=follows == "another stop")
                )
                objection = replace(objection, variation=index, stop_id=stop_id)
                found.append(objection)
                if objection.is_open:
                    return tuple(found)
            if follows == "the same" and variation.combines:
                taken.append(variation)
        found = [
            objection if _is_decided(objection, seen) else replace(objection, variation=-1)
            for objection in found
        ]
        # Many at once, for templates that look at two things together.
        source = random.Random(0)  # noqa: S311 - the same combinations every time
        for _ in range(_COMBINATIONS):
            chosen = [variation for variation in taken if source.random() < _SHARE]
            if self._notices(chosen):
                for variation in list(chosen):
                    fewer = [other for other in chosen if other is not variation]
                    chosen = fewer if self._notices(fewer) else chosen
                found.append(self._objection(chosen, self._changed(chosen)))
                taken = [variation for variation in taken if variation not in chosen]
        return tuple(found)

    def _objection(
        self, chosen: Sequence[Variation], history: ProbeHistory, *, other_stop: bool = False
    ) -> Objection:
        names = " together with ".join(dict.fromkeys(variation.looks_at for variation in chosen))
        # Arguments may write tokens of their own, which calls of the same kind need not hold.
        calls = [msgspec.structs.replace(call, arguments={}) for call in history.assistant.tool_calls]
        found = self._tails.written(history.answering(tool_calls=tuple(calls)), self._extension)
        usual = self._tails.written(self._history, self._extension)
        return Objection(
            f"what the template writes for this extension depends on {names}",
            other_stop,
            in_prompt=tuple(sorted(found.prompt - usual.prompt)),
            in_turn=tuple(sorted(found.turn - usual.turn)),
            is_silent=usual.prints_content and not found.prints_content,
            roles=tuple(sorted(self._new_roles(history))),
            opening=usual.opening if found.text and not found.text.startswith(usual.opening) else "",
        )

    @staticmethod
    def _unsaid(variation: Variation, stop_id: int | None) -> Objection:
        """A turn of reasoning alone; where the template ends none with a stop token, none was sampled."""
        reason = f"what the template writes for this extension depends on {variation.looks_at}"
        return Objection(reason, stop_id is None, reasoning=("alone",))

    def _new_roles(self, history: ProbeHistory) -> set[Role]:
        """Roles that the skeleton lacks."""
        known = {message.role for message in self._history.messages}
        return {message.role for message in history.messages} - known

    def _rest(self, history: ProbeHistory) -> tuple[int | None, str | None]:
        """The stop token of a history's turn, and the text from it on; None where that is not known."""
        try:
            tail = self._tails.find(history, self._extension)
        except (TemplateError, NotBridged):
            return None, None
        return tail.end.token_id, tail.text[tail.end.start :]

    def _changed(self, chosen: Iterable[Variation]) -> ProbeHistory:
        changed = self._history
        for variation in chosen:
            changed = variation.of(changed)
        return changed

    def _notices(self, chosen: Iterable[Variation]) -> bool:
        return self._follows(self._changed(chosen)) == "another tail"

    def _varied(self) -> Iterator[Variation]:
        """Variations of anything but media and the texts that the template looks for."""
        return filter(self._is_possible, variations(self._extension, self._tails.profile))

    def _is_possible(self, variation: Variation) -> bool:
        if "content" in variation.answer and not self._history.assistant.has_text:
            # None was sampled, as before the call that ends the completion.
            return False
        if not variation.in_parts:
            return True
        try:
            return "'type'" not in self._tails.render(variation.of(self._history))
        except TemplateError:
            return False

    def _follows(self, history: ProbeHistory) -> Literal["the same", "another tail", "another stop"] | None:
        """Text after this history, from the stop token on; None where the template refuses it."""
        expected = self._expected
        wanted = expected.text[expected.end.start :]
        try:
            tail = self._tails.find(history, self._extension)
        except TemplateError:
            return None
        except NotPrinted:
            text = self._tails.render(history, self._extension)
            return "the same" if text.endswith(wanted) else "another tail"
        except NotBridged:
            return "another tail"
        if tail.text[tail.end.start :] == wanted:
            return "the same"
        # A stop token that opens the next turn says nothing of how this one ended.
        usual = None if expected.end.is_opener else expected.end.token_id
        ended = tail.end.closer_id if tail.end.token_id is None else tail.end.token_id
        return "another stop" if ended not in (None, usual) and usual is not None else "another tail"

    def _dropped(self) -> Iterator[str]:
        """Texts of new messages that the template leaves out."""
        first = len(self._history.messages)
        text = self._tails.render(self._history, self._extension)
        for index in unprinted_messages(text, self._extension, first):
            yield f"the template does not print the text of new_messages[{index}]"

    def _rewriting(self) -> Iterator[Objection]:
        """Histories whose earlier turns the template writes differently once the extension follows."""
        if self._tails.profile.reads_clock:
            yield Objection("the template writes the date, which may have changed since")
            return
        why = "the template would write earlier turns differently once this extension follows"
        usual = self._tails.written(self._history, self._extension)
        keeps_reasoning = False
        for variation in [Variation(looks_at=""), *self._varied()]:
            history = variation.of(self._history)
            try:
                prompt = plain(self._tails.render(history, unanswered=True))
                alone, turn = (self._tails.turn(history, after) for after in ((), self._extension))
            except (TemplateError, NotBridged):
                continue
            reason = f"{why} (seen by varying {variation.looks_at})" if variation.looks_at else why
            shared = common_prefix(prompt, turn.text)
            found = self._tails.written(history, self._extension)
            in_prompt = tuple(sorted(found.prompt - usual.prompt))
            if shared < min(turn.begin, len(prompt)):
                yield Objection(reason, in_prompt=in_prompt)
                continue
            states = alone.changed_in(turn)
            if shared < len(prompt):
                states = HELD if alone.reasoning in HELD else ("none", "empty")
            if states:
                yield Objection(reason, in_prompt=in_prompt, reasoning=states)
            keeps_reasoning |= alone.reasoning in HELD and not states
        if not keeps_reasoning:
            yield Objection(why, reasoning=HELD)


def _is_decided(objection: Objection, seen: Sequence[tuple[set[Role], int | None, str | None]]) -> bool:
    """Whether every history seen with the objection's stop token, or with its roles, has its tail."""
    if objection.reasoning:
        return True
    roles = set(objection.roles)
    texts = {
        text
        for new, stop_id, text in seen
        if (stop_id == objection.stop_id if objection.other_stop else roles and roles <= new)
    }
    return len(texts) == 1 and None not in texts
