"""Which tokens of a rendered conversation to train on.

The model samples the assistant's turns, so these are trained on from where their prompt ends through their
stop token. What becomes of a turn that the template writes differently than a model would have is a
policy that the caller states.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError, RenderError
from mmrender.messages import ROLES, Message, Role, TextPart, ThinkingPart
from mmrender.tokens.rendered import CONTENT_KINDS, RenderedTokens, TokenKind, TokenSpan

OnRewritten: TypeAlias = Literal["error", "skip", "content"]
"""What becomes of an assistant turn that does not begin with its generation prompt, or of which the template
drops the reasoning or the calls: `error` names it; `skip` trains on none of it; `content` trains on what the
template writes, from where that departs from the generation prompt through its stop token."""

Select: TypeAlias = Callable[[Message], bool] | Collection[int]

SAMPLED_ROLES: tuple[Role, ...] = ("assistant",)
"""Roles whose tokens a model samples."""
BODY_KINDS: frozenset[str] = frozenset({"content", "reasoning", "tool_call", "extra"})
"""What a message says; not its name, nor what the template writes around it, nor media."""
_TOKEN_CHARACTERS = 16
_NAMES: Mapping[str, str] = {"content": "content", "reasoning": "reasoning", "tool_call": "tool calls"}


@dataclass(frozen=True)
class Supervision:
    """What a caller wants trained on, checked.

    Attributes:
        conversation: The messages.
        roles: Roles whose sampled tokens are trained on.
        body_only_roles: Roles whose bodies are.
        on_rewritten: What becomes of turns that the template rewrites.
        chosen: For each message whether it takes part; bool of shape `(messages,)`.
    """

    conversation: Sequence[Message]
    roles: frozenset[Role]
    body_only_roles: frozenset[Role]
    on_rewritten: OnRewritten
    chosen: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        conversation: Sequence[Message],
        roles: Collection[Role],
        body_only_roles: Collection[Role],
        select: Select | None,
        on_rewritten: OnRewritten,
    ) -> "Supervision":
        """Check what the caller asked for.

        Raises:
            InputError: A role, an index or the policy is not one.
        """
        if on_rewritten not in get_args(OnRewritten):
            expected = "'error', 'skip' or 'content'"
            raise InputError(
                "unknown policy", where="on_rewritten", expected=expected, got=repr(on_rewritten)
            )
        sampled = _roles(roles, "roles")
        for role in sorted(sampled.difference(SAMPLED_ROLES)):
            raise InputError(
                f"no token of a {role} message is sampled",
                where="roles",
                expected="'assistant'",
                got=repr(role),
                remedy="Name it in body_only_roles to train on what such messages say",
            )
        bodies = _roles(body_only_roles, "body_only_roles")
        return cls(conversation, sampled, bodies, on_rewritten, _chosen(select, conversation))

    def mask(self, rendered: RenderedTokens, turns: "TurnFinder") -> npt.NDArray[np.bool_]:
        """Which tokens to train on; bool of shape `(n,)`.

        Raises:
            RenderError: A turn that is asked for is rewritten, and the policy is `"error"`.
        """
        rewritten = self._rewritten(rendered)
        if rewritten and self.on_rewritten == "error":
            message, problem = next(iter(rewritten.items()))
            raise rewritten_error(message, problem)
        left_out = rewritten if self.on_rewritten == "skip" else {}
        values = [self._wants(rendered, span, left_out) for span in rendered.spans]
        mask: npt.NDArray[np.bool_] = rendered._filled(values, np.bool_)
        if self.on_rewritten == "content":
            for message in rewritten.keys() & set(rendered.rewritten):
                mask[turns.departed(rendered, message)] = True
        # No model samples an image, also where the assistant's turn shows one.
        mask &= rendered._filled([span.kind not in ("image", "video") for span in rendered.spans], np.bool_)
        return mask

    def _wants(self, rendered: RenderedTokens, span: TokenSpan, left_out: Collection[int]) -> bool:
        if span.message < 0 or not self.chosen[span.message]:
            return False
        role = rendered.roles[span.message]
        if span.kind in BODY_KINDS and role in self.body_only_roles:
            return True
        return span.sampled and role in self.roles and span.message not in left_out

    def _rewritten(self, rendered: RenderedTokens) -> dict[int, str]:
        """The turns asked for that are not what the model samples, and what is wrong with each."""
        return {
            message: problem
            for message, problem in rewritten_turns(rendered, self.conversation).items()
            if self.chosen[message] and rendered.roles[message] in self.roles
        }


def rewritten_turns(rendered: RenderedTokens, conversation: Sequence[Message]) -> dict[int, str]:
    """Assistant messages whose tokens are not what a model would have sampled for them, and why, in order."""
    found = dict.fromkeys(
        rendered.rewritten, "the template writes this turn differently than it asks the model for it"
    )
    printed = {(span.message, span.kind) for span in rendered.spans}
    for index, message in enumerate(conversation):
        if message.role == "assistant" and index not in found:
            for kind, text in _said(message):
                if (index, kind) not in printed and not _may_hide(text, rendered):
                    found[index] = f"the template drops this turn's {_NAMES[kind]}"
    return dict(sorted(found.items()))


def _said(message: Message) -> Iterator[tuple[TokenKind, str]]:
    """What the tokens of a message must hold, white space aside."""
    parts = message.content if isinstance(message.content, tuple) else ()
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
    content = message.content if isinstance(message.content, str) else "".join(texts)
    reasoning = (message.reasoning_content or "") + "".join(thoughts)
    said: tuple[tuple[TokenKind, str], ...] = (("content", content), ("reasoning", reasoning))
    for kind, text in said:
        if text.strip():
            yield kind, text.strip()
    if message.tool_calls:
        yield "tool_call", message.tool_calls[0].name


def _may_hide(text: str, rendered: RenderedTokens) -> bool:
    """Whether a short text may lie in a token of scaffold, since a token belongs to its first character."""
    return len(text) <= _TOKEN_CHARACTERS and text in rendered.text


class TurnFinder:
    """Finds where assistant turns depart from their prompt, and where they stop.

    Args:
        generation_prompt: Tokens with which the template opens the assistant's turn.
        stop_ids: Tokens that end it.
    """

    def __init__(self, generation_prompt: Callable[[], Sequence[int]], stop_ids: Collection[int]) -> None:
        self._generation_prompt = generation_prompt
        self.stop_ids = frozenset(stop_ids)

    def departed(self, rendered: RenderedTokens, message: int) -> slice:
        """The tokens of a rewritten turn, from its first that is not of the generation prompt to its stop."""
        run = next(rendered.slices(message), None)
        if run is None:
            return slice(0, 0)
        start = run.start
        for expected, found in zip(self._generation_prompt(), rendered.token_ids[run], strict=False):
            if expected != found:
                break
            start += 1
        after = max(start, content_stop(rendered, message, run))
        # Where the close is the next turn's opener, the stop token stands right after the turn.
        for index in range(after, min(run.stop + 1, len(rendered.token_ids))):
            if rendered.token_ids[index] in self.stop_ids:
                return slice(start, index + 1)
        return slice(start, run.stop)


def content_stop(rendered: RenderedTokens, message: int, run: slice) -> int:
    """Index after the last token that carries what a message says, within one of its runs of tokens."""
    stops = [
        span.stop
        for span in rendered.spans
        if span.message == message and span.kind in CONTENT_KINDS and run.start <= span.start < run.stop
    ]
    return max(stops, default=run.start)


def rewritten_error(message: int, problem: str) -> RenderError:
    """The error for a turn whose tokens are not what a model would have sampled."""
    return RenderError(
        problem,
        where=f"messages[{message}]",
        expected="the turn as the model writes it, after its generation prompt",
        remedy="Pass the template arguments that the turn was made with (such as enable_thinking=False), "
        "leave it out of select, or pass on_rewritten='skip' or 'content'",
    )


def _chosen(select: Select | None, conversation: Sequence[Message]) -> npt.NDArray[np.bool_]:
    """Which messages take part; bool of shape `(messages,)`."""
    count = len(conversation)
    if select is None:
        return np.ones(count, np.bool_)
    if callable(select):
        return np.array([bool(select(message)) for message in conversation], np.bool_)
    chosen = np.zeros(count, np.bool_)
    for index in select:
        if isinstance(index, bool | np.bool_) or not isinstance(index, int | np.integer):
            raise InputError(
                "not an index of a message",
                where="select",
                expected="whole numbers, or a function of a message",
                got=repr(index),
                remedy="For a mask, pass [index for index, chosen in enumerate(mask) if chosen]",
            )
        if not -count <= index < count:
            expected = f"{-count} to {count - 1}"
            raise InputError("there is no such message", where="select", expected=expected, got=f"{index}")
        chosen[index] = True
    return chosen


def _roles(given: Collection[Role], where: str) -> frozenset[Role]:
    if isinstance(given, str):
        remedy = f"Write ({given!r},)"
        raise InputError("not a collection of roles", where=where, got=repr(given), remedy=remedy)
    for role in given:
        if role not in ROLES:
            expected = ", ".join(map(repr, ROLES))
            raise InputError("no such role", where=where, expected=expected, got=repr(role))
    return frozenset(given)
