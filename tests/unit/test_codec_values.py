"""Which values the codec keeps, which it refuses and in which words, and how typed objects are filled
again."""

import datetime as dt
import enum
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pydantic
import pytest
import torch

import mmcodecs
from codec_values import identical
from kit import error_of
from mmcodecs.errors import DecodeError


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Box(msgspec.Struct):
    pixels: np.ndarray
    level: Level = Level.HIGH


class Tagged(msgspec.Struct, tag="t", tag_field="kind", rename="camel"):
    grid_size: tuple[int, int]


class Row(msgspec.Struct, array_like=True):
    name: str
    score: float


@dataclass
class Step:
    tokens: list[int]
    colour: Colour
    box: Box | None = None


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow")
    pixels: np.ndarray
    prompt: str = pydantic.Field(alias="promptText")


class Point(NamedTuple):
    x: int
    y: int


class Text(str):
    __slots__ = ()


class Number(int):
    pass


@dataclass
class Counts:
    value: float

    def __radd__(self, other: float) -> float:
        return other + self.value


def back(value: Any, **options: Any) -> Any:
    return mmcodecs.decode(mmcodecs.encode(value), **options)


KEPT = [
    None, True, False, 0, -1, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.0, float("inf"), float("nan"), "",
    "é\U0001f600", b"", b"x" * 5000, bytearray(b"ab"), memoryview(b"ab"), (), (1, (2,)), [], {}, "y" * 5000,
    [1] * 15 + [None], [1.5] * 100, ["a"] * 100, [True] * 20, ["z" * 5000] * 20, [True] * 20 + [1],
    [1.5] * 20 + [b"x" * 5000], [1] * 70_000,
    {"__torch_tensor__": True, "dtype": "float32", "shape": [1], "data": b"1234"}, [1, [0, 0], b"\x01" * 24],
    np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.zeros((0, 3)),
]  # fmt: skip


def label(value: Any) -> str:
    """Name a case alike in every test process: a default `repr` shows an address."""
    return type(value).__name__ if isinstance(value, memoryview) else repr(value)[:40]


@pytest.mark.parametrize("value", KEPT, ids=label)
def test_kept_as_it_is(value: Any) -> None:
    assert identical(value, back(value))
    assert identical([value, {"k": (value,)}], back([value, {"k": (value,)}]))


REFUSED: dict[str, Any] = {
    "object": {"a": [1, object()]},
    "dtype object": [np.array([object()])],
    "masked array": {"m": np.ma.array([1])},
    "datetime64": np.array(["2026"], "M8[D]"),
    "lone surrogate": {"s": ("ok", "\ud800")},
    "surrogate as a key": {"\udfff": 1},
    "integer": [{"a": (2**64,)}],
    "negative integer": [0] * 20 + [-(2**63) - 1],
    "subclass of int": [0] * 20 + [Number(1)],
    "subclass of str": Text("x"),
    "subclass of dict": OrderedDict(a=1),
    "fraction": [1.0] * 20 + [Fraction(1, 2)],
    "key": {"d": {3: "x"}},
    "memoryview of floats": memoryview(np.zeros(4, "f4")),
    "sparse tensor": torch.zeros(2).to_sparse(),
    "meta tensor": torch.zeros(2, device="meta"),
    "shared list": mmcodecs.Shared([1], b"k"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_its_path(case: str, sentence: Any) -> None:
    problem = error_of(mmcodecs.UnsupportedTypeError, mmcodecs.encode, REFUSED[case])
    assert ascii(problem.replace("tests.unit.", "")) == sentence


@pytest.mark.parametrize(
    "value",
    [{1}, frozenset(), 1j, Decimal("1.5"), uuid.UUID(int=1), Path("/a"), dt.date(2026, 1, 2)],
    ids=repr,
)
def test_types_that_the_wire_lacks_are_refused_alone_and_in_long_lists(value: Any) -> None:
    for whole in (value, (value,), [1.5] * 20 + [value], [1] * 20 + [value], ["a"] * 20 + [value]):
        assert "has no form on the wire" in error_of(mmcodecs.UnsupportedTypeError, mmcodecs.encode, whole)


def test_depth_counts_every_container() -> None:
    value: Any = 1
    for _ in range(21):
        value = [({"k": value},)]
    assert back([value]) == [value]
    loop: list[Any] = []
    loop.append(loop)
    for deep in ([[value]], loop):
        with pytest.raises(mmcodecs.LimitError, match="max_depth exceeded, or the value holds itself"):
            mmcodecs.encode(deep)


def test_typed_objects_travel_in_neutral_form_and_are_filled_on_request() -> None:
    step = Step([1, 2], Colour.RED, Box(np.arange(100.0)))
    neutral = back(step)
    assert (neutral["colour"], neutral["box"]["level"]) == ("red", 3)
    got = back(step, type=Step)
    assert (got.tokens, got.colour, got.box.level) == (step.tokens, Colour.RED, Level.HIGH)
    assert np.array_equal(got.box.pixels, step.box.pixels)
    assert back(Tagged((1, 2))) == {"kind": "t", "gridSize": (1, 2)}
    assert back(Tagged((1, 2)), type=Tagged) == Tagged((1, 2))
    assert back(Row("a", 1.5)) == ["a", 1.5]
    assert back([Row("a", 1.5)], type=list[Row]) == [Row("a", 1.5)]
    assert back(Point(1, 2)) == (1, 2)
    assert back(Point(1, 2), type=Point) == Point(1, 2)
    model = Model(pixels=np.arange(3), promptText="hi", more=1)
    got = back({"m": model}, type=dict[str, Model])["m"]
    assert (got.prompt, got.more, got.pixels.tolist()) == ("hi", 1, [0, 1, 2])
    assert back(pydantic.RootModel[list[int]]([1])) == [1]


def test_objects_in_long_lists_do_not_pass_for_numbers() -> None:
    assert back([1] * 20 + [Level.HIGH]) == [1] * 20 + [3]
    assert back([1.0] * 20 + [Counts(2.0)]) == [1.0] * 20 + [{"value": 2.0}]


def test_a_message_that_does_not_fit_the_type_says_where() -> None:
    problem = error_of(DecodeError, back, {"tokens": ["x"], "colour": "red"}, type=Step)
    assert problem == "$.tokens[0]: Expected `int`, got `str`"
    for value, wanted in (
        ({"pixels": np.zeros(1)}, Model),
        (np.zeros(3), dict[str, int]),
        (np.zeros(3), Box),
    ):
        with pytest.raises(DecodeError):
            back(value, type=wanted)


def test_parameters_are_detached_and_lazy_views_resolved() -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    conjugate = torch.full((100,), 1 + 2j).conj()
    got = back({"w": weight, "c": conjugate, "n": conjugate.imag}, framework="torch")
    assert type(got["w"]) is torch.Tensor
    assert not got["w"].requires_grad
    assert torch.equal(got["c"], conjugate.resolve_conj())
    assert torch.equal(got["n"], torch.full((100,), -2.0))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_tensors_keep_their_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    empty = torch.empty(shape, dtype=dtype)
    for copy in (False, True):
        got = back([empty], framework="torch", copy=copy)[0]
        assert (got.shape, got.dtype, got.stride()) == (empty.shape, dtype, empty.stride())


def test_texts_and_bytes_that_occur_twice_are_written_once() -> None:
    blob, text = b"x" * 100_000, "é" * 50_000
    assert len(mmcodecs.encode([blob, blob, text, text])) < 202_000
    assert back([blob, {"b": blob}, text, text]) == [blob, {"b": blob}, text, text]


@pytest.mark.parametrize(
    "value", [[{}] * 65_535, [np.zeros(1)] * 16_383, [[1] * 20] * 65_535, [(1,)] * 65_535]
)
def test_what_the_writer_allows_the_reader_allows(value: Any) -> None:
    assert len(back(value)) == len(value)
    assert "Limits.max_values exceeded" in error_of(mmcodecs.LimitError, mmcodecs.encode, [*value, value[0]])
