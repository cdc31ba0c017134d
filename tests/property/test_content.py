"""Laws of normalisation: every spelling of a message means the same, and junk is refused by name."""

import copy
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mmrender.content.messages import normalize_messages, to_openai
from mmrender.content.parts import PART_TYPES, attach_media
from mmrender.content.tools import normalize_tools, parse_arguments
from mmrender.errors import MessageError
from mmrender.messages import ROLES, ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart

# --- canonical messages ------------------------------------------------------------------------------------

TEXT = st.text(max_size=8)
SOURCES = st.sampled_from(["https://host/a.png", "data:image/png;base64,iVBO", b"\x89PNG", None])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.one_of(
    st.builds(TextPart, TEXT),
    st.builds(ImagePart, SOURCES),
    st.builds(VideoPart, SOURCES, st.none() | st.floats(0.1, 60)),
    st.builds(ThinkingPart, TEXT),
)
IDS = st.none() | st.text("abc", max_size=3)
CALLS = st.builds(ToolCall, TEXT.filter(bool), st.dictionaries(TEXT, JSON, max_size=3), IDS)
CONTENTS = st.none() | TEXT | st.lists(PARTS, max_size=4).map(tuple)


@st.composite
def canonical_messages(draw, contents=CONTENTS):
    role = draw(st.sampled_from(ROLES))
    assistant = role == "assistant"
    return Message(
        role=role,
        content=draw(contents),
        reasoning_content=draw(st.none() | TEXT) if assistant else None,
        tool_calls=tuple(draw(st.lists(CALLS, max_size=2))) if assistant else (),
        name=draw(st.none() | TEXT),
        tool_call_id=draw(st.none() | TEXT) if role == "tool" else None,
        extra=draw(
            st.dictionaries(st.sampled_from(["weight", "meta"]), JSON.filter(lambda v: v is not None))
        ),
    )


# --- the ways to spell them --------------------------------------------------------------------------------

FILLER = dict.fromkeys(["text", "image", "image_url", "video", "video_url", "thinking", "fps", "index"])


def spell_media(modality, source):
    spellings = [{"type": modality, modality: source}]
    if source is None:
        return [*spellings, {"type": modality}]
    spellings += [{modality: source}, {"type": modality, modality: {"bytes": source, "path": "a.png"}}]
    if isinstance(source, bytes):
        spellings += [{"type": modality, "bytes": bytearray(source)}, {modality: bytearray(source)}]
    if isinstance(source, str) and source.startswith("data:"):
        media_type, _, data = source.removeprefix("data:").partition(";base64,")
        spellings += [
            {"type": modality, "base64": source},
            {"type": modality, "data": data, "mimeType": media_type},
            {"type": modality, "base64": data.encode(), "mime_type": media_type},
            {"type": modality, "source": {"type": "base64", "media_type": media_type, "data": data}},
        ]
    if isinstance(source, str):
        spellings += [
            {"type": f"{modality}_url", f"{modality}_url": {"url": source, "detail": "low"}},
            {"type": f"{modality}_url", f"{modality}_url": source, "uuid": "1"},
            {"type": modality, modality: {"bytes": None, "path": source}},
            {"type": f"input_{modality}", f"{modality}_url": source},
            {"type": modality, "url": source},
            {"type": modality, "source": {"type": "url", "url": source}},
        ]
    return spellings


@st.composite
def spelled_part(draw, part):
    match part:
        case TextPart(text=text):
            kinds = ("text", "input_text", "output_text", None)
            choices = [text, {"text": text}, {"type": "refusal", "refusal": text}]
            choices += [{"type": kind, "text": text, "cache_control": {}} for kind in kinds]
        case ThinkingPart(thinking=text):
            choices = [{"type": "thinking", "thinking": text, "signature": "x"}, {"thinking": text}]
            choices += [{"type": kind, "text": text} for kind in ("reasoning", "reasoning_text")]
        case ImagePart(source=source):
            choices = spell_media("image", source)
        case VideoPart(source=source, fps=fps):
            choices = [{**media, "fps": fps} for media in spell_media("video", source)]
    spelled = draw(st.sampled_from(choices))
    if isinstance(spelled, dict) and draw(st.booleans()):
        spelled = {**FILLER, **spelled}
    return draw(st.sampled_from([spelled, part]))


@st.composite
def spelled_call(draw, call):
    arguments = draw(
        st.sampled_from([call.arguments, json.dumps(call.arguments), json.dumps(call.arguments, indent=1)])
    )
    bare = {"name": call.name, "arguments": arguments}
    choices = [bare, {"type": "function", "function": bare}, {"function": bare, "name": None, "index": 0}]
    return {"id": call.id, **draw(st.sampled_from(choices))}


def as_dumpable(fields):
    return SimpleNamespace(model_dump=lambda: fields)


def as_dataclass(fields):
    cls = dataclasses.make_dataclass("Row", [(key, Any) for key in fields])
    return cls(**fields)


@st.composite
def spelled_message(draw, message):
    fields = {"role": message.role, "content": message.content, **copy.deepcopy(message.extra)}
    if isinstance(message.content, tuple):
        fields["content"] = [draw(spelled_part(part)) for part in message.content]
    reasoning_key = draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))
    fields[reasoning_key] = message.reasoning_content
    fields["tool_calls"] = [draw(spelled_call(call)) for call in message.tool_calls]
    fields["name"], fields["tool_call_id"] = message.name, message.tool_call_id
    if draw(st.booleans()):
        fields = {key: value for key, value in fields.items() if value is not None}
    return fields


@given(st.data())
@settings(max_examples=45)
def test_every_spelling_of_a_conversation_means_the_same(data):
    messages = tuple(data.draw(st.lists(canonical_messages(), min_size=1, max_size=4)))
    spelled = [data.draw(spelled_message(message)) for message in messages]
    before = copy.deepcopy(spelled)
    wraps = [data.draw(st.sampled_from([dict, as_dumpable, as_dataclass])) for _ in spelled]
    assert normalize_messages([wrap(fields) for wrap, fields in zip(wraps, spelled, strict=True)]) == messages
    assert spelled == before


@given(st.lists(canonical_messages(), min_size=1, max_size=4).map(tuple))
@settings(max_examples=40)
def test_openai_dicts_read_back_as_the_same_messages(messages):
    written = [to_openai(message) for message in messages]
    before = copy.deepcopy(written)
    assert normalize_messages(written) == messages
    assert written == before
    assert normalize_messages(messages) == messages
    assert [to_openai(message) for message in normalize_messages(written)] == written


# --- Arrow -------------------------------------------------------------------------------------------------


def unify(values):
    """Do to a column what Arrow does: every struct gains the keys of all, filled with None."""
    structs = [value for value in values if isinstance(value, dict)]
    keys = list(dict.fromkeys(key for struct in structs for key in struct))
    columns = {key: unify([struct.get(key) for struct in structs]) for key in keys}
    rows = iter([{key: columns[key][row] for key in keys} for row in range(len(structs))])
    lists = [value for value in values if isinstance(value, list)]
    items = iter(unify([item for value in lists for item in value]) if lists else [])
    return [
        next(rows)
        if isinstance(value, dict)
        else [next(items) for _ in value]
        if isinstance(value, list)
        else value
        for value in values
    ]


ARROW_PARTS = st.one_of(
    st.builds(TextPart, TEXT),
    st.builds(ImagePart, st.sampled_from(["https://host/a.png", None])),
    st.builds(VideoPart, st.sampled_from(["https://host/a.mp4", None]), st.none() | st.floats(0.5, 60)),
    st.builds(ThinkingPart, TEXT),
)


ARROW_CONVERSATIONS = st.lists(
    # A column has one type: no free-form extra values.
    canonical_messages(st.none() | st.lists(ARROW_PARTS, max_size=4).map(tuple)).map(
        lambda message: replace(message, extra={})
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@given(ARROW_CONVERSATIONS)
@settings(max_examples=40)
def test_columns_filled_with_none_mean_the_same(messages):
    assert normalize_messages(unify([to_openai(message) for message in messages])) == messages


@given(ARROW_CONVERSATIONS)
@settings(max_examples=50)
def test_arrow_round_trips_mean_the_same(messages):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"messages": [[to_openai(message) for message in messages]]})
    (row,) = table.to_pylist()
    assert normalize_messages(row["messages"]) == messages


# --- junk --------------------------------------------------------------------------------------------------

WILD_TEXT = st.text(st.characters(), max_size=4)
KEYS = WILD_TEXT | st.sampled_from(
    ["role", "content", "type", "text", "refusal", "image", "image_url", "video", "video_url", "url", "path",
     "base64", "data", "bytes", "source", "media_type", "fps", "thinking", "reasoning", "reasoning_content",
     "tool_calls", "function_call", "function", "name", "arguments", "id", "tool_call_id", "index", "parameters",
     "min_pixels", "images", "audio", "extra"]
)  # fmt: skip
WORDS = st.sampled_from(
    [*ROLES, "function", *PART_TYPES, "input_audio", "{}", '{"a": 1}', "[1]", "data:,x", ""]
)
NUMBERS = st.integers() | st.just(1 << 5000) | st.floats()
WILD_SCALARS = st.none() | st.booleans() | NUMBERS | WILD_TEXT | WORDS | st.binary(max_size=2)
JUNK = st.recursive(
    WILD_SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS | st.integers(), inner, max_size=4)
        | st.tuples(inner)
    ),
    max_leaves=12,
)
WILD_SOURCES = SOURCES | JUNK
NEARLY_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(PART_TYPES)},
    optional={
        "text": TEXT | JUNK, "image": WILD_SOURCES, "image_url": WILD_SOURCES, "source": JUNK, "video": JUNK
    },
)  # fmt: skip
NEARLY_CALL = st.fixed_dictionaries(
    {"name": TEXT | WORDS}, optional={"arguments": WORDS | JUNK, "id": TEXT | JUNK, "function": JUNK}
)
NEARLY = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES)},
    optional={
        "content": st.one_of(TEXT, st.lists(PARTS.flatmap(spelled_part) | NEARLY_PART, max_size=3), JUNK),
        "tool_calls": st.none() | st.lists(NEARLY_CALL, max_size=2) | JUNK,
        "reasoning": TEXT | JUNK,
        "name": TEXT | JUNK,
        "note": JUNK,
    },
)


def check_named(error, place):
    assert error.where
    assert error.where.startswith(place)
    assert len(str(error)) < 2000


@given(st.one_of(JUNK, st.lists(NEARLY, min_size=1, max_size=2), st.lists(NEARLY | JUNK, max_size=3)))
@settings(max_examples=90)
def test_junk_is_normalised_or_refused_by_name_and_never_changed(junk):
    before = repr(copy.deepcopy(junk))
    try:
        messages = normalize_messages(junk)
    except MessageError as error:
        check_named(error, "messages")
    else:
        assert normalize_messages(messages) == messages
        assert repr(normalize_messages([to_openai(message) for message in messages])) == repr(messages)
    assert repr(junk) == before


@given(JUNK)
@settings(max_examples=60)
def test_junk_beside_the_messages_is_refused_by_name(junk):
    message = Message(role="user", content=(ImagePart(None),))
    attempts = {
        "tools": lambda: normalize_tools(junk),
        "": lambda: attach_media([message], images=junk),
        "arguments": lambda: parse_arguments(junk, "arguments"),
    }
    for place, attempt in attempts.items():
        try:
            attempt()
        except MessageError as error:
            check_named(error, place)


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_arguments_are_read_as_json_reads_them(arguments):
    text = json.dumps(arguments)
    for spelling in (text, json.dumps(arguments, ensure_ascii=False), arguments):
        result = parse_arguments(spelling, "a")
        # Compared as text: 1, 1.0 and True are equal to Python, not to a template that prints them.
        assert json.dumps(result) == text
