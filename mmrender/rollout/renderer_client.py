"""`RendererClient`: chat completions whose sampled tokens are never encoded again.

It is asked with whole conversations, as any chat client is. Where one goes on from a step of its trajectory,
the prompt is bridged from that step's tokens; where that cannot be, it is rendered in full, and the step says
why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from mmrender.bridge.bridge import History
from mmrender.client.backend import RendererBackend
from mmrender.client.backends import BackendName, resolve_backend
from mmrender.client.generate import generate
from mmrender.client.generation import Generation
from mmrender.content import normalize_messages, normalize_tools
from mmrender.errors import InputError, PromptTooLongError
from mmrender.messages import Message
from mmrender.protocols import TurnRenderer
from mmrender.rollout.choices import ChoiceWriter
from mmrender.rollout.conversations import Conversations, StartsAnew, recorded
from mmrender.rollout.environment import Action
from mmrender.rollout.prompting import Prompt, Prompter
from mmrender.rollout.shorten import shortened
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_step import Step

Overlong: TypeAlias = Literal["error", "drop_oldest_turns", "stop"]
"""What becomes of a prompt that is too long: `error` raises `PromptTooLongError`; `drop_oldest_turns` leaves
out the oldest whole turns, with their images, and renders the rest, which begins a branch; `stop` gives a
completion without tokens."""

_OVERLONG: Final = ("error", "drop_oldest_turns", "stop")


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn of the model.

    Attributes:
        finish_reason: `stop`, `length`, `tool_calls` or `abort`; `prompt_too_long` where nothing was sampled.
        message: The assistant message, to be appended to the conversation; None where nothing was sampled.
            Calls for which the format writes no id have one of ours.
        generation: Tokens, logprobs and what else was sampled; None where nothing was.
        step: The step that was appended; None without a trajectory.
        why_rendered: Why the prompt was rendered in full; None where it was bridged, or used again.
        left_out: Indices of the given messages that the prompt does not hold, rising.
    """

    finish_reason: str
    message: Message | None = None
    generation: Generation | None = None
    step: Step | None = None
    why_rendered: str | None = None
    left_out: tuple[int, ...] = ()

    @property
    def action(self) -> Action:
        """The turn as an environment sees it; an empty one where nothing was sampled."""
        if self.generation is None or self.message is None:
            return Action(Message(role="assistant", content=""), (), self.finish_reason)
        return Action(self.message, self.generation.tool_calls, self.finish_reason)


class RendererClient:
    """Samples turns of conversations, and keeps trajectories of what was sampled.

    One client serves many rollouts at once, in one event loop.

    Args:
        renderer: A renderer, or a pool of them.
        client: The server, as for `generate`; None for a model in this process.
        model: Name under which the server knows the model.
        backend: The engine, or its name.
        sampling_params: For every call, in vLLM's names; a call's own come over these.
        overlong: What becomes of a prompt that is too long.
        history: Whether earlier turns may differ from what the template would write now; see
            `Renderer.bridge_to_next_turn`.
        max_prompt_len: The longest prompt; by default what the engine takes.
        template_arguments: Further template variables.
        routed_experts: Ask for router choices.
        request_options: Further options of `generate`, such as `priority` and `extra_headers`.

    Raises:
        InputError: There is no such policy or backend.
    """

    def __init__(
        self,
        renderer: TurnRenderer,
        client: Any = None,
        *,
        model: str = "",
        backend: RendererBackend | BackendName | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        overlong: Overlong = "error",
        history: History = "sampled",
        max_prompt_len: int | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        routed_experts: bool = False,
        request_options: Mapping[str, Any] | None = None,
    ) -> None:
        if overlong not in _OVERLONG:
            raise InputError(
                "there is no such policy", where="overlong", expected=", ".join(_OVERLONG), got=repr(overlong)
            )
        self.renderer = renderer
        self.backend = resolve_backend(backend, None, model)
        self.overlong = overlong
        self.sampling_params = dict(sampling_params or {})
        self._prompter = Prompter(renderer, history, template_arguments)
        self._conversations = Conversations()
        self._choices = ChoiceWriter(renderer, self.backend.name, self._prompter.arguments)
        self._options: dict[str, Any] = {
            "client": client,
            "renderer": renderer,
            "model": model,
            "backend": self.backend,
            "max_prompt_len": max_prompt_len,
            "template_arguments": template_arguments,
            "routed_experts": routed_experts,
            **(request_options or {}),
        }

    async def create_completion(
        self,
        messages: Sequence[Any],
        *,
        trajectory: Trajectory | None = None,
        parent: Step | None = None,
        tools: Sequence[Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        choices: Sequence[Any] | None = None,
        **request_options: Any,
    ) -> Completion:
        """Sample the next turn of a conversation.

        A call that fails or is cancelled leaves the trajectory as it was.

        Args:
            messages: The whole conversation so far.
            trajectory: Where the turn is appended, and whose steps it may go on from.
            parent: The one step to go on from; None finds the newest that fits.
            tools: Tools that the model is offered.
            sampling_params: Over those of the client.
            choices: Assistant messages of which the turn shall be one.
            **request_options: Options of `generate` for this call, such as `cache_salt`.

        Raises:
            PromptTooLongError: The prompt is too long, and the policy is `error` or has nothing to leave out.
            MMRenderError: As for `generate` and `Renderer.render`.
        """
        conversation = normalize_messages(messages)
        definitions = normalize_tools(tools)
        place = self._conversations.place(trajectory, conversation, definitions, parent)
        left_out: frozenset[int] = frozenset() if isinstance(place, StartsAnew) else place.left_out
        prompt = await self._prompter.prompt(place, conversation, tools)
        given = {**self.sampling_params, **(sampling_params or {})}
        sampling = await self._choices.held_to(choices, tools, given)
        while True:
            try:
                generation = await self._sampled(prompt, tools, sampling, request_options)
                break
            except PromptTooLongError as error:
                if self.overlong == "stop":
                    return Completion("prompt_too_long", left_out=tuple(sorted(left_out)))
                if self.overlong == "error":
                    raise
                found = await shortened(self._prompter, conversation, tools, left_out, error)
            prompt, left_out = found.prompt, found.left_out
        present = [message for index, message in enumerate(conversation) if index not in left_out]
        turn = with_call_ids(generation.message, len(trajectory) if trajectory is not None else 0)
        step = None
        if trajectory is not None:
            step = _appended(trajectory, generation, [*present, turn], prompt.why_rendered, left_out)
            self._conversations.remember(
                trajectory, step, present, turn, tools=definitions, left_out=left_out
            )
        return Completion(
            generation.finish_reason, turn, generation, step, prompt.why_rendered, tuple(sorted(left_out))
        )

    def forget(self, trajectory: Trajectory) -> None:
        """Let go of the pictures of a trajectory's conversations; it cannot be gone on from after that."""
        self._conversations.forget(trajectory)

    async def _sampled(
        self,
        prompt: Prompt,
        tools: Sequence[Any] | None,
        sampling: Mapping[str, Any],
        request_options: Mapping[str, Any],
    ) -> Generation:
        return await generate(
            **{
                **self._options,
                **request_options,
                "prompt_ids": prompt.token_ids,
                "multi_modal_data": prompt.multi_modal_data,
                "prompt_attribution": prompt.attribution,
                "tools": tools,
                "sampling_params": sampling,
            }
        )


def with_call_ids(turn: Message, number: int) -> Message:
    """A turn of which every call has an id, so that results can name it; `number` is the step's."""
    calls = tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{number}_{index}")
        for index, call in enumerate(turn.tool_calls)
    )
    return msgspec.structs.replace(turn, tool_calls=calls)


def _appended(
    trajectory: Trajectory,
    generation: Generation,
    conversation: Sequence[Message],
    why_rendered: str | None,
    left_out: frozenset[int],
) -> Step:
    extra: dict[str, Any] = {"why_rendered": why_rendered}
    if left_out:
        extra["left_out"] = sorted(left_out)
    return trajectory.append(
        generation.prompt_ids,
        generation.completion_ids,
        logprobs=generation.logprobs,
        multi_modal_data=generation.multi_modal_data,
        messages=recorded(conversation),
        finish_reason=generation.finish_reason,
        routed_experts=generation.routed_experts,
        weight_versions=generation.weight_versions,
        extra=extra,
    )
