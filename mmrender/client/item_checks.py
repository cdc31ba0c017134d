"""What is refused of single images: patches that do not fit their grid, and anything but data URLs."""

import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pybase64

from mmrender.errors import InputError, PlaceholderError

_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]+;base64,(?=.)", re.I | re.S)


def check_patches(
    pixels: npt.NDArray[Any],
    grid: npt.NDArray[Any],
    *,
    width: int,
    dtype: str,
    merge_size: int,
    num_embeds: int,
    where: str,
) -> None:
    """Hold patches of the Qwen kind against their grid; an engine dies of what does not fit.

    Args:
        pixels: Patches of one item, of shape `(patches, width)`.
        grid: `(t, h, w)` in patches; int64 of shape `(3,)` or `(1, 3)`.
        width: Numbers of one patch.
        dtype: What the server takes, such as `uint8`.
        merge_size: Patches in each direction that make one token.
        num_embeds: Tokens of the item's range that stand for features.
        where: The item in errors.

    Raises:
        PlaceholderError: Patches, grid and range do not fit together.
    """
    sides = [int(side) for side in np.ravel(grid)]
    if len(sides) != 3 or grid.dtype != np.int64 or any(side < 1 for side in sides):
        raise PlaceholderError(
            "the grid is not one",
            where=f"{where}.grid",
            expected="three positive numbers of int64",
            got=f"{sides} of {grid.dtype}",
        )
    patches = sides[0] * sides[1] * sides[2]
    if pixels.shape != (patches, width) or pixels.dtype.name != dtype:
        raise PlaceholderError(
            "the patches do not fit their grid",
            where=f"{where}.pixel_values",
            expected=f"{dtype} [{patches}, {width}] for the grid {sides}",
            got=f"{pixels.dtype.name} {list(pixels.shape)}",
        )
    if patches != num_embeds * merge_size**2:
        raise PlaceholderError(
            "the grid does not fit its placeholder range",
            where=f"{where}.grid",
            expected=f"{num_embeds * merge_size**2} patches for {num_embeds} tokens",
            got=f"{patches} of {sides}",
        )


def check_data_url(value: Any, *, where: str) -> str:
    """Return an image that is to be sent, which must be a `data:` URL: a path would be opened by the server.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(value, str) or not _is_data_url(value):
        shown = value[:40] if isinstance(value, str) else type(value).__name__
        raise InputError(
            "images are sent as data URLs only",
            where=where,
            expected="data:image/...;base64,...",
            got=repr(shown),
            remedy="A server may open any other text as a file of its own",
        )
    return value


def _is_data_url(text: str) -> bool:
    start = _DATA_URL.match(text)
    if start is None:
        return False
    try:
        # Decoding is the fastest way to look at every character.
        pybase64.b64decode(text[start.end() :], validate=True)
    except ValueError:
        return False
    return True
