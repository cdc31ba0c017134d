"""The templates of a model, and what is known about each, in memory and on disk.

What one process has probed, no other one probes again. The name of an entry on disk is a digest of everything
that its content depends on: the template, the special and added tokens that it is used with, the template
arguments that it reads, its limits, this library's code for text, and the releases of Jinja and `tokenizers`.
So entries never go stale. A file that cannot be read counts as missing and is written again. Both memory and
disk are bounded; the least recently used entries go first.
"""

import datetime
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from blake3 import blake3

from mmrender.caching import MOST_FILES, FileCache, LRUCache, cache_folder, cached_property, digest_of_code
from mmrender.content.values import NoKeyError, plain_key
from mmrender.errors import RenderError
from mmrender.messages import RenderRequest
from mmrender.model.files import ModelDir
from mmrender.model.tokenizer import Tokenizer
from mmrender.processes import BoundedProcesses
from mmrender.template.chat import ChatTemplate, ToolImages
from mmrender.template.limits import TemplateLimits
from mmrender.template.probes import WORD, Probes
from mmrender.template.processes import IsolatedTemplate
from mmrender.template.profile import TemplateProfile, probe_template
from mmrender.template.sources import choose_template, load_templates
from mmrender.template.text import TracedStr, clip, plain

Value = TypeVar("Value")

_ROOMS = ("content", "model", "template", "turns", "tokens", "bridge", "parsing")
_CODE = ("*.py", *(f"{room}/*.py" for room in _ROOMS))
"""Files of this library whose code may change a finding."""
FOLDER = "profiles"
"""Where findings are kept, within the folder of `MMRENDER_CACHE`."""
_MEMORY_ENTRIES = 1024
_MOST_SETTINGS = 256
"""Sets of template arguments that are remembered; each has a profile, a bridge and a parser of its own."""


_PRINTED = f"{WORD}Z"
"""Text of arguments that a template only prints, in probes."""


class Findings:
    """Findings about one template with one set of arguments, for many threads and processes.

    `folder` keeps them between processes, as small JSON files named after `facts`, all that they depend on as
    plain values. Without folder or facts, only memory is used.
    """

    def __init__(
        self, folder: Path | None = None, facts: dict[str, Any] | None = None, *, max_files: int = MOST_FILES
    ) -> None:
        self._memory: LRUCache[Hashable, Any] = LRUCache(_MEMORY_ENTRIES)
        self._files = FileCache(folder if facts is not None else None, max_files)
        self._digest = ""
        if self._files.folder is not None:
            content = msgspec.msgpack.encode([code_digest(), facts], order="deterministic")
            self._digest = blake3(content).hexdigest(length=16)

    def remember(self, about: Hashable, find: Callable[[], Value]) -> Value:
        """Return what is known about something, or find it out and keep it in memory alone."""
        known: Value = self._memory.get_or_compute(about, find)
        return known

    def get_or_find(self, about: Hashable, kind: type[Value], find: Callable[[], Value]) -> Value:
        """Return what is known about something, or find it out and keep it; its `repr` names it on disk."""

        def load() -> Value:
            if self._files.folder is None:
                return find()
            own = blake3(repr(about).encode("utf-8", "surrogatepass")).hexdigest(length=8)
            name = f"{self._digest}-{own}"
            value = self._files.get(name, kind)
            if value is None:
                value = find()
                self._files.put(name, value)
            return value

        known: Value = self._memory.get_or_compute(about, load)
        return known


@cache
def code_digest() -> str:
    """Digest of the code that probes, and of the releases that it runs on."""
    from importlib.metadata import version

    return " ".join([digest_of_code(_CODE), *map(version, ("jinja2", "tokenizers"))])


@dataclass(frozen=True, eq=False)
class KnownTemplate:
    """One template with the template arguments that it reads, and the findings about it.

    `model_stop_ids` are the stop tokens that the model's files name; `tool_images` is as for `Probes`;
    `probed` are the arguments that probes are rendered with, if findings are shared with those.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    arguments: Mapping[str, Any]
    findings: Findings = field(default_factory=Findings)
    model_stop_ids: frozenset[int] = frozenset()
    tool_images: ToolImages = "tool"
    probed: Mapping[str, Any] | None = None

    @cached_property
    def profile(self) -> TemplateProfile:
        """The findings of all probes."""
        probes = Probes(
            self.template, self.tokenizer, self.probed or self.arguments, tool_images=self.tool_images
        )
        probe = partial(probe_template, probes, self.model_stop_ids)
        return self.findings.get_or_find("profile", TemplateProfile, probe)

    def render(self, request: RenderRequest) -> TracedStr:
        """Render a request in the form found; errors as for `ChatTemplate.render`.

        A generation prompt that the template writes inside its loop belongs to the coming turn, so it is
        attributed to no message.
        """
        text = self.template.render(request, self.profile.form)
        if not request.add_generation_prompt:
            return text
        cut = len(text) - len(self.profile.generation_prompt_of(text))
        if cut == len(text) or any(stop > cut and origin.is_content for _, stop, origin in text.spans):
            return text
        return TracedStr(plain(text), clip(text.spans, 0, cut))

    @cached_property
    def probes(self) -> Probes:
        """Renders further probes."""
        return Probes(self.template, self.tokenizer, self.probed or self.arguments, form=self.profile.form)


def _is_source(chat_template: str, sources: Mapping[str, str]) -> bool:
    """Whether a text is a template rather than the name of one."""
    return chat_template not in sources and ("{{" in chat_template or "{%" in chat_template)


def _printed_as(name: str, value: Any, template: ChatTemplate) -> Any:
    """The value of an argument in probes: one for all texts if the template only prints them."""
    is_text = type(value) is str and value != ""
    return _PRINTED if is_text and name in template.printed_arguments else value


class TemplateSet:
    """Compiled templates by name. Safe to use from many threads.

    Args:
        sources: Jinja texts by name.
        tokenizer: The model's tokenizer.
        special_tokens: Template variables such as `bos_token`.
        chosen: Name of the template to use instead of the usual choice.
        model_stop_ids: Stop tokens that the model's files name.
        limits: Bounds on one run of a template.
        clock: Gives the time that `strftime_now` formats.
        processes: Child processes that compile and run the templates; None runs them in this one.
        folder: Where findings are kept between processes, or None.
        tool_images: `"user"` moves images out of tool results, into a user turn after them, for templates
            that write none there.

    Raises:
        RenderError: `tool_images` is neither of the two.
        TemplateError: There is no template to use, or one does not compile.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chosen: str | None = None,
        model_stop_ids: Sequence[int] = (),
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        processes: BoundedProcesses | None = None,
        folder: Path | None = None,
        tool_images: ToolImages = "tool",
    ) -> None:
        if tool_images not in get_args(ToolImages):
            raise RenderError(
                "tool_images is not understood", expected="'tool' or 'user'", got=repr(tool_images)
            )
        self._tool_images: ToolImages = tool_images
        self._names = {
            tools: choose_template(sources, name=chosen, has_tools=tools) for tools in (False, True)
        }
        self._tokenizer = tokenizer
        self._model_stop_ids = frozenset(model_stop_ids)
        self.special_tokens = dict(special_tokens or {})
        kind = ChatTemplate if processes is None else partial(IsolatedTemplate, processes=processes)
        compile_one = partial(kind, special_tokens=self.special_tokens, limits=limits, clock=clock)
        self._templates = {name: compile_one(sources[name], name=name) for name in {*self._names.values()}}
        self._folder = folder
        self._known: LRUCache[tuple[str, Hashable], KnownTemplate] = LRUCache(_MOST_SETTINGS)

    @classmethod
    def load(
        cls,
        model: ModelDir,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        processes: BoundedProcesses | None = None,
        profile_cache: bool = True,
        tool_images: ToolImages = "tool",
    ) -> "TemplateSet":
        """Compile a model's templates, or `chat_template`: Jinja text, or the name of one of them.

        `profile_cache` keeps findings on disk; other arguments and errors are those of the class.
        """
        sources = load_templates(model)
        if chat_template is not None and _is_source(chat_template, sources):
            sources, chat_template = {"default": chat_template}, None
        return cls(
            sources,
            tokenizer,
            special_tokens=model.special_tokens,
            chosen=chat_template,
            model_stop_ids=model.stop_token_ids(tokenizer.token_id),
            limits=limits,
            clock=clock,
            processes=processes,
            folder=cache_folder(FOLDER) if profile_cache else None,
            tool_images=tool_images,
        )

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Variables that one of the templates looks up and a caller may give."""
        return tuple(sorted({name for template in self._templates.values() for name in template.arguments}))

    def find(self, arguments: Mapping[str, Any], *, has_tools: bool) -> KnownTemplate:
        """The template for a conversation with or without tools, and what is known about it.

        Arguments that the template does not read make no difference; texts that it only prints, outside all
        turns, share their findings. Arguments that are not plain values are probed for anew each time.

        Args:
            arguments: Template variables.
            has_tools: Whether the conversation has tools.
        """
        name = self._names[has_tools]
        template = self._templates[name]
        read = {key: value for key, value in arguments.items() if key in template.arguments}
        try:
            key = plain_key(dict(sorted(read.items())))
        except NoKeyError:
            return self._build(template, read, None)

        def build() -> KnownTemplate:
            probed = {key: _printed_as(key, value, template) for key, value in read.items()}
            if probed != read:
                shared = self.find(probed, has_tools=has_tools)
                if _PRINTED not in repr(shared.profile):
                    return replace(shared, arguments=read, probed=probed)
            return self._build(template, read, repr(key))

        return self._known.get_or_compute((name, key), build)

    def _build(
        self, template: ChatTemplate, arguments: Mapping[str, Any], setting: str | None
    ) -> KnownTemplate:
        facts = {
            "source": template.source,
            "special_tokens": template.special_tokens,
            "limits": asdict(template.limits),
            "added_tokens": self._tokenizer.added_ids,
            "special_ids": sorted(self._tokenizer.special_ids),
            "vocabulary": self._tokenizer.vocab_size,
            "stop_ids": sorted(self._model_stop_ids),
            "arguments": None if setting is None else setting.encode("utf-8", "surrogatepass"),
            "tool_images": self._tool_images,
        }
        is_kept = setting is not None and not template.reads_clock
        findings = Findings(self._folder, facts if is_kept else None)
        return KnownTemplate(
            template, self._tokenizer, arguments, findings, self._model_stop_ids, self._tool_images
        )
