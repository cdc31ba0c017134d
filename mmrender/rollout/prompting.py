"""The prompt of a next turn, bridged off the event loop."""

import asyncio
from collections.abc import Sequence
from typing import Any, Unpack

from mmrender.protocols import BridgeOptions, RendererProtocol
from mmrender.tokens.rendered import RenderedTokens


async def bridge_turn(
    renderer: RendererProtocol,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    new_messages: Sequence[Any],
    **options: Unpack[BridgeOptions],
) -> tuple[RenderedTokens | None, str]:
    """Append new messages to a sampled turn, off the event loop.

    Arguments and errors are as for `Renderer.bridge_to_next_turn`. If the first value is None, the second is
    the reason.
    """
    turn = prompt_ids, completion_ids, new_messages

    def bridge() -> tuple[RenderedTokens | None, str | None]:
        # The reason belongs to the thread that bridged.
        return renderer.bridge_to_next_turn(*turn, **options), renderer.why_not_bridged

    if hasattr(renderer, "abridge_to_next_turn"):
        bridged = await renderer.abridge_to_next_turn(*turn, **options)
        why = renderer.why_not_bridged
    else:
        bridged, why = await asyncio.to_thread(bridge)
    return bridged, why or "the renderer gave no reason"
