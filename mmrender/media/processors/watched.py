"""Run a processor of Transformers whole, and note the text and the options that it hands to its parts.

The text that reaches its tokenizer is the authority for prompts: expansions and all that the processor writes
beside them are learnt from it, for any family and with no rule of ours.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmcodecs.forks import watch_forks
from mmrender.errors import MediaError, MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.processor import Affixes, BosPlace
from mmrender.media.processors.reference import missing_package, use_one_torch_thread

_TEXTS = ("before", "before after\n", "\nbefore ", "before <after>.")
"""Prompts without media."""


class Run(NamedTuple):
    """One run of a processor.

    Attributes:
        text: The text that it handed to its tokenizer.
        output: All that it returned.
        of_text: Names of what its tokenizer returned.
        of_images: Names of what its image processor returned.
        image_options: Keyword arguments of its image processor, beside the images.
    """

    text: str
    output: Mapping[str, Any]
    of_text: frozenset[str]
    of_images: frozenset[str]
    image_options: Mapping[str, Any]


class WatchedProcessor:
    """A processor of Transformers that one thread at a time may run.

    Args:
        build: Makes the processor.
        bos: The model's BOS token, or an empty string.

    Attributes:
        lock: Held in a run; hold it to change the processor.
    """

    def __init__(self, build: Callable[[], Any], bos: str = "") -> None:
        self.bos = bos
        self.lock = threading.RLock()
        self._build = build
        self._reference: Any = None
        self._kept_images: dict[bytes, Any] | None = None
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Build the processor anew, at its next use, if another thread was in the middle of a run."""
        use_one_torch_thread()
        if not self.lock.acquire(blocking=False):
            self._reference = self._kept_images = None
        self.lock = threading.RLock()

    @property
    def reference(self) -> Any:
        """The processor, which the first use makes.

        Raises:
            MissingDependencyError: Something that it needs is not installed.
            ProcessorError: Transformers cannot build it.
        """
        with self.lock:
            if self._reference is None:
                self._reference = self._build()
            return self._reference

    @property
    def bos_places(self) -> Sequence[BosPlace]:
        """Where prompts may hold BOS."""
        return ("none", "first", "later") if self.bos else ("none",)

    def with_bos(self, text: str, place: BosPlace) -> str:
        """Return a text with BOS at its start, or behind its first word."""
        if place == "none":
            return text
        first, space, rest = text.partition("before") if place == "later" else ("", "", text)
        return first + space + self.bos + rest

    def run(self, text: str, medium: str = "prompt", **inputs: Any) -> Run:
        """Run on one text, as `apply_chat_template` does.

        Args:
            text: The template's text.
            medium: Name of the medium for errors, with its size.
            **inputs: Media, and options that go with them.

        Raises:
            MediaError: The processor raises an error.
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: It hands no text to its tokenizer.
        """
        if self.bos and text.startswith(self.bos):
            inputs["add_special_tokens"] = False
        with self.lock, errors_named(medium):
            processor = self.reference
            names = [name for name in ("tokenizer", "image_processor") if hasattr(processor, name)]
            # Under the lock: outside it, these may be another thread's recorders.
            recorders = {name: _Recorder(getattr(processor, name)) for name in names}
            if "image_processor" in recorders:
                recorders["image_processor"].kept = self._kept_images
            for name, recorder in recorders.items():
                setattr(processor, name, recorder)
            try:
                output = processor(text=text, **inputs)
            finally:
                for name, recorder in recorders.items():
                    setattr(processor, name, recorder.part)
        side = recorders["tokenizer"]
        written = side.args[0] if side.args else side.options.get("text")
        if isinstance(written, list) and len(written) == 1:
            written = written[0]
        if not isinstance(written, str):
            raise ProcessorError(
                "the model's processor does not tokenize the text it was given",
                expected="one text handed to the tokenizer",
                got=f"{len(written)} texts" if isinstance(written, list) else type(written).__name__,
            )
        images = recorders.get("image_processor")
        return Run(
            written,
            output,
            frozenset(side.returned),
            frozenset(images.returned if images else ()),
            {key: value for key, value in images.options.items() if key != "images"} if images else {},
        )

    @contextmanager
    def processing_images_once(self) -> Iterator[None]:
        """Process equal images once for all runs within, which differ in their text alone."""
        with self.lock:
            self._kept_images = {}
            try:
                yield
            finally:
                self._kept_images = None

    def tokens_beside(self, run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of a run before and after those of its text.

        Raises:
            ProcessorError: The ids are more than the text's with others around them.
        """
        ids = as_numpy(run.output["input_ids"]).reshape(-1).tolist()
        with self.lock:
            alone = self.reference.tokenizer(run.text, add_special_tokens=False)["input_ids"]
        inner = as_numpy(alone).reshape(-1).tolist()
        for start in range(len(ids) - len(inner) + 1):
            stop = start + len(inner)
            if ids[start:stop] == inner:
                return tuple(ids[:start]), tuple(ids[stop:])
        raise ProcessorError("the model's processor changes the tokens of a text", got=repr(run.text[:80]))

    def learn_affixes(self, texts: Sequence[str] = ()) -> dict[BosPlace, Affixes]:
        """Learn what it writes beside prompts without media, by where they hold BOS.

        Each is proved over several texts, `texts` of the model's own template among them.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: Transformers cannot build it.
        """
        _ = self.reference  # whose error is no refusal of a text
        plain = [text.removeprefix(self.bos) for text in texts]
        return {
            place: self._learn([
                *[self.with_bos(text, place) for text in _TEXTS],
                *([] if place == "later" else [self.with_bos(text, place) for text in plain]),
            ])
            for place in self.bos_places
        }  # fmt: skip

    def _learn(self, texts: Sequence[str]) -> Affixes:
        kinds: set[Affixes] = set()
        try:
            for text in texts:
                run = self.run(text)
                opening, middle, ending = run.text.partition(text)
                if not middle:
                    return Affixes(refusal=f"it writes {run.text[:80]!r} for {text!r}")
                first, last = self.tokens_beside(run)
                kinds.add(Affixes(first, opening, "nothing", ending, last))
        except MissingDependencyError:
            raise
        except MMRenderError as error:
            return Affixes(refusal=str(error))
        if len(kinds) > 1:
            return Affixes(
                refusal=f"it adds other text to each prompt: {', '.join(sorted(map(repr, kinds)))}"
            )
        return kinds.pop()


class ChosenError(Exception):
    """Ends a run of a processor once it has said which frames it samples."""


class _Recorder:
    """A part of a processor that notes its last call; with `kept`, equal calls are made once."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.kept: dict[bytes, Any] | None = None
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and make it."""
        self.args, self.options = args, dict(kwargs)
        result = self.part(*args, **kwargs) if self.kept is None else self._once(self.kept, args, kwargs)
        self.returned = dict(result)
        return result

    def _once(self, kept: dict[bytes, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            key = pickle.dumps((args, kwargs))
        except (pickle.PicklingError, TypeError, AttributeError):  # an option of a processor's own code
            return self.part(*args, **kwargs)
        if key not in kept:
            kept[key] = self.part(*args, **kwargs)
        return copy.copy(kept[key])  # processors take members out of it


@contextmanager
def errors_named(medium: str) -> Iterator[None]:
    """Turn whatever a processor raises into a `MediaError`, but for a missing package."""
    try:
        yield
    except (ChosenError, MMRenderError):
        raise
    except ImportError as error:
        raise missing_package(error) from error
    except Exception as error:
        kind = medium.partition(" ")[0]
        raise MediaError(
            f"the model's own processor cannot process this {kind}",
            got=f"{medium.removeprefix(kind).strip()}: {type(error).__name__}: {error}".removeprefix(": "),
        ) from error


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return a tensor of any framework as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16, all of whose values are float32's too.
        values = (
            values.float() if values.dtype.is_floating_point and values.itemsize == 2 else values
        ).numpy()
    return np.asarray(values)
