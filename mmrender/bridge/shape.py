"""The shape of an extension: all of it that can decide what a template looks at.

A proof made for one extension holds for every other of its shape. Texts count only in so far as the template
tests them, so the texts that it looks for are read from its source.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from mmrender.messages import Message, TextPart

_SEARCHES = frozenset(
    [
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "removeprefix",
        "removesuffix",
    ]
)
_SCHEMA = frozenset(
    ["text", "image", "image_url", "video", "video_url", "audio", "type", "content", "thinking"]
)
"""Keys of parts and messages; `'image' in part` asks for a key, not for text."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What a template's source says that it reads.

    Attributes:
        marks: Texts that it looks for: `mark in x`, `x == mark`, `x.startswith(mark)` and their like.
        fields: Names that it reads as attributes or keys, of whatever it is but its own namespaces.
    """

    marks: tuple[str, ...]
    fields: frozenset[str]


def reads_of(tree: nodes.Template) -> Reads:
    """Read the marks and fields off a parsed template."""
    marks = {text for compare in tree.find_all(nodes.Compare) for text in _compared(compare)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            marks |= {text for argument in call.args for text in _texts(argument)}
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    fields |= {text for node in tree.find_all(nodes.Getitem) for text in _texts(node.arg)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get" and call.args:
            fields |= _texts(call.args[0])
    own = {node.attr for node in tree.find_all(nodes.NSRef)}
    return Reads(tuple(sorted(marks - _SCHEMA - {""})), frozenset(fields - own))


def _compared(compare: nodes.Compare) -> set[str]:
    """Texts sought by `in`, and texts of several words or with marks that `==` compares with."""
    operands = [compare.expr, *[operand.expr for operand in compare.ops]]
    operators = {operand.op for operand in compare.ops}
    texts = {text for operand in operands for text in _texts(operand)}
    if operators <= {"in", "notin"}:
        return _texts(compare.expr)
    return {text for text in texts if not text.isidentifier()}


def _texts(node: nodes.Node) -> set[str]:
    if isinstance(node, nodes.Const):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, nodes.Tuple | nodes.List):
        return {text for item in node.items for text in _texts(item)}
    return set()


def shape_of(messages: Sequence[Message], marks: Sequence[str]) -> Hashable:
    """What extensions must share to share a proof; more than three alike in a row count as three."""
    shapes = [_message_shape(message, marks) for message in messages]
    return tuple([shape for index, shape in enumerate(shapes) if not _repeats(shapes, index, 3)])


def _repeats(items: Sequence[Any], index: int, most: int) -> bool:
    return index >= most and all(items[index - back] == items[index] for back in range(1, most + 1))


def text_in(message: Message) -> str:
    """All text of a message's content."""
    content = message.content
    if isinstance(content, tuple):
        return "\n".join([part.text for part in content if isinstance(part, TextPart)])
    return content or ""


def _message_shape(message: Message, marks: Sequence[str]) -> tuple[Any, ...]:
    content = message.content
    kinds: tuple[Any, ...] | None = None
    text = text_in(message)
    if isinstance(content, tuple):
        every = [type(part).__name__ for part in content]
        kinds = tuple([kind for index, kind in enumerate(every) if not _repeats(every, index, 2)])
    return (
        message.role,
        content is None,
        kinds,
        not text.strip(),
        tuple([mark for mark in marks if mark in text]),
        message.name is None,
        message.tool_call_id is None,
        *message.extra,
    )
