"""`Call` and `Answer`: a request of an agent and its reply, free of the protocol that carries them.

Protocols read a body into a `Call`, and write an `Answer` and its `Delta`s as their own replies and events.
Everything between sees these values only.
"""

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from mmrender.caching import cached_property
from mmrender.client.types import TopLogprobs, TurnFinishReason, Usage
from mmrender.gateway.digests import CallDigests, digest_of, message_digest
from mmrender.messages import Message

ProtocolName: TypeAlias = Literal["chat", "responses", "messages"]

ToolChoice: TypeAlias = Literal["auto", "none", "required"]

ID_LENGTH: Final = 24
"""Letters and digits of an id, without its protocol's prefix."""

Kind: TypeAlias = Literal["main", "subagent", "compaction", "side"]
"""Role of a conversation in its rollout: the agent itself, an agent that it started, a summary of its history
and the conversation that goes on from one, and other calls, such as titles and ratings."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a call, as far as its headers and metadata name it.

    Attributes:
        thread: Conversation within the session, in the harness's own name.
        agent: Name of the subagent, None for the main agent.
        parent_agent: Agent or thread that started it.
        kind: Kind of the call, if the harness names it.
        client: The caller's `user-agent`.
    """

    thread: str | None = None
    agent: str | None = None
    parent_agent: str | None = None
    kind: Kind | None = None
    client: str | None = None


@dataclass(frozen=True)
class Call:
    """One request of an agent.

    Attributes:
        protocol: The protocol that carried it.
        model: Model that the request names. The reply repeats it.
        messages: The conversation in canonical form. Text that changes with each request, such as
            billing lines of harnesses, is left out.
        tools: Tools in OpenAI's form, in the order of the request. None without tools.
        tool_choice: Whether the model may, must or must not call a tool.
        named_tools: Tools that the model may call, by name. Empty if it may call each that is offered.
        parallel_tool_calls: Whether one answer may have several calls.
        sampling_params: In vLLM's names, checked. `structured_outputs` holds the form of the answer.
        template_arguments: Template variables that the caller names itself.
        thinking: Whether the caller turns reasoning on or off. It becomes the template variable
            `enable_thinking` if the template reads one. None if the caller leaves it open.
        stream: Whether the reply is a stream of events.
        n: Number of answers.
        logprobs: Number of alternatives to report for each token. None reports no log-probabilities.
        with_usage: Whether a stream ends with token counts.
        previous: Id of the response whose conversation the messages go on with, or None if they are all.
        instructions: Text that the protocol keeps apart from the messages. It is their first one, or the
            first one of the conversation of `previous`.
        notes: Accepted fields without effect on this answer, such as `reasoning.effort`.
        origin: Its source.
        idempotency_key: Key by which the caller marks retries, or None.
    """

    protocol: ProtocolName
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    tool_choice: ToolChoice = "auto"
    named_tools: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    stream: bool = False
    n: int = 1
    logprobs: int | None = None
    with_usage: bool = False
    previous: str | None = None
    instructions: str | None = None
    notes: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)
    idempotency_key: str | None = None

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...] | None:
        """Tools that the model may call, or None. The prompt has all, so that it continues earlier turns."""
        return None if self.tool_choice == "none" else self.tools or None

    @cached_property
    def digests(self) -> CallDigests:
        """Its digests. Large pictures take a while the first time, so this takes a thread.

        Raises:
            InputError: A picture has no text or bytes as its source, or a value is nested too deeply.
        """
        messages = [message_digest(message, position) for position, message in enumerate(self.messages)]
        answers = [message for message in self.messages if message.role == "assistant"]
        tools = sys.intern(digest_of(self.tools or ()))  # equal digests of all steps are one object
        request = (
            (self.protocol, self.model, self.origin.thread, self.origin.agent),
            (messages, answers, tools),  # a repetition has equal ids and blanks, too
            (self.tool_choice, self.named_tools, self.parallel_tool_calls),
            (self.sampling_params, self.template_arguments, self.thinking, self.n, self.logprobs),
            (self.previous, self.instructions),
        )
        instructions = sys.intern(digest_of(self.instructions)) if self.instructions else ""
        return CallDigests(bytes.fromhex(digest_of(request)), tools, tuple(messages), instructions)


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """One call of a tool in an answer.

    Attributes:
        id: Unique id, which finds the step when the agent repeats it.
        name: Name of the tool.
        arguments: Arguments as JSON text, or as the model wrote them if they are no JSON object.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer.

    Attributes:
        id: Unique id of 24 letters and digits, to which protocols add their prefixes.
        created: Unix time in seconds.
        step: Index of the step in the session's trajectory.
        reasoning: The reasoning, or None.
        content: The text.
        calls: Calls of tools, in order.
        finish_reason: Why sampling ended.
        stop: The stop string that was met, or None.
        usage: Token counts.
        token_ids: The sampled tokens.
        logprobs: One number for each of `token_ids`.
        top_logprobs: Alternatives of each token, if the call asks for them.
        token_texts: Text of each token in `token_ids` and `top_logprobs`, if the call asks for
            log-probabilities.
    """

    id: str
    created: int
    step: int
    reasoning: str | None
    content: str
    calls: tuple[AnswerCall, ...]
    finish_reason: TurnFinishReason
    stop: str | None
    usage: Usage
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: TopLogprobs | None = None
    token_texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of a streamed answer that is certain, sent before the answer is complete."""

    index: int
    field: Literal["reasoning", "content"]
    text: str


OnDelta: TypeAlias = Callable[[Delta], None]
"""Callback for text as it becomes certain. It runs on the event loop, so it must be quick."""


def new_id() -> str:
    """Return a unique id of letters and digits."""
    return secrets.token_hex(ID_LENGTH // 2)
