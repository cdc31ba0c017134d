"""Chat and text completions: what differs between the two when they are continued. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.engines.continuation import check_logprobs
from mmrender.engines.text_continuation import TextContinuation

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's and the engines' completion routes take for an absent `max_tokens`."""


class ChatContinuation(TextContinuation):
    """A chat completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        if body.get("max_completion_tokens") is not None:
            self.budget_key = "max_completion_tokens"
        super().__init__(body)

    def _clear(self) -> None:
        super()._clear()
        self._logprobs: list[Any] = []

    def next_body(self) -> dict[str, Any]:
        """Body of the next request: unchanged at first, then with the text so far as the last message."""
        body = {**self.body, **self._budget()}
        if self.can_continue:
            body["logprobs"] = True  # which tells how many tokens a text is
        if not self.text:
            return body
        messages = list(self.body["messages"])
        text = self.text
        if self.body.get("continue_final_message") and messages:
            text = f"{messages.pop().get('content') or ''}{text}"
        return {
            **body,
            "messages": [*messages, {"role": "assistant", "content": text}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }

    def _text(self, choice: Mapping[str, Any]) -> str:
        return (choice.get("message") or {}).get("content") or ""

    def _has_more_than_text(self, choice: Mapping[str, Any]) -> bool:
        message = choice.get("message") or {}
        return any(message.get(name) for name in ("reasoning", "reasoning_content", "tool_calls"))

    def _entries(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        return (choice.get("logprobs") or {}).get("content") or ()

    def _numbers(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        return [entry.get("logprob") for entry in self._entries(choice)]

    def _take_entries(self, choice: Mapping[str, Any], entries: Sequence[Any]) -> None:
        self._logprobs += entries

    def _answer(self) -> dict[str, Any]:
        message = {**(self._last.get("message") or {}), "role": "assistant", "content": self.text}
        logprobs = {"content": self._logprobs} if self.wants_logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _nothing(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "message": message, "finish_reason": "abort", "logprobs": None}
        return {"object": "chat.completion", "model": self.body.get("model"), "choices": [choice]}


class CompletionContinuation(TextContinuation):
    """A text completion of one prompt, which is text or token ids."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        budget = body.get("max_tokens")
        super().__init__({**body, "max_tokens": DEFAULT_COMPLETION_TOKENS if budget is None else budget})
        self.in_tokens = not isinstance(body["prompt"], str)
        self._wanted = body.get("logprobs")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the body asks for logprobs; 0 of them means those of the sampled tokens alone."""
        return self._wanted is not None and self._wanted is not False

    def _clear(self) -> None:
        super()._clear()
        self._parts: dict[str, list[Any]] = {}

    def next_body(self) -> dict[str, Any]:
        """Body of the next request: the prompt, and what was sampled after it."""
        body = {**self.body, **self._budget()}
        if not self.can_continue:
            return body
        body["logprobs"] = self._wanted if self.wants_logprobs else 1
        if self.in_tokens:
            body["return_token_ids"] = True
            body["prompt"] = [*self.body["prompt"], *(self._token_ids or ())]
        else:
            body["prompt"] = self.body["prompt"] + self.text
        return body

    def _keep(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
        if not self.in_tokens:
            return super()._keep(reply, choice)
        ids = choice.get("token_ids")
        if ids is None:  # the engine does not return ids, so its text cannot be continued in tokens
            self._clear()
            return False
        if not ids:
            return False
        check_logprobs(ids, self._numbers(choice))
        self._append(reply, choice, self._entries(choice), self._text(choice), len(ids))
        if self.budget is not None and self.tokens >= self.budget:
            self.finished = "length"
        return True

    def _text(self, choice: Mapping[str, Any]) -> str:
        return choice.get("text") or ""

    def _entries(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        return (choice.get("logprobs") or {}).get("tokens") or ()

    def _numbers(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        return (choice.get("logprobs") or {}).get("token_logprobs") or ()

    def _take_entries(self, choice: Mapping[str, Any], entries: Sequence[Any]) -> None:
        before = len(self.text) - len(self._text(choice))
        for name, values in (choice.get("logprobs") or {}).items():
            if isinstance(values, list):
                kept = values[: len(entries)]
                moved = [before + value for value in kept] if name == "text_offset" else kept
                self._parts.setdefault(name, []).extend(moved)

    def _answer(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": self._parts if self.wants_logprobs else None}

    def result(self) -> dict[str, Any]:
        """The whole reply; token ids only where they were asked for."""
        reply = super().result()
        if self.can_continue and not self.body.get("return_token_ids"):
            for choice in reply["choices"]:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        return reply

    def _nothing(self) -> dict[str, Any]:
        choice = {"index": 0, "text": "", "finish_reason": "abort", "logprobs": None}
        return {"object": "text_completion", "model": self.body.get("model"), "choices": [choice]}
