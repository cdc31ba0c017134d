"""From one turn to the next without touching what was sampled: previous ids kept verbatim, then a derived tail.

The tail is what the template writes after an assistant's content when the new messages follow it. It comes
from a skeleton, a short conversation that ends in the new messages, so its cost grows with the extension
alone. That the tail does not depend on what came before is proved once for each shape of extension, by
rendering it after histories that differ in everything that could matter; where it is not so, there is no
bridge, and the reason has a name.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from mmrender.bridge_proof import ProbedHistory, histories, independence_failure, rewriting_failure, skeleton
from mmrender.errors import TemplateError
from mmrender.media.item import MediaItem, MultiModalData
from mmrender.messages import Message
from mmrender.placement import MediaPlace, check_placement, media_places
from mmrender.rendered import RenderedTokens, TokenSpan
from mmrender.template.chat import ChatTemplate
from mmrender.template.profile import TemplateProfile
from mmrender.template.traced import TracedStr, plain
from mmrender.tokens import TokenWriter

History: TypeAlias = Literal["sampled", "template"]
"""`sampled` keeps earlier turns as they were sampled; `template` gives no bridge where the template would now
write them differently."""

TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"
Resolve: TypeAlias = Callable[[Sequence[MediaPlace], int], Sequence[MediaItem | None]]


_SKELETON_MESSAGES = 2


class NotBridged(Exception):
    """Why there is no bridge."""


@dataclass(frozen=True)
class _Tail:
    """Text after the assistant's content, and its first stop token as `[stop_start, stop_end)`, -1 for none."""

    text: TracedStr
    stop_start: int = -1
    stop_end: int = -1
    stop_id: int = -1


class Bridge:
    """Bridges turns of one template with one set of template arguments. Safe to use from many threads.

    Args:
        template: The chat template.
        profile: What is known about it.
        writer: Encodes the tail.
        stop_ids: Tokens that end an assistant's turn.
        arguments: Template variables.
    """

    def __init__(
        self,
        template: ChatTemplate,
        profile: TemplateProfile,
        writer: TokenWriter,
        stop_ids: frozenset[int],
        arguments: Mapping[str, Any],
    ) -> None:
        self._template = template
        self._profile = profile
        self._writer = writer
        self._stop_ids = stop_ids
        self._arguments = dict(arguments)
        self._proofs: dict[Any, str | None] = {}
        self._lock = threading.Lock()

    def extend(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        previous: MultiModalData,
        history: History,
        resolve: Resolve,
        depends_on_company: bool,
    ) -> RenderedTokens:
        """Append the new messages and the generation prompt.

        Raises:
            NotBridged: It cannot be proved that appending is right.
        """
        self._check_extension(new_messages, depends_on_company)
        images = len(previous.mm_hashes.get("image", ()))
        self._check_proof(new_messages, images, history)
        tail = self._tail(new_messages, images)
        head, rest = self._joint(tail, prompt_ids, completion_ids)
        return self._assembled(prompt_ids, completion_ids, head, rest, new_messages, previous, resolve)

    def _check_extension(self, messages: Sequence[Message], depends_on_company: bool) -> None:
        if not messages:
            raise NotBridged("the extension is empty")
        if any(message.role == "assistant" for message in messages):
            raise NotBridged("the extension holds an assistant message, whose tokens were not sampled")
        if depends_on_company and media_places(messages):
            raise NotBridged("the processor treats an image differently when more of them follow")

    def _check_proof(self, messages: Sequence[Message], images: int, history: History) -> None:
        """Raise unless the tail is independent of what came before, proved once for each shape of extension."""
        shape = (tuple(_shape(message) for message in messages), bool(images), history)
        with self._lock:
            known = shape in self._proofs
            failure = self._proofs.get(shape)
        if not known:
            failure = self._prove(messages, images, history)
            with self._lock:
                self._proofs[shape] = failure
        if failure is not None:
            raise NotBridged(failure)

    def _prove(self, messages: Sequence[Message], images: int, history: History) -> str | None:
        def tail_after(given: ProbedHistory) -> str | None:
            try:
                return self._independent_part(self._tail_of(given, messages))
            except (TemplateError, NotBridged):
                return None

        def text_of(conversation: Sequence[Message], prompt: bool) -> str | None:
            try:
                return plain(self._render(conversation, prompt=prompt))
            except TemplateError:
                return None

        failure = independence_failure(histories(messages, images), tail_after)
        if failure is None and history == "template":
            failure = rewriting_failure(messages, images, text_of)
        return failure

    def _independent_part(self, tail: _Tail) -> str:
        """What must not vary: from the stop token on, or all of it where the template writes none."""
        return plain(tail.text)[max(tail.stop_start, 0) :]

    def _tail(self, messages: Sequence[Message], images: int) -> _Tail:
        try:
            return self._tail_of(skeleton(messages, images), messages)
        except TemplateError as error:
            raise NotBridged(f"the template does not take this extension: {error}") from error

    def _tail_of(self, history: ProbedHistory, messages: Sequence[Message]) -> _Tail:
        last = len(history.messages) - 1
        text = self._render([*history.messages, *messages], prompt=True, tools=history.tools)
        ends = [stop for _, stop, origin in text._spans if origin.message == last and origin.is_content]
        if not ends:
            raise NotBridged("the template does not print the assistant's content")
        tail = text[max(ends) :]
        for match in self._writer.lay_out(tail).matches:
            token_id = self._writer.tokenizer.added_ids[match.token]
            if token_id in self._stop_ids:
                return _Tail(tail, match.start, match.stop, token_id)
        if history.has_calls:
            raise NotBridged("the template writes no stop token after a tool call")
        return _Tail(tail)

    def _render(self, messages: Sequence[Message], *, prompt: bool, tools: Any = None) -> TracedStr:
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=prompt,
            form=self._profile.form,
            arguments=self._arguments,
        )

    def _joint(self, tail: _Tail, prompt_ids: TokenIds, completion_ids: TokenIds) -> tuple[str, TracedStr]:
        """Text that closes the completion, and the tail that follows it."""
        text = tail.text
        last = int(completion_ids[-1]) if len(completion_ids) else -1
        if last in self._stop_ids:
            if tail.stop_start < 0:
                return "", text
            is_opener = not self._closes_by_itself(tail.stop_id)
            # Where the close is the next turn's opener, only that opener can stand for it.
            keep_close = is_opener and last != tail.stop_id
            return "", text[tail.stop_start if keep_close else tail.stop_end :]
        head = self._reasoning_close(prompt_ids, completion_ids)
        if tail.stop_start < 0:
            return head, text
        return head + self._text_before_stop(), text[tail.stop_start :]

    def _closes_by_itself(self, stop_id: int) -> bool:
        """Whether the template writes this stop token also when nothing follows."""
        return stop_id in self._special_ids(self._profile.closes.get("end", ""))

    def _special_ids(self, text: str) -> list[int]:
        tokenizer = self._writer.tokenizer
        return [tokenizer.added_ids[match.token] for match in tokenizer.find(text, lambda _: True)]

    def _text_before_stop(self) -> str:
        """What the template writes between plain content and its stop token, such as a newline."""
        tokenizer = self._writer.tokenizer
        for close in self._profile.closes.values():
            for match in tokenizer.find(close, lambda _: True):
                if tokenizer.added_ids[match.token] in self._stop_ids:
                    return close[: match.start]
        return ""

    def _reasoning_close(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> str:
        """What closes a reasoning block that the completion, or the prompt for it, left open."""
        if self._profile.reasoning is None:
            return ""
        opener, close = self._profile.reasoning
        decode = self._writer.tokenizer.decode
        written = decode(_as_list(completion_ids))
        before = decode(_as_list(prompt_ids[-64:]))
        for prompt in self._profile.generation_prompts:
            if before.endswith(prompt):
                written = prompt + written
                break
        return close if written.rfind(opener) > written.rfind(close.strip()) else ""

    def _assembled(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        head: str,
        rest: TracedStr,
        messages: Sequence[Message],
        previous: MultiModalData,
        resolve: Resolve,
    ) -> RenderedTokens:
        layout = self._writer.lay_out(TracedStr(head) + rest if head else rest)
        places = media_places(messages, where="new_messages")
        first = _SKELETON_MESSAGES
        moved = [place._replace(message=place.message + first) for place in places]
        check_placement(moved, layout.placeholders, self._profile.image_roles)
        items = resolve(places, len(previous.mm_hashes.get("image", ())))
        encoded = self._writer.write(layout, items, begins=False)
        base = len(prompt_ids) + len(completion_ids)
        added = MultiModalData.of(
            (placeholder, item) for placeholder, item in zip(encoded.ranges, items, strict=True) if item is not None
        )
        return RenderedTokens(
            token_ids=[*_as_list(prompt_ids), *_as_list(completion_ids), *encoded.ids],
            spans=tuple(_spans(len(prompt_ids), len(completion_ids), encoded.spans, first)),
            roles=tuple([message.role for message in messages]),
            tool_names=tuple([message.name if message.role == "tool" else None for message in messages]),
            multi_modal_data=previous.merged(added.shifted(base)) if added else previous,
            text=plain(layout.text),
            _decode=self._writer.tokenizer.decode,
        )


def _spans(prompt: int, completion: int, tail: Sequence[TokenSpan], first: int) -> list[TokenSpan]:
    """Spans over previous prompt, completion and tail; messages count from the extension's first."""
    spans = [TokenSpan(0, prompt, -1, "prompt", False)] if prompt else []
    base = prompt + completion
    if completion:
        spans.append(TokenSpan(prompt, base, -1, "completion", True))
    for span in tail:
        message = span.message - first if span.message >= first else -1
        spans.append(TokenSpan(span.start + base, span.stop + base, message, span.kind, False))
    return spans


def _as_list(ids: TokenIds) -> Sequence[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def _shape(message: Message) -> tuple[Any, ...]:
    """What of a message can make a template write something else around it."""
    parts = message.content if isinstance(message.content, tuple) else ()
    kinds = tuple(type(part).__name__ for part in parts)
    empty = not message.content
    return message.role, isinstance(message.content, str), empty, kinds, message.name is not None, *message.extra


