"""Media items as vLLM takes them: tensors in the model's field layout, and the requests that bring them.

vLLM joins the tensors of many requests by field layout. Each item is encoded by itself, its slices naming
itself alone, so its bytes are the same in every request, and are encoded once.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmcodecs.arrays import RawTensor
from mmrender.client.exchange import BYTES_PER_ID, check_size, encoded_once
from mmrender.client.server_facts import Process
from mmrender.client.transport import JSONText
from mmrender.client.vllm_fields import LAYOUTS, Flat, Layout, Shared, collate_items
from mmrender.errors import EngineUnsupportedError, PlaceholderError
from mmrender.media.item import PatchItem, ProcessedItem, time_steps
from mmrender.media.levels import Levels, expanded
from mmrender.media.vllm_items import encode_mm_kwargs_item_as_bytes
from mmrender.sidecar import MediaItem, MediaSpan

GENERATE_PATH: Final = "/inference/v1/generate"
SIZE_SETTING: Final = "VLLMBackend(max_body_bytes=...)"

PixelDtype: TypeAlias = Literal["uint8", "float32", "bfloat16", "float16"]
"""Pixels on the wire: `uint8` levels that the server normalises itself, or normalised values."""

PIXEL_DTYPES: Final[tuple[PixelDtype, ...]] = get_args(PixelDtype)


@dataclass(frozen=True, slots=True)
class WireForm:
    """Form in which a server takes the items of one processor.

    Attributes:
        layout: How fields are joined.
        pixels: Dtype on the wire of the reference processor's floating-point tensors.
    """

    layout: Layout
    pixels: PixelDtype

    def mm_hash(self, item: MediaItem) -> str:
        """Name of an item's data on the server, which keeps the data that first came under a name.

        It names the dtype too, so data of a wrong kind is never taken for the right one.
        """
        return f"{item.identity}-{self.pixels}"


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The images of a prompt as tensors for one server. `prompts` are the requests that bring them.

    Attributes:
        process: The server process.
        ids: The prompt, placeholders widened, of shape `(n,)`.
        spans: Items in prompt order.
        forms: How the server takes each item, by identity.
        by_hash: Whether data that the server has is left out.
        max_bytes: The longest body that the server's frontend takes. None for no bound.
    """

    process: Process
    ids: npt.NDArray[Any]
    spans: Sequence[MediaSpan]
    forms: Mapping[str, WireForm]
    by_hash: bool
    max_bytes: int | None

    @property
    def known(self) -> set[str] | None:
        """Hashes whose data the server has. None if no data is left out."""
        hashes = self.process.facts.hashes
        return {name for name in self.names if hashes.get(name)} if self.by_hash else None

    @property
    def names(self) -> list[str]:
        """Hash of each item."""
        return [self.forms[span.item.identity].mm_hash(span.item) for span in self.spans]

    def prompts(self, known: Collection[str] | None) -> list[dict[str, Any]]:
        """Return the members for tokens and images of one or more requests. The last has the whole prompt.

        If hashes are sent, images that one body cannot hold are split over several: beginnings of the prompt
        go first, each with as many further images as fit. So the server then has the images and, in its
        prefix cache, the work.

        Args:
            known: Hashes whose data the server has. None: no data is left out, and nothing is split.

        Raises:
            EngineUnsupportedError: A body is larger than the frontend takes.
        """
        prompts: list[dict[str, Any]] = []
        brought = before = set(known or ())
        room: int | None = None
        for index, (name, span) in enumerate(zip(self.names, self.spans, strict=True)):
            if known is None or self.max_bytes is None or name in brought:
                continue
            size = encode_item(span, self.forms[span.item.identity]).size
            if room is not None and size > room:
                prompts.append(self._prompt(index, before))
                before, room = brought, None
            if room is None:
                room = self.max_bytes - BYTES_PER_ID * len(self.ids)
            room -= size
            brought = brought | {name}
        return [*prompts, self._prompt(len(self.spans), None if known is None else before)]

    def _prompt(self, count: int, known: Collection[str] | None) -> dict[str, Any]:
        """Return the members of a request that shows the first `count` items."""
        ids = self.ids if count == len(self.spans) else self.ids[: self.spans[count - 1].stop]
        features = features_of(self.spans[:count], self.forms, known)
        if self.max_bytes is not None:
            check_size(
                len(self.ids), data_in(features), self.max_bytes, where=GENERATE_PATH, setting=SIZE_SETTING
            )
        return {"token_ids": ids.tolist(), **features}


def features_of(
    spans: Sequence[MediaSpan], forms: Mapping[str, WireForm], known: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the member `features` of a request.

    Args:
        spans: Items in prompt order.
        forms: How the server takes each item, by identity.
        known: Hashes whose data the server has. Their data is left out, and so are repeats within the
            request, which a server takes for hashes that it knows. None sends all data.
    """
    features: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    left_out = set(known or ())
    for span in spans:
        form = forms[span.item.identity]
        name = form.mm_hash(span.item)
        place = {"offset": span.range.offset, "length": span.range.length}
        data = None if name in left_out else encode_item(span, form)
        for members, value in zip(features.values(), (name, place, data), strict=True):
            members.setdefault(span.item.modality, []).append(value)
        if known is not None:
            left_out.add(name)
    return {"features": features}


def leaves_out_data(prompt: Mapping[str, Any]) -> bool:
    """Whether a request names an item by its hash alone."""
    return any(None in texts for texts in prompt["features"]["kwargs_data"].values())


def data_in(prompt: Mapping[str, Any]) -> list[JSONText]:
    """Return the encoded items of a request's `features`."""
    texts = [text for texts in prompt["features"]["kwargs_data"].values() for text in texts]
    return [text for text in texts if text is not None]


def item_tensors(item: MediaItem, pixels: PixelDtype) -> dict[str, Any]:
    """Expand one image or video to the tensors that go on the wire."""
    if pixels != "uint8":
        tensors = item.tensors(pixels)
        if pixels != "bfloat16":
            return tensors
        # numpy lacks bfloat16. Its bit patterns are the only uint16 that items hold.
        return {
            name: RawTensor("bfloat16", array) if array.dtype == np.uint16 else array
            for name, array in tensors.items()
        }
    if isinstance(item, PatchItem):
        values, *others = item.specs("float32").items()
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in others}
        item.write(arrays, "float32")
        return {values[0]: item.levels(), **arrays}
    problem = "this item holds normalised values only"
    if isinstance(item, ProcessedItem) and item.compact:
        levels = {name: part for name, part in item.parts.items() if isinstance(part, Levels)}
        padded = [name for name, part in levels.items() if part.values.size != math.prod(part.shape)]
        if not padded:
            return {
                name: part.values.reshape(part.shape)
                if isinstance(part, Levels)
                else expanded(part, "float32")
                for name, part in item.parts.items()
            }
        problem = f"the {padded[0]} of this item are padded with zeros that are not pixels"
    raise EngineUnsupportedError(
        f"the server normalises pixels itself, and {problem}",
        where=f"item {item.identity[:12]}",
        got=type(item).__name__,
        remedy="Start vLLM with --no-mm-device-do-normalize",
    )


def split_video_steps(spans: Sequence[MediaSpan]) -> list[MediaSpan]:
    """Return media with each time step of a video as an image of its own, if text lies between the steps.

    vLLM forgets which tokens of a range hold features. Families that write text between time steps attend
    within each step and number it like an image, so it has the features of an image of one step.

    Raises:
        EngineUnsupportedError: Such a video is not kept as frames.
    """
    split: list[MediaSpan] = []
    for span in spans:
        if span.modality != "video" or span.range.embed_spans is None:
            split.append(span)
            continue
        steps = time_steps(span)
        if steps is None:
            raise EngineUnsupportedError(
                "the engine loses which tokens of a video hold features",
                where=span.where,
                expected="one run of features for each time step of a PatchItem",
                got=f"{len(span.range.embed_spans)} runs of {span.item!r}",
                remedy="Use another engine for videos of this model",
            )
        split += steps
    return split


def layout_for(
    names: Collection[str], kinds: Mapping[str, str] | None = None, *, modality: str = "image"
) -> Layout:
    """Return the field layout of an image or video by the names of its tensors.

    `kinds` is how the server joins each: `batched`, `flat` or `shared`.
    """

    def fits(layout: Layout, name: str) -> bool:
        spec = layout.fields.get(name)
        if spec is None or spec.modality != modality:
            return False
        kind = type(spec).__name__.lower()
        sizes_known = not isinstance(spec, Flat | Shared) or spec.sizes in names
        return sizes_known and (kinds or {}).get(name, kind) == kind

    layouts = [layout for layout in LAYOUTS if all(fits(layout, name) for name in names)]
    if not layouts or any(each.fields[name] != layouts[0].fields[name] for each in layouts for name in names):
        raise EngineUnsupportedError(
            "it is not known how vLLM joins these tensors",
            where=f"{modality} items",
            expected="the fields of one of the known layouts",
            got=", ".join(sorted(names)),
            remedy="Send encoded images: VLLMBackend(images='content_parts')",
        )
    return layouts[0]


def encode_item(span: MediaSpan, form: WireForm) -> JSONText:
    """Encode one item as vLLM's base64 item, a JSON text."""

    def encode() -> bytes:
        if isinstance(span.item, PatchItem):
            patches = span.item.pixel_shape[0]
            expected = span.range.num_embeds * span.item.layout.merge**2
            if patches != expected:  # an engine dies of it
                raise PlaceholderError(
                    "the grid does not fit its placeholder range",
                    where=f"{span.where}.grid",
                    expected=f"{expected} patches for {span.range.num_embeds} tokens",
                    got=f"{patches} of {list(span.item.grid)}",
                )
        (item,) = collate_items(form.layout, [item_tensors(span.item, form.pixels)])
        return b'"%b"' % encode_mm_kwargs_item_as_bytes(item)

    return encoded_once(span.item, (form.layout.name, form.pixels), encode)
