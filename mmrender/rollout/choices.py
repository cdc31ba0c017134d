"""Messages of which a turn shall be one, as the texts that the model would write for them.

The model's own template writes each, so nothing here knows a format of tool calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.content import normalize_messages
from mmrender.errors import MessageError, RenderError
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
