"""SGLang's error replies: four shapes, and the texts that say that a prompt is too long."""

import re
from typing import Any, Final

import msgspec

from mmrender.client.sampling import where as parameter
from mmrender.errors import EngineStatusError, PromptTooLongError, SamplingParameterError

# Read from SGLang 0.5.23: managers/tokenizer_manager.py, managers/utils.py and managers/scheduler.py.
_TOO_LONG: Final = (
    r"The input \((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)",
    r"Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)",
    r"too long after expanding .* => (\d+) >= (\d+)",
)
_NO_ROOM: Final = r"maximum context length of (\d+) tokens\..*?(\d+) tokens from the input messages"


def error_text(body: str) -> str:
    """What an error reply says, in whichever of its shapes: three of JSON, and plain text."""
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError):
        return body.strip()
    for key in ("error", "message"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return said if isinstance(said, str) else body.strip()


def overflow_error(
    error: EngineStatusError, max_tokens: int
) -> PromptTooLongError | SamplingParameterError | None:
    """Return the named error of a reply that finds the request too long, None for a reply of something else.

    Args:
        error: The reply.
        max_tokens: The length of the completion that was asked for.
    """
    if error.status != 400:
        return None
    text = error_text(error.body)
    for pattern in _TOO_LONG:
        if found := re.search(pattern, text, re.DOTALL):
            # A prompt of the length that the server names is refused already.
            return PromptTooLongError(int(found[1]), int(found[2]) - 1, where="prompt")
    if found := re.search(_NO_ROOM, text, re.DOTALL):
        return _no_room(int(found[2]), int(found[1]), max_tokens)
    return None


def _no_room(
    prompt_len: int, context_length: int, max_tokens: int
) -> PromptTooLongError | SamplingParameterError:
    if max_tokens < context_length:
        return PromptTooLongError(
            prompt_len,
            context_length - max_tokens,
            where="prompt",
            remedy=f"Shorten it, or ask for less than {max_tokens} tokens",
        )
    return SamplingParameterError(
        "is more than the model's context holds",
        where=parameter("max_tokens"),
        expected=f"at most {context_length - prompt_len}",
        got=str(max_tokens),
    )
