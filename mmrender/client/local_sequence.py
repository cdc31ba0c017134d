"""One request of `LocalBackend` from its prompt to its last token."""

from collections.abc import Callable, Sequence
from typing import Any

from mmrender.client.local_choice import ChoiceGuide
from mmrender.client.local_model import LocalModel, SequenceState
from mmrender.client.local_sampling import LocalSampling, TokenSampler
from mmrender.client.local_turns import Steps
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, Usage
from mmrender.trajectory.engine_data import WeightVersionSpan


class LocalSequence:
    """One request while it is computed.

    Args:
        model: What computes.
        request: What is asked for.
        sampling: Its sampling parameters, read.
        stop_ids: Tokens that end the completion.
        room: The most tokens that the completion may have.
        guide: The grammar that it follows, or None.
        weight_version: Names the weights that the model has at the time.

    Attributes:
        is_aborted: Set by whoever wants it to end before its next token.
    """

    def __init__(
        self,
        model: LocalModel,
        request: EngineRequest,
        sampling: LocalSampling,
        *,
        stop_ids: frozenset[int],
        room: int,
        guide: ChoiceGuide | None,
        weight_version: Callable[[], str],
    ) -> None:
        self.is_aborted = False
        self._weight_version = weight_version
        self._model = model
        self._request = request
        self._stop_ids = stop_ids
        self._stops_named = sampling.stop_token_ids
        self._room = room
        self._guide = guide
        self._sampler = TokenSampler(sampling, request.prompt_ids, stop_ids)
        self._wants_top = sampling.top_logprobs > 0
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._versions: list[str] = []

    def steps(self) -> Steps[EngineResponse]:
        """Sample to the end, yielding before each token."""
        state = SequenceState()
        logits = None
        while True:
            yield
            allowed = None if self._guide is None else self._guide.allowed()
            if self.is_aborted:
                return self._response("abort")
            if allowed is not None and not allowed:
                return self._response("stop")
            if logits is None:
                sidecar = self._request.multi_modal_data
                logits = self._model.prefill(self._request.prompt_ids, sidecar, state)
            else:
                logits = self._model.decode(self._tokens[-1], state)
            self._take(logits, allowed)
            if self._tokens[-1] in self._stop_ids:
                return self._response("stop")
            if len(self._tokens) >= self._room:
                return self._response("length")

    def _take(self, logits: Any, allowed: Sequence[int] | None) -> None:
        token, logprob, top = self._sampler.choose(logits, allowed)
        if self._guide is not None:
            self._guide.take(token)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._top.append(top)
        self._versions.append(self._weight_version())

    def _response(self, reason: FinishReason) -> EngineResponse:
        last = self._tokens[-1] if self._tokens else None
        return EngineResponse(
            completion_ids=self._tokens,
            logprobs=self._logprobs,
            finish_reason=reason,
            usage=Usage(len(self._request.prompt_ids), len(self._tokens), 0),
            # As vLLM: nothing for the model's own end of turn.
            stop_reason=last if reason == "stop" and last in self._stops_named else None,
            weight_versions=_spans(self._versions),
            request_id=self._request.request_id,
            top_logprobs=tuple(self._top) if self._wants_top else None,
        )


def _spans(versions: Sequence[str]) -> tuple[WeightVersionSpan, ...]:
    spans: list[WeightVersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = spans[-1]._replace(stop=index + 1)
        else:
            spans.append(WeightVersionSpan(version, index, index + 1))
    return tuple(spans)
