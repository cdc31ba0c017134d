"""From a request to attributed tokens with their sidecar, and a memo of whole renderings.

`Rendering.encode` replaces each placeholder that the template wrote with a media item, for a whole prompt and
for the tail of a bridge. If the template's own loops show the part or message of a placeholder, its item
comes from there. Otherwise placeholders and parts come in the same order.

A conversation is often rendered again unchanged: for another sample of a group, for a count, for a retry.
`Memo` finds it again. Media that may change under the same name (a URL, an open file) are never memoised.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec

from mmrender.caching import LRUCache
from mmrender.content.values import NoKeyError, plain_key
from mmrender.errors import InputError, PlaceholderError, ProcessorError, TemplateError
from mmrender.media.resolve import MediaResolver
from mmrender.messages import (
    UNKNOWN_SOURCE,
    MediaPart,
    Message,
    Part,
    RenderRequest,
    TextPart,
)
from mmrender.sidecar import MediaItem, MultiModalData
from mmrender.template.known import KnownTemplate
from mmrender.template.text import TracedStr, clip, plain
from mmrender.tokens.encode import Encoded, Layout, Placeholder, TokenWriter
from mmrender.tokens.rendered import RenderedTokens, TokenSpan
from mmrender.tokens.sampled import mark_sampled
from mmrender.turns.sampled import SampledTurn, sampled_turns

Unprinted: TypeAlias = Literal["error", "allow"]

_BYTES_PER_TOKEN = 64
"""Estimated memory of a token id and its share of the spans, in bytes."""
_OTHER_TEXT = "mmrender"
"""Text that replaces a message's, to find out whether a template depends on it."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Renders the requests for one template with one set of template variables.

    Attributes:
        known: The chat template with its variables, and the findings about it.
        writer: Turns text into tokens.
        media: Turns media parts into items, or None for a text-only model.
        unprinted: What to do if the template ignores tools, documents or texts of messages.
    """

    known: KnownTemplate
    writer: TokenWriter
    media: MediaResolver | None
    unprinted: Unprinted = "error"

    def text(self, request: RenderRequest) -> TracedStr:
        """Run the template; each character is attributed.

        Raises:
            InputError: The template ignores a tool, a document or a message's text.
            TemplateError: It refuses or fails.
        """
        text = self.known.render(request)
        if self.unprinted == "error":
            if request.tools or request.documents:
                self._refuse_unprinted("tools", text, request)
                self._refuse_unprinted("documents", text, request)
            for index in unprinted_messages(text, request.messages):
                self._refuse_unprinted_message(index, text, request)
        return text

    def _differs(self, text: TracedStr, request: RenderRequest) -> bool:
        """Whether the template writes another text for a request, or refuses it."""
        try:
            return plain(self.known.render(request)) != plain(text)
        except TemplateError:
            return True

    def _refuse_unprinted(
        self, kind: Literal["tools", "documents"], text: TracedStr, request: RenderRequest
    ) -> None:
        """Raise for the first tool or document that does not affect a text.

        A template may read values without printing them. That it reads each of them is remembered for
        conversations of one shape.
        """
        values = getattr(request, kind) or ()
        printed = {origin.path for _, _, origin in text.spans if origin.kind == kind}
        unprinted = [index for index in range(len(values)) if f"{kind}[{index}]" not in printed]
        if not unprinted:
            return

        def is_read(left_out: Sequence[int]) -> bool:
            """Whether the template writes another text without some values."""
            others = [value for index, value in enumerate(values) if index not in left_out]
            return self._differs(text, msgspec.structs.replace(request, **{kind: others or None}))

        def find_unread() -> int:
            return next((index for index in unprinted if not is_read([index])), -1)

        if len(unprinted) == 1 or not is_read(unprinted):
            unread = find_unread()
        else:
            roles = [message.role for message in request.messages]
            asks = (request.add_generation_prompt, request.continued)
            try:
                shape = plain_key((values, unprinted, roles[:1], roles[-1:], sorted({*roles}), asks))
                unread = self.known.findings.remember(("unread", kind, shape), find_unread)
            except NoKeyError:
                unread = find_unread()
        if unread >= 0:
            raise InputError(
                f"the chat template ignores this {kind.removesuffix('s')}",
                where=f"{kind}[{unread}]",
                remedy='Leave it out, or open the model with unprinted="allow" if the messages describe it',
            )

    def _refuse_unprinted_message(self, index: int, text: TracedStr, request: RenderRequest) -> None:
        """Raise if the text of a message does not affect a text that does not print it."""
        messages = request.messages
        content: str | tuple[Part, ...] = _OTHER_TEXT
        if isinstance(parts := messages[index].content, tuple):
            content = tuple([TextPart(_OTHER_TEXT) if isinstance(part, TextPart) else part for part in parts])
        reworded = msgspec.structs.replace(messages[index], content=content)
        others = (*messages[:index], reworded, *messages[index + 1 :])
        if not self._differs(text, msgspec.structs.replace(request, messages=others)):
            raise InputError(
                f"the chat template does not print this {messages[index].role} message",
                where=f"messages[{index}]",
                remedy="Put its text into a message that the template prints, or open the model with "
                'unprinted="allow" if it is to be left out',
            )

    def render(self, request: RenderRequest) -> RenderedTokens:
        """Render a conversation; errors as for `Renderer.render`."""
        profile = self.known.profile
        text = self.text(request)
        layout = self.writer.lay_out(text)
        turns: list[SampledTurn] = []
        rewritten: list[int] = []
        if any(message.role == "assistant" for message in request.messages):
            turns, rewritten = sampled_turns(text, request, profile, self.known.render)
        encoded, sidecar = self.encode(
            layout, request, cuts=sorted({cut for turn in turns for cut in turn.cuts})
        )
        if encoded.is_closed:
            # Each prompt ends in tokens that the conversation does not continue.
            turns, rewritten = [], sorted([*rewritten, *[turn.message for turn in turns]])
        sampled = mark_sampled(encoded, turns, profile.stop_ids) if turns else None
        return self.rendered(
            request,
            text,
            encoded.ids,
            sidecar,
            spans=tuple(encoded.spans) if sampled is None else sampled.spans,
            rewritten=tuple(rewritten if sampled is None else sorted([*rewritten, *sampled.misaligned])),
            answer_only=() if sampled is None else sampled.answer_only,
        )

    def rendered(
        self,
        request: RenderRequest,
        text: TracedStr,
        token_ids: list[int],
        sidecar: MultiModalData,
        *,
        spans: tuple[TokenSpan, ...],
        rewritten: tuple[int, ...] = (),
        answer_only: tuple[int, ...] = (),
    ) -> RenderedTokens:
        """Join the tokens of a request with facts about its messages and the model's tokenizer."""
        messages = request.messages
        calls = [call for message in messages for call in message.tool_calls]
        called = {call.id: call.name for call in calls if call.id is not None}
        return RenderedTokens(
            token_ids=token_ids,
            spans=spans,
            roles=tuple([message.role for message in messages]),
            tool_names=tuple([
                (message.name or called.get(message.tool_call_id or "")) if message.role == "tool" else None
                for message in messages
            ]),
            multi_modal_data=sidecar,
            text=plain(text),
            rewritten=rewritten,
            answer_only=answer_only,
            placeholder_ids=self.writer.placeholder_ids,
            _decode=self.writer.tokenizer.decode,
        )  # fmt: skip

    def encode(
        self,
        layout: Layout,
        request: RenderRequest,
        *,
        cuts: Sequence[int] = (),
        before: list[int] | None = None,
        earlier: MultiModalData | None = None,
        skipped: int = 0,
    ) -> tuple[Encoded, MultiModalData]:
        """Encode a rendered text, each placeholder widened to its media item.

        Args:
            layout: The text and its syntax.
            request: The conversation, whose media parts fill the placeholders.
            cuts: Rising character positions whose token index is wanted.
            before: Tokens that the text is appended to. The result takes over this list.
            earlier: Sidecar of these tokens.
            skipped: Number of messages in the text before the request's.

        Returns:
            All tokens, and their sidecar.

        Raises:
            PlaceholderError: A part has no placeholder, or a placeholder has no part.
            ProcessorError: The model does not take media.
            MediaError: A part has no source, or cannot be loaded or processed.
        """
        groups: Sequence[tuple[MediaItem, ...]] = ()
        if request.media or layout.placeholders:
            placeholders = layout.placeholders
            if skipped:
                placeholders = tuple([
                    replace(place, message=place.message - skipped)
                    if place.message >= skipped
                    else replace(place, message=-1, part=-1)
                    for place in placeholders
                ])  # fmt: skip
            groups = self._items(placeholders, request, earlier)
            if any(group and group[0].modality == "video" for group in groups):
                layout = self._covered(layout)
        items = [group[0] if group else None for group in groups]
        encoded = self.writer.write(layout, items, cuts, before=before)
        entries = [
            # The features of a sound track are other tokens of its video's range.
            (place if item is group[0] else self.writer.range_of(item, place.offset), item)
            for place, group in zip(encoded.ranges, groups, strict=True)
            for item in group
        ]
        if not entries:
            return encoded, MultiModalData() if earlier is None else earlier
        sidecar = MultiModalData.of(entries)
        return encoded, sidecar if earlier is None else earlier.merged(sidecar)

    def _items(
        self, placeholders: Sequence[Placeholder], request: RenderRequest, earlier: MultiModalData | None
    ) -> Sequence[tuple[MediaItem, ...]]:
        """Return the items of each placeholder: none if it stays as it is, two with a sound track."""
        parts = request.media
        if self.media is None:
            if not parts:
                return ()
            noun = "image" if parts[0].part.modality == "image" else "media"
            raise ProcessorError(
                f"the model has no {noun} processor",
                where=parts[0].path,
                expected="preprocessor_config.json or processor_config.json in the model directory",
                got="a text-only model",
                remedy="Use a vision-language model, or remove the image"
                if noun == "image"
                else "Use a model that takes it, or remove the part",
            )
        # The parts of a probe stay unexpanded placeholders.
        is_probe = any(entry.part.source is UNKNOWN_SOURCE for entry in parts)
        if parts and not is_probe and self.media.processor.is_deferred:
            self.media.require_processor(parts[0].path)
        for entry in parts if not is_probe else ():
            self.media.processor.of(entry.part.modality, entry.path)
        order = _order(request, placeholders, self.known.profile.image_roles)
        if is_probe or not parts:
            return [()] * len(parts)
        items = self.media.resolve(parts, earlier=earlier)
        return [items[index] for index in order]

    def _covered(self, layout: Layout) -> Layout:
        """Widen placeholders of videos to the template text around them that the processor replaces, too.

        Raises:
            PlaceholderError: The template writes other text there.
        """
        videos = self.media.processor.videos if self.media is not None else None
        before, after = ("", "") if videos is None else videos.covers
        if not before and not after:
            return layout
        text = plain(layout.text)
        placeholders: list[Placeholder] = []
        for place in layout.placeholders:
            if place.modality != "video":
                placeholders.append(place)
                continue
            start, stop = place.start - len(before), place.stop + len(after)
            is_content = any(origin.is_content for _, _, origin in clip(layout.text.spans, start, stop))
            expected = before + text[place.start : place.stop] + after
            if is_content or text[max(start, 0) : stop] != expected:
                raise PlaceholderError(
                    "the model's processor replaces text around a video that the template does not write",
                    where=f"character {place.start}",
                    expected=repr(expected),
                    got=repr(text[max(start, 0) : stop]),
                )
            placeholders.append(replace(place, start=start, stop=stop))
        return replace(layout, placeholders=tuple(placeholders))


def unprinted_messages(text: TracedStr, messages: Sequence[Message], first: int = 0) -> list[int]:
    """Return the indices of messages with text that a rendering does not print at all.

    `first` is the index of the first message in the rendering.
    """
    printed = {origin.message - first for _, _, origin in text.spans if origin.is_content}
    return [index for index, message in enumerate(messages) if index not in printed and message.has_text]


def _order(
    request: RenderRequest, placeholders: Sequence[Placeholder], image_roles: Collection[str]
) -> list[int]:
    """Return the index of the part of each placeholder: one placeholder for each part.

    Parts come in the order in which the template writes them. If provenance shows only the message of some
    placeholders, or not even this, these come in the order of the conversation.
    """
    parts, where = request.media, request.where
    unplaced = list(range(len(parts)))
    order: list[int] = []
    unmatched: list[Placeholder] = []
    for place in placeholders:
        for index in unplaced:
            entry = parts[index]
            if (
                place.modality == entry.part.modality
                and place.message in (-1, entry.message)
                and place.part in (-1, entry.position)
            ):
                unplaced.remove(index)
                order.append(index)
                break
        else:
            unmatched.append(place)
    if not unplaced and not unmatched:
        return order
    if len(parts) > len(placeholders):
        dropped = parts[unplaced[0]]
        roles = ", ".join(image_roles) or "none"
        remedy = f"Put it into a message of a role whose images the template writes (found: {roles})"
        if dropped.role == "tool" and "user" in image_roles:
            remedy += ', or open the model with tool_images="user", which does so'
        raise PlaceholderError(
            f"the chat template drops this {dropped.part.modality}",
            where=dropped.path,
            expected=f"{len(parts)} placeholders, one for each media part",
            got=f"{len(placeholders)}",
            remedy=remedy,
        )
    extra = unmatched[0]
    if len(placeholders) > len(parts):
        raise PlaceholderError(
            "the chat template wrote more placeholders than there are media parts",
            where=f"{where}[{extra.message}]" if extra.message >= 0 else f"character {extra.start}",
            expected=f"{len(parts)}",
            got=f"{len(placeholders)}",
            remedy="A template that repeats an image cannot be rendered with it",
        )
    missing = parts[unplaced[0]]
    raise PlaceholderError(
        "the placeholder belongs to another media part",
        where=missing.path,
        expected=f"{missing.part.modality} of {where}[{missing.message}]",
        got=f"{extra.modality} of {where}[{extra.message}]",
        remedy="A template that repeats some media and drops others cannot be rendered with them",
    )


class Memo:
    """Whole renderings by request. Their media items stay in the media cache alone.

    Args:
        max_bytes: Maximum estimated size of tokens and text, in bytes; 0 turns the memo off.
        media: Holds the media cache; None for a text-only model.
    """

    def __init__(self, max_bytes: int, media: MediaResolver | None) -> None:
        self._items = None if media is None else media.cache
        self._entries: LRUCache[Hashable, RenderedTokens] = LRUCache(
            max_bytes,
            size_of=lambda rendered: len(rendered.token_ids) * _BYTES_PER_TOKEN + len(rendered.text),
        )

    def key(self, request: RenderRequest) -> Hashable | None:
        """Return a hashable that equal requests share.

        None if the memo is off, if a source may change, or if a value cannot be part of a key.
        """
        fingerprints = [entry.fingerprint for entry in request.media]
        if not self._entries.max_size or None in fingerprints:
            return None
        media = iter(fingerprints)
        key: list[Hashable] = [request.add_generation_prompt, request.continued]
        try:
            if request.variables or request.tools is not None or request.documents is not None:
                key.append(plain_key((request.tools, request.documents, request.variables)))
            for message in request.messages:
                content: Hashable = message.content
                if type(message.content) is tuple:
                    parts = message.content
                    content = tuple(
                        [(type(part), next(media)) if isinstance(part, MediaPart) else part for part in parts]
                    )
                key += message.role, content, message.reasoning_content, message.name, message.tool_call_id
                if message.tool_calls or message.extra:
                    calls = [(call.name, call.arguments, call.id) for call in message.tool_calls]
                    key.append(plain_key((calls, message.extra)))
        except NoKeyError:
            return None
        return tuple(key)

    def get(self, key: Hashable | None) -> RenderedTokens | None:
        """Return a copy of a rendering, or None without it or one of its media items."""
        entry = None if key is None else self._entries.get(key)
        if entry is None:
            return None
        items: dict[str, list[MediaItem]] = {}
        for modality, identities in entry.multi_modal_data.mm_hashes.items():
            items[modality] = []
            for identity in identities:
                item = None if self._items is None else self._items.get(identity)
                if item is None:
                    return None
                items[modality].append(item)
        return _copy(entry, items)

    def put(self, key: Hashable | None, rendered: RenderedTokens) -> None:
        """Keep a copy of a rendering, unless its key is None."""
        if key is not None:
            self._entries.put(key, _copy(rendered, {}))


def _copy(rendered: RenderedTokens, items: Mapping[str, Sequence[MediaItem]]) -> RenderedTokens:
    """Copy a rendering and its mutable fields, with these media items."""
    copy = object.__new__(RenderedTokens)  # five times as fast as `dataclasses.replace`
    copy.__dict__.update(rendered.__dict__)
    copy.__dict__["token_ids"] = rendered.token_ids.copy()
    sidecar = rendered.multi_modal_data
    if sidecar.mm_hashes:
        copy.__dict__["multi_modal_data"] = MultiModalData(
            {modality: [*hashes] for modality, hashes in sidecar.mm_hashes.items()},
            {modality: [*ranges] for modality, ranges in sidecar.mm_placeholders.items()},
            items,
        )
    return copy
