"""From canonical messages to attributed tokens with their sidecar, and a memo of whole renderings.

`Rendering.encode` puts the media items of messages in place of the placeholders that the template wrote, for
a whole prompt and for the tail of a bridge alike. Where the template's own loops say which part or message a
placeholder belongs to, its item is that part's; otherwise placeholders and parts come in the same order.

A conversation is often rendered again unchanged: for another sample of a group, for a count, for a retry.
`request_key` and `new_memo` find it again. Images count by fingerprint; media that may change under the
same name (a URL, an open file) are never memoised.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec

from mmrender.caching import LRUCache
from mmrender.content.values import NoKeyError, plain_key
from mmrender.errors import (
    InputError,
    MediaError,
    PlaceholderError,
    ProcessorError,
    TemplateError,
)
from mmrender.media.resolve import MediaResolver
from mmrender.messages import (
    UNKNOWN_SOURCE,
    MediaPart,
    Message,
    RenderRequest,
    RequestMedia,
    TextPart,
)
from mmrender.sidecar import MediaItem, MultiModalData
from mmrender.template.known import KnownTemplate
from mmrender.template.text import TracedStr, clip, plain
from mmrender.tokens.encode import Encoded, Layout, Placeholder, TokenWriter
from mmrender.tokens.rendered import RenderedTokens
from mmrender.tokens.sampled import mark_sampled
from mmrender.turns.sampled import SampledTurn, sampled_turns

Unprinted: TypeAlias = Literal["error", "allow"]

_BYTES_PER_TOKEN = 64
_OTHER_TEXT = "mmrender"


@dataclass(frozen=True, slots=True)
class Rendering:
    """Parts of every rendering with one template, one set of arguments and one tokenizer.

    Attributes:
        known: The chat template with its arguments, and the findings about it.
        writer: Turns text into tokens.
        media: Turns media parts into items, or None for a text-only model.
        unprinted: Whether unprinted tools, documents and texts of messages are an error.
    """

    known: KnownTemplate
    writer: TokenWriter
    media: MediaResolver | None
    unprinted: Unprinted = "error"

    def text(self, request: RenderRequest) -> TracedStr:
        """Run the template; each character is attributed.

        Raises:
            InputError: It does not print a tool, a document or a message's text.
            TemplateError: It refuses or fails.
        """
        text = self.known.render(request)
        if self.unprinted == "error":
            self._refuse_unprinted("tools", text, request)
            self._refuse_unprinted("documents", text, request)
            self._refuse_unprinted_messages(text, request)
        return text

    def _differs(self, text: TracedStr, request: RenderRequest) -> bool:
        """Whether the template writes another text than this, or refuses, for a request."""
        try:
            return plain(self.known.render(request)) != plain(text)
        except TemplateError:
            return True

    def _refuse_unprinted(
        self, kind: Literal["tools", "documents"], text: TracedStr, request: RenderRequest
    ) -> None:
        """Raise for the first tool or document that has no part in a text.

        That the template reads each of them, though it prints none, is remembered for conversations of one
        shape. That it reads any is tried each time.
        """
        values = getattr(request, kind) or ()
        printed = {origin.path for _, _, origin in text.spans if origin.kind == kind}
        unprinted = [index for index in range(len(values)) if f"{kind}[{index}]" not in printed]
        if not unprinted:
            return

        def is_read(left_out: Sequence[int]) -> bool:
            """Whether the template writes other text without some values, having asked about them."""
            others = [value for index, value in enumerate(values) if index not in left_out]
            return self._differs(text, msgspec.structs.replace(request, **{kind: others or None}))

        def find_unread() -> int:
            return next((index for index in unprinted if not is_read([index])), -1)

        if len(unprinted) == 1 or not is_read(unprinted):
            unread = find_unread()
        else:
            roles = [message.role for message in request.messages]
            asks = request.add_generation_prompt, request.continued
            try:
                shape = plain_key((values, unprinted, roles[:1], roles[-1:], sorted({*roles}), asks))
                unread = self.known.findings.remember(("unread", kind, shape), find_unread)
            except NoKeyError:
                unread = find_unread()
        if unread >= 0:
            raise InputError(
                f"the chat template prints nothing of this {kind.removesuffix('s')}",
                where=f"{kind}[{unread}]",
                remedy='Leave it out, or open the model with unprinted="allow" where the messages tell of it',
            )

    def _refuse_unprinted_messages(self, text: TracedStr, request: RenderRequest) -> None:
        """Raise for the first message whose text is not printed, and makes no difference to the template."""
        messages = request.messages
        for index in unprinted_messages(text, messages):
            others = (*messages[:index], _reworded(messages[index]), *messages[index + 1 :])
            if not self._differs(text, msgspec.structs.replace(request, messages=others)):
                raise InputError(
                    f"the chat template does not print this {messages[index].role} message",
                    where=f"messages[{index}]",
                    remedy="Put its text into a message that the template prints, or open the model with "
                    'unprinted="allow" if it is to be left out',
                )

    def render(self, request: RenderRequest) -> RenderedTokens:
        """Render a conversation; errors as for `Renderer.render`."""
        profile, messages = self.known.profile, request.messages
        text = self.text(request)
        layout = self.writer.lay_out(text)
        roles = tuple([message.role for message in messages])
        turns: list[SampledTurn] = []
        rewritten: list[int] = []
        if "assistant" in roles:
            turns, rewritten = sampled_turns(text, request, profile, self.known.render)
        encoded, sidecar = self.encode(
            layout,
            request,
            cuts=sorted({cut for turn in turns for cut in turn.cuts}),
        )
        if encoded.is_closed:
            # Each prompt ends in tokens that the conversation does not go on from.
            turns, rewritten = [], sorted([*rewritten, *[turn.message for turn in turns]])
        calls = [call for message in messages for call in message.tool_calls]
        called = {call.id: call.name for call in calls if call.id is not None}
        tool_names = [
            (message.name or called.get(message.tool_call_id or "")) if message.role == "tool" else None
            for message in messages
        ]
        spans, answer_only, misaligned = mark_sampled(encoded, turns, profile.stop_ids)
        return RenderedTokens(
            token_ids=encoded.ids,
            spans=spans,
            roles=roles,
            tool_names=tuple(tool_names),
            multi_modal_data=sidecar,
            text=plain(text),
            rewritten=tuple(sorted([*rewritten, *misaligned])),
            answer_only=answer_only,
            placeholder_ids=self.writer.placeholder_ids,
            _decode=self.writer.tokenizer.decode,
        )

    def encode(
        self,
        layout: Layout,
        request: RenderRequest,
        *,
        cuts: Sequence[int] = (),
        before: Sequence[int] = (),
        earlier: MultiModalData | None = None,
        skipped: int = 0,
    ) -> tuple[Encoded, MultiModalData]:
        """Encode a rendered text, each placeholder widened to its media item.

        Args:
            layout: The text and its syntax.
            request: The conversation, whose media parts fill the placeholders.
            cuts: Rising character positions whose token index is wanted.
            before: Tokens that the text is appended to.
            earlier: Sidecar of those tokens.
            skipped: Number of messages that the template was given before the request's.

        Returns:
            The tokens of the text, and the sidecar of all tokens.

        Raises:
            PlaceholderError: A part has no placeholder, or a placeholder no part.
            ProcessorError: The model takes no media.
            MediaError: A part has no source, or cannot be loaded or processed.
        """
        earlier = MultiModalData() if earlier is None else earlier
        media = request.media
        items: Sequence[MediaItem | None] = ()
        if media or layout.placeholders:
            placeholders = [
                replace(found, message=found.message - skipped)
                if found.message >= skipped
                else replace(found, message=-1, part=-1)
                for found in layout.placeholders
            ]
            if self.media is None and media:
                raise ProcessorError(
                    "the model has no image processor",
                    where=media[0].path,
                    expected="preprocessor_config.json or processor_config.json in the model directory",
                    got="a text-only model",
                    remedy="Use a vision-language model, or remove the image",
                )
            if self.media is not None:
                # The parts of a probe stay unexpanded placeholders.
                is_probe = any(entry.part.source is UNKNOWN_SOURCE for entry in media)
                if media and not is_probe:
                    self.media.require_processor(media[0].path)
                order = _order(request, placeholders, self.known.profile.image_roles)
                items = [None] * len(media)
                if not is_probe:
                    resolved = self.media.resolve(
                        media,
                        earlier_images=len(earlier.mm_hashes.get("image", ())),
                        earlier_videos=len(earlier.mm_hashes.get("video", ())),
                    )
                    items = [resolved[index] for index in order]
                    videos = [entry.path for entry in media if entry.modality == "video"]
                    if len(videos) + len(earlier.mm_hashes.get("video", ())) > 1:
                        self._require_several_videos(videos[-1:])
                    layout = self._covered(layout, items)
        encoded = self.writer.write(layout, items, cuts, before=before)
        entries = [
            (found.shifted(len(before)) if before else found, item)
            for found, item in zip(encoded.ranges, items, strict=True)
            if item is not None
        ]
        if not entries:
            return encoded, earlier
        found = MultiModalData.of(entries)
        return encoded, earlier.merged(found) if earlier.mm_hashes else found

    def _require_several_videos(self, where: Sequence[str]) -> None:
        """Raise `MediaError` for the last new video if the model's processor takes one in a prompt."""
        processor = self.media.processor if self.media is not None else None
        if where and processor is not None and processor.videos and not processor.videos.takes_several:
            raise MediaError(
                "the model's processor takes one video in a prompt",
                where=where[0],
                remedy="Pass the frames of further videos as images.",
            )

    def _covered(self, layout: Layout, items: Sequence[MediaItem | None]) -> Layout:
        """Widen placeholders to the text of the template that the processor replaces as well.

        Raises:
            PlaceholderError: The template writes another text there.
        """
        videos = self.media.processor.videos if self.media is not None else None
        if videos is None or not any(item is not None and item.modality == "video" for item in items):
            return layout
        before, after = videos.covers
        if not before and not after:
            return layout
        text = plain(layout.text)
        placeholders: list[Placeholder] = []
        for found in layout.placeholders:
            if found.modality != "video":
                placeholders.append(found)
                continue
            start, stop = found.start - len(before), found.stop + len(after)
            is_content = any(origin.is_content for _, _, origin in clip(layout.text.spans, start, stop))
            expected = before + text[found.start : found.stop] + after
            if is_content or text[max(start, 0) : stop] != expected:
                raise PlaceholderError(
                    "the model's processor replaces text around a video that the template does not write",
                    where=f"character {found.start}",
                    expected=repr(expected),
                    got=repr(text[max(start, 0) : stop]),
                )
            placeholders.append(replace(found, start=start, stop=stop))
        return replace(layout, placeholders=tuple(placeholders))


def unprinted_messages(text: TracedStr, messages: Sequence[Message], first: int = 0) -> list[int]:
    """Return the indices of messages with text of which a rendering holds no character.

    `first` is the index that the template knew the first message by.
    """
    printed = {origin.message - first for _, _, origin in text.spans if origin.is_content}
    return [index for index, message in enumerate(messages) if index not in printed and message.has_text]


def _reworded(message: Message) -> Message:
    """A message with other text in the same places."""
    content = message.content
    if isinstance(content, tuple):
        parts = [TextPart(_OTHER_TEXT) if isinstance(part, TextPart) else part for part in content]
        return msgspec.structs.replace(message, content=tuple(parts))
    return msgspec.structs.replace(message, content=_OTHER_TEXT)


def _takes(entry: RequestMedia, found: Placeholder) -> bool:
    """Whether a placeholder may be that of a part."""
    return (
        found.modality == entry.modality
        and found.message in (-1, entry.message)
        and found.part in (-1, entry.position)
    )


def _order(
    request: RenderRequest, placeholders: Sequence[Placeholder], image_roles: Collection[str]
) -> list[int]:
    """Return the index of the part of each placeholder: one placeholder for each part.

    Parts come in the order in which the template writes them. Where provenance says no more than the message,
    or nothing, those of a message or all of them come in the order of the conversation.
    """
    places, where = request.media, request.where
    free = list(range(len(places)))
    order: list[int] = []
    strangers: list[Placeholder] = []
    for found in placeholders:
        index = next((index for index in free if _takes(places[index], found)), None)
        if index is None:
            strangers.append(found)
        else:
            free.remove(index)
            order.append(index)
    if not free and not strangers:
        return order
    if len(places) > len(placeholders):
        dropped = places[free[0]]
        roles = ", ".join(image_roles) or "none"
        remedy = f"Put it into a message of a role whose images the template writes (found: {roles})"
        if dropped.role == "tool" and "user" in image_roles:
            remedy += ', or open the model with tool_images="user", which does so'
        raise PlaceholderError(
            f"the chat template drops this {dropped.modality}",
            where=dropped.path,
            expected=f"{len(places)} placeholders, one for each media part",
            got=f"{len(placeholders)}",
            remedy=remedy,
        )
    extra = strangers[0]
    if len(placeholders) > len(places):
        raise PlaceholderError(
            "the chat template wrote more placeholders than there are media parts",
            where=f"{where}[{extra.message}]" if extra.message >= 0 else f"character {extra.start}",
            expected=f"{len(places)}",
            got=f"{len(placeholders)}",
            remedy="A template that repeats an image cannot be rendered with it",
        )
    missed = places[free[0]]
    raise PlaceholderError(
        "the chat template writes a placeholder of something else in place of this part's",
        where=missed.path,
        expected=f"{missed.modality} of {where}[{missed.message}]",
        got=f"{extra.modality} of {where}[{extra.message}]",
        remedy="A template that repeats some media and drops others cannot be rendered with them",
    )


def request_key(request: RenderRequest) -> Hashable | None:
    """Return a hashable that equal requests share, or None if some value has no key."""
    fingerprints = [entry.fingerprint for entry in request.media]
    if None in fingerprints:
        return None
    media = iter(fingerprints)
    try:
        return (
            *[
                (message.role, message.content, message.reasoning_content, message.name, message.tool_call_id)
                if type(message.content) is not tuple and not message.tool_calls and not message.extra
                else _message_key(message, media)
                for message in request.messages
            ],
            plain_key(request.tools),
            plain_key(request.documents),
            request.add_generation_prompt,
            request.continued,
            plain_key(request.variables),
        )
    except NoKeyError:
        return None


def _message_key(message: Message, fingerprints: Iterator[Hashable]) -> Hashable:
    content: Hashable = message.content
    if type(message.content) is tuple:
        content = tuple(
            [
                (type(part), next(fingerprints)) if isinstance(part, MediaPart) else part
                for part in message.content
            ]
        )
    return (
        message.role,
        content,
        message.reasoning_content,
        tuple([(call.name, plain_key(call.arguments), call.id) for call in message.tool_calls]),
        message.name,
        message.tool_call_id,
        plain_key(message.extra) if message.extra else None,
    )


def new_memo(max_bytes: int) -> LRUCache[Hashable, RenderedTokens]:
    """A cache of renderings without their media items, bounded by the estimated bytes of tokens and text."""
    return LRUCache(
        max_bytes,
        size_of=lambda rendered: len(rendered.token_ids) * _BYTES_PER_TOKEN + len(rendered.text),
    )


def to_memo(rendered: RenderedTokens) -> RenderedTokens:
    """Copy a rendering for the memo. Items are left to the media cache, whose bound is theirs."""
    return _copy(rendered, {})


def from_memo(kept: RenderedTokens, media: MediaResolver | None) -> RenderedTokens | None:
    """Copy a rendering from the memo, with its items; None if the media cache has dropped one of them."""
    items: dict[str, list[MediaItem]] = {}
    for modality, identities in kept.multi_modal_data.mm_hashes.items():
        found = items[modality] = []
        for identity in identities:
            item = None if media is None else media.cache.get(identity)
            if item is None:
                return None
            found.append(item)
    return _copy(kept, items)


def _copy(rendered: RenderedTokens, items: Mapping[str, Sequence[MediaItem]]) -> RenderedTokens:
    """Copy everything that a caller may change."""
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
