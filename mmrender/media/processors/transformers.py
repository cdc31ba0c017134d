"""Any other family, through the model's own Transformers processor (extra `hf`).

The processor is the authority for pixels and for text. Added here: expansions, learnt by watching it write
and remembered by image size; the text that it writes beside them; the smallest exact form of its tensors;
identities; errors with names.

It runs whole, on a text of one placeholder per image between marks, each with the text that the template
writes around it. The expansion then lies between the marks, for any family. The options that it passes to its
image processor are recorded as well, so that later images can skip the text.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.caching import LRUCache
from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import PixelArithmetic, compacted
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend, image_identity
from mmrender.media.processor import (
    Affixes,
    BosPlace,
    Geometry,
    MediaProcessor,
    Prepared,
    ProcessorFiles,
    digest_settings,
)
from mmrender.media.processors.watched import WatchedProcessor, as_numpy, errors_named
from mmrender.sidecar import Expansion, Repeat, Text, common_prefix

_REMEMBERED_SIZES = 4096
_PROBE_SIZES = ((96, 160), (700, 230))
_FORMAT_VERSION = 1
BEFORE, BETWEEN, AFTER = "before", "between", "after"
_NEIGHBOURS = ("", " ", "\n", "<", ".")
"""Text after a placeholder, beside the words of the marks."""

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]


class _Observation(NamedTuple):
    """One run of a processor on copies of an image.

    Attributes:
        pieces: The text that replaced each image's placeholder.
        opening: Text before the prompt.
        ending: Text after the prompt.
        beside: Ids of the tokens before and after all text.
        tensors: The tensors of the first image; text inputs are left out.
        image_options: The keyword arguments its image processor was called with, beside the images.
    """

    pieces: Sequence[str]
    opening: str
    ending: str
    beside: tuple[tuple[int, ...], tuple[int, ...]]
    tensors: Tensors
    image_options: Mapping[str, Any]


class TransformersProcessor(MediaProcessor):
    """The model's own processor behind the interface of `MediaProcessor`.

    Its image processor is called from many threads at once; the processor as a whole, which tokenizes, by one
    thread at a time and once per image size. Identities hold the release of Transformers, whose code it is.

    Args:
        files: The model's settings.
        backend: Which of the reference's back ends to run.
        watched: The model's processor on this back end.
        image_text: Text that the chat template writes for an image, placeholder included.

    Raises:
        MissingDependencyError: A package that it needs is not installed.
        ProcessorError: Its prompts are more than the template's text, expansions and constant text beside.
    """

    def __init__(
        self, files: ProcessorFiles, backend: ImageBackend, watched: WatchedProcessor, image_text: str = ""
    ) -> None:
        self._watched = watched
        self._image_processor: Any = self._reference.image_processor
        self._framework = "pt" if backend == "torch" else "np"
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
        self._around = ("", "")
        self._of_text: Mapping[BosPlace, Affixes] = {}
        with watched.processing_images_once():
            self._require_placeholder(image_text)
            self._affixes = {"none": self._learn("none")}
        alone = [self._observe(_blank(*size), 1) for size in _PROBE_SIZES]
        self._image_options = dict(alone[0].image_options)
        self._feature_token = self._find_feature_token(files, alone[0].pieces[0])
        self.placeholder_tokens = frozenset((*self.placeholder.values(), self._feature_token))
        self.settings_digest = digest_settings(self._described(files))
        for seen, size in zip(alone, _PROBE_SIZES, strict=True):
            self._prove(seen, *size)
        with watched.processing_images_once():
            self._affixes |= {place: self._learn(place) for place in watched.bos_places if place != "none"}
            for place in watched.bos_places:
                self._prove_text(place)

    @property
    def _reference(self) -> Any:
        return self._watched.reference

    def affixes(self, bos: BosPlace, *, images: bool) -> Affixes | None:
        """Return what it was seen to write beside a prompt; see `MediaProcessor`."""
        if images:
            return self._affixes.get(bos)
        self._of_text = self._of_text or self._watched.learn_affixes()
        return self._of_text.get(bos)

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
        geometry = Geometry(_grid(seen.tensors), parse_expansion(seen.pieces[0], self._feature_token))
        return self._geometries.put((image.height, image.width, copies), geometry), seen.tensors

    def _tensors(self, image: Image.Image, copies: int) -> Tensors:
        """Run the image processor alone, as the whole processor would run it."""
        with errors_named(_described_size(image)):
            output = dict(self._image_processor([[image] * copies], **self._image_options))
            if not self._kept.keys() >= output.keys():
                # A picture may have tensors that no earlier one had; only a whole run tells which are kept.
                return self._observe(image, copies).tensors
            tensors = {name: as_numpy(values) for name, values in output.items() if self._kept[name]}
        return _first_of(tensors, copies)

    def _text(self, copies: int, place: BosPlace = "none") -> list[str]:
        """Return the texts between the placeholders of a prompt with copies of an image."""
        start, end = self._around
        texts = [BEFORE + start, *[end + BETWEEN + start] * (copies - 1), end + AFTER]
        return [self._watched.with_bos(texts[0], place), *texts[1:]]

    def _run(self, texts: Sequence[str], image: Image.Image, place: BosPlace = "none") -> _Observation:
        """Run the whole processor on texts with an image between each two; pieces are as it writes them."""
        prompt = self.placeholder["image"].join(texts)
        images = [[image] * (len(texts) - 1)]
        medium = _described_size(image)
        run = self._watched.run(prompt, medium, images=images, return_tensors=self._framework)
        self._kept |= {name: name in run.output for name in run.of_images}
        tensors = {name: as_numpy(run.output[name]) for name in run.of_images if name in run.output}
        pieces: list[str] = []
        start = run.text.find(texts[0])
        position = start + len(texts[0])
        for number, text in enumerate(texts[1:], 2):
            last = number == len(texts)
            stop = run.text.rfind(text) if last else run.text.find(text, position)
            if start < 0 or stop < position:
                raise ProcessorError(
                    "the model's processor moves or drops the text around an image",
                    expected=f"expansions in {prompt!r}",
                    got=repr(run.text[:200]),
                )
            pieces.append(run.text[position:stop])
            position = stop + len(text)
        opening, ending = run.text[:start], run.text[position:]
        beside = self._watched.tokens_beside(run)
        own = _first_of(tensors, len(pieces))
        return _Observation(pieces, opening, ending, beside, own, run.image_options)

    def _require_placeholder(self, image_text: str) -> None:
        """Find out which text of the template the processor wants around a placeholder.

        Raises:
            ProcessorError: It wants none, and puts images where it likes; or it writes another prompt.
            MediaError: It takes no image with text.
        """
        image, medium = _blank(*_PROBE_SIZES[0]), _described_size(_blank(*_PROBE_SIZES[0]))
        try:
            self._run(self._text(1), image)
        except MediaError as error:
            # HunYuan-VL takes its placeholder only between tokens that the template writes.
            start, token, end = image_text.partition(self.placeholder["image"])
            if token and start + end:
                self._around = start, end
                return
            try:
                self._watched.run(BEFORE, medium, images=[[image]], return_tensors=self._framework)
            except MMRenderError:
                raise error from None
            raise ProcessorError(
                "the model's processor puts images beside the prompt, and takes no placeholders",
                expected="each image in place of its placeholder",
                got=error.got,
            ) from error

    def _learn(self, place: BosPlace) -> Affixes:
        """Learn what it writes beside a prompt with images."""
        image = _blank(*_PROBE_SIZES[0])
        pair = self._run(self._text(2, place), image)
        first, last = pair.beside
        opening = pair.opening
        behind: Literal["nothing", "leading", "last"] = "nothing"
        one, two = pair.pieces
        if one != two:
            if opening or not two.startswith(one):
                raise ProcessorError(
                    "the model's processor writes equal images of one prompt differently",
                    expected="one expansion for all images of a size",
                    got=_unlike(one, two),
                )
            opening, behind = two[len(one) :], "last"
        elif opening and place != "none":
            behind = self._affixes["none"].behind
        elif opening:
            begun = self._watched.run(
                self.placeholder["image"].join(self._text(1))[len(BEFORE) :],
                images=[[image]],
                return_tensors=self._framework,
            )
            behind = "nothing" if begun.text.startswith(opening) else "leading"
        affixes = Affixes(first, opening, behind, pair.ending, last)
        if self.placeholder["image"] in opening + pair.ending:
            raise ProcessorError(
                "the model's processor puts images beside the prompt, wherever the template writes them",
                expected="each image in place of its placeholder",
                got=repr(opening[:80] or pair.ending[:80]),
            )
        return affixes

    def _observe(self, image: Image.Image, copies: int, place: BosPlace = "none") -> _Observation:
        """Run the whole processor on copies of an image, and take off what it writes beside them."""
        seen = self._run(self._text(copies, place), image)
        affixes = self._affixes[place]
        pieces = list(seen.pieces)
        opening = "" if affixes.behind == "last" else affixes.opening
        if affixes.behind == "last" and pieces[-1].endswith(affixes.opening):
            pieces[-1] = pieces[-1].removesuffix(affixes.opening)
        found = (seen.opening, seen.ending, seen.beside)
        expected = (opening, affixes.ending, (affixes.first, affixes.last))
        if found != expected:
            raise ProcessorError(
                "the model's processor adds another text to each prompt",
                expected=repr(expected),
                got=repr(found),
            )
        if len(set(pieces)) > 1:
            raise ProcessorError(
                "the model's processor writes equal images of one prompt differently",
                expected="one expansion for all images of a size",
                got=_unlike(*pieces[:2]),
            )
        return seen._replace(pieces=pieces)

    def _prove_text(self, place: BosPlace) -> None:
        """Prove that a prompt is text, expansions and affixes, whatever text or image is beside an image."""
        image = _blank(*_PROBE_SIZES[0])
        pieces = {copies: self._observe(image, copies, place).pieces[0] for copies in (1, 2)}
        affixes = self._affixes[place]
        (head, tail), (start, end) = self._text(1, place), self._around
        probes = [[head, end + after] for after in _NEIGHBOURS]
        probes += [[head, end + start, tail]]
        if place != "later":
            opened = head.removesuffix(BEFORE + start)
            probes += [[opened + before + start, tail] for before in _NEIGHBOURS]
            probes += [[opened + start, end + start, tail]]
        for texts in probes:
            prompt = self.placeholder["image"].join(texts)
            count = len(texts) - 1
            written = self._watched.run(
                prompt, _described_size(image), images=[[image] * count], return_tensors=self._framework
            ).text
            expected = _written(texts, pieces[min(count, 2)], affixes)
            if written != expected:
                raise ProcessorError(
                    "the model's processor writes an image differently beside other text",
                    where=repr(prompt),
                    expected="one expansion, whatever is beside it",
                    got=_unlike(expected, written),
                )

    def _prove(self, seen: _Observation, height: int, width: int) -> None:
        """Prove that the image processor gives what the whole one does, and find what other images change."""
        kind = type(self._reference).__name__
        # All pixels differ from their neighbours.
        ramp = np.arange(height * width * 3, dtype=np.uint32) * 2654435761 >> 24
        probe = Image.fromarray(ramp.astype(np.uint8).reshape(height, width, 3), "RGB")
        if not _same_tensors(self._tensors(probe, 1), self._observe(probe, 1).tensors):
            raise ProcessorError(f"{kind} changes what its image processor returns")
        self._prove_alike(probe)
        pair = self._observe(_blank(height, width), 2)
        if pair.pieces[0] == seen.pieces[0] and _same_tensors({**seen.tensors, **pair.tensors}, seen.tensors):
            return
        self.depends_on_image_count = True
        if self._observe(_blank(height, width), 3).pieces[0] != pair.pieces[0]:
            raise ProcessorError(
                f"{kind} treats an image differently for each number of others",
                expected="one treatment for all numbers above one",
            )

    def _prove_alike(self, image: Image.Image) -> None:
        """Prove that no tensor of an image depends on the images before it, as indices into a batch do."""
        runs = (self._image_processor([[image] * count], **self._image_options) for count in (1, 2))
        alone, pair = map(dict, runs)
        for name, values in alone.items():
            one, two = as_numpy(values), as_numpy(pair.get(name, values))
            is_joined = one.ndim > 0 and two.shape == (2 * len(one), *one.shape[1:])
            if is_joined and self._kept.get(name) and not np.array_equal(two[: len(one)], two[len(one) :]):
                raise ProcessorError(
                    f"{name} of an image depends on the images before it",
                    expected="tensors of each image that are equal in every batch",
                    got="indices or counts that go on from image to image",
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


def parse_expansion(text: str, feature_token: str) -> Expansion:
    """Cut the text of an expansion into runs of the feature token and the text between them."""
    token = re.escape(feature_token)
    return tuple(
        Repeat(feature_token, len(run) // len(feature_token)) if run.startswith(feature_token) else Text(run)
        for run in re.findall(rf"(?:{token})+|.+?(?={token}|\Z)", text, re.S)
    )


def _written(texts: Sequence[str], piece: str, affixes: Affixes) -> str:
    """Return the text of a prompt with one piece between each two texts, and what is written beside them."""
    images, position = [], 0
    for text in texts[:-1]:
        start = position + len(text)
        position = start + len(piece)
        images.append((start, position))
    prompt, at = piece.join(texts), affixes.start(images)
    return prompt[:at] + affixes.opening + prompt[at:] + affixes.ending


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


def _unlike(one: str, other: str) -> str:
    """Return where two texts begin to differ."""
    start = max(0, common_prefix(one, other) - 20)
    return " and ".join(repr(text[start : start + 60]) for text in (one, other))


def _described_size(image: Image.Image) -> str:
    return f"image {image.width}x{image.height} pixels"


def _blank(height: int, width: int) -> Image.Image:
    """Return a black image: an expansion depends on the size alone."""
    return Image.new("RGB", (width, height))
