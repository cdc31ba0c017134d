"""Recorded conversations to training samples: token ids, loss mask, media and token types.

These are for conversations that exist as messages: fine-tuning data, or completions of a server that gave
text. What was sampled as tokens is trained on as those tokens and is never rendered again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.content import normalize_messages
from mmrender.errors import InputError, RenderError
from mmrender.messages import Role
from mmrender.protocols import RendererProtocol
from mmrender.samples.context import RenderingContext, common_prefix, complete_conversation
from mmrender.samples.supervision import (
    SAMPLED_ROLES,
    OnRewritten,
    Select,
    Supervision,
    rewritten_error,
    rewritten_turns,
)
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.tokens.token_types import mm_token_type_ids

IGNORE_INDEX = -100
"""The label that PyTorch's cross entropy leaves out."""


@dataclass(frozen=True)
class TrainingSample:
    """One conversation to train on.

    Attributes:
        token_ids: The whole conversation, placeholders widened.
        loss_mask: Which tokens to train on; bool of shape `(n,)`.
        multi_modal_data: Items, hashes and placeholder ranges.
        rewritten: Assistant messages that the template writes differently than a model would have, see
            `OnRewritten`, whether they are trained on or not.
        rendered: The same tokens with their attribution.
    """

    token_ids: list[int]
    loss_mask: npt.NDArray[np.bool_]
    multi_modal_data: MultiModalData
    rewritten: tuple[int, ...]
    rendered: RenderedTokens

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def mm_token_type_ids(self) -> npt.NDArray[np.integer]:
        """0 for text, 1 for an image's features, 2 for a video's; int64 of shape `(n,)`."""
        return mm_token_type_ids(self.multi_modal_data, len(self.token_ids))

    def labels(self, ignore_index: int = IGNORE_INDEX) -> npt.NDArray[np.int64]:
        """Token ids where trained on and `ignore_index` elsewhere; int64 of shape `(n,)`, not shifted."""
        return np.where(self.loss_mask, np.array(self.token_ids, np.int64), ignore_index)


@dataclass(frozen=True)
class TrajectoryStep:
    """One prompt with its completion, as the token block of a trajectory's step.

    Attributes:
        prompt_ids: What the model would be asked with.
        completion_ids: What follows: its turns, and the tool results and further turns between them.
        prompt_mask: Which tokens of the prompt to train on, which are none; bool of shape `(prompt,)`.
        completion_mask: Which tokens of the completion to train on; bool of shape `(completion,)`.
        multi_modal_data: Media of prompt and completion; ranges count from the prompt's first token.
        rewritten: Assistant messages, counted from the prompt's first message, that the template writes
            differently than a model would have, see `OnRewritten`.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    prompt_mask: npt.NDArray[np.bool_]
    completion_mask: npt.NDArray[np.bool_]
    multi_modal_data: MultiModalData
    rewritten: tuple[int, ...]

    @property
    def mm_token_type_ids(self) -> npt.NDArray[np.integer]:
        """Types of the tokens of prompt and completion; int64 of shape `(prompt + completion,)`."""
        return mm_token_type_ids(self.multi_modal_data, len(self.prompt_ids) + len(self.completion_ids))


def build_training_sample(
    renderer: RendererProtocol,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    roles: Collection[Role] = SAMPLED_ROLES,
    body_only_roles: Collection[Role] = (),
    select: Select | None = None,
    on_rewritten: OnRewritten = "error",
    final_stop: bool = True,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    **template_arguments: Any,
) -> TrainingSample:
    """Render a conversation and say which of its tokens to train on.

    Args:
        renderer: A renderer or a pool of them.
        messages: OpenAI or Hugging Face messages, or canonical ones.
        tools: Tool definitions.
        roles: Roles whose sampled tokens are trained on: `("assistant",)`, or none.
        body_only_roles: Roles of which only what the messages say is trained on, without scaffold and media,
            such as `("tool",)` to learn what tools answer.
        select: Messages that are trained on, by index (negative ones count from the end) or by a function of
            the canonical message. It only narrows, and changes no token.
        on_rewritten: What becomes of assistant turns that the template writes differently than a model would
            have, see `OnRewritten`.
        final_stop: Whether to end a last assistant turn that the template leaves open with the stop token
            that the model would sample there. In formats whose close is the next turn's opener, nothing else
            teaches the model to stop; it is the one token that a plain rendering does not have.
        images: Sources for the image parts that have none.
        videos: The same for video parts.
        **template_arguments: Further template variables.

    Raises:
        InputError: A role, an index, a policy or a message is not one.
        MediaError: An image is not at hand, or cannot be loaded or processed.
        RenderError: A turn that was asked for is rewritten, and the policy is `"error"`; or it cannot be told
            which token ends the last turn.
        TemplateError: The template refuses or fails.
    """
    conversation = complete_conversation(messages, images, videos)
    wanted = Supervision.of(conversation, roles, body_only_roles, select, on_rewritten)
    context = RenderingContext(renderer, tools, template_arguments)
    rendered = context.render(conversation, final_stop=final_stop)
    return TrainingSample(
        token_ids=rendered.token_ids,
        loss_mask=wanted.mask(rendered, context.turns),
        multi_modal_data=rendered.multi_modal_data,
        rewritten=tuple(rewritten_turns(rendered, conversation)),
        rendered=rendered,
    )


def build_trajectory_step(
    renderer: RendererProtocol,
    prompt_messages: Sequence[Any],
    completion_messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    on_rewritten: OnRewritten = "error",
    final_stop: bool = True,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    **template_arguments: Any,
) -> TrajectoryStep:
    """Render a prompt, and a completion as what the whole conversation has beyond it.

    The completion may run over several turns; its mask marks what the model samples, which excludes tool
    results and user turns between them.

    Args:
        renderer: A renderer or a pool of them.
        prompt_messages: What the model is asked with.
        completion_messages: What follows, beginning with an assistant message.
        tools: Tool definitions.
        on_rewritten: What becomes of it where the prompt is not the beginning of the whole, or where a later
            turn of the completion is rewritten. But for `"error"`, the prompt then ends where they depart.
        final_stop: As for `build_training_sample`.
        images: Sources for the image parts that have none, prompt and completion together.
        videos: The same for video parts.
        **template_arguments: Further template variables.

    Raises:
        InputError: A message or the policy is not one, or the completion does not begin with an assistant
            message.
        MediaError: An image is not at hand, or cannot be loaded or processed.
        RenderError: As for `build_training_sample`.
        TemplateError: The template refuses or fails.
    """
    prompt = normalize_messages(prompt_messages, where="prompt_messages")
    completion = normalize_messages(completion_messages, where="completion_messages")
    if completion[0].role != "assistant":
        raise InputError(
            "the completion does not begin with the model's turn",
            where="completion_messages[0].role",
            expected="'assistant'",
            got=repr(completion[0].role),
            remedy="Put it into prompt_messages",
        )
    conversation = complete_conversation([*prompt, *completion], images, videos)
    later = range(len(prompt), len(conversation))
    wanted = Supervision.of(conversation, SAMPLED_ROLES, (), later, on_rewritten)
    context = RenderingContext(renderer, tools, template_arguments)
    asked = context.render(conversation[: len(prompt)], add_generation_prompt=True).token_ids
    whole = context.render(conversation, final_stop=final_stop)
    split = common_prefix(asked, whole.token_ids)
    if split < len(asked) and on_rewritten == "error":
        raise _departure(renderer, asked, whole.token_ids, split, len(prompt))
    mask = wanted.mask(whole, context.turns)
    return TrajectoryStep(
        prompt_ids=whole.token_ids[:split],
        completion_ids=whole.token_ids[split:],
        prompt_mask=mask[:split],
        completion_mask=mask[split:],
        multi_modal_data=whole.multi_modal_data,
        rewritten=tuple(rewritten_turns(whole, conversation)),
    )


def _departure(
    renderer: RendererProtocol, asked: Sequence[int], whole: Sequence[int], split: int, message: int
) -> RenderError:
    """The error for a prompt that is not the beginning of the whole."""
    error = rewritten_error(message, f"the prompt for this turn departs from the whole at token {split}")
    error.expected = repr(renderer.decode(asked[split : split + 16]))
    error.got = repr(renderer.decode(whole[split : split + 16]))
    return error
