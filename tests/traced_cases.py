"""Rendering one template twice: as Transformers does with plain values, and here with traced ones."""

import contextvars
import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from mmrender.template.environment import CLOCK, HANDLED, Joiner, TracingEnvironment
from mmrender.template.limits import BUDGET, Budget, TemplateLimits
from mmrender.template.text import SEVERAL, Origin, TracedStr, plain
from mmrender.template.values import traced

NOW = datetime.datetime(2026, 7, 26, 9, 5, tzinfo=datetime.UTC)
ENVIRONMENT = TracingEnvironment()
ORIGINS = {
    name: Origin(number, "user", "content", name) for number, name in enumerate("abcdefghijklmnopqrstuvwxyz")
}


def give(value: Any, origin: Origin) -> Any:
    """A value as a template gets it: of one origin throughout."""
    return traced(value, origin)


@cache
def _plain_environment() -> jinja2.Environment:
    return _compile_jinja_template("").environment


@lru_cache(maxsize=4096)
def _compiled(source: str, plainly: bool) -> jinja2.Template:
    return _plain_environment().from_string(source) if plainly else ENVIRONMENT.compile_template(source)


def render_plain(source: str, variables: dict[str, Any]) -> str:
    return _compiled(source, True).render(**variables)


def render_traced(source: str, variables: dict[str, Any], limits: TemplateLimits | None = None) -> TracedStr:
    given = {name: give(value, ORIGINS[name[0]]) for name, value in variables.items()}
    template = _compiled(source, False)
    context = contextvars.copy_context()
    context.run(BUDGET.set, Budget(limits or TemplateLimits()))
    context.run(CLOCK.set, lambda: NOW)
    context.run(HANDLED.set, {})
    return context.run(lambda: Joiner(root=True).join(template.root_render_func(template.new_context(given))))


def outcome(call: Any, *args: Any) -> tuple[Any, Exception | None]:
    try:
        return call(*args), None
    except Exception as error:
        return None, error


def render_both(source: str, variables: dict[str, Any]) -> TracedStr | None:
    """Render both ways; both must fail, or give one text. Returns the traced text, or None."""
    expected, failed = outcome(render_plain, source, variables)
    result, raised = outcome(render_traced, source, variables)
    assert (failed is None) == (raised is None), (
        f"{source}\nplain: {failed!r} {expected!r}\ntraced: {raised!r} {result!r}"
    )
    if failed is not None:
        return None
    if " at 0x" in expected:
        return None  # it prints an address
    assert plain(result) == expected, source
    return result


def check_letters(text: TracedStr, alphabets: dict[str, str]) -> None:
    """Every letter that only one variable holds has that variable's origin, or lies in tainted text."""
    covered = dict.fromkeys(range(len(text)))
    for start, stop, origin in text.spans:
        for index in range(start, stop):
            covered[index] = origin.path
    for name, letters in alphabets.items():
        for index, char in enumerate(plain(text)):
            if char in letters:
                assert covered[index] in (name, SEVERAL.path), (
                    f"{char!r} at {index} of {plain(text)!r} has origin {covered[index]}"
                )
