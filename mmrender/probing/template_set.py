"""A model's templates with what is known about each: profiles by template arguments, and stop tokens."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mmrender.model.tokenizer import Tokenizer
from mmrender.probing.per_template import PerTemplate
from mmrender.probing.profile import Prober, TemplateProfile
from mmrender.probing.store import ProfileCache, Shelf, open_shelf
from mmrender.template.chat import ChatTemplate
from mmrender.template.limits import TemplateLimits
from mmrender.template.loader import choose_template


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
        cache: Where what is found out is kept on disk, or None.

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
        cache: ProfileCache | None = None,
    ) -> None:
        choose_template(sources, name=chosen, has_tools=False)
        self._sources = dict(sources)
        self._tokenizer = tokenizer
        self._chosen = chosen
        self._model_stop_ids = frozenset(model_stop_ids)
        self._templates = {
            name: ChatTemplate(source, name=name, special_tokens=special_tokens, limits=limits, clock=clock)
            for name, source in sources.items()
        }
        self._cache = cache
        # Every rendering asks, and profiles hold few different closes.
        self._stops_after = lru_cache(maxsize=256)(self._find_stops)
        self._profiles = PerTemplate(self._probe)

    def choose(self, *, has_tools: bool) -> ChatTemplate:
        """The template for a conversation with or without tools."""
        return self._templates[choose_template(self._sources, name=self._chosen, has_tools=has_tools)]

    def profile(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> TemplateProfile:
        """What probes found out about a template with these arguments."""
        return self._profiles.get(template, arguments)

    def shelf(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> Shelf | None:
        """Where what is found out about a template with these arguments is kept, or None."""
        return open_shelf(self._cache, template, self._tokenizer, arguments)

    def _probe(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> TemplateProfile:
        shelf = self.shelf(template, arguments)
        known = shelf.get("profile", TemplateProfile) if shelf is not None else None
        if known is None:
            known = Prober(template, arguments).profile()
            if shelf is not None:
                shelf.put("profile", known)
        return known

    def stop_ids(self, profile: TemplateProfile) -> frozenset[int]:
        """Stop tokens: the model's, and what the template ends an answer with where it is none of these."""
        return self._stops_after(tuple(profile.closes.values()))

    def _find_stops(self, closes: tuple[str, ...]) -> frozenset[int]:
        written = (self._first_stop(text) for text in closes)
        return self._model_stop_ids.union(token_id for token_id in written if token_id is not None)

    def _first_stop(self, text: str) -> int | None:
        """The first special token of a close, unless it holds one that the model's files name."""
        ids = [self._tokenizer.added_ids[match.token] for match in self._tokenizer.find(text, lambda _: True)]
        if not ids or not self._model_stop_ids.isdisjoint(ids):
            return None
        return ids[0] if ids[0] in self._tokenizer.special_ids else None
