"""A `tekken.json` by mistral-common: its tokens, and its encoding of requests as a chat template.

mistral-common encodes requests without a template, and also generates a Jinja template for a tokenizer. The
template is used only if both give the same tokens for the conversations below. Needs the extra `mistral`.
"""

from pathlib import Path
from typing import Any, TypeAlias

from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import Tokenizer as Engine
from transformers import PreTrainedTokenizerFast
from transformers.integrations.mistral.tokenizer import MistralConverter

Conversation: TypeAlias = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
"""Messages and tools."""
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens of all tokenizers of mistral-common."""
_STRIPPED = """\
{%- set read = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' and message['content'] is string -%}
{%- set message = dict(message, content=message['content'].rstrip(' ')) -%}
{%- endif -%}
{%- set read.messages = read.messages + [message] -%}
{%- endfor -%}
{%- set messages = read.messages -%}
"""
"""Strips blanks at the end of answers, as requests do and generated templates do not."""
_NO_JSON = """\
{%- for message in messages if message['role'] == 'tool' and message['content'] is string -%}
{%- set result = message['content'].strip() -%}
{%- set words = ['true', 'false', 'null', 'NaN', 'Infinity', '-Infinity'] -%}
{%- if result and (result[0] in '{["' or result in words or not result.strip('0123456789.eE+-')) -%}
{{- raise_exception('mistral-common parses the JSON of this tool result, and no chat template can.') -}}
{%- endif -%}
{%- endfor -%}
"""
"""Refuses results of tools that requests of old tokenizers print as parsed JSON."""
_CALL_ID = "a1B2c3D4e"


class TekkenSource:
    """The tokenizer of a `tekken.json` by mistral-common.

    Attributes:
        engine: The same tokenizer by the converter of Transformers.
        names: Names of its special tokens.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._requests = MistralTokenizer.from_file(file, mode=ValidationMode.agnostic)
        self._tokenizer: Any = self._requests.instruct_tokenizer.tokenizer
        self.engine: Engine = MistralConverter(str(file)).converted()
        self.names = {name: text for name, text in _NAMES.items() if self._tokenizer.is_special(text)}

    def encode(self, text: str) -> list[int]:
        """Encode text, in which no special token is looked for."""
        return list(self._tokenizer.encode(text, bos=False, eos=False))

    def template(self) -> tuple[str | None, str]:
        """Return a chat template that equals the encoding of requests, or None and the reason."""
        try:
            generated: str = convert_tokenizer_to_chat_template(self._file)
        except Exception as error:  # noqa: BLE001 - it asserts and raises anything
            return None, f"mistral-common generates no template: {error}"
        reasons = []
        for start, takes_json in (("", True), (_STRIPPED, True), (_NO_JSON + _STRIPPED, False)):
            reasons.append(self._difference(start + generated, takes_json))
            if not reasons[-1]:
                return start + generated, ""
        return None, reasons[0]

    def _difference(self, template: str, takes_json: bool) -> str:
        """Return how a template differs from the encoding of requests, or an empty text."""
        fast = PreTrainedTokenizerFast(tokenizer_object=self.engine, chat_template=template, **self.names)
        reason = "mistral-common refuses every conversation"
        for messages, tools in conversations(takes_json):
            try:
                request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
                expected = self._requests.encode_chat_completion(request).tokens
            except Exception:  # noqa: BLE001, S112 - not every tokenizer knows tools or system messages
                continue
            try:
                text = fast.apply_chat_template(messages, tools=tools, tokenize=False)
                ids = self.engine.encode(text, add_special_tokens=False).ids
            except Exception as error:  # noqa: BLE001 - templates refuse by any error
                return f"its template refuses {str(messages)[:200]}: {error}"
            if ids != expected:
                return f"its template differs from its encoding of {str(messages)[:200]}"
            reason = ""
        return reason


def conversations(takes_json: bool = True) -> list[Conversation]:
    """Return conversations with their tools that distinguish templates, with JSON results of tools or not."""
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "What is the weather\n in Paris, 12 °C?"}
    answer = {"role": "assistant", "content": " It is fine.\n"}
    blanks = {"role": "assistant", "content": "It is fine. \u00a0  "}
    parts = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": "The weather é", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    call = {"name": "weather", "arguments": '{"city": "Paris é", "days": 2}'}
    calls = [{"id": _CALL_ID, "type": "function", "function": call}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "weather", "content": "22 °C"}
    results = ['{"a": [1, 2.50, null]}', " 12 ", "true"] if takes_json else []
    parsed: list[Conversation] = [
        ([user, called, {**result, "content": text}, answer, user], tools) for text in results
    ]
    return [
        *parsed,
        ([user], None),
        ([system, user], None),
        ([system, user, answer, parts], None),
        ([parts, user, answer, user], None),
        ([system, user], tools),
        ([system, user, called, result], tools),
        ([user, called, result, answer, user], tools),
        ([user, answer], None),
        ([user, blanks, user], None),
        ([system, user, blanks], tools),
    ]
