"""Recorded runs of real agents, replayed in process: the model says what the script said."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gateway_cases import Recording
from mmrender.gateway.call import Answer, AnswerCall, Call, ProtocolName
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.testing.agents.player import Player
from mmrender.testing.agents.recordings import AgentAnswer, RecordedCall, records
from mmrender.testing.agents.replies import read_answer
from mmrender.trajectory.step import Step


def calls_of(path: Path) -> list[RecordedCall]:
    """The answered calls of a recording of the facts, whose replies are as the agents got them."""
    return [
        _recorded(path.stem, number, protocol, record)
        for number, protocol, record in records(path)
        if record["reply"] is not None
    ]


@dataclass
class Replay:
    """One recording, replayed on a session of its own."""

    calls: list[RecordedCall]
    renderer: Any
    taken: list[tuple[Call, Step, Answer]] = field(default_factory=list)

    async def run(self) -> Recording:
        """Answer all calls in order."""
        said: list[list[int]] = []
        session = Recording(self.renderer, lambda request: said[-1])
        player = Player()
        for recorded in self.calls:
            body, _ = player.body(recorded)
            protocol = PROTOCOLS[recorded.protocol]
            call = protocol.read(body, recorded.headers)
            said.append(recorded.completion_ids(self.renderer)[:-1])  # the backend adds a stop token
            step, answer = await session.take(call)
            if call.stream:
                events = protocol.events(call, [answer.id])
                reply = events.begin() + events.end([answer])
            else:
                reply = msgspec.json.encode(protocol.reply(call, [answer]))
            player.note(recorded, read_answer(recorded.protocol, reply, streamed=call.stream))
            self.taken.append((call, step, answer))
        return session


def _recorded(run: str, number: int, protocol: ProtocolName, record: dict[str, Any]) -> RecordedCall:
    answer, calls = _read_reply(record["reply"], protocol)
    texts = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in calls
    ]
    text = "\n".join([*([answer.content] if answer.content else []), *texts])
    return RecordedCall(
        f"{run}-{number}", protocol, record["path"], record["headers"], record["body"], answer, text
    )


def _read_reply(reply: Any, protocol: ProtocolName) -> tuple[AgentAnswer, list[AnswerCall]]:
    """Return the answer, and its calls with arguments as the model wrote them."""
    if protocol == "chat":
        reply = {"choices": [{"message": reply}]}
    elif protocol == "responses":
        reply = {"output": reply}
    else:
        reply = {"content": reply}
    answer = read_answer(protocol, json.dumps(reply).encode(), streamed=False)
    calls = list(answer.calls)
    if protocol == "messages":  # the recording has the text of the arguments, too
        raw = [block["_raw"] for block in reply["content"] if block["type"] == "tool_use"]
        calls = [replace(call, arguments=text) for call, text in zip(calls, raw, strict=True)]
    return answer, calls
