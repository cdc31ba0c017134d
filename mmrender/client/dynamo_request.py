"""A chat request of tokens, as Dynamo takes it."""

from collections.abc import Mapping
from typing import Any, Final

from mmrender.client.backend import EngineRequest
from mmrender.client.sampling import where as parameter
from mmrender.client.spelling import translate
from mmrender.errors import EngineUnsupportedError, InputError, SamplingParameterError

EXTRA_FIELDS: Final = ("completion_token_ids", "prompt_token_ids", "engine_data")
_BYTES_PER_ID: Final = 8
"""An id of up to six digits, its comma and a margin for the rest of the request."""


def chat_body(request: EngineRequest, nvext: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a chat request whose prompt is `token_data`.

    Args:
        request: The prompt, without images.
        nvext: The caller's own members of `nvext`.

    Raises:
        SamplingParameterError: Dynamo does not know a parameter, or `max_tokens` is missing.
        InputError: The caller's `nvext` holds what belongs to the request.
    """
    spelled = translate(request.sampling_params, "dynamo")
    if "max_completion_tokens" not in spelled.request:
        raise SamplingParameterError(
            "is missing, and how long a completion may be is then the worker's choice",
            where=parameter("max_tokens"),
            expected="an integer of 1 or more",
        )
    return {
        "model": request.model,
        # Not looked at where there is `token_data`, but a request without messages is refused.
        "messages": [{"role": "user", "content": ""}],
        "stream": False,
        "logprobs": True,
        **spelled.request,
        "nvext": _nvext(request, nvext),
    }


def _nvext(request: EngineRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    if "token_data" in given:
        raise InputError(
            "the prompt is the request's own",
            where="nvext.token_data",
            expected="nothing",
            remedy="Pass it to generate as prompt_ids",
        )
    wanted = [*EXTRA_FIELDS, *(["routed_experts"] if request.routed_experts else [])]
    extra_fields = list(dict.fromkeys([*given.get("extra_fields", ()), *wanted]))
    merged: dict[str, Any] = {**given, "token_data": list(request.prompt_ids), "extra_fields": extra_fields}
    if request.cache_salt is not None:
        merged["cache_salt"] = request.cache_salt
    if request.priority is not None:
        # Dynamo serves high values first, and turns the sign for engines that do not.
        merged["agent_hints"] = {**given.get("agent_hints", {}), "priority": -request.priority}
    return merged


def check_size(body: Mapping[str, Any], most: int, *, where: str) -> None:
    """Refuse a body that the frontend or its worker would refuse, or break the connection over.

    Args:
        body: A request of either route.
        most: The bound in bytes.
        where: The route in errors.

    Raises:
        EngineUnsupportedError: It is larger.
    """
    ids = body.get("token_ids") or body["nvext"]["token_data"]
    size = len(ids) * _BYTES_PER_ID
    for texts in body.get("features", {}).get("kwargs_data", {}).values():
        size += sum(len(text) for text in texts if text is not None)
    if size > most:
        raise EngineUnsupportedError(
            "the request is larger than the Dynamo frontend takes",
            where=where,
            expected=f"at most {most:,} bytes",
            got=f"about {size:,}",
            remedy="Send fewer or smaller images, or raise the limit at the frontend and in DynamoBackend",
        )
