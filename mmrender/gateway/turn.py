"""One sampled turn of a session: from a call and its place to the recorded step and the answer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec

from mmrender.client.engine import Engine
from mmrender.client.types import RequestOptions
from mmrender.content.messages import to_openai
from mmrender.errors import InputError
from mmrender.gateway.answers import read_turn, stop_strings
from mmrender.gateway.call import Answer, Call, OnDelta, new_id
from mmrender.gateway.deltas import TextDeltas
from mmrender.gateway.digests import digest_of
from mmrender.gateway.forms import profile_of
from mmrender.gateway.kinds import note_kind, root_of
from mmrender.gateway.matching import EXTRA, Index, Place
from mmrender.gateway.prompts import CallPrompt, make_prompt
from mmrender.gateway.tool_choice import call_grammar
from mmrender.protocols import ParseOptions, RendererProtocol
from mmrender.trajectory.step import Step
from mmrender.trajectory.tree import Trajectory

_THINKING: Final = "enable_thinking"
"""Template variable that turns reasoning on and off."""


async def take_turn(
    engine: Engine,
    trajectory: Trajectory,
    index: Index,
    call: Call,
    *,
    previous: int | None = None,
    params: Mapping[str, Any] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    on_delta: OnDelta | None = None,
    number: int = 0,
    answer_id: str | None = None,
    options: RequestOptions | None = None,
) -> tuple[Step, Answer]:
    """Answer a call with one sampled turn, and record it.

    A call that fails or is cancelled leaves trajectory and index as they were. Calls of one session may run
    side by side on one event loop.

    Args:
        engine: The model, with a renderer.
        trajectory: Receives the step.
        index: The recorded steps of the session.
        call: The call.
        previous: The step of the response that the call names as the one before.
        params: Sampling parameters of the session. They replace the call's, except that the smaller
            `max_tokens` counts.
        template_arguments: Template variables of the session. They replace the call's.
        on_delta: Called with text that is certain, before the turn is complete.
        number: Number of the answer among the answers of the call. It is added to the seed.
        answer_id: Id of the answer, by default a new one.
        options: Options of the request to the engine, such as `routed_experts`.

    Raises:
        PromptTooLongError: The prompt is longer than the model's context.
        InputError: The call ends in an answer, or asks for a tool in a way that the model's format cannot
            enforce.
        MMRenderError: The conversation cannot be rendered, or sampling failed.
    """
    renderer = engine.renderer
    if renderer is None:
        raise InputError("a gateway renders conversations", where="engine", expected="a renderer")
    arguments, notes = await _template_arguments(renderer, call, template_arguments or {})
    place = index.place(call, arguments, previous=previous)
    prompt = await make_prompt(engine, renderer, trajectory.steps, place, call, arguments, index.sampled_ids)
    sampling = await _sampling_params(engine, call, prompt, params or {}, number)
    if call.tool_choice == "required" or call.named_tools:
        structure = await asyncio.to_thread(call_grammar, renderer, call, prompt.prompt, arguments)
        sampling["structured_outputs"] = structure
    deltas = None
    if on_delta is not None:
        parsing: ParseOptions = {
            "tools": call.offered,
            "prompt_ids": prompt.prompt.ids,
            "chat_template_kwargs": arguments,
        }
        deltas = TextDeltas(
            lambda ids: renderer.parse_response(ids, **parsing),
            on_delta,
            index=number,
            stops=stop_strings(sampling),
            offers_tools=call.offered is not None,
        )
    generation = await engine.turn(
        prompt.prompt,
        sampling,
        tools=call.offered,
        template_arguments=arguments,
        on_tokens=None if deltas is None else deltas.add,
        **(options or {}),
    )
    names = {"id": answer_id or new_id(), "step": len(trajectory)}
    answer, sampled_ids, message, lost = read_turn(renderer, generation, call, sampling, **names)
    if deltas is not None:
        deltas.finish(answer.reasoning, answer.content)
    recorded = place.recorded(answer, sampled_ids)
    record = _record(call, place, prompt, sampling, trajectory.steps) | {"response": answer.id}
    if all_notes := [*call.notes, *notes, *prompt.notes, *lost]:
        record["notes"] = all_notes
    step = trajectory.append_turn(
        replace(generation, finish_reason=answer.finish_reason),
        parent=prompt.parent,
        messages=(*prompt.records, to_openai(message)),
        tools=prompt.tools,
        extra={EXTRA: {**record, "matching": msgspec.to_builtins(recorded)}},
    )
    index.add(step.index, recorded)
    note_kind(trajectory, step)
    return step, answer


async def _template_arguments(
    renderer: RendererProtocol, call: Call, pinned: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the template variables in force, and a note if the template cannot turn reasoning on and off."""
    arguments = {**call.template_arguments, **pinned}
    if call.thinking is None or _THINKING in arguments:
        return arguments, ()
    profile = await profile_of(renderer, arguments, has_tools=bool(call.tools))
    if _THINKING in profile.arguments:
        return {**arguments, _THINKING: call.thinking}, ()
    return arguments, (f"reasoning turned {'on' if call.thinking else 'off'}: the template cannot",)


async def _sampling_params(
    engine: Engine,
    call: Call,
    prompt: CallPrompt,
    pinned: Mapping[str, Any],
    number: int,
) -> dict[str, Any]:
    """Return the sampling parameters in force."""
    params = {**call.sampling_params, **pinned}
    if call.logprobs is not None:
        params["logprobs"] = call.logprobs
    if params.get("seed") is not None:
        params["seed"] += number
    budgets = [each["max_tokens"] for each in (call.sampling_params, pinned) if each.get("max_tokens")]
    limit = await engine.max_prompt_len()
    if budgets and limit is not None:
        # Agents ask for more than small models can hold. Engines refuse that, and a prompt that is too long.
        budgets.append(max(1, limit + 1 - len(prompt.prompt.ids)))
    return {**params, "max_tokens": min(budgets)} if budgets else params


def _plain(params: Mapping[str, Any]) -> Any:
    """Return parameters as JSON would hold them: token ids as keys become text."""
    return msgspec.to_builtins(params, str_keys=True)


def _record(
    call: Call, place: Place, prompt: CallPrompt, sampling: Mapping[str, Any], steps: Sequence[Step]
) -> dict[str, Any]:
    """Return the gateway's record of a step, as plain data.

    Agents send large schemas with every call, so the first step with a schema has it, others its digest.
    """
    choice = " ".join((call.tool_choice, *call.named_tools))
    record: dict[str, Any] = {
        "protocol": call.protocol,
        "model": call.model,
        "prompt": prompt.made,
        "why_rendered": prompt.why if prompt.made == "rendered" else None,
        "why_branched": prompt.why if prompt.made in ("bridged", "joined") else None,
        "rewritten": list(place.rewritten),
        "origin": {name: value for name, value in asdict(call.origin).items() if value is not None},
        "tool_choice": None if choice == "auto" else choice,
        "sampling_params": _plain({k: v for k, v in sampling.items() if k != "structured_outputs"}),
        "replaced_params": _plain(
            {name: value for name, value in call.sampling_params.items() if sampling.get(name) != value}
        ),
    }
    if structure := sampling.get("structured_outputs"):
        digest = record["structure"] = digest_of(structure)
        known = any(step.extra.get(EXTRA, {}).get("structure") == digest for step in steps)
        record["structured_outputs"] = None if known else structure
    record = {name: value for name, value in record.items() if value not in (None, [], {})}
    source = place.sibling if place.sibling is not None else place.parent
    if source is not None:
        return {**record, "from": source}
    return {**record, "root": msgspec.to_builtins(root_of(call, place, steps))}
