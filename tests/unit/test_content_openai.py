import json
import pathlib

from mmrender.content import normalize_messages
from mmrender.content.messages import to_openai
from mmrender.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart


def test_every_field():
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


def test_fields_that_are_not_set_are_left_out():
    assert to_openai(Message(role="user")) == {"role": "user", "content": None}
    assert to_openai(Message(role="user", content="")) == {"role": "user", "content": ""}
    assert to_openai(Message(role="user", content=())) == {"role": "user", "content": []}


def test_text_sources_give_json():
    (message,) = normalize_messages([{"role": "user", "content": [{"type": "image", "base64": "iVBO"}, "x"]}])
    assert normalize_messages([json.loads(json.dumps(to_openai(message)))]) == (message,)
