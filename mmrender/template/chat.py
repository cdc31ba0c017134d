"""A chat template ready to run: compiled once, rendered with provenance, failing in named errors."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from mmrender.errors import (
    TemplateError,
    TemplateLimitError,
    TemplateRefusedError,
    TemplateRuntimeError,
    TemplateSecurityError,
    TemplateSyntaxError,
)
from mmrender.messages import Message
from mmrender.template.environment import RefusedByTemplate, TracingEnvironment, run
from mmrender.template.limits import TemplateLimits
from mmrender.template.text import TracedStr
from mmrender.template.view import ViewForm, view_arguments, view_messages, view_values

_ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")

# Errors name the types of values as the template's author knows them.
_TRACED_NAME = re.compile(
    r"(?:mmrender\.template\.\w+\.)?\b(Traced(?:Str|Int|Float|Bool|Dict|List|Null)|MessageDict)\b"
)
_PLAIN_NAMES = {"TracedNull": "NoneType", "MessageDict": "dict"}


def _plain_name(match: re.Match[str]) -> str:
    name = match.group(1)
    return _PLAIN_NAMES.get(name, name.removeprefix("Traced").lower())


class ChatTemplate:
    """One template of a model.

    Args:
        source: Jinja text.
        name: For errors, such as `default` or `tool_use`.
        special_tokens: Variables such as `bos_token`.
        limits: What one rendering may spend.
        clock: What `strftime_now` reads.

    Attributes:
        reads_clock: Whether the text may depend on the current date.

    Raises:
        TemplateSyntaxError: The source does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "default",
        special_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self.source = source
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.limits = limits or TemplateLimits()
        self.reads_clock = re.search(r"\bstrftime_now\b", source) is not None
        self._clock = clock
        self._environment = TracingEnvironment()
        try:
            self._template = self._environment.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(
                f"the chat template {name!r} does not compile",
                where=f"line {error.lineno}",
                got=(error.message or type(error).__name__).rstrip("."),
                remedy="Pass a corrected one as chat_template=<Jinja text>",
            ) from error
        except RecursionError as error:
            raise TemplateSyntaxError(f"the chat template {name!r} is nested too deep to compile") from error

    def syntax_tree(self) -> nodes.Template:
        """The parsed source."""
        return self._environment.parse(self.source)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Variables that the template looks up and a caller may give, such as `enable_thinking`."""
        looked_up = jinja2.meta.find_undeclared_variables(self.syntax_tree())
        known = {*self._environment.globals, *self.special_tokens, *_ALWAYS_GIVEN}
        return tuple(sorted(looked_up - known))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        form: ViewForm | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> TracedStr:
        """Render canonical messages, each character attributed.

        Args:
            messages: The conversation.
            tools: Tool definitions, as the template is to print them.
            documents: Documents for templates that take them.
            add_generation_prompt: Whether to open the assistant's turn.
            form: Shapes that this template takes.
            arguments: Further template variables, such as `enable_thinking`.

        Raises:
            TemplateRefusedError: The template called `raise_exception`; its text is kept.
            TemplateRuntimeError: It failed on these messages.
            TemplateSecurityError: It reached for something outside the sandbox.
            TemplateLimitError: It ran too long, recursed too deep or wrote too much.
        """
        variables = {
            **self.special_tokens,
            "messages": view_messages(messages, form or ViewForm()),
            "tools": view_values(tools, "tools"),
            "documents": view_values(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
            **view_arguments(arguments or {}),
        }
        try:
            return run(self._template, variables, limits=self.limits, clock=self._clock)
        except Exception as error:
            raise self._named(error) from error

    def _named(self, error: Exception) -> TemplateError:
        """Convert whatever Python, Jinja or the template raised to an error of the tree."""
        where = f"chat template {self.name!r}"
        line = self._line_of(error)
        if line is not None:
            where = f"{where}, line {line}"
        if isinstance(error, TemplateLimitError):
            return TemplateLimitError(
                error.problem, where=where, expected=error.expected, got=error.got, remedy=error.remedy
            )
        if isinstance(error, RefusedByTemplate):
            return TemplateRefusedError(str(error), where=where)
        if isinstance(error, SecurityError):
            return TemplateSecurityError(_TRACED_NAME.sub(_plain_name, str(error)), where=where)
        got = f"{type(error).__name__}: {_TRACED_NAME.sub(_plain_name, str(error))}"
        if isinstance(error, RecursionError | MemoryError | OverflowError):
            return TemplateLimitError("the chat template used too much", where=where, got=got)
        return TemplateRuntimeError("the chat template failed on these messages", where=where, got=got)

    def _line_of(self, error: Exception) -> int | None:
        """Line of the template that failed, from the compiled code's place in the traceback."""
        lines = []
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<template>":
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        return self._template.get_corresponding_lineno(lines[-1]) if lines else None
