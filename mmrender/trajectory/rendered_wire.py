"""Rendered prompts as plain data for the codec, so that one process renders and another samples or trains."""

from collections.abc import Callable
from typing import Any, Final, get_args

import numpy as np

from mmrender.errors import TrajectoryError
from mmrender.media.wire import multi_modal_data_from_wire, multi_modal_data_to_wire
from mmrender.messages import ROLES
from mmrender.template.origin import Kind
from mmrender.tokens.rendered import RenderedTokens, TokenSpan

RENDERED_VERSION: Final = 1
_FIELDS: Final = frozenset(
    {
        "version",
        "token_ids",
        "spans",
        "kinds",
        "roles",
        "tool_names",
        "text",
        "rewritten",
        "multi_modal_data",
    }
)
_KINDS: Final = frozenset({*get_args(Kind), "template", "image", "video", "prompt", "completion"})


def rendered_to_wire(rendered: RenderedTokens, *, share: bool = True) -> dict[str, Any]:
    """Return a rendered prompt as plain data: token ids int32 `[n]`, spans int32 `[s, 5]`, the sidecar.

    The columns of a span are start, stop, message, kind (a row of `kinds`) and whether it was sampled.

    Args:
        rendered: The prompt.
        share: Whether the arrays of items are wrapped for an encoder with a table.

    Raises:
        MediaError: An item has no form on the wire.
    """
    kinds = list(dict.fromkeys(span.kind for span in rendered.spans))
    rows = [
        (span.start, span.stop, span.message, kinds.index(span.kind), span.sampled) for span in rendered.spans
    ]
    return {
        "version": RENDERED_VERSION,
        "token_ids": rendered.token_array,
        "spans": np.array(rows, np.int32).reshape(-1, 5),
        "kinds": kinds,
        "roles": list(rendered.roles),
        "tool_names": list(rendered.tool_names),
        "text": rendered.text,
        "rewritten": list(rendered.rewritten),
        "multi_modal_data": multi_modal_data_to_wire(rendered.multi_modal_data, share=share),
    }


def rendered_from_wire(wire: Any) -> RenderedTokens:
    """Return the prompt of `rendered_to_wire`. It carries no tokenizer, so it cannot `decode()`.

    Raises:
        TrajectoryError: The form is of another version or damaged.
        MediaError: The sidecar is damaged.
    """
    if not isinstance(wire, dict) or set(wire) != _FIELDS or wire["version"] != RENDERED_VERSION:
        raise _damaged("", f"version {RENDERED_VERSION} with {', '.join(sorted(_FIELDS))}", wire)
    ids, spans = wire["token_ids"], wire["spans"]
    for name, array, tail in (("token_ids", ids, ()), ("spans", spans, (5,))):
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.shape[1:] != tail:
            raise _damaged(f".{name}", f"int32 [n{', 5' if tail else ''}]", array)
    _check_texts(wire)
    sidecar = multi_modal_data_from_wire(wire["multi_modal_data"], where="rendered.multi_modal_data")
    for ranges in sidecar.mm_placeholders.values():
        for found in ranges:
            if found.offset + found.length > len(ids):
                raise _damaged(".multi_modal_data", f"ranges within {len(ids)} tokens", found)
    return RenderedTokens(
        token_ids=ids.tolist(),
        spans=_spans(spans.tolist(), wire["kinds"], len(ids), len(wire["roles"])),
        roles=tuple(wire["roles"]),
        tool_names=tuple(wire["tool_names"]),
        multi_modal_data=sidecar,
        text=wire["text"],
        rewritten=tuple(wire["rewritten"]),
    )


def _check_texts(wire: dict[str, Any]) -> None:
    checks: dict[str, Callable[[Any], bool]] = {
        "kinds": lambda value: value in _KINDS,
        "roles": lambda value: value in ROLES,
        "tool_names": lambda value: value is None or isinstance(value, str),
        "rewritten": lambda value: type(value) is int and 0 <= value < len(wire["roles"]),
    }
    for name, fits in checks.items():
        values = wire[name]
        # Unhashable values cannot be looked up, and none of these lists may hold any.
        scalars = isinstance(values, list) and all(isinstance(value, str | int | None) for value in values)
        if not scalars or not all(map(fits, values)):
            raise _damaged(f".{name}", "a list of known values", values)
    if not isinstance(wire["text"], str):
        raise _damaged(".text", "text", wire["text"])
    if len(wire["tool_names"]) not in (0, len(wire["roles"])):
        raise _damaged(".tool_names", f"{len(wire['roles'])} names or None", wire["tool_names"])


def _spans(rows: list[list[int]], kinds: list[Any], length: int, messages: int) -> tuple[TokenSpan, ...]:
    spans = []
    end = 0
    for index, (start, stop, message, kind, sampled) in enumerate(rows):
        known = -1 <= message < messages and 0 <= kind < len(kinds) and sampled in (0, 1)
        if start != end or stop < start or not known:
            raise _damaged(f".spans[{index}]", f"a span from token {end} on", rows[index])
        spans.append(TokenSpan(start, stop, message, kinds[kind], bool(sampled)))
        end = stop
    if end != length:
        raise _damaged(".spans", f"spans up to token {length}", end)
    return tuple(spans)


def _damaged(path: str, expected: str, got: Any) -> TrajectoryError:
    text = f"{got.dtype} {list(got.shape)}" if isinstance(got, np.ndarray) else repr(got)[:80]
    return TrajectoryError(
        "a rendered prompt cannot be read", where=f"rendered{path}", expected=expected, got=text
    )
