"""Where reasoning begins and ends: in the prompt, in the completion, in neither."""

import pytest
from syrupy.assertion import SnapshotAssertion

from kit import error_of
from mmrender import ParsedResponse
from mmrender.errors import InputError
from mmrender.messages import Message, TextPart, ThinkingPart
from parsing_cases import ADDED, BODIES, TAIL, THINKING, Case, case_with, written_case

OPENED = TAIL.replace("assistant\\n'", "assistant\\n<think>\\n'")


def opening_case() -> Case:
    """A template whose generation prompt opens the reasoning block."""
    body = BODIES["json_tags"].replace("{%- if m.reasoning_content %}", "{%- if true %}", 1)
    body = body.replace("m.reasoning_content", "(m.reasoning_content or '')")
    return case_with(body, THINKING, tail=OPENED)


def parse(case: Case, text: str, prompt: str | None = None) -> ParsedResponse:
    encode = case.tokenizer.encode
    return case.parser.parse(encode(text), prompt_ids=None if prompt is None else encode(prompt))


def read(parsed: ParsedResponse) -> tuple[str | None, bool, str]:
    return parsed.reasoning_content, parsed.reasoning_closed, parsed.content


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", ("Hm.", True, "Yes.")),
        ("<think>\n\n Hm. \n\n</think>\n\n\n Yes.\n", ("\n Hm. \n", True, "\n Yes.\n")),
        ("<think>Hm.</think>Yes.", ("Hm.", True, "Yes.")),
        ("\n<think>\nHm.\n</think>\n\nYes.", ("Hm.", True, "Yes.")),
        ("Well, <think>\nHm.\n</think>\n\nyes.", ("Hm.", True, "Well, yes.")),
        ("<think>\n\n</think>\n\nYes.", (None, True, "Yes.")),
        ("<think>\n</think>\n\nYes.", (None, True, "Yes.")),
        ("<think>\nHm.", ("Hm.", False, "")),
        ("<think>\n", ("", False, "")),
        ("Hm.</think>\n\nYes.", ("Hm.", True, "Yes.")),
        ("Yes.", (None, True, "Yes.")),
        ("", (None, True, "")),
        ("<think>\na\n</think>\n\nb<think>\nc\n</think>", ("a", True, "b<think>\nc\n</think>")),
    ],
)
def test_a_block_in_the_completion(text: str, expected: tuple[str | None, bool, str]) -> None:
    assert read(parse(written_case("json_tags"), text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm.\n</think>\n\nYes.", ("Hm.", True, "Yes.")),
        ("\nHm.\n</think>\n\nYes.", ("\nHm.", True, "Yes.")),
        ("\n</think>\n\nYes.", (None, True, "Yes.")),
        ("</think>\n\nYes.", (None, True, "Yes.")),
        ("Hm.", ("Hm.", False, "")),
        ("", ("", False, "")),
        ("<think>\nHm.\n</think>\n\nYes.", ("Hm.", True, "Yes.")),
        (f"Shall I {CALL} that?", (f"Shall I {CALL} that?", False, "")),
    ],
)
def test_a_block_that_the_prompt_opens(text: str, expected: tuple[str | None, bool, str]) -> None:
    case = opening_case()
    assert case.parser.profile.generation_prompt == "<|turn|>assistant\n<think>\n"
    assert read(parse(case, text)) == expected
    assert read(parse(case, text, "<|turn|>user\nHi<|end|><|turn|>assistant\n<think>\n")) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|turn|>user\n<think><|end|><|turn|>assistant\n", (None, True, "Hm.")),
        ("<|turn|>assistant\n<think>\n\n</think>\n\n", (None, True, "Hm.")),
        ("<|turn|>assistant\n<think>\nFirst, ", ("Hm.", False, "")),
        ("<|turn|>assistant\n</think><think>", ("Hm.", False, "")),
    ],
)
def test_the_prompt_given_decides(prompt: str, expected: tuple[str | None, bool, str]) -> None:
    for case in (opening_case(), written_case("json_tags")):
        assert read(parse(case, "Hm.", prompt)) == expected


def test_what_the_prompt_leaves_to_write_before_the_reasoning() -> None:
    case = opening_case()
    assert read(parse(case, "\nHm.", "<|turn|>assistant\n<think>")) == ("Hm.", False, "")
    assert read(parse(case, "\nHm.", "<|turn|>assistant\n<think>\n")) == ("\nHm.", False, "")


def test_a_delimiter_inside_a_call_ends_nothing() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"b": "</think>"}}\n</tool_call>'
    parsed = parse(written_case("json_tags"), call)
    assert (parsed.reasoning_content, parsed.content) == (None, "")
    assert parsed.tool_calls[0].arguments == {"b": "</think>"}


def test_reasoning_that_the_template_reads_from_content_parts() -> None:
    body = """{%- if m.content is string %}{{- m.content }}{%- else %}{%- for p in m.content %}
    {%- if p.type == 'thinking' %}{{- '[THINK]' + p.thinking + '[/THINK]' }}{%- else %}{{- p.text }}
    {%- endif %}{%- endfor %}{%- endif %}"""
    case = case_with(body, ["[THINK]", "[/THINK]"])
    message = Message(role="assistant", content=(ThinkingPart("Hm."), TextPart("Yes.")))
    assert parse(case, "[THINK]Hm.[/THINK]Yes.").to_message() == message


@pytest.mark.parametrize("thinks", ["<|channel|>analysis", " to=self", "self"])
@pytest.mark.parametrize("says", ["<|channel|>final", " to=user", "user"])
def test_the_same_token_opens_reasoning_and_content(thinks: str, says: str) -> None:
    """What sets the two apart comes before it."""
    again = "<|close|><|turn|>assistant\\n"
    body = f"""{{%- if m.reasoning_content %}}{{{{- '{thinks}<|message|>' + m.reasoning_content }}}}
    {{{{- '{again}' }}}}{{%- endif %}}{{{{- '{says}<|message|>' + (m.content or '') }}}}"""
    case = case_with(body, ["<|channel|>", "<|message|>", "<|close|>"])
    again = again.replace("\\n", "\n")
    for content in ("Yes.", "", " to=no"):
        assert read(parse(case, f"{says}<|message|>{content}")) == (None, True, content)
        text = f"{thinks}<|message|>Hm.{again}{says}<|message|>{content}"
        assert read(parse(case, text)) == ("Hm.", True, content)
    assert read(parse(case, f"{thinks}<|message|>Hm.")) == ("Hm.", False, "")
    other = f"{thinks[:4]}me<|message|>Yes."
    assert read(parse(case, other)) == (None, True, other)


def test_reasoning_that_the_template_prints_beside_calls_only() -> None:
    body = BODIES["gemma"].replace("if m.reasoning_content", "if m.tool_calls and m.reasoning_content")
    case = case_with(body, ADDED["gemma"])
    assert str(case.parser.choice) == "gemma, proved"
    call = "<|tool_call>call:f{}<tool_call|>"
    assert read(parse(case, f"<|channel>thought\nHm.\n<channel|>{call}Yes.")) == ("Hm.", True, "Yes.")


def test_a_block_that_the_prompt_opens_and_the_template_drops_or_does_not_know() -> None:
    text = "Hm.\n</think>\n\nYes."
    dropping = case_with("{{- m.content.split('</think>')[-1].lstrip('\\n') }}", THINKING, tail=OPENED)
    assert read(parse(dropping, text)) == ("Hm.", True, "Yes.")
    unknown = case_with("{{- m.content }}", THINKING, tail=OPENED)
    assert unknown.parser.profile.reasoning is None
    assert read(parse(unknown, text)) == (None, True, text)


def test_stop_tokens_are_taken_from_the_end_only() -> None:
    case = written_case("json_tags")
    parsed = parse(case, "a<|end|>b<|end|><|end|>")
    assert (parsed.content, parsed.stopped) == ("a<|end|>b", True)
    assert not parse(case, "a").stopped


def test_an_unknown_grammar_is_refused(sentence: SnapshotAssertion) -> None:
    assert error_of(InputError, case_with, "{{- m.content }}", grammar="hermes") == sentence
