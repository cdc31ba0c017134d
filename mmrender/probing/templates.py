"""The templates of a model, and what is known about each."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from mmrender.caching import LRUCache
from mmrender.messages import Message
from mmrender.model.files import ModelDir
from mmrender.model.tokenizer import Tokenizer
from mmrender.probing.probes import Probes
from mmrender.probing.profile import TemplateProfile, probe_template
from mmrender.probing.store import Findings, cache_folder
from mmrender.template.chat import ChatTemplate
from mmrender.template.limits import TemplateLimits
from mmrender.template.sources import choose_template, load_templates
from mmrender.template.text import TracedStr, clip, plain

_MOST_SETTINGS = 256
"""Sets of template arguments that are remembered; each has a profile, a bridge and a parser of its own."""


@dataclass(frozen=True, eq=False)
class KnownTemplate:
    """One template with one set of template arguments, and what is known about it.

    Attributes:
        template: The chat template.
        tokenizer: The model's tokenizer.
        arguments: The template arguments, without those that the template does not read.
        findings: What was found out, in memory and on disk.
        model_stop_ids: Stop tokens that the model's files name.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    arguments: Mapping[str, Any]
    findings: Findings = field(default_factory=Findings)
    model_stop_ids: frozenset[int] = frozenset()

    @cached_property
    def profile(self) -> TemplateProfile:
        """What probes found out."""

        def probe() -> TemplateProfile:
            return probe_template(Probes(self.template, self.tokenizer, self.arguments), self.model_stop_ids)

        return self.findings.get_or_find("profile", TemplateProfile, probe)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> TracedStr:
        """Render with the arguments and in the form found; arguments and errors as for `ChatTemplate.render`.

        A generation prompt that the template writes inside its loop belongs to the coming turn, so it is
        attributed to no message.
        """
        text = self.template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            form=self.profile.form,
            arguments=self.arguments,
        )
        if not add_generation_prompt:
            return text
        prompts = self.profile.generation_prompts
        cut = len(text) - max([len(prompt) for prompt in prompts if text.endswith(prompt)], default=0)
        if cut == len(text) or any(stop > cut and origin.is_content for _, stop, origin in text.spans):
            return text
        return TracedStr(plain(text), clip(text.spans, 0, cut))

    @cached_property
    def probes(self) -> Probes:
        """Renders further probes."""
        return Probes(self.template, self.tokenizer, self.arguments, form=self.profile.form)


class TemplateSet:
    """Compiled templates by name. Safe to use from many threads.

    Args:
        sources: Jinja texts by name.
        tokenizer: Tells which of the texts that templates write are special tokens.
        special_tokens: Template variables such as `bos_token`.
        chosen: Name of the template to use instead of the usual choice.
        model_stop_ids: Stop tokens that the model's files name.
        limits: What one run may spend.
        clock: What `strftime_now` reads.
        folder: Where findings are kept between processes, or None.

    Raises:
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
        folder: Path | None = None,
    ) -> None:
        self._names = {
            has_tools: choose_template(sources, name=chosen, has_tools=has_tools)
            for has_tools in (False, True)
        }
        self._tokenizer = tokenizer
        self._model_stop_ids = frozenset(model_stop_ids)
        self._templates = {
            name: ChatTemplate(
                sources[name], name=name, special_tokens=special_tokens, limits=limits, clock=clock
            )
            for name in self._names.values()
        }
        self._folder = folder
        self._known: LRUCache[tuple[str, bytes], KnownTemplate] = LRUCache(_MOST_SETTINGS)

    @classmethod
    def load(
        cls,
        model: ModelDir,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        profile_cache: bool = True,
    ) -> "TemplateSet":
        """Compile a model's templates, or the one given in their place.

        Args:
            model: The model directory.
            tokenizer: The model's tokenizer.
            chat_template: Jinja text, or the name of one of the model's templates.
            limits: What one run may spend.
            clock: What `strftime_now` reads.
            profile_cache: Whether findings are kept on disk; see `mmrender.probing.store`.

        Raises:
            TemplateError: There is no template to use, or one does not compile.
        """
        sources = load_templates(model)
        if (
            chat_template is not None
            and chat_template not in sources
            and ("{{" in chat_template or "{%" in chat_template)
        ):
            sources, chat_template = {"default": chat_template}, None
        return cls(
            sources,
            tokenizer,
            special_tokens=model.special_tokens,
            chosen=chat_template,
            model_stop_ids=model.stop_token_ids(tokenizer.token_id),
            limits=limits,
            clock=clock,
            folder=cache_folder() if profile_cache else None,
        )

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Variables that one of the templates looks up and a caller may give."""
        return tuple(sorted({name for template in self._templates.values() for name in template.arguments}))

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Template variables such as `bos_token`."""
        return next(iter(self._templates.values())).special_tokens

    def find(self, arguments: Mapping[str, Any], *, has_tools: bool) -> KnownTemplate:
        """The template for a conversation with or without tools, and what is known about it.

        Arguments that the template does not read make no difference; arguments that are not plain values are
        probed for anew each time.
        """
        name = self._names[has_tools]
        reads = self._templates[name].arguments
        read = {key: value for key, value in arguments.items() if key in reads} if arguments else {}
        try:
            encoded = msgspec.msgpack.encode(sorted(read.items())) if read else b""
        except (TypeError, OverflowError, UnicodeEncodeError, RecursionError):
            return self._build(name, read, None)
        known = self._known.get((name, encoded))
        if known is None:
            known = self._known.get_or_compute((name, encoded), lambda: self._build(name, read, encoded))
        return known

    def _build(self, name: str, arguments: Mapping[str, Any], encoded: bytes | None) -> KnownTemplate:
        template = self._templates[name]
        facts = {
            "source": template.source,
            "special_tokens": template.special_tokens,
            "limits": asdict(template.limits),
            "added_tokens": self._tokenizer.added_ids,
            "special_ids": sorted(self._tokenizer.special_ids),
            "vocabulary": self._tokenizer.vocab_size,
            "stop_ids": sorted(self._model_stop_ids),
            "arguments": encoded,
        }
        is_kept = encoded is not None and not template.reads_clock
        findings = Findings(self._folder, facts if is_kept else None)
        return KnownTemplate(template, self._tokenizer, arguments, findings, self._model_stop_ids)
