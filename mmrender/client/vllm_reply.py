"""vLLM's answer to a generate request, whole or streamed, as an `EngineResponse`."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from mmrender.client.placeholders import check_prompt_seen
from mmrender.client.reply import (
    LogprobEntry,
    ReportedExperts,
    ReportedUsage,
    ReportedVersion,
    alternatives,
    check_completion,
    check_named,
    check_prompt_count,
    convert,
    experts_from_mapping,
    experts_from_npy,
    version_spans,
)
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineUnsupportedError
from mmrender.trajectory.engine_data import RoutedExperts

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",  # the detection of repetition that a caller asked for; `stop_reason` says so
}
_LARGE: Final = ("token_ids", "logprobs", "routed_experts", "sampling_mask")


class _Logprobs(msgspec.Struct):
    content: list[LogprobEntry] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | ReportedExperts | None = None  # the second is a Dynamo frontend's
    weight_versions: list[ReportedVersion] | None = None

    @property
    def entries(self) -> list[LogprobEntry]:
        """The logprob of each token."""
        return (self.logprobs and self.logprobs.content) or []


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: ReportedUsage | None = None
    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None


class FailedInEngineError(EngineReplyError):
    """The engine gave up on the request, and said so with HTTP 200.

    vLLM 0.27 and 0.28 answer so to a hash that they do not have the data of.
    """


def parse_reply(decoded: Any, request: EngineRequest, *, where: str, widened: bool = False) -> EngineResponse:
    """Parse the whole answer.

    Args:
        decoded: The answer, decoded from JSON.
        request: What was asked.
        where: The call in errors.
        widened: Whether the server widened the placeholders, so that its prompt must be compared with ours.
    """
    reply = convert(decoded, _Reply, where=where)
    if len(reply.choices) != 1:
        raise EngineReplyError("the reply is not one completion", where=where, got=str(len(reply.choices)))
    choice = reply.choices[0]
    reason = _finish_reason(choice, where)
    tokens, entries = choice.token_ids or [], choice.entries
    ids, logprobs = check_completion(
        tokens, [entry.logprob for entry in entries], request, where=f"{where} token_ids"
    )
    check_named(entries, ids, where=f"{where} logprobs", required=True)
    if widened:
        _check_widened(reply, request, where)
    check_prompt_count(reply.usage, request, where=f"{where} usage.prompt_tokens")
    asked_top = request.sampling_params.get("logprobs")
    return EngineResponse(
        completion_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        usage=Usage(len(request.prompt_ids), len(ids), reply.usage.cached_tokens if reply.usage else None),
        stop_reason=choice.stop_reason,
        routed_experts=_routed_experts(choice, request, len(ids), f"{where} routed_experts"),
        weight_versions=version_spans(choice.weight_versions, len(ids), where=f"{where} weight_versions"),
        request_id=reply.request_id,
        top_logprobs=alternatives(entries, where=f"{where} logprobs") if asked_top else None,
        raw={
            **decoded,
            "prompt_token_ids": None,
            "choices": [{name: value for name, value in decoded["choices"][0].items() if name not in _LARGE}],
        },
    )


def _finish_reason(choice: _Choice, where: str) -> FinishReason:
    if choice.finish_reason == "error":
        raise FailedInEngineError(
            "the engine failed during the request",
            where=where,
            got="finish_reason 'error'",
            remedy="The server's log says why",
        )
    reason = _REASONS.get(choice.finish_reason or "")
    if reason is None:
        raise EngineReplyError(
            "the completion ended for an unknown reason",
            where=f"{where} finish_reason",
            expected=", ".join(_REASONS),
            got=repr(choice.finish_reason),
        )
    return reason


def _routed_experts(
    choice: _Choice, request: EngineRequest, completion: int, where: str
) -> RoutedExperts | None:
    start = request.routed_experts_prompt_start
    data = choice.routed_experts
    if data is None:
        if request.routed_experts and completion:
            raise EngineUnsupportedError(
                "router choices were asked for, and the server gives none",
                where=where,
                remedy="Start vLLM with --enable-return-routed-experts, with a mixture-of-experts model",
            )
        return None
    if isinstance(data, ReportedExperts):
        experts = experts_from_mapping(data, where=where)
        return experts if start is None or experts.start >= start else experts.from_position(start)
    experts = experts_from_npy(data, where=where)
    # One row for each token that was fed. Servers that know `routed_experts_prompt_start` leave out the rows
    # before it, others send them all.
    rows, whole = len(experts.data), max(0, len(request.prompt_ids) + completion - 1)
    if rows == whole:
        return experts if start is None else experts.from_position(min(start, whole))
    if start is None or rows != max(0, whole - start):
        raise EngineReplyError(
            "the reply has another number of routed rows", where=where, expected=str(whole), got=str(rows)
        )
    return RoutedExperts(experts.data, start)


def _check_widened(reply: _Reply, request: EngineRequest, where: str) -> None:
    """Require that the prompt that the server made of encoded images is ours, in tokens and places."""
    if reply.prompt_token_ids is None:
        raise EngineReplyError(
            "the reply lacks the server's prompt, which must be compared with ours",
            where=f"{where} prompt_token_ids",
            expected="a list",
        )
    check_prompt_seen(reply.prompt_token_ids, request, where=f"{where} prompt_token_ids")
    ours = {
        modality: [(place.offset, place.length) for place in ranges]
        for modality, ranges in request.multi_modal_data.mm_placeholders.items()
    }
    theirs = {
        modality: [(place.offset, place.length) for place in ranges]
        for modality, ranges in (reply.mm_placeholders or {}).items()
    }
    if reply.mm_placeholders is not None and theirs != ours:
        raise EngineMismatchError(
            "the server has the images at other places than the renderer",
            where=f"{where} mm_placeholders",
            expected=str(ours),
            got=str(theirs),
        )


class StreamedReply:
    """Chunks of a generate stream, reported as they come and put together to the whole answer.

    Args:
        request: What was asked.
        on_tokens: Called with the checked tokens of each chunk.
        where: The call in errors.
    """

    def __init__(self, request: EngineRequest, on_tokens: OnTokens, *, where: str) -> None:
        self._request = request
        self._on_tokens = on_tokens
        self._where = where
        self._head: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"index": 0, "token_ids": [], "logprobs": {"content": []}}

    def take(self, decoded: Mapping[str, Any]) -> None:
        """Take one chunk."""
        where = self._where
        if "error" in decoded:
            raise EngineReplyError(
                "the engine failed within a stream", where=where, got=repr(decoded["error"])[:300]
            )
        chunk = convert(decoded, _Reply, where=where) if decoded.get("choices") else _Reply([])
        self._head.update({name: value for name, value in decoded.items() if value is not None})
        for choice, members in zip(chunk.choices, decoded.get("choices") or (), strict=True):
            tokens, entries = choice.token_ids or [], choice.entries
            ids, logprobs = check_completion(
                tokens,
                [entry.logprob for entry in entries],
                self._request,
                where=f"{where} token_ids",
                before=len(self._choice["token_ids"]),
            )
            check_named(entries, ids, where=f"{where} logprobs", required=True)
            self._choice["token_ids"] += ids
            if entries:
                self._choice["logprobs"]["content"] += members["logprobs"]["content"]
            self._choice.update(
                {
                    name: value
                    for name, value in members.items()
                    if name not in ("index", "token_ids", "logprobs") and value is not None
                }
            )
            reason = _finish_reason(choice, where) if choice.finish_reason is not None else None
            if ids or reason is not None:
                self._on_tokens(ids, logprobs, reason)

    @property
    def is_finished(self) -> bool:
        """Whether a chunk has said why the completion ended; only token counts can follow."""
        return self._choice.get("finish_reason") in ("stop", "length")

    def reply(self) -> dict[str, Any]:
        """Return the answer as the route gives it without streaming."""
        return {**self._head, "choices": [self._choice]}
