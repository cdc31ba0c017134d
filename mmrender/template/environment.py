"""The sandboxed Jinja environment that compiles and runs chat templates on traced strings.

It gives a template what Transformers gives it (`transformers.utils.chat_template_utils`): trimmed blocks,
loop controls, `{% generation %}`, `raise_exception`, `strftime_now` and `tojson` without HTML escapes.
Operations on plain text are replaced by those that keep provenance; what would lose it (`encode`,
`translate`, ...) is hidden from templates.
"""

import datetime
import functools
import operator
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrender.template import attribution
from mmrender.template.filters import FILTERS, LEFT_OUT
from mmrender.template.limits import BUDGET, Budget, TemplateLimits, grow
from mmrender.template.text import TracedStr, concat, lay_out, percent, plain, tainted, text_of
from mmrender.template.values import (
    IDENTITY_TESTS,
    TracedBool,
    TracedDict,
    TracedFloat,
    TracedInt,
    TracedList,
    TracedNull,
)

_MAX_SOURCE = 2_000_000
_MAX_KNOWN = 4096

_SEEN_AS: dict[type, type] = {
    TracedStr: str,
    TracedDict: dict,
    TracedList: list,
    TracedNull: type(None),
    TracedInt: int,
    TracedFloat: float,
    TracedBool: bool,
}
"""The types that a template takes the traced ones for: it sees no attribute that those lack."""
_HIDDEN = frozenset({"encode", "expandtabs", "from_bytes", "maketrans", "to_bytes", "translate"})
"""Methods that would lose provenance."""

_TEXTS = frozenset({str, TracedStr})
_TEXT_METHODS = frozenset({"center", "join", "ljust", "replace", "rjust"})
"""Methods of plain text that may bring traced text in, so they are run as those of traced text."""

CLOCK: ContextVar[Callable[[], datetime.datetime]] = ContextVar("mmrender_template_clock")
"""Clock of `strftime_now` in the rendering of this context."""


class RefusedByTemplate(jinja2.TemplateError):
    """Text that the template passed to its own `raise_exception`."""


class TracingCodeGenerator(CodeGenerator):
    """Calls the environment where Jinja writes plain Python, which loses spans."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 - Jinja calls it so
        """Write what the template prints, or a mark of `attribution.instrument`."""
        mark = getattr(node, "mark", None)
        if mark is None:
            super().visit_Output(node, frame)
            return
        self.writeline("yield " if frame.buffer is None else f"{frame.buffer}.append(")
        after = ")" if frame.buffer is None else "))"
        self._call(f"environment.marked({mark[0]!r}, {mark[1]!r}, ", node.nodes, after, frame)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the join of the operands as text; Jinja's helper joins plain text."""
        self._call("environment.joined((", node.nodes, "))", frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write a chain of additions as one: laid out once, where all of it is text."""
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self._call("environment.added((", [left, *reversed(operands)], "))", frame)

    def _call(self, before: str, operands: list[nodes.Expr], after: str, frame: Frame) -> None:
        self.write(before)
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write(after)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: a block with its own scope that writes its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with provenance. Templates compiled here may run in many threads at once."""

    code_generator_class = TracingCodeGenerator
    intercepted_binops = frozenset({"*", "%"})
    concat = staticmethod(lambda pieces: attribution.Joiner().join(pieces))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
            finalize=_output_text,
        )
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters.update(FILTERS)
        for name in LEFT_OUT:
            del self.filters[name]
        self.tests.update(IDENTITY_TESTS)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        # Random filler text has no place in a prompt, and its length is unbounded.
        del self.globals["lipsum"]

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template with marks in its loops.

        Raises:
            jinja2.TemplateSyntaxError: The source is not a template, or one that Python cannot run.
        """
        if len(source) > _MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"longer than {_MAX_SOURCE:,} characters", 1)
        tree = attribution.instrument(self.parse(source))
        try:
            code = self.compile(tree)
        except (SyntaxError, MemoryError, ValueError) as error:
            # Python bounds the depth of blocks and of parentheses, and knows where `break` is allowed.
            message = error.msg if isinstance(error, SyntaxError) else f"nested too deep: {error}"
            raise jinja2.TemplateSyntaxError(message, 1) from error
        return self.template_class.from_code(self, code, self.make_globals(None))

    def marked(self, loop: int, kind: attribution.MarkKind, value: Any) -> attribution.Mark:
        """Count a loop iteration; carry the scaffold origin of its message to `Joiner`."""
        if kind == "enter" and (budget := BUDGET.get()) is not None:
            budget.step()
        origin = None
        if type(value) is attribution.MessageDict:
            origin = value._owner
        elif isinstance(value, dict):
            role = value.get("role")
            origin = role.spans[0][2].scaffold if isinstance(role, TracedStr) and role.spans else None
        return loop, kind, origin

    def joined(self, operands: tuple[Any, ...]) -> TracedStr:
        """Run the `~` operator."""
        return concat([text_of(operand) for operand in operands])

    def added(self, operands: tuple[Any, ...]) -> Any:
        """Run a chain of the `+` operator."""
        if _TEXTS.issuperset(map(type, operands)):
            text, spans = lay_out(operands)
            return TracedStr(text, spans) if spans else text
        return functools.reduce(operator.add, operands)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run `*` or `%`, of text with provenance."""
        if operator == "%" and isinstance(left, str):
            return percent(left, right)
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    grow(len(value) * count)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object from a template: counted, and traced for methods of plain text."""
        budget = BUDGET.get()
        if budget is not None:
            budget.step()
        kind = type(__obj)
        if (kind is types.MethodType or kind is types.BuiltinMethodType) and isinstance(__obj.__self__, str):
            if type(__obj.__self__) is str and __obj.__name__ in _TEXT_METHODS:
                __obj = getattr(TracedStr(__obj.__self__), __obj.__name__)
            args = tuple([None if type(item) is TracedNull else item for item in args])
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may see an attribute; of a traced value, those of the plain one only."""
        # It depends on the type and the name alone, and a template asks for the same few again and again.
        known = self._safe.get((type(obj), attr))
        if known is None:
            seen_as = _SEEN_AS.get(type(obj))
            is_seen = seen_as is None or hasattr(seen_as, attr)
            known = is_seen and attr not in _HIDDEN and super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < _MAX_KNOWN:
                self._safe[type(obj), attr] = known
        return known

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give `str.format` and `str.format_map` with sandboxed look-ups; the result is tainted."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        return lambda *args, **kwargs: tainted(formatted(*args, **kwargs), value.__self__, args, kwargs)


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedByTemplate(plain(text_of(message)))


def _strftime_now(format: str) -> str:
    return CLOCK.get()().strftime(plain(format))


def _output_text(value: Any) -> Any:
    """Return the text of a printed value."""
    return value if type(value) is TracedStr or type(value) is str else text_of(value)


def run(
    template: jinja2.Template,
    variables: Mapping[str, Any],
    *,
    limits: TemplateLimits,
    clock: Callable[[], datetime.datetime],
) -> TracedStr:
    """Render once, with a budget of its own."""
    budget = BUDGET.set(Budget(limits))
    time = CLOCK.set(clock)
    try:
        pieces = template.root_render_func(template.new_context(dict(variables)))
        return attribution.Joiner(root=True).join(pieces)
    finally:
        BUDGET.reset(budget)
        CLOCK.reset(time)
