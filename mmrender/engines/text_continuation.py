"""Chat and text completions out of pieces, for engines that are asked in text. Pure.

After an abort the next request extends the last assistant message, or the prompt, by the text so far. That is
as exact as text can be: what follows is sampled after the same characters, not always after the same tokens.
Where an engine is given a renderer, requests go in tokens instead, which is exact.

A piece counts up to its last token whose text is in the reply: tokens without text, and those that hold part
of a character, cannot be asked with, so they are given up and sampled again. A request that cannot be
continued in text - several choices, tools, reasoning, a grammar, stop strings - starts over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.engines.continuation import check_finite, is_memoryless
from mmrender.errors import EngineReplyError, SamplingParameterError

_HARMLESS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "max_completion_tokens",
        "messages",
        "metadata",
        "mm_processor_kwargs",
        "model",
        "priority",
        "prompt",
        "request_id",
        "return_tokens_as_token_ids",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)
"""Fields of a body that a continued request may repeat."""


class TextContinuation:
    """What chat and text completions have in common.

    Args:
        body: The request's body; it is not changed.

    Attributes:
        text: The text so far.
        finished: The last finish reason; None while another request is to be made.
        can_continue: Whether text can be carried into another request.
    """

    budget_key = "max_tokens"

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.budget = _budget_of(body, self.budget_key)
        self.can_continue = _can_continue(body)
        self._clear()

    def _clear(self) -> None:
        self.text = ""
        self.tokens = 0
        self.finished: str | None = None
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}
        self._token_ids: list[int] | None = []

    @property
    def wants_logprobs(self) -> bool:
        """Whether the body asks for logprobs."""
        return bool(self.body.get("logprobs"))

    def _budget(self) -> dict[str, int]:
        return {} if self.budget is None else {self.budget_key: self.budget - self.tokens}

    def take(self, reply: Mapping[str, Any], *, ending: bool = False) -> bool:
        """Take a reply; say whether it brought the completion forward.

        Args:
            reply: The engine's JSON; it is not changed.
            ending: Nothing will be asked after it.

        Raises:
            EngineReplyError: The reply is not one of a completion, or its logprobs do not fit its tokens.
        """
        choice = choice_of(reply)
        if choice.get("finish_reason") != "abort" or ending:
            self._finish(reply, choice)
            return True
        if not self.can_continue or self._has_more_than_text(choice):
            self._clear()
            return False
        return self._keep(reply, choice)

    def _finish(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        if self.can_continue:
            entries, tokens = self._entries(choice), _count(reply)
            if self.wants_logprobs:
                if len(entries) != tokens:
                    raise _uneven(tokens, len(entries))
                check_finite(self._numbers(choice))
            self._append(reply, choice, entries, self._text(choice), tokens)
        else:
            self._first, self._last = dict(reply), dict(choice)
        self.finished = choice.get("finish_reason") or "stop"

    def _keep(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
        entries = self._entries(choice)
        if len(entries) != _count(reply):
            raise _uneven(_count(reply), len(entries))
        check_finite(self._numbers(choice))
        kept, text = _whole(entries, self._text(choice))
        if not text:
            return False
        self._append(reply, choice, entries[:kept], text, kept)
        if self.budget is not None and self.tokens >= self.budget:
            self.finished = "length"
        return True

    def _append(
        self,
        reply: Mapping[str, Any],
        choice: Mapping[str, Any],
        entries: Sequence[Any],
        text: str,
        tokens: int,
    ) -> None:
        self.text += text
        self.tokens += tokens
        self._take_entries(choice, entries)
        ids = choice.get("token_ids")
        if ids is None:
            self._token_ids = None
        elif self._token_ids is not None:
            self._token_ids += ids[:tokens]
        self._first = self._first or dict(reply)
        self._last = dict(choice)

    def grow(self, text: str, tokens: int, token_ids: Sequence[int] | None) -> None:
        """Take what a stream has shown."""
        self.text += text
        self.tokens += tokens
        if token_ids is None:
            self._token_ids = None
        elif self._token_ids is not None:
            self._token_ids += token_ids
        if self.budget is not None and self.tokens >= self.budget and self.finished is None:
            self.finished = "length"

    def give_up(self) -> None:
        """End it with what it has."""
        self.finished = self.finished or "abort"

    def result(self) -> dict[str, Any]:
        """The whole reply: the first one's metadata, the last one's finish reason."""
        first = self._first
        if first is None:
            return self._nothing()
        if not self.can_continue:
            return first
        choice = {**self._last, **self._answer(), "index": 0, "finish_reason": self.finished}
        if self._token_ids is not None and "token_ids" in self._last:
            choice["token_ids"] = self._token_ids
        first_choice = choice_of(first)
        if "prompt_token_ids" in first_choice:
            choice["prompt_token_ids"] = first_choice["prompt_token_ids"]
        return {**first, "choices": [choice], "usage": self._usage(first)}

    def _usage(self, first: Mapping[str, Any]) -> dict[str, Any]:
        usage = dict(first.get("usage") or {})
        usage["completion_tokens"] = self.tokens
        usage["total_tokens"] = usage.get("prompt_tokens", 0) + self.tokens
        return usage

    # --- what differs ---

    def next_body(self) -> dict[str, Any]:
        """Body of the next request."""
        raise NotImplementedError

    def _text(self, choice: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _has_more_than_text(self, choice: Mapping[str, Any]) -> bool:
        return False

    def _entries(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        """The text of each token, with whatever else is known of it."""
        raise NotImplementedError

    def _numbers(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        """The logprob of each token."""
        raise NotImplementedError

    def _take_entries(self, choice: Mapping[str, Any], entries: Sequence[Any]) -> None:
        raise NotImplementedError

    def _answer(self) -> dict[str, Any]:
        raise NotImplementedError

    def _nothing(self) -> dict[str, Any]:
        """The reply of a request that was aborted before it gave anything."""
        raise NotImplementedError


def _budget_of(body: Mapping[str, Any], key: str) -> int | None:
    budget = body.get(key)
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise SamplingParameterError(
            "the token budget is not usable", where=key, expected="an integer, 1 or more", got=repr(budget)
        )
    return budget


def _can_continue(body: Mapping[str, Any]) -> bool:
    """Whether all that shapes the completion is in the text before it."""
    rest = {name: value for name, value in body.items() if name not in _HARMLESS}
    return body.get("n") in (None, 1) and is_memoryless(rest)


def choice_of(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of a reply.

    Raises:
        EngineReplyError: It has none.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise EngineReplyError("the reply has no choice", where="choices", got=repr(choices)[:80])
    return choices[0]


def _count(reply: Mapping[str, Any]) -> int:
    count = (reply.get("usage") or {}).get("completion_tokens")
    if not isinstance(count, int):
        raise EngineReplyError(
            "the reply does not say how many tokens were sampled", where="usage.completion_tokens"
        )
    return count


def _uneven(tokens: int, logprobs: int) -> EngineReplyError:
    return EngineReplyError(
        "tokens and logprobs differ in number",
        where="choices[0].logprobs",
        expected=str(tokens),
        got=str(logprobs),
    )


def _whole(entries: Sequence[Any], text: str) -> tuple[int, str]:
    """The longest run of tokens that ends in text: how many, and their text."""
    kept, position = 0, 0
    for index, entry in enumerate(entries):
        token = entry if isinstance(entry, str) else entry.get("token") or ""
        if not text.startswith(token, position):
            break
        position += len(token)
        if token:
            kept = index + 1
    return kept, text[:position]
