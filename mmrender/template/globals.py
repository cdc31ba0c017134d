"""Names that every chat template may use, as Transformers gives them."""

import datetime
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from mmrender.template.formatting import text_of
from mmrender.template.limits import admit
from mmrender.template.traced import plain

CLOCK: ContextVar[Callable[[], datetime.datetime]] = ContextVar("mmrender_template_clock")
"""What `strftime_now` reads in the rendering of this context."""


class RefusedByTemplate(jinja2.TemplateError):
    """What the template passed to its own `raise_exception`."""


class _TemplateNamespace(Namespace):
    """A namespace without underscore names, so that templates cannot reach Python internals through it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the underscore name {name!r}")


class _TemplateDict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Build a dict of equal values."""
        return dict.fromkeys(*args)


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedByTemplate(plain(text_of(message)))


def _strftime_now(format: str) -> str:
    # Python tries buffers of up to 256 times the length of the format.
    admit(256 * len(format))
    return CLOCK.get()().strftime(plain(format))


GLOBALS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "dict": _TemplateDict(),
    "namespace": _TemplateNamespace,
}
