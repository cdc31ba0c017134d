"""What the facade refuses, and what it takes."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jinja2
import pytest

from kit import assistant, error_of, raised, user
from mmrender import Renderer, RendererPool
from mmrender.errors import (
    InputError,
    MessageError,
    MMRenderError,
    RenderError,
    TemplateError,
    TemplateRefusedError,
)
from mmrender.protocols import BridgeOptions, ParseOptions, RenderOptions
from mmrender.template.chat import ChatTemplate
from mmrender.template.known import TemplateSet
from small_models import MODELS

USER = [user("hi")]


def renderer_of(source, unprinted="error"):
    """A renderer of a template, without special tokens."""
    tokenizer = MODELS["everything"].tokenizer
    return Renderer(TemplateSet({"default": source}, tokenizer), tokenizer, unprinted=unprinted)


@pytest.fixture(scope="module")
def printing():
    return MODELS["everything"].renderer()


@pytest.fixture
def runs(monkeypatch):
    """One entry for each run of a template from here on."""
    counted = []
    run = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate,
        "render",
        lambda self, *args, **options: counted.append(1) or run(self, *args, **options),
    )
    return counted


CALLS = {
    "render": (lambda renderer, **given: renderer.render(USER, **given), RenderOptions),
    "text": (lambda renderer, **given: renderer.render_text(USER, **given), RenderOptions),
    "bridge": (lambda renderer, **given: renderer.bridge_to_next_turn([1], [2], USER, **given), BridgeOptions),
    "parse": (lambda renderer, **given: renderer.parse_response([1], **given), ParseOptions),
}  # fmt: skip
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "bos_token"),
    *("eos_token", "unk_token", "namespace", "raise_exception", "strftime_now", "range"),
)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_nobody_reads_is_an_error(printing, name, pooled):
    call, options = CALLS[name]
    with RendererPool(printing, workers=1) if pooled else nullcontext(printing) as renderer:
        for known in (*options.__annotations__, "persona"):
            torn = known[:3] + known[4:]
            for given, where in (
                ({torn: None}, torn),
                ({"chat_template_kwargs": {torn: None}}, f"chat_template_kwargs.{torn}"),
            ):
                caught = raised(InputError, call, renderer, **given)
                assert (caught.where, caught.remedy) == (where, f"Did you mean {known!r}?")
        for taken in RESERVED:
            with pytest.raises(InputError, match=f"{taken!r} is (set by the renderer|an option of the call)"):
                call(renderer, chat_template_kwargs={taken: "x"})
        for taken in ("bos_token", "namespace", "raise_exception", "eos_token"):
            with pytest.raises(InputError, match=f"{taken!r} is set by the renderer"):
                call(renderer, **{taken: "x"})


def test_the_errors_for_arguments_list_what_there_is(printing, sentence):
    for call in (
        partial(printing.render, USER, max_pixels=100),
        partial(printing.template_profile, eos_token=1),
    ):
        assert error_of(InputError, call) == sentence


@dataclass
class Ring:
    inner: object = None


class Endless(Mapping):
    def __getitem__(self, key):
        return self

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


@cache
def unusable():
    """Values that hold themselves, nest deeper than anything can follow, or are half of a character."""
    ring, knot, record, deep = {}, [], Ring(), ()
    ring["a"], record.inner = ring, record
    knot.append(knot)
    for _ in range(100_000):
        deep = (deep,)
    return [ring, knot, record, Endless(), deep, "{{ '\ud800' }}"]


def calling(arguments):
    return [*USER, assistant("", tool_calls=[{"name": "f", "arguments": arguments}])]


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


NESTED = {
    "messages[0].note": lambda value: ([{**USER[0], "note": value}], {}),
    "messages[1].tool_calls[0].arguments": lambda value: (calling({"x": value}), {}),
    "tools[0]": lambda value: (USER, {"tools": [tool(value)]}),
    "documents[0]": lambda value: (USER, {"documents": [{"text": value}]}),
    "persona": lambda value: (USER, {"chat_template_kwargs": {"persona": value}}),
    "images": lambda value: ([{"role": "user", "content": [{"type": "image"}]}], {"images": [value]}),
    "chat_template_kwargs": lambda value: (USER, {"chat_template_kwargs": [value]}),
    "continue_final_message": lambda value: (USER, {"continue_final_message": "x" * 100_000}),
}


@pytest.mark.parametrize("where", NESTED)
@pytest.mark.parametrize("memo_bytes", [0, 1 << 20])
def test_what_nothing_can_print_is_refused_by_name(where, memo_bytes):
    renderer = MODELS["everything"].renderer(memo_bytes=memo_bytes)
    messages, options = NESTED[where](None)
    for value in unusable():
        messages, options = NESTED[where](value)
        caught = raised(MMRenderError, renderer.render, messages, **options)
        named = caught.where or str(caught)
        assert where.replace("_", " ") in named.replace("_", " ") or where == "continue_final_message"
        assert len(str(caught)) < 1000


WRITE = {
    "all": "{% for t in VALUES or [] %}{{ t | tojson }}{% endfor %}",
    "none": "",
    "mentioned": "{# VALUES #}{% set known = VALUES %}",
    "the first": "{% if VALUES %}{{ VALUES[0].text }}{% endif %}",
    "their number": "{% if VALUES %}{{ VALUES | length }}{% endif %}",
    "of one kind": "{% for t in VALUES or [] %}{% if t.text == 'a' %}an a{% endif %}{% endfor %}",
}
MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("write", WRITE)
@pytest.mark.parametrize("kind", ["tools", "documents"])
def test_tools_and_documents_do_not_vanish(kind, write):
    source = WRITE[write].replace("VALUES", kind) + MESSAGES
    strict, lax = renderer_of(source), renderer_of(source, "allow")
    for texts in product("ab", repeat=2):
        given = [{"name": text, "text": text} for text in texts]
        plain = jinja2.Environment().from_string(source.replace("tojson", "string"))
        whole, *without = [
            plain.render(messages=USER, **{kind: values}) for values in (given, given[1:], given[:1])
        ]
        lost = [f"{kind}[{index}]" for index, text in enumerate(without) if text == whole]
        for call in ("render", "render_text"):
            if not lost:
                getattr(strict, call)(USER, **{kind: given})
            else:
                with pytest.raises(InputError, match="the chat template ignores this") as caught:
                    getattr(strict, call)(USER, **{kind: given})
                assert caught.value.where in lost
            getattr(lax, call)(USER, **{kind: given})
        assert getattr(strict, call)(USER, **{kind: []}) == "hi"


@pytest.mark.parametrize("kind", ["tools", "documents"])
@pytest.mark.parametrize("write", ["their number", "of one kind"])
def test_that_the_template_reads_each_tool_is_found_once(kind, write, runs):
    renderer = renderer_of(WRITE[write].replace("VALUES", kind) + MESSAGES)
    given = [{"name": f"t{number}", "text": "a"} for number in range(100)]
    renderer.render(USER, **{kind: given})
    runs.clear()
    for text in ("one", "two", "three"):
        renderer.render([{"role": "user", "content": text}], **{kind: given})
    assert len(runs) == 6
    # Another one that the template does not ask for is still refused, each time.
    if write == "of one kind":
        other = [*given, {"name": "t100", "text": "b"}, *given]
        for text in ("one", "two"):
            caught = raised(InputError, renderer.render, [{"role": "user", "content": text}], **{kind: other})
            assert caught.where == f"{kind}[100]"


def test_a_tool_is_not_taken_as_read_because_another_conversation_read_it(runs):
    asked = "{% for t in tools or [] %}{% if t.name == 'a' %}an a{% endif %}{% endfor %}"
    with_system = "{% if messages[0].role == 'system' %}" + asked + "{% else %}{{ tools[0].name }}{% endif %}"
    renderer = renderer_of(with_system + MESSAGES)
    tools = [{"name": "a"}] * 3
    renderer.render([{"role": "system", "content": "s"}, *USER], tools=tools)
    with pytest.raises(InputError, match=r"tools\[1\]: the chat template ignores this tool"):
        renderer.render(USER, tools=tools)


MESSAGE_TEMPLATES = {
    "all": "{% for m in messages %}<{{ m.content }}>{% endfor %}",
    "first system only": "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.content }}>"
    "{% endif %}{% endfor %}",
    "a flag": "{% for m in messages %}{% if m.role == 'system' %}{{ '!' if 'loud' in m.content else '.' }}"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}",
    "the last": "<{{ messages[-1].content }}>",
    "together": "{{ messages | map(attribute='content') | join(' ') | upper | center(99) }}",
}
TURNS = [("system", "loud"), ("user", "hi"), ("system", "loud"), ("user", "  "), ("user", "bye")]


@pytest.mark.parametrize("name", MESSAGE_TEMPLATES)
def test_the_text_of_a_message_does_not_vanish(name):
    """A message is refused exactly if other text in its place makes no difference."""
    source = MESSAGE_TEMPLATES[name]
    strict, lax = renderer_of(source), renderer_of(source, "allow")
    plain = jinja2.Environment().from_string(source)
    for length in range(1, len(TURNS) + 1):
        messages = [{"role": role, "content": text} for role, text in TURNS[:length]]
        whole = plain.render(messages=messages)
        lost = []
        for index, message in enumerate(messages):
            other = [*messages[:index], {**message, "content": "other"}, *messages[index + 1 :]]
            if message["content"].strip() and plain.render(messages=other) == whole:
                lost.append(f"messages[{index}]")
        assert lax.render_text(messages) == whole
        for call in (strict.render, strict.render_text):
            if not lost:
                call(messages)
                continue
            with pytest.raises(InputError, match="the chat template does not print this") as caught:
                call(messages)
            assert caught.value.where == lost[0]


@pytest.mark.parametrize(
    ("message", "misspelt"),
    [
        ({"role": "user", "contents": "x"}, "contents"),
        ({"role": "user", "text": "x"}, "text"),
        (assistant("x", tool_call=[{"name": "f"}]), "tool_call"),
        (assistant("x", reasoning_contents="y"), "reasoning_contents"),
        ({"role": "tool", "content": "x", "tool_callid": "1"}, "tool_callid"),
        ({"role": "user", "content": "x", "weight": 0.5, "id": "m1", "timestamp": 3}, None),
    ],
)
def test_a_misspelt_member_of_a_message_is_refused(message, misspelt):
    source = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    renderer = renderer_of(source)
    conversation = [*USER, message]
    calls = {
        f"messages[1].{misspelt}": (renderer.render, renderer.render_text),
        f"new_messages[1].{misspelt}": (partial(renderer.bridge_to_next_turn, [1], [2]),),
    }
    for where, methods in calls.items():
        for call in methods:
            if misspelt is None:
                call(conversation)
                continue
            with pytest.raises(MessageError, match="reads this member") as caught:
                call(conversation)
            assert caught.value.where == where
    if misspelt is not None:
        renderer_of(source + "{# " + misspelt + " #}").render_text(conversation)


def test_a_template_by_call_is_refused_with_the_way_to_open_one(printing):
    calls = (
        partial(printing.render, USER),
        partial(printing.render_text, USER),
        partial(printing.bridge_to_next_turn, [1], [2], USER),
        partial(printing.parse_response, [1]),
        printing.template_profile,
    )
    for call in calls:
        with pytest.raises(InputError, match="chat_template: a renderer has one chat template") as caught:
            call(chat_template="{{ messages }}")
        assert caught.value.remedy.startswith("Open another renderer: Renderer.from_pretrained(")


def test_template_variables_come_once_as_keywords_or_in_one_mapping_and_are_copied(printing):
    one = printing.render(USER, persona="a pirate")
    assert one.token_ids == printing.render(USER, chat_template_kwargs={"persona": "a pirate"}).token_ids
    assert "a pirate" in one.text
    with pytest.raises(InputError, match="persona: the template variable comes twice"):
        printing.render(USER, persona="a", chat_template_kwargs={"persona": "b"})
    persona = ["a"]
    found = printing.render_text(USER, persona=persona)
    persona.append("b")
    assert printing.render_text(USER, persona=["a"]) == found
    assert printing.render_text(USER, persona=persona) != found


@pytest.mark.parametrize("part", [{"type": "image", "image": None}, {"type": "image"}])
def test_an_image_without_a_source_is_named(renderer, part):
    with pytest.raises(MessageError) as caught:
        renderer.render([{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}])
    assert caught.value.where == "messages[0].content[1]"
    assert "no source" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tool_call_grammar", "zzz"),
        ("unprinted", "no"),
        ("unprinted", ["error"]),
        ("tool_images", "system"),
        ("name_or_path", 5),
        ("limits", 5),
        ("media_policy", 5),
        ("media_cache", {}),
        ("clock", 5),
        ("template_processes", "two"),
    ],
)
def test_options_that_are_none_of_their_values_are_refused_when_a_model_is_opened(
    tiny_model, option, value, sentence
):
    with pytest.raises(RenderError) as caught:
        Renderer.from_pretrained(**{"name_or_path": tiny_model, "image_backend": "pil", option: value})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "options",
    [
        {"history": "templates"},
        {"history": ["sampled"]},
        {"previous_roles": "user"},
        {"previous_roles": ["human"]},
    ],
)
def test_options_of_a_bridge_that_are_none_of_their_values_are_refused(printing, options, sentence):
    (name,) = options
    caught = raised(RenderError, printing.bridge_to_next_turn, [1], [2], USER, **options)
    assert (caught.where, str(caught)) == (name, sentence)


@pytest.mark.parametrize("name", ["images", "videos"])
def test_media_that_no_part_waits_for_are_refused_for_text_too(printing, name):
    with pytest.raises(MessageError):
        printing.render_text(USER, **{name: [1, 2, 3]})


LOOP = "{% for m in messages %}"
REFUSED = "{{ raise_exception('refused') }}"
IF_NO = "{% if m.content == 'no' %}" + REFUSED + "{% endif %}"
LINE = "{{ m.role }}: {{ m.content }}</s>"
END = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
REFUSING = {
    "in the loop": LOOP + IF_NO + LINE + END,
    "in another loop": LOOP + LINE + END + LOOP + IF_NO + "{% endfor %}",
    "in a loop over parts": LOOP + LINE + "{% for part in [1, 2] %}" + IF_NO + "{% endfor %}" + END,
    "in a loop over indices": "{% for i in range(messages | length) %}{% set m = messages[i] %}" + IF_NO + LINE + END,
    "in text that is kept": "{% set kept %}" + LOOP + IF_NO + LINE + END + "{% endset %}{{ kept }}",
    "in a macro": "{% macro all(messages) %}" + LOOP + IF_NO + LINE + END + "{% endmacro %}{{ all(messages) }}",
    "by failing": LOOP + "{% if m.content == 'no' %}{{ m.content.no.such }}{% endif %}" + LINE + END,
    # What comes after an odd number of messages is refused, so prefixes alternate.
    "with every other prefix": "{% if messages | length % 2 %}" + REFUSED + "{% endif %}" + LOOP + IF_NO + LINE + END,
}  # fmt: skip
"""Templates that refuse the message `no`."""


@pytest.mark.parametrize("refused", [1, 150, 399])
@pytest.mark.parametrize("place", REFUSING)
def test_the_message_that_is_refused_is_named_by_the_run_that_fails(tiny_model, runs, place, refused):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=REFUSING[place])
    messages = [{"role": ("user", "assistant")[index % 2], "content": "yes"} for index in range(400)]
    assert renderer.profile.roles
    messages[refused]["content"] = "no"
    runs.clear()
    caught = raised(TemplateError, renderer.render, messages)
    assert caught.where.startswith(f"messages[{refused}], chat template"), caught
    assert len(runs) == 1


def test_a_refusal_names_a_message_as_the_caller_knows_it_or_none(tiny_model):
    source = (
        LOOP + "{% set last = m %}" + END + "{% if messages[-1].content == 'no' %}" + REFUSED + "{% endif %}"
    )
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=source)
    caught = raised(TemplateRefusedError, renderer.render, [*USER, user("no")])
    assert caught.where == "chat template 'default', line 1"
    renderer = Renderer.from_pretrained(
        tiny_model, image_backend="pil", chat_template=REFUSING["in the loop"]
    )
    prompt = renderer.render_ids(USER, add_generation_prompt=True)
    new = [*USER, user("no")]
    assert renderer.bridge_to_next_turn(prompt, renderer.encode_text("yes</s>").token_ids, new) is None
    assert "new_messages[1], chat template 'default', line 1: refused" in renderer.why_not_bridged


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [([1], {1}, "<set>"), (1, True, "True"), (1, 1.0, "1.0"), ("1", 1, "1"), ("a", ["a"], "['a']")],
)
def test_values_that_print_differently_are_different_settings(first, second, shown):
    renderer = MODELS["everything"].renderer()
    renderer.render_text(USER, persona=first)
    assert str(renderer.render_text(USER, persona=second)).startswith(shown)


def test_a_tool_result_is_named_after_its_call(printing):
    conversation = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "id": "1", "arguments": {}}]},
        {"role": "tool", "tool_call_id": "1", "content": "a cow"},
        {"role": "tool", "tool_call_id": "2", "content": "a dog"},
    ]
    rendered = printing.render(conversation)
    assert rendered.tool_names == (None, None, "look", None)
    assert rendered.roles == ("user", "assistant", "tool", "tool")
