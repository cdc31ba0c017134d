"""Small templates that print each tool-call format, and small tokenizers, for the tests of parsing.

The templates were written for these tests from the public descriptions of the formats. Each turn is
`<|turn|>role\\n...<|end|>`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from mmrender.messages import Message
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing.parser import ResponseParser
from mmrender.parsing.prove import build_parser
from mmrender.template.chat import ChatTemplate
from mmrender.template.known import KnownTemplate
from mmrender.template.probes import Probes, user
from mmrender.template.sources import load_templates

HEAD = """{%- for m in messages %}{{- '<|turn|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"""
TAIL = """{%- else %}{{- m.content }}{%- endif %}{{- '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}"""
CONTENT = "{%- if m.content %}{{- m.content }}{%- endif %}"
THINK = """{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content }}
{{- '\\n</think>\\n\\n' }}{%- endif %}"""
EACH = "{%- for c in m.tool_calls or [] %}{%- set c = c.function %}"
TURN = THINK + CONTENT + EACH

BODIES: dict[str, str] = {
    "json_tags": TURN
    + """{{- '\\n' if m.content or not loop.first else '' }}
    {{- '<tool_call>\\n{"name": "' + c.name + '", "arguments": ' }}{{- c.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
    {%- endfor %}""",
    "xml_function": TURN
    + """{{- '\\n\\n' if m.content and loop.first else '' }}
    {{- '<tool_call>\\n<function=' + c.name + '>\\n' }}
    {%- for k, v in c.arguments | items %}{{- '<parameter=' + k + '>\\n' }}
    {{- v if v is string else v | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
    {{- '</function>\\n</tool_call>\\n' }}{%- endfor %}""",
    "arg_key_value": TURN
    + """{{- '\\n<tool_call>' + c.name + '\\n' }}{%- for k, v in c.arguments | items %}
    {{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{- v if v is string else v | tojson }}
    {{- '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}""",
    "kimi_sections": THINK
    + CONTENT
    + """{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}
    {{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
    {{- c.function.arguments | tojson }}{{- '<|tool_call_end|>' }}{%- endfor %}
    {{- '<|tool_calls_section_end|>' }}{%- endif %}""",
    "mistral_json": CONTENT
    + """{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}
    {{- '{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
    {{- ', "id": "' + c.id + '"}' }}{{- ', ' if not loop.last else ']' }}{%- endfor %}{%- endif %}""",
    "mistral_args": """{%- if m.reasoning_content %}
    {{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}"""
    + CONTENT
    + EACH
    + """{{- '[TOOL_CALLS]' + c.name + '[ARGS]' }}{{- c.arguments | tojson }}{%- endfor %}""",
    "mistral_call_id": CONTENT
    + """{%- for c in m.tool_calls or [] %}
    {{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}
    {{- c.function.arguments | tojson }}{%- endfor %}""",
    "llama_json": """{%- if m.tool_calls %}{%- if m.tool_calls | length > 1 %}
    {{- raise_exception('one call at a time') }}{%- endif %}{%- set c = m.tool_calls[0].function %}
    {{- '{"name": "' + c.name + '", "parameters": ' }}{{- c.arguments | tojson }}{{- '}' }}
    {%- else %}"""
    + CONTENT
    + "{%- endif %}",
    "pythonic": """{%- macro py(v) %}{%- if v is string %}{{- "'" }}
    {{- v | replace('\\\\', '\\\\\\\\') | replace("'", "\\\\'") | replace('\\n', '\\\\n') }}{{- "'" }}
    {%- elif v is mapping %}{{- '{' }}{%- for k, w in v | items %}{{- py(k) + ': ' + py(w) }}
    {{- ', ' if not loop.last else '' }}{%- endfor %}{{- '}' }}
    {%- elif v is boolean or v is none or v is number %}{{- v }}
    {%- else %}{{- '[' }}{%- for w in v %}{{- py(w) }}{{- ', ' if not loop.last else '' }}{%- endfor %}
    {{- ']' }}{%- endif %}{%- endmacro %}{%- if m.tool_calls %}{{- '[' }}"""
    + EACH
    + """{{- c.name + '(' }}{%- for k, v in c.arguments | items %}{{- k + '=' + py(v) }}
    {{- ', ' if not loop.last else '' }}{%- endfor %}{{- ')' }}{{- ', ' if not loop.last else ']' }}
    {%- endfor %}{%- else %}"""
    + CONTENT
    + "{%- endif %}",
    "gemma": """{%- macro ga(v) %}{%- if v is string %}{{- '<|"|>' + v + '<|"|>' }}
    {%- elif v is mapping %}{{- '{' }}{%- for k, w in v | dictsort %}{{- k + ':' + ga(w) }}
    {{- ',' if not loop.last else '' }}{%- endfor %}{{- '}' }}
    {%- elif v is boolean %}{{- 'true' if v else 'false' }}{%- elif v is none or v is number %}{{- v }}
    {%- else %}{{- '[' }}{%- for w in v %}{{- ga(w) }}{{- ',' if not loop.last else '' }}{%- endfor %}
    {{- ']' }}{%- endif %}{%- endmacro %}
    {%- if m.reasoning_content %}{{- '<|channel>thought\\n' + m.reasoning_content }}
    {{- '\\n<channel|>' }}{%- endif %}"""
    + EACH
    + """{{- '<|tool_call>call:' + c.name + ga(c.arguments) + '<tool_call|>' }}{%- endfor %}"""
    + CONTENT,
    "minimax": THINK
    + CONTENT
    + """{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}"""
    + EACH
    + """{{- '<invoke name="' + c.name + '">\\n' }}{%- for k, v in c.arguments | items %}
    {{- '<parameter name="' + k + '">' }}{{- v if v is string else v | tojson }}{{- '</parameter>\\n' }}
    {%- endfor %}{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}""",
}

BODIES["pythonic_section"] = (
    BODIES["pythonic"]
    .partition("{%- else %}" + CONTENT)[0]
    .replace("{%- if m.tool_calls %}", CONTENT + "{%- if m.tool_calls %}{{- '<|tool_call_start|>' }}")
    + "{{- '<|tool_call_end|>' }}{%- endif %}"
)
BODIES["json_section"] = (
    BODIES["mistral_json"]
    .replace("[TOOL_CALLS] [", "\\n<tool_calls>[")
    .replace("else ']'", "else ']</tool_calls>'")
)
BODIES["function_gemma"] = (
    BODIES["gemma"]
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace('<|"|>', "<escape>")
)

THINKING = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ADDED: dict[str, tuple[str, ...]] = {
    "json_tags": THINKING,
    "xml_function": THINKING,
    "arg_key_value": (*THINKING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_sections": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "mistral_json": ("[TOOL_CALLS]",),
    "mistral_args": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "mistral_call_id": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "llama_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "gemma": ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "pythonic_section": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "json_section": ("<tool_calls>", "</tool_calls>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}


def byte_level(added: Sequence[str]) -> Tokenizer:
    """A byte-level tokenizer that merges a few pairs, across delimiters too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "o"), ("to", "o"), ("<", "/"), ("}", "<"), (">", "<"), ("Ġ", "a"), ("Ċ", "Ċ"), ("æ", "Ĺ")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    engine = Engine(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    return _with_added(engine, added)


def sentence_piece(added: Sequence[str]) -> Tokenizer:
    """A tokenizer in SentencePiece's way: a mark for spaces, bytes for what has no token."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["\u2581", "日"]
    merges = [("t", "o"), ("to", "o"), ("<", "/"), ("}", "<"), ("\u2581", "a")]
    tokens = ["<unk>", *alphabet, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    engine = Engine(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_added(engine, added)


def _with_added(engine: Engine, added: Sequence[str]) -> Tokenizer:
    engine.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    engine.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<|turn|>", "<|end|>")]
    )
    return Tokenizer(engine)


@dataclass(frozen=True)
class Case:
    """A template, a tokenizer, and the parser built for them."""

    name: str
    parser: ResponseParser
    probes: Probes
    tokenizer: Tokenizer

    def completion(
        self, message: Message, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and of what a model that says exactly this message would sample."""
        turn = self.probes.turn(message, self.parser.profile.stop_ids, tools=tools)
        assert turn is not None, "the template refuses the message"
        prompt = self.probes.generation_prompt([user()], tools=tools)
        assert turn.header == prompt, "the turn does not begin with the generation prompt"
        return self.tokenizer.encode(turn.header), self.tokenizer.encode(turn.text)


def case_of(
    name: str,
    source: str,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    *,
    special_tokens: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    grammar: str | None = None,
) -> Case:
    """Build the parser of a template."""
    template = ChatTemplate(source, special_tokens=special_tokens)
    known = KnownTemplate(template, tokenizer, arguments or {}, model_stop_ids=frozenset(stop_ids))
    return Case(name, build_parser(known, grammar=grammar), known.probes, tokenizer)


def case_with(body: str, added: Sequence[str] = (), *, tail: str = TAIL, grammar: str | None = None) -> Case:
    """The case of an assistant turn's body, and of a tokenizer with these added tokens."""
    tokenizer = byte_level(added)
    return case_of("case", HEAD + body + tail, tokenizer, [tokenizer.added_ids["<|end|>"]], grammar=grammar)


@cache
def written_case(name: str, *, added_tokens: bool = True, kind: str = "byte_level") -> Case:
    """The case of one of the templates here; its delimiters are added tokens, or ordinary text."""
    make = byte_level if kind == "byte_level" else sentence_piece
    tokenizer = make(ADDED[name] if added_tokens else ())
    return case_of(name, HEAD + BODIES[name] + TAIL, tokenizer, [tokenizer.added_ids["<|end|>"]])


@cache
def model_case(folder: Path, **arguments: Any) -> Case:
    """The case of a model directory, with arguments of its template."""
    model = find_model(folder)
    tokenizer = Tokenizer.load(model)
    source, stops = load_templates(model)["default"], model.stop_token_ids(tokenizer.token_id)
    tokens = model.special_tokens
    return case_of(folder.name, source, tokenizer, stops, special_tokens=tokens, arguments=arguments)
