"""Items of the Qwen2-VL kind: the resized pixels as uint8, expanded to patches on demand.

The reference's `pixel_values` repeats an image for each time step of a patch and holds float32: eight times
the bytes of the pixels it was made from. An item keeps the pixels as planes and expands them by a
transposition of whole patch rows in uint8, then by the reference's arithmetic on blocks that fit the cache.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pybase64
from PIL import ExifTags, Image

from mmrender.errors import InputError, MediaError
from mmrender.media.levels import STORAGE, Compact, Floats, Integers, PixelArithmetic
from mmrender.media.load import load_image, open_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.base import MediaProcessor
from mmrender.media.sources import sniff
from mmrender.messages import Modality
from mmrender.spans import Expansion, Framework, MediaItem, TensorDtype

_BLOCK_VALUES = 1 << 15
"""Values of one channel per block: 128 KiB as float32."""


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """How pixels are cut into patches.

    Attributes:
        patch: Side of a patch in pixels.
        merge: Side, in patches, of the square that the model merges into one token.
        temporal: Frames in a patch; an image is repeated that often.
    """

    patch: int
    merge: int
    temporal: int

    @property
    def factor(self) -> int:
        """Side in pixels of what becomes one token."""
        return self.patch * self.merge

    @property
    def features(self) -> int:
        """Values in one patch: channels x time x height x width."""
        return 3 * self.temporal * self.patch**2


@dataclass(frozen=True, slots=True)
class PatchItem:
    """One image or video as uint8 planes.

    Attributes:
        frames: `(1, 3, height, width)` for an image; `(n, 3, height, width)` with `n` a multiple of
            `layout.temporal` for a video; uint8, read-only.
    """

    modality: Modality
    identity: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    expansion: Expansion
    # Equal identities mean equal pixels; arrays do not compare to a truth value.
    frames: npt.NDArray[np.uint8] = field(compare=False, repr=False)
    layout: PatchLayout = field(compare=False, repr=False)
    arithmetic: PixelArithmetic = field(compare=False, repr=False)

    @property
    def compact(self) -> bool:
        """Whether less than the expanded tensors is kept: always."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.frames.nbytes

    @property
    def pixel_shape(self) -> tuple[int, int]:
        """Shape of the expanded pixel tensor: `(patches, features)`."""
        frames, height, width = self.grid
        return frames * height * width, self.layout.features

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to `pixel_values` `(patches, features)` and `image_grid_thw` `(1, 3)`, int64.

        A video has `pixel_values_videos` and `video_grid_thw` instead. Nothing is memoised: each call writes
        new arrays, which the caller owns.
        """
        pixels = np.empty(self.pixel_shape, STORAGE[dtype])
        self.expand_into(pixels, dtype)
        grid = np.array([self.grid], np.int64)
        if framework == "torch":
            import torch

            tensor = torch.from_numpy(pixels)
            values: Any = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
            thw: Any = torch.from_numpy(grid)
        else:
            values, thw = pixels, grid
        if self.modality == "video":
            return {"pixel_values_videos": values, "video_grid_thw": thw}
        return {"pixel_values": values, "image_grid_thw": thw}

    def levels(self) -> npt.NDArray[np.uint8]:
        """Expand to patches that are neither rescaled nor normalised: uint8 of `pixel_shape`, a new array.

        It is what servers take that normalise on the device.
        """
        patches = np.empty(self.pixel_shape, np.uint8)
        self.expand_into(patches, "uint8")
        return patches

    def expand_into(self, out: npt.NDArray[Any], dtype: TensorDtype | Literal["uint8"] = "float32") -> None:
        """Write the expanded pixels into `out`, such as a slice of a batch.

        Args:
            out: C-contiguous, of `pixel_shape`, float32, float16, (for bfloat16) uint16, or uint8.
            dtype: What `out` holds; `"uint8"` leaves out rescaling and normalising.

        Raises:
            InputError: `out` has another shape, type or layout.
        """
        storage = np.dtype(np.uint8 if dtype == "uint8" else STORAGE[dtype])
        if out.shape != self.pixel_shape or out.dtype != storage or not out.flags.c_contiguous:
            raise InputError(
                "the buffer to expand into does not fit",
                expected=f"a C-contiguous {storage} array of shape {self.pixel_shape}",
                got=f"a {out.dtype} array of shape {out.shape} and strides {out.strides}",
            )
        layout = self.layout
        steps, height, width = self.grid
        # (time, patches of a frame, channel, frame of the patch, values of the patch)
        target = out.reshape(steps, height * width, 3, layout.temporal, layout.patch**2)
        if self.modality == "image":
            _expand_frame(self.frames[0], layout, self.arithmetic, dtype, target[0])
            return
        for index, planes in enumerate(self.frames):
            step, offset = divmod(index, layout.temporal)
            _expand_frame(planes, layout, self.arithmetic, dtype, target[step, :, :, offset : offset + 1])


def _expand_frame(
    planes: npt.NDArray[np.uint8],
    layout: PatchLayout,
    arithmetic: PixelArithmetic,
    dtype: TensorDtype | Literal["uint8"],
    target: npt.NDArray[Any],
) -> None:
    """Write the patches of planes `(3, height, width)` into `target` `(patches, 3, repeats, patch**2)`."""
    patch, merge = layout.patch, layout.merge
    _, height, width = planes.shape
    # One element is one row of a patch, so the transposition moves whole rows and never splits them.
    rows = planes.view(f"V{patch}").reshape(
        3, height // layout.factor, merge, patch, width // layout.factor, merge
    )
    per_band = (width // patch) * merge
    bands = max(1, _BLOCK_VALUES // (per_band * patch**2))
    scratch = np.empty(3 * bands * per_band * patch**2, target.dtype)
    for band in range(0, rows.shape[1], bands):
        block = np.ascontiguousarray(rows[:, band : band + bands].transpose(0, 1, 4, 2, 5, 3))
        levels = block.view(np.uint8).reshape(3, -1, patch**2)
        count = levels.shape[1]
        values: npt.NDArray[Any] = levels
        if dtype != "uint8":
            values = scratch[: levels.size].reshape(levels.shape)
            for channel in range(3):
                arithmetic.write(levels[channel], channel, dtype, values[channel])
        start = band * per_band
        # One store in the order of the target: written channel by channel, each line is fetched three times.
        target[start : start + count] = values.transpose(1, 0, 2)[:, :, None]


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """One image as the model's own processor made it, each tensor in its smallest exact form."""

    identity: str
    size: tuple[int, int]
    grid: tuple[int, ...]
    expansion: Expansion
    # Equal identities mean equal pixels; arrays do not compare to a truth value.
    parts: Mapping[str, Compact] = field(compare=False, repr=False)
    modality: Modality = "image"

    @property
    def compact(self) -> bool:
        """Whether all pixels are kept as uint8."""
        return not any(isinstance(part, Floats) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are kept."""
        return sum(part.nbytes for part in self.parts.values())

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to what the model's processor returns for this image, floating tensors in `dtype`."""
        arrays = {name: part.expanded(dtype) for name, part in self.parts.items()}
        if framework == "numpy":
            return arrays
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if dtype == "bfloat16":
            floating = (name for name, array in arrays.items() if array.dtype == np.uint16)
            tensors.update({name: tensors[name].view(torch.bfloat16) for name in floating})
        return tensors


@dataclass(frozen=True, slots=True)
class ReferenceItem:
    """One image without tensors.

    Attributes:
        identity: What the item that `source` is processed to must have; 64 hex digits.
        size: Height and width of the image as loaded.
        grid: As that of the item.
        expansion: What replaces the template's placeholder.
        expected_length: Number of tokens of the placeholder range in the prompt.
        source: The encoded image, or its URL.
    """

    identity: str
    size: tuple[int, int]
    grid: tuple[int, ...]
    expansion: Expansion
    expected_length: int
    source: bytes | str = field(compare=False, repr=False)
    modality: Modality = "image"

    @classmethod
    def of(cls, item: MediaItem, source: bytes | str, expected_length: int) -> "ReferenceItem":
        """Return the reference to `item`, which was made of `source`."""
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
        self, processor: MediaProcessor, policy: MediaPolicy | None = None, *, company: int = 1
    ) -> MediaItem:
        """Load and process the image, and compare what comes out with what was expected.

        Args:
            processor: The model's, with the settings that the sampling side had.
            policy: What may be loaded; see `mmrender.media.policy`.
            company: Number of images in the conversation, this one included.

        Raises:
            MediaError: It cannot be loaded, or it becomes another item than the one expected.
        """
        where = f"item {self.identity[:12]}"
        item = processor.process(load_image(self.source, policy, where=where), company=company)
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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an item.

    Attributes:
        shape: As `MediaItem.tensors` gives it.
        dtype: Of the numpy array that holds it; bfloat16 is held as uint16.
        floating: Whether it follows the dtype that was asked for; integers keep their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    floating: bool


def tensor_specs(item: MediaItem, dtype: TensorDtype = "float32") -> dict[str, TensorSpec]:
    """Return name and form of each tensor of an item, in the order of `item.tensors(dtype)`.

    An item of a class from elsewhere is expanded to find out.

    Raises:
        MediaError: The item has no tensors, being a reference.
    """
    storage = np.dtype(STORAGE[dtype])
    if isinstance(item, PatchItem):
        pixels, grid = _patch_names(item)
        return {
            pixels: TensorSpec(item.pixel_shape, storage, True),
            grid: TensorSpec((1, 3), np.dtype(np.int64), False),
        }
    if isinstance(item, ProcessedItem):
        return {name: _part_spec(part, storage) for name, part in item.parts.items()}
    return {
        name: TensorSpec(values.shape, values.dtype, values.dtype == storage)
        for name, values in item.tensors(dtype).items()
    }


def expand_into(item: MediaItem, out: Mapping[str, Any], dtype: TensorDtype = "float32") -> None:
    """Write an item's tensors into buffers, such as slices of a batch.

    Pixels that are kept compactly are expanded in place, so nothing but the buffers is written.

    Args:
        item: Any media item that has tensors.
        out: For each name of `tensor_specs(item, dtype)` a C-contiguous numpy array or torch CPU tensor of
            that shape and dtype; bfloat16 stands in uint16 arrays or bfloat16 tensors.
        dtype: Of the floating-point tensors.

    Raises:
        InputError: A buffer is missing, or has another shape, dtype or layout.
        MediaError: The item has no tensors, being a reference.
    """
    targets = _targets(item, out, dtype)
    if isinstance(item, PatchItem):
        pixels, grid = _patch_names(item)
        item.expand_into(targets[pixels], dtype)
        targets[grid][0] = item.grid
    elif isinstance(item, ProcessedItem):
        for name, part in item.parts.items():
            _expand_part(part, targets[name], dtype)
    else:
        for name, values in item.tensors(dtype).items():
            np.copyto(targets[name], values)


def _patch_names(item: PatchItem) -> tuple[str, str]:
    video = item.modality == "video"
    return ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")


def _part_spec(part: Compact, storage: np.dtype[Any]) -> TensorSpec:
    if isinstance(part, Integers):
        return TensorSpec(part.shape, part.dtype, False)
    shape = part.values.shape if isinstance(part, Floats) else part.shape
    return TensorSpec(shape, storage, True)


def _expand_part(part: Compact, target: npt.NDArray[Any], dtype: TensorDtype) -> None:
    if isinstance(part, Integers):
        np.copyto(target, part.values, casting="unsafe")
    elif isinstance(part, Floats):
        np.copyto(target, part.expanded(dtype))
    else:
        target[...] = 0
        tiles = target.reshape(-1, *part.shape[-3:])
        for index, tile in zip(part.held, part.levels, strict=True):
            for channel in range(3):
                part.arithmetic.write(tile[channel], channel, dtype, tiles[index, channel])


def _targets(item: MediaItem, out: Mapping[str, Any], dtype: TensorDtype) -> dict[str, npt.NDArray[Any]]:
    targets = {}
    for name, spec in tensor_specs(item, dtype).items():
        buffer = out.get(name)
        target = _as_numpy(buffer, spec)
        fits = target is not None and target.shape == spec.shape and target.dtype == spec.dtype
        if target is None or not fits or not target.flags.c_contiguous or not target.flags.writeable:
            raise InputError(
                "a buffer to expand into does not fit",
                where=f"out[{name!r}]",
                expected=f"a writable C-contiguous {spec.dtype} array {list(spec.shape)}",
                got=_described(buffer),
            )
        targets[name] = target
    return targets


def _as_numpy(buffer: Any, spec: TensorSpec) -> npt.NDArray[Any] | None:
    if isinstance(buffer, np.ndarray):
        return buffer
    if type(buffer).__module__.partition(".")[0] != "torch" or not hasattr(buffer, "numpy"):
        return None
    import torch

    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        return None
    bits = buffer.dtype == torch.bfloat16 and spec.floating and spec.dtype == np.uint16
    array: npt.NDArray[Any] = (buffer.detach().view(torch.uint16) if bits else buffer.detach()).numpy()
    return array


def _described(buffer: Any) -> str:
    if buffer is None:
        return "nothing"
    if not hasattr(buffer, "shape"):
        return type(buffer).__name__
    return f"{buffer.dtype} {list(buffer.shape)}"


_COMPRESSION: Final = 1
"""zlib level: on photographs level 6 saves a tenth of the bytes and takes four times as long."""
_VERBATIM: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp"}
"""Formats that are passed on as they came; servers decode them with the same libraries."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image and its MIME type, such as `image/png`."""

    data: bytes = field(repr=False)
    mime: str

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.mime};base64,{pybase64.b64encode_as_string(self.data)}"


class EncodedImages:
    """Encoded images by the identity of their items, the least recently used dropped first. Thread-safe.

    Args:
        max_bytes: Bound of the encoded bytes that are kept; 0 keeps none.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, type], EncodedImage] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def of(self, item: MediaItem) -> EncodedImage:
        """Return the item as an encoded image; see `encoded_image`."""
        key = (item.identity, type(item))
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        made = _encode(item)
        with self._lock:
            if key not in self._kept and len(made.data) <= self._max_bytes:
                self._kept[key] = made
                self._nbytes += len(made.data)
            while self._nbytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._nbytes -= len(dropped.data)
        return made


_images = EncodedImages()


def encoded_image(item: MediaItem) -> EncodedImage:
    """Return an item as an encoded image that a server's own processor turns into the same tensors.

    - A `PatchItem` that is an image gives a PNG of its resized pixels. The server must be seen to widen it to
      as many tokens as the item has; then the pixels that it normalises are equal.
    - A `ReferenceItem` that holds bytes gives these where every decoder reads them alike (PNG, JPEG or WebP
      in RGB, without an orientation), and otherwise a PNG of the pixels that mmrender loads from them. The
      server resizes it with its own back end.

    The last 64 MiB of encoded images are kept, so an item of many turns is encoded once.

    Raises:
        MediaError: The item is a video, or holds neither pixels nor an encoded image.
        MediaDecodeError: A reference's bytes are no image.
    """
    return _images.of(item)


def _encode(item: MediaItem) -> EncodedImage:
    if isinstance(item, PatchItem) and item.modality == "image":
        return _png(Image.fromarray(np.ascontiguousarray(item.frames[0].transpose(1, 2, 0)), "RGB"))
    if isinstance(item, ReferenceItem) and isinstance(item.source, bytes):
        return _original(item.source, f"item {item.identity[:12]}")
    raise MediaError(
        "an item cannot be sent as an encoded image",
        where=f"item {item.identity[:12]}",
        expected="an image of the Qwen2-VL kind, or a reference that holds the encoded image",
        got=f"{type(item).__name__} of modality {item.modality!r}",
        remedy="Send tensors, to an engine that takes them, or keep the encoded image as a ReferenceItem",
    )


def _original(data: bytes, where: str) -> EncodedImage:
    mime = _VERBATIM.get(sniff(data) or "")
    if mime is not None:
        opened = open_image(data, MediaPolicy(), where=where)
        upright = opened.getexif().get(ExifTags.Base.Orientation, 1) in (0, 1)
        if opened.mode == "RGB" and upright and not getattr(opened, "is_animated", False):
            return EncodedImage(data, mime)
    return _png(load_image(data, where=where).image)


def _png(image: Image.Image) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=_COMPRESSION)
    return EncodedImage(buffer.getvalue(), "image/png")
