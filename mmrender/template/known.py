"""The templates of a model, and the findings about each, in memory and on disk.

A process uses the findings of all earlier ones. The name of an entry on disk is a digest of everything that
its content depends on: the template, the special and added tokens that it is used with, the template
variables that it reads, its limits, this library's code for text, and the releases of Jinja and `tokenizers`.
So entries never go stale. A file that cannot be read counts as missing and is written again. Memory and disk
are bounded; the least recently used entries go first.
"""

import datetime
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec
from blake3 import blake3

from mmrender.caching import MAX_FILES, FileCache, LRUCache, cache_folder, cached_property, digest_of_code
from mmrender.content.values import NoKeyError, plain_key
from mmrender.errors import TemplateMissingError
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
"""Folder of findings within the folder of `MMRENDER_CACHE`."""
_MAX_FINDINGS = 1024
_MAX_SETTINGS = 256
"""Maximum number of sets of template variables in memory, each with its own profile, bridge and parser."""
_PRINTED = f"{WORD}Z"
"""Text, in probes, of variables that a template only prints."""


class Findings:
    """Findings about one template with one set of variables, for many threads and processes.

    `folder` keeps them between processes, as small JSON files whose names depend on `facts`: plain values
    that determine the findings. Without folder or facts, they stay in memory.
    """

    def __init__(
        self, folder: Path | None = None, facts: dict[str, Any] | None = None, *, max_files: int = MAX_FILES
    ) -> None:
        self._memory: LRUCache[Hashable, Any] = LRUCache(_MAX_FINDINGS)
        self._files = FileCache(folder if facts is not None else None, max_files)
        self._digest = ""
        if self._files.folder is not None:
            content = msgspec.msgpack.encode([code_digest(), facts], order="deterministic")
            self._digest = blake3(content).hexdigest(length=16)

    def remember(self, about: Hashable, find: Callable[[], Value]) -> Value:
        """Return a finding from memory, or compute and keep it there."""
        known: Value = self._memory.get_or_compute(about, find)
        return known

    def get_or_find(self, about: Hashable, kind: type[Value], find: Callable[[], Value]) -> Value:
        """Return a cached finding, or compute and keep it. `repr(about)` determines its file name."""

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
    """One template with the template variables that it reads, and the findings about it.

    `model_stop_ids` are the stop tokens of the model's files, and `tool_images` is as for `Probes`. `probed`
    are the variables in probes if the findings are shared with another set of variables.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    variables: Mapping[str, Any]
    findings: Findings = field(default_factory=Findings)
    model_stop_ids: frozenset[int] = frozenset()
    tool_images: ToolImages = "tool"
    probed: Mapping[str, Any] | None = None

    @cached_property
    def profile(self) -> TemplateProfile:
        """The findings of all probes."""
        variables = self.probed or self.variables
        probes = Probes(self.template, self.tokenizer, variables, tool_images=self.tool_images)
        probe = partial(probe_template, probes, self.model_stop_ids)
        return self.findings.get_or_find("profile", TemplateProfile, probe)

    def render(self, request: RenderRequest) -> TracedStr:
        """Render a request in the template's form; errors as for `ChatTemplate.render`.

        A generation prompt that the template writes inside its loop belongs to the coming turn, so it is not
        attributed to a message.
        """
        text = self.template.render(request, self.profile.form)
        if not request.add_generation_prompt:
            return text
        prompts = filter(text.endswith, self.profile.generation_prompts)
        cut = len(text) - max(map(len, prompts), default=0)
        beyond = [origin for _, stop, origin in text.spans if stop > cut]
        if not beyond or any(origin.is_content for origin in beyond):
            return text
        return TracedStr(plain(text), clip(text.spans, 0, cut))

    @cached_property
    def probes(self) -> Probes:
        """Renders further probes."""
        return Probes(self.template, self.tokenizer, self.probed or self.variables, form=self.profile.form)


class TemplateOptions(TypedDict, total=False):
    """Options of `TemplateSet` that `Renderer.from_pretrained` hands on."""

    limits: TemplateLimits | None
    clock: Callable[[], datetime.datetime]
    processes: BoundedProcesses | None
    tool_images: ToolImages


class TemplateSet:
    """Compiled templates by name. Safe to use from many threads.

    Args:
        sources: Jinja texts by name.
        tokenizer: The model's tokenizer.
        special_tokens: Template variables such as `bos_token`.
        chosen: Name of the template to use instead of the usual choice.
        model_stop_ids: Stop tokens of the model's files.
        limits: Bounds on one run of a template.
        clock: Returns the time that `strftime_now` formats.
        processes: Child processes that compile and run the templates; None runs them in this process.
        folder: Folder that keeps findings between processes, or None.
        tool_images: `"user"` moves images out of tool results, into a user turn after them, if the template
            does not write them there.

    Raises:
        TemplateError: The template is missing, or a template does not compile.
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
        self._tool_images: ToolImages = tool_images
        self._names = [choose_template(sources, name=chosen, has_tools=tools) for tools in (False, True)]
        self._tokenizer = tokenizer
        self._model_stop_ids = frozenset(model_stop_ids)
        self.special_tokens = dict(special_tokens or {})
        kind = ChatTemplate if processes is None else partial(IsolatedTemplate, processes=processes)
        compile_one = partial(kind, special_tokens=self.special_tokens, limits=limits, clock=clock)
        self._templates = {name: compile_one(sources[name], name=name) for name in {*self._names}}
        self._folder = folder
        self._known: LRUCache[tuple[str, Hashable], KnownTemplate] = LRUCache(_MAX_SETTINGS)

    @classmethod
    def load(
        cls,
        model: ModelDir,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        profile_cache: bool = True,
        **options: Unpack[TemplateOptions],
    ) -> "TemplateSet":
        """Compile a model's templates, or `chat_template`: Jinja text, or the name of a model's template.

        `profile_cache` keeps findings on disk. Other options and errors are as for the class.
        """
        sources = load_templates(model)
        refused = "" if model.conversion is None else model.conversion.no_template
        if not sources and chat_template is None and refused:
            raise TemplateMissingError(
                "the model lacks a chat template, and none equals the requests of mistral-common",
                where=str(model.path),
                got=refused,
                remedy="Pass chat_template=<Jinja text>",
            )
        is_source = chat_template is not None and ("{{" in chat_template or "{%" in chat_template)
        if chat_template is not None and is_source and chat_template not in sources:
            sources, chat_template = {"default": chat_template}, None
        return cls(
            sources,
            tokenizer,
            special_tokens=model.special_tokens,
            chosen=chat_template,
            model_stop_ids=model.stop_token_ids(tokenizer.token_id),
            folder=cache_folder(FOLDER) if profile_cache else None,
            **options,
        )

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Variables that a template of the set looks up and a caller may set."""
        return tuple(sorted({name for template in self._templates.values() for name in template.variables}))

    def find(self, variables: Mapping[str, Any], *, has_tools: bool) -> KnownTemplate:
        """Return the template for a conversation with or without tools, and the findings about it.

        Variables that the template does not read are left out. Texts that it only prints, outside all turns,
        share their findings. Variables that are not plain values are probed again each time.

        Args:
            variables: Template variables.
            has_tools: Whether the conversation has tools.
        """
        name = self._names[has_tools]
        template = self._templates[name]
        read = {key: value for key, value in variables.items() if key in template.variables}
        key: Hashable = ()
        if read:
            try:
                key = plain_key(dict(sorted(read.items())))
            except NoKeyError:
                return self._build(template, read, None)

        def build() -> KnownTemplate:
            # Texts that the template only prints are the same in probes.
            printed = {name for name, value in read.items() if type(value) is str and value}
            probed = {**read, **dict.fromkeys(printed & template.printed_variables, _PRINTED)}
            if probed != read:
                shared = self.find(probed, has_tools=has_tools)
                if _PRINTED not in repr(shared.profile):
                    return replace(shared, variables=read, probed=probed)
            return self._build(template, read, repr(key))

        return self._known.get_or_compute((name, key), build)

    def _build(
        self, template: ChatTemplate, variables: Mapping[str, Any], setting: str | None
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
            template, self._tokenizer, variables, findings, self._model_stop_ids, self._tool_images
        )
