"""One completion from several requests: what is asked next, and what the pieces make together. Pure.

An aborted request returns what it has. The next one asks with prompt + tokens so far and the rest of the
budget, so that sampled tokens are never decoded, moved or sampled again.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, Usage
from mmrender.engines.interface import check_budget
from mmrender.errors import EngineReplyError
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

Decode = Callable[[Sequence[int]], str]

MEMORYLESS: Final = frozenset(
    {
        "allowed_token_ids",
        "detokenize",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "prompt_logprobs",
        # vLLM and SGLang apply it to prompt and output alike, so a longer prompt changes nothing.
        "repetition_penalty",
        "return_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)
"""Parameters that do not depend on where the prompt ends. `seed`, `stop` and `frequency_penalty` are carried
over; with any other one, such as a grammar or `presence_penalty`, an aborted completion starts over."""

_MAX_BIAS: Final = 100.0
"""Engines clamp `logit_bias` to this range."""


class Continuation:
    """The completion of one prompt, as it grows.

    Args:
        request: The request, with `max_tokens`; it is not changed.
        decode: Decodes tokens, to find stop strings across a seam; without it such requests start over.

    Attributes:
        completion_ids: Tokens so far.
        logprobs: One number for each of them.
        finished: Why it ended; None while it has not.
    """

    def __init__(self, request: EngineRequest, decode: Decode | None = None) -> None:
        self.request = request
        self.budget = check_budget(request.sampling_params)
        self._decode = decode
        stop = request.sampling_params.get("stop") or ()
        self._stops = [stop] if isinstance(stop, str) else list(stop)
        self._clear()

    def _clear(self) -> None:
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finished: FinishReason | None = None
        self._top: list[tuple[tuple[int, float], ...]] | None = []
        self._versions: list[WeightVersionSpan] = []
        self._experts: RoutedExperts | None = None
        self._first: EngineResponse | None = None
        self._last: EngineResponse | None = None

    # --- what to ask ---

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled; at least 1 while it is not finished."""
        return self.budget - len(self.completion_ids)

    @property
    def can_stream(self) -> bool:
        """Whether tokens of the next request are final as they arrive.

        Router choices come at the end of a stream, so a broken one would lose its tokens' rows. A stop string
        across a seam is found in whole pieces only.
        """
        params = self.request.sampling_params
        seam = bool(self._stops and self.completion_ids)
        penalty = self.budget * abs(params.get("frequency_penalty") or 0.0)
        bounded = not penalty or penalty + self._largest_bias(params) <= _MAX_BIAS
        return self.can_continue() and bounded and not self.request.routed_experts and not seam

    def can_continue(self) -> bool:
        """Whether an aborted request can be continued as a longer prompt, rather than started over."""
        params = self.request.sampling_params
        for name, value in params.items():
            if name in MEMORYLESS or name == "seed" or value in (None, False, "", [], (), {}):
                continue
            if name == "stop" and self._decode is not None:
                continue
            if name == "frequency_penalty" and self._largest_bias(params) <= _MAX_BIAS:
                continue
            return False
        return True

    def _carried_bias(self, params: Mapping[str, Any]) -> dict[str, float]:
        """The caller's `logit_bias`, less the frequency penalty of the tokens so far; both are additive."""
        bias = {str(token): float(value) for token, value in (params.get("logit_bias") or {}).items()}
        for token, count in Counter(self.completion_ids).items():
            bias[str(token)] = bias.get(str(token), 0.0) - params["frequency_penalty"] * count
        return bias

    def _largest_bias(self, params: Mapping[str, Any]) -> float:
        return max(map(abs, self._carried_bias(params).values()), default=0.0)

    def next_request(self) -> EngineRequest:
        """Build the next request."""
        params = {**self.request.sampling_params, "max_tokens": self.remaining}
        done = len(self.completion_ids)
        if not done:
            return self.request
        if params.get("min_tokens"):
            params["min_tokens"] = max(0, params["min_tokens"] - done)
        if params.get("seed") is not None:
            # The same seed would repeat the random numbers of the first tokens.
            digest = hashlib.blake2b(f"{params['seed']}/{done}".encode(), digest_size=8).digest()
            params["seed"] = int.from_bytes(digest, "big") >> 1
        if params.get("frequency_penalty"):
            params["logit_bias"] = self._carried_bias(params)
        ids = [*self.request.prompt_ids, *self.completion_ids]
        return replace(self.request, prompt_ids=ids, sampling_params=params)

    # --- what came ---

    def add(self, piece: EngineResponse, *, ending: bool = False) -> bool:
        """Take the response to `next_request`; return whether it brought the completion forward.

        Args:
            piece: What the engine sampled.
            ending: Nothing will be asked after it, so that even a completion that would start over keeps it.

        Raises:
            EngineReplyError: Tokens and logprobs do not fit together, or exceed what was asked for.
        """
        piece = self._cut_at_stop(piece)
        if piece.completion_ids or piece.finish_reason != "abort":
            self._take(piece)
        if piece.finish_reason != "abort":
            self.finished = piece.finish_reason
        elif self.remaining == 0:
            self.finished = "length"
        elif not ending and not self.can_continue():
            self._clear()
            return False
        return bool(piece.completion_ids) or self.finished is not None

    def _cut_at_stop(self, piece: EngineResponse) -> EngineResponse:
        """End a piece where a stop string ends that began before the seam; the engine cannot see that one."""
        done = len(self.completion_ids)
        if not self._stops or not done or self._decode is None:
            return piece
        longest = max(map(len, self._stops))
        # A character takes four tokens at most, as UTF-8 bytes; some tokens have no text.
        before = self.completion_ids[-(4 * longest + 16) :]
        seam = len(self._decode(before))
        least = self.request.sampling_params.get("min_tokens") or 0
        for count in range(1, len(piece.completion_ids) + 1):
            text = self._decode([*before, *piece.completion_ids[:count]])
            for stop in self._stops:
                start = text.find(stop, max(0, seam - len(stop) + 1), seam + len(stop) - 1)
                if 0 <= start < seam and done + count > least:
                    return _cut(piece, count, stop, len(self.request.prompt_ids) + done + count)
            if len(text) >= seam + longest:
                break
        return piece

    def _take(self, piece: EngineResponse) -> None:
        before = len(self.completion_ids)
        for span in piece.weight_versions:
            moved = WeightVersionSpan(span.version, span.start + before, span.stop + before)
            last = self._versions[-1] if self._versions else None
            if last is not None and last.version == moved.version and last.stop == moved.start:
                self._versions[-1] = WeightVersionSpan(moved.version, last.start, moved.stop)
            else:
                self._versions.append(moved)
        seam = len(self.request.prompt_ids) + before - 1
        self._experts = (
            join_experts(self._experts, piece.routed_experts, seam) if before else piece.routed_experts
        )
        if piece.top_logprobs is None and piece.completion_ids:
            self._top = None
        elif self._top is not None:
            self._top += piece.top_logprobs or ()
        self.completion_ids += piece.completion_ids
        self.logprobs += piece.logprobs
        self._first = self._first or piece
        self._last = piece

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finished is not None

    def end(self, reason: FinishReason) -> None:
        """End it with what it has, unless it has ended."""
        self.finished = self.finished or reason

    def result(self) -> EngineResponse:
        """Return the whole completion: the first piece's metadata, the last one's stop reason."""
        nothing = EngineResponse([], [], "abort", Usage(len(self.request.prompt_ids), 0))
        first = self._first or nothing
        return EngineResponse(
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            finish_reason=self.finished or "abort",
            usage=Usage(first.usage.prompt_tokens, len(self.completion_ids), first.usage.cached_tokens),
            stop_reason=(self._last or first).stop_reason,
            routed_experts=self._experts,
            weight_versions=tuple(self._versions),
            request_id=first.request_id,
            top_logprobs=tuple(self._top) if self._top else None,
            raw=first.raw,
        )


def _cut(piece: EngineResponse, count: int, stop: str, length: int) -> EngineResponse:
    """Keep the first `count` tokens of a piece; prompt and completion then have `length` tokens."""
    experts = piece.routed_experts
    if experts is not None:
        experts = RoutedExperts(experts.data[: max(0, length - 1 - experts.start)], experts.start)
    return replace(
        piece,
        completion_ids=piece.completion_ids[:count],
        logprobs=piece.logprobs[:count],
        finish_reason="stop",
        stop_reason=stop,
        routed_experts=experts,
        weight_versions=tuple(
            WeightVersionSpan(span.version, span.start, min(span.stop, count))
            for span in piece.weight_versions
            if span.start < count
        ),
        top_logprobs=None if piece.top_logprobs is None else piece.top_logprobs[:count],
    )


def check_piece(completion_ids: Sequence[int], logprobs: Sequence[float], most: int) -> None:
    """Require at most `most` tokens, and one finite logprob for each; an engine may be the caller's own.

    Raises:
        EngineReplyError: They do not fit.
    """
    count = len(completion_ids)
    if count > most:
        raise EngineReplyError(
            "the engine sampled more tokens than it was asked for",
            where="completion_ids",
            expected=f"at most {most}",
            got=str(count),
        )
    if len(logprobs) != count:
        raise EngineReplyError(
            "tokens and logprobs differ in number",
            where="logprobs",
            expected=str(count),
            got=str(len(logprobs)),
        )
    for position, value in enumerate(logprobs):
        if not math.isfinite(value):
            raise EngineReplyError("a logprob is not finite", where=f"logprobs[{position}]", got=repr(value))


def join_experts(
    before: RoutedExperts | None, piece: RoutedExperts | None, seam: int
) -> RoutedExperts | None:
    """Join the rows of the pieces so far with those of the next from position `seam` on.

    The last token of a piece is not fed back within it, so its row, at `seam`, is the next piece's. Rows
    before that stay those with which the tokens were sampled: the next piece computes them again, perhaps
    with other weights.

    Raises:
        EngineReplyError: One piece has router choices and another has none, or they do not meet.
    """
    if before is None and piece is None:
        return None
    if before is None or piece is None:
        raise EngineReplyError(
            "some pieces of a completion have router choices and some have none", where="routed_experts"
        )
    if not piece.start <= seam <= piece.stop or before.stop < seam:
        raise EngineReplyError(
            "router choices of two pieces do not meet",
            where="routed_experts",
            expected=f"rows up to and from {seam}",
            got=f"[{before.start}, {before.stop}) and [{piece.start}, {piece.stop})",
        )
    kept = before.data[: max(0, seam - before.start)]
    return RoutedExperts(np.concatenate([kept, piece.from_position(seam).data]), before.start)
