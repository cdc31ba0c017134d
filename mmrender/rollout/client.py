"""`RendererClient`: chat completions over whole conversations, whose sampled tokens are never re-tokenized.

A caller passes the whole conversation, as to any chat client. Where it continues a step of its trajectory,
the prompt is bridged from that step's tokens; otherwise it is rendered in full, and the turn says why.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args
from weakref import WeakKeyDictionary

import msgspec

from mmrender.bridge.bridge import History
from mmrender.client.engine import Engine
from mmrender.client.generation import render_prompt
from mmrender.client.resolve import BackendName
from mmrender.client.transport import Server
from mmrender.client.types import Generation, RendererBackend
from mmrender.content import normalize_messages
from mmrender.content.messages import to_openai
from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import InputError, PromptTooLongError
from mmrender.messages import Message, Role, TextPart
from mmrender.parsing import ToolCallAttempt
from mmrender.protocols import BridgeOptions, RendererProtocol
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.conversation import same_message, without_sources
from mmrender.trajectory.step import Step, Tools, check_tools
from mmrender.trajectory.tree import Trajectory

Overlong: TypeAlias = Literal["error", "drop_oldest_turns", "stop"]
"""Policy for a prompt that is too long: `error` raises `PromptTooLongError`; `drop_oldest_turns` leaves
out the oldest whole turns with their images and renders the rest, which begins a branch; `stop` returns a
turn without tokens."""


class RequestOptions(TypedDict, total=False):
    """Options of single requests, as for `generate`."""

    cache_salt: str | None
    priority: int | None
    extra_headers: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    Attributes:
        message: The assistant message, to be appended to the conversation. Calls for which the format writes
            no id have one of ours. Empty where nothing was sampled.
        attempts: Every call that the model tried to make, malformed ones included, in order. Those with
            status `ok` are the message's calls.
        finish_reason: `stop`, `length`, `tool_calls` or `abort`; `prompt_too_long` where nothing was sampled.
        generation: Tokens, logprobs and what else was sampled; None where nothing was.
        step: The step that was appended; None without a trajectory.
        why_rendered: Why the prompt was rendered in full; None where it was bridged, or used again.
        left_out: Indices of the given messages that the prompt does not hold, rising.
    """

    message: Message
    attempts: tuple[ToolCallAttempt, ...] = ()
    finish_reason: str = "stop"
    generation: Generation | None = None
    step: Step | None = None
    why_rendered: str | None = None
    left_out: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The content as one text, without reasoning."""
        content = self.message.content
        if isinstance(content, tuple):
            return "".join(part.text for part in content if isinstance(part, TextPart))
        return content or ""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and how it was made.

    Attributes:
        rendered: The prompt; None where that of `parent` is sent again.
        parent: The step that it continues or repeats.
        why_rendered: Why it was rendered in full; None where it was not.
        messages: The part of the caller's conversation that the prompt holds.
        left_out: Indices of the caller's messages that it does not hold.
    """

    rendered: RenderedTokens | None
    parent: Step | None
    why_rendered: str | None
    messages: Sequence[Message]
    left_out: frozenset[int]


@dataclass(frozen=True, slots=True)
class _History:
    """The messages that led to a step, its own turn last, pictures included; and their plain records."""

    messages: tuple[Message, ...]
    records: tuple[dict[str, Any], ...]
    left_out: frozenset[int]


class RendererClient:
    """Samples turns of conversations, and keeps trajectories of what was sampled.

    One client serves many rollouts at once, in one event loop.

    Args:
        renderer: A renderer, or a pool of them.
        client: The server, as for `generate`, or an `InferenceEngineClient` over several; None for a backend
            in this process.
        model: Name under which the server knows the model.
        backend: The engine, or its name.
        sampling_params: For every call, in vLLM's names; a call's own take precedence.
        overlong: How to handle a prompt that is too long.
        history: Whether earlier turns may differ from what the template would write now; see
            `Renderer.bridge_to_next_turn`.
        max_prompt_len: The longest prompt; by default what the engine takes.
        template_arguments: Further template variables.
        routed_experts: Ask for router choices.
        forbid_media_tokens: Never sample a token that stands for media; see `generate`.
        request_options: Options of every request; a call's own take precedence.

    Raises:
        InputError: The policy or backend is unknown.
    """

    def __init__(
        self,
        renderer: RendererProtocol,
        client: Server | InferenceEngineClient | None = None,
        *,
        model: str = "",
        backend: RendererBackend | BackendName | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        overlong: Overlong = "error",
        history: History = "sampled",
        max_prompt_len: int | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        routed_experts: bool = False,
        forbid_media_tokens: bool = False,
        request_options: RequestOptions | None = None,
    ) -> None:
        if overlong not in (policies := get_args(Overlong)):
            raise InputError(
                "unknown policy", where="overlong", expected=", ".join(policies), got=repr(overlong)
            )
        self.renderer = renderer
        server = None if isinstance(client, InferenceEngineClient) else client
        self.engine = Engine(
            client.as_backend() if isinstance(client, InferenceEngineClient) else backend,
            server,
            model=model,
            renderer=renderer,
            max_prompt_len=max_prompt_len,
        )
        self.overlong = overlong
        self.sampling_params = dict(sampling_params or {})
        self.template_arguments = dict(template_arguments or {})
        self.routed_experts = routed_experts
        self.forbid_media_tokens = forbid_media_tokens
        self._history_rule = history
        self._options: RequestOptions = request_options or {}
        self._histories: WeakKeyDictionary[Trajectory, dict[int, _History]] = WeakKeyDictionary()

    async def create_completion(
        self,
        messages: Sequence[Any],
        *,
        trajectory: Trajectory | None = None,
        parent: Step | None = None,
        tools: Sequence[Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> Turn:
        """Sample the next turn of a conversation.

        A call that fails or is cancelled leaves the trajectory as it was.

        Args:
            messages: The whole conversation so far.
            trajectory: Where the turn is appended, and whose steps it may continue.
            parent: The one step to continue; None finds the newest that fits.
            tools: Tools that the model is offered.
            sampling_params: Take precedence over those of the client.
            **request_options: Options of this request.

        Raises:
            PromptTooLongError: The prompt is too long, and the policy is `error` or no turn is left to drop.
            MMRenderError: As for `generate` and `Renderer.render`.
        """
        conversation = normalize_messages(messages)
        definitions = check_tools(tools, "tools")
        options: RequestOptions = {**self._options, **request_options}
        params = {**self.sampling_params, **(sampling_params or {})}
        prompt = await self._prompt(trajectory, conversation, tools, definitions, parent)
        while True:
            again = prompt.parent if prompt.rendered is None else None
            try:
                generation = await self.engine.turn(
                    self.engine.prompt(attribution=prompt.rendered)
                    if again is None
                    else self.engine.prompt(again.prompt_ids, again.multi_modal_data),
                    params,
                    tools=tools,
                    template_arguments=self.template_arguments,
                    routed_experts=self.routed_experts,
                    forbid_media_tokens=self.forbid_media_tokens,
                    **options,
                )
                break
            except PromptTooLongError as error:
                if self.overlong == "error":
                    raise
                if self.overlong == "stop":
                    empty = Message(role="assistant", content="")
                    return Turn(empty, (), "prompt_too_long", left_out=tuple(sorted(prompt.left_out)))
                prompt = await self._shortened(conversation, tools, prompt, error)
        number = 0 if trajectory is None else len(trajectory)
        calls = tuple(
            call if call.id else msgspec.structs.replace(call, id=f"call_{number}_{index}")
            for index, call in enumerate(generation.message.tool_calls)
        )
        message = msgspec.structs.replace(generation.message, tool_calls=calls)
        turn = Turn(
            message,
            generation.parsed.tool_calls,
            generation.finish_reason,
            generation,
            why_rendered=prompt.why_rendered,
            left_out=tuple(sorted(prompt.left_out)),
        )
        if trajectory is None:
            return turn
        histories = self._histories.setdefault(trajectory, {})
        said = (*prompt.messages, message)
        # The parent's records are used again, so that each message is converted once.
        records = () if prompt.parent is None else histories[prompt.parent.index].records
        records = records[: len(prompt.messages)]
        records = (*records, *map(_record, said[len(records) :]))
        extra: dict[str, Any] = {"why_rendered": prompt.why_rendered}
        step = trajectory.append_turn(
            generation,
            parent=prompt.parent,
            messages=records,
            # A bridged prompt holds its parent's definitions, whose keys may come in another order.
            tools=definitions if prompt.parent is None else prompt.parent.tools,
            extra=extra | ({"left_out": list(turn.left_out)} if turn.left_out else {}),
        )
        histories[step.index] = _History(said, records, prompt.left_out)
        return replace(turn, step=step)

    def forget(self, trajectory: Trajectory) -> None:
        """Drop the conversations of a trajectory, images included; it can no longer be continued."""
        self._histories.pop(trajectory, None)

    async def _prompt(
        self,
        trajectory: Trajectory | None,
        conversation: Sequence[Message],
        tools: Sequence[Any] | None,
        definitions: Tools | None,
        parent: Step | None,
    ) -> _Prompt:
        """Make the prompt of a conversation: bridged, sent again, or rendered."""
        known = {} if trajectory is None else self._histories.get(trajectory, {})
        steps = () if trajectory is None else trajectory.steps
        reasons: list[str] = []
        for step in reversed(steps) if parent is None else (parent,):
            number, earlier = step.index, known.get(step.index)
            if earlier is None:
                reasons.append(f"step {number} was not made by this client")
                continue
            left_out = earlier.left_out
            present = [each for index, each in enumerate(conversation) if index not in left_out]
            *asked, turn = earlier.messages
            begins, rest = present[: len(asked)], present[len(asked) :]
            # Conversations part towards their end, so a difference is found sooner from there.
            if len(begins) < len(asked) or not all(map(same_message, reversed(begins), reversed(asked))):
                continue
            if definitions != step.tools:
                reasons.append(f"the tools differ from those of step {number}")
            elif not rest:  # a further sample of the same prompt
                return _Prompt(None, step, None, present, left_out)
            elif not same_message(rest[0], turn):
                reasons.append(f"the conversation has another turn than step {number} sampled")
            elif len(rest) == 1:
                reasons.append(f"nothing follows the turn of step {number}")
            elif any(message.role == "assistant" for message in rest[1:]):
                reasons.append(f"a turn after step {number} was not sampled here")
            else:
                roles = [message.role for message in asked]
                bridged, why = await self._bridged(step, rest[1:], tools, roles)
                if bridged is None:
                    return await self._rendered(present, tools, why, left_out)
                return _Prompt(bridged, step, None, present, left_out)
        why = "the conversation continues no earlier step" if steps else "the conversation begins"
        return await self._rendered(conversation, tools, reasons[0] if reasons else why, frozenset())

    async def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, why: str, left_out: frozenset[int]
    ) -> _Prompt:
        """Render messages in full, off the event loop."""
        rendered = await render_prompt(
            self.renderer,
            messages,
            in_thread=True,
            tools=tools,
            chat_template_kwargs=self.template_arguments,
        )
        return _Prompt(rendered, None, why, messages, left_out)

    async def _bridged(
        self, step: Step, new_messages: Sequence[Message], tools: Sequence[Any] | None, roles: Sequence[Role]
    ) -> tuple[RenderedTokens | None, str]:
        """Bridge from a step, off the event loop; beside it the renderer's reason where there is none."""
        renderer, ids = self.renderer, (step.prompt_ids.tolist(), step.completion_ids.tolist())
        options: BridgeOptions = {
            "tools": tools,
            "previous_multi_modal_data": step.multi_modal_data,
            "previous_roles": roles,
            "history": self._history_rule,
            "chat_template_kwargs": self.template_arguments,
        }

        def bridge() -> tuple[RenderedTokens | None, str | None]:
            # The reason is kept for the thread that bridged.
            return renderer.bridge_to_next_turn(*ids, new_messages, **options), renderer.why_not_bridged

        if hasattr(renderer, "abridge_to_next_turn"):
            bridged = await renderer.abridge_to_next_turn(*ids, new_messages, **options)
            why = self.renderer.why_not_bridged
        else:
            bridged, why = await asyncio.to_thread(bridge)
        return bridged, why or "the renderer gave no reason"

    async def _shortened(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Any] | None,
        prompt: _Prompt,
        error: PromptTooLongError,
    ) -> _Prompt:
        """Leave out as few of the oldest turns as make the prompt fit.

        Where the engine names no limit, one more turn is left out.

        Raises:
            PromptTooLongError: Even the last turn is too long.
        """
        limit, dropped = error.max_prompt_len, prompt.left_out
        for unit in droppable_units(conversation):
            if dropped.issuperset(unit):
                continue
            dropped = dropped.union(unit)
            present = [message for index, message in enumerate(conversation) if index not in dropped]
            why = f"{len(dropped)} messages were left out to fit the engine"
            shorter = await self._rendered(present, tools, why, dropped)
            if limit is None or shorter.rendered is None or len(shorter.rendered) <= limit:
                return shorter
        raise PromptTooLongError(
            error.prompt_len,
            limit,
            where="messages",
            remedy="No whole turn is left to leave out: shorten the last turn, or show smaller images",
        ) from error


def droppable_units(messages: Sequence[Message]) -> list[range]:
    """List the units of a conversation that may be left out, oldest first.

    A unit is a user's turn with everything up to the next one, and within the last of these an assistant's
    turn with the results of its calls. So a tool's result never lacks its call, and an image goes with its
    message. Messages before the first user's turn stay, and so does the last user's turn with the last
    assistant's turn after it.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    # Several user messages in a row are one turn, and so is one that answers an assistant's calls.
    opens = [index for index in starts if index == 0 or messages[index - 1].role not in ("user", "tool")]
    if not opens:
        return []
    units = [range(start, stop) for start, stop in pairwise(opens)]
    answers = [index for index in range(opens[-1], len(messages)) if messages[index].role == "assistant"]
    return units + [range(start, stop) for start, stop in pairwise(answers)]


def _record(message: Message) -> dict[str, Any]:
    """Return a message as plain data, without pixels: the trajectory's items hold these."""
    return to_openai(without_sources(message))
