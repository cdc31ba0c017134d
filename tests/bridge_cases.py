"""Bridges of canonical turns beside the re-renderings that they must equal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrender.renderer import Renderer
from mmrender.tokens.rendered import RenderedTokens

Messages = Sequence[dict[str, Any]]
REAL = ("glm4_5v", "idefics3", "internvl3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_thinking")


@dataclass
class Extension:
    """What follows one assistant turn of a conversation.

    Attributes:
        turn: Index of the assistant's message.
        prompt: Rendering of what came before it, with the generation prompt.
        completion: The turn's sampled tokens in a rendering that ends with it.
        stop: Index of the first message after the extension.
        full: The re-rendering that a bridge must equal.
    """

    turn: int
    prompt: RenderedTokens
    completion: list[int]
    stop: int
    full: RenderedTokens


def sampled_ids(rendered: RenderedTokens, message: int) -> list[int]:
    """The tokens of one message that the model writes, found span by span."""
    return [
        token
        for span in rendered.spans
        if span.message == message and span.sampled
        for token in rendered.token_ids[span.start : span.stop]
    ]


def extensions(renderer: Renderer, messages: Messages, options: dict[str, Any]) -> Iterator[Extension]:
    """Every assistant turn that something follows, up to the next assistant turn."""
    options = {**options, "add_generation_prompt": True}
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index, following in zip(assistants, [*assistants[1:], len(messages)], strict=True):
        if following == index + 1:
            continue
        full = renderer.render(messages[:following], **options)
        alone = renderer.render(messages[: index + 1], **{**options, "add_generation_prompt": False})
        # Where the template rewrites the turn, or its tokens do not begin where the prompt ends, any will do.
        completion = sampled_ids(full, index) or sampled_ids(alone, index)
        completion = completion or [*renderer.tokenizer.encode("Fine."), renderer.get_stop_token_ids()[-1]]
        prompt = renderer.render(messages[:index], **options)
        yield Extension(index, prompt, completion, following, full)


def bridged(
    renderer: Renderer, messages: Messages, options: dict[str, Any], case: Extension, base: RenderedTokens
) -> RenderedTokens | None:
    """The bridge over one extension, from what the turn's prompt was rendered or bridged to."""
    extension = messages[case.turn + 1 : case.stop]
    given = {"previous_multi_modal_data": base.multi_modal_data, **options}
    return renderer.bridge_to_next_turn(base.token_ids, case.completion, extension, **given)


def assert_tail_equals(bridge: RenderedTokens, full: RenderedTokens, begin: int, first: int) -> None:
    """Tokens, attribution and media of a bridge's tail are those of a re-rendering.

    Args:
        bridge: The bridge.
        full: The re-rendering.
        begin: Index of the first tail token in the bridge.
        first: Index of the extension's first message in the re-rendering.
    """
    length = len(bridge) - begin
    start = len(full) - length
    assert bridge.token_ids[begin:] == full.token_ids[start:]
    ours, theirs = bridge.message_indices[begin:], full.message_indices[start:]
    # What closes the assistant's turn belongs to no message of the extension.
    np.testing.assert_array_equal(ours, np.where(theirs >= first, theirs - first, -1))
    np.testing.assert_array_equal(bridge.is_content[begin:], full.is_content[start:])
    assert not bridge.sampled_mask[begin:].any()
    np.testing.assert_array_equal(
        bridge.loss_mask(("user", "tool", "system"))[begin:],
        full.loss_mask(("user", "tool", "system"))[start:] & (theirs >= first),
    )
    assert tail_media(bridge, begin) == tail_media(full, start)


def tail_media(rendered: RenderedTokens, begin: int) -> list[tuple[Any, ...]]:
    """Items from token `begin` on: modality, place after it, hash and identity."""
    data = rendered.multi_modal_data
    return [
        (modality, where.offset - begin, where.length, where.embed_spans, digest, item.identity)
        for modality, ranges in data.mm_placeholders.items()
        for where, digest, item in zip(ranges, data.mm_hashes[modality], data.mm_items[modality], strict=True)
        if where.offset >= begin
    ]


def assert_same_rendering(bridge: RenderedTokens, full: RenderedTokens) -> None:
    """The whole of a bridge equals a re-rendering: ids, hashes, ranges and items."""
    assert bridge.token_ids == full.token_ids
    assert bridge.multi_modal_data.mm_hashes == full.multi_modal_data.mm_hashes
    assert bridge.multi_modal_data.mm_placeholders == full.multi_modal_data.mm_placeholders
    assert tail_media(bridge, 0) == tail_media(full, 0)
