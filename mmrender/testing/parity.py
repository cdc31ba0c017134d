"""Parity: our rendering against the reference's, on generated conversations, to the last bit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.errors import MMRenderError
from mmrender.media.pixels import ImageBackend
from mmrender.renderer import Renderer
from mmrender.spans import MediaItem, Repeat
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.testing.reference import ReferenceRenderer, ReferenceRendering
from mmrender.tokens.rendered import RenderedTokens


@dataclass(frozen=True)
class Mismatch:
    """The first thing in which the two differ, both sides as a person can read them."""

    case: int
    what: str
    ours: str
    reference: str
    messages: Sequence[dict[str, Any]]
    options: dict[str, Any]


@dataclass
class ParityReport:
    """Outcome for one model and one image back end.

    Attributes:
        cases: Conversations compared.
        refused: How many of them both sides refused.
        images: Media items compared.
        tokens: Token ids compared.
        pixel_values: Number of pixel values compared, all of which were equal.
        without_processor: Why images were left out, or None.
        mismatch: The first difference, or None.
    """

    model: str
    image_backend: str
    cases: int = 0
    refused: int = 0
    images: int = 0
    tokens: int = 0
    pixel_values: int = 0
    without_processor: str | None = None
    mismatch: Mismatch | None = None


def check_parity(
    directory: Path,
    *,
    image_backend: ImageBackend,
    cases: int,
    seed: int = 0,
    pictures: Sequence[Image.Image] = (),
    progress: Callable[[], object] = lambda: None,
) -> ParityReport:
    """Compare text, ids, tensors and placeholder ranges on generated conversations; stop at a difference.

    `image_backend` is compared with the reference's back end of the same name. `pictures` are used beside
    generated ones, and `progress` is called after each of the `cases`.
    """
    # First, since it makes torchvision importable where it can, and our adapter may run on it.
    reference = ReferenceRenderer(directory, image_backend)
    renderer = Renderer.from_pretrained(
        directory, image_backend=image_backend, content_special_tokens="parse", memo_bytes=0
    )
    report = ParityReport(directory.name, image_backend, without_processor=reference.processor_missing)
    source = random.Random(seed)
    has_images = renderer.media is not None and reference.processor is not None
    images = [*sample_images(source, 10), *pictures] if has_images else []
    media = renderer.media.processor.placeholder_tokens if renderer.media is not None else frozenset[str]()
    literals = sorted(set(renderer.tokenizer.added_ids) - media)
    maker = ConversationMaker(renderer.profile, images, literals)
    for case in range(cases):
        messages, options = maker.make(source)
        report.mismatch = _compare(renderer, reference, messages, options, report=report, case=case)
        report.cases += 1
        progress()
        if report.mismatch is not None:
            break
    return report


def _compare(
    renderer: Renderer,
    reference: ReferenceRenderer,
    messages: Sequence[Any],
    options: dict[str, Any],
    *,
    report: ParityReport,
    case: int,
) -> Mismatch | None:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    pictures = [part["image"] for parts in contents for part in parts if part["type"] == "image"]
    refusals = {}
    try:
        expected = reference.render(messages, pictures, **options)
    except Exception as error:  # noqa: BLE001 - whatever the reference raises, ours must refuse too
        refusals["reference"] = f"{type(error).__name__}: {error}"
    try:
        ours = renderer.render(messages, **options)
    except MMRenderError as error:
        refusals["ours"] = f"{type(error).__name__}: {error}"
    if len(refusals) == 1:
        sides = {"ours": "renders", "reference": "renders", **refusals}
        return Mismatch(case, "acceptance", **sides, messages=messages, options=options)
    if refusals:
        report.refused += 1
        return None
    difference = first_difference(renderer, ours, expected)
    if difference is not None:
        return Mismatch(case, *difference, messages, options)
    report.tokens += len(ours)
    for item in ours.multi_modal_data.mm_items.get("image", ()):
        report.images += 1
        report.pixel_values += item.tensors("float32")["pixel_values"].size
    return None


def first_difference(
    renderer: Renderer, ours: RenderedTokens, expected: ReferenceRendering
) -> tuple[str, str, str] | None:
    """First difference, and both sides of it; None where all is equal."""
    if ours.text != expected.text:
        start = _first_unequal(ours.text, expected.text)
        left, right = (repr(text[max(0, start - 40) : start + 80]) for text in (ours.text, expected.text))
        return "text", left, right
    if ours.token_ids != expected.ids:
        start = max(0, _first_unequal(ours.token_ids, expected.ids) - 5)
        sides = (ids[start : start + 15] for ids in (ours.token_ids, expected.ids))
        left, right = (f"[{start}:] {ids} {renderer.decode(ids)!r}" for ids in sides)
        return "token ids", left, right
    # The ranges must name exactly the feature tokens that the reference's ids hold.
    items = ours.multi_modal_data.mm_items.get("image", ())
    pieces = [piece for item in items for piece in item.expansion if isinstance(piece, Repeat)]
    feature_ids = {renderer.tokenizer.token_id(piece.token) for piece in pieces if piece.embeds}
    in_ids = [index for index, token_id in enumerate(ours.token_ids) if token_id in feature_ids]
    named: list[int] = []
    for placeholder in ours.multi_modal_data.mm_placeholders.get("image", ()):
        named += (np.flatnonzero(placeholder.is_embed) + placeholder.offset).tolist()
    if named != in_ids:
        return "placeholder ranges", str(named[:20]), str(in_ids[:20])
    return _tensor_difference(items, expected.tensors)


def _first_unequal(left: Sequence[Any], right: Sequence[Any]) -> int:
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _tensor_difference(
    items: Sequence[MediaItem], expected: dict[str, npt.NDArray[Any]]
) -> tuple[str, str, str] | None:
    if not items:
        return None
    tensors = [item.tensors("float32") for item in items]
    for key, value in tensors[0].items():
        theirs = expected.get(key)
        if theirs is None:
            return f"tensor {key}", f"shape {value.shape}", "absent"
        # Some families count samples on the first axis and the tiles of all their images on the second.
        by_sample = len(items) > 1 and theirs.shape[0] == 1
        ours = np.concatenate([entry[key] for entry in tensors], axis=1 if by_sample else 0)
        if ours.shape != theirs.shape:
            return f"shape of {key}", str(ours.shape), str(theirs.shape)
        if not np.array_equal(ours, theirs):
            worst = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())
            left = f"{ours.dtype}, first {ours.ravel()[:4]}"
            return key, left, f"{theirs.dtype}, largest difference {worst:g}"
    return None
