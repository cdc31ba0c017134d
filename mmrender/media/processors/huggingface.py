"""Any other family, through the model's own Transformers processor (extra `hf`).

The processor is the authority for pixels and for text. What is added here: expansions learnt from it and
remembered by image size, the smallest exact form of its tensors, identities, and errors with names.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.identity import media_identity
from mmrender.media.load import LoadedImage, LoadedVideo
from mmrender.media.pixels import rgb_planes
from mmrender.media.processors.arithmetic import PixelArithmetic
from mmrender.media.processors.base import Geometry, ImageBackend, Prepared
from mmrender.media.processors.compact import Compact, Floats, compacted
from mmrender.media.processors.probe import (
    Observation,
    as_numpy,
    blank_image,
    expansion_text,
    find_feature_token,
    observe,
    parse_expansion,
)
from mmrender.media.processors.reference import build_reference_processor
from mmrender.media.processors.settings import ProcessorFiles, digest_settings
from mmrender.messages import Modality
from mmrender.spans import Expansion, Framework, MediaItem, TensorDtype

_REMEMBERED_SIZES = 4096
_PROBE_SIZES = ((96, 160), (700, 230))
_FORMAT_VERSION = 1


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


class HuggingFaceProcessor:
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
        self._geometries: OrderedDict[tuple[int, int, int], Geometry] = OrderedDict()
        self._arithmetic = _arithmetic(self._image_processor, backend)
        self._image_token = self._placeholder_of("image")
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
    def depends_on_company(self) -> bool:
        """Whether the probe saw an image become something else beside another one."""
        return self._depends_on_company

    @property
    def placeholder(self) -> Mapping[Modality, str]:
        """What the processor looks for in the text."""
        video = getattr(self._reference, "video_token", None)
        image: dict[Modality, str] = {"image": self._image_token}
        return image | {"video": video} if isinstance(video, str) else image

    @property
    def placeholder_tokens(self) -> frozenset[str]:
        """The placeholders, and the token that stands for features."""
        return frozenset((*self.placeholder.values(), self._feature_token))

    def geometry(self, height: int, width: int, *, company: int = 1) -> Geometry:
        """Return what the processor makes of a blank image of this size; remembered by size.

        Raises:
            MediaError: The processor refuses an image of this size.
        """
        known = self._known(height, width, company)
        return known or self._observed(blank_image(height, width), company)[0]

    def prepare(self, loaded: LoadedImage | LoadedVideo, *, company: int = 1) -> Prepared:
        """Identify one image.

        Raises:
            ProcessorError: A video, which this adapter does not take.
        """
        if not isinstance(loaded, LoadedImage):
            raise ProcessorError(
                f"videos are not supported for {self.name}",
                expected="images",
                remedy="Pass the frames as images.",
            )
        context = b"in company" if self._copies(company) > 1 else b""
        identity = media_identity(self.settings_digest, rgb_planes(loaded.at_hand), context)
        return Prepared(identity, partial(self._finish, loaded, company, identity))

    def process(self, loaded: LoadedImage | LoadedVideo, *, company: int = 1) -> MediaItem:
        """Run the model's image processor.

        Raises:
            MediaError: The processor refuses the image.
            ProcessorError: A video, which this adapter does not take.
        """
        return self.prepare(loaded, company=company).finish()

    def _finish(self, loaded: LoadedImage, company: int, identity: str) -> ProcessedItem:
        geometry = self._known(loaded.height, loaded.width, company)
        if geometry is None:
            geometry, tensors = self._observed(loaded.image, company)
        else:
            tensors = self._tensors(loaded.image, company)
        return ProcessedItem(
            identity=identity,
            size=(loaded.height, loaded.width),
            grid=geometry.grid,
            expansion=geometry.expansion,
            parts={name: compacted(values, self._arithmetic) for name, values in tensors.items()},
        )

    def _known(self, height: int, width: int, company: int) -> Geometry | None:
        return self._geometries.get((height, width, self._copies(company)))

    def _copies(self, company: int) -> int:
        return 2 if self._depends_on_company and company > 1 else 1

    def _observed(self, image: Image.Image, company: int) -> tuple[Geometry, Mapping[str, npt.NDArray[Any]]]:
        """Run the whole processor, and remember what an image of this size becomes."""
        copies = self._copies(company)
        seen = self._observe(image, copies)
        tensors = _first_of(seen.tensors, copies)
        geometry = Geometry(_grid(tensors), self._parsed(seen.text))
        with self._lock:
            self._geometries[(image.height, image.width, copies)] = geometry
            while len(self._geometries) > _REMEMBERED_SIZES:
                self._geometries.popitem(last=False)
        return geometry, tensors

    def _parsed(self, text: str) -> Expansion:
        expansion = parse_expansion(text, self._feature_token)
        if expansion_text(expansion) != text:
            raise ProcessorError(
                "the expansion of an image cannot be cut into pieces",
                expected=repr(text[:200]),
                got=repr(expansion_text(expansion)[:200]),
            )
        return expansion

    def _observe(self, image: Image.Image, copies: int) -> Observation:
        with self._lock, _refusals_named(image):
            return observe(self._reference, self._image_token, [image] * copies, self._framework)

    def _tensors(self, image: Image.Image, company: int) -> Mapping[str, npt.NDArray[Any]]:
        """Run the image processor alone, as the whole processor would run it."""
        copies = self._copies(company)
        with _refusals_named(image):
            output = self._image_processor([[image] * copies], **self._image_options)
        return _first_of({name: as_numpy(output[name]) for name in self._names}, copies)

    def _learn(self) -> None:
        """Probe the processor, and prove that its image processor alone gives what the whole one gives."""
        self._depends_on_company = False
        alone = [self._observe(blank_image(*size), 1) for size in _PROBE_SIZES]
        self._image_options = dict(alone[0].image_options)
        self._names = tuple(alone[0].tensors)
        self._feature_token = find_feature_token(
            alone[0].text, self._named_feature_tokens(), list(self._reference.tokenizer.get_added_vocab())
        )
        self._digest = digest_settings(self._described())
        for size, seen in zip(_PROBE_SIZES, alone, strict=True):
            self._prove_equal(self._tensors(_probe_image(*size), 1), self._observe(_probe_image(*size), 1))
            self._compare_in_company(size, seen)

    def _compare_in_company(self, size: tuple[int, int], alone: Observation) -> None:
        pair = self._observe(blank_image(*size), 2)
        beside = _first_of(pair.tensors, 2)
        same = pair.text == alone.text and all(
            np.array_equal(values, alone.tensors[name]) for name, values in beside.items()
        )
        if same:
            return
        self._depends_on_company = True
        if self._observe(blank_image(*size), 3).text != pair.text:
            raise ProcessorError(
                f"{type(self._reference).__name__} treats an image differently for each number of others",
                where=str(self._files.directory),
                expected="one treatment for all numbers above one",
            )

    def _prove_equal(self, short: Mapping[str, npt.NDArray[Any]], whole: Observation) -> None:
        same = set(short) == set(whole.tensors) and all(
            short[name].dtype == values.dtype and np.array_equal(short[name], values)
            for name, values in whole.tensors.items()
        )
        if not same:
            raise ProcessorError(
                f"{type(self._reference).__name__} changes what its image processor returns",
                where=str(self._files.directory),
            )

    def _placeholder_of(self, modality: Modality) -> str:
        token = getattr(self._reference, f"{modality}_token", None)
        if not isinstance(token, str):
            raise ProcessorError(
                f"{type(self._reference).__name__} does not say which text stands for an {modality}",
                where=str(self._files.directory),
                expected=f"an attribute {modality}_token",
            )
        return token

    def _named_feature_tokens(self) -> list[str]:
        tokenizer = self._reference.tokenizer
        ids = (self._files.model.get(key) for key in ("image_token_id", "image_token_index"))
        named = [tokenizer.convert_ids_to_tokens(index) for index in ids if isinstance(index, int)]
        attributes = (getattr(tokenizer, "image_token", None), self._image_token)
        return [token for token in (*named, *attributes) if isinstance(token, str)]

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


class _refusals_named:  # noqa: N801 - reads as the clause it is
    """Turn what a processor raises about an image into a `MediaError`."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MMRenderError):
            raise MediaError(
                "the model's own processor cannot process this image",
                got=f"{self._image.width}x{self._image.height} pixels: {type(error).__name__}: {error}",
            ) from error


def _arithmetic(image_processor: Any, backend: ImageBackend) -> PixelArithmetic | None:
    mean, std = getattr(image_processor, "image_mean", None), getattr(image_processor, "image_std", None)
    rescale = getattr(image_processor, "rescale_factor", None)
    try:
        return PixelArithmetic(_three(mean), _three(std), float(rescale), backend)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)


def _first_of(tensors: Mapping[str, npt.NDArray[Any]], copies: int) -> Mapping[str, npt.NDArray[Any]]:
    """Return what belongs to the first of several images; counts over the whole batch are left out."""
    if copies == 1:
        return tensors
    return {name: values[:1] for name, values in tensors.items() if values.shape[:1] == (copies,)}


def _grid(tensors: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
    """Return `(t, h, w)` where the processor says so, else the number of images the pixels are cut into."""
    if (grid := tensors.get("image_grid_thw")) is not None:
        return tuple(int(value) for value in grid[0])
    pixels = tensors.get("pixel_values")
    if pixels is None or pixels.ndim < 4:
        return (1,)
    return (int(np.prod(pixels.shape[:-3])),)


def _probe_image(height: int, width: int) -> Image.Image:
    """Return an image whose pixels all differ from their neighbours."""
    ramp = np.arange(height * width * 3, dtype=np.uint32) * 2654435761 >> 24
    return Image.fromarray(ramp.astype(np.uint8).reshape(height, width, 3), "RGB")
