"""Media items: resized pixels, tensors of any processor in compact form, or a reference to the image.

The reference's `pixel_values` repeats an image for each time step of a patch in float32: eight times the
bytes of the pixels. An item keeps the smallest exact form and expands it on demand, also straight into the
caller's buffers, such as the rows of a training batch.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
from blake3 import blake3
from msgspec import Meta
from PIL import Image

from mmcodecs import BufferPool
from mmrender.caching import LRUCache
from mmrender.errors import MediaError, MissingDependencyError
from mmrender.media.levels import STORAGE, Compact, Floats, Integers, PixelArithmetic, storage_of
from mmrender.media.load import load_image, open_image, orientation_of
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import MediaProcessor
from mmrender.media.sources import sniff
from mmrender.media.video import open_video
from mmrender.messages import Modality, VideoPart
from mmrender.sidecar import (
    Count,
    Expansion,
    Framework,
    MediaItem,
    MediaSpan,
    PlaceholderRange,
    Repeat,
    TensorDtype,
)

Identity: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""Hex digest of content and processor settings."""

_BLOCK_VALUES: Final = 1 << 15
"""Values of one channel that are expanded at once: 128 KiB as float32."""
_POOLED_BYTES: Final = 1 << 20
"""Minimum size of an array that reuses memory."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an item.

    Attributes:
        shape: Its shape.
        dtype: Of the numpy array; uint16 for bfloat16.
        floating: Whether the requested dtype applies to it. Integers keep their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    floating: bool


_memory = BufferPool(max_idle_bytes=64 << 20)
"""Memory of expanded tensors: fresh pages, which the system zeroes, cost as much as writing the tensors."""


def _new_array(spec: TensorSpec) -> npt.NDArray[Any]:
    """Return an array with any values."""
    nbytes = math.prod(spec.shape) * spec.dtype.itemsize
    if nbytes < _POOLED_BYTES:
        return np.empty(spec.shape, spec.dtype)
    return np.frombuffer(_memory.acquire(nbytes), spec.dtype).reshape(spec.shape)


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """How pixels are cut into patches.

    Attributes:
        patch: Side of a patch in pixels.
        merge: Side, in patches, of the square that the model merges into one token.
        temporal: Frames in a patch. An image is repeated as often.
    """

    patch: Annotated[int, Meta(ge=1, le=1024)]
    merge: Annotated[int, Meta(ge=1, le=1024)]
    temporal: Annotated[int, Meta(ge=1, le=64)]


class Item(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag_field="kind"):
    """Base of the items here. See `MediaItem`. Equal identities make equal items."""

    identity: Identity
    size: tuple[Count, Count]
    grid: tuple[Count, ...]
    expansion: Expansion
    modality: Modality = "image"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and type(other) is type(self) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.modality} {self.identity[:12]}, grid={self.grid})"


class TensorItem(Item, frozen=True, eq=False, kw_only=True):
    """An item that has tensors."""

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        raise NotImplementedError

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the tensors that `out` names into its arrays, which follow the specs."""
        raise NotImplementedError

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to the tensors that the model's processor returns, floating ones in `dtype`.

        Each call writes new arrays, which the caller owns. Memory that is no longer referenced, at most 64
        MiB, is reused.

        Raises:
            MissingDependencyError: `framework="torch"` without torch.
        """
        specs = self.specs(dtype)
        arrays = {name: _new_array(spec) for name, spec in specs.items()}
        self.write(arrays, dtype)
        if framework == "numpy":
            return arrays
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError.of_extra(
                "torch", "torch", 'framework="torch"', otherwise='choose framework="numpy"'
            ) from error

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if dtype == "bfloat16":
            tensors |= {name: tensors[name].view(torch.bfloat16) for name in specs if specs[name].floating}
        return tensors


class PatchItem(TensorItem, frozen=True, eq=False, kw_only=True, tag="patches"):
    """One image or video of the Qwen2-VL kind: the resized pixels as uint8 planes.

    Its tensors are `pixel_values` `(patches, features)` and `image_grid_thw` `(1, 3)`, int64. For a video
    `pixel_values_videos` and `video_grid_thw`, and `second_per_grid_ts` `(1,)`, float32, if the family counts
    time in seconds.

    Attributes:
        frames: `(1, 3, height, width)` for an image; `(n, 3, height, width)` for the `n` sampled frames of a
            video; uint8, read-only. The last frame fills the patches of its time step.
        layout: How they are cut into patches.
        arithmetic: How levels become values.
        times: Time of each frame of a video, in seconds.
        second_per_grid: Duration of a time step of a video in seconds, for families that need it.
    """

    grid: tuple[Count, Count, Count]
    frames: npt.NDArray[np.uint8]
    layout: PatchLayout
    arithmetic: PixelArithmetic
    times: tuple[float, ...] = ()
    second_per_grid: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.frames.nbytes

    @property
    def pixel_shape(self) -> tuple[int, int]:
        """Shape of the expanded pixel tensor: `(patches, features)`."""
        return math.prod(self.grid), 3 * self.layout.temporal * self.layout.patch**2

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        pixels = TensorSpec(self.pixel_shape, np.dtype(STORAGE[dtype]), True)
        grid = TensorSpec((1, 3), np.dtype(np.int64), False)
        if self.modality == "image":
            return {"pixel_values": pixels, "image_grid_thw": grid}
        specs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
        if self.second_per_grid is not None:
            specs["second_per_grid_ts"] = TensorSpec((1,), np.dtype(np.float32), False)
        return specs

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the tensors that `out` names into its arrays, which follow the specs."""
        pixels, *others = self.specs(dtype)
        if pixels in out:
            self._write_patches(out[pixels], dtype)
        for name, value in zip(others, (self.grid, self.second_per_grid), strict=False):
            if name in out:
                out[name][0] = value

    def levels(self) -> npt.NDArray[np.uint8]:
        """Return patches before rescaling and normalising, a new uint8 array of `pixel_shape`.

        For servers that normalise on the device.
        """
        patches = np.empty(self.pixel_shape, np.uint8)
        self._write_patches(patches, "uint8")
        return patches

    def steps(self) -> list["PatchItem"]:
        """Return each time step of a video with text between steps as an image. Planes are views.

        Families that write text between steps attend within a step and number it like an image, so the image
        has the same features.
        """
        images = []
        steps = [piece for piece in self.expansion if isinstance(piece, Repeat)]
        for step, features in enumerate(steps):
            start, stop = step * self.layout.temporal, (step + 1) * self.layout.temporal
            image = msgspec.structs.replace(
                self,
                identity=blake3(f"{self.identity} step {step}".encode()).hexdigest(),
                modality="image",
                grid=(1, *self.grid[1:]),
                expansion=(features,),
                frames=self.frames[start:stop],
                times=self.times[start:stop],
            )
            images.append(image)
        return images

    def _write_patches(self, out: npt.NDArray[Any], dtype: TensorDtype | Literal["uint8"]) -> None:
        layout, patch, merge = self.layout, self.layout.patch, self.layout.merge
        steps, height, width = self.grid
        # (time, patches of a frame, channel, frame of the patch, values of the patch)
        target = out.reshape(steps, height * width, 3, layout.temporal, patch**2)
        per_band = width * merge
        bands = max(1, _BLOCK_VALUES // (per_band * patch**2))
        scratch = np.empty(3 * bands * per_band * patch**2, target.dtype)
        for index, planes in enumerate(self.frames):
            step, offset = divmod(index, layout.temporal)
            repeats = slice(offset, None if index == len(self.frames) - 1 else offset + 1)
            # One element is one row of a patch, so the transposition moves whole rows.
            rows = planes.view(f"V{patch}").reshape(3, height // merge, merge, patch, width // merge, merge)
            for band in range(0, rows.shape[1], bands):
                block = np.ascontiguousarray(rows[:, band : band + bands].transpose(0, 1, 4, 2, 5, 3))
                levels = block.view(np.uint8).reshape(3, -1, patch**2)
                values: npt.NDArray[Any] = levels
                if dtype != "uint8":
                    values = scratch[: levels.size].reshape(levels.shape)
                    for channel in range(3):
                        self.arithmetic.write(levels[channel], channel, dtype, values[channel])
                start = band * per_band
                # One store in the order of the target. Channel by channel would fetch each line three times.
                part = target[step, start : start + levels.shape[1], :, repeats]
                part[...] = values.transpose(1, 0, 2)[:, :, None]


def time_steps(span: MediaSpan) -> list[MediaSpan] | None:
    """Return each time step of a video as an image at its own tokens; None if the video has no such steps."""
    item, runs = span.item, span.range.embed_spans
    if runs is None or not isinstance(item, PatchItem) or len(runs) != item.grid[0]:
        return None
    ranges = [PlaceholderRange(span.start + start, stop - start) for start, stop in runs]
    return [MediaSpan(span.modality, span.position, *pair) for pair in zip(ranges, item.steps(), strict=True)]


class ProcessedItem(TensorItem, frozen=True, eq=False, kw_only=True, tag="processed"):
    """One image or video as the model's own processor made it, each tensor in its smallest exact form."""

    parts: Mapping[str, Compact]

    @property
    def compact(self) -> bool:
        """Whether all pixels are kept as uint8."""
        return not any(isinstance(part, Floats) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their kept form."""
        return sum(part.values.nbytes for part in self.parts.values())

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        return {
            name: TensorSpec(part.shape, storage_of(part, dtype), not isinstance(part, Integers))
            for name, part in self.parts.items()
        }

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the tensors that `out` names into its arrays, which follow the specs."""
        for name, part in self.parts.items():
            if name in out:
                part.write(out[name], dtype)


class ReferenceItem(Item, frozen=True, eq=False, kw_only=True, tag="reference"):
    """One image without tensors: for servers that process images, and trainers that process them again.

    It holds the encoded image or its URL, and the expected result of processing it, so two sides that process
    differently are detected instead of trained on.

    Attributes:
        identity: Of the item that processing `source` must produce; 64 hex digits.
        expected_length: Number of tokens of the placeholder range in the prompt.
        source: The encoded image, or its URL.
    """

    expected_length: Count
    source: bytes | str

    @classmethod
    def of(cls, item: MediaItem, source: bytes | str, expected_length: int) -> "ReferenceItem":
        """Return the reference to an item of `source`."""
        return cls(
            identity=item.identity,
            size=item.size,
            grid=tuple(item.grid),
            expansion=item.expansion,
            expected_length=expected_length,
            source=source,
            modality=item.modality,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded image or of the URL."""
        return len(self.source)

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Raise: a reference has no tensors until it is processed.

        Raises:
            MediaError: Always.
        """
        raise MediaError(
            "an item by reference has no tensors",
            where=f"item {self.identity[:12]}",
            expected=f"{framework} tensors of {dtype}",
            got="a URL" if isinstance(self.source, str) else f"{len(self.source)} encoded bytes",
            remedy="Process it first: item.resolve(processor)",
        )

    def resolve(
        self, processor: MediaProcessor, policy: MediaPolicy | None = None, *, num_images: int = 1
    ) -> MediaItem:
        """Load and process the image, and compare the item with the expected one.

        Args:
            processor: The model's, with the settings of the sampling side.
            policy: Limits of loading. See `mmrender.media.policy`.
            num_images: Number of images in the conversation, this one included.

        Raises:
            MediaError: It cannot be loaded, or becomes an unexpected item.
        """
        where = f"item {self.identity[:12]}"
        if self.modality == "image":
            item = processor.process(load_image(self.source, policy, where=where), num_images=num_images)
        elif processor.videos is None:
            raise MediaError(f"videos are not supported for {processor.name}", where=where)
        else:
            with open_video(VideoPart(self.source), policy or MediaPolicy(), where) as video:
                item = processor.videos.prepare(video).finish()
        for name in ("identity", "grid", "expansion"):
            expected, got = getattr(self, name), getattr(item, name)
            if expected != got:
                raise MediaError(
                    f"processing again gives another {name}",
                    where=where,
                    expected=str(expected),
                    got=str(got),
                    remedy="Sample and train with the same image, processor settings and image back end",
                )
        return item


def tensor_specs(item: MediaItem, dtype: TensorDtype = "float32") -> dict[str, TensorSpec]:
    """Return the spec of each tensor of an item by name, in the order of `item.tensors(dtype)`.

    An item of another package's class is expanded for it.

    Raises:
        MediaError: The item is a reference, without tensors.
    """
    if isinstance(item, TensorItem):
        return item.specs(dtype)
    storage = np.dtype(STORAGE[dtype])
    return {
        name: TensorSpec(values.shape, values.dtype, values.dtype == storage)
        for name, values in item.tensors(dtype).items()
    }


def expand_into(item: MediaItem, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype = "float32") -> None:
    """Write an item's tensors into arrays, such as slices of a batch.

    Compact pixels are expanded in place, without a copy in between.

    Args:
        item: Any media item with tensors.
        out: For each name of `tensor_specs(item, dtype)` a C-contiguous array of that shape and dtype. Items
            of the classes here may be written in part.
        dtype: Of the floating-point tensors; bfloat16 is written to uint16 arrays.

    Raises:
        MediaError: The item is a reference, without tensors.
    """
    if isinstance(item, TensorItem):
        item.write(out, dtype)
        return
    for name, values in item.tensors(dtype).items():
        np.copyto(out[name], values)


_PNG_COMPRESSION: Final = 1
"""zlib level: on photographs level 6 saves a tenth of the bytes and takes four times as long."""
_VERBATIM: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp"}
"""Formats that are passed on unchanged. Servers decode them with the same libraries."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image and its MIME type, such as `image/png`."""

    data: bytes = field(repr=False)
    mime: str

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.mime};base64,{pybase64.b64encode_as_string(self.data)}"


_encoded: LRUCache[tuple[str, type], EncodedImage] = LRUCache(64 << 20, size_of=lambda image: len(image.data))


def encoded_image(item: MediaItem) -> EncodedImage:
    """Return an item as an encoded image that a server's own processor turns into the same tensors.

    - For a `PatchItem` of an image: a PNG of its resized pixels. Families resize an image of these sides to
      the same size or to another number of tokens, so a server that expands it to the item's number of tokens
      has resized nothing.
    - For a `ReferenceItem` with bytes: the bytes, if every decoder reads them equally (PNG, JPEG or WebP in
      RGB, without an orientation), else a PNG of the pixels that mmrender loads from them. The server resizes
      it with its own back end.

    The last 64 MiB of encoded images are kept, so an item of many turns is encoded once.

    Raises:
        MediaError: The item is a video, or has neither pixels nor an encoded image.
        MediaDecodeError: A reference's bytes are not an image.
    """
    try:
        return _encoded.get_or_compute((item.identity, type(item)), lambda: _encode(item))
    except MediaError as error:
        error.at(f"item {item.identity[:12]}")
        raise


def _encode(item: MediaItem) -> EncodedImage:
    if isinstance(item, PatchItem) and item.modality == "image":
        return _png(Image.fromarray(np.ascontiguousarray(item.frames[0].transpose(1, 2, 0)), "RGB"))
    if isinstance(item, ReferenceItem) and isinstance(item.source, bytes):
        mime = _VERBATIM.get(sniff(item.source) or "")
        if mime is not None:
            opened = open_image(item.source, MediaPolicy())
            is_plain = opened.mode == "RGB" and not getattr(opened, "is_animated", False)
            if is_plain and orientation_of(opened) is None:
                return EncodedImage(item.source, mime)
        return _png(load_image(item.source).image)
    raise MediaError(
        "an item cannot be sent as an encoded image",
        expected="an image of the Qwen2-VL kind, or a reference with the encoded image",
        got=f"{type(item).__name__} of modality {item.modality!r}",
        remedy="Send tensors, to an engine that takes them, or keep the encoded image as a ReferenceItem",
    )


def _png(image: Image.Image) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=_PNG_COMPRESSION)
    return EncodedImage(buffer.getvalue(), "image/png")
