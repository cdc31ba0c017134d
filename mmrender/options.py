"""Options of a renderer and of its calls: their values, checked by name."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias, get_args

from mmrender.bridge.bridge import History
from mmrender.content.values import describe
from mmrender.errors import RenderError, check_option
from mmrender.media.policy import MediaPolicy
from mmrender.media.resolve import MediaCache
from mmrender.messages import ROLES
from mmrender.processes import BoundedProcesses
from mmrender.rendering import Unprinted
from mmrender.template.chat import ToolImages
from mmrender.template.limits import TemplateLimits
from mmrender.template.text import Author
from mmrender.tokens.encode import DEFAULT_RULES, SpecialTokenRule

SpecialTokenRules: TypeAlias = SpecialTokenRule | Mapping[Author, SpecialTokenRule]

_VALUES: Final[Mapping[str, Sequence[str]]] = {
    "tool_images": get_args(ToolImages),
    "unprinted": get_args(Unprinted),
    "history": get_args(History),
}
"""Options with a few values."""
_TYPES: Final[Mapping[str, tuple[Any, str]]] = {
    "name_or_path": (str | os.PathLike, "a directory or a hub id"),
    "media_policy": (MediaPolicy | None, "a MediaPolicy, or None"),
    "media_cache": (MediaCache | None, "a MediaCache, or None"),
    "limits": (TemplateLimits | None, "a TemplateLimits, or None"),
    "template_processes": (BoundedProcesses | None, "a BoundedProcesses, or None"),
    "clock": (Callable, "a function that returns the time"),
    "use_audio_in_video": (bool, "True or False"),
    "previous_roles": (Collection | None, "a collection of roles"),
}
"""Options of one type, and the accepted values in words."""


def check_options(**options: Any) -> None:
    """Refuse the first option that is not one of its values.

    Raises:
        RenderError: There is one.
    """
    for name, value in options.items():
        if name in _VALUES:
            check_option(name, value, _VALUES[name], error=RenderError)
        kind, expected = _TYPES.get(name, (object, ""))
        is_valid = isinstance(value, kind)
        if name == "previous_roles" and is_valid and value is not None:
            is_valid = not isinstance(value, str) and all(role in ROLES for role in value)
        if not is_valid:
            raise RenderError(
                "unknown value of an option", where=name, expected=expected, got=describe(value)
            )


def special_token_rules(rules: SpecialTokenRules) -> Mapping[Author, SpecialTokenRule]:
    """Complete and check `content_special_tokens`."""
    by_author = dict.fromkeys(DEFAULT_RULES, rules) if isinstance(rules, str) else {**DEFAULT_RULES, **rules}
    for author, rule in by_author.items():
        where = "content_special_tokens"
        check_option(where, author, tuple(DEFAULT_RULES), error=RenderError)
        check_option(f"{where}[{author!r}]", rule, get_args(SpecialTokenRule), error=RenderError)
    return by_author
