"""Proof that a bridge's tail does not depend on what came before it.

The tail is rendered after histories that differ from the skeleton in a single respect each, and then in many
at once. A template that looks back writes another tail, and what it looks at is named by the smallest change
that still shows the difference.

A history counts only if the completion could have followed it: one whose turn ends in another stop token than
the one that was sampled is no evidence.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from mmrender.bridge.histories import Reads, Variation, media_placements, variations
from mmrender.bridge.tail import (
    NO_MEDIA,
    MediaCount,
    NotBridged,
    NotPrinted,
    ProbeHistory,
    Tail,
    Tails,
    content_end,
    skeleton,
)
from mmrender.errors import TemplateError
from mmrender.messages import Message, TextPart
from mmrender.template.text import TracedStr, plain

_COMBINATIONS = 24
"""Histories that differ in many respects at once. Any two respects meet in one of four."""
_SHARE = 0.5
_MEDIA_PROBES = (MediaCount(1), MediaCount(2), MediaCount(0, 1))


@dataclass(frozen=True)
class Proof:
    """What is known about extensions of one shape.

    Attributes:
        failure: Why the tail cannot be taken from the skeleton, or None.
        failure_otherwise: The same for a completion that does not end in `stop_id`.
        stop_id: The stop token that ends the skeleton's turn.
        counts_media: Whether the tail depends on the number of earlier images or videos, so that the skeleton
            has to hold as many.
    """

    failure: str | None
    failure_otherwise: str | None
    stop_id: int | None
    counts_media: bool


class TailProver:
    """Proves extensions of one template.

    Args:
        tails: Renders and cuts tails.
        reads: What the template's source says that it reads.
    """

    def __init__(self, tails: Tails, reads: Reads) -> None:
        self._tails = tails
        self._reads = reads

    def prove(
        self, extension: Sequence[Message], *, against_rewriting: bool, media: MediaCount | None = None
    ) -> Proof:
        """Prove an extension.

        Args:
            extension: The new messages.
            against_rewriting: Whether earlier turns must stay as the template wrote them, too.
            media: What the skeleton holds; None where it is not known that the tail depends on it.
        """
        history = skeleton(extension, self._tails.profile, media or NO_MEDIA)
        try:
            expected = self._tails.find(history, extension)
        except TemplateError as error:
            return _failed(f"the template does not take this extension after a short conversation: {error}")
        except NotBridged as refusal:
            return _failed(str(refusal))
        if media is None and any(
            self._follows(skeleton(extension, self._tails.profile, count), extension, expected)
            == "another tail"
            for count in _MEDIA_PROBES
        ):
            return Proof(None, None, expected.stop_id, counts_media=True)
        dropped = self._dropped(history, extension)
        if dropped is not None:
            return _failed(f"the template does not print the text of new_messages[{dropped}]")
        failure, after_other_stops = self._dependence(history, extension, expected, media)
        if failure is None and against_rewriting:
            failure = self._rewriting(history, extension)
        return Proof(failure, failure or after_other_stops, expected.stop_id, counts_media=False)

    def _dependence(
        self, history: ProbeHistory, extension: Sequence[Message], expected: Tail, media: MediaCount | None
    ) -> tuple[str | None, str | None]:
        """What the tail depends on: after histories that end in the same stop token, and after any other."""
        combined: list[Variation] = []
        otherwise: str | None = None
        for variation in self._variations(history, extension, media):
            follows = self._follows(variation.change(history), extension, expected)
            if follows == "another tail":
                return _named([variation]), None
            if follows == "another stop":
                otherwise = otherwise or _named([variation])
            if follows == "the same" and variation.combines:
                combined.append(variation)
        return self._joint_dependence(history, extension, expected, combined), otherwise

    def _variations(
        self, history: ProbeHistory, extension: Sequence[Message], media: MediaCount | None
    ) -> Iterator[Variation]:
        for variation in variations(extension, self._tails.profile):
            if variation.in_parts:
                changed = variation.change(history)
                try:
                    shown = _rendered(self._tails, changed, changed.messages, prompt=False)
                except TemplateError:
                    continue
                if "'type'" in shown:
                    continue
            yield variation
        yield from chain(media_placements(media), self._reads.variations())

    def _joint_dependence(
        self, history: ProbeHistory, extension: Sequence[Message], expected: Tail, taken: Sequence[Variation]
    ) -> str | None:
        """The same with many variations at once, for templates that look at two things together."""

        def differs(chosen: Sequence[Variation]) -> bool:
            changed = history
            for variation in chosen:
                changed = variation.change(changed)
            return self._follows(changed, extension, expected) == "another tail"

        source = random.Random(0)  # noqa: S311 - the same combinations every time
        for _ in range(_COMBINATIONS):
            chosen = [variation for variation in taken if source.random() < _SHARE]
            if differs(chosen):
                for variation in list(chosen):
                    fewer = [other for other in chosen if other is not variation]
                    chosen = fewer if differs(fewer) else chosen
                return _named(chosen)
        return None

    def _follows(
        self, history: ProbeHistory, extension: Sequence[Message], expected: Tail
    ) -> Literal["the same", "another tail", "another stop"] | None:
        """What follows this history, from the stop token on; None where the template refuses it."""
        wanted = expected.text[expected.start :]
        try:
            tail = self._tails.find(history, extension)
        except TemplateError:
            return None
        except NotPrinted:
            text = _rendered(self._tails, history, [*history.messages, *extension], prompt=True)
            return "the same" if text.endswith(wanted) else "another tail"
        except NotBridged:
            return "another tail"
        if tail.text[tail.start :] == wanted:
            return "the same"
        # A stop token that opens the next turn says nothing of how this one ended.
        stops = not expected.is_opener and expected.stop_id is not None and tail.stop_id is not None
        return "another stop" if stops and tail.stop_id != expected.stop_id else "another tail"

    def _dropped(self, history: ProbeHistory, extension: Sequence[Message]) -> int | None:
        """Index of a new message whose text the template leaves out, or None."""
        first = len(history.messages)
        text = _rendered(self._tails, history, [*history.messages, *extension], prompt=True)
        printed = {origin.message - first for _, _, origin in text.spans if origin.is_content}
        missing = (
            index for index, message in enumerate(extension) if index not in printed and _holds_text(message)
        )
        return next(missing, None)

    def _rewriting(self, history: ProbeHistory, extension: Sequence[Message]) -> str | None:
        """Why the template would write earlier turns differently once the extension follows, or None."""
        if self._tails.profile.reads_clock:
            return "the template writes the date, which may have changed since"
        unchanged = Variation("", lambda given: given)
        for variation in [unchanged, *variations(extension, self._tails.profile)]:
            changed = variation.change(history)
            messages = changed.messages
            try:
                prompt = plain(_rendered(self._tails, changed, messages[:-1], prompt=True))
                alone = _rendered(self._tails, changed, messages, prompt=False)
                full = plain(_rendered(self._tails, changed, [*messages, *extension], prompt=True))
                written = plain(alone)[: content_end(alone.spans, len(messages) - 1)]
            except (TemplateError, NotBridged):
                continue
            if not (full.startswith(prompt) and full.startswith(written)):
                seen = f" (seen by varying {variation.looks_at})" if variation.looks_at else ""
                return f"the template would write earlier turns differently once this extension follows{seen}"
        return None


def _failed(reason: str) -> Proof:
    return Proof(reason, reason, None, counts_media=False)


def _named(found: Sequence[Variation]) -> str:
    names = " together with ".join(dict.fromkeys(variation.looks_at for variation in found))
    return f"what the template writes for this extension depends on {names}"


def _rendered(tails: Tails, history: ProbeHistory, messages: Sequence[Message], *, prompt: bool) -> TracedStr:
    """Messages rendered with the tools and documents of a history."""
    return tails.known.render(
        messages, tools=history.tools, documents=history.documents, add_generation_prompt=prompt
    )


def _holds_text(message: Message) -> bool:
    content = message.content
    parts = [TextPart(content)] if isinstance(content, str) else content or ()
    return any(isinstance(part, TextPart) and part.text.strip() for part in parts)
