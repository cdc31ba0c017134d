"""Recorded calls of real agents, replayed: bodies with texts, tools and pictures filled in, and ids of this run.

A recording holds the requests of one run and the scripted replies that the agent got. In a replay the model says
what the script said, and each later request shows the call ids of the replay in place of the script's.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gateway_cases import Recording
from kit import blocks, data_url
from mmrender.gateway.call import Answer, Call, ProtocolName
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.trajectory.step import Step

_FILLER = re.compile(r"TEXT of (\d+) characters, sha (\w+)")
_PROTOCOL: dict[str, ProtocolName] = {
    "completions": "chat",
    "responses": "responses",
    "messages": "messages",
}


@dataclass(frozen=True)
class Said:
    """A scripted reply. Calls are `(id, name, arguments as text)`."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str, str], ...]

    def as_text(self) -> str:
        """The reply as Qwen3-VL writes it. Arguments that are empty are an empty object."""
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments or "{}"}}}\n</tool_call>'
            for _, name, arguments in self.calls
        ]
        return "\n".join([*([self.content] if self.content else []), *calls])


@dataclass
class Replay:
    """One recording, replayed on a session of its own."""

    path: Path
    renderer: Any
    taken: list[tuple[Call, Step, Answer]] = field(default_factory=list)
    ids: dict[str, dict[str, str]] = field(default_factory=dict)

    async def run(self) -> Recording:
        """Answer all calls that the script answered, in order."""
        said: list[Said] = []
        session = Recording(self.renderer, lambda request: said[-1].as_text())
        for row in map(json.loads, self.path.read_text().splitlines()):
            if row["method"] != "POST" or row["reply"] is None:
                continue
            protocol = _PROTOCOL[row["path"].partition("?")[0].rpartition("/")[2]]
            body = _filled(self._with_own_ids(row["body"]), protocol)
            call = PROTOCOLS[protocol].read(body, row["headers"])
            said.append(_read_reply(row["reply"], protocol))
            step, answer = await session.take(call)
            own = [call for call in said[-1].calls if _is_object(call[2] or "{}")]
            made = {each[0]: call.id for each, call in zip(own, answer.calls, strict=True)}
            self._ids_for(row["body"]).update(made)
            self.taken.append((call, step, answer))
        return session

    def _ids_for(self, body: dict[str, Any]) -> dict[str, str]:
        """Ids of this run by the script's. The script uses an id once for each set of tools."""
        return self.ids.setdefault(json.dumps(body.get("tools")), {})

    def _with_own_ids(self, body: dict[str, Any]) -> dict[str, Any]:
        known = {name: own for ids in self.ids.values() for name, own in ids.items()} | self._ids_for(body)
        names = sorted(known, key=len, reverse=True)
        pattern = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names) or r"\Z(?!\Z)"
        replaced: dict[str, Any] = json.loads(
            re.sub(pattern, lambda match: known[match[0]], json.dumps(body))
        )
        return replaced


def replayed(path: Path, renderer: Any) -> tuple[Replay, Recording]:
    """Replay a recording."""
    replay = Replay(path, renderer)
    return replay, asyncio.run(replay.run())


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _read_reply(reply: Any, protocol: ProtocolName) -> Said:
    reasoning, texts, calls = [], [], []
    if protocol == "chat":
        reasoning.append(reply.get("reasoning_content") or "")
        texts.append(reply.get("content") or "")
        made = [(call["id"], call["function"]) for call in reply.get("tool_calls") or ()]
        calls += [(name, function["name"], function["arguments"]) for name, function in made]
        return Said("".join(reasoning), "".join(texts), tuple(calls))
    for item in reply:
        match item["type"]:
            case "thinking":
                reasoning.append(item["thinking"])
            case "reasoning":
                reasoning += [part["text"] for part in item["content"]]
            case "text":
                texts.append(item["text"])
            case "message":
                texts += [part["text"] for part in item["content"]]
            case "tool_use":
                calls.append((item["id"], item["name"], item["_raw"]))
            case "function_call":
                calls.append((item["call_id"], item["name"], item["arguments"]))
    return Said("".join(reasoning), "".join(texts), tuple(calls))


def _filled(value: Any, protocol: ProtocolName) -> Any:
    """Fill in texts, tools and pictures, equal ones for equal digests."""
    if isinstance(value, dict):
        filled = {key: _filled(entry, protocol) for key, entry in value.items()}
        if isinstance(filled.get("tools"), list):
            filled["tools"] = [_tool(name, protocol) for name in filled["tools"]]
        if filled.get("type") == "json_schema" and not filled.keys() & {"json_schema", "schema"}:
            filled["json_schema"] = {"name": "answer", "schema": {"type": "object"}}
        if filled.get("type") == "base64":
            filled |= {"media_type": "image/png", "data": filled["data"].partition(",")[2]}
        return filled
    if isinstance(value, list):
        return [_filled(entry, protocol) for entry in value]
    if isinstance(value, str):
        if value.startswith("IMAGE "):
            return _picture(value)
        return _FILLER.sub(
            lambda match: f"Words {match[2]}." + " and more" * min(int(match[1]) // 400, 40), value
        )
    return value


@cache
def _picture(name: str) -> str:
    return data_url(blocks(int(name.split()[1][:6], 16), 96, 64))


def _tool(name: Any, protocol: ProtocolName) -> Any:
    if not isinstance(name, str):
        return name
    schema = {"type": "object", "properties": {}}
    match protocol, name:
        case "responses", "web_search":
            return {"type": "web_search"}
        case "responses", "multi_agent_v1":
            inner = {"type": "function", "name": "spawn", "parameters": schema, "strict": False}
            return {"type": "namespace", "name": name, "description": "", "tools": [inner]}
        case "responses", _:
            return {"type": "function", "name": name, "parameters": schema, "strict": False}
        case "messages", _:
            return {"name": name, "description": "", "input_schema": schema}
    return {"type": "function", "function": {"name": name, "parameters": schema}}
