"""What is measured before a template may do it: operators, calls, filters and tests.

Text that grows piece by piece is measured where it is laid out (`spanned.py`). Here is the rest: operations
that run long or build much in one step of C code or of Jinja's own filters, where nothing can stop them.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Environment, pass_context, pass_environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro
from jinja2.utils import _PassArg

from mmrender.template.limits import CONTAINERS, LONG, METER, SIZED, Meter, admit, admit_items, weigh
from mmrender.template.traced import TracedStr
from mmrender.template.values import TracedNull

_TRACED_METHODS = frozenset(
    {
        "center",
        "expandtabs",
        "join",
        "ljust",
        "replace",
        "rjust",
        "rsplit",
        "split",
        "splitlines",
        "translate",
        "zfill",
    }
)


def guard_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large."""
    if operator == "+":
        if isinstance(left, str):
            meter.admit(len(left) + (len(right) if isinstance(right, str) else 0))
        elif isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
            meter.admit_items(len(left) + len(right))
    elif operator == "*":
        _guard_product(meter, left, right)
    elif isinstance(left, int) and isinstance(right, int):
        # `//` and `%` take time in both sizes, `**` in their product.
        bits = left.bit_length() + right.bit_length()
        meter.admit_bits(left.bit_length() * max(right, 1) if operator == "**" else bits)


def _guard_product(meter: Meter, left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(value, str | bytes):
                meter.admit(len(value) * count)
            elif isinstance(value, CONTAINERS):
                meter.admit_items(len(value) * count)
    if isinstance(left, int) and isinstance(right, int):
        meter.admit_bits(left.bit_length() + right.bit_length())


def guarded_call(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What to call in place of `target`, and with what.

    Methods of plain text are those of traced text, which are measured, and take None where a null stands.
    """
    kind = type(target)
    if kind is Macro:
        return target, args
    if kind is types.MethodType or kind is types.BuiltinMethodType:
        owner, name = target.__self__, target.__name__
        if isinstance(owner, str):
            if type(owner) is str and name in _TRACED_METHODS:
                target = getattr(TracedStr(owner), name)
            return target, tuple([None if type(item) is TracedNull else item for item in args])
        if isinstance(owner, CONTAINERS) and name in ("count", "index"):
            admit_items(weigh(args) * len(owner))
    if any(isinstance(item, CONTAINERS) for item in args):
        weigh(args)
    return target, args


def bounded(value: Any, other: Any) -> Any:
    """The value, where comparing it with `other` or with the elements of `other` takes a bounded time."""
    if isinstance(value, CONTAINERS):
        admit_items(weigh(value) * (len(other) if isinstance(other, list | tuple) else 1))
    elif isinstance(value, str) and len(value) >= LONG and isinstance(other, list | tuple):
        admit_items(weigh(value) * len(other))
    return value


def hashed(key: Any) -> Any:
    """A key that can be hashed in a bounded time, and without overflowing the stack."""
    if isinstance(key, tuple):
        weigh(key)
    return key


# Filters. Each guard takes what the filter takes.


def _slow(scale: int) -> Callable[..., None]:
    """A filter that takes its time for each character: `scale` times less text than elsewhere."""

    def guard(value: Any, *args: Any, **kwargs: Any) -> None:
        admit(scale * (len(value) if isinstance(value, str) else weigh(value)))

    return guard


def _batch(value: Any, linecount: Any, fill_with: Any = None) -> None:
    admit_items(linecount if fill_with is not None and isinstance(linecount, int) else 0)


def _slice(value: Any, slices: Any, fill_with: Any = None) -> None:
    admit_items(slices if isinstance(slices, int) else 0)


def _round(value: Any, precision: Any = 0, method: str = "common") -> None:
    # `10 ** precision` is computed; each decimal digit takes less than four bits.
    meter = METER.get()
    if meter is not None and isinstance(precision, int):
        meter.admit_bits(4 * abs(precision))


def _striptags(value: Any) -> None:
    text = value if isinstance(value, str) else ""
    # Each comment and tag that is taken out copies the text.
    admit(len(text) * (text.count("<") + 8) // 256)


def _walked(value: Any, *args: Any, **kwargs: Any) -> None:
    """A filter that compares or hashes elements."""
    weigh(value)


_GUARDS: dict[str, Callable[..., None]] = {
    "batch": _batch,
    "dictsort": _walked,
    "groupby": _walked,
    "max": _walked,
    "min": _walked,
    "pprint": _slow(8),
    "round": _round,
    "slice": _slice,
    "sort": _walked,
    "striptags": _striptags,
    "title": _slow(8),
    "unique": _walked,
    "urlencode": _slow(8),
    "urlize": _slow(128),
    "wordcount": _slow(8),
    "wordwrap": _slow(128),
    "xmlattr": _walked,
}
_ITERATING = frozenset({"batch", "dictsort", "groupby", "list", "max", "min", "slice", "sort", "unique"})
_TAKING_NONE = frozenset({"batch", "replace", "slice", "tojson", "trim", "truncate", "wordwrap"})
UNGUARDED_FILTERS = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""Filters that build nothing."""
COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", "in", "<", "lt", "lessthan", "<=", "le"),
    *(">", "gt", "greaterthan", ">=", "ge"),
)


@pass_environment
def summed(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's `sum`; adding lists up copies what was added before, so their lengths are bounded."""
    items = list(iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable))
    lengths = [len(item) for item in (start, *items) if isinstance(item, list | tuple)]
    admit_items(sum(lengths) * len(lengths))
    return sum(items, start)


def metered_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, counted and guarded. It takes the context, so that none runs while a template compiles."""
    guard = _GUARDS.get(name)
    iterates = name in _ITERATING
    passes = _PassArg.from_obj(filter_)

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        if meter is not None:
            meter.step()
        if iterates:
            if isinstance(value, str):
                admit_items(len(value))
            elif not isinstance(value, CONTAINERS):
                value = list(value)
        if name in _TAKING_NONE:
            args = tuple([None if type(item) is TracedNull else item for item in args])
        if guard is not None:
            guard(value, *args, **kwargs)
        if passes is None:
            result = filter_(value, *args, **kwargs)
        else:
            first = context if passes is _PassArg.context else context.eval_ctx
            result = filter_(
                context.environment if passes is _PassArg.environment else first, value, *args, **kwargs
            )
        if meter is not None:
            _count(meter, result)
        return result

    return metered


def _count(meter: Meter, result: Any) -> None:
    if isinstance(result, SIZED):
        meter.built(result)
    elif isinstance(result, int):
        meter.admit_bits(result.bit_length())


def metered_test(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """A test that compares two values, guarded."""
    return lambda value, other: test(bounded(value, other), other)
