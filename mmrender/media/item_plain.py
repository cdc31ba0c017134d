"""What the plain forms of all media items share: pixel arithmetics by row, identities, expansions, keys."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast, get_args

import numpy.typing as npt
import xxhash

import mmcodecs
from mmrender.media.item_fields import WireFields, checked_integer, wire_error
from mmrender.media.processors.arithmetic import PixelArithmetic
from mmrender.media.processors.base import IMAGE_BACKENDS, ImageBackend
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, Repeat, Text

COMMON: Final = ("kind", "modality", "identity", "size", "grid", "expansion")
"""Fields of every item."""
_MODALITIES: Final = get_args(Modality)

Plain: TypeAlias = dict[str, Any]


class ArithmeticTable:
    """Distinct pixel arithmetics, by row."""

    def __init__(self) -> None:
        self.rows: list[Plain] = []
        self._known: dict[PixelArithmetic, int] = {}

    def row(self, arithmetic: PixelArithmetic) -> int:
        """Return the row of an arithmetic, a new one if it has none."""
        row = self._known.get(arithmetic)
        if row is None:
            row = self._known[arithmetic] = len(self.rows)
            self.rows.append(
                {
                    "mean": list(arithmetic.mean),
                    "std": list(arithmetic.std),
                    "rescale": arithmetic.rescale,
                    "backend": arithmetic.backend,
                }
            )
        return row


def read_arithmetics(value: Any, where: str) -> list[PixelArithmetic]:
    """Read the table back.

    Raises:
        MediaError: It is malformed, or a deviation or factor is zero.
    """
    if not isinstance(value, list | tuple):
        raise wire_error("a table of items is malformed", where, "a list", value)
    return [_arithmetic(row, f"{where}[{index}]") for index, row in enumerate(value)]


def _arithmetic(value: Any, where: str) -> PixelArithmetic:
    fields = WireFields(value, where, ("mean", "std", "rescale", "backend"))
    mean, std = fields.reals("mean", 3), fields.reals("std", 3)
    rescale = fields.real("rescale")
    if 0.0 in (*std, rescale):
        raise wire_error("pixels would be divided by zero", where, "std and rescale other than 0", list(std))
    backend = cast(ImageBackend, fields.text("backend", IMAGE_BACKENDS))
    return PixelArithmetic((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), rescale, backend)


def keyed(item: MediaItem, name: str, array: npt.NDArray[Any], share: bool) -> Any:
    """Return an array of an item under the key that stands for it, or as it is."""
    if not share:
        return array
    return mmcodecs.Shared(array, bytes.fromhex(item.identity) + xxhash.xxh3_64_digest(name.encode()))


def common_fields(item: MediaItem, where: str) -> Plain:
    """Return what every item has, in plain form.

    Raises:
        MediaError: The identity is no hex digest of 32 bytes.
    """
    try:
        identity = bytes.fromhex(item.identity)
    except (ValueError, TypeError):
        identity = b""
    if len(identity) != 32 or identity.hex() != item.identity:
        raise wire_error("an identity is malformed", where, "64 lower-case hex digits", item.identity)
    expansion: list[Any] = []
    for piece in item.expansion:
        is_text = isinstance(piece, Text)
        expansion += [piece.text, -1, False] if is_text else [piece.token, piece.count, piece.embeds]  # type: ignore[union-attr]
    return {
        "modality": item.modality,
        "identity": identity,
        "size": list(item.size),
        "grid": list(item.grid),
        "expansion": expansion,
    }


def read_expansion(value: Any, where: str) -> Expansion:
    """Read an expansion back from triples `text, count, embeds`, count -1 for a piece of text.

    Raises:
        MediaError: It is malformed.
    """
    if not isinstance(value, list | tuple) or len(value) % 3:
        raise wire_error("an expansion is malformed", where, "triples of text, count, embeds", value)
    pieces: list[Text | Repeat] = []
    for index in range(0, len(value), 3):
        text, count, embeds = value[index : index + 3]
        if not isinstance(text, str) or type(embeds) is not bool:
            got = [text, count, embeds]
            raise wire_error("an expansion is malformed", f"{where}[{index}]", "text, count, embeds", got)
        checked_integer(count, f"{where}[{index + 1}]", least=-1)
        pieces.append(Text(text) if count < 0 else Repeat(text, count, embeds))
    return tuple(pieces)


def num_embeds(expansion: Expansion) -> int:
    """Return how many tokens of an expansion stand for features."""
    return sum(piece.count for piece in expansion if isinstance(piece, Repeat) and piece.embeds)


def read_size(fields: WireFields) -> tuple[int, int]:
    """Return height and width."""
    height, width = fields.integers("size", 2)
    return height, width


def read_modality(fields: WireFields) -> Modality:
    """Return the modality."""
    return cast(Modality, fields.text("modality", _MODALITIES))


def arithmetic_of(arithmetics: Sequence[PixelArithmetic], fields: WireFields) -> PixelArithmetic:
    """Return the row of the table that the field `arithmetic` names."""
    return arithmetics[fields.integer("arithmetic", len(arithmetics) - 1)]
