"""The facade: a model directory in, rendered conversations out."""

import datetime
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mmrender.bridge import Bridge, History, NotBridged, TokenIds
from mmrender.content import attach_media, normalize_messages, normalize_tools
from mmrender.errors import ProcessorError, RenderError
from mmrender.media.cache import MediaCache
from mmrender.media.item import MediaItem, MultiModalData
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.base import ImageBackend
from mmrender.media.processors.registry import load_processor
from mmrender.media.resolve import MediaResolver
from mmrender.memo import RenderMemo, conversation_key
from mmrender.messages import Message, Role
from mmrender.model_dir import ModelDir, find_model
from mmrender.placement import MediaPlace, check_placement, media_places
from mmrender.rendered import RenderedTokens
from mmrender.sampled import Turn, assistant_turns, mark_sampled, turns_by_rendering
from mmrender.stops import stop_token_ids
from mmrender.template.chat import ChatTemplate
from mmrender.template.limits import TemplateLimits
from mmrender.template.ownership import disown_tail
from mmrender.template.loader import choose_template, load_templates, special_tokens
from mmrender.template.profile import Prober, TemplateProfile
from mmrender.template.traced import TracedStr, plain
from mmrender.tokenizer import Tokenizer
from mmrender.tokens import DEFAULT_RULES, Layout, SpecialTokenRule, TokenWriter

_log = logging.getLogger("mmrender.bridge")

SpecialTokenRules = SpecialTokenRule | Mapping[Role, SpecialTokenRule]


class Renderer:
    """Renders conversations with a model's own chat template. Safe to use from many threads.

    Args:
        templates: Chat templates by name.
        tokenizer: The model's tokenizer.
        media: What turns media parts into items, or None for a text-only model.
        model_stop_ids: Stop tokens that the model's files name.
        special_tokens: Template variables such as `bos_token`.
        chat_template: Name of the template to use instead of the usual choice.
        content_special_tokens: What a special token in content is, for all roles or by role; see
            `mmrender.tokens.DEFAULT_RULES` for what roles that are not named follow.
        limits: What one run of the template may spend.
        clock: What the template's `strftime_now` reads.
        memo_bytes: Bound of the memo of whole renderings; 0 turns it off.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        tokenizer: Tokenizer,
        media: MediaResolver | None = None,
        *,
        model_stop_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        content_special_tokens: SpecialTokenRules = DEFAULT_RULES,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        memo_bytes: int = 128 << 20,
    ) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self._chat_template = chat_template
        self._templates = {
            name: ChatTemplate(source, name=name, special_tokens=special_tokens, limits=limits, clock=clock)
            for name, source in templates.items()
        }
        choose_template(self._templates, name=chat_template, has_tools=False)
        self.rules = _rules(content_special_tokens)
        processor = media.processor if media is not None else None
        self._writer = TokenWriter(
            tokenizer,
            placeholders=processor.placeholder if processor is not None else {},
            placeholder_tokens=processor.placeholder_tokens if processor is not None else (),
            rules=self.rules,
        )
        self._model_stop_ids = tuple(model_stop_ids)
        self._memo = RenderMemo(memo_bytes) if memo_bytes else None
        self._bridges: dict[Any, Bridge] = {}
        self._outcome = threading.local()
        self._probed = lru_cache(maxsize=64)(self._probe)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        image_backend: ImageBackend = "torch",
        media_policy: MediaPolicy | None = None,
        media_cache: MediaCache | None = None,
        content_special_tokens: SpecialTokenRules = DEFAULT_RULES,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        memo_bytes: int = 128 << 20,
    ) -> "Renderer":
        """Load the renderer of a model. No weights are read.

        Args:
            name_or_path: A directory in hub layout, or a hub id.
            revision: Branch, tag or commit on the hub.
            trust_remote_code: Run image processor code that the model brings along.
            chat_template: Jinja text in place of the model's, or the name of one of its templates.
            image_backend: Which of the two exact ways of resampling: `"torch"`, as inference engines do, or
                `"pil"`, which needs no torch. It is part of every item's identity.
            media_policy: What may be loaded.
            media_cache: Where processed items are kept; pass one to share it between renderers.
            content_special_tokens: `"text"`, `"parse"` or `"error"`, for all roles or by role.
            limits: What one run of the template may spend.
            clock: What the template's `strftime_now` reads.
            memo_bytes: Bound of the memo of whole renderings; 0 turns it off.

        Raises:
            ModelNotFoundError: There is no such directory or repository.
            TemplateError: There is no chat template, or it does not compile.
            TokenizerError: `tokenizer.json` is missing or unusable.
            ProcessorError: The image settings cannot be used.
            MissingDependencyError: `image_backend` or the family needs an extra.
        """
        model = find_model(name_or_path, revision=revision)
        templates = load_templates(model)
        if chat_template is not None and chat_template not in templates and _is_jinja(chat_template):
            templates, chat_template = {"default": chat_template}, None
        tokenizer = Tokenizer.load(model)
        return cls(
            templates,
            tokenizer,
            _resolver(model, image_backend, trust_remote_code, media_policy, media_cache),
            model_stop_ids=stop_token_ids(model, tokenizer),
            special_tokens=special_tokens(model),
            chat_template=chat_template,
            content_special_tokens=content_special_tokens,
            limits=limits,
            clock=clock,
            memo_bytes=memo_bytes,
        )

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> RenderedTokens:
        """Render a conversation.

        Args:
            messages: OpenAI or Hugging Face messages, or canonical ones.
            tools: Tool definitions, or Python functions.
            documents: Documents for templates that take them.
            images: Sources for the image parts that have none, in order.
            videos: The same for video parts.
            add_generation_prompt: Whether to open the assistant's turn.
            **template_arguments: Further template variables, such as `enable_thinking=False`.

        Raises:
            MessageError: A message is malformed.
            MediaError: An image cannot be loaded or processed.
            TemplateError: The template refuses or fails.
            PlaceholderError: The template drops an image, or writes one too many.
            SpecialTokenError: Content holds a special token, and its role is set to `error`.
        """
        if self._memo is None:
            return self._render(messages, tools, documents, images, videos, add_generation_prompt, template_arguments)
        key = conversation_key(messages, tools, documents, images, videos, add_generation_prompt, template_arguments)
        known = self._memo.get(key) if key is not None else None
        if known is not None:
            return replace(known, token_ids=known.token_ids.copy())
        rendered = self._render(messages, tools, documents, images, videos, add_generation_prompt, template_arguments)
        if key is not None and not self.template(has_tools=tools is not None).reads_clock:
            self._memo.put(key, replace(rendered, token_ids=rendered.token_ids.copy()))
        return rendered

    def render_ids(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Token ids alone; arguments and errors as for `render`."""
        return self.render(messages, **options).token_ids

    def render_text(
        self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None, **options: Any
    ) -> TracedStr:
        """What the template writes, each placeholder once, each character attributed; loads no media."""
        template = self.template(has_tools=tools is not None)
        arguments = {key: options.pop(key) for key in list(options) if key not in ("documents", "add_generation_prompt")}
        form = self.profile_for(template, arguments).form
        return template.render(
            normalize_messages(messages), tools=normalize_tools(tools), form=form, arguments=arguments, **options
        )

    def _render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        images: Sequence[Any] | None,
        videos: Sequence[Any] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> RenderedTokens:
        conversation = normalize_messages(messages)
        if images is not None or videos is not None:
            conversation = attach_media(conversation, images, videos)
        template = self.template(has_tools=tools is not None)
        profile = self.profile_for(template, arguments)
        definitions = normalize_tools(tools)

        def run(part: Sequence[Message], prompt: bool) -> TracedStr:
            return template.render(
                part,
                tools=definitions,
                documents=documents,
                add_generation_prompt=prompt,
                form=profile.form,
                arguments=arguments,
            )

        text = run(conversation, add_generation_prompt)
        if add_generation_prompt:
            written = [len(prompt) for prompt in profile.generation_prompts if text.endswith(prompt)]
            text = disown_tail(text, max(written, default=0))
        layout = self._writer.lay_out(text)
        items = self._items(conversation, layout, profile)
        return self._attributed(conversation, layout, items, profile, run)

    def _items(
        self, conversation: Sequence[Message], layout: Layout, profile: TemplateProfile
    ) -> Sequence[MediaItem | None]:
        places = media_places(conversation)
        if not places and not layout.placeholders:
            return ()
        if self.media is None:
            raise _no_processor(places[0].where)
        check_placement(places, layout.placeholders, profile.image_roles)
        return self._resolved(places, self.media)

    @staticmethod
    def _resolved(
        places: Sequence[MediaPlace], media: MediaResolver, earlier: int = 0
    ) -> list[MediaItem | None]:
        """Items of the parts; a part without a source stays one unexpanded placeholder."""
        given = [(place.where, place.part) for place in places if place.part.source is not None]
        images = earlier + sum(place.modality == "image" for place in places)
        found = iter(media.resolve(given, company=images))
        return [None if place.part.source is None else next(found) for place in places]

    def _attributed(
        self,
        conversation: Sequence[Message],
        layout: Layout,
        items: Sequence[MediaItem | None],
        profile: TemplateProfile,
        run: Callable[[Sequence[Message], bool], TracedStr],
    ) -> RenderedTokens:
        assistants = [index for index, message in enumerate(conversation) if message.role == "assistant"]
        turns: list[Turn] = []
        rewritten: list[int] = []
        if assistants and len(profile.generation_prompts) == 1:
            turns, rewritten = assistant_turns(layout.text, assistants, profile.generation_prompts[0])
        elif assistants:
            turns, rewritten = turns_by_rendering(layout.text, conversation, assistants, run)
        cuts = sorted({cut for turn in turns for cut in (turn.prompt_stop, turn.content_stop)})
        encoded = self._writer.write(layout, items, cuts)
        spans, torn = mark_sampled(encoded, turns, self._stop_id_set(profile))
        entries = [(where, item) for where, item in zip(encoded.ranges, items, strict=True) if item is not None]
        return RenderedTokens(
            token_ids=encoded.ids,
            spans=spans,
            roles=tuple([message.role for message in conversation]),
            tool_names=_tool_names(conversation),
            multi_modal_data=MultiModalData.of(entries),
            text=plain(layout.text),
            rewritten=tuple(sorted([*rewritten, *torn])),
            _decode=self.tokenizer.decode,
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
        history: History = "sampled",
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        **template_arguments: Any,
    ) -> RenderedTokens | None:
        """Append new messages and the generation prompt to what was sampled, which stays as it is.

        The result begins with the previous prompt and completion, token for token; its `roles` and message
        indices count from the first new message, and its sidecar holds the previous items and then the new ones.

        Args:
            previous_prompt_ids: What the model was asked with; a list, or an integer array of shape `(n,)`.
            previous_completion_ids: What it sampled, stop token included if there was one.
            new_messages: Tool results, user turns, and what else may follow an assistant turn.
            tools: Tool definitions of the conversation.
            previous_multi_modal_data: The sidecar of the previous prompt.
            history: `"sampled"` keeps earlier turns as they are; `"template"` gives None where the template would
                now write them differently.
            images: Sources for the image parts that have none.
            videos: The same for video parts.
            **template_arguments: Those of the previous rendering.

        Returns:
            None where it cannot be proved that appending is right; `why_not_bridged` then says why, and the caller
            renders in full.

        Raises:
            MessageError: A new message is malformed.
            MediaError: A new image cannot be loaded or processed.
            PlaceholderError: The template drops a new image.
        """
        try:
            messages = normalize_messages(new_messages, where="new_messages") if len(new_messages) else ()
            messages = attach_media(messages, images, videos, where="new_messages")
            template = self.template(has_tools=tools is not None)
            bridge = self._bridge(template, template_arguments)
            self._outcome.reason = None
            return bridge.extend(
                previous_prompt_ids,
                previous_completion_ids,
                messages,
                previous=previous_multi_modal_data or MultiModalData(),
                history=history,
                resolve=self._resolve_new,
                depends_on_company=self.media is not None and self.media.processor.depends_on_company,
            )
        except NotBridged as refusal:
            self._outcome.reason = str(refusal)
            _log.debug("no bridge: %s", refusal)
            return None

    @property
    def why_not_bridged(self) -> str | None:
        """Why this thread's last `bridge_to_next_turn` gave None; None where it gave a bridge."""
        return getattr(self._outcome, "reason", None)

    def _bridge(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> Bridge:
        key = (template.name, conversation_key(dict(arguments)))
        known = self._bridges.get(key) if key[1] is not None else None
        if known is None:
            profile = self.profile_for(template, arguments)
            known = Bridge(template, profile, self._writer, self._stop_id_set(profile), arguments)
            if key[1] is not None:
                self._bridges[key] = known
        return known

    def _resolve_new(self, places: Sequence[MediaPlace], earlier: int) -> Sequence[MediaItem | None]:
        if not places:
            return ()
        if self.media is None:
            raise _no_processor(places[0].where)
        return self._resolved(places, self.media, earlier)

    def template(self, *, has_tools: bool = False) -> ChatTemplate:
        """The template that a conversation with or without tools uses."""
        return self._templates[choose_template(self._templates, name=self._chat_template, has_tools=has_tools)]

    @property
    def profile(self) -> TemplateProfile:
        """What was found out about the template, without template arguments."""
        return self.profile_for(self.template(), {})

    def profile_for(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> TemplateProfile:
        """What was found out about a template with these arguments."""
        key = conversation_key(dict(arguments))
        return self._probe(template.name, None, arguments) if key is None else self._probed(template.name, _Key(key, arguments))

    def _probe(self, name: str, key: "_Key | None", arguments: Mapping[str, Any] | None = None) -> TemplateProfile:
        given = key.arguments if key is not None else arguments
        return Prober(self._templates[name], given).profile()

    def is_prefix_stable(self, **template_arguments: Any) -> bool:
        """Whether history stays as it was prompted and written, for these template arguments."""
        return self.profile_for(self.template(), template_arguments).prefix_stable

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end the assistant's turn: those that the model's files name, and those that the template
        writes right after the assistant's content."""
        return sorted(self._stop_id_set(self.profile))

    def _stop_id_set(self, profile: TemplateProfile) -> frozenset[int]:
        found = set(self._model_stop_ids)
        for text in profile.closes.values():
            match = next(self.tokenizer.find(text, lambda _: True), None)
            if match is not None:
                token_id = self.tokenizer.added_ids[match.token]
                if token_id in self.tokenizer.special_ids:
                    found.add(token_id)
        return frozenset(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.tokenizer.decode(token_ids)


class _Key:
    """Template arguments as a cache key: hashed and compared by value."""

    def __init__(self, key: Any, arguments: Mapping[str, Any]) -> None:
        self._key = key
        self.arguments = dict(arguments)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


def _rules(given: SpecialTokenRules) -> Mapping[Role, SpecialTokenRule]:
    rules = dict.fromkeys(DEFAULT_RULES, given) if isinstance(given, str) else {**DEFAULT_RULES, **given}
    for role, rule in rules.items():
        if rule not in ("text", "parse", "error") or role not in DEFAULT_RULES:
            raise RenderError(
                "content_special_tokens is not understood",
                where=f"content_special_tokens[{role!r}]",
                expected="'text', 'parse' or 'error', for all roles or in a mapping by role",
                got=repr(rule),
            )
    return rules


def _no_processor(where: str) -> ProcessorError:
    return ProcessorError(
        "the model has no image processor",
        where=where,
        expected="preprocessor_config.json or processor_config.json in the model directory",
        got="a text-only model",
        remedy="Use a vision-language model, or remove the image",
    )


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def _resolver(
    model: ModelDir,
    image_backend: ImageBackend,
    trust_remote_code: bool,
    policy: MediaPolicy | None,
    cache: MediaCache | None,
) -> MediaResolver | None:
    processor = load_processor(model.path, image_backend=image_backend, trust_remote_code=trust_remote_code)
    if processor is None:
        return None
    return MediaResolver(processor, policy or MediaPolicy(), cache or MediaCache())


def _tool_names(messages: Sequence[Message]) -> tuple[str | None, ...]:
    """Name of the tool that each tool message answers for: its own, or that of the call it refers to."""
    calls = {call.id: call.name for message in messages for call in message.tool_calls if call.id is not None}
    return tuple([
        (message.name or calls.get(message.tool_call_id or "")) if message.role == "tool" else None
        for message in messages
    ])
