"""The facade: a model directory in, rendered conversations out."""

import datetime
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mmrender.bridge.bridge import Bridge, History, NotBridged, TokenIds
from mmrender.caching import LRUCache
from mmrender.content import attach_media, normalize_messages, normalize_tools
from mmrender.errors import RenderError
from mmrender.media.cache import MediaCache
from mmrender.media.pixels import ImageBackend
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.registry import load_processor
from mmrender.media.resolve import MediaResolver
from mmrender.messages import Role
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.probing.profile import TemplateProfile
from mmrender.probing.templates import KnownTemplate, TemplateSet
from mmrender.rendering.memo import RenderMemo, conversation_key
from mmrender.rendering.render import Rendering
from mmrender.spans import MultiModalData
from mmrender.template.limits import TemplateLimits
from mmrender.template.traced import TracedStr
from mmrender.tokens.encode import DEFAULT_RULES, SpecialTokenRule, TokenWriter
from mmrender.tokens.rendered import RenderedTokens

if TYPE_CHECKING:
    from mmrender.parsing import ParsedResponse, ResponseParser

_log = logging.getLogger("mmrender.bridge.bridge")

SpecialTokenRules: TypeAlias = SpecialTokenRule | Mapping[Role, SpecialTokenRule]


class Renderer:
    """Renders conversations with a model's own chat template. Safe to use from many threads.

    Args:
        templates: The model's templates, and what is known about them.
        tokenizer: The model's tokenizer.
        media: What turns media parts into items, or None for a text-only model.
        content_special_tokens: What a special token in content is, for all roles or by role; see
            `mmrender.tokens.encode.DEFAULT_RULES` for what roles that are not named follow.
        tool_call_grammar: Name of the grammar of tool calls, for a template whose own cannot be proved.
        memo_bytes: Bound of the memo of whole renderings; 0 turns it off.
        vocab_size: Number of ids that the model has embeddings for, often more than its tokenizer knows; by
            default the tokenizer's.
    """

    def __init__(
        self,
        templates: TemplateSet,
        tokenizer: Tokenizer,
        media: MediaResolver | None = None,
        *,
        content_special_tokens: SpecialTokenRules = DEFAULT_RULES,
        tool_call_grammar: str | None = None,
        memo_bytes: int = 128 << 20,
        vocab_size: int | None = None,
    ) -> None:
        self.templates = templates
        self.tokenizer = tokenizer
        self.media = media
        self.vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        self.rules = _rules(content_special_tokens)
        processor = media.processor if media is not None else None
        self._writer = TokenWriter(
            tokenizer,
            placeholders=processor.placeholder if processor is not None else {},
            placeholder_tokens=processor.placeholder_tokens if processor is not None else (),
            rules=self.rules,
        )
        self._memo = RenderMemo(memo_bytes) if memo_bytes else None
        self._bridges: LRUCache[KnownTemplate, Bridge] = LRUCache(256)
        self._parsers: LRUCache[KnownTemplate, ResponseParser] = LRUCache(256)
        self._tool_call_grammar = tool_call_grammar
        self._outcome = threading.local()

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
        tool_call_grammar: str | None = None,
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        memo_bytes: int = 128 << 20,
        profile_cache: bool = True,
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
            tool_call_grammar: Name of the grammar of tool calls, for a template whose own cannot be proved;
                one of `mmrender.parsing.GRAMMARS`.
            limits: What one run of the template may spend.
            clock: What the template's `strftime_now` reads.
            memo_bytes: Bound of the memo of whole renderings; 0 turns it off.
            profile_cache: Keep what probes find out about the template on disk, in the folder that the
                environment variable `MMRENDER_CACHE` names.

        Raises:
            ModelNotFoundError: There is no such directory or repository.
            TemplateError: There is no chat template, or it does not compile.
            TokenizerError: `tokenizer.json` is missing or unusable.
            ProcessorError: The image settings cannot be used.
            MissingDependencyError: `image_backend` or the family needs an extra.
        """
        model = find_model(name_or_path, revision=revision)
        tokenizer = Tokenizer.load(model)
        processor = load_processor(
            model.path, image_backend=image_backend, trust_remote_code=trust_remote_code
        )
        media = None
        if processor is not None:
            media = MediaResolver(processor, media_policy or MediaPolicy(), media_cache or MediaCache())
        return cls(
            TemplateSet.load(
                model,
                tokenizer,
                chat_template=chat_template,
                limits=limits,
                clock=clock,
                profile_cache=profile_cache,
            ),
            tokenizer,
            media,
            content_special_tokens=content_special_tokens,
            tool_call_grammar=tool_call_grammar,
            memo_bytes=memo_bytes,
            vocab_size=model.vocab_size,
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
        key = None
        if self._memo is not None:
            given = (messages, tools, documents, images, videos, add_generation_prompt, template_arguments)
            key = conversation_key(*given)
            known = self._memo.get(key) if key is not None else None
            if known is not None:
                return known
        conversation = normalize_messages(messages)
        if images is not None or videos is not None:
            conversation = attach_media(conversation, images, videos)
        rendering = self._rendering(tools, documents, template_arguments)
        rendered = rendering.render(conversation, add_generation_prompt)
        if self._memo is not None and key is not None and not rendering.template.reads_clock:
            self._memo.put(key, rendered)
        return rendered

    def render_ids(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Token ids alone; arguments and errors as for `render`."""
        return self.render(messages, **options).token_ids

    def render_text(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> TracedStr:
        """What the template writes, each placeholder once and each character attributed; loads no media."""
        rendering = self._rendering(tools, documents, template_arguments)
        return rendering.text(normalize_messages(messages), add_generation_prompt)

    def _rendering(
        self,
        tools: Sequence[Any] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> Rendering:
        known = self.templates.find(arguments, has_tools=tools is not None)
        return Rendering(
            template=known.template,
            profile=known.profile,
            writer=self._writer,
            media=self.media,
            stop_ids=known.profile.stop_ids,
            tools=normalize_tools(tools),
            documents=documents,
            arguments=known.arguments,
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

        The result begins with the previous prompt and completion, token for token. Its `roles` and message
        indices count from the first new message; its sidecar holds the previous items and then the new ones.

        Args:
            previous_prompt_ids: What the model was asked with; a list, or an integer array of shape `(n,)`.
            previous_completion_ids: What it sampled, stop token included if there was one.
            new_messages: Tool results, user turns, and what else may follow an assistant turn.
            tools: Tool definitions of the conversation.
            previous_multi_modal_data: The sidecar of the previous prompt.
            history: `"sampled"` keeps earlier turns as they are; `"template"` gives None where the template
                would now write them differently.
            images: Sources for the image parts that have none.
            videos: The same for video parts.
            **template_arguments: Those of the previous rendering.

        Returns:
            None where it cannot be proved that appending is right; `why_not_bridged` then says why, and the
            caller renders in full.

        Raises:
            MessageError: A new message is malformed.
            MediaError: A new image cannot be loaded or processed.
            PlaceholderError: The template drops a new image.
        """
        self._outcome.reason = None
        try:
            messages = normalize_messages(new_messages, where="new_messages") if len(new_messages) else ()
            messages = attach_media(messages, images, videos, where="new_messages")
            known = self.templates.find(template_arguments, has_tools=tools is not None)
            bridge = self._bridges.get_or_compute(known, lambda: Bridge(known, self._writer, self.media))
            return bridge.extend(
                previous_prompt_ids,
                previous_completion_ids,
                messages,
                previous=previous_multi_modal_data or MultiModalData(),
                history=history,
            )
        except NotBridged as refusal:
            self._outcome.reason = str(refusal)
            _log.debug("no bridge: %s", refusal)
            return None

    @property
    def why_not_bridged(self) -> str | None:
        """Why this thread's last `bridge_to_next_turn` gave None; None where it gave a bridge."""
        return getattr(self._outcome, "reason", None)

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
        **template_arguments: Any,
    ) -> "ParsedResponse":
        """Read a completion: content, reasoning, and every tool call that the model tried. Never fails on it.

        Args:
            token_ids: What the model sampled.
            tools: Tool definitions: argument types follow their JSON schemas, and other tools are unknown.
            prompt_ids: The prompt, which says whether it opened a reasoning block.
            **template_arguments: Those of the prompt's rendering.
        """
        parser = self.response_parser(has_tools=tools is not None, **template_arguments)
        return parser.parse(token_ids, tools=normalize_tools(tools), prompt_ids=prompt_ids)

    def response_parser(self, *, has_tools: bool = False, **template_arguments: Any) -> "ResponseParser":
        """What `parse_response` reads with; its `choice` says how the grammar of tool calls was proved."""
        # Imported here, since most programs that render never parse.
        from mmrender.parsing.prove import build_parser

        known = self.templates.find(template_arguments, has_tools=has_tools)
        return self._parsers.get_or_compute(
            known, lambda: build_parser(known, grammar=self._tool_call_grammar)
        )

    @property
    def profile(self) -> TemplateProfile:
        """What was found out about the template, without template arguments."""
        return self.templates.find({}, has_tools=False).profile

    def is_prefix_stable(self, **template_arguments: Any) -> bool:
        """Whether history stays as it was prompted and written, for these template arguments."""
        return self.templates.find(template_arguments, has_tools=False).profile.prefix_stable

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end the assistant's turn: those of the model's files, and those of its template."""
        return sorted(self.profile.stop_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.tokenizer.decode(token_ids)


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
