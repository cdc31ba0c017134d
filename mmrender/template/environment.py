"""The sandboxed Jinja environment that runs chat templates on traced strings.

It gives a template what Transformers gives it (`transformers.utils.chat_template_utils`): trimmed blocks,
loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `dict`
and `namespace`. In place of plain text operations stand those that keep provenance and respect limits.
"""

import datetime
import functools
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from mmrender.template import ownership
from mmrender.template.compiler import GenerationBlock, TracingCodeGenerator
from mmrender.template.filters import TEXT_FILTERS
from mmrender.template.formatting import (
    PRINTED_BY_ELEMENT,
    TracingFormatter,
    percent,
    representation,
    text_of,
)
from mmrender.template.globals import CLOCK, GLOBALS
from mmrender.template.guards import (
    COMPARING_TESTS,
    UNGUARDED_FILTERS,
    bounded,
    guard_operator,
    guarded_call,
    hashed,
    metered_filter,
    metered_test,
    summed,
)
from mmrender.template.limits import LONG, METER, SIZED, Meter, TemplateLimits
from mmrender.template.markup import TracedMarkup, escaped, marked_safe
from mmrender.template.ownership import Mark, MarkKind, MessageDict, scaffold_origin
from mmrender.template.spanned import lay_out
from mmrender.template.traced import TracedStr
from mmrender.template.values import IDENTITY_TESTS, TracedDict, TracedList, TracedNull

_TRACED_TYPES: dict[type, type] = {
    TracedStr: str,
    TracedMarkup: Markup,
    TracedDict: dict,
    TracedList: list,
    TracedNull: type(None),
}
"""The types that a template takes the traced ones for: it sees no attribute that those lack."""

_TEXTS = frozenset({str, TracedStr})

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with provenance. Templates compiled here may run in many threads at once."""

    code_generator_class = TracingCodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})
    concat = staticmethod(ownership.concat)
    hashed = staticmethod(hashed)
    escape_text = staticmethod(escaped)
    mark_text = staticmethod(marked_safe)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
            finalize=_output_text,
        )
        self.filters.update(TEXT_FILTERS, sum=summed)
        self.filters.update(
            {
                name: metered_filter(name, filter_)
                for name, filter_ in self.filters.items()
                if name not in UNGUARDED_FILTERS
            }
        )
        self.tests.update(IDENTITY_TESTS)
        tests: Mapping[str, Any] = self.tests
        self.tests.update({name: metered_test(tests[name]) for name in COMPARING_TESTS})
        self.globals.update(GLOBALS)
        # Random filler text has no place in a prompt, and its length is unbounded.
        del self.globals["lipsum"]

    def marked(self, loop: int, kind: MarkKind, value: Any, buffered: int = 0) -> Mark:
        """Count a loop iteration; carry its message to `ownership.concat`."""
        if kind == "enter" and (meter := METER.get()) is not None:
            meter.step()
            if buffered >= LONG:
                meter.admit_items(buffered)
        return loop, kind, value._owner if type(value) is MessageDict else scaffold_origin(value)

    def joined(self, operands: tuple[Any, ...], escaping: bool) -> TracedStr:
        """The `~` operator."""
        if escaping and any(hasattr(operand, "__html__") for operand in operands):
            return marked_safe(ownership.concat([escaped(operand) for operand in operands]))
        return ownership.concat([text_of(operand) for operand in operands])

    def added(self, context: Context, operands: tuple[Any, ...]) -> Any:
        """A chain of the `+` operator."""
        if _TEXTS.issuperset(map(type, operands)):
            text, spans = lay_out(operands)
            return TracedStr(text, spans) if spans else text
        return functools.reduce(lambda left, right: self.call_binop(context, "+", left, right), operands)

    def compared(self, name: str, left: Any, right: Any) -> Any:
        """A comparison of two values that the template did not write out."""
        return _COMPARISONS[name](bounded(left, right), right)

    def counted(self, value: Any) -> Any:
        """Count the memory of what a slice or a literal built."""
        meter = METER.get()
        if meter is not None and isinstance(value, SIZED):
            meter.built(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run `+`, `*`, `**`, `%` or `//` within the limits."""
        if operator == "+" and isinstance(left, str) and len(left) < LONG:
            return left + right
        meter = METER.get()
        if operator == "%" and isinstance(left, str):
            return percent(left, right) if not isinstance(left, TracedMarkup) else left % right
        if meter is None:
            return self.binop_table[operator](left, right)
        guard_operator(meter, operator, left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, SIZED):
            meter.built(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object from a template: counted, bounded, and traced for methods of plain text."""
        meter = METER.get()
        if meter is not None:
            meter.step()
        target, given = guarded_call(__obj, args)
        result = super().call(__context, target, *given, **kwargs)
        if meter is not None and isinstance(result, SIZED):
            meter.built(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may see an attribute; of a traced value, those of the plain one only."""
        seen_as = _TRACED_TYPES.get(type(obj))
        if seen_as is not None and not hasattr(seen_as, attr):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give `str.format` and `str.format_map` with sandboxed look-ups and provenance."""
        if not isinstance(value, types.MethodType | types.BuiltinMethodType):
            return None
        text, name = value.__self__, value.__name__
        if name not in ("format", "format_map") or not isinstance(text, str):
            return None
        escape = escaped if isinstance(text, TracedMarkup) else None
        formatter = TracingFormatter(self._looked_up, escape)

        def format_traced(*args: Any, **kwargs: Any) -> str:
            if name == "format":
                shown = formatter.traced(text, args, kwargs)
            elif kwargs:
                raise TypeError("format_map() takes no keyword arguments")
            elif len(args) != 1:
                raise TypeError(f"format_map() takes exactly one argument ({len(args)} given)")
            else:
                shown = formatter.traced(text, (), args[0])
            return shown if escape is None else marked_safe(shown)

        return format_traced

    def _looked_up(self, value: Any, is_attribute: bool, name: Any) -> Any:
        return self.getattr(value, name) if is_attribute else self.getitem(value, name)


def _output_text(value: Any) -> Any:
    """Text of a printed value; a container prints as its `repr`, with the origins of what it holds."""
    if type(value) is TracedStr or type(value) is str:
        return value
    return representation(value) if isinstance(value, PRINTED_BY_ELEMENT) else value


def run(
    template: jinja2.Template,
    variables: Mapping[str, Any],
    *,
    limits: TemplateLimits,
    clock: Callable[[], datetime.datetime],
) -> TracedStr:
    """Render once, under a meter of its own."""
    meter = METER.set(Meter(limits))
    time = CLOCK.set(clock)
    try:
        return ownership.concat_root(template.root_render_func(template.new_context(dict(variables))))
    finally:
        METER.reset(meter)
        CLOCK.reset(time)
