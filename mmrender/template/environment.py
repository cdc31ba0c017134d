"""The sandboxed Jinja environment that runs chat templates on traced strings.

It gives a template what Transformers gives it (`transformers.utils.chat_template_utils`): trimmed blocks, loop
controls, `{% generation %}`, `raise_exception`, `strftime_now`, a `tojson` without HTML escapes, `dict` and
`namespace`. In place of plain text operations stand those that keep provenance and respect limits.
"""

import datetime
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from mmrender.template import ownership
from mmrender.template.filters import TEXT_FILTERS
from mmrender.template.formatting import TracingFormatter, percent, representation, text_of
from mmrender.template.limits import Meter, TemplateLimits, check_call, check_operation, check_size
from mmrender.template.ownership import Marker, scaffold_origin
from mmrender.template.traced import TracedStr, plain
from mmrender.template.values import IDENTITY_TESTS

METER: ContextVar[Meter] = ContextVar("mmrender_template_meter")
CLOCK: ContextVar[Callable[[], datetime.datetime]] = ContextVar("mmrender_template_clock")

_NOTHING = TracedStr("")
_GUARDED_FILTERS = ("center", "format", "indent", "join", "replace", "truncate", "wordwrap")


class RefusedByTemplate(jinja2.TemplateError):
    """What the template passed to its own `raise_exception`."""


class TracingCodeGenerator(CodeGenerator):
    """Compiles `~` so that it keeps spans; Jinja's helper joins plain text."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write the join of the operands as text."""
        self.write("environment.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: a block with its own scope that writes its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Parse the block."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """A namespace without underscore names, so that templates cannot reach Python internals through it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 - `namespace(self=...)` must work
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _TemplateDict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Build a dict of equal values."""
        return dict.fromkeys(*args)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the underscore name {name!r}")


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with provenance. Templates compiled here may run in many threads at once."""

    code_generator_class = TracingCodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
            finalize=_output_text,
        )
        self.limits = limits
        self.filters.update(TEXT_FILTERS)
        self.filters.update({name: self._guarded(name) for name in _GUARDED_FILTERS})
        self.filters.update({ownership.ENTER: _enter, ownership.LEAVE: _leave})
        self.tests.update(IDENTITY_TESTS)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )
        # Random filler text has no place in a prompt, and its length is unbounded.
        del self.globals["lipsum"]

    def concat(self, pieces: Any) -> TracedStr:  # type: ignore[override]
        """Join what a template, macro or block wrote."""
        return ownership.concat(self.measured(pieces))

    def measured(self, pieces: Iterable[str]) -> Iterator[str]:
        """Pass pieces on while their total length is within the limit."""
        total = 0
        limit = self.limits.max_characters
        for piece in pieces:
            total += len(piece)
            if total > limit:
                check_size(total, self.limits)
            yield piece

    def joined(self, operands: tuple[Any, ...]) -> TracedStr:
        """The `~` operator."""
        return self.concat([text_of(operand) for operand in operands])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run `+`, `*`, `**` or `%` within the limits."""
        if operator == "+" and isinstance(left, str) and len(left) < 1_000_000 and isinstance(right, str):
            return left + right
        check_operation(operator, left, right, self.limits)
        if operator == "%" and isinstance(left, str):
            return percent(left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object from a template: counted, bounded, and traced for methods of plain text."""
        METER.get().step()
        if isinstance(__obj, types.BuiltinMethodType | types.MethodType):
            text = __obj.__self__
            if isinstance(text, str):
                check_call(__obj.__name__, text, (*args, *kwargs.values()), __self.limits)
                if type(text) is str and __obj.__name__ in ("join", "replace"):
                    __obj = getattr(TracedStr(text), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give `str.format` and `str.format_map` with sandboxed look-ups and provenance."""
        if not isinstance(value, types.MethodType | types.BuiltinMethodType):
            return None
        text = value.__self__
        if value.__name__ not in ("format", "format_map") or not isinstance(text, str):
            return None
        formatter = TracingFormatter(
            lambda obj, is_attribute, name: self.getattr(obj, name) if is_attribute else self.getitem(obj, name)
        )
        name = value.__name__

        def format_traced(*args: Any, **kwargs: Any) -> str:
            check_call(name, text, (*args, *kwargs.values()), self.limits)
            if name == "format_map":
                return formatter.traced(text, (), *args, **kwargs)
            return formatter.traced(text, args, kwargs)

        return format_traced

    def _guarded(self, name: str) -> Callable[..., Any]:
        filter_ = self.filters[name]

        @pass_context
        def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "join" and not isinstance(value, str):
                value = list(value)
            given = (value, *args, *kwargs.values()) if name == "join" else (*args, *kwargs.values())
            check_call(name, text_of(value) if name != "join" else "".join(map(str, args[:1])), given, self.limits)
            if name == "format":
                check_operation("%", text_of(value), args, self.limits)
            return self.call_filter(f"{name}.unguarded", value, args, kwargs, context)

        self.filters[f"{name}.unguarded"] = filter_
        return guarded


def _output_text(value: Any) -> Any:
    """Text of a printed value; a container prints as its `repr`, with the origins of what it holds."""
    return representation(value) if isinstance(value, dict | list | tuple) else value


@pass_context
def _enter(context: Context, value: Any, loop: int) -> str:
    METER.get().step()
    origin = scaffold_origin(value)
    return _NOTHING if origin is None else Marker.of(loop, origin)


@pass_context
def _leave(context: Context, value: Any, loop: int) -> str:
    return Marker.of(loop, None)


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedByTemplate(plain(text_of(message)))


def _strftime_now(format: str) -> str:
    return CLOCK.get()().strftime(plain(format))


def compile_template(environment: TracingEnvironment, source: str) -> jinja2.Template:
    """Compile a template with ownership markers in its loops.

    Raises:
        jinja2.TemplateSyntaxError: The source is not a template.
    """
    tree = ownership.instrument(environment.parse(source))
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


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
        environment = template.environment
        pieces = template.root_render_func(template.new_context(dict(variables)))
        return ownership.concat_root(environment.measured(pieces))
    finally:
        METER.reset(meter)
        CLOCK.reset(time)
