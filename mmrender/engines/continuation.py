"""One completion from several requests: the next request, and the whole made of the pieces.

An aborted request returns its tokens so far. The next one asks with the prompt and these tokens, and with the
rest of the budget, so that sampled tokens are never decoded, moved or sampled again.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrender.client.reply import check_response, check_tokens
from mmrender.client.sampling import MAX_BIAS, PARAMETERS, token_budget
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.errors import EngineReplyError, PromptTooLongError
from mmrender.trajectory.aligned import Aligned, joined_spans
from mmrender.trajectory.engine_data import RoutedExperts

Decode = Callable[[Sequence[int]], str]


class Continuation:
    """The completion of one prompt, as it grows.

    Args:
        request: The request, with `max_tokens`. It is not changed.
        decode: Decodes tokens, to find stop strings across a seam. Requests with `stop` start over without
            it.
        listener: Called with tokens once they are final, each once and in order.

    Attributes:
        completion_ids: Tokens so far.
        logprobs: One number for each of them.
        finished: Why it ended, or None before its end.
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

    # --- requests ---

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled, 1 or more before its end."""
        return self.budget - len(self.completion_ids)

    @property
    def kept(self) -> int:
        """Tokens that the next request builds on."""
        return len(self.completion_ids) if self.can_continue() else 0

    def can_continue(self, more: int = 0) -> bool:
        """Whether an abort can be continued as a longer prompt, even after `more` tokens.

        Parameters must be memoryless, or carried over: `stop`, and `frequency_penalty` within limits. With
        any other one, such as a grammar or `presence_penalty`, an aborted completion starts over.
        """
        params = self.request.sampling_params
        for name, value in params.items():
            row = PARAMETERS.get(name)
            if (row is not None and row.memoryless) or value in (None, False, "", [], (), {}):
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
        """Subtract the frequency penalty of the tokens so far from the caller's `logit_bias`."""
        bias = {str(token): float(value) for token, value in (params.get("logit_bias") or {}).items()}
        for token, count in Counter(self.completion_ids).items():
            bias[str(token)] = bias.get(str(token), 0.0) - params["frequency_penalty"] * count
        return bias

    def next_request(self) -> EngineRequest:
        """Build the next request. A completion that cannot be continued starts over."""
        if not self.kept:
            self._clear()
            return self.request
        count = len(self.completion_ids)
        params = {**self.request.sampling_params, "max_tokens": self.remaining}
        if params.get("min_tokens"):
            params["min_tokens"] = max(0, params["min_tokens"] - count)
        if params.get("seed") is not None:
            # The same seed would repeat the random numbers of the first tokens.
            digest = hashlib.blake2b(f"{params['seed']}/{count}".encode(), digest_size=8).digest()
            params["seed"] = int.from_bytes(digest, "big") >> 1
        if params.get("frequency_penalty"):
            params["logit_bias"] = self._carried_bias(params)
        ids = [*self.request.prompt_ids, *self.completion_ids]
        return replace(self.request, prompt_ids=ids, sampling_params=params)

    async def ask(self, engine: InferenceEngineInterface, session_id: Hashable | None) -> bool:
        """Make the next request, and add its tokens, even those of a broken stream. Return True.

        Raises:
            EngineError: The engine failed before the completion was finished.
            EngineReplyError: Tokens and logprobs do not fit together, or there are too many.
        """
        request = self.next_request()
        ids: list[int] = []
        logprobs: list[float] = []
        ending: FinishReason = "abort"

        def on_tokens(
            new_ids: Sequence[int], new_logprobs: Sequence[float], reason: FinishReason | None, /
        ) -> None:
            nonlocal ending
            check_tokens(new_ids, new_logprobs, request, where=engine.name, before=len(ids))
            ids.extend(new_ids)
            logprobs.extend(new_logprobs)
            ending = reason or ending
            self._shown += len(new_ids)
            if new_ids and self._listener is not None:
                self._listener(new_ids, new_logprobs, None)

        # Router choices and allowed tokens come at the end of a stream, so a broken one would lose them. A
        # stop string across a seam is found in whole pieces only.
        limited = request.forbidden_token_ids or request.sampling_params.get("allowed_token_ids")
        in_pieces = request.routed_experts or limited or (self._stops and self.completion_ids)
        streams = self._listener is not None and not in_pieces and self.can_continue(self.remaining)
        try:
            piece = await engine.complete(
                request, session_id=session_id, on_tokens=on_tokens if streams else None
            )
            check_response(piece, request, where=engine.name)
        except BaseException as error:
            if ids or ending != "abort":  # tokens that were shown count
                self.add(EngineResponse(ids, logprobs, ending, Usage(len(request.prompt_ids), len(ids))))
            if isinstance(error, PromptTooLongError) and self.completion_ids:
                self.end("length")
            if self.finished is None or not isinstance(error, Exception):
                raise
        else:
            self.add(piece)
        return True

    # --- pieces ---

    def add(self, piece: EngineResponse) -> None:
        """Add the response to `next_request`.

        Raises:
            EngineReplyError: Its router choices do not fit earlier ones.
        """
        piece = self._cut_at_stop(piece)
        if piece.completion_ids or piece.finish_reason != "abort":
            experts = piece.routed_experts
            if self.completion_ids:
                seam = len(self.request.prompt_ids) + len(self.completion_ids) - 1
                experts = join_experts(self._experts, experts, seam)
            self._experts = experts
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
        """Cut a piece after a stop string that began before the seam, which the engine cannot see."""
        count = len(self.completion_ids)
        if not self._stops or not count or self._decode is None:
            return piece
        longest = max(map(len, self._stops))
        # A character takes up to four tokens, as UTF-8 bytes. Some tokens have no text.
        before = self.completion_ids[-(4 * longest + 16) :]
        seam = len(self._decode(before))
        min_tokens = self.request.sampling_params.get("min_tokens") or 0
        for kept in range(1, len(piece.completion_ids) + 1):
            text = self._decode([*before, *piece.completion_ids[:kept]])
            for stop in self._stops:
                start = text.find(stop, max(0, seam - len(stop) + 1), seam + len(stop) - 1)
                if 0 <= start < seam and count + kept > min_tokens:
                    return _cut(piece, kept, stop, len(self.request.prompt_ids) + count + kept)
            if len(text) >= seam + longest:
                break
        return piece

    def end(self, reason: FinishReason) -> None:
        """End it with its tokens so far, unless it has ended."""
        if self.finished is None:
            self.finished = reason
            self._show()

    def _show(self) -> None:
        """Show tokens that were not shown as they arrived, and the end."""
        start, self._shown = self._shown, len(self.completion_ids)
        if self._listener is not None and (self.finished is not None or start < self._shown):
            self._listener(self.completion_ids[start:], self.logprobs[start:], self.finished)

    def result(self) -> EngineResponse:
        """Return the whole completion, with the first piece's metadata and the last one's stop reason."""
        nothing = EngineResponse([], [], "abort", Usage(len(self.request.prompt_ids), 0))
        first, last = (self._pieces[0], self._pieces[-1]) if self._pieces else (nothing, nothing)
        parts: list[Aligned] = []
        top: list[Any] = []
        count = 0
        for piece in self._pieces:
            spans = Aligned(weight_versions=piece.weight_versions, allowed=piece.allowed)
            parts.append(spans.shift(count))
            top += piece.top_logprobs or ()
            count += len(piece.completion_ids)
        joined = joined_spans(parts)
        return EngineResponse(
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            finish_reason=self.finished or "abort",
            usage=Usage(first.usage.prompt_tokens, count, first.usage.cached_tokens),
            stop_reason=last.stop_reason,
            routed_experts=self._experts,
            weight_versions=joined.weight_versions,
            allowed=joined.allowed,
            request_id=first.request_id,
            top_logprobs=tuple(top) if top and len(top) == count else None,
            sampler=first.sampler,
        )


def _cut(piece: EngineResponse, kept: int, stop: str, length: int) -> EngineResponse:
    """Keep the first tokens of a piece, with which prompt and completion have `length` tokens."""
    values = Aligned(
        {name: getattr(piece, name) for name in ("completion_ids", "logprobs", "top_logprobs")},
        weight_versions=piece.weight_versions,
        allowed=piece.allowed,
    )
    experts = piece.routed_experts
    if experts is not None:
        experts = experts.cut(experts.start, length - 1)  # the last token has no row
    fields = {**values.cut(0, kept).fields(), "routed_experts": experts}
    return replace(piece, **fields, finish_reason="stop", stop_reason=stop)


def join_experts(
    before: RoutedExperts | None, piece: RoutedExperts | None, seam: int
) -> RoutedExperts | None:
    """Join the rows of the pieces so far and the next piece's rows from position `seam` on.

    The last token of a piece is not fed back within it, so its row, at `seam`, is the next piece's. Earlier
    rows are kept, since tokens were sampled with them: the next piece computes them again, perhaps with other
    weights.

    Raises:
        EngineReplyError: Only one piece has router choices, or they do not meet.
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
    rows = [before.cut(before.start, seam).data, piece.cut(seam, piece.stop).data]
    return RoutedExperts(np.concatenate(rows), before.start)
