"""Chat templates in child processes with limits of the operating system, for untrusted templates.

A child compiles and runs the template. It sends back text with its spans, or an error of the library. Media
stay here, since templates do not read them.
"""

import pickle
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import msgspec

from mmrender.errors import InputError, TemplateLimitError
from mmrender.messages import UNKNOWN_SOURCE, MediaPart, Message, RenderRequest
from mmrender.processes import BoundedProcesses
from mmrender.template.chat import ChatTemplate, ViewForm
from mmrender.template.text import Spans, TracedStr, plain


class IsolatedTemplate(ChatTemplate):
    """A chat template that is compiled and run in child processes. Errors are as for `ChatTemplate`.

    Args:
        source: Jinja text.
        processes: The child processes.
        **options: As for `ChatTemplate`. `clock` must be a function that a module defines.
    """

    def __init__(self, source: str, *, processes: BoundedProcesses, **options: Any) -> None:
        self._processes = processes
        self._recipe = _pickled(partial(ChatTemplate, source, **options), "clock")
        super().__init__(source, **options)

    def _compile(self) -> None:
        self.variables = self._call(_variables)

    def render(self, request: RenderRequest, form: ViewForm | None = None) -> TracedStr:
        """Render in a child process; see `ChatTemplate.render`."""
        messages = tuple([_without_media(message) for message in request.messages])
        request = msgspec.structs.replace(request, messages=messages, media=())
        text, spans = self._call(_rendered, _pickled((request, form), "chat_template_kwargs"))
        return TracedStr(text, spans)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        ask = self._processes.ask
        return ask("ran the chat template", TemplateLimitError, function, self._recipe, *arguments)


def _pickled(value: Any, where: str) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        problem = "this value cannot be sent to the process that runs the chat template"
        raise InputError(problem, where=where, expected="plain values", got=str(error)) from error


def _without_media(message: Message) -> Message:
    if not any(message.media()):
        return message
    content = [
        msgspec.structs.replace(part, source=UNKNOWN_SOURCE) if isinstance(part, MediaPart) else part
        for part in message.content or ()
    ]
    return msgspec.structs.replace(message, content=tuple(content))


# In the child.


@lru_cache(maxsize=8)
def _template(recipe: bytes) -> ChatTemplate:
    template: ChatTemplate = pickle.loads(recipe)()  # noqa: S301 - the parent wrote it
    return template


def _variables(recipe: bytes) -> tuple[str, ...]:
    return _template(recipe).variables


def _rendered(recipe: bytes, arguments: bytes) -> tuple[str, Spans]:
    text = _template(recipe).render(*pickle.loads(arguments))  # noqa: S301
    return plain(text), text.spans
