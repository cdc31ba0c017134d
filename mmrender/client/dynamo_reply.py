"""Dynamo's answer to a chat request of tokens, as an `EngineResponse`.

Tokens and logprobs come by several channels, of which a worker or a frontend may leave some out:

1. `nvext.engine_data`: what the worker gathered. It comes with the worker's last chunk, and so not at all
   where the frontend itself ended the completion, at a stop string.
2. `nvext.completion_token_ids`: what passed through the frontend.
3. `choices[0].logprobs.content`: a logprob for each token, and since 1.6 the token's id.

Tokens are taken from the first that has them, logprobs from `engine_data` if the tokens are, and otherwise
from `content`, where each must name the token that it belongs to. Present but empty is an answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mmrender.client.backend import EngineRequest, EngineResponse, FinishReason, Usage
from mmrender.client.completions import checked_completion
from mmrender.client.returned_prompt import check_prompt_seen
from mmrender.client.routed_experts import experts_from_mapping
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineUnsupportedError
from mmrender.trajectory.engine_data import RoutedExperts

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",  # the frontend's own parser found a call
    "abort": "abort",
}
_NAME: Final = "token_id:"


class _Channels(NamedTuple):
    """Where a reply may hold tokens and logprobs; None where it does not."""

    engine_data: Mapping[str, Any]
    frontend_ids: list[Any] | None
    content: list[Any] | None


def read_reply(reply: Any, request: EngineRequest) -> EngineResponse:
    """Read a reply of status 200.

    Args:
        reply: The decoded reply.
        request: What was asked.

    Raises:
        EngineMismatchError: The worker had another prompt than the renderer's.
        EngineUnsupportedError: The worker gives no router choices, though they were asked for.
        EngineReplyError: It cannot be used: no tokens, or not one logprob for each.
    """
    choice = _only_choice(reply)
    nvext = reply.get("nvext") or {}
    channels = _channels(choice, nvext)
    _check_prompt(reply, nvext, channels.engine_data, request)
    if channels.engine_data.get("finished") is False:
        raise EngineReplyError(
            "the worker failed during the request", where="nvext.engine_data.finished", got="false"
        )
    ids, logprobs = _completion(channels)
    ids, logprobs = checked_completion(ids, logprobs, request.vocab_size, where="completion")
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return EngineResponse(
        completion_ids=ids,
        logprobs=logprobs,
        finish_reason=_reason(choice, ids, request),
        usage=Usage(len(request.prompt_ids), len(ids), details.get("cached_tokens")),
        routed_experts=_experts(nvext, channels.engine_data, request) if request.routed_experts else None,
        request_id=reply.get("id"),
        top_logprobs=_top_logprobs(channels.content, ids, request),
        raw=_small(reply, choice, nvext),
    )


def _only_choice(reply: Any) -> Mapping[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        return choices[0]
    raise EngineReplyError(
        "the reply is not one completion", where="choices", expected="one", got=repr(choices)[:100]
    )


def _reason(choice: Mapping[str, Any], ids: Sequence[int], request: EngineRequest) -> FinishReason:
    """Why sampling ended: a frontend says `stop` also of what the worker aborted."""
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason in _REASONS:
        known = _REASONS[reason]
        return "abort" if known == "stop" and not _may_have_stopped(ids, request) else known
    raise EngineReplyError(
        "the completion ended for an unknown reason",
        where="choices[0].finish_reason",
        expected=", ".join(_REASONS),
        got=repr(reason),
    )


def _may_have_stopped(ids: Sequence[int], request: EngineRequest) -> bool:
    """Whether the last token ends a completion, or something that is not known may have ended it."""
    params = request.sampling_params
    eos_ids = () if params.get("ignore_eos") else request.eos_token_ids
    if params.get("stop") or eos_ids is None:
        return True
    return bool(ids) and ids[-1] in {*eos_ids, *(params.get("stop_token_ids") or ())}


def _channels(choice: Mapping[str, Any], nvext: Mapping[str, Any]) -> _Channels:
    engine_data = nvext.get("engine_data") or {}
    content = (choice.get("logprobs") or {}).get("content")
    for where, ids in (
        ("nvext.engine_data.completion_token_ids", engine_data.get("completion_token_ids")),
        ("nvext.completion_token_ids", nvext.get("completion_token_ids")),
        ("choices[0].logprobs.content", content),
    ):
        if ids is not None and not isinstance(ids, list):
            raise EngineReplyError(
                "a field is of another kind", where=where, expected="a list", got=type(ids).__name__
            )
    return _Channels(engine_data, nvext.get("completion_token_ids"), content)


def _completion(channels: _Channels) -> tuple[list[Any], list[Any]]:
    """Tokens and logprobs, each from the first channel that has them, and never of different tokens."""
    ids = channels.engine_data.get("completion_token_ids")
    logprobs = channels.engine_data.get("completion_logprobs")
    if ids is not None and logprobs is not None:
        return ids, logprobs
    if ids is None:
        ids = channels.frontend_ids
    content = channels.content
    if ids is None and content is not None:
        ids = [entry.get("token_id") if isinstance(entry, dict) else None for entry in content]
        if None in ids:
            ids = None  # frontends before 1.6 give the text only
    if ids is None:
        raise EngineReplyError(
            "the reply holds no token ids",
            where="nvext",
            expected="engine_data or completion_token_ids",
            remedy="Retokenizing its text would train on other tokens; use a frontend that gives them",
        )
    return ids, _logprobs(ids, content or [])


def _logprobs(ids: Sequence[Any], content: Sequence[Any]) -> list[Any]:
    for index, (token, entry) in enumerate(zip(ids, content, strict=False)):
        named = entry.get("token_id", token) if isinstance(entry, dict) else None
        if named != token:
            raise EngineReplyError(
                "a logprob is of another token than was sampled",
                where=f"choices[0].logprobs.content[{index}]",
                expected=f"the token {token}",
                got=f"the token {named}",
            )
    return [entry.get("logprob") for entry in content]


def _check_prompt(
    reply: Mapping[str, Any],
    nvext: Mapping[str, Any],
    engine_data: Mapping[str, Any],
    request: EngineRequest,
) -> None:
    for where, seen in (
        ("nvext.engine_data.prompt_token_ids", engine_data.get("prompt_token_ids")),
        ("nvext.prompt_token_ids", nvext.get("prompt_token_ids")),
    ):
        if isinstance(seen, list):
            return check_prompt_seen(seen, request, where=where)
    counted = (reply.get("usage") or {}).get("prompt_tokens", len(request.prompt_ids))
    if counted != len(request.prompt_ids):
        raise EngineMismatchError(
            "the server counted other prompt tokens than were sent",
            where="usage.prompt_tokens",
            expected=str(len(request.prompt_ids)),
            got=str(counted),
        )
    return None


def _top_logprobs(
    content: Sequence[Any] | None, ids: Sequence[int], request: EngineRequest
) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    if not request.sampling_params.get("logprobs"):
        return None
    if content is None or len(content) != len(ids):
        raise EngineReplyError(
            "alternatives and tokens are not equally many",
            where="choices[0].logprobs.content",
            expected=str(len(ids)),
            got="nothing" if content is None else str(len(content)),
        )
    return tuple(
        tuple(
            (_token_of(other, f"choices[0].logprobs.content[{index}].top_logprobs"), float(other["logprob"]))
            for other in entry.get("top_logprobs") or ()
        )
        for index, entry in enumerate(content)
    )


def _token_of(entry: Mapping[str, Any], where: str) -> int:
    named = entry.get("token_id")
    text = entry.get("token")
    if named is None and isinstance(text, str) and text.startswith(_NAME) and text[len(_NAME) :].isdecimal():
        named = int(text[len(_NAME) :])
    if not isinstance(named, int):
        raise EngineReplyError(
            "an alternative does not say which token it is",
            where=where,
            expected="token_id, or token as 'token_id:N'",
            got=repr(entry)[:100],
        )
    return named


def _experts(
    nvext: Mapping[str, Any], engine_data: Mapping[str, Any], request: EngineRequest
) -> RoutedExperts:
    where = "nvext.routed_experts"
    value = nvext.get("routed_experts")
    if value is None:
        where, value = "nvext.engine_data.routed_experts", engine_data.get("routed_experts")
    return experts_of(value, request, where=where)


def experts_of(value: Any, request: EngineRequest, *, where: str) -> RoutedExperts:
    """Read router choices, without the prompt's rows where the caller asked for that.

    Raises:
        EngineUnsupportedError: There are none.
        EngineReplyError: They are malformed.
    """
    if value is None:
        raise EngineUnsupportedError(
            "router choices were asked for, and the worker gives none",
            where=where,
            remedy="Start the workers with --enable-return-routed-experts, with a mixture-of-experts model",
        )
    experts = experts_from_mapping(value, where=where)
    start = request.routed_experts_prompt_start
    # A worker may have left out the rows by itself.
    return experts if start is None or experts.start >= start else experts.from_position(start)


def _small(reply: Mapping[str, Any], choice: Mapping[str, Any], nvext: Mapping[str, Any]) -> dict[str, Any]:
    large = ("engine_data", "routed_experts", "completion_token_ids", "prompt_token_ids", "token_data")
    return {
        **reply,
        "choices": [{name: value for name, value in choice.items() if name != "logprobs"}],
        "nvext": {name: value for name, value in nvext.items() if name not in large},
    }
