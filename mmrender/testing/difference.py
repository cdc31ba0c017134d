"""The first difference between a rendering and its reference: in text, ids, placeholder ranges or tensors."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.renderer import Renderer
from mmrender.sidecar import Repeat, common_prefix
from mmrender.testing.reference import ReferenceRendering
from mmrender.tokens.rendered import RenderedTokens


class Difference(NamedTuple):
    """The kind of value that differs, and both sides as a person can read them."""

    what: str
    ours: str
    reference: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Two conversations that differ in the same way have equal kinds."""
        is_error = self.what == "acceptance"
        return (self.what, *(side.partition(":")[0] for side in self[1:])) if is_error else (self.what,)


def first_difference(
    renderer: Renderer, ours: RenderedTokens, expected: ReferenceRendering, values: Counter[str] | None = None
) -> Difference | None:
    """Return the first difference from the reference's rendering, or None. `values` counts equal values."""
    return (
        text_difference(ours.text or "", expected.text)
        or id_difference(renderer, ours.token_ids, expected.ids)
        or range_difference(renderer, ours)
        or tensor_difference(ours, expected, values)
    )


def text_difference(ours: str, theirs: str, what: str = "text") -> Difference | None:
    """Compare texts, and show the characters around the first difference."""
    if ours == theirs:
        return None
    start = max(0, common_prefix(ours, theirs) - 40)
    return Difference(what, *(repr(text[start : start + 120]) for text in (ours, theirs)))


def id_difference(
    renderer: Renderer, ours: Sequence[int], theirs: Sequence[int], what: str = "token ids"
) -> Difference | None:
    """Compare token ids, and show the ids and the text around the first difference."""
    if ours == theirs:
        return None
    start = max(0, common_prefix(ours, theirs) - 5)
    sides = [list(ids[start : start + 15]) for ids in (ours, theirs)]
    return Difference(what, *(f"[{start}:] {ids} {renderer.decode(ids)!r}" for ids in sides))


def range_difference(renderer: Renderer, ours: RenderedTokens) -> Difference | None:
    """Check that placeholder ranges name exactly the feature tokens among the ids."""
    spans = ours.multi_modal_data.spans(len(ours))
    pieces = [piece for span in spans for piece in span.item.expansion]
    features = [piece.token for piece in pieces if isinstance(piece, Repeat) and piece.embeds]
    feature_ids = {renderer.tokenizer.token_id(token) for token in features}
    in_ids = [index for index, token_id in enumerate(ours.token_ids) if token_id in feature_ids]
    named = sorted(
        index for span in spans for index in (np.flatnonzero(span.range.is_embed) + span.start).tolist()
    )
    return Difference("placeholder ranges", str(named[:20]), str(in_ids[:20])) if named != in_ids else None


def tensor_difference(
    rendered: RenderedTokens, expected: ReferenceRendering, values: Counter[str] | None = None
) -> Difference | None:
    """Compare the tensors of every item with its part of the reference's batch."""
    values = Counter() if values is None else values
    spans = rendered.multi_modal_data.spans()
    if not spans:
        return None
    tensors = [span.item.tensors("float32") for span in spans]
    columns = {key: [entry[key] for entry in tensors if key in entry] for entry in tensors for key in entry}
    # Items do not hold the number of images, nor tensors along the tokens, which follow from ids and ranges.
    counts = {len(spans), *map(len, rendered.multi_modal_data.mm_items.values())}
    reference = {
        key: value
        for key, value in expected.tensors.items()
        if key in columns
        or (not (value.shape == (1,) and value[0] in counts) and value.shape[:2] != (1, len(expected.ids)))
    }
    for key in {**reference, **columns}:
        if key not in columns:
            return Difference(f"tensor {key}", "absent", f"shape {reference[key].shape}")
        ours = columns[key]
        if key not in reference:
            return Difference(f"tensor {key}", f"shape {ours[0].shape}", "absent")
        parts = parts_of_batch(ours, reference[key])
        if parts is None:
            shapes = str([each.shape for each in ours])
            return Difference(f"shape of {key}", shapes, str(reference[key].shape))
        for left, right in zip(ours, parts, strict=True):
            if not np.array_equal(left, right):
                worst = float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max())
                side = f"{left.dtype}, first {left.ravel()[:4]}"
                return Difference(key, side, f"{right.dtype}, largest difference {worst:g}")
            values[key] += left.size
    return None


def parts_of_batch(
    ours: Sequence[npt.NDArray[Any]], batch: npt.NDArray[Any]
) -> list[npt.NDArray[Any]] | None:
    """Cut a batch into the parts of its items, without padding. None if the shapes do not fit.

    Most families join images on the first axis. Some count samples there, and the tiles of all images on the
    second. Further axes are padded with one value to the largest image.
    """
    for axis in range(min(2, batch.ndim)):
        lengths = [item.shape[axis] for item in ours if item.ndim == batch.ndim]
        if len(lengths) < len(ours) or sum(lengths) != batch.shape[axis]:
            continue
        cuts = np.cumsum(lengths)[:-1]
        is_padding = np.ones(batch.shape, bool)
        parts = []
        for item, piece, rest in zip(
            ours, np.split(batch, cuts, axis), np.split(is_padding, cuts, axis), strict=True
        ):
            inside = tuple(map(slice, item.shape))
            rest[inside] = False
            parts.append(piece[inside])
        fits = all(item.shape == part.shape for item, part in zip(ours, parts, strict=True))
        if fits and len(np.unique(batch[is_padding])) < 2:
            return parts
    return None
