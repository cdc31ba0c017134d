"""The grammar is chosen by proof, and what is not proved is said."""

from pathlib import Path

import pytest

from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing.grammars import GRAMMARS
from mmrender.parsing.parser import GrammarChoice
from mmrender.template.sources import load_templates
from parsing_cases import BODIES, HEAD, TAIL, Case, byte_level, case_of, written_case

EXPECTED = {
    "glm4_5v": "arg_key_value, proved",
    "idefics3": "none: the template prints no tool calls",
    "internvl3": "none: the template prints no tool calls",
    "qwen2_5_vl": "none: the template prints no tool calls",
    "qwen3_5": "xml_function, proved",
    "qwen3_vl": "json_tags, proved",
    "qwen3_vl_thinking": "json_tags, proved",
}


def case(source: str, grammar: str | None = None) -> Case:
    tokenizer = byte_level(["<tool_call>", "</tool_call>"])
    return case_of("case", HEAD + source + TAIL, tokenizer, [tokenizer.added_ids["<|end|>"]], grammar=grammar)


def choice_of(case: Case) -> GrammarChoice:
    return case.parser.choice


@pytest.mark.parametrize("added_tokens", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_one_grammar_reads_each_written_template(name: str, added_tokens: bool) -> None:
    choice = choice_of(written_case(name, added_tokens=added_tokens))
    assert str(choice) == f"{name}, proved"
    assert choice.proved == (name,)
    assert set(choice.reasons) == set(GRAMMARS) - {name}


@pytest.mark.parametrize("name", EXPECTED)
def test_models(shared_models: Path, name: str) -> None:
    model = find_model(shared_models / name)
    tokenizer = Tokenizer.load(model)
    made = case_of(
        name,
        load_templates(model)["default"],
        tokenizer,
        model.stop_token_ids(tokenizer.token_id),
        special_tokens=model.special_tokens,
    )
    assert str(choice_of(made)) == EXPECTED[name]


def test_refused_probes_are_reported() -> None:
    assert choice_of(written_case("llama_json")).refused == (
        "2 calls without content",
        "2 calls beside content",
    )


def test_a_format_of_its_own_is_not_guessed() -> None:
    made = case("""{{- m.content or '' }}{%- for c in m.tool_calls or [] %}
    {{- 'CALL ' + c.function.name + ' ' }}{{- c.function.arguments | tojson }}{%- endfor %}""")
    choice = choice_of(made)
    assert str(choice) == "none: no known grammar reads back the calls that the template prints"
    assert choice.grammar is None
    assert choice.reasons["json_tags"] == "1 call without content: 1 calls read as none"


def test_a_template_that_loses_types_is_not_proved() -> None:
    source = BODIES["json_tags"].replace("c.arguments | tojson", "c.arguments | tojson | replace('7', '7.0')")
    choice = choice_of(case(source))
    assert choice.outcome == "none"
    assert choice.reasons["json_tags"].startswith("1 call without content: arguments of probe_many read as {")


def test_a_template_that_loses_content_whitespace_is_not_proved() -> None:
    source = BODIES["json_tags"].replace("{{- m.content }}", "{{- m.content | replace('\\n\\n', '\\n') }}")
    assert choice_of(case(source)).reasons["json_tags"] == (
        r"1 call beside content: content 'Two words,\n\nthen a second paragraph: 日本.' read as "
        r"'Two words,\nthen a second paragraph: 日本.'"
    )


def test_a_grammar_that_the_caller_names() -> None:
    made = case("{{- m.content }}", grammar="json_tags")
    assert str(choice_of(made)) == "json_tags, named by the caller, not proved: the template prints no calls"
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parsed = made.parser.parse(made.tokenizer.encode(f"Yes.\n{call}\n{call}\n"))
    # Nothing has shown the line break before a call to be scaffold.
    assert parsed.content == "Yes.\n"
    assert [attempt.status for attempt in parsed.tool_calls] == ["ok", "ok"]
    proved = case(BODIES["json_tags"], grammar="json_tags")
    assert str(choice_of(proved)) == "json_tags, named by the caller and proved"
    wrong = case(BODIES["json_tags"], grammar="gemma")
    assert str(choice_of(wrong)) == (
        "gemma, named by the caller, not proved: 1 call without content: 1 calls read as none"
    )


def test_two_grammars_that_read_alike_are_not_chosen_between() -> None:
    grammar = GRAMMARS["json_tags"]
    choice = GrammarChoice("ambiguous", None, ("a", "b"))
    assert str(choice) == "not chosen: a and b read the calls equally"
    assert str(GrammarChoice("proved", grammar, ("json_tags",))) == "json_tags, proved"
