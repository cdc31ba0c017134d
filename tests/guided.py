"""`guided_params`: sampling parameters that guide an engine to one of several assistant messages."""

from collections.abc import Sequence
from typing import Any, Final

from mmrender.content import normalize_messages
from mmrender.protocols import RendererProtocol

_DELIMITER_BIAS: Final = 50.0
"""Decides between a token such as `<tool_call>` and the letters that spell it."""


def guided_params(
    renderer: RendererProtocol, choices: Sequence[Any], *, tools: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Sampling parameters that guide an engine to one of several assistant messages.

    The model's own template writes the messages. A grammar of text allows a delimiter such as `<tool_call>`
    as its own token and as the letters that spell it. Only the token is parsed as a call, so a bias prefers
    the token.
    """
    stops = set(renderer.get_stop_token_ids())
    added = set(renderer.tokenizer.added_ids.values()) if hasattr(renderer, "tokenizer") else set()
    texts: list[str] = []
    delimiters: set[int] = set()
    for message in normalize_messages(choices, where="choices"):
        rendered = renderer.render([{"role": "user", "content": "x"}, message], tools=tools)
        marked = zip(rendered.token_ids, rendered.sampled_mask.tolist(), strict=True)
        sampled = [token for token, is_sampled in marked if is_sampled]
        while sampled and sampled[-1] in stops:
            sampled.pop()
        texts.append(renderer.decode(sampled))
        delimiters |= added.intersection(sampled)
    bias = {str(token): _DELIMITER_BIAS for token in sorted(delimiters)}
    return {"structured_outputs": {"choice": texts}, **({"logit_bias": bias} if bias else {})}
