"""The engines as a table: a good answer of each, and the places of what can be wrong in it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmrender.client import dynamo, vllm_images
from mmrender.client.dynamo import DynamoBackend
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import ABORT_PATH, VLLMBackend

PROMPT, IDS, LOGPROBS, END = [10, 11, 12], [50, 51, 52], [-1.5, -0.25, 0.0], 52
Reply = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """One engine: `reply` builds its good answer, `change` names the places of what can be wrong in it."""

    backend: Any
    path: str
    reply: Callable[[list[Any], list[Any]], Reply]
    change: dict[str, Callable[[Reply, Any], None]]
    limit: tuple[str, Reply, int]
    malformed_limits: tuple[Any, ...]
    abort: tuple[str, Reply] | None

    @property
    def route(self) -> str:
        return f"POST {self.path}"

    def answer(self) -> Reply:
        return copy.deepcopy(self.reply(list(IDS), list(LOGPROBS)))


def vllm_reply(ids: list[Any], logprobs: list[Any]) -> Reply:
    content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=False)]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
    return {"request_id": "r", "usage": {"prompt_tokens": 3}, "choices": [choice]}


def sglang_reply(ids: list[Any], logprobs: list[Any]) -> Reply:
    pairs = [[value, token, None] for token, value in zip(ids, logprobs, strict=False)]
    meta = {"id": "r", "finish_reason": {"type": "stop", "matched": 52}, "output_token_logprobs": pairs}
    return {"output_ids": ids, "prompt_token_ids": PROMPT, "meta_info": meta}


def dynamo_reply(ids: list[Any], logprobs: list[Any]) -> Reply:
    data = {"completion_token_ids": ids, "completion_logprobs": logprobs, "prompt_token_ids": PROMPT}
    choice = {"index": 0, "finish_reason": "stop"}
    return {"id": "r", "usage": {"prompt_tokens": 3}, "choices": [choice], "nvext": {"engine_data": data}}


def at(*path: Any) -> Callable[[Reply, Any], None]:
    def put(reply: Reply, value: Any) -> None:
        node: Any = reply
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return put


ENGINES = {
    "vllm": Engine(
        VLLMBackend(),
        vllm_images.GENERATE_PATH,
        vllm_reply,
        {
            "reason": at("choices", 0, "finish_reason"),
            "ids": at("choices", 0, "token_ids"),
            "token": at("choices", 0, "token_ids", 1),
            "logprob": at("choices", 0, "logprobs", "content", 1, "logprob"),
            "named": at("choices", 0, "logprobs", "content", 1, "token_id"),
            "usage": at("usage"),
            "prompt": lambda reply, value: at("usage")(reply, {"prompt_tokens": len(value) + 1}),
            "experts": at("choices", 0, "routed_experts"),
            "versions": at("choices", 0, "weight_versions"),
        },
        ("/v1/models", {"data": [{"id": "m", "max_model_len": 2048}]}, 2047),
        ({}, [], "text", {"data": 1}, {"data": [{}]}, {"data": [{"id": "m", "parent": [1]}]}),
        (ABORT_PATH, {"request_ids": ["generate-tokens-mine"]}),
    ),
    "sglang": Engine(
        SGLangBackend(),
        "/generate",
        sglang_reply,
        {
            "reason": at("meta_info", "finish_reason", "type"),
            "ids": at("output_ids"),
            "token": at("output_ids", 1),
            "logprob": at("meta_info", "output_token_logprobs", 1, 0),
            "named": at("meta_info", "output_token_logprobs", 1, 1),
            "usage": at("meta_info"),
            "experts": at("meta_info", "routed_experts"),
            "versions": at("meta_info", "weight_versions"),
            "prompt": at("prompt_token_ids"),
        },
        ("/server_info", {"max_req_input_len": 2042}, 2041),
        ([], "text", {"max_req_input_len": "long"}),
        ("/abort_request", {"rid": "mine"}),
    ),
    "dynamo": Engine(
        DynamoBackend(),
        dynamo.CHAT_PATH,
        dynamo_reply,
        {
            "reason": at("choices", 0, "finish_reason"),
            "ids": at("nvext", "engine_data", "completion_token_ids"),
            "token": at("nvext", "engine_data", "completion_token_ids", 1),
            "logprob": at("nvext", "engine_data", "completion_logprobs", 1),
            "usage": at("usage"),
            "prompt": at("nvext", "engine_data", "prompt_token_ids"),
            "experts": at("nvext", "routed_experts"),
        },
        ("/v1/models", {"data": [{"id": "m", "context_window": 2048}]}, 2047),
        ({}, [], "text", {"data": [{}]}, {"data": [{"id": "m", "context_window": []}]}),
        None,
    ),
}


def asked(**fields: Any) -> EngineRequest:
    values: dict[str, Any] = {
        "model": "m",
        "prompt_ids": PROMPT,
        "sampling_params": {"max_tokens": 4},
        "request_id": "mine",
        "vocab_size": 1024,
        "eos_token_ids": [END],
    }
    return EngineRequest(**{**values, **fields})
