"""Which media part each placeholder stands for, and the error where the two do not agree.

Placeholders and parts come in the same order. Where the template's own loop says which message a placeholder
belongs to, that must be the part's message.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mmrender.errors import PlaceholderError
from mmrender.messages import ImagePart, Message, Modality, VideoPart
from mmrender.tokens.encode import Placeholder


class MediaPlace(NamedTuple):
    """A media part of the conversation and its path."""

    where: str
    message: int
    modality: Modality
    part: ImagePart | VideoPart


def media_places(messages: Sequence[Message], *, where: str = "messages") -> list[MediaPlace]:
    """Every media part, in order, with paths that begin with `where`."""
    return [
        MediaPlace(
            f"{where}[{index}].content[{position}]",
            index,
            "image" if isinstance(part, ImagePart) else "video",
            part,
        )
        for index, message in enumerate(messages)
        if type(message.content) is tuple
        for position, part in message.media()
    ]


def check_placement(
    places: Sequence[MediaPlace],
    placeholders: Sequence[Placeholder],
    image_roles: Iterable[str],
    *,
    where: str = "messages",
) -> None:
    """Require one placeholder for each part, in order.

    Args:
        places: The media parts.
        placeholders: What the template wrote.
        image_roles: Roles in which the template is known to write placeholders, for the remedy.
        where: What the messages are called in errors.

    Raises:
        PlaceholderError: A part has no placeholder, or a placeholder no part; `where` is the part's path.
    """
    if len(places) > len(placeholders):
        dropped = _first_dropped(places, placeholders)
        roles = ", ".join(image_roles) or "none"
        raise PlaceholderError(
            f"the chat template drops this {dropped.modality}",
            where=dropped.where,
            expected=f"{len(places)} placeholders, one for each media part",
            got=f"{len(placeholders)}",
            remedy=f"Put it into a message of a role whose images the template writes (found: {roles})",
        )
    if len(placeholders) > len(places):
        extra = placeholders[len(places)]
        raise PlaceholderError(
            "the chat template wrote more placeholders than there are media parts",
            where=f"{where}[{extra.message}]" if extra.message >= 0 else f"character {extra.start}",
            expected=f"{len(places)}",
            got=f"{len(placeholders)}",
            remedy="A template that repeats an image cannot be rendered with it",
        )
    for place, placeholder in zip(places, placeholders, strict=True):
        if place.modality != placeholder.modality or placeholder.message not in (-1, place.message):
            raise PlaceholderError(
                "the chat template writes media in another order than the conversation",
                where=place.where,
                expected=f"{place.modality} of {where}[{place.message}]",
                got=f"{placeholder.modality} of {where}[{placeholder.message}]",
                remedy="Put the media parts of a message in the order in which the template writes them",
            )


def _first_dropped(places: Sequence[MediaPlace], placeholders: Sequence[Placeholder]) -> MediaPlace:
    """The first part beyond what its message's placeholders cover."""
    written = Counter((placeholder.message, placeholder.modality) for placeholder in placeholders)
    if any(message < 0 for message, _ in written):
        return places[len(placeholders)]
    for place in places:
        key = (place.message, place.modality)
        if not written[key]:
            return place
        written[key] -= 1
    return places[-1]
