"""Images and videos that are passed beside the messages, put into the parts that stand for them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from mmrender.content.coerce import as_sequence, describe
from mmrender.content.sources import media_source
from mmrender.errors import MessageError
from mmrender.messages import ImagePart, Message, Modality, Part, VideoPart


def attach_media(
    messages: Sequence[Message],
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    *,
    where: str = "messages",
) -> tuple[Message, ...]:
    """Fill the parts that have no source, in order; parts that have one are passed over.

    Args:
        messages: Canonical messages.
        images: One source per `ImagePart(None)`, in any form that a part may give one; None leaves them.
        videos: The same for `VideoPart(None)`.
        where: What paths of parts in errors start with.

    Raises:
        MessageError: There are fewer or more of them than parts that wait for one.
    """
    queues: dict[type, _Queue] = {}
    if images is not None:
        queues[ImagePart] = _Queue("image", images, messages, where)
    if videos is not None:
        queues[VideoPart] = _Queue("video", videos, messages, where)
    if not any(queue.slots for queue in queues.values()):
        return tuple(messages)
    return tuple([_fill(message, queues) for message in messages])


class _Queue:
    """Sources of one modality that wait for their parts."""

    def __init__(self, modality: Modality, sources: Any, messages: Sequence[Message], where: str) -> None:
        items = as_sequence(sources)
        if items is None:
            raise MessageError(
                f"{modality}s come in a list", where=f"{modality}s", expected="a list", got=describe(sources)
            )
        self.slots = _slots(modality, messages, where)
        if len(items) != len(self.slots):
            raise _miscount(modality, len(items), self.slots)
        self._sources = iter(
            [media_source(item, f"{modality}s[{i}]", modality) for i, item in enumerate(items)]
        )

    def take(self) -> Any:
        return next(self._sources)


def _slots(modality: Modality, messages: Sequence[Message], where: str) -> list[str]:
    kind = ImagePart if modality == "image" else VideoPart
    return [
        f"{where}[{index}].content[{position}]"
        for index, message in enumerate(messages)
        for position, part in message.media()
        if type(part) is kind and part.source is None
    ]


def _miscount(modality: Modality, given: int, slots: list[str]) -> MessageError:
    few = given < len(slots)
    return MessageError(
        f"no {modality} is left for this part" if few else f"no part waits for this {modality}",
        where=slots[given] if few else f"{modality}s[{len(slots)}]",
        expected=f"{len(slots)} {modality}{'' if len(slots) == 1 else 's'}",
        got=str(given),
        remedy=f'Each {{"type": "{modality}"}} part without a source of its own takes one, in order',
    )


def _fill(message: Message, queues: dict[type, _Queue]) -> Message:
    if not isinstance(message.content, tuple):
        return message
    parts = [_take_turn(part, queues.get(type(part))) for part in message.content]
    return msgspec.structs.replace(message, content=tuple(parts))


def _take_turn(part: Part, queue: _Queue | None) -> Part:
    if queue is None or not isinstance(part, ImagePart | VideoPart) or part.source is not None:
        return part
    return msgspec.structs.replace(part, source=queue.take())
