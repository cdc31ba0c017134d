"""Law 7 in every place that content comes from, times every added token: no special id but the template's own."""

import pytest

from mmrender.errors import SpecialTokenError
from mmrender.template import chat, environment, filters
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
