"""What vLLM's error replies mean."""

import re
from typing import Final

from mmrender.errors import EngineError, EngineStatusError, EngineUnsupportedError, PromptTooLongError

_OVERFLOWS: Final = (
    # "The decoder prompt (length 3000) is longer than the maximum model length of 2048. ...", and the same
    # with "plus the number of requested output tokens" before "is".
    re.compile(
        r"prompt \(length (?P<length>\d+)\).{0,80}is longer than the maximum model length of (?P<limit>\d+)"
    ),
    # "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 ..."
    re.compile(r"maximum context length is (?P<limit>\d+) tokens.{0,80}?(?P<length>\d+)[^.]{0,60}tokens"),
    # "Input length (3000) exceeds model's maximum context length (2048)."
    re.compile(r"Input length \((?P<length>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)"),
)


def overflow_of(error: BaseException) -> tuple[int, int] | None:
    """Tokens that the server counted and that the model's context has, where the prompt is too long."""
    if not isinstance(error, EngineStatusError) or error.status != 400:
        return None
    found = next((match for text in _OVERFLOWS if (match := text.search(error.body))), None)
    return None if found is None else (int(found["length"]), int(found["limit"]))


def meaning_of(error: EngineStatusError, *, where: str) -> EngineError | PromptTooLongError:
    """The error that says what a refusal of the generate route means; the same one where it does already."""
    overflow = overflow_of(error)
    if overflow is not None:
        length, context = overflow
        # A prompt that fills the context leaves no room for a single sampled token.
        return PromptTooLongError(length, context - 1, where=where)
    if error.status == 403 and "--enable-scale-out" in error.body:
        return EngineUnsupportedError(
            "the server's generate route is closed", where=where, remedy="Start vLLM with --enable-scale-out"
        )
    if error.status == 404 and "does not exist" not in error.body:
        return EngineUnsupportedError(
            "the server has no generate route for tokens",
            where=where,
            got="status 404",
            remedy="It takes vLLM 0.20 or later, or a Dynamo frontend with "
            "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1",
        )
    return error
