"""What tests of the gateway share: sessions whose model says what it is told, and agents that repeat it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrender.client.engine import Engine
from mmrender.content import normalize_messages
from mmrender.gateway.call import Answer, Call
from mmrender.gateway.matching import Index
from mmrender.gateway.turn import take_turn
from mmrender.trajectory.step import Step
from mmrender.trajectory.tree import Trajectory
from rollout_cases import TOOLS, ScriptedBackend

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]


def said(answer: Answer, **changes: Any) -> dict[str, Any]:
    """The message with which an agent repeats an answer, with other members if it changes them."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    message = {"role": "assistant", "content": answer.content or None}
    return {**message, **({"tool_calls": calls} if calls else {}), **changes}


def results(answer: Answer, *contents: Any) -> list[dict[str, Any]]:
    """The results of an answer's calls."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(answer.calls, contents, strict=True)
    ]


@dataclass
class Recording:
    """One session over a scripted engine, which checks each step against the engine's own view of it.

    `say(request)` is as for `ScriptedBackend`.
    """

    renderer: Any
    say: Any
    strict: bool = False
    trajectory: Trajectory = field(default_factory=Trajectory)
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    cut: bool = False

    def __post_init__(self) -> None:
        self.backend = ScriptedBackend(self.renderer, self.say, limit=self.limit, cut=self.cut)
        self.engine = Engine(self.backend, renderer=self.renderer)
        self.index = Index(strict=self.strict)

    async def ask(self, messages: Any, *, tools: Any = TOOLS, **fields: Any) -> tuple[Step, Answer]:
        """Answer the call with these messages and other fields."""
        fields = {"protocol": "chat", "model": "m", "tools": tools and tuple(tools), **fields}
        return await self.take(Call(messages=normalize_messages(messages), **fields))

    async def take(self, call: Call) -> tuple[Step, Answer]:
        """Answer one call. Its ids must be the engine's."""
        step, answer = await take_turn(self.engine, self.trajectory, self.index, call, **self.options)
        sent = self.backend.requests[-1]
        assert step.prompt_ids.tolist() == list(sent.prompt_ids)
        assert step.completion_ids.tolist() == list(answer.token_ids)
        assert step is self.trajectory.steps[answer.step]
        assert [span.item.identity for span in step.media] == [
            name for names in sent.multi_modal_data.mm_hashes.values() for name in names
        ]
        return step, answer


def gateway(step: Step) -> dict[str, Any]:
    """The gateway's record of a step."""
    record: dict[str, Any] = step.extra["gateway"]
    return record


def reordered(arguments: str) -> str:
    """Arguments with their keys in the other order, and other blanks."""
    return json.dumps(dict(reversed(json.loads(arguments).items())), indent=1)
