"""From one turn to the next: the previous ids verbatim, then a derived tail.

The tail is the template's text after an assistant's content, once the new messages follow it. It comes from a
skeleton, a short conversation that ends in the new messages, so its cost only grows with the extension. One
proof for each shape of extension shows that the tail does not depend on earlier messages. If it does, the
bridge is refused with a reason.
"""

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, Literal, TypeAlias

from mmrender.bridge.histories import Reads, varied_skeleton
from mmrender.bridge.proof import Proof, TailProver
from mmrender.bridge.tail import (
    BridgedTurn,
    ExtendedHistory,
    MediaCounts,
    NotBridged,
    ProbeHistory,
    Tails,
    place_of_new,
    skeleton,
)
from mmrender.errors import ProcessorError, SpecialTokenError, TemplateError
from mmrender.messages import (
    MODALITIES,
    UNKNOWN_SOURCE,
    ImagePart,
    Message,
    RenderRequest,
    Role,
    TextPart,
)
from mmrender.rendering import Rendering
from mmrender.sidecar import MultiModalData
from mmrender.template.text import TracedStr
from mmrender.tokens.rendered import RenderedTokens, TokenSpan

History: TypeAlias = Literal["sampled", "template"]
"""`sampled` keeps earlier turns as they were sampled. `template` refuses a bridge if the template would now
write them differently."""

_MIN_MESSAGES = 2
"""Number of messages of the shortest skeleton."""
_MAX_ADOPTED = 2
"""Maximum number of variations in a skeleton."""


class Bridge:
    """Bridges turns of one template with one set of template arguments. Safe to use from many threads.

    Args:
        rendering: The template with its findings, and the encoder of tails.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._writer = writer = rendering.writer
        self._tails = Tails(rendering.known, writer)
        self._reads = Reads.of(rendering.known.template.syntax_tree)
        self._setting = repr((sorted(writer.rules.items()), sorted(writer.media_tokens)))

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        request: RenderRequest,
        *,
        previous: MultiModalData,
        history: History,
        roles: Collection[Role] | None = None,
    ) -> RenderedTokens:
        """Append the new messages and the generation prompt.

        Args:
            prompt: Token ids of the previous prompt.
            completion: Token ids sampled after it.
            request: The extension.
            previous: Sidecar of the prompt.
            history: Whether earlier turns may differ from the template's text for them now.
            roles: Roles of the conversation so far, or None if they are not known.

        Raises:
            NotBridged: It cannot be proved that appending is right.
            InputError: The sidecar is of another prompt.
            PlaceholderError: The template drops a new image.
            SpecialTokenError: New content holds a special token, and its role is set to `error`.
            MediaError: A new image cannot be loaded or processed.
        """
        messages = request.messages
        self._require_extension(prompt, request, previous)
        previous.spans(len(prompt), where="previous_multi_modal_data")
        sampled = BridgedTurn(self._tails.turns, prompt, completion, roles)
        first = _MIN_MESSAGES
        try:
            shortest = self._proved(sampled, request, previous, history)
            first = len(shortest.messages)
            tail = ExtendedHistory(self._tails, shortest, messages).tail
            close, start = self._tails.closing(tail, shortest, messages, sampled)
            if close or any(match.start < start < match.stop for match in tail.layout.matches):
                layout = self._writer.lay_out(TracedStr(close) + tail.layout.text[start:])
            else:
                layout = tail.layout.cut(start)
        except SpecialTokenError as error:
            error.where = place_of_new(error.where, first)
            raise
        except TemplateError as error:
            raise NotBridged(f"the template does not take this extension: {error}") from error
        encoded, sidecar = self._rendering.encode(
            layout, request, before=[*prompt, *completion], earlier=previous, skipped=first
        )
        spans = [TokenSpan(0, len(prompt), -1, "prompt", False)]
        if completion:
            stop = len(prompt) + len(completion)
            spans.append(TokenSpan(len(prompt), stop, -1, "completion", True))
        # Messages of the skeleton do not count.
        spans += [
            TokenSpan(start, stop, max(message - first, -1), kind, False)
            for start, stop, message, kind, _ in encoded.spans
        ]
        return self._rendering.rendered(request, layout.text, encoded.ids, sidecar, spans=tuple(spans))

    def _require_extension(
        self, prompt: Sequence[int], request: RenderRequest, previous: MultiModalData
    ) -> None:
        """Raise `NotBridged` if no longer prompt begins with this one, or if its media would change."""
        if not request.messages:
            raise NotBridged("the extension is empty")
        if any(message.role == "assistant" for message in request.messages):
            raise NotBridged("the extension holds an assistant message, whose tokens were not sampled")
        if not prompt:
            raise NotBridged("the previous prompt is empty")
        media, hashes = self._rendering.media, previous.mm_hashes
        if media is not None and request.media:
            is_unknown = not hashes and not self._writer.media_ids.isdisjoint(prompt)
            # Processors treat all numbers of images above one equally.
            if is_unknown or len(hashes.get("image", ())) == 1:
                media.require_processor("new_messages")
                if media.processor.depends_on_image_count:
                    raise NotBridged("the processor treats an image differently when more of them follow")
            if any(map(media.brings_audio, request.media)):
                media.require_processor("new_messages")
                audio = media.processor.audio
                effect = "none" if audio is None else audio.effect_of_others
                if effect != "none" and (is_unknown or media.changes_earlier_clips(request.media, previous)):
                    raise NotBridged("the processor pads earlier audio clips to a longer one that follows")
        had = "image" in hashes
        # The parts of a probe stay placeholders.
        has = had or any(
            isinstance(entry.part, ImagePart) and entry.part.source is not UNKNOWN_SOURCE
            for entry in request.media
        )
        try:
            affixes, longer = (self._writer.affixes("none", images=images) for images in (had, has))
        except ProcessorError as error:
            raise NotBridged(str(error)) from error
        last = affixes.last
        if affixes.closes and (not last or affixes.ending or prompt[-len(last) :] == [*last]):
            raise NotBridged("the model's processor or tokenizer ends every prompt, and this one would go on")
        if (affixes.first, affixes.opening) != (longer.first, longer.opening):
            raise NotBridged("the model's processor begins prompts with images differently")

    def _proved(
        self, sampled: BridgedTurn, request: RenderRequest, previous: MultiModalData, history: History
    ) -> ProbeHistory:
        """The history whose tail is taken, once it is proved that the tail depends on nothing else.

        Raises:
            NotBridged: The tail depends on more.
        """
        findings = self._rendering.known.findings
        media: MediaCounts | None = None
        base: tuple[int, ...] = ()
        shape = _shape_of(request.messages, self._reads.marks)
        while True:
            # Not every count can be tried, so all counts above two are proved as two.
            counts = media and tuple(min(count, 2) for count in media)
            key = ("bridge", self._setting, shape, history, counts, base)
            prove = partial(self._prove, request.messages, media, base, history)
            proof = findings.get_or_find(key, Proof, prove)
            if proof.counts_media:
                media = self._count(sampled.prompt, previous)
                continue
            objection = next((each for each in proof.objections if each.applies(sampled)), None)
            if objection is None:
                profile = self._tails.profile
                if base:
                    return varied_skeleton(request.messages, profile, self._reads, media, base)
                return skeleton(request.messages, profile, media)
            if len(base) == _MAX_ADOPTED or not objection.is_certain(sampled):
                raise NotBridged(objection.reason)
            base = (*base, objection.variation)

    def _prove(
        self,
        messages: Sequence[Message],
        media: MediaCounts | None,
        base: Sequence[int],
        history: History,
    ) -> Proof:
        prover = TailProver(self._tails, self._reads, messages, media, base)
        return prover.prove(against_rewriting=history == "template")

    def _count(self, prompt: Sequence[int], previous: MultiModalData) -> MediaCounts:
        """The media of the prompt."""
        media = tuple(map(previous.count, MODALITIES))
        if not any(media) and not self._writer.media_ids.isdisjoint(prompt):
            raise NotBridged(
                "the template counts media, and previous_multi_modal_data lacks the media of the prompt"
            )
        return media


def _shape_of(messages: Sequence[Message], marks: Sequence[str]) -> tuple[Any, ...]:
    """Shape that extensions with one proof share. More than three equal messages in a row count as three."""
    shapes = []
    for message in messages:
        content, kinds = message.content, None
        text = content if isinstance(content, str) else ""
        if isinstance(content, tuple):
            kinds = _without_repeats([type(part).__name__ for part in content], 2)
            text = "\n".join([part.text for part in content if isinstance(part, TextPart)])
        matches = tuple([mark for mark in marks if mark in text])
        unnamed = message.name is None, message.tool_call_id is None
        shapes.append(
            (message.role, content is None, kinds, not text.strip(), matches, *unnamed, *message.extra)
        )
    return _without_repeats(shapes, 3)


def _without_repeats(items: Sequence[Any], max_run: int) -> tuple[Any, ...]:
    """The items, with at most `max_run` equal items in a row."""
    runs = (islice(run, max_run) for _, run in groupby(items))
    return tuple(chain.from_iterable(runs))
