"""The grammar is chosen by proof, and what is not proved is said."""

from pathlib import Path

import pytest

from mmrender.parsing.grammars import GRAMMARS
from mmrender.parsing.parser import GrammarChoice
from parsing_cases import BODIES, case_with, model_case, written_case

EXPECTED = {
    "glm4_5v": "arg_key_value, proved",
    "idefics3": "none: the template prints no tool calls",
    "internvl3": "none: the template prints no tool calls",
    "qwen2_5_vl": "none: the template prints no tool calls",
    "qwen3_5": "xml_function, proved",
    "qwen3_vl": "json_tags, proved",
    "qwen3_vl_thinking": "json_tags, proved",
}


TAGS = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("added_tokens", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_one_grammar_reads_each_written_template(name: str, added_tokens: bool) -> None:
    choice = written_case(name, added_tokens=added_tokens).parser.choice
    assert str(choice) == f"{name}, proved"
    assert choice.proved == (name,)
    assert set(choice.reasons) == set(GRAMMARS) - {name}


@pytest.mark.parametrize("name", EXPECTED)
def test_models(shared_models: Path, name: str) -> None:
    assert str(model_case(shared_models / name).parser.choice) == EXPECTED[name]


def test_refused_probes_are_reported() -> None:
    choice = written_case("llama_json").parser.choice
    assert choice.refused == ("2 calls without content", "2 calls beside content")


def test_a_format_of_its_own_is_not_guessed() -> None:
    made = case_with(
        """{{- m.content or '' }}{%- for c in m.tool_calls or [] %}
    {{- 'CALL ' + c.function.name + ' ' }}{{- c.function.arguments | tojson }}{%- endfor %}""",
        TAGS,
    )
    choice = made.parser.choice
    assert str(choice) == "none: no known grammar reads back the calls that the template prints"
    assert choice.grammar is None
    assert choice.reasons["json_tags"] == "1 call without content: 1 calls read as none"


def test_a_template_that_loses_types_or_blanks_is_not_proved() -> None:
    source = BODIES["json_tags"].replace("c.arguments | tojson", "c.arguments | tojson | replace('7', '7.0')")
    choice = case_with(source, TAGS).parser.choice
    assert choice.outcome == "none"
    assert choice.reasons["json_tags"].startswith("1 call without content: arguments of probe_many read as {")
    source = BODIES["json_tags"].replace("{{- m.content }}", "{{- m.content | replace('\\n\\n', '\\n') }}")
    assert case_with(source, TAGS).parser.choice.reasons["json_tags"] == (
        r"1 call beside content: content 'Two words,\n\nthen a second paragraph: 日本.' read as "
        r"'Two words,\nthen a second paragraph: 日本.'"
    )


def test_a_grammar_that_the_caller_names() -> None:
    made = case_with("{{- m.content }}", TAGS, grammar="json_tags")
    assert (
        str(made.parser.choice) == "json_tags, named by the caller, not proved: the template prints no calls"
    )
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parsed = made.parser.parse(made.tokenizer.encode(f"Yes.\n{call}\n{call}\n"))
    # Nothing has shown the line break before a call to be scaffold.
    assert parsed.content == "Yes.\n"
    assert [attempt.status for attempt in parsed.tool_calls] == ["ok", "ok"]
    proved = case_with(BODIES["json_tags"], TAGS, grammar="json_tags")
    assert str(proved.parser.choice) == "json_tags, named by the caller and proved"
    wrong = case_with(BODIES["json_tags"], TAGS, grammar="gemma")
    assert str(wrong.parser.choice) == (
        "gemma, named by the caller, not proved: 1 call without content: 1 calls read as none"
    )


def test_two_grammars_that_read_alike_are_not_chosen_between() -> None:
    choice = GrammarChoice("ambiguous", None, ("a", "b"))
    assert str(choice) == "not chosen: a and b read the calls equally"
