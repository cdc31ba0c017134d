"""Any other family, through the model's own Transformers processor (extra `hf`).

The processor is the authority for pixels and for text. Added here: expansions, learnt by watching it write
and remembered by image size; the smallest exact form of its tensors; identities; errors with names.

It runs whole, on a text of one placeholder per image between marks, and the text that it hands to its
tokenizer is recorded: the expansion lies between the marks then, for any family and with no rule of ours. The
options that it passes to its image processor are recorded as well, so that later images can skip the text.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.caching import LRUCache
from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.cache import media_identity
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import PixelArithmetic, compacted
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend, rgb_planes
from mmrender.media.processor import Geometry, Prepared, ProcessorFiles, digest_settings
from mmrender.media.processors.reference import build_reference_processor
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, Repeat, Text

_REMEMBERED_SIZES = 4096
_PROBE_SIZES = ((96, 160), (700, 230))
_FORMAT_VERSION = 1
_BEFORE, _BETWEEN, _AFTER = "before", "between", "after"


class TransformersProcessor:
    """The model's own processor behind the interface of `MediaProcessor`.

    Its image processor is called from many threads at once; the processor as a whole, which tokenizes, by one
    thread at a time and once per image size.
    """

    def __init__(
        self, files: ProcessorFiles, backend: ImageBackend, *, trust_remote_code: bool = False
    ) -> None:
        self.image_backend = backend
        self._files = files
        self._reference = build_reference_processor(files, backend, trust_remote_code=trust_remote_code)
        self._image_processor: Any = self._reference.image_processor
        self._framework = "pt" if backend == "torch" else "np"
        self._lock = threading.Lock()
        self._geometries: LRUCache[tuple[int, int, int], Geometry] = LRUCache(_REMEMBERED_SIZES)
        self._arithmetic = _arithmetic(self._image_processor, backend)
        token = getattr(self._reference, "image_token", None)
        if not isinstance(token, str):
            raise ProcessorError(
                f"{type(self._reference).__name__} does not say which text stands for an image",
                where=str(files.directory),
                expected="an attribute image_token",
            )
        self._image_token = token
        self._depends_on_image_count = False
        self._learn()

    @property
    def name(self) -> str:
        """Class of the image processor."""
        return type(self._image_processor).__name__

    @property
    def settings_digest(self) -> bytes:
        """Digest of class, settings and back end, and of the release of Transformers whose code this is."""
        return self._digest

    @property
    def depends_on_image_count(self) -> bool:
        """Whether the probe saw an image become something else beside another one."""
        return self._depends_on_image_count

    @property
    def placeholder(self) -> Mapping[Modality, str]:
        """The text that the processor replaces."""
        video = getattr(self._reference, "video_token", None)
        image: dict[Modality, str] = {"image": self._image_token}
        return image | {"video": video} if isinstance(video, str) else image

    @property
    def placeholder_tokens(self) -> frozenset[str]:
        """The placeholders, and the token that stands for features."""
        return frozenset((*self.placeholder.values(), self._feature_token))

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return the grid and expansion of a blank image of this size; remembered by size.

        Raises:
            MediaError: The processor refuses an image of this size.
        """
        known = self._geometries.get((height, width, self._copies(num_images)))
        return known or self._observed(_blank(height, width), num_images)[0]

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Identify one image."""
        context = b"in company" if self._copies(num_images) > 1 else b""
        identity = media_identity(self.settings_digest, rgb_planes(loaded), context)
        return Prepared(identity, lambda: self._finish(loaded, num_images, identity))

    def process(self, loaded: LoadedImage, *, num_images: int = 1) -> MediaItem:
        """Run the model's image processor.

        Raises:
            MediaError: The processor refuses the image.
        """
        return self.prepare(loaded, num_images=num_images).finish()

    def _finish(self, loaded: LoadedImage, num_images: int, identity: str) -> ProcessedItem:
        geometry = self._geometries.get((loaded.height, loaded.width, self._copies(num_images)))
        if geometry is None:
            geometry, tensors = self._observed(loaded.image, num_images)
        else:
            tensors = self._tensors(loaded.image, num_images)
        return ProcessedItem(
            identity=identity,
            size=(loaded.height, loaded.width),
            grid=geometry.grid,
            expansion=geometry.expansion,
            parts={name: compacted(values, self._arithmetic) for name, values in tensors.items()},
        )

    def _copies(self, num_images: int) -> int:
        return 2 if self._depends_on_image_count and num_images > 1 else 1

    def _observed(
        self, image: Image.Image, num_images: int
    ) -> tuple[Geometry, Mapping[str, npt.NDArray[Any]]]:
        """Run the whole processor, and remember the expansion of an image of this size."""
        copies = self._copies(num_images)
        seen = self._observe(image, copies)
        tensors = _first_of(seen.tensors, copies)
        expansion = parse_expansion(seen.text, self._feature_token)
        if expansion_text(expansion) != seen.text:
            raise ProcessorError(
                "the expansion of an image cannot be cut into pieces",
                expected=repr(seen.text[:200]),
                got=repr(expansion_text(expansion)[:200]),
            )
        geometry = Geometry(_grid(tensors), expansion)
        return self._geometries.put((image.height, image.width, copies), geometry), tensors

    def _observe(self, image: Image.Image, copies: int) -> "_Observation":
        with self._lock, _refusals_named(image):
            return _observe(self._reference, self._image_token, [image] * copies, self._framework)

    def _tensors(self, image: Image.Image, num_images: int) -> Mapping[str, npt.NDArray[Any]]:
        """Run the image processor alone, as the whole processor would run it."""
        copies = self._copies(num_images)
        with _refusals_named(image):
            output = self._image_processor([[image] * copies], **self._image_options)
        return _first_of({name: _as_numpy(output[name]) for name in self._names}, copies)

    def _learn(self) -> None:
        """Probe the processor, and prove that its image processor alone gives what the whole one gives."""
        alone = [self._observe(_blank(*size), 1) for size in _PROBE_SIZES]
        self._image_options = dict(alone[0].image_options)
        self._names = tuple(alone[0].tensors)
        self._feature_token = self._find_feature_token(alone[0].text)
        self._digest = digest_settings(self._described())
        for (height, width), seen in zip(_PROBE_SIZES, alone, strict=True):
            # All pixels differ from their neighbours.
            ramp = np.arange(height * width * 3, dtype=np.uint32) * 2654435761 >> 24
            probe = Image.fromarray(ramp.astype(np.uint8).reshape(height, width, 3), "RGB")
            if not _same_tensors(self._tensors(probe, 1), self._observe(probe, 1).tensors):
                raise ProcessorError(
                    f"{type(self._reference).__name__} changes what its image processor returns",
                    where=str(self._files.directory),
                )
            pair = self._observe(_blank(height, width), 2)
            beside = _first_of(pair.tensors, 2)
            if pair.text == seen.text and all(
                np.array_equal(values, seen.tensors[name]) for name, values in beside.items()
            ):
                continue
            self._depends_on_image_count = True
            if self._observe(_blank(height, width), 3).text != pair.text:
                raise ProcessorError(
                    f"{type(self._reference).__name__} treats an image differently for each number of others",
                    where=str(self._files.directory),
                    expected="one treatment for all numbers above one",
                )

    def _find_feature_token(self, text: str) -> str:
        """Return the token that stands for image features in an expansion.

        It is one that the model's settings name, or else the most frequent added token of the tokenizer.
        """
        tokenizer = self._reference.tokenizer
        ids = (self._files.model.get(key) for key in ("image_token_id", "image_token_index"))
        named = [tokenizer.convert_ids_to_tokens(index) for index in ids if isinstance(index, int)]
        for token in (*named, getattr(tokenizer, "image_token", None), self._image_token):
            if isinstance(token, str) and token and token in text:
                return token
        counts = Counter({token: text.count(token) for token in tokenizer.get_added_vocab() if token in text})
        if not counts:
            raise ProcessorError(
                "no token of the expansion stands for image features",
                expected="an added token of the tokenizer",
                got=repr(text[:200]),
            )
        return str(counts.most_common(1)[0][0])

    def _described(self) -> dict[str, Any]:
        import transformers

        return {
            "version": _FORMAT_VERSION,
            "kind": "transformers",
            "transformers": transformers.__version__,
            "backend": self.image_backend,
            "image_processor": f"{type(self._image_processor).__module__}.{self.name}",
            "settings": self._image_processor.to_json_string(),
            "options": repr(sorted(self._image_options.items())),
            "processor": type(self._reference).__name__,
            "processor_settings": repr(sorted(self._files.processor.items(), key=lambda entry: entry[0])),
        }


@dataclass(frozen=True, slots=True)
class _Observation:
    """One run of a processor.

    Attributes:
        text: The text that replaced the first image's placeholder.
        tensors: The tensors returned for the images; text inputs are left out.
        image_options: The keyword arguments its image processor was called with.
    """

    text: str
    tensors: Mapping[str, npt.NDArray[Any]]
    image_options: Mapping[str, Any]


class _Recorder:
    """A part of a processor that notes its last call."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.options = args, dict(kwargs)
        result = self._part(*args, **kwargs)
        self.returned = dict(result)
        return result


def _observe(processor: Any, placeholder: str, images: Sequence[Image.Image], framework: str) -> _Observation:
    """Run a processor on images, each with its placeholder, and note what it does.

    Not to be run on one processor by two threads at once. Raises whatever the processor raises.

    Raises:
        ProcessorError: The processor does not hand one text to its tokenizer, or loses the marks in it.
    """
    tokenizer, image_processor = processor.tokenizer, processor.image_processor
    text_side, image_side = _Recorder(tokenizer), _Recorder(image_processor)
    processor.tokenizer, processor.image_processor = text_side, image_side
    try:
        text = _BEFORE + _BETWEEN.join([placeholder] * len(images)) + _AFTER
        output = processor(text=[text], images=[list(images)], return_tensors=framework)
    finally:
        processor.tokenizer, processor.image_processor = tokenizer, image_processor
    written = text_side.args[0] if text_side.args else text_side.options.get("text")
    written = written[0] if isinstance(written, list) and len(written) == 1 else written
    if not isinstance(written, str):
        raise ProcessorError(
            "the model's processor does not tokenize the text it was given",
            expected="one text handed to the tokenizer",
            got=type(written).__name__,
        )
    start, stop = written.find(_BEFORE), written.rfind(_AFTER)
    pieces = written[start + len(_BEFORE) : stop].split(_BETWEEN)
    if start < 0 or stop < 0 or len(pieces) != len(images):
        raise ProcessorError(
            "the model's processor moves or drops the text round an image",
            expected=f"{len(images)} image(s) between the marks of the probe",
            got=repr(written[:200]),
        )
    tensors = {key: _as_numpy(output[key]) for key in image_side.returned if key in output}
    return _Observation(pieces[0], tensors, image_side.options)


def parse_expansion(text: str, feature_token: str) -> Expansion:
    """Cut the text of an expansion into runs of the feature token and the text between them."""
    token = re.escape(feature_token)
    return tuple(
        Repeat(feature_token, len(run) // len(feature_token)) if run.startswith(feature_token) else Text(run)
        for run in re.findall(rf"(?:{token})+|.+?(?={token}|\Z)", text, re.S)
    )


def expansion_text(expansion: Expansion) -> str:
    """Return the text that an expansion stands for."""
    return "".join(
        piece.text if isinstance(piece, Text) else piece.token * piece.count for piece in expansion
    )


@contextmanager
def _refusals_named(image: Image.Image) -> Iterator[None]:
    """Turn whatever a processor raises about an image into a `MediaError`."""
    try:
        yield
    except MMRenderError:
        raise
    except Exception as error:
        raise MediaError(
            "the model's own processor cannot process this image",
            got=f"{image.width}x{image.height} pixels: {type(error).__name__}: {error}",
        ) from error


def _arithmetic(image_processor: Any, backend: ImageBackend) -> PixelArithmetic | None:
    """Return how pixels are normalised, or None where the settings do not say."""
    try:
        mean = [float(value) for value in image_processor.image_mean]
        std = [float(value) for value in image_processor.image_std]
        rescale = float(image_processor.rescale_factor)
        (r, g, b), (dr, dg, db) = mean, std
    except (AttributeError, TypeError, ValueError):
        return None
    return PixelArithmetic((r, g, b), (dr, dg, db), rescale, backend)


def _same_tensors(one: Mapping[str, npt.NDArray[Any]], other: Mapping[str, npt.NDArray[Any]]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == values.dtype and np.array_equal(one[name], values)
        for name, values in other.items()
    )


def _first_of(tensors: Mapping[str, npt.NDArray[Any]], copies: int) -> Mapping[str, npt.NDArray[Any]]:
    """Return what belongs to the first of several images; counts over the whole batch are left out."""
    if copies == 1:
        return tensors
    return {name: values[:1] for name, values in tensors.items() if values.shape[:1] == (copies,)}


def _grid(tensors: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
    """Return `(t, h, w)` where the processor gives it, else the number of images the pixels are cut into."""
    if (grid := tensors.get("image_grid_thw")) is not None:
        return tuple(int(value) for value in grid[0])
    pixels = tensors.get("pixel_values")
    if pixels is None or pixels.ndim < 4:
        return (1,)
    return (int(np.prod(pixels.shape[:-3])),)


def _as_numpy(values: Any) -> npt.NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _blank(height: int, width: int) -> Image.Image:
    """Return a black image: an expansion depends on the size alone."""
    return Image.new("RGB", (width, height))
