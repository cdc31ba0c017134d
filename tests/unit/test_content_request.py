"""The request that every rendering starts from: its parts, its prompts, and its refusals."""

import pytest

from kit import error_of
from mmrender.content.messages import read_request, read_variables
from mmrender.errors import InputError
from mmrender.messages import ImagePart, RenderRequest, RequestMedia

MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, "what?", {"type": "image", "image": "b.png"}]},
    {"role": "assistant", "tool_calls": [{"name": "look", "id": "1"}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "image"}]},
]


def test_media_have_their_path_and_fingerprint():
    request = read_request(
        MESSAGES, images=["a.png", "c.png"], fingerprint=lambda part: part.source, where="new_messages"
    )
    assert request.media == tuple(
        RequestMedia(
            f"new_messages[{message}].content[{position}]", message, position, role, ImagePart(name), name
        )
        for message, position, role, name in (
            (0, 0, "user", "a.png"),
            (0, 2, "user", "b.png"),
            (2, 0, "tool", "c.png"),
        )
    )
    assert read_request(MESSAGES, images=["a.png", "c.png"]).media == ()


@pytest.mark.parametrize(
    ("continues", "field"), [(False, None), ("", None), (True, "content"), ("thinking", "thinking")]
)
def test_a_prompt_keeps_tools_documents_and_variables(continues, field):
    request = read_request(
        MESSAGES,
        tools=[{"name": "look"}],
        documents=[{"text": "d"}],
        continue_final_message=continues,
        variables={"x": 1},
        fingerprint=lambda _: None,
    )
    assert (request.add_generation_prompt, request.continued) == (False, field)
    assert request.prompt_after(request.messages[:1]) == RenderRequest(
        request.messages[:1],
        tools=({"name": "look"},),
        documents=({"text": "d"},),
        add_generation_prompt=True,
        variables={"x": 1},
    )


def variables(mapping, **keywords):
    return read_variables(
        mapping, keywords, known=("persona", "style"), options=("tools",), reserved=("eos",)
    )


def test_variables_come_either_way_and_are_copied():
    style = ["a"]
    merged = variables({"style": style}, persona="b")
    assert merged == {"style": ["a"], "persona": "b"}
    assert merged["style"] is not style
    assert variables(None) == {}


ERRORS = {
    "prompt and continuation": lambda: read_request(
        MESSAGES, add_generation_prompt=True, continue_final_message=True
    ),
    "no messages": lambda: read_request([]),
    "a list of variables": lambda: variables(["persona"]),
    "a variable without a name": lambda: variables({1: "x"}),
    "a variable twice": lambda: variables({"persona": "a"}, persona="b"),
    "a misspelt variable": lambda: variables({"person": "a"}),
    "an unknown variable": lambda: variables(None, temperature=1),
    "a reserved variable": lambda: variables(None, eos="x"),
    "an option as a variable": lambda: variables({"tools": []}),
    "a template": lambda: variables(None, chat_template="x"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, sentence):
    assert error_of(InputError, ERRORS[case]) == sentence
