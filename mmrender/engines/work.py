"""Batches taken apart into single prompts, and put together again in order."""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrender.client.generation import is_async
from mmrender.client.types import EngineResponse
from mmrender.engines.interface import InferenceEngineInput, InferenceEngineOutput, OnTokens
from mmrender.engines.together import together
from mmrender.errors import InputError
from mmrender.protocols import AsyncRenderer
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens

_KEYS = frozenset(InferenceEngineInput.__annotations__)


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt to complete.

    Attributes:
        where: Its place in the input, such as `prompt_token_ids[3]`.
        prompt_ids: Its tokens.
        params: Sampling parameters.
        multi_modal_data: Its sidecar.
        collapsed_ids: With each placeholder range as one token, or None.
        session_id: Session, or None.
        options: What goes with every request for it: `cache_salt`, `priority`, `extra_headers`,
            `routed_experts`.
        on_tokens: Told of tokens as they come, or None.
    """

    where: str
    prompt_ids: Sequence[int]
    params: Mapping[str, Any]
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    collapsed_ids: Sequence[int] | None = None
    session_id: Hashable | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    on_tokens: OnTokens | None = None

    @property
    def image_ids(self) -> list[str]:
        """Identities of its media items, in order."""
        return [name for hashes in self.multi_modal_data.mm_hashes.values() for name in hashes]

    def as_input(
        self,
        prompt_ids: Sequence[int],
        params: Mapping[str, Any],
        collapsed_ids: Sequence[int] | None,
        on_tokens: OnTokens | None = None,
    ) -> InferenceEngineInput:
        """The input of a single request for it."""
        single: InferenceEngineInput = {
            "prompt_token_ids": [prompt_ids],
            "sampling_params": params,
            "session_ids": [self.session_id],
        }
        if self.multi_modal_data:
            single["multi_modal_data"] = [self.multi_modal_data]
        if collapsed_ids is not None:
            single["collapsed_ids"] = [collapsed_ids]
        if on_tokens is not None:
            single["on_tokens"] = on_tokens
        single.update(self.options)  # type: ignore[typeddict-item]
        return single


async def taken_apart(batch: InferenceEngineInput, renderer: Any = None) -> list[Work]:
    """Take a batch apart; conversations are rendered off the event loop.

    Raises:
        InputError: The batch is not understood; `where` names the field.
        RenderError, MediaError, MessageError: A conversation cannot be rendered.
    """
    prompts = _conversations(batch)
    if prompts is None:
        return split(batch)
    if renderer is None:
        raise InputError(
            "conversations need a renderer",
            where="prompts",
            remedy="Give one to the engine or client, or pass prompt_token_ids",
        )
    rendered = await _rendered(prompts, batch, renderer)
    tokens: InferenceEngineInput = {
        **batch,
        "prompts": None,
        "prompt_token_ids": [each.token_ids for each in rendered],
        "multi_modal_data": [each.multi_modal_data for each in rendered],
    }
    return [replace(work, where=f"prompts[{index}]") for index, work in enumerate(split(tokens))]


def split(batch: InferenceEngineInput) -> list[Work]:
    """Take a batch of token ids apart.

    Raises:
        InputError: The batch is not understood; `where` names the field.
    """
    if _conversations(batch) is not None:
        raise InputError("only token ids are understood", where="prompts")
    work = _tokenized(batch, batch.get("prompt_token_ids") or ())
    on_tokens = batch.get("on_tokens")
    if on_tokens is None:
        return work
    if len(work) != 1:
        raise InputError(
            "only a single prompt can be streamed", where="on_tokens", got=f"{len(work)} prompts"
        )
    return [replace(work[0], on_tokens=on_tokens)]


def _conversations(batch: InferenceEngineInput) -> Sequence[Any] | None:
    """The conversations of a batch, None where it holds token ids; checked."""
    _check_keys(batch)
    prompts, ids = batch.get("prompts"), batch.get("prompt_token_ids")
    if (prompts is None) == (ids is None):
        raise InputError(
            "prompts are not given in one way",
            expected="exactly one of 'prompts' and 'prompt_token_ids'",
            got="both" if prompts is not None else "neither",
        )
    if prompts is None:
        return None
    for name in ("multi_modal_data", "collapsed_ids"):
        if batch.get(name) is not None:
            raise InputError("it belongs to prompt_token_ids", where=name, got="it beside 'prompts'")
    if prompts and isinstance(prompts[0], Mapping):
        raise InputError(
            "a single conversation stands where a list of them is expected",
            where="prompts",
            remedy="Write [messages]",
        )
    return prompts


async def _rendered(
    prompts: Sequence[Any], batch: InferenceEngineInput, renderer: Any
) -> Sequence[RenderedTokens]:
    options = {
        "tools": batch.get("tools"),
        "add_generation_prompt": True,
        **(batch.get("template_arguments") or {}),
    }
    if is_async(renderer):
        return await together([_one(renderer, messages, options) for messages in prompts])
    return await asyncio.to_thread(lambda: [renderer.render(each, **options) for each in prompts])


async def _one(
    renderer: AsyncRenderer, messages: Sequence[Any], options: Mapping[str, Any]
) -> RenderedTokens:
    return await renderer.arender(messages, **options)


def _check_keys(batch: InferenceEngineInput) -> None:
    unknown = sorted(set(batch) - _KEYS)
    if unknown:
        raise InputError(
            "there is no such input", where=unknown[0], expected=f"one of {', '.join(sorted(_KEYS))}"
        )


def _tokenized(batch: InferenceEngineInput, ids: Sequence[Sequence[int]]) -> list[Work]:
    count = len(ids)
    if count and isinstance(ids[0], int):
        raise InputError(
            "a single prompt stands where a list of prompts is expected",
            where="prompt_token_ids",
            remedy="Write [token_ids]",
        )
    sidecars = _one_each(batch, "multi_modal_data", count)
    collapsed = _one_each(batch, "collapsed_ids", count)
    sessions = _one_each(batch, "session_ids", count)
    params = _params(batch, count)
    options = _options(batch)
    for index, prompt in enumerate(ids):
        if not len(prompt):
            raise InputError("the prompt is empty", where=f"prompt_token_ids[{index}]")
    return [
        Work(
            where=f"prompt_token_ids[{index}]",
            prompt_ids=prompt,
            params=params[index],
            multi_modal_data=sidecars[index] or MultiModalData(),
            collapsed_ids=collapsed[index],
            session_id=sessions[index],
            options=options,
        )
        for index, prompt in enumerate(ids)
    ]


def _one_each(batch: InferenceEngineInput, name: str, count: int) -> Sequence[Any]:
    values: Any = batch.get(name)
    if values is None:
        return [None] * count
    if len(values) != count:
        raise InputError(
            "there is not one for each prompt", where=name, expected=str(count), got=str(len(values))
        )
    return list(values)


def _params(batch: InferenceEngineInput, count: int) -> Sequence[Mapping[str, Any]]:
    params = batch.get("sampling_params")
    if params is None:
        raise InputError(
            "sampling parameters are missing",
            where="sampling_params",
            remedy="Give at least {'max_tokens': N}",
        )
    if isinstance(params, Mapping):
        return [params] * count
    return _one_each(batch, "sampling_params", count)


def _options(batch: InferenceEngineInput) -> dict[str, Any]:
    names = ("cache_salt", "priority", "extra_headers", "routed_experts")
    values: Mapping[str, Any] = dict(batch)
    return {name: values[name] for name in names if values.get(name) is not None}


def joined(
    work: Sequence[Work],
    responses: Sequence[EngineResponse],
    decode: Callable[[Sequence[int]], str] | None,
) -> InferenceEngineOutput:
    """Put single completions together, in order; text is decoded once, from whole completions."""
    return {
        "responses": None if decode is None else [decode(each.completion_ids) for each in responses],
        "response_ids": [each.completion_ids for each in responses],
        "response_logprobs": [each.logprobs for each in responses],
        "stop_reasons": [each.finish_reason for each in responses],
        "matched_stops": [each.stop_reason for each in responses],
        "prompt_token_ids": [list(each.prompt_ids) for each in work],
        "multi_modal_data": [each.multi_modal_data for each in work],
        "usages": [each.usage for each in responses],
        "weight_versions": [each.weight_versions for each in responses],
        "routed_experts": [each.routed_experts for each in responses],
        "engine_responses": list(responses),
    }
