"""The prompt that a server says it used, held against ours."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrender.client.backend import EngineRequest
from mmrender.errors import EngineMismatchError


def check_prompt_seen(
    seen: Sequence[int], request: EngineRequest, *, where: str = "prompt_token_ids"
) -> None:
    """Require the same tokens.

    Args:
        seen: The prompt as the server widened it.
        request: What was asked; its `prompt_ids` are widened here.
        where: The field in errors.

    Raises:
        EngineMismatchError: They differ; the error names the first difference, and the image it belongs to.
    """
    theirs, ours = np.asarray(seen), np.asarray(request.prompt_ids)
    if np.array_equal(theirs, ours):
        return
    shorter = min(len(theirs), len(ours))
    apart = np.flatnonzero(theirs[:shorter] != ours[:shorter])
    first = int(apart[0]) if len(apart) else shorter
    raise EngineMismatchError(
        "the server saw another prompt than the renderer's",
        where=f"{where}[{first}]{_image_at(first, request)}",
        expected=f"{_token(ours, first)} of {len(ours)}",
        got=f"{_token(theirs, first)} of {len(theirs)}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


def _token(ids: Any, index: int) -> str:
    return f"the token {ids[index]}" if index < len(ids) else "the end"


def _image_at(index: int, request: EngineRequest) -> str:
    """The item whose tokens stand there, or end there."""
    for modality, ranges in request.multi_modal_data.mm_placeholders.items():
        for number, placeholder in enumerate(ranges):
            if placeholder.offset <= index <= placeholder.offset + placeholder.length:
                return f" ({modality} {number})"
    return ""
