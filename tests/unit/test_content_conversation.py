import copy
import dataclasses
import enum
import pathlib
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest

from kit import error_of, raised
from mmrender.content import normalize_messages
from mmrender.content.messages import to_openai
from mmrender.errors import MessageError
from mmrender.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart


def one(message: Any) -> Message:
    (result,) = normalize_messages([message])
    return result


@pytest.mark.parametrize(
    ("content", "expected"), [("", ""), (None, None), ([], ()), ("a\n ", "a\n "), (["a"], (TextPart("a"),))]
)
def test_content_keeps_its_shape(content, expected):
    assert one({"role": "user", "content": content}).content == expected
    canonical = Message(role="user", content=expected)
    assert one(canonical) is canonical


@pytest.mark.parametrize(
    ("content", "text", "reasoning"),
    [
        (None, "", "r"),
        ("a\n ", "a\n ", "r"),
        ((), "", "r"),
        (
            (TextPart("a"), ThinkingPart("s"), ImagePart(None), TextPart(" b"), ThinkingPart("t")),
            "a b",
            "rst",
        ),
    ],
)
def test_text_and_reasoning_are_read_off_any_shape_of_content(content, text, reasoning):
    message = Message(role="assistant", content=content, reasoning_content="r")
    assert (message.text, message.reasoning, message.has_text) == (text, reasoning, bool(text))
    assert Message(role="user", content=" \n").has_text is False


class Role(str, enum.Enum):  # noqa: UP042 - the spelling of pydantic models generated before 3.11
    USER = "user"


def test_text_subclasses_and_numbers_become_plain_text():
    message = one({"role": Role.USER, "content": np.str_("hi"), "reasoning_content": np.str_("r")})
    assert (type(message.role), type(message.content), type(message.reasoning_content)) == (str, str, str)
    assert message == Message(role="user", content="hi", reasoning_content="r")
    message = one({"role": "tool", "content": "x", "name": "f", "tool_call_id": 7})
    assert (message.name, message.tool_call_id) == ("f", "7")
    assert one({"role": "tool", "tool_call_id": ""}).tool_call_id == ""
    legacy = one({"role": "function", "name": "add", "content": "3"})
    assert legacy == Message(role="tool", name="add", content="3")


class PydanticFunction(pydantic.BaseModel):
    name: str
    arguments: str


class PydanticCall(pydantic.BaseModel):
    id: str
    function: PydanticFunction
    type: str = "function"


class PydanticMessage(pydantic.BaseModel):
    """The fields of the OpenAI client's response message."""

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[PydanticCall] | None = None


def test_pydantic_response_objects():
    call = PydanticCall(id="c1", function=PydanticFunction(name="add", arguments='{"a": 1}'))
    expected = Message(role="assistant", tool_calls=(ToolCall("add", {"a": 1}, id="c1"),))
    assert one(PydanticMessage(role="assistant", tool_calls=[call], annotations=[])) == expected
    assert one({"role": "assistant", "content": None, "tool_calls": [call]}) == expected
    assert one(PydanticMessage(role="assistant", content="x")) == Message(role="assistant", content="x")


@dataclasses.dataclass
class DataclassMessage:
    role: str
    content: Any
    name: str | None = None


class StructPart(msgspec.Struct, tag_field="type", tag="text"):
    body: str = msgspec.field(name="text")
    note: str | msgspec.UnsetType = msgspec.UNSET


class StructMessage(msgspec.Struct):
    role: str
    content: list[StructPart]


@pytest.mark.parametrize(
    "message",
    [
        DataclassMessage("user", [{"type": "text", "text": "a"}]),
        StructMessage("user", [StructPart("a")]),
        UserDict({"role": "user", "content": (UserDict({"type": "text", "text": "a"}),)}),
    ],
)
def test_other_records(message):
    assert one(message) == Message(role="user", content=(TextPart("a"),))


def test_object_arrays_that_pandas_makes_of_nested_columns():
    parts = np.empty(2, dtype=object)
    parts[:] = [{"type": "text", "text": "a", "image": None}, {"type": "image", "text": None, "image": None}]
    messages = np.empty(1, dtype=object)
    messages[0] = {"role": "user", "content": parts, "tool_calls": np.empty(0, dtype=object)}
    assert normalize_messages(messages) == (Message(role="user", content=(TextPart("a"), ImagePart(None))),)


def test_none_is_absent_and_empty_api_fields_are_dropped():
    fields = dict.fromkeys(("name", "tool_calls", "tool_call_id", "refusal", "function_call", "weight"))
    empty = {"annotations": [], "audio": {}, "parsed": "", "images": []}
    assert one({"role": "assistant", "content": "x", **fields, **empty}) == Message(
        role="assistant", content="x"
    )


def test_other_keys_go_to_extra_unchanged_but_not_shared():
    marker = object()
    source = {"role": "user", "content": "x", "refusal": "no", "tool_responses": [{"a": [1, (2, marker)]}]}
    before = copy.copy(source)
    message = one(source)
    assert message.extra == {"refusal": "no", "tool_responses": [{"a": [1, (2, marker)]}]}
    source["tool_responses"][0]["a"].append(3)
    assert message.extra["tool_responses"] == [{"a": [1, (2, marker)]}]
    assert source == before


@pytest.mark.parametrize(
    ("given", "reasoning", "extra"),
    [
        ({"reasoning": "a", "reasoning_content": None}, "a", {}),
        ({"reasoning": "a", "thinking": "a"}, "a", {}),
        ({"reasoning": "a", "thinking": "b"}, "b", {"reasoning": "a"}),
        ({"thinking": "a", "reasoning_content": ""}, "", {"thinking": "a"}),
        ({"reasoning_content": ""}, "", {}),
    ],
)
def test_reasoning_names_win_in_the_order_of_transformers(given, reasoning, extra):
    message = one({"role": "assistant", "content": "x", **given})
    assert (message.reasoning_content, message.extra) == (reasoning, extra)


def test_reasoning_order_is_that_of_the_installed_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    fields = {"reasoning": "1", "thinking": "2", "reasoning_content": "3"}
    while fields:
        (reference,) = utils._alias_reasoning_fields([{"role": "assistant", **fields}])
        assert one({"role": "assistant", **fields}).reasoning_content == reference["reasoning_content"]
        fields.popitem()


HI = {"role": "user", "content": "hi"}


LOOP: dict[str, Any] = {}
LOOP["self"] = [LOOP]


class Broken:
    def model_dump(self):
        raise RuntimeError("no such field")

    def __repr__(self):
        raise AssertionError


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", **fields}]


ERRORS = {
    "empty": [],
    "text": "hi",
    "one message": HI,
    "two lists": [[HI]],
    "unknown role": [HI, {"role": "assistnat", "content": "x"}],
    "no role": [{"from": "human", "value": "x"}],
    "a number": [{**HI, "content": 3}],
    "a surrogate": [{**HI, "content": "a\ud800"}],
    "a user's call": [{**HI, "tool_calls": [{"name": "f"}]}],
    "two kinds of calls": assistant(tool_calls=[{"name": "f"}], function_call={"name": "f"}),
    "calls in a dict": assistant(tool_calls={"name": "f"}),
    "reasoning": assistant(reasoning={"effort": "low"}),
    "an id": [{"role": "tool", "tool_call_id": True}],
    "misplaced images": [{**HI, "images": ["a.png"]}],
    "a key that is a number": [{**HI, 1: 2}],
    "a container that holds itself": [{**HI, "meta": LOOP}],
    "a broken model": [Broken()],
    "an odd model": [SimpleNamespace(model_dump=lambda: "text")],
    "a broken role": [{"role": Broken()}],
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, sentence):
    assert error_of(MessageError, normalize_messages, ERRORS[case]) == sentence


def test_where_names_the_conversation():
    caught = raised(MessageError, normalize_messages, [HI, {"role": "x"}], where="new_messages")
    assert caught.where == "new_messages[1].role"


def test_openai_dicts_hold_every_field():
    path = pathlib.Path("a.png")
    message = Message(
        role="assistant",
        content=(
            TextPart("t"),
            ImagePart("https://host/a.png"),
            ImagePart(path),
            ImagePart(None),
            VideoPart("https://host/a.mp4", fps=2.0),
            VideoPart(("1.png", b"2")),
            ThinkingPart("h"),
        ),
        reasoning_content="r",
        tool_calls=(ToolCall("f", {"city": "Zürich", "n": None}, id="c1"), ToolCall("g", {})),
        name="n",
        tool_call_id="i",
        extra={"weight": 1, "meta": {"a": [1]}},
    )
    written = to_openai(message)
    assert written == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "t"},
            {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
            {"type": "image", "image": path},
            {"type": "image"},
            {"type": "video_url", "video_url": {"url": "https://host/a.mp4"}, "fps": 2.0},
            {"type": "video", "video": ("1.png", b"2")},
            {"type": "thinking", "thinking": "h"},
        ],
        "reasoning_content": "r",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "f", "arguments": '{"city": "Zürich", "n": null}'},
            },
            {"type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
        "name": "n",
        "tool_call_id": "i",
        "weight": 1,
        "meta": {"a": [1]},
    }
    assert normalize_messages([written]) == (message,)


@pytest.mark.parametrize(("content", "written"), [(None, None), ("", ""), ((), [])])
def test_fields_that_are_not_set_are_left_out(content, written):
    assert to_openai(Message(role="user", content=content)) == {"role": "user", "content": written}


def test_media_yields_images_and_videos_with_their_place_in_content():
    image, video = ImagePart("a.png"), VideoPart("b.mp4", fps=2.0)
    message = Message(role="user", content=(TextPart("x"), image, ThinkingPart("y"), video))
    assert list(message.media()) == [(1, image), (3, video)]
    assert all(not list(Message(role="user", content=content).media()) for content in (None, "text", ()))


def test_extra_of_one_message_is_not_shared_with_another():
    first, second = Message(role="user"), Message(role="user")
    assert first.extra == {}
    first.extra["key"] = 1
    assert second.extra == {}
