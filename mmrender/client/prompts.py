"""The prompt of a call: rendered here, or given as tokens and held against what came with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError, PlaceholderError
from mmrender.protocols import AsyncRenderer, TurnRenderer
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to sample from. `attribution` is None where only ids were given."""

    ids: list[int]
    data: MultiModalData
    attribution: RenderedTokens | None


def is_async(renderer: object) -> TypeGuard[AsyncRenderer]:
    """Whether a renderer works off the event loop; `isinstance` of a protocol takes far longer."""
    return hasattr(renderer, "arender") and hasattr(renderer, "aparse_response")


async def rendered_prompt(
    renderer: TurnRenderer,
    messages: Sequence[Any] | None,
    tools: Sequence[Any] | None,
    template_arguments: Mapping[str, Any],
) -> Prompt:
    """Render a conversation up to where the assistant writes; a pool does so off the event loop.

    Raises:
        MMRenderError: As for `Renderer.render`.
        InputError: There are no messages.
    """
    if messages is None:
        raise InputError("there is nothing to ask", where="messages", expected="messages, or prompt_ids")
    if is_async(renderer):
        rendered = await renderer.arender(
            messages, tools=tools, add_generation_prompt=True, **template_arguments
        )
    else:
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=True, **template_arguments)
    # A rendering may be remembered, and what is given to the caller is the caller's.
    return Prompt(list(rendered.token_ids), rendered.multi_modal_data, rendered)


def given_prompt(
    renderer: TurnRenderer,
    prompt_ids: TokenIds | None,
    data: MultiModalData | None,
    attribution: RenderedTokens | None,
) -> Prompt:
    """Take a prompt as it is, such as a bridge gives it.

    Raises:
        InputError: Attribution is of other tokens.
        PlaceholderError: The prompt holds media tokens, and nothing says what they stand for.
    """
    if prompt_ids is None:
        ids = list(attribution.token_ids) if attribution is not None else []
    else:
        ids = prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else list(prompt_ids)
    if attribution is not None and attribution.token_ids != ids:
        raise InputError(
            "the attribution is of other tokens than the prompt's",
            where="prompt_attribution",
            expected=f"the {len(ids)} tokens of prompt_ids",
            got=f"{len(attribution.token_ids)} tokens",
        )
    if data is None and attribution is not None:
        data = attribution.multi_modal_data
    if data is None:
        _refuse_media(renderer, ids)
        data = MultiModalData()
    return Prompt(ids, data, attribution)


def _refuse_media(renderer: TurnRenderer, ids: Sequence[int]) -> None:
    """Without a sidecar, an engine would answer as if no image were there."""
    media, tokenizer = getattr(renderer, "media", None), getattr(renderer, "tokenizer", None)
    if media is None or tokenizer is None:
        return
    tokens = {tokenizer.token_id(token) for token in media.processor.placeholder_tokens} - {None}
    found = next((index for index, token in enumerate(ids) if token in tokens), None)
    if found is not None:
        raise PlaceholderError(
            "the prompt holds media tokens, and there is no sidecar",
            where=f"prompt_ids[{found}]",
            expected="multi_modal_data",
            got=f"the token {ids[found]}",
            remedy="Pass the sidecar; an empty MultiModalData() says that the model itself sampled them",
        )
