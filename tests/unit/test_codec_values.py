"""Which values the codec keeps, which it refuses and in which words, and how typed objects are filled
again."""

import datetime as dt
import enum
import sys
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pydantic
import pytest
import torch

import mmcodecs
from codec_values import identical


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
    at: dt.datetime
    colour: Colour
    box: Box | None = None
    seen: set[int] = field(default_factory=set)


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
    None, True, False, 0, -1, 2**63 - 1, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**300, 0.0, -0.0,
    float("inf"), float("nan"), "", "é\U0001f600", b"", b"x" * 5000, bytearray(b"ab"), memoryview(b"ab"), 1j,
    (), (1, (2,)), [], {}, set(), frozenset({1, "a"}), {1: "a", None: 2, (1, 2): 3, b"k": 4, 2.5: 0},
    dt.datetime(2026, 1, 2, 3, 4, 5, 6), dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    dt.datetime(2026, 10, 25, 2, 30, fold=1), dt.date(2026, 1, 2), dt.time(1, 2, fold=1),
    dt.timedelta(days=-1, microseconds=1), uuid.UUID(int=5), Decimal("1.50"), Decimal("-0"),
    Decimal("Infinity"),
    Path("/a/b"), Path("odd\udcff"), [1] * 15 + [None], [1.5] * 100, ["a"] * 100, [2**70] * 20, [True] * 20,
    ["z" * 5000] * 20, [1.5] * 20 + [Decimal("2")], [1] * 20 + [dt.date(2026, 1, 1)], [True] * 20 + [1],
    np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2026-01-01T00", "h"), np.complex64(1j),
    np.str_("ab"), np.bytes_(b"ab"),
]  # fmt: skip


def label(value: Any) -> str:
    """Name a case alike in every test process: a default `repr` shows an address, and sets have no order."""
    return type(value).__name__ if isinstance(value, memoryview | set | frozenset) else repr(value)[:40]


@pytest.mark.parametrize("value", KEPT, ids=label)
def test_kept_as_it_is(value: Any) -> None:
    assert identical(value, back(value))
    assert identical([value, {"k": value}], back([value, {"k": value}]))


REFUSED: list[tuple[Any, str]] = [
    ({"a": [1, object()]}, "$.a[1]: builtins.object has no form on the wire. "
     "Give a dataclass, a msgspec Struct, or plain containers"),
    ([np.array([object()])], "$[0]: dtype object has no form on the wire. "
     "Give the objects as a list, or give the array a numeric dtype"),
    ({"m": np.ma.array([1])}, "$.m: MaskedArray is a subclass of numpy.ndarray, and what it adds would be "
     "lost. Give numpy.asarray(value), and what it adds beside it"),
    (np.zeros(2, [("a", "i4")]), "$: dtype [('a', '<i4')] has no form on the wire. "
     "Give a structured array as a dict of its fields; view opaque items as uint8"),
    (np.zeros(2, np.longdouble), f"$: dtype {np.dtype(np.longdouble)} differs from platform to platform. "
     "Convert it to float64 or complex128"),
    (np.array(["a"], np.dtypes.StringDType()), "$: dtype StringDType() has no form on the wire. "
     "Convert it with .astype('U')"),
    ({"s": ("ok", "\ud800")}, "$.s[1]: a lone surrogate is no text - got '\\ud800'. Give the bytes"),
    ({"\udfff": 1}, "$.\udfff: a lone surrogate is no text - got '\\udfff'. Give the bytes"),
    ([0] * 20 + [Number(1)], "$[20]: test_codec_values.Number is a subclass of int, and what it adds would "
     "be lost. Give int(value)"),
    (Text("x"), "$: test_codec_values.Text is a subclass of str, and what it adds would be lost. "
     "Give str(value)"),
    (OrderedDict(a=1), "$: collections.OrderedDict is a subclass of dict, and what it adds would be lost. "
     "Give dict(value)"),
    ([1.0] * 20 + [Fraction(1, 2)], "$[20]: fractions.Fraction has no form on the wire. "
     "Give a dataclass, a msgspec Struct, or plain containers"),
    ({3: {"x": range(3)}}, "$[3].x: builtins.range has no form on the wire. "
     "Give a dataclass, a msgspec Struct, or plain containers"),
    (memoryview(np.zeros(4, "f4")), "$: a memoryview of other than contiguous bytes. Cast it to 'B'"),
    (torch.zeros(2).to_sparse(), "$: a torch.sparse_coo tensor has no plain memory. "
     "Give its parts as dense tensors"),
    (torch.zeros(2, device="meta"), "$: a meta tensor has no plain memory. Give its parts as dense tensors"),
    (dt.time(1, tzinfo=ZoneInfo("Europe/Berlin")), "$: the zone of this time depends on a date. "
     "Give a datetime"),
    (mmcodecs.Shared([1], b"k"), "$: only an array can be Shared - got list"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[text[:30] for _, text in REFUSED])
def test_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(mmcodecs.UnsupportedTypeError) as caught:
        mmcodecs.encode(value)
    assert str(caught.value).replace("tests.unit.", "") == message


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(mmcodecs.LimitError, match="max_depth is passed, or the value holds itself"):
        mmcodecs.encode(loop)


def test_depth_counts_every_container() -> None:
    value: Any = 1
    for _ in range(21):
        value = [({frozenset(): value},)]
    assert back(value) == value
    with pytest.raises(mmcodecs.LimitError):
        mmcodecs.encode([value])


def test_typed_objects_travel_in_neutral_form_and_are_filled_on_request() -> None:
    step = Step([1, 2], dt.datetime(2026, 1, 1), Colour.RED, Box(np.arange(100.0)), {1})
    neutral = back(step)
    assert neutral["colour"] == "red"
    assert neutral["box"]["level"] == 3
    got = back(step, type=Step)
    assert (got.tokens, got.at, got.colour, got.seen) == (step.tokens, step.at, Colour.RED, {1})
    assert got.box.level is Level.HIGH
    assert np.array_equal(got.box.pixels, step.box.pixels)


def test_structs_with_tags_renames_and_array_form() -> None:
    assert back(Tagged((1, 2))) == {"kind": "t", "gridSize": (1, 2)}
    assert back(Tagged((1, 2)), type=Tagged) == Tagged((1, 2))
    assert back(Row("a", 1.5)) == ["a", 1.5]
    assert back([Row("a", 1.5)], type=list[Row]) == [Row("a", 1.5)]


def test_named_tuples_and_pydantic_models() -> None:
    assert back(Point(1, 2)) == (1, 2)
    assert back(Point(1, 2), type=Point) == Point(1, 2)
    model = Model(pixels=np.arange(3), promptText="hi", more=1)
    got = back({"m": model}, type=dict[str, Model])["m"]
    assert (got.prompt, got.more, got.pixels.tolist()) == ("hi", 1, [0, 1, 2])
    assert back(pydantic.RootModel[list[int]]([1])) == [1]
    Anonymous = namedtuple("Anonymous", "a")
    assert back(Anonymous(1)) == (1,)


def test_int_enums_in_long_lists_are_their_values() -> None:
    assert back([1] * 20 + [Level.HIGH]) == [1] * 20 + [3]


def test_objects_that_add_up_to_a_float_do_not_pass_for_one() -> None:
    assert back([1.0] * 20 + [Counts(2.0)]) == [1.0] * 20 + [{"value": 2.0}]


def test_a_message_that_does_not_fit_the_type_says_where() -> None:
    with pytest.raises(mmcodecs.ConversionError) as caught:
        back({"tokens": ["x"], "at": dt.datetime(2026, 1, 1), "colour": "red"}, type=Step)
    assert str(caught.value) == "$.tokens[0]: Expected `int`, got `str`"
    for value, wanted in (
        ({"pixels": np.zeros(1)}, Model),
        (np.zeros(3), dict[str, int]),
        (np.zeros(3), Box),
    ):
        with pytest.raises(mmcodecs.ConversionError):
            back(value, type=wanted)


def test_user_dicts_cannot_be_mistaken_for_records() -> None:
    for value in (
        {"__torch_tensor__": True, "dtype": "float32", "shape": [1], "data": b"1234"},
        {"$array": [1]},
        [1, [0, 0, 0, 0], b"\x01" * 24],
    ):
        assert back(value) == value


def test_parameters_are_detached_and_lazy_views_resolved() -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    conjugate = torch.full((100,), 1 + 2j).conj()
    got = back({"w": weight, "c": conjugate, "n": conjugate.imag}, framework="source")
    assert type(got["w"]) is torch.Tensor
    assert not got["w"].requires_grad
    assert torch.equal(got["c"], conjugate.resolve_conj())
    assert torch.equal(got["n"], torch.full((100,), -2.0))


def test_texts_and_bytes_that_stand_twice_are_written_once() -> None:
    blob = b"x" * 100_000
    assert len(mmcodecs.encode([blob, blob])) < 101_000
    assert back([blob, {"b": blob}]) == [blob, {"b": blob}]


def test_limits_hold_for_the_writer() -> None:
    limits = mmcodecs.Limits(max_values=50, max_frames=2, max_head_bytes=1000, max_bytes=4000, max_ndim=2)
    for value, name in (
        ([{}] * 60, "max_values"),
        ([np.arange(100), np.arange(101), np.arange(102)], "max_frames"),
        (["abcdefgh"] * 200, "max_head_bytes"),
        (np.zeros(1000), "max_bytes"),
        (np.zeros((1, 1, 1)), "max_ndim"),
    ):
        with pytest.raises(mmcodecs.LimitError, match=f"Limits.{name} is passed"):
            mmcodecs.encode(value, limits=limits)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 255, 65_535, 65_536])
def test_what_the_writer_allows_the_reader_allows(count: int) -> None:
    for value in (
        [1.5] * count,
        [True] * count,
        list(range(count)),
        {str(n): 0.5 for n in range(count // 2)},
    ):
        assert back(value) == value


def test_importing_is_light() -> None:
    import subprocess

    heavy = ["torch", "mmrender", "xxhash", "blake3", "pydantic", "asyncio"]
    code = f"import sys, mmcodecs; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@dataclass(frozen=True)
class Position:
    x: int


KEYS: list[tuple[Any, str]] = [
    ({"a": {Position(1)}}, "$.a[Position(x=1)]: Position cannot be a key, or an element of a set, for the "
     "reader. Use strings, numbers, times or tuples of them"),
    ({(1, Position(2)): 0}, "$[(1, Position(x=2))]: Position cannot be a key, or an element of a set, for "
     "the reader. Use strings, numbers, times or tuples of them"),
    ([{Colour.RED: 1, "red": 2}], "$[0][red]: two keys or elements come back as the same"),
    ({Colour.RED, "red"}, "two keys or elements come back as the same"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), KEYS, ids=[message[:30] for _, message in KEYS])
def test_keys_that_the_reader_could_not_hold(value: Any, message: str) -> None:
    with pytest.raises(mmcodecs.EncodeError) as caught:
        mmcodecs.encode(value)
    assert str(caught.value).replace("'", "").endswith(message)


def test_keys_in_neutral_form_and_nan() -> None:
    assert back({Colour.RED: 1, 5: 2}) == {"red": 1, 5: 2}
    assert back({Colour.RED: 1}, type=dict[Colour, int]) == {Colour.RED: 1}
    assert back({Point(1, 2), frozenset({Level.HIGH})}) == {(1, 2), frozenset({3})}
    nans = {float("nan"), float("nan"), np.float32(2)}
    assert len(back(nans)) == 3
