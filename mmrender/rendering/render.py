"""One rendering, from canonical messages to attributed tokens with their sidecar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.errors import ProcessorError, TemplateError, TemplateRefusedError, TemplateRuntimeError
from mmrender.media.resolve import MediaResolver
from mmrender.messages import Message
from mmrender.probing.profile import TemplateProfile
from mmrender.rendering.placement import MediaPlace, check_placement, media_places
from mmrender.spans import MediaItem, MultiModalData
from mmrender.template.chat import ChatTemplate
from mmrender.template.ownership import disown_prompt
from mmrender.template.traced import TracedStr, plain
from mmrender.tokens.encode import Layout, TokenWriter
from mmrender.tokens.rendered import RenderedTokens
from mmrender.tokens.sampled import assistant_turns, mark_sampled


@dataclass(frozen=True, slots=True)
class Rendering:
    """Everything that one rendering needs but the conversation.

    Attributes:
        template: The chat template.
        profile: What is known about it with these arguments.
        writer: Turns text into tokens.
        media: Turns media parts into items, or None for a text-only model.
        stop_ids: Tokens that end an assistant's turn.
        tools: Tool definitions for the template.
        documents: Documents for the template.
        arguments: Further template variables.
    """

    template: ChatTemplate
    profile: TemplateProfile
    writer: TokenWriter
    media: MediaResolver | None
    stop_ids: frozenset[int]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] | None = None

    def text(self, messages: Sequence[Message], add_generation_prompt: bool) -> TracedStr:
        """What the template writes, each character attributed."""
        try:
            text = self._run(messages, add_generation_prompt)
        except (TemplateRefusedError, TemplateRuntimeError) as error:
            index = self._first_refused(messages)
            if index is not None:
                error.where = f"messages[{index}], {error.where}"
            raise
        return disown_prompt(text, self.profile.generation_prompts) if add_generation_prompt else text

    def _run(self, messages: Sequence[Message], add_generation_prompt: bool) -> TracedStr:
        return self.template.render(
            messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=add_generation_prompt,
            form=self.profile.form,
            arguments=self.arguments,
        )

    def _first_refused(self, messages: Sequence[Message]) -> int | None:
        """Index of the message with which the conversation stops being accepted, where there is one."""
        accepted = 0
        for count in range(1, len(messages) + 1):
            try:
                self._run(messages[:count], False)
            except TemplateError:
                if accepted == count - 1 and (accepted or len(messages) == 1):
                    return count - 1
            else:
                accepted = count
        return None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> RenderedTokens:
        """Render a conversation; errors as for `Renderer.render`."""
        layout = self.writer.lay_out(self.text(messages, add_generation_prompt))
        return self._attributed(messages, layout, self._items(messages, layout))

    def _items(self, messages: Sequence[Message], layout: Layout) -> Sequence[MediaItem | None]:
        places = media_places(messages)
        if not places and not layout.placeholders:
            return ()
        if self.media is not None:
            check_placement(places, layout.placeholders, self.profile.image_roles)
        return resolve_places(places, self.media)

    def _attributed(
        self, messages: Sequence[Message], layout: Layout, items: Sequence[MediaItem | None]
    ) -> RenderedTokens:
        turns, rewritten = assistant_turns(layout.text, messages, self.profile, self.text)
        cuts = sorted({turn.prompt_stop for turn in turns})
        encoded = self.writer.write(layout, items, cuts)
        spans, misaligned = mark_sampled(encoded, turns, self.stop_ids)
        entries = [
            (placeholder, item)
            for placeholder, item in zip(encoded.ranges, items, strict=True)
            if item is not None
        ]
        return RenderedTokens(
            token_ids=encoded.ids,
            spans=spans,
            roles=tuple([message.role for message in messages]),
            tool_names=tool_names(messages),
            multi_modal_data=MultiModalData.of(entries),
            text=plain(layout.text),
            rewritten=tuple(sorted([*rewritten, *misaligned])),
            _decode=self.writer.tokenizer.decode,
        )


def resolve_places(
    places: Sequence[MediaPlace], media: MediaResolver | None, earlier: int = 0
) -> list[MediaItem | None]:
    """Items of media parts; a part without a source stays one unexpanded placeholder.

    Args:
        places: The parts.
        media: What resolves them.
        earlier: Number of images that stand in the conversation before these.

    Raises:
        ProcessorError: The model takes no media.
        MediaError: A part cannot be loaded or processed.
    """
    if not places:
        return []
    if media is None:
        raise ProcessorError(
            "the model has no image processor",
            where=places[0].where,
            expected="preprocessor_config.json or processor_config.json in the model directory",
            got="a text-only model",
            remedy="Use a vision-language model, or remove the image",
        )
    given = [(place.where, place.part) for place in places if place.part.source is not None]
    images = earlier + sum(place.modality == "image" for place in places)
    found = iter(media.resolve(given, num_images=images))
    return [None if place.part.source is None else next(found) for place in places]


def tool_names(messages: Sequence[Message]) -> tuple[str | None, ...]:
    """Name of the tool that each tool message answers for: its own, or that of the call it refers to."""
    calls = {call.id: call.name for message in messages for call in message.tool_calls if call.id is not None}
    return tuple(
        [
            (message.name or calls.get(message.tool_call_id or "")) if message.role == "tool" else None
            for message in messages
        ]
    )
