"""One completion from several requests: what is asked next, and what the pieces make together.

An aborted request returns what it has. The next one asks with prompt + tokens so far and the rest of the
budget, so that sampled tokens are never decoded, moved or sampled again.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mmrender.client.sampling import MAX_BIAS, PARAMETERS, token_budget
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.errors import EngineReplyError, PromptTooLongError
from mmrender.trajectory.engine_data import AllowedTokens, RoutedExperts, WeightVersionSpan

Decode = Callable[[Sequence[int]], str]

MEMORYLESS: Final = frozenset(name for name, row in PARAMETERS.items() if row.memoryless)
"""Parameters that do not depend on where the prompt ends, or are carried over. So are `stop` and
`frequency_penalty` within limits; with any other one, such as a grammar or `presence_penalty`, an aborted
completion starts over."""


class Continuation:
    """The completion of one prompt, as it grows.

    Args:
        request: The request, with `max_tokens`; it is not changed.
        decode: Decodes tokens, to find stop strings across a seam; without it such requests start over.
        listener: Called with tokens once they are final, each once and in order.

    Attributes:
        completion_ids: Tokens so far.
        logprobs: One number for each of them.
        finished: Why it ended; None while it has not.
    """

    def __init__(
        self, request: EngineRequest, decode: Decode | None = None, listener: OnTokens | None = None
    ) -> None:
        self.request = request
        self.budget = token_budget(request.sampling_params)
        self.finished: FinishReason | None = None
        self._decode = decode
        self._listener = listener
        self._shown = 0
        stop = request.sampling_params.get("stop") or ()
        self._stops = [stop] if isinstance(stop, str) else list(stop)
        self._clear()

    def _clear(self) -> None:
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self._pieces: list[EngineResponse] = []
        self._experts: RoutedExperts | None = None

    # --- what to ask ---

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled; at least 1 while it is not finished."""
        return self.budget - len(self.completion_ids)

    @property
    def kept(self) -> int:
        """Tokens that the next request builds on."""
        return len(self.completion_ids) if self.can_continue() else 0

    def can_continue(self, more: int = 0) -> bool:
        """Whether an abort can be continued as a longer prompt, also after `more` tokens of any kind."""
        params = self.request.sampling_params
        for name, value in params.items():
            if name in MEMORYLESS or value in (None, False, "", [], (), {}):
                continue
            if name == "stop" and self._decode is not None:
                continue
            if name == "frequency_penalty":
                largest = max(map(abs, self._carried_bias(params).values()), default=0.0)
                if largest + more * abs(value) <= MAX_BIAS:
                    continue
            return False
        return True

    def _carried_bias(self, params: Mapping[str, Any]) -> dict[str, float]:
        """The caller's `logit_bias`, less the frequency penalty of the tokens so far; both are additive."""
        bias = {str(token): float(value) for token, value in (params.get("logit_bias") or {}).items()}
        for token, count in Counter(self.completion_ids).items():
            bias[str(token)] = bias.get(str(token), 0.0) - params["frequency_penalty"] * count
        return bias

    def next_request(self) -> EngineRequest:
        """Build the next request; what cannot be continued starts over."""
        if not self.kept:
            self._clear()
            return self.request
        done = len(self.completion_ids)
        params = {**self.request.sampling_params, "max_tokens": self.remaining}
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

    async def ask(self, engine: InferenceEngineInterface, session_id: Hashable | None) -> bool:
        """Make the next request, and take what comes, also from a stream that breaks; return True.

        Raises:
            EngineError: The engine failed before the completion was finished.
            EngineReplyError: Tokens and logprobs do not fit together, or exceed what was asked for.
        """
        request = self.next_request()
        ids: list[int] = []
        logprobs: list[float] = []
        ending: FinishReason = "abort"

        def on_tokens(
            new_ids: Sequence[int], new_logprobs: Sequence[float], reason: FinishReason | None, /
        ) -> None:
            nonlocal ending
            check_piece(new_ids, new_logprobs, self.remaining - len(ids))
            ids.extend(new_ids)
            logprobs.extend(new_logprobs)
            ending = reason or ending
            self._shown += len(new_ids)
            if new_ids and self._listener is not None:
                self._listener(new_ids, new_logprobs, None)

        # Router choices come at the end of a stream, and so does what was allowed: a broken one would lose
        # them. A stop string across a seam is found in whole pieces only.
        params = request.sampling_params
        limited = request.forbidden_token_ids or params.get("allowed_token_ids")
        in_pieces = request.routed_experts or limited or (self._stops and self.completion_ids)
        streams = self._listener is not None and not in_pieces and self.can_continue(self.remaining)
        try:
            piece = await engine.complete(
                request, session_id=session_id, on_tokens=on_tokens if streams else None
            )
            check_piece(piece.completion_ids, piece.logprobs, self.remaining)
        except BaseException as error:
            if ids or ending != "abort":  # it was shown, so it counts
                self.add(EngineResponse(ids, logprobs, ending, Usage(len(request.prompt_ids), len(ids))))
            if isinstance(error, PromptTooLongError) and self.completion_ids:
                self.end("length")
            if self.finished is None or not isinstance(error, Exception):
                raise
        else:
            self.add(piece)
        return True

    # --- what came ---

    def add(self, piece: EngineResponse) -> None:
        """Take the response to `next_request`.

        Raises:
            EngineReplyError: Its router choices do not fit those of earlier pieces.
        """
        piece = self._cut_at_stop(piece)
        if piece.completion_ids or piece.finish_reason != "abort":
            seam = len(self.request.prompt_ids) + len(self.completion_ids) - 1
            self._experts = (
                join_experts(self._experts, piece.routed_experts, seam)
                if self.completion_ids
                else piece.routed_experts
            )
            self.completion_ids += piece.completion_ids
            self.logprobs += piece.logprobs
            self._pieces.append(piece)
        if piece.finish_reason != "abort":
            self.end(piece.finish_reason)
        elif self.remaining == 0:
            self.end("length")
        elif self.can_continue(self.remaining):
            self._show()

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
                    return cut_piece(piece, count, stop, len(self.request.prompt_ids) + done + count)
            if len(text) >= seam + longest:
                break
        return piece

    def end(self, reason: FinishReason) -> None:
        """End it with what it has, unless it has ended."""
        if self.finished is None:
            self.finished = reason
            self._show()

    def _show(self) -> None:
        """Show tokens that were not shown as they arrived, and the end."""
        start, self._shown = self._shown, len(self.completion_ids)
        if self._listener is not None and (self.finished is not None or start < self._shown):
            self._listener(self.completion_ids[start:], self.logprobs[start:], self.finished)

    def result(self) -> EngineResponse:
        """Return the whole completion: the first piece's metadata, the last one's stop reason."""
        nothing = EngineResponse([], [], "abort", Usage(len(self.request.prompt_ids), 0))
        first, last = (self._pieces[0], self._pieces[-1]) if self._pieces else (nothing, nothing)
        versions: list[WeightVersionSpan] = []
        allowed: list[AllowedTokens] = []
        top: list[Any] | None = []
        done = 0
        for piece in self._pieces:
            for version, start, stop in piece.weight_versions:
                begin = start + done
                if versions and versions[-1].version == version and versions[-1].stop == begin:
                    begin = versions.pop().start
                versions.append(WeightVersionSpan(version, begin, stop + done))
            allowed += [
                span._replace(start=span.start + done, stop=span.stop + done) for span in piece.allowed
            ]
            if piece.completion_ids:
                missing = top is None or piece.top_logprobs is None
                top = None if missing else [*top, *piece.top_logprobs]  # type: ignore[misc]
            done += len(piece.completion_ids)
        return EngineResponse(
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            finish_reason=self.finished or "abort",
            usage=Usage(first.usage.prompt_tokens, done, first.usage.cached_tokens),
            stop_reason=last.stop_reason,
            routed_experts=self._experts,
            weight_versions=tuple(versions),
            allowed=tuple(allowed),
            request_id=first.request_id,
            top_logprobs=tuple(top) if top else None,
        )


def cut_piece(piece: EngineResponse, count: int, stop: str, length: int) -> EngineResponse:
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
            WeightVersionSpan(version, start, min(end, count))
            for version, start, end in piece.weight_versions
            if start < count
        ),
        allowed=tuple(
            span._replace(stop=min(span.stop, count)) for span in piece.allowed if span.start < count
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
        problem, where = "the engine sampled more tokens than it was asked for", "completion_ids"
        raise EngineReplyError(problem, where=where, expected=f"at most {most}", got=str(count))
    if len(logprobs) != count or not all(map(math.isfinite, logprobs)):
        got = f"{len(logprobs)}: {list(logprobs)}"[:120]
        problem, expected = "each token has one logprob", f"{count} finite numbers"
        raise EngineReplyError(problem, where="logprobs", expected=expected, got=got)


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
    meet = before and piece and piece.start <= seam <= piece.stop and seam <= before.stop
    if before is None or piece is None or not meet:
        bounds = ["none" if each is None else f"[{each.start}, {each.stop})" for each in (before, piece)]
        raise EngineReplyError(
            "router choices of two pieces do not meet",
            where="routed_experts",
            expected=f"rows up to and from {seam}",
            got=" and ".join(bounds),
        )
    kept = before.data[: max(0, seam - before.start)]
    return RoutedExperts(np.concatenate([kept, piece.from_position(seam).data]), before.start)
