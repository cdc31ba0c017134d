"""The prompt as the template wrote it, for engines that widen placeholders themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.client.checks import Placed, check_range, placed_items
from mmrender.errors import PlaceholderError
from mmrender.spans import MultiModalData, Repeat, Text


def collapse(
    prompt_ids: Sequence[int], data: MultiModalData, placeholder_ids: Mapping[str, int] | None = None
) -> list[int]:
    """Return the prompt with each range as the one token that the template wrote there.

    Args:
        prompt_ids: The prompt, placeholders widened.
        data: Its sidecar.
        placeholder_ids: By modality the token that the template writes. Without it, only ranges that are one
            token repeated can be collapsed, to that token.

    Raises:
        PlaceholderError: A range does not lie inside the prompt, overlaps another, or cannot be collapsed:
            it holds several tokens and `placeholder_ids` is not given, or its expansion begins or ends in
            text, which is encoded together with the text around it.
    """
    collapsed: list[int] = []
    position = 0
    for entry in placed_items(data):
        check_range(entry, len(prompt_ids))
        if entry.start < position:
            raise PlaceholderError("placeholder ranges overlap", where=entry.where)
        collapsed += prompt_ids[position : entry.start]
        collapsed.append(_written(entry, prompt_ids, placeholder_ids or {}))
        position = entry.stop
    return [*collapsed, *prompt_ids[position:]]


def can_collapse(data: MultiModalData, placeholder_ids: Mapping[str, int] | None = None) -> bool:
    """Whether `collapse` gives the template's prompt for these items."""
    return all(_is_collapsible(entry, placeholder_ids or {}) for entry in placed_items(data))


def _is_collapsible(entry: Placed, placeholder_ids: Mapping[str, int]) -> bool:
    expansion = entry.item.expansion
    if not expansion or isinstance(expansion[0], Text) or isinstance(expansion[-1], Text):
        return False
    uniform = len(expansion) == 1 and entry.range.num_embeds == entry.range.length
    return uniform or entry.modality in placeholder_ids


def _written(entry: Placed, prompt_ids: Sequence[int], placeholder_ids: Mapping[str, int]) -> int:
    if not _is_collapsible(entry, placeholder_ids):
        raise PlaceholderError(
            "the range cannot be put back to the template's placeholder",
            where=entry.where,
            expected="an expansion of special tokens, and the token that the template writes",
            got=f"{len(entry.item.expansion)} pieces",
            remedy="Use an engine that takes widened placeholders",
        )
    return placeholder_ids.get(entry.modality, int(prompt_ids[entry.start]))


def placeholder_ids_of(renderer: Any) -> dict[str, int]:
    """By modality the token that a renderer's template writes; without those that are no single token."""
    media = getattr(renderer, "media", None)
    tokenizer = getattr(renderer, "tokenizer", None)
    if media is None or tokenizer is None:
        return {}
    found = {modality: tokenizer.token_id(text) for modality, text in media.processor.placeholder.items()}
    return {modality: token_id for modality, token_id in found.items() if token_id is not None}


def media_token_ids_of(renderer: Any, data: MultiModalData) -> dict[str, int]:
    """Ids of the tokens that the items' expansions are made of, by their text, as far as they are known."""
    tokenizer = getattr(renderer, "tokenizer", None)
    if tokenizer is None:
        return {}
    items = (item for items in data.mm_items.values() for item in items)
    tokens = {piece.token for item in items for piece in item.expansion if isinstance(piece, Repeat)}
    found = {token: tokenizer.token_id(token) for token in tokens}
    return {token: token_id for token, token_id in found.items() if token_id is not None}
