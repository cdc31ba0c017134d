"""Run a processor of Transformers whole, and record the text and the options that it hands to its parts.

The text that reaches its tokenizer is the authority for prompts: expansions and affixes are learnt from it,
for any family and without a rule of ours.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmcodecs.forks import watch_forks
from mmrender.errors import MediaError, MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.processor import Affixes, BosPlace, ProcessorFiles, digest_settings
from mmrender.media.processors.reference import named_errors, use_one_torch_thread
from mmrender.messages import Modality

_FORMAT_VERSION = 1
"""Part of every identity."""
_TEXTS = ("before", "before after\n", "\nbefore ", "before <after>.")
"""Prompts without media."""


class Run(NamedTuple):
    """One run of a processor.

    Attributes:
        text: The text that it handed to its tokenizer.
        output: Everything that it returned.
        of_text: Names of its tokenizer's outputs.
        of_images: Names of its image processor's outputs.
        image_options: Keyword arguments of its image processor, without the images.
    """

    text: str
    output: Mapping[str, Any]
    of_text: frozenset[str]
    of_images: frozenset[str]
    image_options: Mapping[str, Any]


class ChosenError(MMRenderError):
    """Ends a run of a processor once it has chosen the frames to sample. Never leaves the package."""


class WatchedProcessor:
    """A processor of Transformers, run by one thread at a time.

    Args:
        build: Makes the processor.
        files: The model's settings.

    Attributes:
        bos: The model's BOS token, or an empty string.
        lock: Held in a run. Hold it to change the processor.
    """

    def __init__(self, build: Callable[[], Any], files: ProcessorFiles) -> None:
        self.bos = files.bos_token
        self._files = files
        self.lock = threading.RLock()
        self._build = build
        self._reference: Any = None
        self._kept_images: dict[bytes, Any] | None = None
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Build the processor again at its next use, if another thread was in the middle of a run."""
        use_one_torch_thread()
        if not self.lock.acquire(blocking=False):
            self._reference = self._kept_images = None
        self.lock = threading.RLock()

    @property
    def reference(self) -> Any:
        """The processor, which the first use makes.

        Raises:
            MissingDependencyError: A package that it needs is not installed.
            ProcessorError: Transformers cannot build it.
        """
        with self.lock:
            if self._reference is None:
                self._reference = self._build()
            return self._reference

    def digest(self, name: str, part: Any, kind: str, **more: str) -> bytes:
        """Digest everything but the pixels or samples that the tensors of a part of this name depend on."""
        import transformers

        cls = type(part)
        is_own = cls.__module__.startswith("transformers_modules.")  # code of the directory
        return digest_settings({
            "version": _FORMAT_VERSION,
            "kind": kind,
            "transformers": transformers.__version__,
            "settings": part.to_json_string(),
            "processor": type(self.reference).__name__,
            "processor_settings": repr(sorted(self._files.processor.items(), key=lambda entry: entry[0])),
            name: f"{self._files.digest_code() if is_own else cls.__module__}.{cls.__name__}",
            **more,
        })  # fmt: skip

    def feature_token(self, modalities: Sequence[Modality], text: str, *others: Any) -> str:
        """Return the first token in an expansion out of those that `config.json` names, then `others`.

        Raises:
            ProcessorError: It contains none of them.
        """
        ids = [index for modality in modalities for index in self._files.token_ids(modality)]
        for token in (*map(self.reference.tokenizer.convert_ids_to_tokens, ids), *others):
            if isinstance(token, str) and token and token in text:
                return token
        raise ProcessorError(
            f"no token of the expansion holds features of the {modalities[0]}",
            expected="a token that config.json names",
            got=repr(text[:200]),
        )

    @property
    def bos_places(self) -> Sequence[BosPlace]:
        """Positions of BOS in prompts."""
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
            medium: Name of the medium and its size, for errors.
            **inputs: Media, and their options.

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
        tokenizer, images = recorders["tokenizer"], recorders.get("image_processor")
        prompt = tokenizer.args[0] if tokenizer.args else tokenizer.options.get("text")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise ProcessorError(
                "the model's processor does not tokenize the text it was given",
                expected="one text handed to the tokenizer",
                got=f"{len(prompt)} texts" if isinstance(prompt, list) else type(prompt).__name__,
            )
        return Run(
            prompt,
            output,
            frozenset(tokenizer.returned),
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

    def affixes_of(self, run: Run, opening: str, ending: str) -> Affixes:
        """Return the affixes of a run: texts that it added, and tokens around the tokens of its text.

        Raises:
            ProcessorError: The ids do not contain the ids of the text.
        """
        ids = as_numpy(run.output["input_ids"]).reshape(-1).tolist()
        with self.lock:
            alone = self.reference.tokenizer(run.text, add_special_tokens=False)["input_ids"]
        inner = as_numpy(alone).reshape(-1).tolist()
        for start in range(len(ids) - len(inner) + 1):
            stop = start + len(inner)
            if ids[start:stop] == inner:
                return Affixes(tuple(ids[:start]), opening, "nothing", ending, tuple(ids[stop:]))
        raise ProcessorError("the model's processor changes the tokens of a text", got=repr(run.text[:80]))

    def require_same_affixes(self, run: Run, opening: str, ending: str, medium: str) -> None:
        """Require that a prompt with `medium`, such as "a video", has the affixes of prompts without media.

        Raises:
            ProcessorError: It has others.
        """
        expected, affixes = self.learn_affixes()["none"], self.affixes_of(run, opening, ending)
        if expected.refusal is None and affixes != expected:
            raise ProcessorError(
                f"the model's processor adds another text to a prompt with {medium} than to others",
                expected=repr(expected),
                got=repr(affixes),
            )

    def learn_affixes(self, texts: Sequence[str] = ()) -> dict[BosPlace, Affixes]:
        """Learn the affixes of prompts without media, by the position of BOS.

        Each is proved over several texts, including `texts` of the model's own template.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: Transformers cannot build it.
        """
        _ = self.reference  # its error does not refuse a text
        plain = [text.removeprefix(self.bos) for text in texts]
        return {
            place: self._learn([
                self.with_bos(text, place) for text in (*_TEXTS, *(plain if place != "later" else ()))
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
                kinds.add(self.affixes_of(run, opening, ending))
        except MissingDependencyError:
            raise
        except MMRenderError as error:
            return Affixes(refusal=str(error))
        if len(kinds) > 1:
            return Affixes(
                refusal=f"it adds other text to each prompt: {', '.join(sorted(map(repr, kinds)))}"
            )
        return kinds.pop()


class _Recorder:
    """A part of a processor that records its last call. With `kept`, equal calls are made once."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.kept: dict[bytes, Any] | None = None
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and make it."""
        self.args, self.options = args, dict(kwargs)
        result = self._result(args, kwargs)
        self.returned = dict(result)
        return result

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.kept is None:
            return self.part(*args, **kwargs)
        try:
            key = pickle.dumps((args, kwargs))
        except (pickle.PicklingError, TypeError, AttributeError):  # an option of a processor's own code
            return self.part(*args, **kwargs)
        if key not in self.kept:
            self.kept[key] = self.part(*args, **kwargs)
        return copy.copy(self.kept[key])  # processors remove members from it


def errors_named(medium: str) -> AbstractContextManager[None]:
    """Turn any exception of a running processor into a `MediaError`, except for a missing package."""
    kind = medium.partition(" ")[0]
    size = medium.removeprefix(kind).strip()

    def failed(cause: str) -> MediaError:
        got = f"{size}: {cause}".removeprefix(": ")
        return MediaError(f"the model's own processor cannot process this {kind}", got=got)

    return named_errors(failed)


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return a tensor of any framework as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16, all of whose values are float32's too.
        is_half = values.dtype.is_floating_point and values.itemsize == 2
        values = (values.float() if is_half else values).numpy()
    return np.asarray(values)
