"""What a model's own processor writes in place of a placeholder, learnt by watching it write.

The processor runs whole, on a text of one placeholder per image between marks. What it hands to its tokenizer
is recorded: whatever stands between the marks then is the expansion, for any family and with no rule of ours.
What it asks of its image processor is recorded as well, so that later images can skip the text.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.errors import ProcessorError
from mmrender.spans import Expansion, Repeat, Text

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
