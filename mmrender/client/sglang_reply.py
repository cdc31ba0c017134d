"""SGLang's answer to `/generate`, as an `EngineResponse`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrender.client.backend import EngineRequest, EngineResponse, FinishReason, Usage
from mmrender.client.completions import checked_completion
from mmrender.client.large_text import decode_reply
from mmrender.client.returned_prompt import check_prompt_seen
from mmrender.client.routed_experts import experts_from_int32
from mmrender.errors import EngineReplyError, EngineStatusError, EngineUnsupportedError
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

_log = logging.getLogger("mmrender.client")

_NO_LOGPROB: Final = -3.0e38
"""SGLang writes the least float32 in place of minus infinity."""
_LARGE: Final = (
    "input_token_logprobs",
    "input_top_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "routed_experts",
)
_REASONS: Final[Mapping[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


def read_reply(
    body: bytes | memoryview, request: EngineRequest, experts_shape: tuple[int, int] | None
) -> EngineResponse:
    """Read a reply of status 200.

    Args:
        body: The reply.
        request: What was asked.
        experts_shape: Layers, and experts of a token.

    Raises:
        EngineMismatchError: The server made another prompt of it than the renderer.
        EngineStatusError: The server gave up, and says with which status.
        EngineUnsupportedError: It gives no router choices.
        EngineReplyError: It cannot be used.
    """
    reply = _one(decode_reply(body, where="reply"))
    meta = _member(reply, "meta_info", dict, "reply")
    finish = _member(meta, "finish_reason", dict, "meta_info")
    reason = _reason(finish)
    check_prompt_seen(_member(reply, "prompt_token_ids", list, "reply"), request)
    ids = _member(reply, "output_ids", list, "reply")
    pairs = meta.get("output_token_logprobs") or []
    logprobs = _logprobs(ids, pairs)
    ids, logprobs = checked_completion(ids, logprobs, request.vocab_size, where="output_ids")
    raw: dict[str, Any] = {
        "text": reply.get("text"),
        "meta_info": {name: value for name, value in meta.items() if name not in _LARGE},
    }
    if reason == "length" and len(ids) < request.sampling_params["max_tokens"]:
        raw["max_tokens_granted"] = len(ids)
        _log.warning(
            "SGLang cut max_tokens from %d to %d, since the prompt has %d tokens",
            request.sampling_params["max_tokens"],
            len(ids),
            len(request.prompt_ids),
        )
    matched = finish.get("matched")
    return EngineResponse(
        completion_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=matched if isinstance(matched, int | str) else None,
        usage=Usage(len(request.prompt_ids), len(ids), meta.get("cached_tokens")),
        routed_experts=_experts(meta, request, len(ids), experts_shape) if request.routed_experts else None,
        weight_versions=_versions(meta, len(ids)),
        request_id=meta.get("id"),
        top_logprobs=_top_logprobs(meta, len(ids)),
        raw=raw,
    )


def _one(reply: Any) -> dict[str, Any]:
    if isinstance(reply, list) and len(reply) == 1:
        reply = reply[0]
    if not isinstance(reply, dict):
        raise EngineReplyError(
            "the reply is not one completion",
            where="reply",
            expected="an object",
            got=f"a list of {len(reply)}" if isinstance(reply, list) else type(reply).__name__,
        )
    return reply


def _member(value: Mapping[str, Any], name: str, kind: type[Any], where: str) -> Any:
    found = value.get(name)
    if not isinstance(found, kind):
        raise EngineReplyError(
            "the reply lacks a field, or it is of another kind",
            where=f"{where}.{name}",
            expected="a list" if kind is list else "an object",
            got="nothing" if found is None else type(found).__name__,
        )
    return found


def _reason(finish: Mapping[str, Any]) -> FinishReason:
    kind, status = str(finish.get("type")), finish.get("status_code")
    if kind == "abort" and isinstance(status, int):
        raise EngineStatusError(
            f"the server gave up: {finish.get('message')}",
            status=status,
            body=str(dict(finish)),
            where="finish_reason",
        )
    if kind not in _REASONS:
        raise EngineReplyError(
            "the completion ended for an unknown reason",
            where="finish_reason.type",
            expected=", ".join(_REASONS),
            got=repr(kind),
        )
    return _REASONS[kind]


def _logprobs(ids: Sequence[Any], entries: Any) -> list[Any]:
    """The logprobs of `[logprob, id, text]` entries, which must be of the sampled tokens."""
    logprobs = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) < 2:
            raise EngineReplyError(
                "a logprob is malformed",
                where=f"output_token_logprobs[{index}]",
                expected="[logprob, token id, text]",
                got=repr(entry)[:100],
            )
        if index < len(ids) and entry[1] != ids[index]:
            raise EngineReplyError(
                "a logprob is of another token than was sampled",
                where=f"output_token_logprobs[{index}]",
                expected=f"the token {ids[index]}",
                got=f"the token {entry[1]}",
            )
        if isinstance(entry[0], float) and entry[0] < _NO_LOGPROB:
            raise EngineReplyError(
                f"the engine has no logprob for the token {entry[1]}",
                where=f"output_token_logprobs[{index}]",
                expected="a finite number",
                got=f"{entry[0]:g}, which stands for none",
            )
        logprobs.append(entry[0])
    return logprobs


def _top_logprobs(meta: Mapping[str, Any], count: int) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    entries = meta.get("output_top_logprobs")
    if not entries:
        return None
    if len(entries) != count:
        raise EngineReplyError(
            "alternatives and tokens are not equally many",
            where="output_top_logprobs",
            expected=str(count),
            got=str(len(entries)),
        )
    return tuple(tuple((int(token), float(logprob)) for logprob, token, *_ in row or ()) for row in entries)


def _versions(meta: Mapping[str, Any], count: int) -> tuple[WeightVersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans is None:
        # Servers before 0.5.23 name the last version only.
        version = meta.get("weight_version")
        return (WeightVersionSpan(str(version), 0, count),) if version is not None and count else ()
    return tuple(
        WeightVersionSpan(str(span["version"]), span["start"], span["end"])
        for span in spans
        if span["start"] < span["end"]
    )


def _experts(
    meta: Mapping[str, Any], request: EngineRequest, completion: int, shape: tuple[int, int] | None
) -> RoutedExperts:
    data = meta.get("routed_experts")
    if data is None or shape is None:
        raise EngineUnsupportedError(
            "the server gives no router choices",
            where="meta_info.routed_experts",
            remedy="Start SGLang with --enable-return-routed-experts",
        )
    layers, top_k = shape
    start = request.routed_experts_prompt_start or 0
    rows = len(request.prompt_ids) + completion - 1
    where = "meta_info.routed_experts"
    if start and _decoded_size(data) == rows * layers * top_k * 4:
        # The server does not know `routed_experts_start_len`, and gave every row.
        whole = experts_from_int32(data, rows=rows, layers=layers, top_k=top_k, where=where)
        return whole.from_position(start)
    return experts_from_int32(data, rows=rows - start, layers=layers, top_k=top_k, start=start, where=where)


def _decoded_size(text: str | memoryview) -> int:
    """Bytes that a padded base64 text stands for."""
    end = text[-2:].encode() if isinstance(text, str) else bytes(text[-2:])
    return len(text) // 4 * 3 - end.count(b"=")
