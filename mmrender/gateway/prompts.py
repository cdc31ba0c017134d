"""The prompt of a call: recorded turns of its conversation, and bridges over the messages between them.

Tokens that were sampled, here or on another branch of the session, go into the prompt as they are. A turn
that was not sampled here takes the tokens that the template writes for it. The whole conversation is rendered
only if it has no recorded turn, or if a bridge is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mmrender.client.engine import Engine, bridge_turn
from mmrender.client.generation import render_prompt
from mmrender.client.types import Prompt
from mmrender.errors import InputError
from mmrender.gateway.call import Call
from mmrender.gateway.forms import WrittenMessages, written_for
from mmrender.gateway.matching import Place
from mmrender.messages import Message, Role
from mmrender.protocols import RendererProtocol
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.conversation import recorded_message
from mmrender.trajectory.step import Step, Tools, check_tools

Made: TypeAlias = Literal["rendered", "bridged", "repeated", "joined"]
"""How a prompt was made. `rendered`: by the template, in full. `bridged`: a recorded turn, and the messages
after it. `repeated`: the prompt of an earlier step. `joined`: several turns, with bridges between them."""


@dataclass(frozen=True, slots=True)
class CallPrompt:
    """A prompt, and how it was made.

    Attributes:
        prompt: The tokens with their sidecar.
        made: How it was made.
        parent: The step that it continues or repeats, None for a root.
        tools: Definitions of the tools, as they are in the prompt.
        records: The messages of the prompt, without pixels.
        why: Why it does not simply continue a turn, or None.
        notes: Messages that are rendered in another form, in words.
    """

    prompt: Prompt
    made: Made
    parent: Step | None
    tools: Tools | None
    records: tuple[Any, ...]
    why: str | None
    notes: tuple[str, ...] = ()


async def make_prompt(  # noqa: PLR0917 - all parts of one call
    engine: Engine,
    renderer: RendererProtocol,
    steps: Sequence[Step],
    place: Place,
    call: Call,
    template_arguments: Mapping[str, Any],
    sampled_ids: Mapping[str, str],
) -> CallPrompt:
    """Make the prompt of a call.

    Args:
        engine: The model.
        renderer: Its renderer.
        steps: The recorded steps.
        place: Place of the call among them.
        call: The call.
        template_arguments: Template variables in force.
        sampled_ids: As for `Index`.

    Raises:
        MMRenderError: The conversation cannot be rendered.
    """
    if place.sibling is not None:
        step = steps[place.sibling]
        prompt = engine.prompt(step.prompt_ids, step.multi_modal_data)
        return CallPrompt(prompt, "repeated", step, step.tools, tuple(step.messages[:-1]), place.why)
    parent = None if place.parent is None else steps[place.parent]
    # A bridged prompt contains its parent's definitions, whose keys may be in another order.
    tools = check_tools(call.tools or None, "tools") if parent is None else parent.tools
    earlier = () if parent is None or call.previous is None else parent.messages
    written = await written_for(
        renderer, call.messages, tools, template_arguments, sampled_ids, is_whole=not earlier
    )
    roles: list[Role] = [message["role"] for message in earlier]
    conversation = _Conversation(renderer, call.messages, written, tools, template_arguments, roles)
    why = place.why
    if parent is not None or place.borrowed:
        try:
            rendered = await conversation.joined(steps, parent, place)
        except _NotJoined as refusal:
            why = str(refusal)
            if earlier:
                raise InputError(
                    f"the conversation cannot go on from this response: {why}",
                    where="previous_response_id",
                    remedy="Send all of it in input",
                ) from refusal
        else:
            is_bridged = all(message.role != "assistant" for message in call.messages[place.start :])
            return CallPrompt(
                engine.prompt(attribution=rendered),
                "bridged" if is_bridged else "joined",
                parent,
                tools,
                (*(parent.messages if parent else ()), *map(recorded_message, written.part(place.start))),
                why,
                written.notes_from(place.start),
            )
    rendered = await conversation.render(written.part(0))
    records = tuple(map(recorded_message, written.part(0)))
    prompt = engine.prompt(attribution=rendered)
    return CallPrompt(prompt, "rendered", None, tools, records, why, written.notes_from(0))


class _NotJoined(Exception):  # noqa: N818 - a result, not an error
    """A prompt cannot be put together from turns and bridges, for this reason."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The tokens of a turn and of its prompt, with the prompt's sidecar."""

    prompt_ids: list[int]
    completion_ids: list[int]
    data: MultiModalData


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a call, and everything else that their rendering depends on."""

    renderer: RendererProtocol
    messages: Sequence[Message]
    written: WrittenMessages
    tools: Tools | None
    template_arguments: Mapping[str, Any]
    earlier_roles: Sequence[Role]
    """Roles of the messages before `messages`, if these are not all."""

    async def render(self, messages: Sequence[Message], *, is_prompt: bool = True) -> RenderedTokens:
        """Render messages in full, with the generation prompt unless they are history."""
        return await render_prompt(
            self.renderer,
            messages,
            in_thread=True,
            tools=self.tools,
            add_generation_prompt=is_prompt,
            chat_template_kwargs=self.template_arguments,
        )

    async def joined(self, steps: Sequence[Step], parent: Step | None, place: Place) -> RenderedTokens:
        """Put the prompt together from turns and bridges.

        Raises:
            _NotJoined: A bridge is refused, or the template does not write a turn as it is sampled.
        """
        turn = None
        if parent is not None:
            ids = parent.prompt_ids.tolist(), parent.completion_ids.tolist()
            turn = _Turn(*ids, parent.multi_modal_data)
        start = place.start
        answers = [
            index for index in range(start, len(self.messages)) if self.messages[index].role == "assistant"
        ]
        unknown = [index for index in answers if index not in place.borrowed]
        history = None
        if unknown and self.earlier_roles:
            raise _NotJoined(f"messages[{unknown[0]}] was not sampled here")
        if unknown:
            history = await self.render(self.written.part(0, unknown[-1] + 1), is_prompt=False)
        for answer in answers:
            prompt = await self._prompt_after(turn, start, answer)
            if history is not None and answer in unknown:
                completion = _completion_of(history, len(self.written.part(0, answer)), answer)
            else:
                completion = steps[place.borrowed[answer]].completion_ids.tolist()
            turn = _Turn(prompt.token_ids, completion, prompt.multi_modal_data)
            start = answer + 1
        return await self._prompt_after(turn, start, len(self.messages))

    async def _prompt_after(self, turn: _Turn | None, start: int, stop: int) -> RenderedTokens:
        """Append the messages `[start, stop)` to a turn, or render them as the beginning."""
        new_messages = self.written.part(start, stop)
        earlier_roles = [*self.earlier_roles, *(message.role for message in self.written.part(0, start))]
        if turn is None:
            if not new_messages:
                raise _NotJoined("the conversation begins with an answer")
            return await self.render(new_messages)
        bridged, why = await bridge_turn(
            self.renderer,
            turn.prompt_ids,
            turn.completion_ids,
            new_messages,
            tools=self.tools,
            previous_multi_modal_data=turn.data,
            previous_roles=earlier_roles[:-1],
            chat_template_kwargs=self.template_arguments,
        )
        if bridged is None:
            raise _NotJoined(why)
        return bridged


def _completion_of(history: RenderedTokens, message: int, answer: int) -> list[int]:
    """Return the tokens that a rendered conversation has for a turn, with its stop token."""
    spans = [span for span in history.spans if span.sampled and span.message == message]
    if not spans or message in history.rewritten or message in history.answer_only:
        raise _NotJoined(f"the template does not write messages[{answer}] as it would be sampled")
    return history.token_ids[spans[0].start : spans[-1].stop]
