"""What a server's `/render` route says of one image, checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mmrender.errors import EngineReplyError

MODALITY: Final = "image"


class ServedImage(msgspec.Struct, frozen=True):
    """One image as the server processed it: its placeholder tokens, base64 item and hash."""

    tokens: tuple[int, ...]
    item: str
    mm_hash: str

    @property
    def nbytes(self) -> int:
        """Bytes it keeps, near enough for a bound on a cache."""
        return len(self.item) + 8 * len(self.tokens)


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]
    kwargs_data: dict[str, list[str | None]] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


def read_served_image(body: bytes | memoryview, where: str) -> ServedImage:
    """Read the answer to a request that held exactly one image.

    Raises:
        EngineReplyError: It is not such an answer: another form, another number of images, tensors left out,
            or a placeholder outside the prompt.
    """
    try:
        rendered = msgspec.json.decode(body, type=_Rendered)
    except msgspec.MsgspecError as error:
        raise EngineReplyError(
            "the render route answered in an unknown form", where=where, got=str(error)
        ) from error
    features = rendered.features
    if features is None:
        raise _unusable("no image features", where, "features with one image", "none")
    found: dict[str, Mapping[str, Sequence[Any]]] = {
        "mm_hashes": features.mm_hashes,
        "mm_placeholders": features.mm_placeholders,
        "kwargs_data": features.kwargs_data or {},
    }
    for name, by_modality in found.items():
        counts = {modality: len(values) for modality, values in by_modality.items() if values}
        if counts != {MODALITY: 1}:
            raise _unusable("another number of images", f"{where}.features.{name}", "one image", str(counts))
    item = found["kwargs_data"][MODALITY][0]
    if not isinstance(item, str):
        raise _unusable(
            "no tensors for the image",
            f"{where}.features.kwargs_data['image'][0]",
            "a base64 item",
            "null",
        )
    place = features.mm_placeholders[MODALITY][0]
    stop = place.offset + place.length
    if not 0 <= place.offset < stop <= len(rendered.token_ids):
        raise _unusable(
            "a placeholder outside the prompt",
            f"{where}.features.mm_placeholders['image'][0]",
            f"tokens within [0, {len(rendered.token_ids)})",
            f"[{place.offset}, {stop})",
        )
    return ServedImage(tuple(rendered.token_ids[place.offset : stop]), item, features.mm_hashes[MODALITY][0])


def _unusable(problem: str, where: str, expected: str, got: str) -> EngineReplyError:
    return EngineReplyError(
        f"the render route answered with {problem}", where=where, expected=expected, got=got
    )
