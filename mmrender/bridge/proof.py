"""Proof that a bridge's tail does not depend on what came before it.

The tail is rendered after histories that differ from the skeleton in a single respect each, and then in many
at once. A template that looks back writes another tail, and what it looks at is named by the smallest change
that still shows the difference.

A history counts only if the completion could have followed it: one whose turn ends in another stop token than
the one that was sampled is not evidence.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
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
    Tails,
    content_end,
    skeleton,
)
from mmrender.errors import TemplateError
from mmrender.messages import Message, TextPart
from mmrender.template.text import plain

_COMBINATIONS = 24
"""Histories that differ in many respects at once. Any two respects meet in one of four."""
_SHARE = 0.5
_MEDIA_PROBES = (MediaCount(1), MediaCount(2), MediaCount(0, 1))


@dataclass(frozen=True)
class Proof:
    """Findings about extensions of one shape.

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
    counts_media: bool = False


class TailProver:
    """Proves one extension of a conversation.

    Args:
        tails: Renders and cuts tails.
        reads: What the template's source says that it reads.
        extension: The new messages.
        media: What the skeleton holds; None where it is not known that the tail depends on it.
    """

    def __init__(
        self, tails: Tails, reads: Reads, extension: Sequence[Message], media: MediaCount | None
    ) -> None:
        self._tails = tails
        self._reads = reads
        self._extension = extension
        self._media = media
        self._history = skeleton(extension, tails.profile, media or NO_MEDIA)

    def prove(self, *, against_rewriting: bool) -> Proof:
        """Prove it; `against_rewriting`: earlier turns must stay as the template wrote them, too."""
        try:
            self._expected = self._tails.find(self._history, self._extension)
        except TemplateError as error:
            reason = f"the template does not take this extension after a short conversation: {error}"
            return Proof(reason, reason, None)
        except NotBridged as refusal:
            return Proof(str(refusal), str(refusal), None)
        stop_id = self._expected.stop_id
        probes = () if self._media is not None else _MEDIA_PROBES
        if any(
            self._follows(skeleton(self._extension, self._tails.profile, count)) == "another tail"
            for count in probes
        ):
            return Proof(None, None, stop_id, counts_media=True)
        failure, after_other_stops = self._dropped(), None
        if failure is None:
            failure, after_other_stops = self._dependence()
        if failure is None and against_rewriting:
            failure = self._rewriting()
        return Proof(failure, failure or after_other_stops, stop_id)

    def _dependence(self) -> tuple[str | None, str | None]:
        """Dependencies of the tail: after histories that end in the same stop token, and after any other."""
        taken: list[Variation] = []
        otherwise: str | None = None
        for variation in self._variations():
            follows = self._follows(variation.of(self._history))
            if follows == "another tail":
                return _named([variation]), None
            if follows == "another stop":
                otherwise = otherwise or _named([variation])
            if follows == "the same" and variation.combines:
                taken.append(variation)
        # Many at once, for templates that look at two things together.
        source = random.Random(0)  # noqa: S311 - the same combinations every time
        for _ in range(_COMBINATIONS):
            chosen = [variation for variation in taken if source.random() < _SHARE]
            if self._notices(chosen):
                for variation in list(chosen):
                    fewer = [other for other in chosen if other is not variation]
                    chosen = fewer if self._notices(fewer) else chosen
                return _named(chosen), otherwise
        return None, otherwise

    def _notices(self, chosen: Iterable[Variation]) -> bool:
        changed = self._history
        for variation in chosen:
            changed = variation.of(changed)
        return self._follows(changed) == "another tail"

    def _variations(self) -> Iterator[Variation]:
        for variation in variations(self._extension, self._tails.profile):
            if variation.in_parts:
                try:
                    shown = self._tails.render(variation.of(self._history))
                except TemplateError:
                    continue
                if "'type'" in shown:
                    continue
            yield variation
        yield from chain(media_placements(self._media), self._reads.variations())

    def _follows(self, history: ProbeHistory) -> Literal["the same", "another tail", "another stop"] | None:
        """Text after this history, from the stop token on; None where the template refuses it."""
        expected = self._expected
        wanted = expected.text[expected.start :]
        try:
            tail = self._tails.find(history, self._extension)
        except TemplateError:
            return None
        except NotPrinted:
            text = self._tails.render(history, self._extension)
            return "the same" if text.endswith(wanted) else "another tail"
        except NotBridged:
            return "another tail"
        if tail.text[tail.start :] == wanted:
            return "the same"
        # A stop token that opens the next turn says nothing of how this one ended.
        stops = not expected.is_opener and expected.stop_id is not None and tail.stop_id is not None
        return "another stop" if stops and tail.stop_id != expected.stop_id else "another tail"

    def _dropped(self) -> str | None:
        """Why not, if the template leaves out the text of a new message."""
        first = len(self._history.messages)
        text = self._tails.render(self._history, self._extension)
        printed = {origin.message - first for _, _, origin in text.spans if origin.is_content}
        for index, message in enumerate(self._extension):
            if index not in printed and _holds_text(message):
                return f"the template does not print the text of new_messages[{index}]"
        return None

    def _rewriting(self) -> str | None:
        """Why not, if the template would write earlier turns differently once the extension follows."""
        if self._tails.profile.reads_clock:
            return "the template writes the date, which may have changed since"
        for variation in [Variation(looks_at=""), *variations(self._extension, self._tails.profile)]:
            history = variation.of(self._history)
            try:
                prompt = plain(self._tails.render(history, unanswered=True))
                alone = self._tails.render(history)
                full = plain(self._tails.render(history, self._extension))
                written = plain(alone)[: content_end(alone.spans, len(history.messages) - 1)]
            except (TemplateError, NotBridged):
                continue
            if not (full.startswith(prompt) and full.startswith(written)):
                seen = f" (seen by varying {variation.looks_at})" if variation.looks_at else ""
                return f"the template would write earlier turns differently once this extension follows{seen}"
        return None


def _named(found: Sequence[Variation]) -> str:
    names = " together with ".join(dict.fromkeys(variation.looks_at for variation in found))
    return f"what the template writes for this extension depends on {names}"


def _holds_text(message: Message) -> bool:
    content = message.content
    parts = [TextPart(content)] if isinstance(content, str) else content or ()
    return any(isinstance(part, TextPart) and part.text.strip() for part in parts)
