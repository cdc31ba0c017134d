"""Messages of which a turn shall be one, as the texts that the model would write for them.

The model's own template writes each, so nothing here knows a format of tool calls.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrender.content import normalize_messages
from mmrender.errors import MessageError, RenderError
from mmrender.protocols import TurnRenderer
from mmrender.rendering.memo import conversation_key

DELIMITER_BIAS: Final = 50.0
"""What decides between a token such as `<tool_call>` and the letters that spell it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the model would sample for one message, without the stop token.

    Attributes:
        text: Its text.
        delimiters: Added tokens in it, such as `<tool_call>`.
    """

    text: str
    delimiters: frozenset[int]


def written_choices(
    renderer: TurnRenderer,
    choices: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Choice]:
    """Write each message as the model would.

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
    added = set(renderer.tokenizer.added_ids.values()) if hasattr(renderer, "tokenizer") else set()
    written = []
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
        written.append(Choice(renderer.decode(sampled), frozenset(added.intersection(sampled))))
    return written


_REMEMBERED: Final = 64


class ChoiceWriter:
    """Writes choices as the sampling parameters that hold an engine to them; each list once, off the loop.

    A grammar of text allows a delimiter such as `<tool_call>` as its own token and as the letters that spell
    it, and only the token is one to whoever reads the turn. So a bias decides for the token. It changes no
    reported logprob, and does nothing where the grammar does not allow the token.

    Args:
        renderer: A renderer or a pool.
        engine: Name of the backend.
        template_arguments: Further template variables.
    """

    def __init__(self, renderer: TurnRenderer, engine: str, template_arguments: Mapping[str, Any]) -> None:
        self._renderer = renderer
        self._engine = engine
        self._arguments = template_arguments
        self._known: OrderedDict[Hashable, list[Choice]] = OrderedDict()

    async def held_to(
        self, choices: Sequence[Any] | None, tools: Sequence[Any] | None, sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Sampling parameters with those that hold the engine to the choices; errors as `written_choices`."""
        if choices is None:
            return dict(sampling)
        written = await self._written(choices, tools)
        texts = [choice.text for choice in written]
        structure: dict[str, Any] = {"choice": texts}
        if self._engine == "sglang":
            # It knows no choice; a regular expression says the same.
            structure = {"regex": f"({'|'.join(map(re.escape, texts))})"}
        held = {**sampling, "structured_outputs": structure}
        delimiters = frozenset().union(*(choice.delimiters for choice in written))
        if delimiters:
            bias = dict.fromkeys(map(str, sorted(delimiters)), DELIMITER_BIAS)
            given = {str(token): amount for token, amount in (sampling.get("logit_bias") or {}).items()}
            held["logit_bias"] = {**bias, **given}
        return held

    async def _written(self, choices: Sequence[Any], tools: Sequence[Any] | None) -> list[Choice]:
        key = conversation_key(choices, tools, None, None, None)
        if key is not None and key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        written = await asyncio.to_thread(
            written_choices, self._renderer, choices, tools=tools, template_arguments=self._arguments
        )
        if key is not None:
            self._known[key] = written
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return written
