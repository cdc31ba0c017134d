"""One completion out of pieces: what is asked next, and what the pieces make together. Pure.

An aborted request returns what it has. The next one asks with prompt + tokens so far and what is left of the
budget, so that tokens, once sampled, are never decoded, moved or sampled again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrender.client.reply import LOGPROB_SENTINEL
from mmrender.client.types import EngineResponse, FinishReason, Usage
from mmrender.errors import EngineReplyError, SamplingParameterError
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

MEMORYLESS = frozenset(
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
        # vLLM and SGLang apply it to prompt and output alike, so that a continued prompt changes nothing.
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
"""Parameters under which a completion can be continued as a longer prompt.

Any other is taken to remember what was sampled, as penalties, grammars, seeds and stop strings do: after an
abort such work starts over, and its tokens so far are given up.
"""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "seed": (None,),
}
_NEUTRAL_OTHERS: tuple[Any, ...] = (None, False, "", [], (), {})


def is_memoryless(params: Mapping[str, Any]) -> bool:
    """Whether work with these parameters can be continued after an abort."""
    greedy = params.get("temperature") == 0
    for name, value in params.items():
        if name in MEMORYLESS or (name == "seed" and greedy):
            continue
        if not any(value is one or value == one for one in _NEUTRAL.get(name, _NEUTRAL_OTHERS)):
            return False
    return True


def token_budget(params: Mapping[str, Any], *, where: str = "sampling_params") -> int:
    """The `max_tokens` of one prompt.

    Raises:
        SamplingParameterError: It is missing or not a positive integer, or `n` asks for several completions.
    """
    budget = params.get("max_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise SamplingParameterError(
            "the token budget is missing or not usable",
            where=f"{where}.max_tokens",
            expected="an integer, 1 or more",
            got="none" if budget is None else repr(budget),
        )
    if params.get("n") not in (None, 1):
        raise SamplingParameterError(
            "one prompt gives one completion",
            where=f"{where}.n",
            expected="1",
            got=repr(params["n"]),
            remedy="Use sample(), or repeat the prompt",
        )
    return budget


class Continuation:
    """The completion of one prompt, as it grows.

    Args:
        prompt_ids: The prompt; it is not changed.
        params: Sampling parameters with `max_tokens`; they are not changed.

    Attributes:
        completion_ids: Tokens so far.
        logprobs: One number for each of them.
        finished: Why it ended; None while it has not.
        restarts: How often it was begun again.
        memoryless: Whether it can be continued after an abort.
    """

    def __init__(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.budget = token_budget(params)
        self.restarts = 0
        self.memoryless = is_memoryless(params)
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

    def next_ids(self, prompt_ids: Sequence[int] | None = None) -> Sequence[int]:
        """The prompt of the next request; of `prompt_ids` in place of the prompt, its other form."""
        ids = self.prompt_ids if prompt_ids is None else prompt_ids
        return [*ids, *self.completion_ids] if self.completion_ids else ids

    def next_params(self) -> dict[str, Any]:
        """Sampling parameters of the next request."""
        params = {**self.params, "max_tokens": self.remaining}
        if self.completion_ids and params.get("min_tokens"):
            params["min_tokens"] = max(0, params["min_tokens"] - len(self.completion_ids))
        return params

    # --- what came ---

    def add(self, piece: EngineResponse, *, ending: bool = False) -> bool:
        """Take what a request returned, once checked; say whether it brought the completion forward.

        Args:
            piece: What the engine sampled.
            ending: Nothing will be asked after it, so that even work that cannot be continued keeps it.
        """
        if piece.finish_reason == "abort" and not self.memoryless and not ending:
            self._clear()
            self.restarts += 1
            return False
        if piece.completion_ids or piece.finish_reason != "abort":
            self._take(piece)
        if piece.finish_reason != "abort":
            self.finished = piece.finish_reason
        elif self.remaining == 0:
            self.finished = "length"
        return bool(piece.completion_ids) or self.finished is not None

    def check(self, piece: EngineResponse) -> None:
        """Check a piece before it is taken.

        Raises:
            EngineReplyError: Tokens and logprobs do not fit together, or exceed what was asked for.
        """
        asked, got = self.remaining, len(piece.completion_ids)
        if got > asked:
            raise EngineReplyError(
                "the engine sampled more tokens than it was asked for",
                where="completion_ids",
                expected=f"at most {asked}",
                got=str(got),
            )
        check_logprobs(piece.completion_ids, piece.logprobs)

    def _take(self, piece: EngineResponse) -> None:
        before = len(self.completion_ids)
        for span in piece.weight_versions:
            _append_span(self._versions, span, before)
        self._experts = joined_experts(
            self._experts, piece.routed_experts, seam=len(self.prompt_ids) + before - 1, first=before == 0
        )
        if piece.top_logprobs is None and piece.completion_ids:
            self._top = None
        elif self._top is not None:
            self._top += piece.top_logprobs or ()
        self.completion_ids += piece.completion_ids
        self.logprobs += piece.logprobs
        self._first = self._first or piece
        self._last = piece

    def give_up(self) -> None:
        """End it with what it has."""
        self.finished = self.finished or "abort"

    def result(self) -> EngineResponse:
        """The whole completion: the first piece's metadata, the last one's finish reason."""
        first = self._first or _nothing(len(self.prompt_ids))
        last = self._last or first
        return EngineResponse(
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            finish_reason=self.finished or "abort",
            usage=Usage(first.usage.prompt_tokens, len(self.completion_ids), first.usage.cached_tokens),
            stop_reason=last.stop_reason,
            routed_experts=self._experts,
            weight_versions=tuple(self._versions),
            request_id=first.request_id,
            top_logprobs=None if not self._top else tuple(self._top),
            raw=first.raw,
        )


def _nothing(prompt_tokens: int) -> EngineResponse:
    return EngineResponse([], [], "abort", Usage(prompt_tokens, 0))


def check_logprobs(completion_ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Check that there is one finite number for each token.

    Raises:
        EngineReplyError: There is not.
    """
    if len(logprobs) != len(completion_ids):
        raise EngineReplyError(
            "tokens and logprobs differ in number",
            where="logprobs",
            expected=str(len(completion_ids)),
            got=str(len(logprobs)),
        )
    check_finite(logprobs)


def check_finite(logprobs: Sequence[float | None]) -> None:
    """Check that all are numbers, finite, and not the sentinel for a logprob that the engine does not have.

    Raises:
        EngineReplyError: One is not.
    """
    has_all = None not in logprobs and LOGPROB_SENTINEL not in logprobs
    if has_all and all(map(math.isfinite, logprobs)):  # type: ignore[arg-type]
        return
    for position, value in enumerate(logprobs):
        if value is None or not math.isfinite(value):
            raise EngineReplyError("a logprob is not finite", where=f"logprobs[{position}]", got=repr(value))
        if value == LOGPROB_SENTINEL:
            raise EngineReplyError(
                "the engine has no logprob for a token",
                where=f"logprobs[{position}]",
                got=f"{value}, which stands for none",
            )


def _append_span(spans: list[WeightVersionSpan], span: WeightVersionSpan, shift: int) -> None:
    moved = WeightVersionSpan(span.version, span.start + shift, span.stop + shift)
    if spans and spans[-1].version == moved.version and spans[-1].stop == moved.start:
        spans[-1] = WeightVersionSpan(moved.version, spans[-1].start, moved.stop)
    else:
        spans.append(moved)


def joined_experts(
    before: RoutedExperts | None, piece: RoutedExperts | None, *, seam: int, first: bool
) -> RoutedExperts | None:
    """Rows of the pieces so far, and those of the next from position `seam` on.

    The last token of a piece is not fed back within it, so its row, at `seam`, is the next piece's. Rows
    before that stay those with which the tokens were sampled: the next piece computes them again, perhaps
    with other weights.

    Raises:
        EngineReplyError: One piece has router choices and another has none, or they do not meet.
    """
    if first:
        return piece
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
