"""Assistant turns that a template prints, cut to what a model would have sampled."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmrender.errors import TemplateError
from mmrender.messages import Message
from mmrender.model.tokenizer import Tokenizer
from mmrender.template.chat import ChatTemplate
from mmrender.template.traced import TracedStr, plain
from mmrender.template.view import ViewForm

QUESTION = Message(role="user", content="qwertzU")


class SampledTurn(NamedTuple):
    """One assistant turn.

    Attributes:
        header: What stands before it since the last message ended: the part of the generation prompt that the
            turn begins with.
        text: What the model would have sampled, without the stop token.
        prompted: Whether `header` is the whole generation prompt.
    """

    header: str
    text: str
    prompted: bool


@dataclass(frozen=True)
class TurnProber:
    """Renders single assistant turns.

    Args:
        template: The template.
        tokenizer: The model's tokenizer.
        form: Shapes that the template takes.
        stop_ids: Tokens that end the assistant's turn.
        arguments: Template variables.
        tools: Tools that are offered where a call of a method names none.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    form: ViewForm
    stop_ids: Collection[int]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = False,
    ) -> TracedStr | None:
        """Render a conversation; None where the template refuses it."""
        try:
            return self.template.render(
                messages,
                tools=self.tools if tools is None else tools,
                add_generation_prompt=prompt,
                form=self.form,
                arguments=self.arguments,
            )
        except TemplateError:
            return None

    def prompt(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The generation prompt after a user message; empty where the template refuses one."""
        body, prompted = self.render([QUESTION], tools), self.render([QUESTION], tools, prompt=True)
        if body is None or prompted is None:
            return ""
        return plain(prompted)[_common(plain(body), plain(prompted)) :]

    def turn(self, message: Message, tools: Sequence[Mapping[str, Any]] | None = None) -> SampledTurn | None:
        """The turn of an assistant message that answers a question; None where the template refuses it."""
        body = self.render([QUESTION], tools)
        prompted = self.render([QUESTION], tools, prompt=True)
        full = self.render([QUESTION, message], tools)
        if body is None or prompted is None or full is None:
            return None
        start = _common(plain(body), plain(prompted))
        prompt = plain(prompted)[start:]
        text = plain(full)
        if not text.startswith(plain(prompted)[:start]):
            return None
        turn = text[start:]
        header = prompt if turn.startswith(prompt) else self._shared_header(prompt, turn)
        begin = start + len(header)
        return SampledTurn(header, text[begin : self._end(full, begin)], prompted=header == prompt)

    def _end(self, full: TracedStr, begin: int) -> int:
        """Where the turn ends that begins at `begin`: at the first stop token after its last content."""
        content = [stop for _, stop, origin in full._spans if origin.message == 1 and origin.is_content]
        text, last = plain(full), max([begin, *content])
        stops = [self.tokenizer.token(token_id) for token_id in self.stop_ids]
        places = [text.find(stop, last) for stop in stops if stop]
        return min([place for place in places if place >= 0], default=len(text))

    def _shared_header(self, prompt: str, turn: str) -> str:
        """The common beginning of a generation prompt and a turn that does not begin with all of it.

        It is cut at a token, so that two delimiters that begin alike are not cut in their midst.
        """
        shared = _common(prompt, turn)
        for match in self.tokenizer.find(prompt, lambda _: True):
            if match.start < shared < match.stop:
                return prompt[: match.start]
        return prompt[:shared]


def _common(left: str, right: str) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length
