"""A chat template ready to run: compiled once, rendered with provenance, failing in named errors."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from mmrender.errors import (
    TemplateLimitError,
    TemplateRefusedError,
    TemplateRuntimeError,
    TemplateSecurityError,
    TemplateSyntaxError,
)
from mmrender.messages import Message
from mmrender.template.environment import RefusedByTemplate, TracingEnvironment, compile_template, run
from mmrender.template.limits import TemplateLimits
from mmrender.template.traced import TracedStr
from mmrender.template.view import ViewForm, view_documents, view_messages, view_tools


_ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "loop", "caller", "varargs", "kwargs")


class ChatTemplate:
    """One template of a model.

    Args:
        source: Jinja text.
        name: For errors, such as `default` or `tool_use`.
        special_tokens: Variables such as `bos_token`.
        limits: What one rendering may spend.
        clock: What `strftime_now` reads.

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
        self._clock = clock
        self._environment = TracingEnvironment(self.limits)
        try:
            self._template = compile_template(self._environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(
                f"the chat template {name!r} does not compile",
                where=f"line {error.lineno}",
                got=error.message or type(error).__name__,
                remedy="Pass a corrected one as chat_template=<Jinja text>",
            ) from error
        except RecursionError as error:
            raise TemplateSyntaxError(f"the chat template {name!r} is nested too deep to compile") from error

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Variables that the template reads and never sets: what a caller may pass, such as `enable_thinking`."""
        tree = self._environment.parse(self.source)
        names = list(tree.find_all(nodes.Name))
        stored = {name.name for name in names if name.ctx != "load"}
        called = {macro.name for macro in tree.find_all(nodes.Macro)}
        known = {*stored, *called, *self._environment.globals, *self.special_tokens, *_ALWAYS_GIVEN}
        return tuple(sorted({name.name for name in names} - known))

    @property
    def reads_clock(self) -> bool:
        """Whether the text may depend on the current date."""
        return re.search(r"\bstrftime_now\b", self.source) is not None

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
            "tools": view_tools(tools),
            "documents": view_documents(documents),
            "add_generation_prompt": add_generation_prompt,
            **(arguments or {}),
        }
        try:
            return run(self._template, variables, limits=self.limits, clock=self._clock)
        except TemplateLimitError:
            raise
        except RefusedByTemplate as error:
            raise TemplateRefusedError(str(error), where=f"chat template {self.name!r}") from error
        except SecurityError as error:
            raise TemplateSecurityError(str(error), where=f"chat template {self.name!r}") from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise TemplateLimitError(
                f"the chat template used too much: {type(error).__name__}", got=str(error) or None
            ) from error
        except Exception as error:  # noqa: BLE001 - a template can raise whatever Python can
            raise TemplateRuntimeError(
                "the chat template failed on these messages",
                where=f"chat template {self.name!r}, line {_line_of(error)}",
                got=f"{type(error).__name__}: {error}",
            ) from error


def _line_of(error: Exception) -> int | str:
    """Line of the template that failed: Jinja rewrites tracebacks to show it."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines[-1] if lines else "unknown"
