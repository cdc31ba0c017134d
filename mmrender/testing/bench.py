"""What `mmrender bench` measures: how long this machine takes, beside the least that each thing could take.

Needs no peers, no repository and no network. Every call gets a conversation or a picture that was never seen,
except where the figure's name says so.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import mmcodecs
from mmrender.testing.timing import Contender, medians

if TYPE_CHECKING:
    from mmrender.renderer import Renderer

Messages = list[dict[str, Any]]
_WORDS = files("mmrender.testing").joinpath("data", "corpus.txt").read_text("utf-8").split()
_TURNS = 16
_CODEC_BYTES = 32 << 20


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What is measured.
        seconds: Median of single calls, wall clock.
        copy_seconds: The same of copying the bytes of the result, the least that making them can take; None
            where the result is no array.
    """

    name: str
    seconds: float
    copy_seconds: float | None = None


def conversation(turns: int, seed: int, *, system: bool) -> Messages:
    """Return a conversation of words that ends with the user's turn; all have the same system prompt."""
    source = random.Random(seed)
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": " ".join(random.Random(0).choices(_WORDS, k=600))})
    for turn in range(turns):
        messages.append({"role": "user", "content": " ".join(source.choices(_WORDS, k=75))})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": " ".join(source.choices(_WORDS, k=200))})
    return messages


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return noise over a gradient: neither constant, which flatters caches, nor unlike a photograph."""
    rng = np.random.default_rng((width, height, seed))
    ramp = np.linspace(0, 200, height * width * 3, dtype=np.float32).reshape(height, width, 3)
    noise = rng.integers(0, 56, ramp.shape, dtype=np.uint8)
    return Image.fromarray(ramp.astype(np.uint8) + noise)


_seeds = itertools.count(1)


def fresh(make: Callable[[int], Any], call: Callable[[Any], object]) -> Contender:
    """Return a timed call whose argument is made before each, from a number that no other had."""
    made: Any = None

    def prepare() -> None:
        nonlocal made
        made = make(next(_seeds))

    return Contender(lambda: call(made), prepare)


def measure(renderer: "Renderer", *, rounds: int = 5) -> Iterator[Figure]:
    """Yield the figures as they are measured: text, images where the model takes some, a bridge, the codec.

    Args:
        renderer: Whose model is rendered.
        rounds: Turns of each measurement.
    """
    renderer.tokenizer.choice.settle()
    yield from _text(renderer, rounds)
    if renderer.media is not None:
        yield from _images(renderer, rounds)
    yield from _bridge(renderer, rounds)
    yield from _codec(rounds)


def _seconds(contender: Contender, rounds: int) -> float:
    return medians({"it": contender}, rounds=rounds)["it"]


def _beside_copy(contender: Contender, nbytes: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of a call, and of a copy between warm buffers that takes turns with it."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    copy = Contender(lambda: np.copyto(target, source))
    found = medians({"it": contender, "copy": copy}, rounds=rounds)
    return found["it"], found["copy"]


def _text(renderer: "Renderer", rounds: int) -> Iterator[Figure]:
    def render(messages: Messages) -> object:
        return renderer.render(messages, add_generation_prompt=True)

    known = conversation(_TURNS, 0, system=False)
    tokens = f"{len(renderer.render(known, add_generation_prompt=True)):,} tokens"
    unseen = fresh(lambda seed: conversation(_TURNS, seed, system=False), render)
    yield Figure(f"text, {_TURNS} turns, {tokens}", _seconds(unseen, rounds))
    yield Figure("the same, seen before", _seconds(Contender(lambda: render(known)), rounds))


def _images(renderer: "Renderer", rounds: int) -> Iterator[Figure]:
    pixels = np.asarray(make_image(1024, 1024))

    def asked(seed: int) -> Messages:
        mine = pixels.copy()
        mine[0, 0] = (seed & 255, seed >> 8 & 255, seed >> 16 & 255)
        picture = {"type": "image", "image": Image.fromarray(mine)}
        return [{"role": "user", "content": [picture, {"type": "text", "text": "Which animal is this?"}]}]

    def floats(messages: Messages) -> object:
        (item,) = renderer.render(messages).multi_modal_data.mm_items["image"]
        return item.tensors("float32")

    known = asked(0)
    data = renderer.render(known).multi_modal_data
    (item,), (span,) = data.mm_items["image"], data.mm_placeholders["image"]
    sizes = [sum(tensor.nbytes for tensor in item.tensors("float32").values()), item.nbytes]
    as_floats = _beside_copy(fresh(asked, floats), sizes[0], rounds)
    as_levels = _beside_copy(fresh(asked, renderer.render), sizes[1], rounds)
    yield Figure(f"one image of 1024\u00b2, {span.length:,} tokens, float32", *as_floats)
    yield Figure("the same, kept as levels", *as_levels)
    yield Figure("the same, seen before", _seconds(Contender(lambda: renderer.render(known)), rounds))


def _bridge(renderer: "Renderer", rounds: int) -> Iterator[Figure]:
    prompt = renderer.render(conversation(_TURNS, 0, system=False), add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode("A cow."), *renderer.get_stop_token_ids()[:1]]

    def bridge(message: dict[str, Any]) -> object:
        return renderer.bridge_to_next_turn(prompt.token_ids, completion, [message])

    if bridge({"role": "user", "content": "And which says meow?"}) is None:
        return
    unseen = fresh(lambda seed: {"role": "user", "content": f"{seed}: and which says meow?"}, bridge)
    yield Figure(f"bridge of a user's turn, after {_TURNS} turns", _seconds(unseen, rounds))


def _codec(rounds: int) -> Iterator[Figure]:
    value = {"pixels": np.ones(_CODEC_BYTES // 4, np.float32), "tokens": list(range(1000))}
    pool = mmcodecs.BufferPool()
    name = f"codec, {_CODEC_BYTES >> 20} MiB"
    encode = Contender(lambda: mmcodecs.encode(value, buffer=pool))
    yield Figure(f"{name} as one buffer of a pool", *_beside_copy(encode, _CODEC_BYTES, rounds))
    frames = mmcodecs.encode_frames(value)
    yield Figure(f"{name} as frames", _seconds(Contender(lambda: mmcodecs.encode_frames(value)), rounds))
    yield Figure(f"{name}, decoded", _seconds(Contender(lambda: mmcodecs.decode(frames)), rounds))
