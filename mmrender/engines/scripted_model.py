"""The model of the scripted engine: a formula, with tokens for letters and one that has no text."""

from collections.abc import Sequence

import xxhash

from mmrender.client.types import EngineResponse, FinishReason, Usage

STOP, MUTE, FIRST_LETTER = 0, 1, 2
"""The stop token, a token without text, and the first of 26 letters."""


def next_token(ids: Sequence[int]) -> tuple[int, float]:
    """The greedy token after `ids`, and its logprob."""
    visible = [token for token in ids if token != MUTE]
    mute = 0
    while mute < len(ids) and ids[-1 - mute] == MUTE:
        mute += 1
    number = xxhash.xxh3_64_intdigest(repr((visible[-24:], len(visible), mute)).encode())
    logprob = -0.001 - (number >> 40) % 4096 / 4096
    if number % 61 == 0:
        return STOP, logprob
    if number % 5 == 0 and mute < 2:
        return MUTE, logprob
    return FIRST_LETTER + (number >> 8) % 26, logprob


def sampled(prompt_ids: Sequence[int], max_tokens: int) -> EngineResponse:
    """What an undisturbed engine samples."""
    ids: list[int] = []
    logprobs: list[float] = []
    reason: FinishReason = "length"
    while len(ids) < max_tokens:
        token, logprob = next_token([*prompt_ids, *ids])
        ids.append(token)
        logprobs.append(logprob)
        if token == STOP:
            reason = "stop"
            break
    return EngineResponse(ids, logprobs, reason, Usage(len(prompt_ids), len(ids)))


def letters(ids: Sequence[int]) -> str:
    """Text of sampled tokens, stop token left out."""
    return "".join(token_text(token) for token in ids if token != STOP)


def token_text(token: int) -> str:
    """Text of one token."""
    if token == MUTE:
        return ""
    return "<stop>" if token == STOP else chr(ord("a") + token - FIRST_LETTER)


def encoded(text: str) -> list[int]:
    """Token ids of text, one for each character."""
    return [ord(char) - ord("a") + FIRST_LETTER if "a" <= char <= "z" else 1000 + ord(char) for char in text]
