"""The facade: a model directory in, rendered conversations out."""

import contextvars
import datetime
import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack, get_args

from mmrender.bridge.bridge import Bridge, History, NotBridged
from mmrender.caching import LRUCache
from mmrender.content.messages import refuse_misspelt
from mmrender.content.request import read_request, read_variables
from mmrender.content.values import describe
from mmrender.errors import InputError, RenderError
from mmrender.media.pixels import ImageBackend
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.registry import load_processor
from mmrender.media.resolve import MediaCache, MediaResolver, part_fingerprint
from mmrender.messages import ImagePart, Message, MessageLike, Part, RenderRequest, Role, VideoPart
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.processes import BoundedProcesses
from mmrender.protocols import BridgeOptions, ParseOptions, RenderOptions
from mmrender.rendering import Rendering, Unprinted, from_memo, new_memo, request_key, to_memo
from mmrender.sidecar import MultiModalData
from mmrender.template.chat import GIVEN, ToolImages
from mmrender.template.known import KnownTemplate, TemplateSet
from mmrender.template.limits import TemplateLimits
from mmrender.template.profile import TemplateProfile
from mmrender.template.text import Author, TracedStr
from mmrender.tokens.encode import DEFAULT_RULES, SpecialTokenRule, TokenWriter
from mmrender.tokens.ids import TokenIds, checked_ids
from mmrender.tokens.rendered import RenderedTokens
from mmrender.workers import Workers

if TYPE_CHECKING:
    from mmrender.parsing import ParsedResponse
    from mmrender.parsing.parser import ResponseParser

_log = logging.getLogger("mmrender.bridge.bridge")

Result = TypeVar("Result")
SpecialTokenRules: TypeAlias = SpecialTokenRule | Mapping[Author, SpecialTokenRule]

_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "render": tuple(RenderOptions.__annotations__),
    "bridge": tuple(BridgeOptions.__annotations__),
    "parse": tuple(ParseOptions.__annotations__),
    "profile": ("has_tools", "chat_template_kwargs"),
}
"""Keywords of each call, beside template variables."""

_KINDS: Mapping[str, type] = {
    "media_policy": MediaPolicy,
    "media_cache": MediaCache,
    "limits": TemplateLimits,
    "template_processes": BoundedProcesses,
}
"""Options of `Renderer.from_pretrained` that are objects of ours, or None."""

_why_not_bridged: "contextvars.ContextVar[tuple[weakref.ref[Renderer], str | None]]" = contextvars.ContextVar(
    "why_not_bridged"
)
"""Renderer that this thread or task last asked for a bridge, and the reason if it gave none."""


class Renderer:
    """Renders conversations with a model's own chat template. Safe to use from many threads and event loops.

    Calls run on the caller's thread. Those that begin with `a` run on a worker and leave the event loop free;
    threads open at the first of them, and `close` ends them. Messages and images must not be changed before
    the call that was given them returns.

    Pickled, it is loaded again where it arrives, with the same options and empty caches.

    Args:
        templates: The model's templates with the findings about each.
        tokenizer: The model's tokenizer.
        media: Loads and processes media parts, or None for a text-only model.
        content_special_tokens: How special tokens in content are encoded, for all roles or by role; roles
            that are not named follow `mmrender.tokens.encode.DEFAULT_RULES`.
        tool_call_grammar: Name of the grammar of tool calls, for a template whose own cannot be proved.
        unprinted: Whether a tool, a document or a message's text that the template does not print is an
            error; `"allow"` if it is meant to be left out.
        memo_bytes: Bound of the memo of whole renderings; 0 turns it off.
        vocab_size: Number of ids that the model has embeddings for, often more than its tokenizer knows; by
            default the tokenizer's.
        sampling_defaults: Sampling parameters that the model's files recommend.
        workers: Threads that carry out `a...` calls, and as many that help with the images of one call. By
            default one per processor, at most four, and none that help.
        queue_size: Calls that may wait for a worker, by default four for each. Beyond that, a call waits to
            be let in, or fails if it was made with `nowait=True`.

    Attributes:
        sampling_defaults: Those parameters, in vLLM's names, to be passed on by whoever wants them. Nothing
            applies them unasked: a policy is trained on the distribution that it is sampled from, and
            `top_k` or a temperature change it.
    """

    def __init__(
        self,
        templates: TemplateSet,
        tokenizer: Tokenizer,
        media: MediaResolver | None = None,
        *,
        content_special_tokens: SpecialTokenRules = DEFAULT_RULES,
        tool_call_grammar: str | None = None,
        unprinted: Unprinted = "error",
        memo_bytes: int = 128 << 20,
        vocab_size: int | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        workers: int | None = None,
        queue_size: int | None = None,
    ) -> None:
        self.templates = templates
        self.tokenizer = tokenizer
        self.media = media
        # Added tokens may lie beyond a gap.
        last = max(tokenizer.added_ids.values(), default=0)
        self.vocab_size = max(vocab_size or 0, tokenizer.vocab_size, last + 1)
        self.sampling_defaults = dict(sampling_defaults or {})
        given = content_special_tokens
        self.rules = (
            dict.fromkeys(DEFAULT_RULES, given) if isinstance(given, str) else {**DEFAULT_RULES, **given}
        )
        for role, rule in self.rules.items():
            if rule not in ("text", "parse", "error") or role not in DEFAULT_RULES:
                raise RenderError(
                    "content_special_tokens is not understood",
                    where=f"content_special_tokens[{role!r}]",
                    expected="'text', 'parse' or 'error', for all roles or in a mapping by role",
                    got=repr(rule),
                )
        processor = media.processor if media is not None else None
        self._writer = TokenWriter(
            tokenizer,
            placeholders=processor.placeholder if processor is not None else {},
            placeholder_tokens=processor.placeholder_tokens if processor is not None else (),
            rules=self.rules,
            bos_token=templates.special_tokens.get("bos_token"),
            # Transformers writes more where a processor encodes the prompt, and not where a tokenizer does.
            processor=processor.affixes if processor is not None else None,
        )
        self._memo = new_memo(memo_bytes) if memo_bytes else None
        self._parsers: LRUCache[KnownTemplate, ResponseParser] = LRUCache(256)
        if tool_call_grammar is not None:
            # Imported here, since most programs that render never parse.
            from mmrender.parsing.grammars import all_grammars

            names = all_grammars(tool_call_grammar)
            _check_option("tool_call_grammar", tool_call_grammar, names.__contains__, " or ".join(names))
        self._tool_call_grammar = tool_call_grammar
        _check_option("unprinted", unprinted, get_args(Unprinted).__contains__, "'error' or 'allow'")
        self._unprinted = unprinted
        self._load: Callable[..., Renderer] | None = None
        self._open(Workers(workers, queue_size, workers or 0))

    def _open(self, workers: Workers) -> None:
        """Take threads; bridges are made anew, since they keep hold of the threads that load their images."""
        self._workers = workers
        if self.media is not None:
            self.media = self.media.with_executor(workers.media)
        self._bridges: LRUCache[KnownTemplate, Bridge] = LRUCache(256)

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
        unprinted: Unprinted = "error",
        tool_images: ToolImages = "tool",
        limits: TemplateLimits | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        template_processes: BoundedProcesses | None = None,
        memo_bytes: int = 128 << 20,
        profile_cache: bool = True,
        workers: int | None = None,
        queue_size: int | None = None,
    ) -> "Renderer":
        """Load the renderer of a model. No weights are read.

        Args:
            name_or_path: A directory in hub layout, or a hub id.
            revision: Branch, tag or commit on the hub.
            trust_remote_code: Run image processor code that the model brings along.
            chat_template: Jinja text in place of the model's, or the name of one of its templates.
            image_backend: Which of the two exact ways of resampling: `"torch"`, as inference engines do, or
                `"pil"`, which needs no torch. It is part of every item's identity.
            media_policy: Limits on what is loaded, and from where.
            media_cache: Cache of processed items; pass one to share it between renderers.
            content_special_tokens: As for `Renderer`: `"text"`, `"parse"` or `"error"`.
            tool_call_grammar: As for `Renderer`; one of `mmrender.parsing.grammars.GRAMMARS`.
            unprinted: As for `Renderer`: `"error"` or `"allow"`.
            tool_images: What becomes of an image in a tool result whose template writes none there: `"tool"`
                leaves it to the template, which is an error; `"user"` moves it into a user turn of its own
                after the results. Its tokens still belong to the tool's message.
            limits: Bounds on one run of the template.
            clock: Gives the time that the template's `strftime_now` formats.
            template_processes: Child processes with limits, in which the template is compiled and run.
            memo_bytes: As for `Renderer`.
            profile_cache: Keep the findings of probes of the template on disk, in the folder that the
                environment variable `MMRENDER_CACHE` names.
            workers: As for `Renderer`.
            queue_size: As for `Renderer`.

        Raises:
            ModelNotFoundError: There is no such directory or repository.
            TemplateError: There is no chat template, or it does not compile.
            RenderError: An option is not one of its values.
            TokenizerError: `tokenizer.json` is missing or unusable.
            ProcessorError: The image settings cannot be used. Those of families that are not native are read
                with the first image; `renderer.media.require_processor()` reads them at once.
        """
        options = {name: value for name, value in locals().items() if name not in ("cls", "name_or_path")}
        _check_option("name_or_path", name_or_path, _is_path, "a directory or a hub id")
        for option, kind in _KINDS.items():
            is_kind = partial(_is_none_or, kind)
            _check_option(option, options[option], is_kind, f"a {kind.__name__}, or None")
        _check_option("clock", clock, callable, "a function that returns the time")
        name = Path(name_or_path).resolve() if Path(name_or_path).is_dir() else name_or_path
        model = find_model(name_or_path, revision=revision)
        tokenizer = Tokenizer.load(model)
        templates = TemplateSet.load(
            model,
            tokenizer,
            chat_template=chat_template,
            limits=limits,
            clock=clock,
            processes=template_processes,
            profile_cache=profile_cache,
            tool_images=tool_images,
        )
        processor = load_processor(
            model,
            image_backend=image_backend,
            trust_remote_code=trust_remote_code,
            template=templates.find({}, has_tools=False),
        )
        media = None
        if processor is not None:
            media = MediaResolver(processor, media_policy or MediaPolicy(), media_cache or MediaCache())
        renderer = cls(
            templates,
            tokenizer,
            media,
            content_special_tokens=content_special_tokens,
            tool_call_grammar=tool_call_grammar,
            unprinted=unprinted,
            memo_bytes=memo_bytes,
            vocab_size=model.vocab_size,
            sampling_defaults=model.sampling_defaults,
            workers=workers,
            queue_size=queue_size,
        )
        renderer._load = partial(cls.from_pretrained, name, **options)
        return renderer

    def __reduce__(self) -> tuple[Any, ...]:
        if self._load is None:
            raise InputError(
                "a renderer that was put together from its parts cannot be pickled",
                expected="one of Renderer.from_pretrained",
            )
        return self._load, ()

    def with_workers(
        self, workers: int | None = None, *, queue_size: int | None = None, media_threads: int | None = None
    ) -> Self:
        """Return a renderer with threads of its own, which shares all else; see `RendererPool`."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._open(Workers(workers, queue_size, media_threads))
        if self._load is not None:
            other._load = partial(self._load, workers=workers, queue_size=queue_size)
        return other

    def close(self) -> None:
        """Finish the `a...` calls that have a place, refuse further ones, and end the threads. Idempotent."""
        self._workers.close()

    async def aclose(self) -> None:
        """`close` without holding up the event loop."""
        import asyncio

        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def arender(
        self, messages: Sequence[MessageLike], *, nowait: bool = False, **options: Unpack[RenderOptions]
    ) -> RenderedTokens:
        """Render on a worker.

        Args:
            messages: The conversation.
            nowait: Whether to fail rather than wait if every place in the queue is taken.
            **options: Those of `render`.

        Raises:
            PoolFullError: `nowait`, and every place is taken.
            PoolClosedError: The renderer is closed.
        """
        return await self._on_worker(self.render, nowait, messages, **options)

    async def abridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        nowait: bool = False,
        **options: Unpack[BridgeOptions],
    ) -> RenderedTokens | None:
        """Bridge on a worker; options of `bridge_to_next_turn`, errors as for `arender`.

        If the bridge is None, `why_not_bridged` has the reason for the task that awaits it.
        """
        turn = previous_prompt_ids, previous_completion_ids, new_messages
        return await self._on_worker(self.bridge_to_next_turn, nowait, *turn, **options)

    async def aparse_response(
        self, token_ids: Sequence[int], *, nowait: bool = False, **options: Unpack[ParseOptions]
    ) -> "ParsedResponse":
        """Read a completion on a worker; options of `parse_response`, errors as for `arender`."""
        return await self._on_worker(self.parse_response, nowait, token_ids, **options)

    async def _on_worker(
        self, method: Callable[..., Result], nowait: bool, *arguments: Any, **options: Any
    ) -> Result:
        """Call a method in a copy of the caller's context, and keep the outcome of a bridge."""
        context = contextvars.copy_context()
        result = await self._workers.run(context, nowait, partial(method, *arguments, **options))
        if _why_not_bridged in context:
            _why_not_bridged.set(context[_why_not_bridged])
        return result

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
            continue_final_message: Whether to end with the text of the last message, for the model to go on
                from; a name such as `"reasoning_content"` ends with that field's. None of it counts as
                sampled.
            chat_template_kwargs: Further template variables, such as `{"enable_thinking": False}`.
            **template_arguments: The same as keywords.

        Raises:
            InputError: There is no such keyword, and the template reads no such variable; a variable is given
                twice; the template does not print a tool, a document or a message's text.
            MessageError: A message is malformed, or a member of it is misspelt.
            MediaError: An image cannot be loaded or processed.
            TemplateError: The template refuses or fails.
            PlaceholderError: The template drops an image, or writes one too many.
            SpecialTokenError: Content holds a special token, and its role is set to `error`.
        """
        request = read_request(
            messages,
            tools=tools,
            documents=documents,
            images=images,
            videos=videos,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._variables("render", chat_template_kwargs, template_arguments),
            fingerprint=part_fingerprint,
        )
        key = request_key(request) if self._memo is not None else None
        if self._memo is not None and key is not None and (entry := self._memo.get(key)) is not None:
            recalled = from_memo(entry, self.media)
            if recalled is not None:
                return recalled
        rendering = self._rendering(request)
        rendered = rendering.render(request)
        if self._memo is not None and key is not None and not rendering.known.template.reads_clock:
            self._memo.put(key, to_memo(rendered))
        return rendered

    def render_ids(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> list[int]:
        """Render to token ids alone; options and errors as for `render`."""
        return self.render(messages, **options).token_ids

    def render_text(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> TracedStr:
        """Render to text, each placeholder once and each character attributed; `images` are not loaded."""
        request = read_request(
            messages,
            tools=tools,
            documents=documents,
            images=images,
            videos=videos,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._variables("render", chat_template_kwargs, template_arguments),
        )
        return self._rendering(request).text(request)

    def encode_text(
        self, text: str, *, images: Sequence[Any] | None = None, videos: Sequence[Any] | None = None
    ) -> RenderedTokens:
        """Encode a text that the template has written, each placeholder widened to the next image.

        Nothing is known of who wrote which part of it, so every special token in it is syntax. To render
        messages keeps what users write apart.

        Args:
            text: The text.
            images: One source for each image's placeholder, in order.
            videos: The same for videos.

        Raises:
            MediaError: An image cannot be loaded or processed.
            PlaceholderError: There are more placeholders than sources, or fewer.
        """
        parts: list[Part] = [
            *[ImagePart(one) for one in images or ()],
            *[VideoPart(one) for one in videos or ()],
        ]
        message = Message(role="user", content=tuple(parts))
        request = read_request([message], where="text", fingerprint=part_fingerprint)
        layout = self._writer.lay_out(TracedStr(text))
        encoded, sidecar = self._rendering(request).encode(layout, request)
        return RenderedTokens(
            token_ids=encoded.ids,
            spans=tuple(encoded.spans),
            multi_modal_data=sidecar,
            text=text,
            placeholder_ids=self._writer.placeholder_ids,
            _decode=self.decode,
        )

    def _variables(self, call: str, mapping: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Template variables of a call, from `chat_template_kwargs` and its further keywords."""
        return read_variables(
            mapping,
            keywords,
            known=self.templates.arguments,
            options=_KEYWORDS[call],
            reserved={*GIVEN, *self.templates.special_tokens},
        )

    def _rendering(self, request: RenderRequest) -> Rendering:
        """Find the template for a request; refuse members of messages that it was probably meant to read."""
        known = self.templates.find(request.variables, has_tools=request.tools is not None)
        refuse_misspelt(request, known.template.source)
        return Rendering(known, self._writer, self.media, self._unprinted)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[Any] | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
        previous_roles: Collection[Role] | None = None,
        history: History = "sampled",
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> RenderedTokens | None:
        """Append new messages and the generation prompt to what was sampled, which stays as it is.

        The result begins with the previous prompt and completion, token for token. Its `roles` and message
        indices count from the first new message; its sidecar holds the previous items and then the new ones.

        Args:
            previous_prompt_ids: The previous prompt; a list, or an integer array of shape `(n,)`.
            previous_completion_ids: What it sampled, stop token included if there was one.
            new_messages: Tool results, user turns, and what else may follow an assistant turn.
            tools: Tool definitions of the conversation.
            previous_multi_modal_data: The sidecar of the previous prompt.
            previous_roles: Roles of the messages of the previous prompt. What a template writes only after a
                system message, say, then stands against no bridge in a conversation without one.
            history: `"sampled"` keeps earlier turns as they are; `"template"` gives None where the template
                would now write them differently.
            images: Sources for the image parts that have none.
            videos: The same for video parts.
            chat_template_kwargs: Template variables of the previous rendering.
            **template_arguments: The same as keywords.

        Returns:
            None where it cannot be proved that appending is right; `why_not_bridged` then says why, and the
            caller renders in full.

        Raises:
            InputError: The ids are no flat integers, or lie outside the vocabulary.
            MessageError: A new message is malformed.
            MediaError: A new image cannot be loaded or processed.
            PlaceholderError: The template drops a new image.
        """
        variables = self._variables("bridge", chat_template_kwargs, template_arguments)
        prompt = checked_ids(previous_prompt_ids, "previous_prompt_ids", self.vocab_size)
        completion = checked_ids(previous_completion_ids, "previous_completion_ids", self.vocab_size)
        _check_option("history", history, get_args(History).__contains__, "'sampled' or 'template'")
        if previous_roles is not None:
            _check_option("previous_roles", previous_roles, _are_roles, "a collection of roles")
        reason = None
        try:
            request = read_request(
                new_messages,
                tools=tools,
                images=images,
                videos=videos,
                variables=variables,
                fingerprint=part_fingerprint,
                where="new_messages",
                allow_empty=True,
            )
            rendering = self._rendering(request)
            bridge = self._bridges.get_or_compute(rendering.known, lambda: Bridge(rendering))
            return bridge.extend(
                prompt,
                completion,
                request,
                previous=MultiModalData() if previous_multi_modal_data is None else previous_multi_modal_data,
                history=history,
                roles=previous_roles,
            )
        except NotBridged as refusal:
            reason = str(refusal)
            _log.debug("no bridge: %s", refusal)
            return None
        finally:
            self.set_outcome(reason)

    @property
    def why_not_bridged(self) -> str | None:
        """Why the last bridge that this thread or task asked for is None; None if there was one."""
        last = _why_not_bridged.get(None)
        return last[1] if last is not None and last[0]() is self else None

    def set_outcome(self, reason: str | None) -> None:
        """Make this the `why_not_bridged` of the thread or task: that of a bridge made elsewhere."""
        _why_not_bridged.set((weakref.ref(self), reason))

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> "ParsedResponse":
        """Read content, reasoning, and every tool call that the model tried; any completion can be read.

        Args:
            token_ids: What the model sampled.
            tools: Tool definitions: argument types follow their JSON schemas, and other tools are unknown.
            prompt_ids: The prompt, which says whether it opened a reasoning block.
            chat_template_kwargs: Template variables of the prompt's rendering.
            **template_arguments: The same as keywords.

        Raises:
            InputError: The ids are no flat integers, or lie outside the vocabulary.
        """
        ids = checked_ids(token_ids, "token_ids", self.vocab_size)
        prompt = None if prompt_ids is None else checked_ids(prompt_ids, "prompt_ids", self.vocab_size)
        parser = self.response_parser(
            has_tools=tools is not None,
            chat_template_kwargs=chat_template_kwargs,
            **template_arguments,
        )
        return parser.parse(ids, tools=tools, prompt_ids=prompt)

    def response_parser(
        self,
        *,
        has_tools: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> "ResponseParser":
        """Return the parser; its `choice` says how the grammar of tool calls was proved."""
        # Imported here, since most programs that render never parse.
        from mmrender.parsing.prove import build_parser

        variables = self._variables("parse", chat_template_kwargs, template_arguments)
        known = self.templates.find(variables, has_tools=has_tools)
        return self._parsers.get_or_compute(
            known, lambda: build_parser(known, grammar=self._tool_call_grammar)
        )

    @property
    def profile(self) -> TemplateProfile:
        """Findings about the template, without template arguments."""
        return self.templates.find({}, has_tools=False).profile

    def template_profile(
        self,
        *,
        has_tools: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> TemplateProfile:
        """Return the findings about the template for conversations with or without tools."""
        variables = self._variables("profile", chat_template_kwargs, template_arguments)
        return self.templates.find(variables, has_tools=has_tools).profile

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end the assistant's turn: those of the model's files, and those of its template."""
        return sorted(self.profile.stop_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InputError: The ids are no flat integers, or lie outside the vocabulary.
        """
        return self.tokenizer.decode(checked_ids(token_ids, "token_ids", self.vocab_size))


def _check_option(name: str, value: Any, is_valid: Callable[[Any], object], expected: str) -> None:
    """Refuse an option that is not one of its values."""
    try:
        if is_valid(value):
            return
    except TypeError:  # an unhashable value is in no collection
        pass
    raise RenderError(f"{name} is not understood", where=name, expected=expected, got=describe(value))


def _is_none_or(kind: type, value: object) -> bool:
    return value is None or isinstance(value, kind)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _are_roles(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and {*value} <= {*get_args(Role)}
