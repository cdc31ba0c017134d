"""Rendering what is trained on: conversations that are complete, and whose last turn ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrender.content import attach_media, normalize_messages
from mmrender.errors import InputError, MediaError, RenderError, TemplateError
from mmrender.messages import Message
from mmrender.protocols import RendererProtocol
from mmrender.rendering.placement import media_places
from mmrender.samples.supervision import TurnFinder, content_stop
from mmrender.tokens.rendered import RenderedTokens, TokenSpan


class RenderingContext:
    """Renders conversations, and small probes beside them, with one renderer and the options of one call.

    Args:
        renderer: A renderer or a pool of them.
        tools: Tool definitions.
        arguments: Further template variables.

    Attributes:
        turns: Finds where turns end and depart from their prompt.

    Raises:
        InputError: The arguments ask for a generation prompt.
    """

    def __init__(
        self,
        renderer: RendererProtocol,
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
    ) -> None:
        if "add_generation_prompt" in arguments:
            raise InputError("what is trained on ends in no generation prompt", where="add_generation_prompt")
        self._renderer = renderer
        self._tools = tools
        self._arguments = arguments
        self.turns = TurnFinder(self._generation_prompt, renderer.get_stop_token_ids())

    def render(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        final_stop: bool = False,
    ) -> RenderedTokens:
        """Render a conversation; `final_stop` ends a last assistant turn that the template leaves open.

        Raises:
            RenderError: It cannot be told which token ends the last turn.
        """
        rendered = self._renderer.render(
            conversation,
            tools=self._tools,
            add_generation_prompt=add_generation_prompt,
            **self._arguments,
        )
        last = conversation[-1]
        if not final_stop or last.role != "assistant" or self._is_stopped(rendered):
            return rendered
        end = len(rendered.token_ids)
        is_sampled = len(conversation) - 1 not in rendered.rewritten
        span = TokenSpan(end, end + 1, len(conversation) - 1, "scaffold", is_sampled)
        return replace(
            rendered,
            token_ids=[*rendered.token_ids, self._stop_after(last, len(conversation) - 1)],
            spans=(*rendered.spans, span),
        )

    def _is_stopped(self, rendered: RenderedTokens) -> bool:
        """Whether a stop token follows what the last message says."""
        last = len(rendered.roles) - 1
        whole = slice(0, len(rendered.token_ids))
        rest = rendered.token_ids[content_stop(rendered, last, whole) :]
        return not self.turns.stop_ids.isdisjoint(rest)

    def _stop_after(self, message: Message, index: int) -> int:
        """The token that the template writes after such a message when the next one follows."""
        turn = Message(role="assistant", content="x", tool_calls=message.tool_calls)
        answers = [
            Message(role="tool", content="x", name=call.name, tool_call_id=call.id)
            for call in message.tool_calls
        ]
        opening = Message(role="user", content="x")
        try:
            before = self.render([opening, turn]).token_ids
            after = self.render([opening, turn, *(answers or [opening])]).token_ids
        except TemplateError:
            before = after = []
        if (
            common_prefix(before, after) == len(before) < len(after)
            and after[len(before)] in self.turns.stop_ids
        ):
            return after[len(before)]
        raise RenderError(
            "it cannot be told which token ends this turn",
            where=f"messages[{index}]",
            expected="a stop token in it, or right after it where the next message follows",
            remedy="Pass final_stop=False to leave the turn open",
        )

    def _generation_prompt(self) -> Sequence[int]:
        """Tokens that open the assistant's turn after a user's."""
        opening = [Message(role="user", content="x")]
        without = self.render(opening).token_ids
        prompted = self.render(opening, add_generation_prompt=True).token_ids
        return prompted[common_prefix(without, prompted) :]


def complete_conversation(
    messages: Sequence[Any], images: Sequence[Any] | None, videos: Sequence[Any] | None
) -> tuple[Message, ...]:
    """Canonical messages of which every medium is at hand.

    Raises:
        MessageError: A message is malformed.
        MediaError: A medium has no source.
    """
    conversation = attach_media(normalize_messages(messages), images, videos)
    for place in media_places(conversation):
        if place.part.source is None:
            raise MediaError(
                f"the {place.modality} is not at hand",
                where=place.where,
                expected="a source to load",
                got="None",
                remedy=f"Pass {place.modality}s=[...]; nothing can be trained on pictures that are not there",
            )
    return conversation


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
