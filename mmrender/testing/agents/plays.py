"""Recordings played against a gateway over HTTP, and what the server behind it saw of them."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mmrender.errors import importing
from mmrender.gateway.call import AnswerCall
from mmrender.gateway.digests import folded
from mmrender.renderer import Renderer
from mmrender.sidecar import common_prefix
from mmrender.testing.agents.player import Player
from mmrender.testing.agents.recordings import AgentAnswer, RecordedCall
from mmrender.testing.agents.replies import read_answer
from mmrender.testing.agents.upstream import Exchange, Upstream

with importing("aiohttp", "client", "playing recordings"):
    import aiohttp

_SHOWN: Final = 12
"""Tokens around a break that are shown."""


@dataclass(frozen=True, slots=True)
class Break:
    """The place at which a prompt ceases to begin with the tokens before it.

    Attributes:
        at: Index of the first token that differs.
        of: Number of tokens that the prompt should begin with: the prompt and the answer of the call before.
        is_sampled: Whether that token was sampled, and not part of the earlier prompt.
        expected: Text of the tokens from there on.
        got: Text of the prompt from there on.
    """

    at: int
    of: int
    is_sampled: bool
    expected: str
    got: str


@dataclass(slots=True)
class PlayedCall:
    """One call of a recording, as it went.

    Attributes:
        name: The recording, and the number of the call.
        status: Status of the reply, or None if there was none.
        error: Why there is no answer, or None.
        repeats: Name of the call whose answer this one repeats last, or None for a new conversation.
        broken: The place at which its prompt breaks, or None.
        wrong: How the answer differs from the one that was sampled, or None.
        prompt_tokens: Tokens of its prompt at the server. 0 if the server saw none.
        completion_tokens: Tokens that were sampled.
    """

    name: str
    status: int | None = None
    error: str | None = None
    repeats: str | None = None
    broken: Break | None = None
    wrong: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def is_continued(self) -> bool:
        """Whether its prompt begins with all tokens of the call whose answer it repeats."""
        return self.repeats is not None and self.prompt_tokens > 0 and self.broken is None

    @property
    def is_good(self) -> bool:
        """Whether it was answered with the answer that was sampled, and its prompt did not break."""
        return self.error is None and self.broken is None and self.wrong is None


@dataclass(slots=True)
class PlayedRecording:
    """One recording, as it went.

    Attributes:
        name: Its name.
        calls: Its calls, in order.
        chained_tokens: Tokens of the training samples if calls that continue one another are one sample.
    """

    name: str
    calls: list[PlayedCall] = field(default_factory=list)
    chained_tokens: int = 0

    @property
    def separate_tokens(self) -> int:
        """Tokens of the training samples if each call is one."""
        return sum(call.prompt_tokens + call.completion_tokens for call in self.calls)

    @property
    def is_good(self) -> bool:
        """Whether all of its calls are good."""
        return all(call.is_good for call in self.calls)


class ScriptedUpstream(Upstream):
    """The server behind the gateway. It answers every prompt with the answer of the call that is played."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._ids: list[int] = []
        super().__init__(renderer, lambda prompt_ids: self._ids)

    def say(self, call: RecordedCall) -> None:
        """Answer prompts with the answer of a call from now on."""
        self._ids = call.completion_ids(self.renderer)


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a gateway: its status, and the answer or the reason why there is none."""

    status: int | None
    answer: AgentAnswer | None = None
    error: str | None = None


async def play(
    name: str,
    calls: Sequence[RecordedCall],
    upstream: ScriptedUpstream,
    send: Callable[[RecordedCall, dict[str, Any]], Awaitable[Reply]],
) -> PlayedRecording:
    """Play a recording.

    Args:
        name: Its name.
        calls: Its calls.
        upstream: The server behind the gateway.
        send: Sends the body of a call to the gateway.
    """
    player, played = Player(), PlayedRecording(name)
    seen: dict[str, Exchange] = {}
    continued: set[str] = set()
    for call in calls:
        body, before = player.body(call)
        result = PlayedCall(call.name, repeats=None if before is None else before.call.name)
        played.calls.append(result)
        upstream.say(call)
        count = len(upstream.exchanges)
        reply = await send(call, body)
        result.status, result.error = reply.status, reply.error
        if reply.answer is not None:
            player.note(call, reply.answer)
            result.wrong = _difference(call.answer, reply.answer)
        if len(upstream.exchanges) == count:
            continue
        exchange = seen[call.name] = upstream.exchanges[-1]
        result.prompt_tokens, result.completion_tokens = (
            len(each) for each in (exchange.prompt_ids, exchange.completion_ids)
        )
        if before is not None and before.call.name in seen:
            result.broken = _break(seen[before.call.name], exchange, upstream.renderer)
            if result.broken is None:
                continued.add(before.call.name)
    played.chained_tokens = sum(len(each.ids) for call, each in seen.items() if call not in continued)
    return played


def _break(before: Exchange, exchange: Exchange, renderer: Renderer) -> Break | None:
    """Return the place at which a prompt ceases to begin with an earlier exchange, or None."""
    expected, prompt = before.ids, exchange.prompt_ids
    at = common_prefix(expected, prompt)
    if at == len(expected):
        return None
    texts = (renderer.decode(ids[at : at + _SHOWN]) for ids in (expected, prompt))
    return Break(at, len(expected), at >= len(before.prompt_ids), *texts)


def _difference(sampled: AgentAnswer, answer: AgentAnswer) -> str | None:
    """Say how an answer differs from the sampled one. Blanks at the ends of its text do not count."""
    if folded(sampled.content) != folded(answer.content):
        return f"the text is {answer.content[:80]!r}, and {sampled.content[:80]!r} was sampled"
    expected, got = _values(sampled.calls), _values(answer.calls)
    return None if expected == got else f"the calls are {got}, and {expected} were sampled"


def _values(calls: Sequence[AnswerCall]) -> list[Any]:
    values = []
    for call in calls:
        try:
            values.append([call.name, json.loads(call.arguments)])
        except ValueError:
            values.append([call.name, call.arguments])
    return values


@dataclass(frozen=True, slots=True)
class HTTPSender:
    """Sends calls to a gateway.

    Attributes:
        client: The HTTP client.
        root: Root URL of a session, without `/v1`.
        key: API key of the session.
        model: Model that requests name, or None for the recorded names.
        seconds: Seconds to wait for a reply.
    """

    client: aiohttp.ClientSession
    root: str
    key: str
    model: str | None
    seconds: float

    async def __call__(self, call: RecordedCall, body: dict[str, Any]) -> Reply:
        """Send a call, and read its reply."""
        headers = {**call.headers, "authorization": f"Bearer {self.key}", "content-type": "application/json"}
        if call.protocol == "messages":
            headers["x-api-key"] = self.key
        if self.model is not None:
            body = {**body, "model": self.model}
        data, timeout = json.dumps(body).encode(), aiohttp.ClientTimeout(total=self.seconds)
        try:
            async with self.client.post(
                self.root + call.path, data=data, headers=headers, timeout=timeout
            ) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Reply(None, error=f"no reply: {type(error).__name__} {error}".rstrip())
        if reply.status != 200:
            return Reply(reply.status, error=content.decode("utf-8", "replace")[:300])
        try:
            answer = read_answer(call.protocol, content, streamed=bool(body.get("stream")))
        except ValueError as error:
            return Reply(reply.status, error=str(error))
        return Reply(reply.status, answer)
