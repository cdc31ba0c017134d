"""What is built once for each template and set of template arguments, and then shared."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from mmrender.rendering.memo import value_key
from mmrender.template.chat import ChatTemplate

Built = TypeVar("Built")

_MOST = 256


class PerTemplate(Generic[Built]):
    """Builds on first use. Safe to use from many threads; two that come at once may both build.

    Args:
        build: Makes the value for a template and its arguments. Arguments without a key, such as open files,
            are built for anew each time.
    """

    def __init__(self, build: Callable[[ChatTemplate, Mapping[str, Any]], Built]) -> None:
        self._build = build
        self._known: dict[Any, Built] = {}

    def get(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> Built:
        """The value for a template with these arguments."""
        given = value_key(dict(arguments)) if arguments else ()
        if given is None:
            return self._build(template, arguments)
        key = (template.name, given)
        known = self._known.get(key)
        if known is None:
            known = self._build(template, dict(arguments))
            if len(self._known) < _MOST:
                self._known[key] = known
        return known
