"""One sampled turn of a session: from a call and its place to the recorded step and the answer."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import msgspec

from mmrender.client.engine import Engine
from mmrender.client.types import Generation, RequestOptions
from mmrender.content.messages import to_openai
from mmrender.engines.http_engine import SESSION_HEADER
from mmrender.errors import InputError
from mmrender.gateway.call import Answer, AnswerCall, Call, OnDelta, new_id
from mmrender.gateway.deltas import TextDeltas, without_stop
from mmrender.gateway.kinds import root_of, settle_kinds
from mmrender.gateway.matching import EXTRA, Index, Place, digest_of
from mmrender.gateway.prompts import CallPrompt, make_prompt
from mmrender.gateway.tool_choice import forced_call
from mmrender.messages import Message, ToolCall
from mmrender.protocols import ParseOptions, RendererProtocol
from mmrender.trajectory.step import Step
from mmrender.trajectory.tree import Trajectory

_THINKING: Final = "enable_thinking"
"""Template variable that turns reasoning on and off."""
_READ: Final = ("ok", "unknown_tool")
"""Statuses of calls that the agent gets. Agents themselves answer a call of an unknown tool."""


async def take_turn(
    engine: Engine,
    trajectory: Trajectory,
    index: Index,
    call: Call,
    *,
    params: Mapping[str, Any] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    session_name: str | None = None,
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
        params: Sampling parameters of the session. They replace the call's, except that the smaller
            `max_tokens` counts.
        template_arguments: Template variables of the session. They replace the call's.
        session_name: Name by which engines keep the session on one replica.
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
    arguments, notes = _template_arguments(renderer, call, template_arguments or {})
    place = index.place(call, arguments)
    prompt = await make_prompt(engine, renderer, trajectory.steps, place, call, arguments)
    sampling = await _sampling_params(engine, call, prompt, params or {}, number)
    structure = forced_call(renderer, call, prompt.prompt, arguments)
    if structure is not None:
        sampling["structured_outputs"] = structure
    parsing: ParseOptions = {
        "tools": call.offered,
        "prompt_ids": prompt.prompt.ids,
        "chat_template_kwargs": arguments,
    }
    deltas = None
    if on_delta is not None:
        deltas = TextDeltas(
            lambda ids: renderer.parse_response(ids, **parsing),
            on_delta,
            index=number,
            stops=_stops(sampling),
            offers_tools=call.offered is not None,
        )
    generation = await engine.turn(
        prompt.prompt,
        sampling,
        tools=call.offered,
        template_arguments=arguments,
        on_tokens=None if deltas is None else deltas.add,
        **_request_options(options, session_name),
    )
    read = _read_turn(generation, call, sampling)
    answer = Answer(
        id=answer_id or new_id(),
        created=int(time.time()),
        step=len(trajectory),
        reasoning=read.reasoning,
        content=read.content,
        calls=read.calls,
        finish_reason=read.finish_reason,
        stop=read.stop,
        usage=generation.usage,
        token_ids=generation.completion_ids,
        logprobs=generation.logprobs,
        top_logprobs=generation.response.top_logprobs,
        token_texts={} if call.logprobs is None else _token_texts(renderer, generation),
    )
    if deltas is not None:
        deltas.finish(answer.reasoning, answer.content)
    recorded = place.recorded(answer)
    record = _record(
        call,
        place,
        prompt,
        answer=answer,
        sampling=sampling,
        trajectory=trajectory,
        notes=(*notes, *read.notes),
    )
    step = trajectory.append_turn(
        replace(generation, finish_reason=read.finish_reason),
        parent=prompt.parent,
        messages=(*prompt.records, to_openai(read.message)),
        tools=prompt.tools,
        extra={EXTRA: {**record, "matching": msgspec.to_builtins(recorded)}},
    )
    index.add(step.index, recorded)
    settle_kinds(trajectory)
    return step, answer


def _template_arguments(
    renderer: RendererProtocol, call: Call, pinned: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the template variables in force, and a note if the template cannot turn reasoning on and off."""
    arguments = {**call.template_arguments, **pinned}
    if call.thinking is None or _THINKING in arguments:
        return arguments, ()
    profile = renderer.template_profile(has_tools=call.offered is not None, **arguments)
    if _THINKING in profile.arguments:
        return {**arguments, _THINKING: call.thinking}, ()
    return arguments, (f"reasoning turned {'on' if call.thinking else 'off'}: the template cannot",)


def _request_options(options: RequestOptions | None, session_name: str | None) -> RequestOptions:
    headers = dict((options or {}).get("extra_headers") or {})
    if session_name is not None:
        headers[SESSION_HEADER] = session_name
    return {**(options or {}), "extra_headers": headers}


def _stops(params: Mapping[str, Any]) -> Sequence[str]:
    """Return the stop strings that are not part of the answer."""
    stops = params.get("stop") or ()
    if params.get("include_stop_str_in_output"):
        return ()
    return (stops,) if isinstance(stops, str) else stops


def _token_texts(renderer: RendererProtocol, generation: Generation) -> dict[int, str]:
    """Return the text of each sampled token and of its alternatives."""
    others = (token for entry in generation.response.top_logprobs or () for token, _ in entry)
    tokens = dict.fromkeys([*generation.completion_ids, *others])
    return {token: renderer.decode([token]) for token in tokens}


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


@dataclass(frozen=True, slots=True)
class _ReadTurn:
    """A completion as the agent gets it, and the message that is recorded for it."""

    reasoning: str | None
    content: str
    calls: tuple[AnswerCall, ...]
    message: Message
    finish_reason: Any
    stop: str | None
    notes: tuple[str, ...]


def _read_turn(generation: Generation, call: Call, params: Mapping[str, Any]) -> _ReadTurn:
    """Read a completion.

    Malformed calls are text, so that the agent sees them. A stop string and the text after it in the same
    token are left out, as engines do.
    """
    parsed, response = generation.parsed, generation.response
    stop = response.stop_reason if isinstance(response.stop_reason, str) else None
    stop = stop if stop in _stops(params) else None
    attempts = [each for each in parsed.tool_calls if each.status in _READ and each.arguments is not None]
    malformed = [each.raw for each in parsed.tool_calls if each not in attempts]
    notes: tuple[str, ...] = ()
    if len(attempts) > 1 and not call.parallel_tool_calls:
        notes = (f"{len(attempts) - 1} of {len(attempts)} calls were left out: parallel calls are off",)
        attempts = attempts[:1]
    content = without_stop("\n".join([each for each in (parsed.content, *malformed) if each]), stop)
    reasoning = None if parsed.reasoning_content is None else without_stop(parsed.reasoning_content, stop)
    prefix = "toolu_" if call.protocol == "messages" else "call_"
    calls = tuple(ToolCall(each.name or "", each.arguments or {}, f"{prefix}{new_id()}") for each in attempts)
    message = replace(parsed, content=content, reasoning_content=reasoning, tool_calls=()).to_message()
    return _ReadTurn(
        reasoning,
        content,
        tuple(AnswerCall(each.id or "", each.name, _json(each.arguments)) for each in calls),
        msgspec.structs.replace(message, content=message.content or None, tool_calls=calls),
        "tool_calls" if calls and response.finish_reason == "stop" else response.finish_reason,
        stop,
        notes,
    )


def _json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. Half a surrogate pair, which UTF-8 lacks, stays escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def _record(
    call: Call,
    place: Place,
    prompt: CallPrompt,
    *,
    answer: Answer,
    sampling: Mapping[str, Any],
    trajectory: Trajectory,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the gateway's record of a step, as plain data.

    Agents send large schemas with every call, so the first step with a schema has it, others its digest.
    """
    origin = {name: value for name, value in asdict(call.origin).items() if value is not None}
    source = place.sibling if place.sibling is not None else place.parent
    asked = call.sampling_params
    replaced = {name: value for name, value in asked.items() if sampling.get(name) != value}
    record: dict[str, Any] = {
        "protocol": call.protocol,
        "response": answer.id,
        "model": call.model,
        "prompt": prompt.made,
        "why_rendered": prompt.why if prompt.made == "rendered" else None,
        "why_branched": prompt.why if prompt.made in ("bridged", "joined") else None,
        "rewritten": list(place.rewritten),
        "notes": [*call.notes, *prompt.notes, *notes],
        "origin": origin,
        "tool_choice": call.forced_tool or (call.tool_choice if call.tool_choice != "auto" else None),
        "sampling_params": {key: value for key, value in sampling.items() if key != "structured_outputs"},
        "replaced_params": replaced,
    }
    if structure := sampling.get("structured_outputs"):
        digest = record["structure"] = digest_of(structure)
        known = any(step.extra.get(EXTRA, {}).get("structure") == digest for step in trajectory.steps)
        record["structured_outputs"] = None if known else structure
    record = {name: value for name, value in record.items() if value not in (None, [], {})}
    if source is not None:
        return {**record, "from": source}
    return {**record, "root": msgspec.to_builtins(root_of(call, place, trajectory.steps))}
