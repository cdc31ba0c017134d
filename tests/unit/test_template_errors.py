"""What a failing template says: the exact message, the line, and the class of the error."""

import datetime
import re
from functools import partial

import pytest
from jinja2 import nodes

from kit import assistant, error_of
from mmrender.errors import (
    TemplateLimitError,
    TemplateRefusedError,
    TemplateRuntimeError,
    TemplateSecurityError,
    TemplateSyntaxError,
)
from mmrender.messages import ImagePart, Message, RenderRequest, TextPart, ThinkingPart, ToolCall
from mmrender.template.chat import GIVEN, ChatTemplate, ViewForm
from mmrender.template.limits import TemplateLimits
from small_models import TEMPLATES
from traced_cases import outcome

USER = [Message(role="user", content="hi")]

BROKEN = {
    "no end": "line one\n{% if messages %}\nno end",
    "no filter": "{{ x | nothing }}",
    "no expression": "\n\n{{ a b }}",
    "no loop": "{% break %}",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_template_that_does_not_compile_says_where(case, sentence):
    assert error_of(TemplateSyntaxError, ChatTemplate, BROKEN[case]) == sentence


FAILING = {
    "a refusal": (TemplateRefusedError, "\n{{ raise_exception('Roles must alternate') }}"),
    "a refusal in a loop": (
        TemplateRefusedError,
        "{% for m in messages %}\n{% if m.role == 'user' %}\n"
        "{{ raise_exception('No ' ~ m.role ~ 's, ' + m.content) }}{% endif %}{% endfor %}",
    ),
    "a type": (TemplateRuntimeError, "{{ 'ok' }}\n\n{{ messages[0].content + 1 }}"),
    "an undefined name": (TemplateRuntimeError, "{% macro m(x) %}\n{{ x.y.z }}{% endmacro %}\n\n{{ m({}) }}"),
    "a class": (TemplateSecurityError, "{{ ''.__class__.mro() }}"),
    "steps": (
        TemplateLimitError,
        "{% for a in range(101) %}{% for b in range(101) %}\n{% endfor %}{% endfor %}",
    ),
    "text": (TemplateLimitError, "{{ 'x' * 10**8 }}"),
    "recursion": (TemplateLimitError, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_template_that_fails_says_where_and_why(case, sentence):
    kind, source = FAILING[case]
    with pytest.raises(kind) as error:
        ChatTemplate(source, limits=TemplateLimits(max_steps=10_000, max_seconds=60)).render(
            RenderRequest(USER)
        )
    assert type(error.value) is kind
    # Python words it differently with where it noticed.
    assert re.sub("(depth exceeded).*", r"\1", str(error.value)) == sentence


def test_limits_can_be_raised_and_lowered():
    source = "{% for a in range(100) %}{% for b in range(100) %}x{% endfor %}{% endfor %}"
    assert len(ChatTemplate(source).render(RenderRequest(USER))) == 10_000
    for limits, what in (
        (TemplateLimits(max_steps=1000), "steps - expected at most 1,000 loop iterations"),
        (TemplateLimits(max_seconds=0.0), "time - expected at most 0 s of processor time, got more"),
        (TemplateLimits(max_characters=9_999), "text - expected at most 9,999 characters, got 10,000"),
    ):
        error = error_of(TemplateLimitError, ChatTemplate(source, limits=limits).render, RenderRequest(USER))
        assert what in error
    raised = TemplateLimits(max_characters=9_000_000)
    assert len(ChatTemplate("{{ 'x' * 9000000 }}", limits=raised).render(RenderRequest(USER))) == 9_000_000


def test_variables_that_a_caller_may_set_are_those_looked_up():
    template = ChatTemplate(
        "{% set a = 1 %}{% macro m(p) %}{{ p }}{{ b }}{% endmacro %}{{ a }}{{ bos_token }}{{ messages }}{{ tools }}"
        "{% for c in d %}{{ loop.index }}{{ c }}{% endfor %}{% if enable_thinking is defined %}{% endif %}"
        "{{ strftime_now('%Y') }}{{ namespace() }}{{ m(1) }}{% set ns.x = e %}",
        special_tokens={"bos_token": "<s>"},
    )
    assert template.variables == ("b", "d", "e", "enable_thinking", "ns")


# Templates, and the names in them that a caller may set.
SCOPES = {
    "{% if a %}{% set b = 1 %}{% else %}{% set b = 2 %}{% endif %}{{ b }}": "a",
    "{% if a %}{% set b = 1 %}{% endif %}{{ b }}": "ab",
    "{% if a %}{% set b = 1 %}{{ b }}{% elif c %}{% set b = 2 %}{{ b }}{% endif %}": "ac",
    "{% for c in [1, 2] if c > 1 %}{% set e = c %}{{ e }}{{ loop.index }}{% endfor %}{{ c }}": "c",
    "{% for c in [1] %}{% set e = c %}{{ e }}{% endfor %}": "",
    "{% for c in [] %}{% else %}{{ c }}{% endfor %}": "c",
    "{% for c in [1] %}{{ d }}{% set d = 1 %}{% endfor %}": "d",
    "{% set n = namespace(x=0) %}{% set n.x = 5 %}{{ n.x }}{% set p, q = 1, 2 %}{{ p + q }}": "",
    "{% macro m(p, q=r) %}{% set s = p %}{{ s }}{{ q }}{{ varargs }}{{ t }}{% endmacro %}{{ m(1) }}": "rt",
    "{% set t %}{% set u = 1 %}{{ u }}{{ v }}{% endset %}{{ t }}": "v",
    "{% macro m(y) %}{{ caller(y) }}{% endmacro %}{% call(x) m(1) %}{{ x }}{% endcall %}": "",
    "{% generation %}{% set w = 1 %}{{ w }}{% endgeneration %}{{ w }}": "w",
    "{% with k = l %}{{ k }}{% endwith %}{% filter upper %}{{ o }}{% endfilter %}": "lo",
}  # fmt: skip


@pytest.mark.parametrize("source", SCOPES)
def test_variables_are_what_may_be_read_before_it_is_assigned(source):
    assert ChatTemplate(source).variables == tuple(SCOPES[source])


@pytest.mark.parametrize(
    "source", [*SCOPES, *[path.read_text("utf-8") for path in TEMPLATES.glob("*.jinja")]]
)
def test_no_other_variable_makes_a_difference(source):
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    messages = [*USER, Message(role="assistant", content="<think>a</think>b", reasoning_content="r"), *USER]
    expected = outcome(template.render, RenderRequest(messages))[0]
    for name in {node.name for node in template.syntax_tree.find_all(nodes.Name)} - GIVEN:
        render = partial(template.render, RenderRequest(messages, variables={name: "qwertz"}))
        assert name in template.variables or outcome(render)[0] == expected, name


def test_the_clock_is_the_callers_and_variables_override_special_tokens():
    day = datetime.datetime(2026, 7, 6, tzinfo=datetime.UTC)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: day)
    assert template.reads_clock
    assert template.render(RenderRequest(USER)) == "06 Jul 2026"
    assert not ChatTemplate("{{ messages }}").reads_clock
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}|", special_tokens={"bos_token": "<s>"})
    assert template.render(RenderRequest(USER)) == "<s>|"
    assert template.render(RenderRequest(USER, variables={"bos_token": "", "eos_token": "!"})) == "!|"


def test_messages_look_as_those_of_transformers():
    calls = (ToolCall("f", {"x": 1, "y": None}, "c1"), ToolCall("g", {}))
    messages = [
        Message(role="system", content=(TextPart("a"), ThinkingPart("t"), ImagePart(None))),
        Message(role="assistant", content=None, reasoning_content="r", tool_calls=calls),
        Message(role="tool", content="out", name="f", tool_call_id="c1", extra={"weight": 0.5}),
    ]
    show = ChatTemplate("{{ messages }}")
    assert show.render(RenderRequest(messages)) == str(
        [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "t"}, {"type": "image"}]},
            assistant(None, reasoning_content="r", thinking="r", tool_calls=[
                    {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1, "y": None}}},
                    {"type": "function", "function": {"name": "g", "arguments": {}}},
                ]),
            {"role": "tool", "content": "out", "name": "f", "tool_call_id": "c1", "weight": 0.5},
        ]
    )  # fmt: skip
    form = ViewForm(none_content="empty", arguments="json", image="image_url")
    shown = show.render(RenderRequest(messages), form)
    assert "'content': ''" in shown
    assert "'arguments': '{\"x\": 1, \"y\": null}'" in shown
    assert "{'type': 'image_url', 'image_url': {}}" in shown
    parts = [Message(role="user", content=(TextPart("a"), TextPart("b")))]
    flat = show.render(RenderRequest(parts), ViewForm(content="text"))
    assert flat == "[{'role': 'user', 'content': 'ab'}]"


def test_paths_name_the_value():
    messages = [Message(role="user", content=(TextPart("a"), TextPart("b")), name="n")]
    template = ChatTemplate("{{ messages[0].content[1].text }}{{ messages[0].name }}{{ tools[0].k }}")
    text = template.render(RenderRequest(messages, tools=[{"k": "v"}]))
    assert [(start, stop, origin.path, origin.kind) for start, stop, origin in text.spans] == [
        (0, 1, "messages[0].content[1].text", "content"),
        (1, 2, "messages[0].name", "name"),
        (2, 3, "tools[0]", "tools"),
    ]
