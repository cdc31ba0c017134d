"""Images of any other family, through the model's own Transformers processor (extra `hf`).

The processor is the authority for pixels and for text. It runs whole, on a text of one placeholder per medium
between marks, each with the text that the template writes around it. The expansion then lies between the
marks, for any family. Added here are expansions of images remembered by size, affixes, the smallest exact
form of tensors, identities, and errors with names.

The options that the processor passes to its image processor are recorded, so later images skip the text.
`mmrender.media.processors.adapted_videos` does the same for videos.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
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
)
from mmrender.media.processors.watched import Run, WatchedProcessor, as_numpy, errors_named
from mmrender.sidecar import Expansion, Repeat, Text, common_prefix

_REMEMBERED_SIZES = 4096
"""Maximum number of image sizes whose expansions are kept."""
_PROBE_SIZES = ((96, 160), (700, 230))
BEFORE, _BETWEEN, AFTER = "before", "between", "after"
_NEIGHBOURS = ("", " ", "\n", "<", ".")
"""Texts next to a placeholder, besides the marks."""

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]


def marks_of(around: tuple[str, str], copies: int) -> list[str]:
    """Return the texts of a prompt before, between and after placeholders of copies of one medium."""
    start, end = around
    return [BEFORE + start, *[end + _BETWEEN + start] * (copies - 1), end + AFTER]


def split_at(text: str, marks: Sequence[str], medium: str, expected: str) -> tuple[str, list[str], str]:
    """Return the text before the first mark, the pieces between marks, and the text after the last mark."""
    pieces: list[str] = []
    start = text.find(marks[0])
    position = start + len(marks[0])
    for number, mark in enumerate(marks[1:], 2):
        stop = text.rfind(mark) if number == len(marks) else text.find(mark, position)
        if start < 0 or stop < position:
            raise ProcessorError(
                f"the model's processor moves or drops the text around {medium}",
                expected=expected,
                got=repr(text[:200]),
            )
        pieces.append(text[position:stop])
        position = stop + len(mark)
    return text[:start], pieces, text[position:]


class _Observation(NamedTuple):
    """One run of a processor on copies of an image.

    Attributes:
        pieces: The text that replaced each image's placeholder.
        affixes: All that it wrote besides.
        tensors: The tensors of the first image. Text inputs are left out.
        image_options: The keyword arguments of its image processor, without the images.
    """

    pieces: Sequence[str]
    affixes: Affixes
    tensors: Tensors
    image_options: Mapping[str, Any]


class TransformersProcessor(MediaProcessor):
    """The model's own processor behind the interface of `MediaProcessor`.

    Its image processor is called from many threads at once. The whole processor, which tokenizes, is
    called by one thread at a time and once per image size.

    Args:
        backend: Which of the reference's back ends to run.
        watched: The model's processor on this back end.
        image_text: Text that the chat template writes for an image, placeholder included.

    Raises:
        MissingDependencyError: A package that it needs is not installed.
        ProcessorError: Its prompts are more than the template's text, expansions and constant affixes.
    """

    def __init__(self, backend: ImageBackend, watched: WatchedProcessor, image_text: str = "") -> None:
        self._watched = watched
        reference = watched.reference
        self._image_processor: Any = reference.image_processor
        self._framework = "pt" if backend == "torch" else "np"
        self._geometries: LRUCache[tuple[int, int, int], Geometry] = LRUCache(_REMEMBERED_SIZES)
        self._kept: dict[str, bool] = {}
        """For each output of the image processor whether the whole processor keeps it."""
        self._arithmetic = arithmetic_of(self._image_processor, backend)
        self.name = type(self._image_processor).__name__
        self.image_backend = backend
        token = getattr(reference, "image_token", None)
        token = getattr(token, "content", token)  # BLIP-2's is an AddedToken
        # Qianfan-OCR's `image_token` holds features, and templates write another token.
        token = getattr(reference, "image_placeholder_token", token)
        video = getattr(reference, "video_token", None)
        if not isinstance(token, str):
            raise ProcessorError(
                f"{type(reference).__name__} does not name its image placeholder",
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
        piece, tokenizer = alone[0].pieces[0], reference.tokenizer
        others = getattr(tokenizer, "image_token", None), self.placeholder["image"]
        added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        # If neither the settings nor the tokenizer name one, it is the most frequent.
        frequent = max(filter(None, added), key=piece.count, default=None)
        self._feature_token = watched.feature_token(("image",), piece, *others, frequent)
        self.placeholder_tokens = frozenset((*self.placeholder.values(), self._feature_token))
        options = repr(sorted(self._image_options.items()))
        self.settings_digest = watched.digest(
            "image_processor", self._image_processor, "transformers", backend=backend, options=options
        )
        for seen, size in zip(alone, _PROBE_SIZES, strict=True):
            self._prove(seen, *size)
        with watched.processing_images_once():
            self._affixes |= {place: self._learn(place) for place in watched.bos_places if place != "none"}
            for place in watched.bos_places:
                self._prove_text(place)

    def affixes(self, bos: BosPlace, *, images: bool) -> Affixes | None:
        """Return the affixes that it was seen to write. See `MediaProcessor`."""
        if images:
            return self._affixes.get(bos)
        self._of_text = self._of_text or self._watched.learn_affixes()
        return self._of_text.get(bos)

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return the grid and expansion of a blank image of this size. Remembered by size."""
        copies = self._copies(num_images)
        return self._geometries.get((height, width, copies)) or self._whole(_blank(height, width), copies)[0]

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Identify one image; `finish` raises a `MediaError` if the model's processor refuses it."""
        copies = self._copies(num_images)
        identity = image_identity(self.settings_digest, loaded, b"in company" if copies > 1 else b"")
        return Prepared(identity, partial(self._finish, identity, loaded, copies))

    def _finish(self, identity: str, loaded: LoadedImage, copies: int) -> ProcessedItem:
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

    def _copies(self, num_images: int) -> int:
        return 2 if self.depends_on_image_count and num_images > 1 else 1

    def _whole(self, image: Image.Image, copies: int) -> tuple[Geometry, Tensors]:
        """Run the whole processor, and remember the expansion of an image of this size."""
        seen = self._observe(image, copies)
        pixels = seen.tensors.get("pixel_values")
        tiles = int(np.prod(pixels.shape[:-3])) if pixels is not None and pixels.ndim >= 4 else 1
        grid = grid_of(seen.tensors, "image_grid_thw", tiles)
        geometry = Geometry(grid, parse_expansion(seen.pieces[0], self._feature_token))
        return self._geometries.put((image.height, image.width, copies), geometry), seen.tensors

    def _tensors(self, image: Image.Image, copies: int) -> Tensors:
        """Run the image processor alone, as the whole processor would run it."""
        with errors_named(_medium(image)):
            output = dict(self._image_processor([[image] * copies], **self._image_options))
            if not self._kept.keys() >= output.keys():
                # An image may have tensors that no earlier image had. Only a whole run tells which are kept.
                return self._observe(image, copies).tensors
            tensors = {name: as_numpy(values) for name, values in output.items() if self._kept[name]}
        return _first_of(tensors, copies)

    def _texts(self, copies: int, place: BosPlace = "none") -> list[str]:
        """Return the texts of a prompt around the placeholders of copies of an image."""
        first, *rest = marks_of(self._around, copies)
        return [self._watched.with_bos(first, place), *rest]

    def _run(self, texts: Sequence[str], image: Image.Image) -> Run:
        """Run the whole processor on texts with an image between any two."""
        return self._watched.run(
            self.placeholder["image"].join(texts),
            _medium(image),
            images=[[image] * (len(texts) - 1)],
            return_tensors=self._framework,
        )

    def _run_marked(self, image: Image.Image, copies: int, place: BosPlace = "none") -> _Observation:
        """Run the whole processor on copies of an image. Pieces are as it writes them."""
        texts = self._texts(copies, place)
        run = self._run(texts, image)
        self._kept |= {name: name in run.output for name in run.of_images}
        tensors = {name: as_numpy(run.output[name]) for name in run.of_images if name in run.output}
        expected = f"expansions in {self.placeholder['image'].join(texts)!r}"
        opening, pieces, ending = split_at(run.text, texts, "an image", expected)
        affixes = self._watched.affixes_of(run, opening, ending)
        return _Observation(pieces, affixes, _first_of(tensors, copies), run.image_options)

    def _require_placeholder(self, image_text: str) -> None:
        """Find the text of the template that the processor needs around a placeholder.

        Raises:
            ProcessorError: It does not replace placeholders, or it writes another prompt.
            MediaError: It does not take an image with text.
        """
        image = _blank(*_PROBE_SIZES[0])
        try:
            self._run_marked(image, 1)
        except MediaError as error:
            # HunYuan-VL takes its placeholder only between tokens that the template writes.
            start, token, end = image_text.partition(self.placeholder["image"])
            if token and start + end:
                self._around = start, end
                return
            try:
                self._watched.run(BEFORE, _medium(image), images=[[image]], return_tensors=self._framework)
            except MMRenderError:
                raise error from None
            raise ProcessorError(
                "the model's processor puts images beside the prompt, and takes no placeholders",
                expected="each image in place of its placeholder",
                got=error.got,
            ) from error

    def _learn(self, place: BosPlace) -> Affixes:
        """Learn the affixes of prompts with images."""
        image = _blank(*_PROBE_SIZES[0])
        pair = self._run_marked(image, 2, place)
        opening, ending = pair.affixes.opening, pair.affixes.ending
        behind: Literal["nothing", "leading", "last"] = "nothing"
        one, two = pair.pieces
        if one != two:
            if opening or not two.startswith(one):
                raise _unequal(pair.pieces)
            opening, behind = two[len(one) :], "last"
        elif opening and place != "none":
            behind = self._affixes["none"].behind
        elif opening:
            head, tail = self._texts(1)
            begun = self._run([head.removeprefix(BEFORE), tail], image)
            behind = "nothing" if begun.text.startswith(opening) else "leading"
        if self.placeholder["image"] in opening + ending:
            raise ProcessorError(
                "the model's processor puts images beside the prompt, wherever the template writes them",
                expected="each image in place of its placeholder",
                got=repr(opening[:80] or ending[:80]),
            )
        return msgspec.structs.replace(pair.affixes, opening=opening, behind=behind)

    def _observe(self, image: Image.Image, copies: int, place: BosPlace = "none") -> _Observation:
        """Run the whole processor on copies of an image, and remove the known affixes from the pieces."""
        seen = self._run_marked(image, copies, place)
        expected = msgspec.structs.replace(self._affixes[place], behind="nothing")
        pieces = list(seen.pieces)
        if self._affixes[place].behind == "last":
            pieces[-1] = pieces[-1].removesuffix(expected.opening)
            expected = msgspec.structs.replace(expected, opening="")
        if seen.affixes != expected:
            raise ProcessorError(
                "the model's processor adds another text to each prompt",
                expected=repr(expected),
                got=repr(seen.affixes),
            )
        if len(set(pieces)) > 1:
            raise _unequal(pieces)
        return seen._replace(pieces=pieces)

    def _prove_text(self, place: BosPlace) -> None:
        """Prove that a prompt is text, expansions and affixes, whatever is next to an image."""
        image = _blank(*_PROBE_SIZES[0])
        pieces = {copies: self._observe(image, copies, place).pieces[0] for copies in (1, 2)}
        (head, tail), (start, end) = self._texts(1, place), self._around
        probes = [[head, end + after] for after in _NEIGHBOURS]
        probes += [[head, end + start, tail]]
        if place != "later":
            opening = head.removesuffix(BEFORE + start)
            probes += [[opening + before + start, tail] for before in _NEIGHBOURS]
            probes += [[opening + start, end + start, tail]]
        for texts in probes:
            text = self._run(texts, image).text
            expected = _prompt_text(texts, pieces[min(len(texts) - 1, 2)], self._affixes[place])
            if text != expected:
                raise ProcessorError(
                    "the model's processor writes an image differently beside other text",
                    where=repr(self.placeholder["image"].join(texts)),
                    expected="one expansion, whatever is beside it",
                    got=_difference(expected, text),
                )

    def _prove(self, seen: _Observation, height: int, width: int) -> None:
        """Prove that the image processor alone returns these tensors, and find the effect of other images."""
        kind = type(self._watched.reference).__name__
        # All pixels differ from their neighbours.
        ramp = np.arange(height * width * 3, dtype=np.uint32) * 2654435761 >> 24
        probe = Image.fromarray(ramp.astype(np.uint8).reshape(height, width, 3), "RGB")
        if not _same_tensors(self._tensors(probe, 1), self._observe(probe, 1).tensors):
            raise ProcessorError(f"{kind} changes what its image processor returns")
        self._prove_independent(probe)
        pair = self._observe(_blank(height, width), 2)
        if pair.pieces[0] == seen.pieces[0] and _same_tensors({**seen.tensors, **pair.tensors}, seen.tensors):
            return
        self.depends_on_image_count = True
        if self._observe(_blank(height, width), 3).pieces[0] != pair.pieces[0]:
            raise ProcessorError(
                f"{kind} treats an image differently for each number of others",
                expected="one treatment for all numbers above one",
            )

    def _prove_independent(self, image: Image.Image) -> None:
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


def parse_expansion(text: str, feature_token: str) -> Expansion:
    """Cut the text of an expansion into runs of the feature token and the text between them."""
    token = re.escape(feature_token)
    return tuple(
        Repeat(feature_token, len(run) // len(feature_token)) if run.startswith(feature_token) else Text(run)
        for run in re.findall(rf"(?:{token})+|.+?(?={token}|\Z)", text, re.S)
    )


def arithmetic_of(part: Any, backend: ImageBackend) -> PixelArithmetic | None:
    """Return how a part of a processor normalises pixels, or None if its settings do not say."""
    try:
        return PixelArithmetic.of(part.image_mean, part.image_std, part.rescale_factor, backend)
    except (AttributeError, TypeError, ValueError):
        return None


def grid_of(tensors: Tensors, name: str, count: int) -> tuple[int, ...]:
    """Return `(t, h, w)` if the processor returns it, else the number of tiles or frames."""
    grid = tensors.get(name)
    return (count,) if grid is None else tuple(int(value) for value in grid[0])


def _prompt_text(texts: Sequence[str], piece: str, affixes: Affixes) -> str:
    """Return a prompt with one piece between any two texts, and with affixes."""
    images, position = [], 0
    for text in texts[:-1]:
        start = position + len(text)
        position = start + len(piece)
        images.append((start, position))
    prompt, at = piece.join(texts), affixes.start(images)
    return prompt[:at] + affixes.opening + prompt[at:] + affixes.ending


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
        # A single row per image is the image's own. Several rows are only if all copies have equal ones.
        if values.shape[1] == 1 or np.array_equal(values[0], values[-1])
    }


def _unequal(pieces: Sequence[str]) -> ProcessorError:
    return ProcessorError(
        "the model's processor writes equal images of one prompt differently",
        expected="one expansion for all images of a size",
        got=_difference(*pieces[:2]),
    )


def _difference(one: str, other: str) -> str:
    """Return the place at which two texts begin to differ."""
    start = max(0, common_prefix(one, other) - 20)
    return " and ".join(repr(text[start : start + 60]) for text in (one, other))


def _medium(image: Image.Image) -> str:
    return f"image {image.width}x{image.height} pixels"


def _blank(height: int, width: int) -> Image.Image:
    """Return a black image: an expansion depends on the size alone."""
    return Image.new("RGB", (width, height))
