"""`RendererClient`: chat completions over whole conversations, whose sampled tokens are never re-tokenized.

A caller passes the whole conversation, as to any chat client. If it continues a step of its trajectory, the
prompt is bridged from that step's tokens. Otherwise it is rendered in full, and the turn says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias, Unpack, get_args
from weakref import WeakKeyDictionary

import msgspec

from mmrender.bridge.bridge import History
from mmrender.client.engine import Engine, bridge_turn
from mmrender.client.generation import render_prompt
from mmrender.client.resolve import BackendName
from mmrender.client.transport import Server
from mmrender.client.types import Generation, Prompt, RendererBackend, RequestOptions
from mmrender.content import normalize_messages
from mmrender.content.values import copy_containers
from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import PromptTooLongError, check_option
from mmrender.messages import Message
from mmrender.parsing import ToolCallAttempt
from mmrender.protocols import RendererProtocol
from mmrender.trajectory.conversation import is_unchanged, recorded_message, same_message
from mmrender.trajectory.step import Step, Tools, check_tools
from mmrender.trajectory.tree import Trajectory

Overlong: TypeAlias = Literal["error", "drop_oldest_turns", "stop"]
"""Policy for a prompt that is too long. `error` raises `PromptTooLongError`. `drop_oldest_turns` drops the
oldest whole turns with their images, and renders the rest, which begins a branch. `stop` returns a turn
without tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    Attributes:
        message: The assistant message, to be appended to the conversation. Calls without an id get one. It is
            empty if nothing was sampled.
        attempts: Every call that the model tried to make, including malformed ones, in order. Calls with
            status `ok` are in the message.
        finish_reason: `stop`, `length`, `tool_calls`, `abort`, or `prompt_too_long` if nothing was sampled.
        generation: Tokens, logprobs and other sampled data, or None if nothing was sampled.
        step: The appended step, or None without a trajectory.
        why_rendered: Why the prompt was rendered in full, or None if it was bridged or repeated.
        left_out: Sorted indices of dropped messages.
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
        return self.message.text


@dataclass(frozen=True, slots=True)
class _PromptPlan:
    """A prompt, and how it was made.

    Attributes:
        prompt: The prompt.
        parent: The step that it continues or repeats.
        why_rendered: Why it was rendered in full, or None.
        messages: The messages in the prompt.
        left_out: Indices of the caller's messages that are not in the prompt.
    """

    prompt: Prompt
    parent: Step | None
    why_rendered: str | None
    messages: Sequence[Message]
    left_out: frozenset[int]


@dataclass(frozen=True, slots=True)
class _History:
    """Conversation of a step including its turn, with images, its serialised form, and its sources."""

    messages: tuple[Message, ...]
    records: tuple[dict[str, Any], ...]
    left_out: frozenset[int]
    given: tuple[tuple[Any, Message], ...]


class RendererClient:
    """Samples turns of conversations, and keeps the sampled tokens in trajectories.

    One client serves many rollouts at once, in one event loop.

    Args:
        renderer: A renderer, or a pool of them.
        client: The server, as for `generate`, or an `InferenceEngineClient` over several. None for a backend
            in this process.
        model: Name under which the server knows the model.
        backend: The engine, or its name.
        sampling_params: For every call, in vLLM's names. A call's own take precedence.
        overlong: How to handle a prompt that is too long.
        history: Whether earlier turns may differ from a new rendering; see `Renderer.bridge_to_next_turn`.
        max_prompt_len: The longest prompt, by default the engine's limit.
        template_arguments: Further template variables.
        routed_experts: Ask for router choices.
        forbid_media_tokens: Never sample a token that stands for media; see `generate`.
        request_options: Options of every request. A call's own take precedence.

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
        check_option("overlong", overlong, get_args(Overlong))
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
        self._history_rule = history
        self._options: RequestOptions = {
            "routed_experts": routed_experts,
            "forbid_media_tokens": forbid_media_tokens,
            **(request_options or {}),
        }
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
            trajectory: Receives the turn, which may continue one of its steps.
            parent: The step to continue, by default the newest that fits.
            tools: Tools that the model is offered.
            sampling_params: Take precedence over the client's.
            **request_options: Options of this request.

        Raises:
            PromptTooLongError: The prompt is too long, and the policy is `error` or no turn is left to drop.
            MMRenderError: As for `generate` and `Renderer.render`.
        """
        conversation, given = self._read(trajectory, messages)
        definitions = None if tools is None else check_tools(tools, "tools")
        options: RequestOptions = {**self._options, **request_options}
        params = {**self.sampling_params, **(sampling_params or {})}
        plan = await self._plan(trajectory, conversation, tools, definitions, parent)
        while True:
            try:
                generation = await self.engine.turn(
                    plan.prompt,
                    params,
                    tools=tools,
                    template_arguments=self.template_arguments,
                    **options,
                )
                break
            except PromptTooLongError as error:
                if self.overlong == "error":
                    raise
                if self.overlong == "stop":
                    empty = Message(role="assistant", content="")
                    return Turn(empty, (), "prompt_too_long", left_out=tuple(sorted(plan.left_out)))
                plan = await self._shortened(conversation, tools, plan, error)
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
            why_rendered=plan.why_rendered,
            left_out=tuple(sorted(plan.left_out)),
        )
        if trajectory is None:
            return turn
        histories = self._histories.setdefault(trajectory, {})
        whole = (*plan.messages, message)
        # The parent's records are used again, so that each message is converted once.
        records = () if plan.parent is None else histories[plan.parent.index].records
        records = records[: len(plan.messages)]
        records = (*records, *map(recorded_message, whole[len(records) :]))
        extra: dict[str, Any] = {"why_rendered": plan.why_rendered}
        step = trajectory.append_turn(
            generation,
            parent=plan.parent,
            messages=records,
            # A bridged prompt contains its parent's definitions, whose keys may be in another order.
            tools=definitions if plan.parent is None else plan.parent.tools,
            extra=extra | ({"left_out": list(turn.left_out)} if turn.left_out else {}),
        )
        histories[step.index] = _History(whole, records, plan.left_out, given)
        return replace(turn, step=step)

    def forget(self, trajectory: Trajectory) -> None:
        """Drop the conversations of a trajectory with their images, after which it cannot be continued."""
        self._histories.pop(trajectory, None)

    def _read(
        self, trajectory: Trajectory | None, messages: Sequence[Any]
    ) -> tuple[Sequence[Message], tuple[tuple[Any, Message], ...]]:
        """Read a conversation. Also return what its messages were read from, with copies of dicts.

        Dicts that are as they were at the newest turn are not read again.
        """
        if trajectory is None or type(messages) is not list:
            return normalize_messages(messages), ()
        histories = self._histories.get(trajectory)
        known = histories[max(histories)].given if histories else ()
        items = messages.copy()
        for index, (item, (copy, message)) in enumerate(zip(messages, known, strict=False)):
            if type(item) is dict and is_unchanged(item, copy):
                items[index] = message
        conversation = normalize_messages(items)
        given: list[tuple[Any, Message]] = []
        for index, (item, message) in enumerate(zip(messages, conversation, strict=True)):
            if index < len(known) and known[index][1] is message:
                given.append(known[index])
            else:
                copy = copy_containers(item, f"messages[{index}]") if type(item) is dict else None
                given.append((copy, message))
        return conversation, tuple(given)

    async def _plan(
        self,
        trajectory: Trajectory | None,
        conversation: Sequence[Message],
        tools: Sequence[Any] | None,
        definitions: Tools | None,
        parent: Step | None,
    ) -> _PromptPlan:
        """Make the prompt of a conversation: bridged, repeated, or rendered."""
        histories = {} if trajectory is None else self._histories.get(trajectory, {})
        steps = () if trajectory is None else trajectory.steps
        reasons: list[str] = []
        for step in reversed(steps) if parent is None else (parent,):
            number, history = step.index, histories.get(step.index)
            if history is None:
                reasons.append(f"step {number} was not made by this client")
                continue
            left_out = history.left_out
            present = [each for index, each in enumerate(conversation) if index not in left_out]
            *asked, turn = history.messages
            start, rest = present[: len(asked)], present[len(asked) :]
            # Conversations differ towards their end, so a difference is found sooner from there.
            if len(start) < len(asked) or not all(map(same_message, reversed(start), reversed(asked))):
                continue
            if definitions != step.tools:
                reasons.append(f"step {number} had other tools")
            elif not rest:  # a further sample of the same prompt
                prompt = self.engine.prompt(step.prompt_ids, step.multi_modal_data)
                return _PromptPlan(prompt, step, None, present, left_out)
            elif not same_message(rest[0], turn):
                reasons.append(f"the conversation has another turn than step {number} sampled")
            elif len(rest) == 1:
                reasons.append(f"nothing follows the turn of step {number}")
            elif any(message.role == "assistant" for message in rest[1:]):
                reasons.append(f"a turn after step {number} was not sampled here")
            else:
                ids, count = step.token_ids, step.prompt_length
                bridged, why = await bridge_turn(
                    self.renderer,
                    ids[:count],
                    ids[count:],
                    rest[1:],
                    tools=tools,
                    previous_multi_modal_data=step.multi_modal_data,
                    previous_roles=[each.role for each in asked],
                    history=self._history_rule,
                    chat_template_kwargs=self.template_arguments,
                )
                if bridged is None:
                    return await self._render(present, tools, why, left_out)
                return _PromptPlan(self.engine.prompt(attribution=bridged), step, None, present, left_out)
        why = "the conversation continues no earlier step" if steps else "the conversation begins"
        return await self._render(conversation, tools, reasons[0] if reasons else why, frozenset())

    async def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, why: str, left_out: frozenset[int]
    ) -> _PromptPlan:
        """Render messages in full, off the event loop."""
        rendered = await render_prompt(
            self.renderer,
            messages,
            in_thread=True,
            tools=tools,
            chat_template_kwargs=self.template_arguments,
        )
        return _PromptPlan(self.engine.prompt(attribution=rendered), None, why, messages, left_out)

    async def _shortened(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Any] | None,
        plan: _PromptPlan,
        error: PromptTooLongError,
    ) -> _PromptPlan:
        """Drop the fewest oldest turns that make the prompt fit, or one more if the engine names no limit.

        Raises:
            PromptTooLongError: Even the last turn is too long.
        """
        limit, dropped = error.max_prompt_len, plan.left_out
        for unit in droppable_units(conversation):
            if dropped.issuperset(unit):
                continue
            dropped = dropped.union(unit)
            present = [message for index, message in enumerate(conversation) if index not in dropped]
            why = f"{len(dropped)} messages were left out to fit the engine"
            shorter = await self._render(present, tools, why, dropped)
            if limit is None or len(shorter.prompt.ids) <= limit:
                return shorter
        raise PromptTooLongError(
            error.prompt_len,
            limit,
            where="messages",
            remedy="No whole turn is left to leave out: shorten the last turn, or show smaller images",
        ) from error


def droppable_units(messages: Sequence[Message]) -> list[range]:
    """List the units of a conversation that may be dropped, oldest first.

    A unit is a user's turn with everything up to the next one, and in the last of these, an assistant's turn
    with the results of its calls. So a tool's result never lacks its call, and an image goes with its
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
