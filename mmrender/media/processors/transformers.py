"""Any other family, through the model's own Transformers processor (extra `hf`).

The processor is the authority for pixels and for text. What is added here: expansions learnt from it and
remembered by image size, the smallest exact form of its tensors, identities, and errors with names.
"""

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.cache import media_identity
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import PixelArithmetic, compacted
from mmrender.media.load import LoadedImage, LoadedVideo
from mmrender.media.pixels import ImageBackend, rgb_planes
from mmrender.media.processors.base import Geometry, Prepared, ProcessorFiles, digest_settings
from mmrender.media.processors.reference import build_reference_processor
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, Repeat, Text

_REMEMBERED_SIZES = 4096
_PROBE_SIZES = ((96, 160), (700, 230))
_FORMAT_VERSION = 1


_BEFORE, _BETWEEN, _AFTER = "before", "between", "after"


class _Recorder:
    """Stands in for a part of a processor and notes its last call."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.called: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.returned: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = args, dict(kwargs)
        result = self._part(*args, **kwargs)
        self.returned = dict(result)
        return result


@dataclass(frozen=True, slots=True)
class Observation:
    """One run of a processor.

    Attributes:
        text: What replaced the first image's placeholder.
        tensors: What the processor returned for the images, text inputs left out.
        image_options: The keyword arguments its image processor was called with.
    """

    text: str
    tensors: Mapping[str, npt.NDArray[Any]]
    image_options: Mapping[str, Any]


def observe(processor: Any, placeholder: str, images: Sequence[Image.Image], framework: str) -> Observation:
    """Run a processor on images, each with its placeholder, and note what it does.

    Not to be run on one processor by two threads at once.

    Raises:
        ProcessorError: The processor does not hand one text to its tokenizer, or loses the marks in it.
        Exception: Whatever the processor itself raises.
    """
    tokenizer, image_processor = processor.tokenizer, processor.image_processor
    text_side, image_side = _Recorder(tokenizer), _Recorder(image_processor)
    processor.tokenizer, processor.image_processor = text_side, image_side
    try:
        text = _BEFORE + _BETWEEN.join([placeholder] * len(images)) + _AFTER
        output = processor(text=[text], images=[list(images)], return_tensors=framework)
    finally:
        processor.tokenizer, processor.image_processor = tokenizer, image_processor
    _, options = image_side.called or ((), {})
    return Observation(
        text=_between_marks(_text_of(text_side.called), len(images)),
        tensors={key: as_numpy(output[key]) for key in image_side.returned if key in output},
        image_options=options,
    )


def _text_of(call: tuple[tuple[Any, ...], dict[str, Any]] | None) -> str:
    args, kwargs = call or ((), {})
    text = args[0] if args else kwargs.get("text")
    text = text[0] if isinstance(text, list) and len(text) == 1 else text
    if not isinstance(text, str):
        raise ProcessorError(
            "the model's processor does not tokenize the text it was given",
            expected="one text handed to the tokenizer",
            got=type(text).__name__,
        )
    return text


def _between_marks(text: str, images: int) -> str:
    start, stop = text.find(_BEFORE), text.rfind(_AFTER)
    pieces = text[start + len(_BEFORE) : stop].split(_BETWEEN)
    if start < 0 or stop < 0 or len(pieces) != images:
        raise ProcessorError(
            "the model's processor moves or drops the text round an image",
            expected=f"{images} image(s) between the marks of the probe",
            got=repr(text[:200]),
        )
    return pieces[0]


def parse_expansion(text: str, feature_token: str) -> Expansion:
    """Cut the text of an expansion into runs of the feature token and what stands between them."""
    pieces: list[Text | Repeat] = []
    for match in re.finditer(
        rf"(?:{re.escape(feature_token)})+|.+?(?={re.escape(feature_token)}|\Z)", text, re.S
    ):
        run = match.group()
        if run.startswith(feature_token):
            pieces.append(Repeat(feature_token, len(run) // len(feature_token)))
        else:
            pieces.append(Text(run))
    return tuple(pieces)


def expansion_text(expansion: Expansion) -> str:
    """Return the text that an expansion stands for."""
    return "".join(
        piece.text if isinstance(piece, Text) else piece.token * piece.count for piece in expansion
    )


def find_feature_token(text: str, candidates: Sequence[str], added: Sequence[str]) -> str:
    """Return the token that stands for image features in an expansion.

    Args:
        text: An expansion.
        candidates: Tokens that the model's settings name for this, most telling first.
        added: All added tokens of the tokenizer, among which the most frequent one is taken otherwise.

    Raises:
        ProcessorError: The expansion holds none of them.
    """
    for token in candidates:
        if token and token in text:
            return token
    counts = Counter({token: text.count(token) for token in added if token and token in text})
    if not counts:
        raise ProcessorError(
            "no token of the expansion stands for image features",
            expected="an added token of the tokenizer",
            got=repr(text[:200]),
        )
    return counts.most_common(1)[0][0]


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return a tensor, array or nested list as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def blank_image(height: int, width: int) -> Image.Image:
    """Return a black image: an expansion depends on the size alone."""
    return Image.new("RGB", (width, height))


Observer = Callable[[Sequence[Image.Image]], Observation]


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
