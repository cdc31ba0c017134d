"""Which tokens of a prompt stand for features of an image or a video: `mm_token_type_ids`.

They follow from placeholder ranges alone. A pad token that the model sampled has the same id as an image's
and stands for nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from mmrender.spans import MediaSpan

TEXT_TYPE: Final = 0
TOKEN_TYPES: Final[Mapping[str, int]] = {"image": 1, "video": 2}
"""Numbers that Transformers 5 processors give, by modality; text is 0."""


def mm_token_type_ids(
    spans: Iterable[MediaSpan], length: int, dtype: npt.DTypeLike = np.int64
) -> npt.NDArray[np.integer]:
    """Return the type of each token of a prompt, of shape `(length,)`: 0 text, 1 image, 2 video.

    Rows, columns and separators that a processor writes around an image's features are text.

    Args:
        spans: The prompt's media, as `MultiModalData.spans(length)` gives them.
        length: Number of tokens.
        dtype: int64 is what processors give; int8 does for storing.
    """
    types = np.full(length, TEXT_TYPE, dtype)
    for span in spans:
        types[span.start : span.stop][span.range.is_embed] = TOKEN_TYPES[span.modality]
    return types
