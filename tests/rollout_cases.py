"""What tests of rollouts share: an engine that says what it is told, and an environment that follows a script."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from kit import text
from mmrender.client.transport import NullTransport
from mmrender.client.types import EngineResponse, Usage
from mmrender.errors import EngineConnectionError, PromptTooLongError
from mmrender.rollout.environment import Observation

PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LOOK}]


def shown(number: int) -> dict[str, Any]:
    picture = Image.new("RGB", (64, 64), (number * 37 % 256, number * 91 % 256, 120))
    return {"type": "image", "image": picture}


def call(at: int) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>'


@dataclass
class ScriptedBackend:
    """Answers with what `say(request)` gives: text or token ids, an exception to raise, or None to hang.

    Text ends in a stop token unless it is cut off (`cut`), as by a length limit, or by a stop string
    (`stop_reason`). `streams` tells the tokens one by one.
    """

    renderer: Any
    say: Any
    cut: bool = False
    limit: int | None = None
    hidden_limit: int | None = None
    delays: Any = None
    stop_reason: str | None = None
    streams: bool = False
    requests: list[Any] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    name = "scripted"

    @property
    def transport(self):
        """Another each time, for limits are remembered by transport."""
        return NullTransport()

    async def generate(self, request, transport, *, on_tokens=None):
        self.requests.append(request)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            for _ in range(next(self.delays) if self.delays is not None else 0):
                await asyncio.sleep(0)
            response = await self._answered(request)
            for token, logprob in zip(response.completion_ids, response.logprobs, strict=True):
                if self.streams and on_tokens is not None:
                    on_tokens([token], [logprob], None)
            return response
        finally:
            self.busy -= 1

    async def _answered(self, request):
        if self.hidden_limit is not None and len(request.prompt_ids) > self.hidden_limit:
            raise EngineConnectionError("too long, says the engine")
        said = self.say(request)
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, BaseException):
            raise said
        stop = self.renderer.get_stop_token_ids()[0]
        ids = list(said) if not isinstance(said, str) else self.renderer.tokenizer.encode(said)
        if not self.cut and self.stop_reason is None:
            ids = [*ids, stop]
        room = request.sampling_params["max_tokens"]
        reason = "length" if self.cut or len(ids) > room else "stop"
        ids = ids[:room]
        logprobs = [-0.5 - 0.001 * (token % 100) for token in ids]
        usage = Usage(len(request.prompt_ids), len(ids))
        return EngineResponse(ids, logprobs, reason, usage, stop_reason=self.stop_reason)

    async def resolve_max_prompt_len(self, model, transport):
        return self.limit

    def is_overflow_error(self, exc):
        return isinstance(exc, PromptTooLongError) or "too long" in str(exc)


@dataclass
class ScriptedEnvironment:
    """Shows a picture and then answers each action with the next of `seen`; an exception is raised."""

    seen: list[Any]
    closed: int = 0
    actions: list[Any] = field(default_factory=list)
    tools = None

    def reset(self, prompt, extras):
        self.extras = extras
        opening = {"role": "user", "content": [shown(extras.get("picture", 0)), text("What is it?")]}
        return Observation([*prompt, opening])

    async def step(self, action):
        self.actions.append(action)
        await asyncio.sleep(0)
        following = self.seen[len(self.actions) - 1]
        if isinstance(following, BaseException):
            raise following
        return following

    def close(self):
        self.closed += 1


def asks(words: str, reward: float = 0.0, *, image: int | None = None, **options: Any) -> Observation:
    """A user's turn."""
    parts = [text(words)] if image is None else [shown(image), text(words)]
    return Observation([{"role": "user", "content": parts}], reward, **options)


def ends(reward: float = 1.0, **info: float) -> Observation:
    """The end."""
    return Observation((), reward, True, info=info)
