"""The facade: `Renderer` opens a model directory and renders conversations."""

import contextvars
import datetime
import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from mmrender.bridge.bridge import Bridge, History
from mmrender.bridge.tail import NotBridged
from mmrender.caching import LRUCache
from mmrender.content.ids import TokenIds, checked_ids
from mmrender.content.messages import read_request, read_variables, refuse_misspelt
from mmrender.errors import InputError, RenderError, check_option
from mmrender.media.pixels import ImageBackend
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.registry import load_processor, with_sound_tracks
from mmrender.media.resolve import MediaCache, MediaResolver, part_fingerprint
from mmrender.messages import AudioPart, ImagePart, Message, MessageLike, Part, RenderRequest, Role, VideoPart
from mmrender.model.convert import open_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.options import SpecialTokenRules, check_options, special_token_rules
from mmrender.processes import BoundedProcesses
from mmrender.protocols import BridgeOptions, ParseOptions, RenderOptions
from mmrender.rendering import Memo, Rendering, Unprinted
from mmrender.sidecar import MultiModalData
from mmrender.template.chat import GIVEN, ToolImages
from mmrender.template.known import KnownTemplate, TemplateSet
from mmrender.template.limits import TemplateLimits
from mmrender.template.profile import TemplateProfile
from mmrender.template.text import TracedStr
from mmrender.tokens.encode import DEFAULT_RULES, TokenWriter
from mmrender.tokens.rendered import RenderedTokens
from mmrender.workers import Workers

if TYPE_CHECKING:
    from mmrender.parsing.parser import ParsedResponse, ResponseParser

_log = logging.getLogger("mmrender.bridge.bridge")

AnyRenderer = TypeVar("AnyRenderer", bound="Renderer")
Result = TypeVar("Result")

_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "render": tuple(RenderOptions.__annotations__),
    "bridge": tuple(BridgeOptions.__annotations__),
    "parse": tuple(ParseOptions.__annotations__),
    "profile": ("has_tools", "chat_template_kwargs"),
}
"""Keywords of each call besides template variables."""

_why_not_bridged: "contextvars.ContextVar[tuple[weakref.ref[Renderer], str | None]]" = contextvars.ContextVar(
    "why_not_bridged"
)
"""Renderer that this thread or task last asked for a bridge, and the reason if it returned None."""


class Renderer:
    """Renders conversations with a model's own chat template. Safe to share between threads and event loops.

    Calls run on the caller's thread. Methods that begin with `a` run on a worker thread and leave the event
    loop free. The threads start at the first of these calls, and `close` ends them. Do not modify messages or
    images until the call returns.

    A renderer is pickled as its options, so the receiver loads the model again, with empty caches.

    `from_pretrained` opens a model. The class itself joins the parts of a renderer; its other options are as
    for `from_pretrained`.

    Args:
        templates: The model's templates with the findings about each.
        tokenizer: The model's tokenizer.
        media: Loads and processes media parts, or None for a text-only model.
        vocab_size: Number of ids that the model has embeddings for, by default the tokenizer's.
        sampling_defaults: Sampling parameters that the model's files recommend, under vLLM's names.

    Attributes:
        sampling_defaults: The same parameters. They are never applied automatically, since a policy is
            trained on the distribution that it is sampled from, and `top_k` or a temperature change it.
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
        self.rules = special_token_rules(content_special_tokens)
        self._writer = TokenWriter(
            tokenizer,
            # Transformers adds tokens only if a processor, not the tokenizer, encodes the prompt.
            media.processor if media is not None else None,
            rules=self.rules,
            bos_token=templates.special_tokens.get("bos_token"),
        )
        self._memo = Memo(memo_bytes, media)
        if tool_call_grammar is not None:
            # Imported here, since most programs that render never parse.
            from mmrender.parsing.grammars import all_grammars

            names = all_grammars(tool_call_grammar)
            check_option("tool_call_grammar", tool_call_grammar, tuple(names), error=RenderError)
        self._tool_call_grammar = tool_call_grammar
        check_options(unprinted=unprinted)
        self._unprinted = unprinted
        self._load: Callable[..., Renderer] | None = None
        self._open(Workers(workers, queue_size, workers or 0))

    def _open(self, workers: Workers) -> None:
        """Use these threads. Bridges are built again, since they refer to the threads that load images."""
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
        use_audio_in_video: bool = False,
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
            trust_remote_code: Run tokenizer and processor code that the model brings along.
            chat_template: Jinja text to use instead of the model's template, or the name of one of its
                templates.
            image_backend: Implementation of resizing to match bit for bit: `"torch"`, as in inference
                servers, or `"pil"`, which does not need torch. It is part of every item's identity.
            use_audio_in_video: Render the sound tracks of encoded videos between their frames, as omni models
                do with the option of this name.
            media_policy: Limits on media and their sources.
            media_cache: Cache of processed items. Pass one to share it between renderers.
            content_special_tokens: How to encode special tokens in content: `"text"`, `"parse"` or `"error"`,
                for all roles or by role. Other roles follow `mmrender.tokens.encode.DEFAULT_RULES`.
            tool_call_grammar: Grammar of tool calls, one of `mmrender.parsing.grammars.GRAMMARS`, if it
                cannot be proved from the template.
            unprinted: How to treat a tool, a document or a message's text that the template ignores:
                `"error"` or `"allow"`.
            tool_images: How to render images in tool results if the template does not support them: `"tool"`
                leaves them to the template, which is an error; `"user"` moves them into a user turn of its
                own after the results. Their tokens still belong to the tool's message.
            limits: Bounds on one run of the template.
            clock: Returns the time that the template's `strftime_now` formats.
            template_processes: Child processes with limits, in which the template is compiled and run.
            memo_bytes: Maximum size of the memo of whole renderings; 0 turns it off.
            profile_cache: Keep the findings about the template on disk, in the folder that the environment
                variable `MMRENDER_CACHE` names.
            workers: Threads for the `a...` calls, and as many that help with the images of one call. By
                default one per processor, at most four, and no threads that help.
            queue_size: Calls that may wait for a worker, by default four for each. When the queue is full,
                calls wait, or raise `PoolFullError` with `nowait=True`.

        Raises:
            ModelNotFoundError: The directory or repository does not exist.
            TemplateError: The chat template is missing, or does not compile.
            RenderError: An option is not one of its values.
            TokenizerError: The tokenizer is missing or unusable, or cannot be converted exactly.
            ProcessorError: The image settings cannot be used. For families that are not native, they are read
                with the first image, or by `renderer.media.require_processor()`.
        """
        options = {name: value for name, value in locals().items() if name not in ("cls", "name_or_path")}
        check_options(name_or_path=name_or_path, **options)
        name = Path(name_or_path).resolve() if Path(name_or_path).is_dir() else name_or_path
        model = open_model(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
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
        if use_audio_in_video:
            processor = with_sound_tracks(processor, str(name))
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
                expected="a renderer from Renderer.from_pretrained",
            )
        return self._load, ()

    def close(self) -> None:
        """Finish the queued `a...` calls, refuse further ones, and end the threads. Idempotent."""
        self._workers.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
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
            nowait: Raise instead of waiting if the queue is full.
            **options: As for `render`.

        Raises:
            PoolFullError: The queue is full, and `nowait` is set.
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
        """Bridge on a worker; options as for `bridge_to_next_turn`, errors as for `arender`.

        If the result is None, `why_not_bridged` has the reason in the task that awaits it.
        """
        turn = previous_prompt_ids, previous_completion_ids, new_messages
        return await self._on_worker(self.bridge_to_next_turn, nowait, *turn, **options)

    async def aparse_response(
        self, token_ids: Sequence[int], *, nowait: bool = False, **options: Unpack[ParseOptions]
    ) -> "ParsedResponse":
        """Read a completion on a worker; options as for `parse_response`, errors as for `arender`."""
        return await self._on_worker(self.parse_response, nowait, token_ids, **options)

    async def _on_worker(
        self, method: Callable[..., Result], nowait: bool, *arguments: Any, **options: Any
    ) -> Result:
        """Call a method in a copy of the caller's context, and copy its `why_not_bridged` back."""
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
        audio: Sequence[Any] | None = None,
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
            images: Sources for the image parts without a source, in order.
            videos: The same for video parts.
            audio: The same for audio parts. An array comes with its rate, as `(array, rate)`.
            add_generation_prompt: Whether to open the assistant's turn.
            continue_final_message: Leave the last message open for the model to continue. A field name such
                as `"reasoning_content"` continues that field. The prefix does not count as sampled.
            chat_template_kwargs: Further template variables, such as `{"enable_thinking": False}`.
            **template_arguments: The same as keywords.

        Raises:
            InputError: Neither the renderer nor the template knows a keyword, a variable comes twice, or the
                template ignores a tool, a document or the text of a message.
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
            audio=audio,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._variables("render", chat_template_kwargs, template_arguments),
            fingerprint=part_fingerprint,
        )
        key = self._memo.key(request)
        rendered = self._memo.get(key)
        if rendered is None:
            rendering = self._rendering(request)
            rendered = rendering.render(request)
            if not rendering.known.template.reads_clock:
                self._memo.put(key, rendered)
        return rendered

    def render_ids(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> list[int]:
        """Render to token ids only; options and errors as for `render`."""
        return self.render(messages, **options).token_ids

    def render_text(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> TracedStr:
        """Render to text, with one placeholder per image and an origin for each character.

        Images are not loaded. Options and errors as for `render`.
        """
        variables: dict[str, Any] = {**options}
        mapping = variables.pop("chat_template_kwargs", None)
        arguments = {name: variables.pop(name) for name in _KEYWORDS["render"] if name in variables}
        variables = self._variables("render", mapping, variables)
        request = read_request(messages, **arguments, variables=variables)
        return self._rendering(request).text(request)

    def encode_text(
        self,
        text: str,
        *,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        audio: Sequence[Any] | None = None,
    ) -> RenderedTokens:
        """Encode a rendered text, each placeholder widened to the next image, video or audio clip.

        The text has no provenance, so every special token in it counts as syntax. Use `render` to keep the
        text of users literal.

        Args:
            text: The text.
            images: One source for each image placeholder, in order.
            videos: The same for videos.
            audio: The same for audio. An array comes with its rate, as `(array, rate)`.

        Raises:
            MediaError: An image cannot be loaded or processed.
            PlaceholderError: There are more placeholders than sources, or fewer.
        """
        parts: list[Part] = [*map(ImagePart, images or ()), *map(VideoPart, videos or ())]
        parts += [AudioPart(None)] * len(audio or ())
        message = Message(role="user", content=tuple(parts))
        request = read_request([message], audio=audio, where="text", fingerprint=part_fingerprint)
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
        """Merge and check the template variables of a call."""
        if not keywords and (mapping is None or mapping == {}):
            return {}
        return read_variables(
            mapping,
            keywords,
            known=self.templates.variables,
            options=_KEYWORDS[call],
            reserved={*GIVEN, *self.templates.special_tokens},
        )

    def _rendering(self, request: RenderRequest) -> Rendering:
        """Find the template for a request, and refuse misspelt members of its messages."""
        known = self.templates.find(request.variables, has_tools=request.tools is not None)
        if any(message.extra for message in request.messages):
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
        audio: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> RenderedTokens | None:
        """Append new messages and the generation prompt to a sampled turn, whose tokens stay as they are.

        The result begins with the previous prompt and completion, token for token. Its `roles` and message
        indices count from the first new message. Its sidecar holds the previous items, then the new ones.

        Args:
            previous_prompt_ids: The previous prompt: a list, or an integer array of shape `(n,)`.
            previous_completion_ids: The sampled tokens, with the stop token if there was one.
            new_messages: Tool results, user turns, and other messages that may follow an assistant turn.
            tools: Tool definitions of the conversation.
            previous_multi_modal_data: The sidecar of the previous prompt.
            previous_roles: Roles of the messages of the previous prompt. With them, the bridge can ignore
                template behaviour that needs a role which this conversation does not have.
            history: `"sampled"` keeps earlier turns as they are; `"template"` returns None if the template
                would now write them differently.
            images: Sources for the image parts without a source.
            videos: The same for video parts.
            audio: The same for audio parts. An array comes with its rate, as `(array, rate)`.
            chat_template_kwargs: Template variables of the previous rendering.
            **template_arguments: The same as keywords.

        Returns:
            The next prompt, or None if appending cannot be proved right. `why_not_bridged` then has the
            reason, and the caller renders the whole conversation.

        Raises:
            InputError: The ids are not flat integers within the vocabulary.
            MessageError: A new message is malformed.
            MediaError: A new image cannot be loaded or processed.
            PlaceholderError: The template drops a new image.
        """
        variables = self._variables("bridge", chat_template_kwargs, template_arguments)
        prompt = checked_ids(previous_prompt_ids, "previous_prompt_ids", self.vocab_size)
        completion = checked_ids(previous_completion_ids, "previous_completion_ids", self.vocab_size)
        if history != "sampled" or previous_roles is not None:
            check_options(history=history, previous_roles=previous_roles)
        reason = None
        try:
            request = read_request(
                new_messages,
                tools=tools,
                images=images,
                videos=videos,
                audio=audio,
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
        """Reason why the last bridge of this thread or task was refused, or None."""
        last = _why_not_bridged.get(None)
        return last[1] if last is not None and last[0]() is self else None

    def set_outcome(self, reason: str | None) -> None:
        """Set `why_not_bridged` for a bridge that was computed elsewhere."""
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
        """Read content, reasoning and every attempted tool call; any completion can be read.

        Args:
            token_ids: The sampled tokens.
            tools: Tool definitions: arguments are typed by their JSON schemas, and other tools are unknown.
            prompt_ids: The prompt, which shows whether it opened a reasoning block.
            chat_template_kwargs: Template variables of the prompt's rendering.
            **template_arguments: The same as keywords.

        Raises:
            InputError: The ids are not flat integers within the vocabulary.
        """
        ids = checked_ids(token_ids, "token_ids", self.vocab_size)
        prompt = None if prompt_ids is None else checked_ids(prompt_ids, "prompt_ids", self.vocab_size)
        parser = self.response_parser(
            has_tools=tools is not None, chat_template_kwargs=chat_template_kwargs, **template_arguments
        )
        return parser.parse(ids, tools=tools, prompt_ids=prompt)

    def response_parser(
        self,
        *,
        has_tools: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> "ResponseParser":
        """Return the parser; its `choice` shows how the grammar of tool calls was proved."""
        # Imported here, since most programs that render never parse.
        from mmrender.parsing.prove import build_parser

        variables = self._variables("parse", chat_template_kwargs, template_arguments)
        known = self.templates.find(variables, has_tools=has_tools)
        grammar = self._tool_call_grammar
        return known.findings.remember(("parser", grammar), lambda: build_parser(known, grammar=grammar))

    @property
    def profile(self) -> TemplateProfile:
        """Findings about the template without template variables."""
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
        """Return the tokens that end the assistant's turn, from the model's files and its template."""
        return sorted(self.profile.stop_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InputError: The ids are not flat integers within the vocabulary.
        """
        return self.tokenizer.decode(checked_ids(token_ids, "token_ids", self.vocab_size))


def RendererPool(  # noqa: N802 - it reads as the class that it opens
    renderer: AnyRenderer,
    *,
    workers: int | None = None,
    queue_size: int | None = None,
    media_threads: int | None = None,
) -> AnyRenderer:
    """Return a renderer with its own threads that shares tables, memo and media cache with another renderer.

    Args:
        renderer: The other renderer, which stays usable by itself.
        workers: Threads for the `a...` calls, by default one per processor, at most four.
        queue_size: Calls that may wait for a worker, by default four for each. When the queue is full, calls
            wait, or raise `PoolFullError` with `nowait=True`.
        media_threads: Threads that help with images, by default as many as workers; 0 for none.

    Raises:
        InputError: A size is too small.
    """
    pool = object.__new__(type(renderer))
    pool.__dict__.update(renderer.__dict__)
    pool._open(Workers(workers, queue_size, media_threads))
    if renderer._load is not None:
        pool._load = partial(renderer._load, workers=workers, queue_size=queue_size)
    return pool
