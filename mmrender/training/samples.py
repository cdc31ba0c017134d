"""Training samples from recorded conversations: fine-tuning data, or completions that came as text.

Sampled tokens are trained on as they are (`Trajectory.samples`) and never rendered again. The model samples
the assistant's turns, so each is trained on from the end of its generation prompt through its stop token. For
turns that the template writes differently than a model would have, the caller states a policy. Of a turn
without reasoning whose generation prompt opens it, the answer is trained on (`RenderedTokens.answer_only`),
and the sample says so. A sample always has a token to train on.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmrender.caching import cached_property
from mmrender.content import normalize_messages, normalize_tools
from mmrender.content.parts import attach_media
from mmrender.errors import InputError, MMRenderError, RenderError, check_number, check_option
from mmrender.messages import MODALITIES, ROLES, Message, Role
from mmrender.sidecar import common_prefix
from mmrender.tokens.rendered import RenderedTokens, TokenKind, TokenSpan
from mmrender.trajectory.sample import TrainingSample
from mmrender.turns.turns import turn_ends, turn_stop

if TYPE_CHECKING:
    from mmrender.protocols import RendererProtocol
    from mmrender.template.profile import TemplateProfile

OnRewritten: TypeAlias = Literal["error", "skip", "content"]
"""Policy for an assistant turn that does not begin with its generation prompt, and for a message whose text,
reasoning or calls the template drops: `error` names it, `skip` leaves it out, and `content` trains on the
text that the template writes, from its first difference from the generation prompt through its stop token."""

NamedMessages: TypeAlias = Literal[
    "last_assistant_message", "last_turn", "all_assistant_messages", "all_messages"
]
TrainOn: TypeAlias = NamedMessages | Collection[Role] | Callable[[Message], bool]
"""Messages to train on: by name, by role, or by a function of the message. `last_turn` means the assistant
messages after the last user message."""

Select: TypeAlias = Callable[[Message], bool] | Collection[int]
"""Messages to train on: by index (negative ones count from the end), or by a function of the message."""

_BODY_KINDS: Final = frozenset({"content", "reasoning", "tool_call", "extra"})
"""Kinds of tokens that carry a message's own text: neither its name, nor scaffold, nor media."""
_TOKEN_CHARACTERS: Final = 16
"""Length, in characters, up to which a text may lie within one token."""
_ANSWER_ONLY: Final = (
    "its generation prompt writes a reasoning block that this turn does not have: the answer alone is "
    "trained on. Add the turn's reasoning, or sample later with the prompt that writes an empty block "
    "(such as enable_thinking=False), if the template has one"
)
_NAMES: Final = {"content": "content", "reasoning": "reasoning", "tool_call": "tool calls"}


_MEDIA_AND_TOOLS: Final = ("tools", "images", "videos", "audio")
CONVERSATION_COLUMNS: Final = ("messages", "prompt", "completion", *_MEDIA_AND_TOOLS, "chat_template_kwargs")
"""Columns of a row of data that make its conversation. Each may be None."""


def row_sample(
    renderer: "RendererProtocol", row: Mapping[str, Any], options: Mapping[str, Any], where: str = ""
) -> TrainingSample:
    """Render a row of data: `messages`, or `prompt` and `completion`, of which the second is trained on.

    Args:
        renderer: As for `build_training_sample`, whose errors it raises.
        row: Values of `CONVERSATION_COLUMNS`, and `extra`. Its `chat_template_kwargs` set template variables
            alone, and go before values in `options`.
        options: Further arguments of `build_training_sample`.
        where: Path of the row in errors, and name of the sample.

    Raises:
        InputError: The row does not hold lists of messages, or holds them in both forms.
    """
    parts = [() if row.get(name) is None else row[name] for name in CONVERSATION_COLUMNS[:3]]
    is_listed = all(isinstance(part, Sequence | np.ndarray) and not isinstance(part, str) for part in parts)
    if not is_listed or bool(len(parts[0])) == bool(len(parts[1]) or len(parts[2])):
        raise InputError(
            "an example holds messages, or a prompt and a completion",
            where=where,
            expected="lists of messages",
            got=f"columns {', '.join(map(repr, row))}",
        )
    variables, passed = row.get("chat_template_kwargs") or {}, dict(options)
    passed |= {"completion_start": len(parts[1])} if len(parts[1]) else {}
    for name in (*_MEDIA_AND_TOOLS, "extra"):
        value = row.get(name)
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            passed[name] = value
    own = build_training_sample.__kwdefaults__ or {}
    passed = {name: value for name, value in passed.items() if name not in variables or name in own}
    passed["chat_template_kwargs"] = {**(passed.get("chat_template_kwargs") or {}), **variables}
    messages = [message for part in parts for message in part]
    try:
        return build_training_sample(renderer, messages, sample_id=where, **passed)
    except MMRenderError as error:
        if not where:
            raise
        named = copy(error)  # threads that wait for one image may be raised the same error
        named.where = where if error.where is None else f"{where}.{error.where}"
        raise named from error


def build_training_sample(
    renderer: "RendererProtocol",
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    train_on: TrainOn = "all_assistant_messages",
    select: Select | None = None,
    weights: Mapping[int, float] | None = None,
    completion_start: int | None = None,
    on_rewritten: OnRewritten = "error",
    final_stop: bool = True,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    audio: Sequence[Any] | None = None,
    sample_id: str = "",
    extra: Mapping[str, Any] | None = None,
    **template_arguments: Any,
) -> TrainingSample:
    """Render a conversation and mark which of its tokens to train on.

    Args:
        renderer: A renderer or a pool of them.
        messages: OpenAI or Hugging Face messages, or canonical ones.
        tools: Tool definitions.
        train_on: Messages to train on. Of assistant messages the sampled tokens are trained on, of all others
            their own text, without scaffold and media.
        select: Messages that may be trained on. It narrows `train_on` and changes no token.
        weights: Weight of the loss on each message, by index (negative ones count from the end), by default
            a message's own member `weight`, or 1.0. With 0 a message is not trained on.
        completion_start: Index of the assistant message that begins the completion, for a sample of one step:
            nothing before it is trained on, and the sample's `prompt_length` is the length of its prompt.
            Unless the policy is `"error"`, that is the length up to the first difference from the whole
            conversation. If only the answer of its first message is trained on, the completion begins there.
        on_rewritten: Policy for assistant turns that the template writes differently than a model would have.
        final_stop: Whether to end a last assistant turn that the template leaves open with the stop token
            that the model would sample there. In formats whose close is the next turn's opener, nothing
            else teaches the model to stop. It is the only token that a plain rendering does not have.
        images: Sources for the image parts without one.
        videos: As `images`.
        audio: As `images`. An array comes with its rate, as `(array, rate)`.
        sample_id: Names the sample in errors and batches.
        extra: Data of the caller's, such as a group id, which travels into the batch.
        **template_arguments: Further template variables, and `documents` of `Renderer.render`.

    Raises:
        InputError: An option or a weight is not valid, or no message is one to train on.
        MessageError: A message is malformed, or an image lacks a source.
        MediaError: An image cannot be loaded or processed.
        RenderError: A selected turn is rewritten, or a selected message not written, under the policy
            `"error"`; the token that ends the last turn cannot be determined; or no token is trained on.
        TemplateError: The template refuses or fails.
    """
    check_option("on_rewritten", on_rewritten, get_args(OnRewritten))
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in template_arguments:
            raise InputError("a training sample is a whole conversation, not a prompt", where=name)
    conversation = attach_media(normalize_messages(messages), images, videos, audio)
    chosen = _to_train_on(train_on, conversation) & _selected(select, conversation)
    weight_of = _weights(weights, conversation)
    builder = _Builder(renderer, tools, template_arguments)
    rendered, prompt_length = builder.render(conversation), None
    if final_stop and conversation[-1].role == "assistant":
        rendered = builder.closed(rendered, conversation)
    if completion_start is not None:
        at = conversation[completion_start].role if 0 < completion_start < len(conversation) else None
        if at != "assistant":
            raise InputError(
                "the completion does not begin with the model's turn",
                where="completion_start",
                expected="the index of an assistant message after the first message",
                got=f"{completion_start}" if at is None else f"{completion_start}, a {at} message",
            )
        chosen[:completion_start] = False
        prompt_ids = builder.render(conversation[:completion_start], add_generation_prompt=True).token_ids
        prompt_length = common_prefix(prompt_ids, rendered.token_ids)
        if completion_start in rendered.answer_only:
            prompt_length = builder.turn(rendered, completion_start).start
        elif prompt_length < len(prompt_ids) and on_rewritten == "error":
            problem = f"the prompt for this turn differs from the whole at token {prompt_length}"
            error = _rewritten_error(completion_start, problem)
            error.expected, error.got = (
                repr(renderer.decode(ids[prompt_length : prompt_length + 16]))
                for ids in (prompt_ids, rendered.token_ids)
            )
            raise error
    rewritten = _rewritten_turns(rendered, conversation)
    asked = [message for message in rewritten if chosen[message]]
    if asked and on_rewritten == "error":
        raise _rewritten_error(asked[0], rewritten[asked[0]])
    if on_rewritten == "skip":
        chosen[asked] = False
    whole = set(asked).intersection(rendered.rewritten) if on_rewritten == "content" else set[int]()
    mask = builder.trained(rendered, set(np.flatnonzero(chosen).tolist()), whole)
    loss_weights = np.where(mask, weight_of[rendered.message_indices], np.float32(0))
    if not loss_weights.any():
        raise RenderError(
            "no token of this conversation is trained on",
            where=sample_id or None,
            expected="a message to train on with text of its own and a weight above 0",
            got="; ".join(f"messages[{message}]: {rewritten[message]}" for message in asked)
            or f"{len(conversation)} messages, of which {np.count_nonzero(chosen)} are selected",
            remedy="Leave the conversation out, or change train_on, select, weights or on_rewritten",
        )
    rewritten = dict.fromkeys(rendered.answer_only, _ANSWER_ONLY) | rewritten
    return TrainingSample(
        token_ids=rendered.token_array,
        loss_mask=loss_weights > 0,
        loss_weights=loss_weights,
        multi_modal_data=rendered.multi_modal_data,
        tools=normalize_tools(tools),
        prompt_length=prompt_length,
        rewritten=dict(sorted(rewritten.items())),
        rendered=rendered,
        sample_id=sample_id,
        extra=dict(extra or {}),
    )


@dataclass(frozen=True)
class _Builder:
    """Renders conversations, and small probes, with the options of one call."""

    renderer: "RendererProtocol"
    tools: Sequence[Any] | None
    arguments: Mapping[str, Any]

    def render(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        try:
            return self.renderer.render(
                conversation, tools=self.tools, add_generation_prompt=add_generation_prompt, **self.arguments
            )
        except InputError as error:
            name = error.where
            if name is not None and name in self.arguments:
                mine = build_training_sample.__kwdefaults__ or {}
                if near := difflib.get_close_matches(name, mine, n=1):
                    error.remedy = f"Did you mean {near[0]!r}?"
            raise

    @cached_property
    def _profile(self) -> "TemplateProfile":
        # The template has no variable of its own for documents.
        variables = {name: value for name, value in self.arguments.items() if name != "documents"}
        return self.renderer.template_profile(has_tools=self.tools is not None, **variables)

    def closed(self, rendered: RenderedTokens, conversation: Sequence[Message]) -> RenderedTokens:
        """Return a conversation whose last turn, an assistant's, ends in the stop token that it may lack."""
        last, end = len(conversation) - 1, len(rendered)
        turn = self.turn(rendered, last)
        if turn.stop == 0 or rendered.token_ids[turn.stop - 1] in self._profile.stop_ids:
            return rendered
        stop = self._profile.openers.get("tool" if conversation[last].tool_calls else "user")
        if stop is None:
            raise RenderError(
                "the token that ends this turn cannot be determined",
                where=f"messages[{last}]",
                expected="a stop token in it, or right after it before the next message",
                remedy="Pass final_stop=False to leave the turn open",
            )
        span = TokenSpan(end, end + 1, last, "scaffold", last not in rendered.rewritten)
        return replace(rendered, token_ids=[*rendered.token_ids, stop], spans=(*rendered.spans, span))

    def turn(self, rendered: RenderedTokens, message: int) -> slice:
        """Return a turn's tokens, from where it leaves its generation prompt through its stop token."""
        spans = [span for span in rendered.spans if span.message == message]
        if not spans:
            return slice(0, 0)
        start = next((span.start for span in spans if span.sampled), None)
        if start is None:
            prompt, first = self._profile.generation_prompt, spans[0].start
            start = first
            while start < spans[-1].stop and prompt.startswith(
                self.renderer.decode(rendered.token_ids[first : start + 1])
            ):
                start += 1
        end = turn_ends(rendered.spans).get(message, start)
        return slice(start, turn_stop(rendered.token_ids, start, end, self._profile.stop_ids))

    def trained(
        self, rendered: RenderedTokens, messages: Collection[int], whole: Collection[int]
    ) -> npt.NDArray[np.bool_]:
        """Mark the sampled tokens of the assistant's messages, and the text of other messages, bool `(n,)`.

        Turns in `whole` are marked from the end of the generation prompt on.
        """
        mask = np.zeros(len(rendered), np.bool_)
        for span in rendered.spans:
            if span.message in messages:
                is_sampled = rendered.roles[span.message] == "assistant"
                mask[span.start : span.stop] = span.sampled if is_sampled else span.kind in _BODY_KINDS
        for message in whole:
            mask[self.turn(rendered, message)] = True
        for span in rendered.spans:
            if span.kind in MODALITIES:  # models do not sample images, even in the assistant's turn
                mask[span.start : span.stop] = False
        return mask


def _rewritten_turns(rendered: RenderedTokens, conversation: Sequence[Message]) -> dict[int, str]:
    """Return the messages that a model would have written differently or not at all, with reasons."""
    problems = dict.fromkeys(
        rendered.rewritten, "the template writes this turn differently than it asks the model for it"
    )
    printed = {(span.message, span.kind) for span in rendered.spans}
    ends: dict[int, TokenKind] = {}
    for span in rendered.spans:
        if span.sampled:
            ends[span.message] = span.kind
        # A stop token in the message's own text ends the turn, too; the text after it is in its place.
        elif span.kind in ("content", "reasoning") and ends.get(span.message, span.kind) not in _NAMES:
            problem = f"the template writes this message's {_NAMES[span.kind]} after the end of its turn"
            problems.setdefault(span.message, problem)
    for index, message in enumerate(conversation):
        if index in problems:
            continue
        texts: dict[TokenKind, str] = {
            "content": message.text,
            "reasoning": message.reasoning,
            "tool_call": message.tool_calls[0].name if message.tool_calls else "",
        }
        for kind, text in texts.items():
            # A token belongs to its first character, so a short text may lie in a token of scaffold.
            hidden = len(text.strip()) <= _TOKEN_CHARACTERS and text.strip() in rendered.text
            if (index, kind) not in printed and not hidden:
                problems[index] = f"the template drops this {message.role} message's {_NAMES[kind]}"
    return dict(sorted(problems.items()))


def _rewritten_error(message: int, problem: str) -> RenderError:
    return RenderError(
        problem,
        where=f"messages[{message}]",
        expected="the turn as the model writes it, after its generation prompt",
        remedy="Pass the template arguments that the turn was made with (such as enable_thinking=False), "
        "leave it out of select, or pass on_rewritten='skip' or 'content'",
    )


def _to_train_on(train_on: TrainOn, conversation: Sequence[Message]) -> npt.NDArray[np.bool_]:
    """Mark the messages that `train_on` selects, bool of shape `(messages,)`."""
    roles = [message.role for message in conversation]
    spoken = [index for index, role in enumerate(roles) if role == "assistant"]
    if callable(train_on):
        chosen = [index for index, message in enumerate(conversation) if train_on(message)]
    elif train_on == "all_assistant_messages":
        chosen = spoken
    elif train_on == "last_assistant_message":
        chosen = spoken[-1:]
    elif train_on == "last_turn":
        asked = max([index for index, role in enumerate(roles) if role == "user"], default=-1)
        chosen = [index for index in spoken if index > asked]
    elif train_on == "all_messages":
        chosen = list(range(len(roles)))
    elif not isinstance(train_on, str) and frozenset(train_on) <= frozenset(ROLES):
        chosen = [index for index, role in enumerate(roles) if role in train_on]
    else:
        named = ", ".join(map(repr, get_args(NamedMessages)))
        raise InputError(
            "unknown messages to train on",
            where="train_on",
            expected=f"{named}, a collection of {', '.join(map(repr, ROLES))}, or a function of a message",
            got=repr(train_on),
        )
    if not chosen:
        raise InputError(
            "this conversation has no message to train on",
            where="train_on",
            expected="a message that it selects" if callable(train_on) else f"messages of {train_on!r}",
            got=f"messages of {', '.join(dict.fromkeys(roles))}",
            remedy="Leave the conversation out, or pass another train_on",
        )
    return np.isin(np.arange(len(roles)), chosen)


def _selected(select: Select | None, conversation: Sequence[Message]) -> npt.NDArray[np.bool_]:
    """Mark the messages that may be trained on, bool of shape `(messages,)`."""
    count = len(conversation)
    if select is None:
        return np.ones(count, np.bool_)
    if callable(select):
        return np.array([bool(select(message)) for message in conversation], np.bool_)
    chosen = np.zeros(count, np.bool_)
    for index in select:
        remedy = "For a mask, pass [index for index, chosen in enumerate(mask) if chosen]"
        chosen[_index(index, count, "select", ", or a function of a message", remedy)] = True
    return chosen


def _weights(weights: Mapping[int, float] | None, conversation: Sequence[Message]) -> npt.NDArray[np.float32]:
    """Return the weight of each message, float32 of shape `(messages,)`."""
    values: dict[int, tuple[str, Any]] = {
        index: (f"messages[{index}].weight", message.extra["weight"])
        for index, message in enumerate(conversation)
        if message.extra.get("weight") is not None
    }
    for name, value in (weights or {}).items():
        index = _index(name, len(conversation), "weights")
        values[index % len(conversation)] = f"weights[{name}]", value
    weights_of = np.ones(len(conversation), np.float32)
    for index, (where, value) in values.items():
        check_number(where, value, minimum=0)
        weights_of[index] = value
    return weights_of


def _index(index: Any, count: int, where: str, alternative: str = "", remedy: str | None = None) -> int:
    """Return the index of a message, checked."""
    if isinstance(index, bool | np.bool_) or not -count <= index < count:
        expected = f"{-count} to {count - 1}{alternative}"
        problem = "there is no message with this index"
        raise InputError(problem, where=where, expected=expected, got=repr(index), remedy=remedy)
    return int(index)
