"""vLLM's answer to a generate request, checked and in our terms.

Logprobs have two shapes: since 0.32 `{"token_id": 7, "logprob": -1.5, ...}`, and before that
`{"token": "token_id:7", "logprob": -1.5, ...}`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrender.client.backend import EngineRequest, EngineResponse, FinishReason, Usage
from mmrender.client.completions import checked_completion
from mmrender.client.routed_experts import experts_from_npy
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineUnsupportedError
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

_FINISHED: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",  # the detection of repetition that a caller asked for; `stop_reason` says so
}
_OLD_NAME: Final = "token_id:"


class FailedInEngineError(EngineReplyError):
    """The engine gave up on the request, and said so with HTTP 200.

    vLLM 0.27 and 0.28 answer so to a hash that they do not have the data of.
    """


def read_reply(reply: Any, request: EngineRequest, prompt_len: int, *, where: str) -> EngineResponse:
    """Read the whole answer.

    Args:
        reply: The answer as `decode_reply` gives it; routed experts are views of the answer's bytes.
        request: What was asked.
        prompt_len: Tokens of the prompt as it was sent or is to come out.
        where: The call in errors.

    Raises:
        FailedInEngineError: The engine failed, and the answer is empty.
        EngineMismatchError: The server counted other prompt tokens than were meant.
        EngineUnsupportedError: Routed experts were asked for, and the server gives none.
        EngineReplyError: The answer has another form than those known, or a token lacks its logprob.
    """
    choice = _only_choice(reply, where)
    finish_reason = _finish_reason(choice, where)
    tokens = choice.get("token_ids") or []
    entries = entries_of(choice, tokens, where)
    ids, logprobs = checked_completion(
        tokens, [entry.get("logprob") for entry in entries], request.vocab_size, where=f"{where} token_ids"
    )
    return EngineResponse(
        completion_ids=ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        usage=_usage(reply, prompt_len, len(ids), where),
        stop_reason=choice.get("stop_reason"),
        routed_experts=_routed_experts(choice, request, prompt_len, len(ids), where),
        weight_versions=_weight_versions(choice, len(ids), where),
        request_id=reply.get("request_id"),
        top_logprobs=_top_logprobs(entries, request, where),
        raw=_without_large(reply, choice),
    )


def _only_choice(reply: Any, where: str) -> dict[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _unusable("no single choice", where, "an object with one of `choices`", choices)
    return choices[0]


def _finish_reason(choice: Mapping[str, Any], where: str) -> FinishReason:
    reason = choice.get("finish_reason")
    if reason == "error":
        raise FailedInEngineError(
            "the engine failed during the request",
            where=where,
            got="finish_reason 'error'",
            remedy="The server's log says why",
        )
    known = _FINISHED.get(reason) if isinstance(reason, str) else None
    if known is None:
        raise _unusable("an unknown finish_reason", where, f"one of {', '.join(_FINISHED)}", reason)
    return known


def entries_of(choice: Mapping[str, Any], tokens: Any, where: str) -> list[Mapping[str, Any]]:
    """The logprob entries, one for each token and of that token.

    Raises:
        EngineReplyError: They are not.
    """
    content = (choice.get("logprobs") or {}).get("content") or []
    if not isinstance(tokens, list) or not isinstance(content, list):
        raise _unusable("malformed tokens or logprobs", where, "two lists", content)
    if len(tokens) != len(content):
        raise EngineReplyError(
            "tokens and logprobs are not equally many",
            where=where,
            expected=f"{len(tokens)} logprobs, one for each token",
            got=str(len(content)),
        )
    for index, (token, entry) in enumerate(zip(tokens, content, strict=True)):
        named = _token_of(entry)
        if named is None:
            raise _nameless(entry, f"{where} logprobs[{index}]")
        if named != token:
            raise EngineReplyError(
                "a logprob is that of another token",
                where=f"{where} logprobs[{index}]",
                expected=f"the token {token}",
                got=str(named),
            )
    return content


def _token_of(entry: Any) -> int | None:
    """The token that an entry is about, in either shape."""
    if not isinstance(entry, dict):
        return None
    token, name = entry.get("token_id"), entry.get("token")
    if type(token) is int:
        return token
    if isinstance(name, str) and name.startswith(_OLD_NAME) and name[len(_OLD_NAME) :].isdecimal():
        return int(name[len(_OLD_NAME) :])
    return None


def _nameless(entry: Any, where: str) -> EngineReplyError:
    return _unusable("a logprob without its token", where, "token_id, or token as 'token_id:N'", entry)


def _top_logprobs(
    entries: Sequence[Mapping[str, Any]], request: EngineRequest, where: str
) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    if not request.sampling_params.get("logprobs"):
        return None
    return tuple(
        tuple(_alternative(other, f"{where} top_logprobs") for other in entry.get("top_logprobs") or ())
        for entry in entries
    )


def _alternative(entry: Any, where: str) -> tuple[int, float]:
    token = _token_of(entry)
    if token is None:
        raise _nameless(entry, where)
    logprob = entry.get("logprob")
    if not isinstance(logprob, int | float):
        raise _unusable("an alternative without its logprob", where, "a number", entry)
    return token, float(logprob)


def _usage(reply: Mapping[str, Any], prompt_len: int, completion_len: int, where: str) -> Usage:
    usage = reply.get("usage") or {}
    counted = usage.get("prompt_tokens", prompt_len)
    if counted != prompt_len:
        raise EngineMismatchError(
            "the server counted other prompt tokens than were meant",
            where=f"{where} usage.prompt_tokens",
            expected=str(prompt_len),
            got=str(counted),
        )
    details = usage.get("prompt_tokens_details") or {}
    return Usage(prompt_len, completion_len, details.get("cached_tokens"))


def _weight_versions(choice: Mapping[str, Any], length: int, where: str) -> tuple[WeightVersionSpan, ...]:
    spans = []
    position = 0
    for index, span in enumerate(choice.get("weight_versions") or ()):
        version, start, stop = _span_fields(span)
        if type(start) is not int or type(stop) is not int or not position <= start <= stop <= length:
            raise _unusable(
                "weight versions that are no spans of the completion",
                f"{where} weight_versions[{index}]",
                f"version, start and end within [{position}, {length}]",
                span,
            )
        spans.append(WeightVersionSpan(str(version), start, stop))
        position = stop
    return tuple(spans)


def _span_fields(span: Any) -> tuple[Any, Any, Any]:
    """Version, start and end, of an object or a list; Nones where it is neither."""
    if isinstance(span, dict):
        return span.get("version"), span.get("start"), span.get("end")
    return tuple(span) if isinstance(span, list) and len(span) == 3 else (None, None, None)


def _routed_experts(
    choice: Mapping[str, Any], request: EngineRequest, prompt_len: int, completion_len: int, where: str
) -> RoutedExperts | None:
    data = choice.get("routed_experts")
    asked_from = request.routed_experts_prompt_start
    if data is None:
        if request.routed_experts and completion_len:
            raise EngineUnsupportedError(
                "routed experts were asked for, and the server gives none",
                where=where,
                remedy="Start vLLM with --enable-return-routed-experts, with a mixture-of-experts model",
            )
        return None
    field = f"{where} routed_experts"
    experts = experts_from_npy(data, where=field)
    rows, whole = len(experts.data), max(0, prompt_len + completion_len - 1)
    if rows != whole:
        # Servers that know the parameter leave out the rows before it; others send them all.
        if asked_from is None or rows != max(0, whole - asked_from):
            raise _unusable(
                "another number of routed rows", field, f"{whole} rows, one for each fed token", rows
            )
        return RoutedExperts(experts.data, asked_from)
    return experts if asked_from is None else experts.from_position(min(asked_from, whole))


def _without_large(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    large = ("token_ids", "logprobs", "routed_experts", "sampling_mask")
    small = {name: value for name, value in choice.items() if name not in large}
    return {**reply, "prompt_token_ids": None, "choices": [small]}


def check_returned_prompt(reply: Any, request: EngineRequest, ids: Sequence[int], *, where: str) -> None:
    """Hold the prompt that the server made of encoded images against ours.

    Raises:
        EngineMismatchError: Its tokens or ranges are others.
        EngineReplyError: The server does not give them back.
    """
    returned = reply.get("prompt_token_ids") if isinstance(reply, dict) else None
    if not isinstance(returned, list):
        raise _unusable(
            "no prompt_token_ids, without which its prompt cannot be held against ours",
            where,
            "a list",
            returned,
        )
    if returned != list(ids):
        index = next((i for i, pair in enumerate(zip(returned, ids, strict=False)) if pair[0] != pair[1]), -1)
        at = min(len(returned), len(ids)) if index < 0 else index
        raise EngineMismatchError(
            "the server made another prompt of the images than the renderer",
            where=f"{where} prompt_token_ids[{at}]",
            expected=f"{_token_at(ids, at)}, and {len(ids)} tokens",
            got=f"{_token_at(returned, at)}, and {len(returned)} tokens",
            remedy="Render with the files and processor settings of the model that the server runs",
        )
    ours = {
        modality: [{"offset": place.offset, "length": place.length} for place in ranges]
        for modality, ranges in request.multi_modal_data.mm_placeholders.items()
    }
    placed = reply.get("mm_placeholders")
    if placed is not None and placed != ours:
        raise EngineMismatchError(
            "the server has the images at other places than the renderer",
            where=f"{where} mm_placeholders",
            expected=str(ours),
            got=str(placed),
        )


def _token_at(ids: Sequence[int], index: int) -> str:
    return f"the token {ids[index]}" if index < len(ids) else "the end"


def _unusable(problem: str, where: str, expected: str, got: object) -> EngineReplyError:
    return EngineReplyError(
        f"the server's reply has {problem}", where=where, expected=expected, got=repr(got)[:200]
    )
