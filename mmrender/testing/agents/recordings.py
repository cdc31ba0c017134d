"""Recorded runs of agents: each request as it was sent, and the answer that the agent got.

Recordings are shortened. Texts of the agents themselves are a length and a digest. Pictures, tools and
schemas are names. Stand-ins replace them here, equal ones by equal ones.
"""

import base64
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

import numpy as np
from PIL import Image

from mmrender.gateway.call import AnswerCall, ProtocolName
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.messages import Message, ToolCall
from mmrender.renderer import Renderer

DATA: Final = files("mmrender.testing.agents").joinpath("data")
"""Folder of the recordings that the package has."""
PATHS: Final = {name: f"/v1/{protocol.path}" for name, protocol in PROTOCOLS.items()}
"""Path of each protocol, without a query."""
_ROOT: Final = "/v1/"
"""End of the root that a session's URL may have."""

_PICTURE_SIDE: Final = 8
"""Width and height of a stand-in for a picture, in pixels."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """An answer as an agent gets it.

    Attributes:
        content: The text.
        calls: Calls of tools, with arguments as JSON text.
        reasoning: The reasoning.
        signature: Signature of the reasoning, or its encrypted content.
        item_ids: Ids of the items of a response: of its `message`, of its `reasoning`, and of each call by
            the call's id.
    """

    content: str = ""
    calls: tuple[AnswerCall, ...] = ()
    reasoning: str = ""
    signature: str | None = None
    item_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One request of a recorded agent.

    Attributes:
        name: The recording, and the number of the request.
        protocol: Its protocol.
        path: Path and query, from `/v1` on.
        headers: Headers by which agents name threads and versions.
        body: The body.
        answer: The answer that the agent got.
        text: The same as the model wrote it, with calls in Hermes' spelling. Its JSON may be as no template
            writes it.
    """

    name: str
    protocol: ProtocolName
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    answer: AgentAnswer
    text: str

    def completion_ids(self, renderer: Renderer) -> list[int]:
        """Return the answer in tokens, with the token that ends a turn.

        They are `text` if the model spells calls like that and answers at once. Other models' templates write
        the answer, with reasoning.
        """
        if _spells_text(renderer):
            written = _sampled_ids(renderer, Message(role="assistant", content="x"))
            return [*renderer.tokenizer.encode(self.text), written[-1]]
        answer = self.answer
        calls = tuple(ToolCall(each.name, json.loads(each.arguments), each.id) for each in answer.calls)
        message = Message(
            role="assistant",
            content=answer.content,
            reasoning_content=answer.reasoning or "Hm.",
            tool_calls=calls,
        )
        return _sampled_ids(renderer, message)


_ASKED: Final = Message(role="user", content="x")


def _sampled_ids(renderer: Renderer, message: Message) -> list[int]:
    """Return the tokens of an answer as the template writes them, with the stop token."""
    tools = [{"type": "function", "function": {"name": call.name}} for call in message.tool_calls]
    rendered = renderer.render([_ASKED, message], tools=tools or None)
    marked = zip(rendered.token_ids, rendered.sampled_mask.tolist(), strict=True)
    ids = [token for token, is_sampled in marked if is_sampled]
    stops = renderer.get_stop_token_ids()
    return ids if ids[-1] in stops else [*ids, stops[0]]  # such as GLM's, which has the next role instead


def _spells_text(renderer: Renderer) -> bool:
    """Whether a model spells calls as Hermes, and its prompts leave no reasoning open."""
    grammar = renderer.response_parser(has_tools=True).choice.grammar
    if grammar is None or grammar.name != "json_tags":
        return False
    prompt = renderer.render_ids([_ASKED], add_generation_prompt=True)
    return renderer.parse_response([], prompt_ids=prompt).reasoning_closed


def recording_names() -> list[str]:
    """Return the names of the recordings that the package has."""
    return sorted(path.name.removesuffix(".jsonl") for path in DATA.iterdir() if path.name.endswith(".jsonl"))


def load_recording(name: str) -> list[RecordedCall]:
    """Return the answered calls of a recording of the package, in order."""
    calls = []
    for number, protocol, record in records(DATA.joinpath(f"{name}.jsonl")):
        if (reply := record["reply"]) is None:
            continue
        made = tuple(AnswerCall(each["id"], each["name"], each["arguments"]) for each in reply["calls"])
        answer = AgentAnswer(reply["content"], made)
        call = RecordedCall(
            f"{name}-{number}",
            protocol,
            record["path"],
            record["headers"],
            record["body"],
            answer,
            reply["text"],
        )
        calls.append(call)
    return calls


def records(path: Traversable) -> Iterator[tuple[int, ProtocolName, dict[str, Any]]]:
    """Yield number, protocol and record of each request of the three protocols in a file."""
    protocols = {path.removeprefix(_ROOT): protocol for protocol, path in PATHS.items()}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        protocol = protocols.get(record["path"].partition("?")[0].rpartition(_ROOT)[2])
        if record["method"] == "POST" and protocol is not None:
            record["body"] = _filled_body(record["body"], protocol)
            yield record["n"], protocol, record


# --- stand-ins ---


def _filled_body(body: Mapping[str, Any], protocol: ProtocolName) -> dict[str, Any]:
    """Return a body with stand-ins for pictures, tools and schemas."""
    filled: dict[str, Any] = _with_pictures(body)
    if tools := filled.get("tools"):
        filled["tools"] = _tools(tools, protocol)
    if filled.get("response_format") == {"type": "json_schema"}:
        schema = {"name": "agent", "schema": {"type": "object"}}
        filled["response_format"] = {"type": "json_schema", "json_schema": schema}
    return filled


def _with_pictures(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _with_pictures(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_pictures(item, key) for item in value]
    if isinstance(value, str) and value.startswith("IMAGE "):
        data = _picture(int(value.split()[1][:6], 16))  # one picture for each digest
        return data if key == "data" else f"data:image/png;base64,{data}"
    return value


@functools.cache
def _picture(seed: int) -> str:
    side = _PICTURE_SIDE
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _tools(tools: Sequence[Any], protocol: ProtocolName) -> list[Any]:
    return [_tool(tool, protocol) if isinstance(tool, str) else tool for tool in tools]


def _tool(name: str, protocol: ProtocolName) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}}
    if protocol == "messages":
        return {"name": name, "description": f"Does {name}.", "input_schema": schema}
    if protocol == "chat":
        return {"type": "function", "function": {"name": name, "parameters": schema}}
    if name == "web_search":
        return {"type": "web_search", "external_web_access": True}
    function = {"type": "function", "name": name, "strict": False, "parameters": schema}
    if name == "multi_agent_v1":
        inner = [{**function, "name": "spawn_agent"}]
        return {"type": "namespace", "name": name, "description": "Agents.", "tools": inner}
    return function
