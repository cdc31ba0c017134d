"""From a completion to the answer that an agent gets, and to the message that is recorded for it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mmrender.client.types import Generation
from mmrender.gateway.call import Answer, AnswerCall, Call, ProtocolName, new_id
from mmrender.gateway.deltas import without_stop
from mmrender.gateway.reading import read_arguments
from mmrender.messages import Message
from mmrender.parsing import ToolCallAttempt
from mmrender.protocols import RendererProtocol

_READ: Final = ("ok", "unknown_tool")
"""Statuses of calls that the agent gets. Agents themselves answer a call of an unknown tool."""


class ReadTurn(NamedTuple):
    """A completion, read.

    Attributes:
        answer: The answer. Calls that cannot be read, or are made without tools, are text at its end, so that
            the agent sees them.
        sampled_ids: The id that the model itself sampled for each call, or None.
        message: The message as the template prints it, with the model's own ids if there are any.
        notes: Calls that were left out, in words.
    """

    answer: Answer
    sampled_ids: tuple[str | None, ...]
    message: Message
    notes: tuple[str, ...]


def read_turn(
    renderer: RendererProtocol, generation: Generation, call: Call, params: Mapping[str, Any], **names: Any
) -> ReadTurn:
    """Read a completion that was sampled with these parameters. `names`: `id` and `step` of the answer.

    Without parallel calls the agent gets the first call alone. A stop string and the text after it in the
    same token are left out, as engines do.
    """
    parsed, response = generation.parsed, generation.response
    stop = response.stop_reason if isinstance(response.stop_reason, str) else None
    stop = stop if stop in stop_strings(params) else None
    made = [each for each in parsed.tool_calls if call.offered is not None and _is_call(each)]
    others = [each.raw for each in parsed.tool_calls if each not in made]
    notes: tuple[str, ...] = ()
    if len(made) > 1 and not call.parallel_tool_calls:
        notes = (f"{len(made) - 1} of {len(made)} calls were left out: parallel calls are off",)
        made = made[:1]
    content = without_stop("\n".join([text for text in (parsed.content, *others) if text]), stop)
    reasoning = None if parsed.reasoning_content is None else without_stop(parsed.reasoning_content, stop)
    prefix = "toolu_" if call.protocol == "messages" else "call_"
    calls = tuple(
        AnswerCall(prefix + new_id(), each.name or "", _arguments_text(each, call.protocol)) for each in made
    )
    own_calls = tuple(
        replace(each, status="ok", arguments=_arguments(each), id=each.id or answered.id)
        for each, answered in zip(made, calls, strict=True)
    )
    own = replace(parsed, content=content, reasoning_content=reasoning, tool_calls=own_calls)
    alternatives = (token for entry in response.top_logprobs or () for token, _ in entry)
    tokens = () if call.logprobs is None else dict.fromkeys([*response.completion_ids, *alternatives])
    answer = Answer(
        created=int(time.time()),
        reasoning=reasoning,
        content=content,
        calls=calls,
        finish_reason="tool_calls" if calls and response.finish_reason == "stop" else response.finish_reason,
        stop=stop,
        usage=generation.usage,
        token_ids=generation.completion_ids,
        logprobs=generation.logprobs,
        top_logprobs=response.top_logprobs,
        token_texts={token: renderer.decode([token]) for token in tokens},
        **names,
    )
    return ReadTurn(answer, tuple(each.id for each in made), own.to_message(), notes)


def stop_strings(params: Mapping[str, Any]) -> Sequence[str]:
    """Return the stop strings that are not part of the answer."""
    stops = params.get("stop") or ()
    if params.get("include_stop_str_in_output"):
        return ()
    return (stops,) if isinstance(stops, str) else stops


def _is_call(attempt: ToolCallAttempt) -> bool:
    """Whether the agent gets an attempt as a call. Wrong arguments are the agent's to answer, too."""
    has_arguments = attempt.status in _READ and attempt.arguments is not None
    return has_arguments or (attempt.name is not None and attempt.arguments_text is not None)


def _arguments(attempt: ToolCallAttempt) -> dict[str, Any]:
    """Return the arguments of a call in a message, as requests that repeat them are read."""
    text = attempt.arguments_text
    return attempt.arguments or {} if text is None else read_arguments(text, "arguments")


def _arguments_text(attempt: ToolCallAttempt, protocol: ProtocolName) -> str:
    """Return the arguments of a call as the agent gets them. In messages they must be an object."""
    if attempt.arguments_text is not None and protocol != "messages":
        return attempt.arguments_text
    return _json(_arguments(attempt))


def _json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. Half a surrogate pair, which UTF-8 lacks, stays escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text
