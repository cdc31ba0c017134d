"""Generated conversations keep a template's limits without being told them, and lose no kind of content."""

import random

import pytest

from mmrender.testing.conversations import ConversationMaker, sample_images
from small_models import MODELS

PICTURES = sample_images(random.Random(2), 2, largest=40)


def calls_of(message):
    return message.get("tool_calls", ())


def has_image(message):
    return isinstance(message["content"], list) and any(
        part["type"] == "image" for part in message["content"]
    )


LIMITS = {
    "one call in a turn": lambda messages, options: all(len(calls_of(message)) < 2 for message in messages),
    "calls or content": lambda messages, options: (
        not any(calls_of(message) and message["content"] for message in messages)
    ),
    "no image beside a system prompt": lambda messages, options: (
        not (any(map(has_image, messages)) and messages[0]["role"] == "system")
    ),
    "no image beside tools": lambda messages, options: (
        not (any(map(has_image, messages)) and "tools" in options)
    ),
    "a switch is true or false": lambda messages, options: isinstance(options.get("persona", False), bool),
    "nine messages at most": lambda messages, options: len(messages) < 10,
}
"""By name, whether a conversation is within the limit."""
KINDS = {
    "a system prompt": lambda messages, options: messages[0]["role"] == "system",
    "calls": lambda messages, options: any(map(calls_of, messages)),
    "results": lambda messages, options: any(message["role"] == "tool" for message in messages),
    "an image": lambda messages, options: any(map(has_image, messages)),
    "tools": lambda messages, options: "tools" in options,
    "an argument": lambda messages, options: "persona" in options,
    "an answer to continue": lambda messages, options: "continue_final_message" in options,
    "several turns": lambda messages, options: [message["role"] for message in messages].count("user") > 2,
}


def made(accepts, count=150):
    profile = MODELS["everything"].renderer().profile
    source = random.Random(11)
    maker = ConversationMaker(profile, PICTURES, ("<|im_end|>",), odd=True, accepts=accepts)
    return [maker.make(source) for _ in range(count)]


@pytest.mark.parametrize("name", LIMITS)
def test_nine_in_ten_conversations_keep_a_limit_and_hold_every_kind(name):
    conversations = made(lambda conversation: LIMITS[name](*conversation))
    beyond = [not LIMITS[name](*conversation) for conversation in conversations]
    assert sum(beyond) < len(beyond) * 0.1
    for kind, holds in KINDS.items():
        assert sum(holds(*conversation) for conversation in conversations) > 5, kind
    unasked = made(None)
    assert sum(not LIMITS[name](*conversation) for conversation in unasked) > 2 * sum(beyond)


def test_a_template_that_takes_nothing_is_still_asked():
    """A beginning is made all the same, and a few conversations without asking."""
    lengths = [len(messages) for messages, _ in made(lambda conversation: False)]
    assert min(lengths) == 1
    assert 0 < sum(length > 2 for length in lengths) < len(lengths) * 0.2
