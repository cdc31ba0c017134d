"""The prompt of a turn: bridged from the step before where that can be proved right, else rendered."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.bridge.bridge import History
from mmrender.messages import Message
from mmrender.protocols import AsyncRenderer, TurnRenderer
from mmrender.rollout.conversations import Continues, Place, Repeats
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.tree_step import Step


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked with.

    Attributes:
        token_ids: Placeholders widened.
        multi_modal_data: Its sidecar.
        attribution: What is known of each token; None where a prompt is asked with again.
        why_rendered: Why it was rendered in full; None where it was not.
    """

    token_ids: list[int]
    multi_modal_data: MultiModalData
    attribution: RenderedTokens | None
    why_rendered: str | None


class Prompter:
    """Makes prompts, off the event loop.

    Args:
        renderer: A renderer or a pool.
        history: Whether earlier turns may differ from what the template would write now; see
            `Renderer.bridge_to_next_turn`.
        template_arguments: Further template variables.
    """

    def __init__(
        self, renderer: TurnRenderer, history: History, template_arguments: Mapping[str, Any] | None
    ) -> None:
        self.renderer = renderer
        self.arguments = dict(template_arguments or {})
        self._history = history

    async def prompt(
        self, place: Place, conversation: Sequence[Message], tools: Sequence[Any] | None
    ) -> Prompt:
        """Make the prompt of a conversation that stands at a place of its trajectory.

        Raises:
            MessageError: A message is malformed.
            MediaError: An image cannot be loaded or processed.
            TemplateError: The template refuses or fails.
            PlaceholderError: The template drops an image.
        """
        if isinstance(place, Repeats):
            step = place.step
            return Prompt(step.prompt_ids.tolist(), step.multi_modal_data, None, None)
        if not isinstance(place, Continues):
            return await self.rendered(conversation, tools, place.reason)
        bridged, reason = await self._bridged(place.step, place.new_messages, tools)
        if bridged is not None:
            return Prompt(bridged.token_ids, bridged.multi_modal_data, bridged, None)
        present = [message for index, message in enumerate(conversation) if index not in place.left_out]
        return await self.rendered(present, tools, reason or "the renderer did not say why")

    async def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, why: str) -> Prompt:
        """Render messages in full; errors as for `prompt`."""
        options = {"tools": tools, "add_generation_prompt": True, **self.arguments}
        if isinstance(self.renderer, AsyncRenderer):
            found = await self.renderer.arender(messages, **options)
        else:
            found = await asyncio.to_thread(self.renderer.render, messages, **options)
        return Prompt(found.token_ids, found.multi_modal_data, found, why)

    async def _bridged(
        self, step: Step, new_messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[RenderedTokens | None, str | None]:
        given = (step.prompt_ids.tolist(), step.completion_ids.tolist(), new_messages)
        options = {
            "tools": tools,
            "previous_multi_modal_data": step.multi_modal_data,
            "history": self._history,
            **self.arguments,
        }
        if isinstance(self.renderer, AsyncRenderer):
            bridged = await self.renderer.abridge_to_next_turn(*given, **options)
            return bridged, self.renderer.why_not_bridged
        return await asyncio.to_thread(self._bridge_here, given, options)

    def _bridge_here(
        self, given: tuple[list[int], list[int], Sequence[Message]], options: Mapping[str, Any]
    ) -> tuple[RenderedTokens | None, str | None]:
        """Bridge on this thread, which alone is told why not."""
        bridged = self.renderer.bridge_to_next_turn(*given, **options)
        return bridged, self.renderer.why_not_bridged
