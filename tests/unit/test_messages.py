import msgspec

from mmrender.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart


def test_media_yields_images_and_videos_with_their_place_in_content():
    image, video = ImagePart("a.png"), VideoPart("b.mp4", fps=2.0)
    message = Message(role="user", content=(TextPart("x"), image, ThinkingPart("y"), video))
    assert list(message.media()) == [(1, image), (3, video)]
    for content in (None, "text", ()):
        assert list(Message(role="user", content=content).media()) == []


def test_extra_of_one_message_is_not_shared_with_another():
    first, second = Message(role="user"), Message(role="user")
    assert first.extra == {}
    first.extra["key"] = 1
    assert second.extra == {}


def test_messages_survive_msgpack_where_their_sources_do():
    message = Message(
        role="assistant",
        content=(TextPart("a"), ImagePart("http://x/y.png"), VideoPart(None, fps=1.0), ThinkingPart("t")),
        reasoning_content="r",
        tool_calls=(ToolCall("f", {"a": [1, None]}, id="c1"),),
        name="n",
        tool_call_id="i",
        extra={"k": 1},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message
