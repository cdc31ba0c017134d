"""From one turn to the next without touching what was sampled: previous ids verbatim, then a derived tail.

The tail is what the template writes after an assistant's content when the new messages follow it. It comes
from a skeleton, a short conversation that ends in the new messages, so its cost grows with the extension
alone. That the tail does not depend on what came before is proved once for each shape of extension; where it
does, the bridge is refused with a reason.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal, TypeAlias

from mmrender.bridge.histories import MediaCount, ProbeHistory, Reads, shape_of
from mmrender.bridge.proof import Objection, Proof, TailProver
from mmrender.bridge.tail import NotBridged, ReasoningState, Tails, place_of_new
from mmrender.errors import ProcessorError, SpecialTokenError, TemplateError
from mmrender.messages import UNKNOWN_SOURCE, ImagePart, Message, RenderRequest, Role
from mmrender.rendering import Rendering
from mmrender.sidecar import MultiModalData
from mmrender.template.text import TracedStr, plain
from mmrender.tokens.encode import Layout
from mmrender.tokens.rendered import RenderedTokens, TokenSpan
from mmrender.tokens.turns import PROMPT_TOKENS

__all__ = ["Bridge", "History", "NotBridged"]

History: TypeAlias = Literal["sampled", "template"]
"""`sampled` keeps earlier turns as they were sampled; `template` gives no bridge where the template would now
write them differently."""

_SHORTEST = 2
"""Number of messages of the shortest skeleton."""
_MOST_ADOPTED = 2
"""Most variations that a skeleton holds."""


class Bridge:
    """Bridges turns of one template with one set of template arguments. Safe to use from many threads.

    Args:
        rendering: The template with what is known about it, and what encodes a tail.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._profile = rendering.known.profile
        self._writer = writer = rendering.writer
        self._reads = Reads.of(rendering.known.template.syntax_tree)
        self._tails = Tails(rendering.known, writer)
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
            history: Whether earlier turns may differ from what the template would write now.
            roles: Roles of the conversation so far, or None where they are not known.

        Raises:
            NotBridged: It cannot be proved that appending is right.
            InputError: The sidecar is of another prompt.
            PlaceholderError: The template drops a new image.
            SpecialTokenError: New content holds a special token, and its role is set to `error`.
            MediaError: A new image cannot be loaded or processed.
        """
        new_messages = request.messages
        if not new_messages:
            raise NotBridged("the extension is empty")
        if any(message.role == "assistant" for message in new_messages):
            raise NotBridged("the extension holds an assistant message, whose tokens were not sampled")
        if not prompt:
            raise NotBridged("the previous prompt is empty")
        if request.media and self._has_lone_image(prompt, previous) and self._counts_images():
            raise NotBridged("the processor treats an image differently when more of them follow")
        previous.spans(len(prompt), where="previous_multi_modal_data")
        first = _SHORTEST
        try:
            proved = self._proved(prompt, completion, new_messages, previous, history=history, roles=roles)
            first = len(proved.messages)
            layout = self._appended(prompt, completion, new_messages, proved)
        except SpecialTokenError as error:
            error.where = place_of_new(error.where, first)
            raise
        except TemplateError as error:
            raise NotBridged(f"the template does not take this extension: {error}") from error
        sampled = [*prompt, *completion]
        encoded, sidecar = self._rendering.encode(
            layout,
            request,
            before=sampled,
            earlier=previous,
            skipped=first,
        )
        base = len(sampled)
        spans = [TokenSpan(0, len(prompt), -1, "prompt", False)]
        if completion:
            spans.append(TokenSpan(len(prompt), base, -1, "completion", True))
        spans += [
            TokenSpan(start + base, stop + base, max(message - first, -1), kind, False)
            for start, stop, message, kind, _ in encoded.spans
        ]
        return RenderedTokens(
            token_ids=[*sampled, *encoded.ids],
            spans=tuple(spans),
            roles=tuple([message.role for message in new_messages]),
            tool_names=tuple([message.name if message.role == "tool" else None for message in new_messages]),
            multi_modal_data=sidecar,
            text=plain(layout.text),
            placeholder_ids=self._writer.placeholder_ids,
            _decode=self._writer.tokenizer.decode,
        )

    def _has_lone_image(self, prompt: Sequence[int], previous: MultiModalData) -> bool:
        """Return whether a prompt holds one image, as far as is known; processors treat all others alike."""
        if not previous.mm_hashes:
            return not self._writer.media_ids.isdisjoint(prompt)
        return len(previous.mm_hashes.get("image", ())) == 1

    def _counts_images(self) -> bool:
        """Return whether an image depends on the number of others; new ones need the processor anyway."""
        media = self._rendering.media
        if media is None:
            return False
        media.require_processor("new_messages")
        return media.processor.depends_on_image_count

    def _appended(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        history: ProbeHistory,
    ) -> Layout:
        """What closes the completion, and the tail after it."""
        tail = self._tails.find(history, messages)
        if completion and completion[-1] in self._profile.stop_ids:
            # Where the close is the next turn's opener, only that opener can replace it.
            keep = tail.end.is_opener and completion[-1] != tail.end.token_id
            close, start = "", tail.end.start if keep else tail.end.stop
        else:
            close, start = self._tails.closing(tail, history, messages, prompt, completion)
        if not close and not start:
            return tail.layout
        rest = tail.layout.text[start:]
        return self._writer.lay_out(TracedStr(close) + rest if close else rest)

    def _proved(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        previous: MultiModalData,
        *,
        history: History,
        roles: Collection[Role] | None,
    ) -> ProbeHistory:
        """The history whose tail is taken, once it is proved that nothing else matters.

        Raises:
            NotBridged: Something else does.
        """
        self._require_open(prompt, messages, previous)
        findings = self._rendering.known.findings
        media: MediaCount | None = None
        base: tuple[int, ...] = ()
        shape = shape_of(messages, self._reads.marks)
        ended = completion[-1] if completion else None
        sampled = completion[:-1] if ended in self._profile.stop_ids else completion
        while True:
            prover = TailProver(self._tails, self._reads, messages, media, base)
            # Not every count can be tried: more than two media of a kind count as two.
            counts = media and (min(media.images, 2), min(media.videos, 2))
            key = ("bridge", self._setting, shape, history, counts, base)
            prove = partial(prover.prove, against_rewriting=history == "template")
            proof = findings.get_or_find(key, Proof, prove)
            if proof.counts_media:
                media = self._count(prompt, previous)
                continue
            objection = self._standing(proof, prompt, completion, sampled, roles)
            if objection is None:
                return prover.skeleton
            if len(base) == _MOST_ADOPTED or not objection.is_shown(ended, roles):
                raise NotBridged(objection.reason)
            base = (*base, objection.variation)

    def _require_open(
        self, prompt: Sequence[int], messages: Sequence[Message], previous: MultiModalData
    ) -> None:
        """Raise `NotBridged` if a longer prompt would not begin with this one."""
        had = "image" in previous.mm_hashes
        parts = [part for message in messages for _, part in message.media()]
        # The parts of a probe stay placeholders.
        has = had or any(isinstance(part, ImagePart) and part.source is not UNKNOWN_SOURCE for part in parts)
        nothing = Layout(TracedStr(""), (), ())
        try:
            affixes, longer = (self._writer.affixes(nothing, images=images) for images in (had, has))
        except ProcessorError as error:
            raise NotBridged(str(error)) from error
        last = affixes.last
        if affixes.closes and (not last or affixes.ending or prompt[-len(last) :] == [*last]):
            raise NotBridged("the model's processor or tokenizer ends every prompt, and this one would go on")
        if (affixes.first, affixes.opening) != (longer.first, longer.opening):
            raise NotBridged("the model's processor begins prompts with images differently")

    def _count(self, prompt: Sequence[int], previous: MultiModalData) -> MediaCount:
        """The media of the prompt."""
        hashes = previous.mm_hashes
        media = MediaCount(len(hashes.get("image", ())), len(hashes.get("video", ())))
        if not any(media) and not self._writer.media_ids.isdisjoint(prompt):
            raise NotBridged(
                "the template counts media, and previous_multi_modal_data lacks those of the prompt"
            )
        return media

    def _standing(
        self,
        proof: Proof,
        prompt: Sequence[int],
        completion: Sequence[int],
        sampled: Sequence[int],
        roles: Collection[Role] | None,
    ) -> Objection | None:
        """The first objection that this conversation does not rule out."""
        if not proof.objections:
            return None
        ended_alike = len(sampled) < len(completion) and (
            completion[-1] == proof.stop_id or completion[-1] in self._profile.end_ids
        )
        state: ReasoningState = "none"
        if any(objection.reasoning for objection in proof.objections):
            state = self._tails.reasoning_state(self._tails.turn_text(prompt, sampled).text)
        turn = None
        if any(objection.opening for objection in proof.objections) and self._tails.turns.is_fresh(prompt):
            turn = self._tails.turns.text_of(sampled[:PROMPT_TOKENS]).text
        stands = partial(
            Objection.stands,
            prompt=prompt,
            completion=sampled,
            is_cut_off=len(sampled) == len(completion),
            ended_alike=ended_alike,
            roles=roles,
            reasoning=state,
            turn=turn,
        )
        return next(filter(stands, proof.objections), None)
