from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kit import assistant, error_of, raised
from mmrender import Renderer, build_training_sample
from mmrender.errors import InputError, MessageError, RenderError
from mmrender.sidecar import MediaItem
from mmrender.trajectory.sample import TrainingSample

PHOTO = Image.linear_gradient("L").convert("RGB").resize((160, 96))
TOOLS = [
    {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}
]
CALL = {"id": "call1", "type": "function", "function": {"name": "zoom", "arguments": {"x": 1}}}
CALL_TEXT = '<tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call>'

OPENERS_CLOSE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NOTHING_CLOSES = """{% for m in messages %}{{ m.role }}:
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""
FORGETS_REASONING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
EMPTY_REASONING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS_DROP_CONTENT = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def variant(tiny_model: Path, template: str) -> Renderer:
    options: Any = {"image_backend": "pil", "unprinted": "allow"}
    return Renderer.from_pretrained(tiny_model, chat_template=template, **options)


def user(content: Any = "What now?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def step_of(renderer: Renderer, prompt: list[Any], completion: list[Any], **options: Any) -> TrainingSample:
    conversation = [*prompt, *completion]
    return build_training_sample(renderer, conversation, completion_start=len(prompt), **options)


def tool(content: str = "7 files") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call1", "name": "zoom", "content": content}


def trained(renderer: Renderer, ids: Sequence[int], mask: np.ndarray[Any, Any]) -> list[str]:
    """Text of each run of tokens that is trained on."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return [renderer.decode(ids[start:stop]) for start, stop in edges.reshape(-1, 2).tolist()]


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    user([{"type": "image", "image": PHOTO}, {"type": "text", "text": "Look."}]),
    assistant("Zooming.", tool_calls=[CALL]),
    tool(),
    assistant("A gradient.", reasoning_content="Dark to light."),
]


def test_the_models_turns_are_trained_on_through_their_stop_tokens(renderer):
    sample = build_training_sample(renderer, CONVERSATION, tools=TOOLS)
    assert sample.token_ids.tolist() == renderer.render_ids(CONVERSATION, tools=TOOLS)
    assert trained(renderer, sample.token_ids, sample.loss_mask) == [
        f"Zooming.\n{CALL_TEXT}<|im_end|>",
        "<think>\nDark to light.\n</think>\n\nA gradient.<|im_end|>",
    ]
    assert sample.rewritten == {}
    assert np.array_equal(sample.labels(), np.where(sample.loss_mask, sample.token_ids, -100))
    assert set(sample.labels(-1)[~sample.loss_mask].tolist()) == {-1}
    assert len(sample) == len(sample.loss_mask) == len(sample.mm_token_type_ids)


def test_token_types_follow_ranges_and_no_image_is_trained_on(renderer):
    pad = "<|image_pad|>"
    sample = build_training_sample(renderer, [*CONVERSATION[:3], user(f"{pad}{pad}"), assistant(pad)])
    (placeholder,) = sample.multi_modal_data.mm_placeholders["image"]
    types = sample.mm_token_type_ids
    assert types.dtype == np.int64
    assert types.sum() == placeholder.length > 0
    assert types[placeholder.offset : placeholder.offset + placeholder.length].all()
    shown = [{"type": "text", "text": "Here:"}, {"type": "image", "image": PHOTO}]
    sample = build_training_sample(renderer, [user(), assistant(shown)])
    assert not (sample.loss_mask & (sample.mm_token_type_ids != 0)).any()
    assert "Here:" in trained(renderer, sample.token_ids, sample.loss_mask)[0]


@pytest.mark.parametrize(
    "select",
    [[-1], {4}, (np.int64(4),), lambda message: message.role == "assistant" and not message.tool_calls],
)
def test_selection_narrows_and_changes_no_token(renderer, select):
    sample = build_training_sample(renderer, CONVERSATION, select=select, train_on=("assistant", "tool"))
    assert sample.token_ids.tolist() == build_training_sample(renderer, CONVERSATION).token_ids.tolist()
    assert trained(renderer, sample.token_ids, sample.loss_mask) == [
        "<think>\nDark to light.\n</think>\n\nA gradient.<|im_end|>"
    ]


NAMED = "'last_assistant_message', 'last_turn', 'all_assistant_messages', 'all_messages'"


@pytest.mark.parametrize(
    "options",
    [
        {"select": [False, True]},
        {"select": [5]},
        {"train_on": "assistant"},
        {"train_on": ["developer"]},
        {"weights": {5: 1.0}},
        {"weights": {-1: float("nan")}},
        {"on_rewritten": "ignore"},
        {"add_generation_prompt": True},
    ],
    ids=lambda options: str(*options),
)
def test_options_that_cannot_be_meant(renderer, options, sentence):
    assert error_of(InputError, build_training_sample, renderer, CONVERSATION, **options) == sentence


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("train_onn", "train_on"),
        ("on_rewriten", "on_rewritten"),
        ("complete_start", "completion_start"),
        ("add_vision_idd", "add_vision_id"),
    ],
)
def test_an_option_that_nobody_reads_names_the_nearest(renderer, name, nearest):
    caught = raised(InputError, build_training_sample, renderer, CONVERSATION, **{name: None})
    assert (caught.where, caught.remedy) == (name, f"Did you mean {nearest!r}?")


def test_documents_reach_the_sample(tiny_model):
    source = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    source += "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=source)
    documents = [{"text": "Known."}]
    sample = build_training_sample(
        renderer, [user("a"), assistant("b")], documents=documents, final_stop=False
    )
    text = renderer.decode(sample.token_ids.tolist())
    assert text == "Known.<|im_start|>user\na<|im_start|>assistant\nb"
    assert trained(renderer, sample.token_ids, sample.loss_mask) == ["b"]


def test_an_image_without_a_source(renderer):
    messages = [user([{"type": "image"}, {"type": "text", "text": "Look."}]), assistant()]
    with pytest.raises(MessageError, match=r"^messages\[0\]\.content\[0\]: the image part has no source"):
        build_training_sample(renderer, messages)
    assert build_training_sample(renderer, messages, images=[PHOTO]).mm_token_type_ids.any()


def test_a_turn_left_open_ends_in_the_stop_token_that_would_be_sampled(tiny_model):
    renderer = variant(tiny_model, OPENERS_CLOSE)
    messages = [user(), assistant("This."), user(), assistant("That.")]
    plain = renderer.render(messages)
    sample = build_training_sample(renderer, messages)
    assert sample.token_ids.tolist() == [*plain.token_ids, renderer.tokenizer.added_ids["<|im_start|>"]]
    assert trained(renderer, sample.token_ids, sample.loss_mask) == ["This.<|im_start|>", "That.<|im_start|>"]
    assert sample.rendered.spans[-1].stop == len(sample) == len(sample.loss_mask)
    open_ended = build_training_sample(renderer, messages, final_stop=False)
    assert open_ended.token_ids.tolist() == plain.token_ids
    assert trained(renderer, plain.token_ids, open_ended.loss_mask) == ["This.<|im_start|>", "That."]
    messages = [user(), assistant("This."), user()]
    assert build_training_sample(renderer, messages).token_ids.tolist() == renderer.render_ids(messages)


def test_the_stop_token_depends_on_whether_tools_were_called(renderers):
    renderer = renderers("glm4_5v")
    answered = build_training_sample(renderer, [user(), assistant("This.")])
    called = build_training_sample(renderer, [user(), assistant("", tool_calls=[CALL])], tools=TOOLS)
    assert renderer.decode(answered.token_ids[-1:]) == "<|user|>"
    assert renderer.decode(called.token_ids[-1:]) == "<|observation|>"


def test_a_turn_ends_with_its_first_stop_token_under_every_policy(tiny_model):
    conversation = [user(), assistant("a<|im_end|>b"), user(), assistant("x<|im_end|>y")]
    rewritten = build_training_sample(
        variant(tiny_model, FORGETS_REASONING), conversation, on_rewritten="content"
    )
    assert trained(variant(tiny_model, FORGETS_REASONING), rewritten.token_ids, rewritten.loss_mask) == [
        "a<|im_end|>",
        "\n</think>\n\nx<|im_end|>",
    ]
    renderer = variant(tiny_model, OPENERS_CLOSE)
    ended = build_training_sample(renderer, conversation)
    assert trained(renderer, ended.token_ids, ended.loss_mask) == ["a<|im_end|>", "x<|im_end|>"]
    empty = build_training_sample(renderer, [user(), assistant("")])
    assert trained(renderer, empty.token_ids, empty.loss_mask) == ["<|im_start|>"]


def test_a_stop_token_that_nothing_proves(tiny_model, sentence):
    renderer = variant(tiny_model, NOTHING_CLOSES)
    assert error_of(RenderError, build_training_sample, renderer, [user(), assistant()]) == sentence
    sample = build_training_sample(renderer, [user(), assistant()], final_stop=False)
    assert "This." in trained(renderer, sample.token_ids, sample.loss_mask)[0]


TWO_THOUGHTS = [
    user(),
    assistant("This.", reasoning_content="Well"),
    user(),
    assistant("That.", reasoning_content="Hm"),
]


def test_a_rewritten_turn_is_an_error(tiny_model, sentence):
    with pytest.raises(RenderError) as caught:
        build_training_sample(variant(tiny_model, FORGETS_REASONING), TWO_THOUGHTS)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"on_rewritten": "skip"}, ["Hm\n</think>\n\nThat.<|im_end|>"]),
        ({"on_rewritten": "content"}, ["This.<|im_end|>", "Hm\n</think>\n\nThat.<|im_end|>"]),
        ({"select": [3]}, ["Hm\n</think>\n\nThat.<|im_end|>"]),
    ],
)
def test_policies_for_rewritten_turns(tiny_model, options, expected):
    renderer = variant(tiny_model, FORGETS_REASONING)
    sample = build_training_sample(renderer, TWO_THOUGHTS, **options)
    assert sample.rewritten.keys() == {1}
    assert trained(renderer, sample.token_ids, sample.loss_mask) == expected


def test_reasoning_that_the_template_drops(tiny_model):
    renderer = variant(tiny_model, EMPTY_REASONING)
    messages = [user(), assistant("This.", reasoning_content="What else?"), user(), assistant("That.")]
    problem = error_of(RenderError, build_training_sample, renderer, messages)
    assert problem.startswith("messages[1]: the template drops this assistant message's reasoning - expected")
    skipped = build_training_sample(renderer, messages, on_rewritten="skip")
    assert skipped.rewritten.keys() == {1}
    assert trained(renderer, skipped.token_ids, skipped.loss_mask) == ["<think></think>That.<|im_end|>"]
    kept = build_training_sample(renderer, messages, on_rewritten="content")
    assert trained(renderer, kept.token_ids, kept.loss_mask) == [
        "<think></think>This.<|im_end|>",
        "<think></think>That.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "dropped"), [(CALLS_DROP_CONTENT, "content"), (EMPTY_REASONING, "tool calls")]
)
def test_content_or_calls_that_the_template_drops(tiny_model, template, dropped):
    with pytest.raises(
        RenderError, match=rf"^messages\[1\]: the template drops this assistant message's {dropped}"
    ):
        build_training_sample(
            variant(tiny_model, template), [user(), assistant("Let me look.", tool_calls=[CALL])]
        )


CONTENT_AFTER_RESULTS = """{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call><|im_end|>
{%- for t in messages if t.role == 'tool' %}{{ t.content }}{% endfor %}{% endfor %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_content_that_the_template_writes_behind_the_results_of_its_calls(tiny_model):
    """As Gemma 4's template does: the model ends its turn with the calls, so it never samples the text."""
    renderer = variant(tiny_model, CONTENT_AFTER_RESULTS)
    messages = [user(), assistant("Let me look.", tool_calls=[CALL]), tool(), user(), assistant("That.")]
    problem = "the template writes this message's content after the end of its turn"
    with pytest.raises(RenderError, match=rf"^messages\[1\]: {problem}"):
        build_training_sample(renderer, messages)
    call = "<tool_call>zoom</tool_call><|im_end|>"
    for policy, texts in (("skip", ["That.<|im_end|>"]), ("content", [call, "That.<|im_end|>"])):
        sample = build_training_sample(renderer, messages, on_rewritten=policy)
        assert sample.rewritten == {1: problem}
        assert trained(renderer, sample.token_ids, sample.loss_mask) == texts
    called = [user(), assistant("", tool_calls=[CALL]), tool(), user(), assistant("That.")]
    sample = build_training_sample(renderer, called)
    assert sample.rewritten == {}
    assert trained(renderer, sample.token_ids, sample.loss_mask) == [call, "That.<|im_end|>"]


def test_a_template_without_a_trainable_turn_says_so(tiny_model):
    """Also where another message holds the same short text."""
    renderer = variant(tiny_model, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    messages = [user("Yes."), assistant("Yes.")]
    options: dict[str, Any] = {"final_stop": False}
    problem = "the template writes this turn differently than it asks the model for it"
    with pytest.raises(RenderError, match=rf"^messages\[1\]: {problem}"):
        build_training_sample(renderer, messages, **options)
    for policy in ("skip", "content"):
        with pytest.raises(RenderError, match=r"^no token of this conversation is trained on") as caught:
            build_training_sample(renderer, messages, on_rewritten=policy, **options)
        assert caught.value.got == f"messages[1]: {problem}"


@pytest.mark.parametrize(
    ("options", "selected"), [({"select": []}, 0), ({"select": [0]}, 0), ({"weights": {-1: 0}}, 1)]
)
def test_a_sample_has_a_token_to_train_on(renderer, options, selected):
    with pytest.raises(RenderError, match=r"^row 7: no token of this conversation is trained on") as caught:
        build_training_sample(renderer, [user(), assistant()], sample_id="row 7", **options)
    assert caught.value.got == f"2 messages, of which {selected} are selected"


WITHOUT_REASONING = [
    user("How many cows?"),
    assistant("One."),
    user("Look again."),
    assistant("I zoom.", tool_calls=[CALL]),
    tool(),
    assistant("<think>\n\n</think>\n\nTwo."),
    user("Sure?"),
    assistant("Yes."),
]


@pytest.mark.parametrize(
    ("model_name", "arguments"),
    [("qwen3_5", {}), ("qwen3_5", {"enable_thinking": False}), ("qwen3_vl_thinking", {})],
)
def test_without_reasoning_the_answers_are_trained_on(renderers, model_name, arguments):
    """Where the prompt opens reasoning: no token of a block, which a prompt writes, and every stop token."""
    renderer = renderers(model_name)
    sample = build_training_sample(renderer, WITHOUT_REASONING, tools=TOOLS, **arguments)
    assert sample.token_ids.tolist() == renderer.render_ids(WITHOUT_REASONING, tools=TOOLS, **arguments)
    first, call, *others = trained(renderer, sample.token_ids, sample.loss_mask)
    assert [first, *others] == ["One.<|im_end|>", "Two.<|im_end|>", "Yes.<|im_end|>"]
    assert call.startswith("I zoom.")
    assert "zoom" in call.removeprefix("I zoom.")
    assert call.endswith("</tool_call><|im_end|>")
    for turn in (1, 3, 5):
        assert sample.rewritten[turn].startswith("its generation prompt writes a reasoning block")
    assert (7 in sample.rewritten) == (not arguments), "its prompt is the beginning of the whole"
    for prompt_length in (1, 7):
        step = step_of(
            renderer,
            WITHOUT_REASONING[:prompt_length],
            WITHOUT_REASONING[prompt_length:],
            tools=TOOLS,
            **arguments,
        )
        assert step.prompt_length == step.loss_mask.argmax()
        text = renderer.decode(step.token_ids[step.prompt_length :].tolist())
        assert text.startswith(WITHOUT_REASONING[prompt_length]["content"])


def test_reasoning_that_history_leaves_out_is_still_an_error(renderers):
    """Also where it stands in the content, and where only an earlier turn had it in its prompt."""
    renderer = renderers("qwen3_5")
    within = assistant("<think>\nIt moos.\n</think>\n\nA cow.")
    calling = assistant("", tool_calls=[CALL], reasoning_content="I look.")
    for turns, rewritten in (
        ([within], {1}),
        ([assistant("A cow.", reasoning_content="It moos.")], {1}),
        ([calling, tool(), assistant("A cow.")], {1, 3}),
    ):
        messages = [user(), *turns, user(), assistant("Yes.")]
        with pytest.raises(RenderError, match=r"^messages\[1\]: the template writes this turn differently"):
            build_training_sample(renderer, messages, tools=TOOLS)
        sample = build_training_sample(renderer, messages, tools=TOOLS, on_rewritten="skip")
        assert set(sample.rendered.rewritten) == rewritten
        assert trained(renderer, sample.token_ids, sample.loss_mask) == ["Yes.<|im_end|>"]


@pytest.mark.parametrize("weight", ["1", True, -1, float("inf")])
def test_a_weight_is_a_number(renderer, weight):
    messages = [user(), assistant(weight=weight)]
    with pytest.raises(InputError, match=r"^messages\[1\]\.weight: is out of range - expected 0 or more"):
        build_training_sample(renderer, messages)


def test_a_prompt_that_is_not_the_beginning_of_the_whole(tiny_model):
    renderer = variant(tiny_model, FORGETS_REASONING)
    prompt, completion = TWO_THOUGHTS[:1], TWO_THOUGHTS[1:]
    error = raised(RenderError, step_of, renderer, prompt, completion)
    start = len(renderer.render_ids(prompt, add_generation_prompt=True)) - 2
    assert error.where == "messages[1]"
    assert error.problem == f"the prompt for this turn differs from the whole at token {start}"
    assert error.expected == "'<think>\\n'"
    assert (error.got or "").startswith("'This.<|im_end|>")
    step = step_of(renderer, prompt, completion, on_rewritten="skip")
    assert step.token_ids.tolist() == renderer.render_ids(TWO_THOUGHTS)
    assert step.prompt_length == start
    assert step.rewritten.keys() == {1}
    assert trained(renderer, step.token_ids, step.loss_mask) == ["Hm\n</think>\n\nThat.<|im_end|>"]


def test_a_completion_begins_with_the_models_turn(renderer, sentence):
    assert error_of(InputError, step_of, renderer, [user()], [user(), assistant()]) == sentence
    with pytest.raises(InputError, match=r"after the first message, got 2$"):
        step_of(renderer, [user(), assistant()], [])


@pytest.mark.parametrize(("name", "pad"), [("internvl3", "<IMG_CONTEXT>"), ("qwen3_vl", "<|image_pad|>")])
def test_types_are_those_of_the_reference_processors(renderers, name, pad):
    """The reference marks the image token's ids, which without typed pads is the same set of tokens."""
    renderer = renderers(name)
    messages = [user([{"type": "image", "image": PHOTO}, {"type": "text", "text": "Look."}]), assistant()]
    sample = build_training_sample(renderer, messages)
    expected = sample.token_ids == renderer.tokenizer.token_id(pad)
    item: MediaItem = sample.multi_modal_data.mm_items["image"][0]
    assert expected.sum() > 0
    assert item.modality == "image"
    np.testing.assert_array_equal(sample.mm_token_type_ids, expected)
