"""`tojson` with provenance: the text of `json.dumps`, attributed to the values it shows.

A value of one origin is dumped whole by `json.dumps`. A container that the template built, or one that
holds several origins (a whole message), is laid out here by the rules of `json.encoder`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrender.template.limits import admit, weigh
from mmrender.template.traced import TracedStr, concat, mapped, plain
from mmrender.template.values import TracedBool, TracedDict, TracedFloat, TracedInt, TracedList, TracedNull

_PROXIES = (TracedInt, TracedFloat, TracedBool, TracedNull)
_NARROW = 16
_WIDEST = 10_000_000
"""An indent beyond this is refused whatever it indents."""


@dataclass(frozen=True, slots=True)
class _Layout:
    ensure_ascii: bool
    indent: str | None
    item_separator: str
    key_separator: str
    sort_keys: bool

    @property
    def breaks_lines(self) -> bool:
        """Whether a separator holds a newline, so that not every newline of a dump is one of its layout."""
        return "\n" in self.item_separator or "\n" in self.key_separator


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> TracedStr:
    """Dump as the `tojson` filter of Transformers does: no HTML escapes, non-ASCII text kept."""
    step = " " * min(indent, _WIDEST) if isinstance(indent, int) else indent
    if separators is None:
        separators = (", ", ": ") if step is None else (",", ": ")
    added = len(step or "") + sum(map(len, separators))
    if added > _NARROW or not isinstance(value, TracedDict | TracedList):
        # What the template built may hold one list many times, and what it adds may be long.
        admit(weigh(value) * added)
    layout = _Layout(ensure_ascii, step, separators[0], separators[1], sort_keys)
    return _dumped(value, layout, 0) if _is_mixed(value) else TracedStr(_plain_dump(value, layout))


def _is_mixed(value: Any) -> bool:
    """Whether some part of the value has an origin."""
    if isinstance(
        value, TracedStr | TracedDict | TracedList | TracedNull | TracedInt | TracedFloat | TracedBool
    ):
        return True
    if isinstance(value, Mapping):
        return any(_is_mixed(key) or _is_mixed(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(_is_mixed(item) for item in value)
    return False


def _source(value: Any) -> Any:
    if isinstance(value, TracedDict | TracedList):
        return value._source
    if isinstance(value, TracedBool):
        return bool(value)
    return None if isinstance(value, TracedNull) else value


def _dumped(value: Any, layout: _Layout, level: int) -> TracedStr:
    if isinstance(value, TracedDict | TracedList) and not layout.breaks_lines:
        text = _plain_dump(value._source, layout)
        if layout.indent and level:
            text = text.replace("\n", "\n" + layout.indent * level)
        return TracedStr.whole(text, value._origin)
    if isinstance(value, TracedStr):
        return _quoted(value, layout.ensure_ascii)
    if isinstance(value, _PROXIES):
        return TracedStr.whole(json.dumps(_source(value)), value._origin)
    if isinstance(value, Mapping):
        keys = sorted(value) if layout.sort_keys else list(value)
        members = [
            concat([_key(key, layout), layout.key_separator, _dumped(value[key], layout, level + 1)])
            for key in keys
        ]
        return _bracketed("{", members, "}", layout, level)
    if isinstance(value, list | tuple):
        return _bracketed("[", [_dumped(item, layout, level + 1) for item in value], "]", layout, level)
    return TracedStr(_plain_dump(value, layout))


def _plain_dump(value: Any, layout: _Layout) -> str:
    return json.dumps(
        value,
        ensure_ascii=layout.ensure_ascii,
        indent=layout.indent,
        separators=(layout.item_separator, layout.key_separator),
        sort_keys=layout.sort_keys,
    )


def _bracketed(
    opening: str, members: list[TracedStr], closing: str, layout: _Layout, level: int
) -> TracedStr:
    if not members:
        return TracedStr(opening + closing)
    if layout.indent is None:
        return concat([opening, TracedStr(layout.item_separator).join(members), closing])
    inner = "\n" + layout.indent * (level + 1)
    separator = TracedStr(layout.item_separator + inner)
    return concat([opening, inner, separator.join(members), "\n" + layout.indent * level, closing])


def _key(key: Any, layout: _Layout) -> TracedStr:
    if isinstance(key, str):
        return _quoted(key if isinstance(key, TracedStr) else TracedStr(key), layout.ensure_ascii)
    # `json` writes other scalar keys as the text of their JSON value.
    return TracedStr(json.dumps({_source(key): 0})[1:-4])


def _quoted(value: TracedStr, ensure_ascii: bool) -> TracedStr:
    def escaped(text: str) -> str:
        return json.dumps(plain(text), ensure_ascii=ensure_ascii)[1:-1]

    return concat(['"', mapped(value, escaped), '"'])
