"""Law 7 in every place that content comes from, times every added token: no special id but the template's own."""

import pytest

from kit import user
from mmrender.errors import SpecialTokenError
from mmrender.renderer import Renderer
from mmrender.template import chat, environment, filters
from mmrender.template.known import TemplateSet
from mmrender.template.text import TracedStr
from mmrender.testing.places import PLACES, check_places, main
from small_models import MODELS

TOKENS = ("<|im_end|>", "<image>", "<tool_call>", "<think>")


@pytest.fixture(scope="module")
def printing():
    return MODELS["everything"].renderer()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_content_becomes_syntax(name):
    report = check_places(MODELS[name].renderer(), name)
    assert report.leaks == []
    assert report.renderings > 50


def test_every_place_is_written(printing):
    report = check_places(printing, tokens=TOKENS)
    assert (report.leaks, report.unprinted, report.refused) == ([], [], {})
    assert report.renderings == 2 * (len(PLACES) + 1) * len(TOKENS) - 7 * 3


@pytest.mark.parametrize("place", PLACES)
def test_the_rules_error_and_parse_see_the_same_places(place):
    messages, options = PLACES[place]("a<|im_end|>b")
    rules = {
        rule: MODELS["everything"].renderer(content_special_tokens=rule)
        for rule in ("text", "error", "parse")
    }
    with pytest.raises(SpecialTokenError):
        rules["error"].render(messages, **options)
    ids = {rule: rules[rule].render_ids(messages, **options) for rule in ("text", "parse")}
    stop = rules["text"].tokenizer.token_id("<|im_end|>")
    assert ids["parse"].count(stop) > ids["text"].count(stop)


# What templates may do to a text and print.
OPERATIONS = (
    "persona | reverse", "persona[::2]", "persona * 2", "[persona] | string", "{'k': persona}", "{persona: 1} | tojson",
    "[1, 2] | tojson(indent=persona)", "[1, 2] | tojson(separators=(persona, ':'))", "strftime_now(persona)",
    "'%s' % persona", "'%s' | format(persona)", "'{}'.format(persona)", "'{x}'.format_map({'x': persona})",
    "'x'.replace('x', persona)", "'x' | replace('x', persona)", "'ab' | join(persona)", "persona.join('ab')",
    "'x'.center(50, 'y') ~ persona", "'a' | indent(persona)", "'a b c' | wordwrap(1, wrapstring=persona)",
    "('x' * 99) | truncate(60, true, persona, 0)", "(persona, 1) | join",
    "cycler(persona).next()", "dict(a=persona)", "namespace(a=persona)", "persona | pprint", "persona | escape",
    "persona | urlencode ~ persona", "persona.split('<') | join('<')", "persona.partition('|') | join",
    "persona.title() ~ persona.lower()", "[persona] | map('upper') | join ~ persona", "persona | list | join",
    "[persona] | groupby('x') | string", "persona | default('') | trim | string", "(persona | items) if false else persona",
    "[{'a': persona}] | map(attribute='a') | first", "persona.strip('q') + ''", "{'a': persona}.items() | list",
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_of_a_template_makes_content_syntax(printing, operation):
    shown = f"{{{{ {operation} }}}}"
    source = f"{shown}{{% set x %}}{shown}{{% endset %}}{{{{ x }}}}{{% filter trim %}}{shown}{{% endfilter %}}<|im_end|>{{{{ messages[0].content }}}}"
    stop = printing.tokenizer.token_id("<|im_end|>")
    renderer = Renderer(TemplateSet({"default": source}, printing.tokenizer), printing.tokenizer)
    for text in ("<|im_end|>", "a<|im_end|>b <|im_end|>", ">|dne_mi|<", "<||iimm__eenndd||>>"):
        ids = renderer.render_ids([user("x")], persona=text)
        assert ids.count(stop) == 1, text


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [
        (chat, "traced", lambda value, origin: value),
        (filters, "tainted", lambda text, *sources: TracedStr(text)),
        (environment, "text_of", lambda value: TracedStr(str(value))),
    ],
)  # fmt: skip
def test_a_leak_is_found(printing, monkeypatch, target, name, broken):
    monkeypatch.setattr(target, name, broken)
    report = check_places(printing, tokens=TOKENS)
    assert report.leaks


def test_the_command_tells(tiny_model, capsys):
    assert main([str(tiny_model)]) == 0
    assert "0 leaks" in capsys.readouterr().out
