"""The sandboxed Jinja environment that compiles and runs chat templates on traced strings.

It offers a template the same things as Transformers (`transformers.utils.chat_template_utils`): trimmed
blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now` and `tojson` without HTML
escapes. Operations on plain text are replaced by operations that keep provenance. Methods that would lose it
(`encode`, `translate`, ...) are hidden from templates.

`Joiner` attributes scaffold to the message that the template was handling, as the marks of its loops show. An
iteration of a loop over other values (indices, say) belongs to the message whose values it prints, else to
the message that it looked up.
"""

import datetime
import functools
import operator
import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
from jinja2.lexer import Lexer
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrender.caching import cached_property
from mmrender.template.compiler import GenerationBlock, Mark, MarkKind, TracingCodeGenerator, instrument
from mmrender.template.filters import FILTERS, LEFT_OUT
from mmrender.template.limits import BUDGET, grow
from mmrender.template.text import Origin, Span, TracedStr, concat, lay_out, percent, plain, tainted, text_of
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
_MAX_SAFE = 4096
"""Maximum number of attributes that are remembered as safe."""

_SEEN_AS: dict[type, type] = {
    TracedStr: str,
    TracedDict: dict,
    TracedList: list,
    TracedNull: type(None),
    TracedInt: int,
    TracedFloat: float,
    TracedBool: bool,
}
"""Plain type of each traced type. A template sees only attributes of the plain type."""
_HIDDEN = frozenset({"encode", "expandtabs", "from_bytes", "maketrans", "to_bytes", "translate"})
"""Methods that would lose provenance."""

_TEXTS = frozenset({str, TracedStr})
_TEXT_METHODS = frozenset({"center", "join", "ljust", "replace", "rjust", "zfill"})
"""Methods of plain text that may add traced text or make it long. They run as methods of traced text."""

CLOCK: ContextVar[Callable[[], datetime.datetime]] = ContextVar("mmrender_template_clock")
"""Clock of `strftime_now` in the rendering of this context."""
HANDLED: ContextVar[dict[int, list[Origin | None]]] = ContextVar("mmrender_template_handled")
"""Current loops of a run, outermost first: the origin of the current message or part, then the origins of the
messages that the iteration looked up."""


class RefusedByTemplate(jinja2.TemplateError):
    """Text that the template passed to its own `raise_exception`."""


class OwnedDict(dict[str, Any]):
    """A message or a media part as a template sees it; `_owner` is the origin of the scaffold around it."""

    __slots__ = ("_owner",)
    _owner: Origin


_DICTS: frozenset[type[Any]] = frozenset((dict, OwnedDict, TracedDict))
_DICT_NAMES = frozenset({*dir(OwnedDict), *dir(TracedDict)})
"""Names that resolve to dict methods, not keys."""


class _Iteration(NamedTuple):
    """Output of one loop iteration, from character `start` and span number `span` on."""

    loop: int
    start: int
    span: int
    looked_up: list[Origin]


class Joiner:
    """Joins the output of a macro, a block or (`root`) a whole template, once.

    Scaffold between marks belongs to the current message. Templates often write the system turn before their
    loop. So in a whole template, text outside all loops over messages belongs to a message if it contains
    values of this message alone.
    """

    def __init__(self, *, root: bool = False) -> None:
        self._pieces: list[str] = []
        self._spans: list[Span] = []
        self._position = 0
        self._owners: dict[int, Origin] = {}
        self._owner: Origin | None = None
        self._open: list[_Iteration] = []
        # Character and span number from which on text is outside all loops over messages.
        self._outside: tuple[int, int] | None = (0, 0) if root else None

    def join(self, pieces: Iterable[str | Mark]) -> TracedStr:
        """Join pieces; text without an origin gets the scaffold origin of its message."""
        budget = BUDGET.get()
        limit = budget.limits.max_characters if budget is not None else 1 << 60
        append, spans = self._pieces.append, self._spans
        # `gap`: start of the owner's text that does not have its own origin.
        position, gap, owner = 0, 0, None
        # End and origin of the last span. The loop runs for every piece of a prompt, so nothing is called.
        end, last = -1, None
        for piece in pieces:
            kind = type(piece)
            if kind is str:
                append(piece)  # type: ignore[arg-type]
                position += len(piece)
            elif kind is tuple:
                if owner is not None and gap < position:
                    self._push(gap, position, owner)
                self._position = gap = position
                self._mark(*piece)
                owner = self._owner
                _, end, last = spans[-1] if spans else (0, -1, None)
            elif piece:
                append(piece)  # type: ignore[arg-type]
                for low, high, origin in piece.spans:  # type: ignore[union-attr]
                    start = low + position
                    if owner is not None and gap < start:
                        if end == gap and last is owner:
                            gap = spans.pop()[0]
                        spans.append((gap, start, owner))
                        end, last = start, owner
                    gap = high + position
                    if end == start and last is origin:
                        start = spans.pop()[0]
                    spans.append((start, gap, origin))
                    end, last = gap, origin
                position += len(piece)
            if position > limit:
                grow(position)
        if owner is not None and gap < position:
            self._push(gap, position, owner)
        self._position = position
        while self._open:
            self._close(self._open.pop())
        self._assign(self._outside, position, len(spans))
        grow(position)
        return TracedStr("".join(self._pieces), tuple(spans))

    def _push(self, start: int, stop: int, origin: Origin) -> None:
        spans = self._spans
        if spans and spans[-1][1] == start and spans[-1][2] is origin:
            start = spans.pop()[0]
        spans.append((start, stop, origin))

    def _mark(self, loop: int, kind: MarkKind, origin: Origin | None) -> None:
        if kind == "look":
            if origin is not None and self._open and self._open[-1].loop == loop:
                self._open[-1].looked_up.append(origin.scaffold or origin)
            return
        if self._open and self._open[-1].loop == loop:
            self._close(self._open.pop())
        owners = self._owners
        if origin is not None:
            owners[loop] = origin
        else:
            owners.pop(loop, None)
        owner = next(reversed(owners.values())) if owners else None
        if self._outside is not None and (owner is None) != (self._owner is None):
            if owner is not None:
                self._assign(self._outside, self._position, len(self._spans))
            else:
                self._outside = self._position, len(self._spans)
        self._owner = owner
        if kind == "enter" and owner is None:
            self._open.append(_Iteration(loop, self._position, len(self._spans), []))

    def _close(self, iteration: _Iteration) -> None:
        """End an iteration outside all messages. If it gets an owner, the text before it ends, too."""
        begin = iteration.start, iteration.span
        end = self._position, len(self._spans)
        if begin[0] < end[0] and self._assign(begin, *end, iteration.looked_up):
            self._assign(self._outside, *begin)
            if self._outside is not None:
                self._outside = self._position, len(self._spans)

    def _assign(
        self, begin: tuple[int, int] | None, stop: int, last: int, looked_up: Iterable[Origin] = ()
    ) -> bool:
        """Assign the gaps in a text to the single message whose values it prints, or that it looked up.

        Args:
            begin: Character and span number of the beginning, or None for no text.
            stop: End of the text.
            last: Number of the span after it.
            looked_up: Scaffold origins of the messages that the text looked up.

        Returns:
            Whether there is a single message.
        """
        if begin is None:
            return False
        (start, first), spans = begin, self._spans
        inside, after = spans[first:last], spans[last:]
        owners = {origin.message: origin for _, _, origin in inside if origin.message >= 0}
        if not owners:
            owners = {id(origin): origin for origin in looked_up}
        if len(owners) != 1:
            return False
        origin = next(iter(owners.values()))
        owner = origin.scaffold if origin.is_content or origin.scaffold is not None else origin
        if owner is None:
            return False
        del spans[first:]
        if spans:
            start = max(start, spans[-1][1])
        for low, high, origin in inside:
            if start < low:
                self._push(start, low, owner)
            self._push(low, high, origin)
            start = high
        if start < stop:
            self._push(start, stop, owner)
        spans += after
        return True


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with provenance. Templates compiled here may run in many threads at once."""

    code_generator_class = TracingCodeGenerator
    intercepted_binops = frozenset({"*", "%"})
    concat = staticmethod(lambda pieces: Joiner().join(pieces))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
            finalize=_output_text,
        )
        self._safe: set[tuple[type, str]] = set()
        self.filters.update(FILTERS)
        for name in LEFT_OUT:
            del self.filters[name]
        self.tests.update(IDENTITY_TESTS)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        # Random filler text does not belong in a prompt, and its length is unbounded.
        del self.globals["lipsum"]

    @cached_property
    def lexer(self) -> Lexer:
        """A new lexer: Jinja's cache of lexers has a lock, which a fork may leave locked."""
        return Lexer(self)

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template with marks in its loops.

        Raises:
            jinja2.TemplateSyntaxError: The source is not a template, or one that Python cannot run.
        """
        if len(source) > _MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"longer than {_MAX_SOURCE:,} characters", 1)
        tree = instrument(self.parse(source))
        try:
            code = self.compile(tree)
        except (SyntaxError, MemoryError, ValueError) as error:
            # Python bounds the depth of blocks and of parentheses, and knows where `break` is allowed.
            message = error.msg if isinstance(error, SyntaxError) else f"nested too deep: {error}"
            raise jinja2.TemplateSyntaxError(message, 1) from error
        # A plain dict: each rendering copies the globals, and Jinja's chain of dicts takes ten times as long.
        return self.template_class.from_code(self, code, dict(self.globals))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute`. For a dict, this is its entry, unless dicts have a method of this name."""
        if type(obj) in _DICTS and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (type(obj), attribute) in self._safe:
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]`."""
        if type(obj) in _DICTS and type(argument) is str and argument not in _DICT_NAMES:
            try:
                return obj[argument]
            except KeyError:
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def marked(self, loop: int, kind: MarkKind, value: Any) -> Mark:
        """Count a loop iteration, and pass the scaffold origin of its message to `Joiner` and to errors."""
        origin: Origin | None = None
        if type(value) is OwnedDict:
            origin = value._owner
        elif isinstance(value, dict):
            role = value.get("role")
            origin = role.spans[0][2].scaffold if isinstance(role, TracedStr) and role.spans else None
        handled = HANDLED.get()
        if kind == "enter":
            if (budget := BUDGET.get()) is not None:
                budget.step()
            handled[loop] = [origin]
        elif kind == "leave":
            handled.pop(loop, None)
        elif loop in handled:
            handled[loop].append(origin and (origin.scaffold or origin))
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

    def summands(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return texts whose concatenation is the text of a printed chain of the `+` operator."""
        if _TEXTS.issuperset(map(type, operands)):
            return operands
        return (_output_text(functools.reduce(operator.add, operands)),)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run `*` or `%`; text keeps its provenance."""
        if operator == "%" and isinstance(left, str):
            return percent(left, right)
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    grow(len(value) * count)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Count and make a call of a template; methods of plain text are traced."""
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
        """Whether a template may see an attribute. Traced values have the attributes of plain values."""
        seen_as = _SEEN_AS.get(type(obj))
        is_seen = seen_as is None or hasattr(seen_as, attr)
        is_safe = is_seen and attr not in _HIDDEN and super().is_safe_attribute(obj, attr, value)
        # The verdict depends on the type and the name alone, and a template asks for a few of them
        # repeatedly.
        if is_safe and len(self._safe) < _MAX_SAFE and self.wrap_str_format(value) is None:
            self._safe.add((type(obj), attr))
        return is_safe

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` or `str.format_map` with sandboxed look-ups and a tainted result."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        return lambda *args, **kwargs: tainted(formatted(*args, **kwargs), value.__self__, args, kwargs)


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedByTemplate(plain(text_of(message)))


def _strftime_now(format: str) -> str:
    return tainted(CLOCK.get()().strftime(plain(format)), format)


def _output_text(value: Any) -> Any:
    """Return the text of a printed value."""
    return value if type(value) is TracedStr or type(value) is str else text_of(value)


def handled_message() -> Origin | None:
    """Origin of the current message or part of the run's innermost loop, or of its only look-up."""
    for current, *looked_up in reversed(HANDLED.get().values()):
        if current is not None:
            return current
        if len({*looked_up}) == 1:
            return looked_up[0]
    return None
