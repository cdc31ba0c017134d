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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcodecs.forks import watch_forks
from mmrender.caching import LRUCache
from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import PixelArithmetic, compacted
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend, image_identity
from mmrender.media.processor import (
    Geometry,
    MediaProcessor,
    Prepared,
    ProcessorFiles,
    digest_settings,
)
from mmrender.media.processors.reference import (
    build_reference_processor,
    missing_package,
    use_one_torch_thread,
)
from mmrender.spans import Expansion, Repeat, Text

_REMEMBERED_SIZES = 4096
_PROBE_SIZES = ((96, 160), (700, 230))
_FORMAT_VERSION = 1
BEFORE, _BETWEEN, AFTER = "before", "between", "after"
_NEIGHBOURS = ("", " ", "\n", "<", ".")
"""Text after a placeholder, beside the words of the marks."""

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]


class _Observation(NamedTuple):
    """One run of a processor.

    Attributes:
        text: The text that replaced the first image's placeholder.
        tensors: The tensors of the first image; text inputs are left out.
        image_options: The keyword arguments its image processor was called with, beside the images.
    """

    text: str
    tensors: Tensors
    image_options: Mapping[str, Any]


class TransformersProcessor(MediaProcessor):
    """The model's own processor behind the interface of `MediaProcessor`.

    Its image processor is called from many threads at once; the processor as a whole, which tokenizes, by one
    thread at a time and once per image size. Identities hold the release of Transformers, whose code it is.

    Args:
        files: The model's settings.
        backend: Which of the reference's back ends to run.
        trust_remote_code: Run processor code that the directory brings along.
        opening: Text that prompts of the chat template begin with, such as `<s>`; some processors add it to
            prompts without it.

    Raises:
        MissingDependencyError: A package that it needs is not installed.
        ProcessorError: It cannot be built, or its prompts are more than the template's text with expansions.
    """

    def __init__(
        self,
        files: ProcessorFiles,
        backend: ImageBackend,
        *,
        trust_remote_code: bool = False,
        opening: str = "",
    ) -> None:
        self._opening = opening
        self._build = partial(build_reference_processor, files, backend, trust_remote_code=trust_remote_code)
        self._reference = self._build()
        self._image_processor: Any = self._reference.image_processor
        self._framework = "pt" if backend == "torch" else "np"
        self._lock = threading.Lock()
        self._geometries: LRUCache[tuple[int, int, int], Geometry] = LRUCache(_REMEMBERED_SIZES)
        self._kept: dict[str, bool] = {}
        self._arithmetic = arithmetic_of(self._image_processor, backend)
        self.name = type(self._image_processor).__name__
        self.image_backend = backend
        token = getattr(self._reference, "image_token", None)
        token = getattr(token, "content", token)  # BLIP-2's is an AddedToken
        # Qianfan-OCR's is the token of features, and templates write another.
        token = getattr(self._reference, "image_placeholder_token", token)
        video = getattr(self._reference, "video_token", None)
        if not isinstance(token, str):
            raise ProcessorError(
                f"{type(self._reference).__name__} does not name its image placeholder",
                expected="an attribute image_token",
            )
        self.placeholder = {"image": token, "video": video} if isinstance(video, str) else {"image": token}
        alone = [self._observe(_blank(*size), 1) for size in _PROBE_SIZES]
        self._image_options = dict(alone[0].image_options)
        self._feature_token = self._find_feature_token(files, alone[0].text)
        self.placeholder_tokens = frozenset((*self.placeholder.values(), self._feature_token))
        self.settings_digest = digest_settings(self._described(files))
        for seen, size in zip(alone, _PROBE_SIZES, strict=True):
            self._prove(seen, *size)
        self._prove_text(alone[0].text)
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Build the processor anew, at its next run, if another thread was in the middle of a run."""
        use_one_torch_thread()
        if self._lock.locked():
            self._reference = None
        self._lock = threading.Lock()

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return the grid and expansion of a blank image of this size; remembered by size."""
        copies = self._copies(num_images)
        return self._geometries.get((height, width, copies)) or self._whole(_blank(height, width), copies)[0]

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Identify one image; its `finish` raises a `MediaError` where the model's processor refuses it."""
        copies = self._copies(num_images)
        context = b"in company" if copies > 1 else b""
        identity = image_identity(self.settings_digest, loaded, context)

        def finish() -> ProcessedItem:
            geometry = self._geometries.get((loaded.height, loaded.width, copies))
            if geometry is None:
                geometry, tensors = self._whole(loaded.image, copies)
            else:
                tensors = self._tensors(loaded.image, copies)
            return ProcessedItem(
                identity=identity,
                size=(loaded.height, loaded.width),
                grid=geometry.grid,
                expansion=geometry.expansion,
                parts={name: compacted(values, self._arithmetic) for name, values in tensors.items()},
            )

        return Prepared(identity, finish)

    def _copies(self, num_images: int) -> int:
        return 2 if self.depends_on_image_count and num_images > 1 else 1

    def _whole(self, image: Image.Image, copies: int) -> tuple[Geometry, Tensors]:
        """Run the whole processor, and remember the expansion of an image of this size."""
        seen = self._observe(image, copies)
        geometry = Geometry(_grid(seen.tensors), parse_expansion(seen.text, self._feature_token))
        return self._geometries.put((image.height, image.width, copies), geometry), seen.tensors

    def _tensors(self, image: Image.Image, copies: int) -> Tensors:
        """Run the image processor alone, as the whole processor would run it."""
        with _refusals_named(image):
            output = dict(self._image_processor([[image] * copies], **self._image_options))
            if not self._kept.keys() >= output.keys():
                # A picture may have tensors that no earlier one had; only a whole run tells which are kept.
                return self._observe(image, copies).tensors
            tensors = {name: as_numpy(values) for name, values in output.items() if self._kept[name]}
        return _first_of(tensors, copies)

    def _observe(self, image: Image.Image, copies: int) -> _Observation:
        """Run the whole processor on copies of an image, each with its placeholder, and note what it does."""
        text = self._opening + BEFORE + _BETWEEN.join([self.placeholder["image"]] * copies) + AFTER
        written, tensors, options = self._run(text, image, copies)
        start, stop = written.find(BEFORE), written.rfind(AFTER)
        pieces = written[start + len(BEFORE) : stop].split(_BETWEEN)
        if start < 0 or stop < 0 or len(pieces) != copies:
            raise ProcessorError(
                "the model's processor moves or drops the text around an image",
                expected=f"{copies} image(s) between the marks of the probe",
                got=repr(written[:200]),
            )
        ends = written[:start], written[stop + len(AFTER) :]
        if ends != (self._opening, ""):
            raise ProcessorError(
                "the model's processor adds text of its own to a prompt",
                expected=f"{self._opening!r} before it and nothing after it",
                got=f"{ends[0]!r} and {ends[1]!r}",
            )
        if len(set(pieces)) > 1:
            raise ProcessorError(
                "the model's processor writes equal images of one prompt differently",
                expected="one expansion for all images of a size",
                got=" and ".join(repr(piece[-80:]) for piece in pieces[:2]),
            )
        return _Observation(pieces[0], tensors, options)

    def _run(self, text: str, image: Image.Image, copies: int) -> tuple[str, Tensors, Mapping[str, Any]]:
        """Run the whole processor; return its written text, the first image's tensors, and the options."""
        with self._lock, _refusals_named(image):
            if self._reference is None:
                self._reference = self._build()
            processor = self._reference
            # Under the lock: outside it, these may be another thread's recorders.
            text_side, image_side = Recorder(processor.tokenizer), Recorder(processor.image_processor)
            processor.tokenizer, processor.image_processor = text_side, image_side
            try:
                output = processor(text=[text], images=[[image] * copies], return_tensors=self._framework)
            finally:
                processor.tokenizer, processor.image_processor = text_side.part, image_side.part
            self._kept |= {name: name in output for name in image_side.returned}
            tensors = {name: as_numpy(output[name]) for name in image_side.returned if name in output}
        written = text_side.args[0] if text_side.args else text_side.options.get("text")
        written = written[0] if isinstance(written, list) and len(written) == 1 else written
        if not isinstance(written, str):
            raise ProcessorError(
                "the model's processor does not tokenize the text it was given",
                expected="one text handed to the tokenizer",
                got=type(written).__name__,
            )
        options = {key: value for key, value in image_side.options.items() if key != "images"}
        return written, _first_of(tensors, copies), options

    def _prove_text(self, expansion: str) -> None:
        """Prove that an expansion is the same whatever text or image follows the placeholder."""
        token, image = self.placeholder["image"], _blank(*_PROBE_SIZES[0])
        # Several images may have another expansion than one.
        pair = self._observe(image, 2).text if self.depends_on_image_count else expansion
        start = self._opening + BEFORE
        probes = [(start + token + after, expansion, 1) for after in _NEIGHBOURS]
        for text, piece, copies in (*probes, (start + token + token + AFTER, pair, 2)):
            written = self._run(text, image, copies)[0]
            if written != text.replace(token, piece):
                raise ProcessorError(
                    "the model's processor writes an image differently beside other text",
                    where=repr(text),
                    expected=repr(text.replace(token, piece)[-80:]),
                    got=repr(written[-80:]),
                )

    def _prove(self, seen: _Observation, height: int, width: int) -> None:
        """Prove that the image processor gives what the whole one does, and find what other images change."""
        kind = type(self._reference).__name__
        # All pixels differ from their neighbours.
        ramp = np.arange(height * width * 3, dtype=np.uint32) * 2654435761 >> 24
        probe = Image.fromarray(ramp.astype(np.uint8).reshape(height, width, 3), "RGB")
        if not _same_tensors(self._tensors(probe, 1), self._observe(probe, 1).tensors):
            raise ProcessorError(f"{kind} changes what its image processor returns")
        pair = self._observe(_blank(height, width), 2)
        if pair.text == seen.text and _same_tensors({**seen.tensors, **pair.tensors}, seen.tensors):
            return
        self.depends_on_image_count = True
        if self._observe(_blank(height, width), 3).text != pair.text:
            raise ProcessorError(
                f"{kind} treats an image differently for each number of others",
                expected="one treatment for all numbers above one",
            )

    def _find_feature_token(self, files: ProcessorFiles, text: str) -> str:
        """Return the token that holds image features in an expansion.

        It is one that the model's settings name, or else the most frequent added token of the tokenizer.
        """
        tokenizer = self._reference.tokenizer
        named = [tokenizer.convert_ids_to_tokens(index) for index in files.token_ids("image")]
        for token in (*named, getattr(tokenizer, "image_token", None), self.placeholder["image"]):
            if isinstance(token, str) and token and token in text:
                return token
        counts = Counter({token: text.count(token) for token in tokenizer.get_added_vocab() if token in text})
        if not counts:
            raise ProcessorError(
                "no token of the expansion holds image features",
                expected="an added token of the tokenizer",
                got=repr(text[:200]),
            )
        return str(counts.most_common(1)[0][0])

    def _described(self, files: ProcessorFiles) -> dict[str, Any]:
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
            "processor_settings": repr(sorted(files.processor.items(), key=lambda entry: entry[0])),
        }


class Recorder:
    """A part of a processor that notes its last call."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and make it."""
        self.args, self.options = args, dict(kwargs)
        result = self.part(*args, **kwargs)
        self.returned = dict(result)
        return result


def parse_expansion(text: str, feature_token: str) -> Expansion:
    """Cut the text of an expansion into runs of the feature token and the text between them."""
    token = re.escape(feature_token)
    return tuple(
        Repeat(feature_token, len(run) // len(feature_token)) if run.startswith(feature_token) else Text(run)
        for run in re.findall(rf"(?:{token})+|.+?(?={token}|\Z)", text, re.S)
    )


@contextmanager
def _refusals_named(image: Image.Image) -> Iterator[None]:
    """Turn whatever a processor raises about an image into a `MediaError`, but for a missing package."""
    try:
        yield
    except MMRenderError:
        raise
    except ImportError as error:
        raise missing_package(error) from error
    except Exception as error:
        raise MediaError(
            "the model's own processor cannot process this image",
            got=f"{image.width}x{image.height} pixels: {type(error).__name__}: {error}",
        ) from error


def arithmetic_of(image_processor: Any, backend: ImageBackend) -> PixelArithmetic | None:
    """Return how pixels are normalised, or None where the settings do not say."""
    try:
        return PixelArithmetic.of(
            image_processor.image_mean, image_processor.image_std, image_processor.rescale_factor, backend
        )
    except (AttributeError, TypeError, ValueError):
        return None


def _same_tensors(one: Tensors, other: Tensors) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == values.dtype and np.array_equal(one[name], values)
        for name, values in other.items()
    )


def _first_of(tensors: Tensors, copies: int) -> Tensors:
    """Return the tensors of the first of several copies of an image, without counts over the batch."""
    if copies == 1:
        return tensors
    shares = {
        name: values.reshape(copies, -1, *values.shape[1:])
        for name, values in tensors.items()
        if values.ndim and len(values) and not len(values) % copies
    }
    return {
        name: values[0]
        for name, values in shares.items()
        # One row an image is the image's own; several rows are only if the copies have them alike.
        if values.shape[1] == 1 or np.array_equal(values[0], values[-1])
    }


def _grid(tensors: Tensors) -> tuple[int, ...]:
    """Return `(t, h, w)` where the processor gives it, else the number of images the pixels are cut into."""
    if (grid := tensors.get("image_grid_thw")) is not None:
        return tuple(int(value) for value in grid[0])
    pixels = tensors.get("pixel_values")
    if pixels is None or pixels.ndim < 4:
        return (1,)
    return (int(np.prod(pixels.shape[:-3])),)


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return a tensor of any framework as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16, all of whose values are float32's too.
        values = (
            values.float() if values.dtype.is_floating_point and values.itemsize == 2 else values
        ).numpy()
    return np.asarray(values)


def _blank(height: int, width: int) -> Image.Image:
    """Return a black image: an expansion depends on the size alone."""
    return Image.new("RGB", (width, height))
