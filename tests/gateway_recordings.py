"""Recorded runs of real agents, replayed: the model says what the script said, and ids are those of the replay.

A recording holds the requests of one run and the scripted replies that the agent got.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_cases import recorded
from gateway_cases import Recording
from mmrender.gateway.call import Answer, Call, ProtocolName
from mmrender.messages import Message, ToolCall
from mmrender.trajectory.step import Step


@dataclass(frozen=True)
class Said:
    """A scripted reply. Calls are `(id, name, arguments as text)`. `raw` is the whole reply as the model wrote it."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str, str], ...]
    raw: str | None = None

    @property
    def sound_calls(self) -> list[tuple[str, str, str]]:
        """The calls whose arguments are an object, or empty."""
        return [call for call in self.calls if _is_object(call[2] or "{}")]

    def text(self) -> str:
        """The reply as Qwen3-VL writes it, arguments as the script spelled them."""
        if self.raw is not None:
            return self.raw
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments or "{}"}}}\n</tool_call>'
            for _, name, arguments in self.calls
        ]
        return "\n".join([*([self.content] if self.content else []), *calls])

    def token_ids(self, renderer: Any) -> list[int]:
        """The reply as the model's own template writes it, without calls that cannot be read."""
        calls = tuple(ToolCall(name, json.loads(text or "{}"), made) for made, name, text in self.sound_calls)
        reasoning = self.reasoning or "Hm."
        message = Message(
            role="assistant", content=self.content, reasoning_content=reasoning, tool_calls=calls
        )
        tools = [{"type": "function", "function": {"name": call.name}} for call in calls]
        rendered = renderer.render([Message(role="user", content="x"), message], tools=tools or None)
        marked = zip(rendered.token_ids, rendered.sampled_mask.tolist(), strict=True)
        ids = [token for token, is_sampled in marked if is_sampled]
        while ids and ids[-1] in renderer.get_stop_token_ids():
            ids.pop()
        return ids


@dataclass
class Replay:
    """One recording, replayed on a session of its own."""

    path: Path
    renderer: Any
    is_spelled: bool
    taken: list[tuple[Call, Step, Answer]] = field(default_factory=list)
    ids: dict[str, dict[str, str]] = field(default_factory=dict)

    async def run(self) -> Recording:
        """Answer all calls that the script answered, in order."""
        said: list[Said] = []

        def say(request: Any) -> Any:
            return said[-1].text() if self.is_spelled else said[-1].token_ids(self.renderer)

        session = Recording(self.renderer, say)
        for _, protocol, body, headers, reply in recorded(self.path):
            if reply is None:
                continue
            call = protocol.read(self._with_own_ids(body), headers)
            said.append(_read_reply(reply, protocol.name))
            step, answer = await session.take(call)
            made = zip(said[-1].sound_calls, answer.calls, strict=True)
            self._ids_for(body).update({scripted[0]: own.id for scripted, own in made})
            self.taken.append((call, step, answer))
        return session

    def _ids_for(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Ids of this run by the script's. The script uses an id once for each set of tools."""
        return self.ids.setdefault(json.dumps(body.get("tools")), {})

    def _with_own_ids(self, body: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: own for ids in self.ids.values() for name, own in ids.items()} | self._ids_for(body)
        text = json.dumps(body)
        if known:
            names = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
            text = re.sub(rf"(?<!\w)({names})(?!\w)", lambda match: known[match[0]], text)
        replaced: dict[str, Any] = json.loads(text)
        return replaced


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _read_reply(reply: Any, protocol: ProtocolName) -> Said:
    if isinstance(reply, dict) and "text" in reply:
        return Said("", reply["text"], tuple((made, "", "{}") for made in reply["calls"]), reply["text"])
    if protocol == "chat":
        made = [(call["id"], call["function"]) for call in reply.get("tool_calls") or ()]
        calls = [(name, function["name"], function["arguments"]) for name, function in made]
        return Said(reply.get("reasoning_content") or "", reply.get("content") or "", tuple(calls))
    reasoning, texts, calls = [], [], []
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
