"""Messages of which a turn shall be one, as the texts that the model would write for them.

The model's own template writes each, so nothing here knows a format of tool calls.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from mmrender.content import normalize_messages
from mmrender.errors import MessageError, RenderError
from mmrender.memo import conversation_key
from mmrender.protocols import RendererProtocol


def choice_texts(
    renderer: RendererProtocol,
    choices: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[str]:
    """What the model would sample for each message, without the stop token.

    Args:
        renderer: A renderer or a pool.
        choices: Assistant messages.
        tools: Tool definitions of the conversation.
        template_arguments: Further template variables.

    Raises:
        MessageError: A choice is no assistant message.
        RenderError: The template does not write it as something that the model could sample.
    """
    stops = set(renderer.get_stop_token_ids())
    texts = []
    for index, message in enumerate(normalize_messages(choices, where="choices")):
        if message.role != "assistant":
            raise MessageError(
                "a choice is not the model's turn",
                where=f"choices[{index}].role",
                expected="'assistant'",
                got=repr(message.role),
            )
        turn = [{"role": "user", "content": "x"}, message]
        rendered = renderer.render(turn, tools=tools, **(template_arguments or {}))
        sampled = [
            token
            for token, is_sampled in zip(rendered.token_ids, rendered.sampled_mask.tolist(), strict=True)
            if is_sampled
        ]
        while sampled and sampled[-1] in stops:
            sampled.pop()
        if not sampled:
            raise RenderError(
                "the template writes nothing that the model could sample for this message",
                where=f"choices[{index}]",
            )
        texts.append(renderer.decode(sampled))
    return texts


_REMEMBERED: Final = 64


class ChoiceWriter:
    """Writes choices as the sampling parameter that holds an engine to them; each list once, off the loop.

    Args:
        renderer: A renderer or a pool.
        engine: Name of the backend.
        template_arguments: Further template variables.
    """

    def __init__(
        self, renderer: RendererProtocol, engine: str, template_arguments: Mapping[str, Any]
    ) -> None:
        self._renderer = renderer
        self._engine = engine
        self._arguments = template_arguments
        self._known: OrderedDict[Hashable, list[str]] = OrderedDict()

    async def parameter(
        self, choices: Sequence[Any] | None, tools: Sequence[Any] | None
    ) -> dict[str, dict[str, Any]]:
        """The parameter by its name; nothing for None. Errors as for `choice_texts`."""
        if choices is None:
            return {}
        texts = await self._texts(choices, tools)
        if self._engine == "sglang":
            # It knows no choice; a regular expression says the same.
            return {"structured_outputs": {"regex": f"({'|'.join(map(re.escape, texts))})"}}
        return {"structured_outputs": {"choice": texts}}

    async def _texts(self, choices: Sequence[Any], tools: Sequence[Any] | None) -> list[str]:
        key = conversation_key(choices, tools, None, None, None)
        if key is not None and key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        texts = await asyncio.to_thread(
            choice_texts, self._renderer, choices, tools=tools, template_arguments=self._arguments
        )
        if key is not None:
            self._known[key] = texts
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return texts
