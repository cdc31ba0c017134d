"""Run a chat template, compiled once, with provenance and named errors.

A template sees plain dicts whose texts are traced, in the shapes of Transformers: parts as `{"type": ...}`,
tool calls as `{"type": "function", "id", "function": {"name", "arguments"}}`, reasoning under
`reasoning_content` and `thinking`. Media parts have no payload, since templates do not read one.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from mmrender.caching import cached_property
from mmrender.errors import (
    TemplateError,
    TemplateLimitError,
    TemplateRefusedError,
    TemplateRuntimeError,
    TemplateSecurityError,
    TemplateSyntaxError,
)
from mmrender.messages import MediaPart, Message, Part, RenderRequest, Role, TextPart, ThinkingPart, ToolCall
from mmrender.model.files import SPECIAL_TOKEN_KEYS
from mmrender.template.compiler import names_printed, names_read
from mmrender.template.environment import (
    CLOCK,
    HANDLED,
    Joiner,
    OwnedDict,
    RefusedByTemplate,
    TracingEnvironment,
    handled_message,
)
from mmrender.template.limits import BUDGET, Budget, TemplateLimits
from mmrender.template.prefill import Prefill
from mmrender.template.text import Kind, Origin, TracedStr
from mmrender.template.values import traced

_ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
GIVEN = frozenset((*TracingEnvironment().globals, *SPECIAL_TOKEN_KEYS, *_ALWAYS_GIVEN))
"""Variables that a caller cannot set."""

# Errors name the types of values as the template's author knows them.
_TRACED_NAME = re.compile(
    r"(?:mmrender\.template\.\w+\.)?\b(Traced(?:Str|Int|Float|Bool|Dict|List|Null)|OwnedDict)\b"
)
_PLAIN_NAMES = {"TracedNull": "NoneType", "OwnedDict": "dict"}


ToolImages: TypeAlias = Literal["tool", "user"]


def _plain_name(match: re.Match[str]) -> str:
    name = match.group(1)
    return _PLAIN_NAMES.get(name, name.removeprefix("Traced").lower())


@dataclass(frozen=True, slots=True)
class ViewForm:
    """Shapes that a template takes, found by probing.

    Attributes:
        none_content: Form of absent content: `None`, a missing key, or empty text.
        arguments: Form of the arguments of a call: parsed, or JSON text.
        image: Type of an image part.
        content: Whether the template takes text and lists of parts, text only, or lists only.
        tool_images: Whether images in tool results stay there, or follow in a user turn of their own.
    """

    none_content: Literal["none", "absent", "empty"] = "none"
    arguments: Literal["parsed", "json"] = "parsed"
    image: Literal["image", "image_url"] = "image"
    content: Literal["parts", "text", "list"] = "parts"
    tool_images: ToolImages = "tool"


class ChatTemplate:
    """One template of a model.

    Args:
        source: Jinja text.
        name: Name in errors, such as `default` or `tool_use`.
        special_tokens: Variables such as `bos_token`.
        limits: Bounds on one rendering.
        clock: Returns the time for `strftime_now`.

    Attributes:
        reads_clock: Whether the text may depend on the current date.
        reads_documents: Whether the text may contain documents.

    Raises:
        TemplateSyntaxError: The source does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "default",
        special_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self.source = source
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.limits = limits or TemplateLimits()
        self.reads_clock = re.search(r"\bstrftime_now\b", source) is not None
        self.reads_documents = re.search(r"\bdocuments\b", source) is not None
        self._clock = clock
        self._environment = TracingEnvironment()
        self._compile()

    def _compile(self) -> None:
        problem = f"the chat template {self.name!r} does not compile"
        try:
            self.source.encode()
            self._template = self._environment.compile_template(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(
                problem,
                where=f"line {error.lineno}",
                got=(error.message or type(error).__name__).rstrip("."),
                remedy="Pass a corrected one as chat_template=<Jinja text>",
            ) from error
        except RecursionError as error:
            raise TemplateSyntaxError(problem, got="too deep a nesting") from error
        except UnicodeEncodeError as error:
            raise TemplateSyntaxError(problem, expected="text in UTF-8", got=str(error)) from error

    @cached_property
    def syntax_tree(self) -> nodes.Template:
        """The parsed source."""
        return self._environment.parse(self.source)

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Variables that the template looks up and a caller may set, such as `enable_thinking`."""
        tree = self.syntax_tree
        # Jinja's own analysis also names variables that a branch assigns and then reads itself.
        looked_up = jinja2.meta.find_undeclared_variables(tree) & names_read(tree.body, set())
        known = {*self.special_tokens, *GIVEN}
        return tuple(sorted(looked_up - known))

    @cached_property
    def printed_variables(self) -> frozenset[str]:
        """The `variables` whose text, unless it is empty, the template only prints."""
        return frozenset(names_printed(self.syntax_tree).intersection(self.variables))

    def render(self, request: RenderRequest, form: ViewForm | None = None) -> TracedStr:
        """Render a request, each character attributed.

        Args:
            request: The conversation, and the variables of the template.
            form: Shapes that this template takes.

        Raises:
            MessageError: The last message lacks the text to continue.
            RenderError: The template changes that text, or writes content after it.
            TemplateRefusedError: The template called `raise_exception`. The error keeps its text.
            TemplateRuntimeError: The template failed on these messages.
            TemplateSecurityError: The template reached for something outside the sandbox.
            TemplateLimitError: The template ran too long, recursed too deep or wrote too much.
        """
        form = form or ViewForm()
        views = [_view(message, index, form) for index, message in enumerate(request.messages)]
        if form.tool_images == "user":
            views = _with_moved_media(views, request.messages, form)
        prefill = None
        if request.continued is not None:
            prefill = Prefill.of(views[-1], views[-1]._owner, request.continued)
        variables: dict[str, Any] = {
            **self.special_tokens,
            "messages": views,
            "tools": None if request.tools is None else _listed(request.tools, "tools"),
            "documents": None if request.documents is None else _listed(request.documents, "documents"),
            "add_generation_prompt": request.add_generation_prompt,
        }
        for key, value in request.variables.items():
            # Numbers and flags stay as they are: their text is never syntax.
            is_plain = value is None or type(value) in (bool, int, float)
            variables[key] = value if is_plain else traced(value, Origin(-1, None, "documents", key))
        budget, clock, handled = BUDGET.set(Budget(self.limits)), CLOCK.set(self._clock), HANDLED.set({})
        try:
            pieces = self._template.root_render_func(self._template.new_context(variables))
            text = Joiner(root=True).join(pieces)
        except Exception as error:
            raise self._named(error, handled_message()) from error
        finally:
            BUDGET.reset(budget)
            CLOCK.reset(clock)
            HANDLED.reset(handled)
        return text if prefill is None else prefill.cut(text)

    def _named(self, error: Exception, handled: Origin | None) -> TemplateError:
        """Convert an error of Python, Jinja or the template, raised while it handled a message."""
        where = f"chat template {self.name!r}"
        lines = []
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<template>":
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        if lines:
            where = f"{where}, line {self._template.get_corresponding_lineno(lines[-1])}"
        if isinstance(error, TemplateLimitError):
            return TemplateLimitError(
                error.problem, where=where, expected=error.expected, got=error.got, remedy=error.remedy
            )
        if isinstance(error, SecurityError):
            return TemplateSecurityError(_TRACED_NAME.sub(_plain_name, str(error)), where=where)
        got = f"{type(error).__name__}: {_TRACED_NAME.sub(_plain_name, str(error))}"
        if isinstance(error, RecursionError | MemoryError | OverflowError):
            return TemplateLimitError("the chat template used too much", where=where, got=got)
        if handled is not None:
            where = f"{handled.path}, {where}"
        if isinstance(error, RefusedByTemplate):
            return TemplateRefusedError(str(error), where=where)
        return TemplateRuntimeError("the chat template failed on these messages", where=where, got=got)


@lru_cache(maxsize=1 << 16)
def _origin(message: int, role: Role, kind: Kind, path: str) -> Origin:
    """Origin of a field; cached, since conversations share a few hundred of them."""
    where = f"messages[{message}]"
    if kind == "scaffold":
        return Origin(message, role, kind, where)
    return Origin(message, role, kind, f"{where}.{path}", _origin(message, role, "scaffold", ""))


@lru_cache(maxsize=1 << 12)
def _part_origin(message: int, role: Role, part: int) -> Origin:
    """Origin of the text that a template writes for a media part."""
    scaffold = _origin(message, role, "scaffold", "")
    return Origin(message, role, "scaffold", f"{scaffold.path}.content[{part}]", scaffold, part=part)


@lru_cache(maxsize=1 << 12)
def _of_message(message: int, role: Role) -> tuple[TracedStr, Origin, Origin]:
    """The text of the role, the origin of content that is a string, and of the scaffold."""
    text = TracedStr.whole(role, _origin(message, role, "role", "role"))
    return text, _origin(message, role, "content", "content"), _origin(message, role, "scaffold", "")


def _parts(
    content: tuple[Part, ...], index: int, role: Role, form: ViewForm
) -> TracedStr | list[dict[str, Any]]:
    """Parts as the template takes them, without media that move to another turn."""
    parts: list[dict[str, Any]] = []
    moves = role == "tool" and form.tool_images == "user"
    for position, part in enumerate(content):
        path = f"content[{position}]"
        match part:
            case TextPart(text=text):
                origin = _origin(index, role, "content", f"{path}.text")
                parts.append({"type": "text", "text": TracedStr.whole(text, origin)})
            case MediaPart():
                if not moves:
                    parts.append(_media(part, index, role, position, form))
            case ThinkingPart(thinking=thinking):
                origin = _origin(index, role, "reasoning", f"{path}.thinking")
                parts.append({"type": "thinking", "thinking": TracedStr.whole(thinking, origin)})
    # The rest of a tool result is text, since templates without images there often take only text.
    moved = moves and len(parts) < len(content)
    if (form.content == "text" or moved) and all(part["type"] == "text" for part in parts):
        joined = TracedStr("").join([part["text"] for part in parts])
        return [{"type": "text", "text": joined}] if form.content == "list" else joined
    return parts


def _media(part: MediaPart, index: int, role: Role, position: int, form: ViewForm) -> OwnedDict:
    view = OwnedDict(type=part.modality)
    if form.image == "image_url" and part.modality == "image":
        view.update(type="image_url", image_url={})
    view._owner = _part_origin(index, role, position)
    return view


def _call(call: ToolCall, index: int, role: Role, path: str, form: ViewForm) -> dict[str, Any]:
    def origin(field: str) -> Origin:
        return _origin(index, role, "tool_call", f"{path}.{field}")

    arguments = traced(call.arguments, origin("function.arguments"))
    if form.arguments == "json":
        text = json.dumps(call.arguments, ensure_ascii=False)
        arguments = TracedStr.whole(text, origin("function.arguments"))
    view: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        view["id"] = TracedStr.whole(call.id, origin("id"))
    view["function"] = {"name": TracedStr.whole(call.name, origin("function.name")), "arguments": arguments}
    return view


def _with_moved_media(
    views: Sequence[OwnedDict], messages: Sequence[Message], form: ViewForm
) -> list[OwnedDict]:
    """The messages, with a user turn for the media of tool results after each row of them."""
    result: list[OwnedDict] = []
    turn: OwnedDict | None = None
    for index, message in enumerate(messages):
        is_result = message.role == "tool"
        if turn is not None and not is_result:
            result.append(turn)
            turn = None
        if is_result and (media := list(message.media())):
            if turn is None:
                # This turn is not a message: its text belongs to the first result with media.
                user = TracedStr.whole("user", _origin(index, "tool", "role", "role"))
                turn = OwnedDict(role=user, content=[])
                turn._owner = _origin(index, "tool", "scaffold", "")
            turn["content"] += [_media(part, index, "tool", position, form) for position, part in media]
        result.append(views[index])
    return result if turn is None else [*result, turn]


def _view(message: Message, index: int, form: ViewForm) -> OwnedDict:
    """The dict of one message, each text with the origin of its field."""
    role, content = message.role, message.content
    role_text, content_origin, scaffold = _of_message(index, role)
    view = OwnedDict(role=role_text)
    view._owner = scaffold
    if content is None and form.none_content == "empty":
        content = ""
    if isinstance(content, str):
        text = TracedStr.whole(content, content_origin)
        view["content"] = [{"type": "text", "text": text}] if form.content == "list" else text
    elif content is not None:
        view["content"] = _parts(content, index, role, form)
    elif form.none_content == "none":
        view["content"] = None
    if message.reasoning_content is not None:
        origin = _origin(index, role, "reasoning", "reasoning_content")
        reasoning = TracedStr.whole(message.reasoning_content, origin)
        view.update(reasoning_content=reasoning, thinking=reasoning)
    if message.tool_calls:
        view["tool_calls"] = [
            _call(call, index, role, f"tool_calls[{position}]", form)
            for position, call in enumerate(message.tool_calls)
        ]
    if message.name is not None:
        view["name"] = TracedStr.whole(message.name, _origin(index, role, "name", "name"))
    if message.tool_call_id is not None:
        origin = _origin(index, role, "name", "tool_call_id")
        view["tool_call_id"] = TracedStr.whole(message.tool_call_id, origin)
    for key, value in message.extra.items():
        view[key] = traced(value, _origin(index, role, "extra", key))
    return view


def _listed(values: Sequence[Mapping[str, Any]], kind: Literal["tools", "documents"]) -> list[Any]:
    """Tool definitions or documents for the template, each with one origin such as `tools[0]`."""
    return [traced(value, Origin(-1, None, kind, f"{kind}[{index}]")) for index, value in enumerate(values)]
