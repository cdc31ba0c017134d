"""Proof that a bridge's tail does not depend on what came before it.

The tail is rendered after histories that differ from the plain one in a single respect each, and then in many
at once. A template that looks back writes another tail, and what it looks at is named by the smallest change
that still shows the difference.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mmrender.bridge.histories import (
    History,
    MediaCount,
    Variation,
    in_parts,
    marked,
    media_placements,
    skeleton,
    variations,
)
from mmrender.bridge.shape import Reads, text_in
from mmrender.bridge.tail import NotBridged, NotPrinted, content_end
from mmrender.errors import TemplateError
from mmrender.messages import Message
from mmrender.probing.profile import TemplateProfile
from mmrender.template.traced import TracedStr, plain

_COMBINATIONS = 40
"""Histories that differ in many respects at once. Any two respects meet in one of eight."""
_SHARE = 0.35

_MEDIA_PROBES = (MediaCount(1), MediaCount(2), MediaCount(0, 1))


@dataclass(frozen=True)
class Proof:
    """What is known about extensions of one shape.

    Attributes:
        failure: Why the tail cannot be taken from the skeleton, or None.
        counts_media: Whether the tail depends on the number of earlier images or videos, so that the skeleton
            has to hold as many.
    """

    failure: str | None
    counts_media: bool = False


@dataclass(frozen=True)
class Prover:
    """Proves extensions of one template.

    Attributes:
        tail_of: The part of the tail that must not vary; raises TemplateError where the template refuses the
            conversation, and NotBridged where it writes no such tail.
        text_of: Renders messages, with the generation prompt where the flag says so; raises TemplateError.
        profile: What is known about the template.
        reads: What its source says that it reads.
    """

    tail_of: Callable[[History, Sequence[Message]], str]
    text_of: Callable[[History, Sequence[Message], bool], TracedStr]
    profile: TemplateProfile
    reads: Reads

    def counts_media(self, extension: Sequence[Message]) -> bool:
        """Whether the tail depends on the number of earlier images or videos."""
        try:
            expected = self.tail_of(skeleton(extension), extension)
        except (TemplateError, NotBridged):
            return False
        return any(self._differs(skeleton(extension, media), extension, expected) for media in _MEDIA_PROBES)

    def independence_failure(self, extension: Sequence[Message], media: MediaCount | None) -> str | None:
        """Why the tail cannot be taken from the skeleton, or None.

        Args:
            extension: The new messages.
            media: What the skeleton holds; None where the tail does not depend on it.
        """
        counted = media is not None
        media = media or MediaCount()
        history = skeleton(extension, media)
        try:
            expected = self.tail_of(history, extension)
        except TemplateError as error:
            return f"the template does not take this extension after a short conversation: {error}"
        except NotBridged as refusal:
            return str(refusal)
        dropped = self._dropped(history, extension)
        if dropped is not None:
            return f"the template does not print the text of new_messages[{dropped}]"
        taken = []
        for variation in self._variations(extension, media, counted):
            differs = self._differs(variation.change(history), extension, expected)
            if differs:
                return _dependence([variation])
            if differs is not None and variation.joins:
                taken.append(variation)
        return self._joint_failure(history, extension, expected, taken)

    def _variations(
        self, extension: Sequence[Message], media: MediaCount, counted: bool
    ) -> Iterator[Variation]:
        yield from variations(extension, self.profile.reasoning)
        for variation in in_parts():
            if not self._prints_python(variation.change(skeleton(extension))):
                yield variation
        yield from media_placements(media, counted=counted)
        yield from marked(self.reads)

    def _dropped(self, history: History, extension: Sequence[Message]) -> int | None:
        """Index of a new message whose text the template leaves out, or None."""
        first = len(history.messages)
        text = self.text_of(history, [*history.messages, *extension], True)
        printed = {origin.message - first for _, _, origin in text._spans if origin.is_content}
        for index, message in enumerate(extension):
            if index not in printed and text_in(message).strip():
                return index
        return None

    def _prints_python(self, history: History) -> bool:
        """Whether the template expects text and prints a list of parts as Python does."""
        try:
            return "'type'" in self.text_of(history, history.messages, False)
        except TemplateError:
            return True

    def _joint_failure(
        self, history: History, extension: Sequence[Message], expected: str, taken: Sequence[Variation]
    ) -> str | None:
        """The same with many variations at once, for templates that look at two things together."""

        def differs(chosen: Sequence[Variation]) -> bool | None:
            changed = history
            for variation in chosen:
                changed = variation.change(changed)
            return self._differs(changed, extension, expected)

        source = random.Random(0)  # noqa: S311 - the same combinations every time
        for _ in range(_COMBINATIONS):
            chosen = [variation for variation in taken if source.random() < _SHARE]
            if differs(chosen):
                return _dependence(_smallest(chosen, differs))
        return None

    def _differs(self, history: History, extension: Sequence[Message], expected: str) -> bool | None:
        """Whether another tail follows this history; None where the template refuses the conversation."""
        try:
            return self.tail_of(history, extension) != expected
        except TemplateError:
            return None
        except NotPrinted:
            return not self.text_of(history, [*history.messages, *extension], True).endswith(expected)
        except NotBridged:
            return True

    def rewriting_failure(self, extension: Sequence[Message], media: MediaCount | None) -> str | None:
        """Why the template would write earlier turns differently once the extension follows, or None."""
        if self.profile.reads_clock:
            return "the template writes the date, which may have changed since"
        history = skeleton(extension, media or MediaCount())
        probes = [Variation("", lambda given: given), *variations(extension, self.profile.reasoning)]
        for variation in probes:
            if self._is_rewritten(variation.change(history), extension):
                seen = f" (seen by varying {variation.looks_at})" if variation.looks_at else ""
                return f"the template would write earlier turns differently once this extension follows{seen}"
        return None

    def _is_rewritten(self, history: History, extension: Sequence[Message]) -> bool:
        try:
            prompt = self.text_of(history, history.messages[:-1], True)
            alone = self.text_of(history, history.messages, False)
            full = self.text_of(history, [*history.messages, *extension], True)
            end = content_end(alone._spans, len(history.messages) - 1)
        except (TemplateError, NotBridged):
            return False
        return not (plain(full).startswith(plain(prompt)) and plain(full).startswith(plain(alone)[:end]))


def _dependence(found: Sequence[Variation]) -> str:
    names = " together with ".join(dict.fromkeys(variation.looks_at for variation in found))
    return f"what the template writes for this extension depends on {names}"


def _smallest(
    chosen: list[Variation], differs: Callable[[Sequence[Variation]], bool | None]
) -> list[Variation]:
    """Drop the variations that the difference does not need."""
    for variation in list(chosen):
        fewer = [other for other in chosen if other is not variation]
        if differs(fewer):
            chosen = fewer
    return chosen
