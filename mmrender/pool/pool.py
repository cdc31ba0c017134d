"""`RendererPool`: a renderer for many callers at once, threads and coroutines."""

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from mmrender.bridge.bridge import TokenIds
from mmrender.errors import PoolError
from mmrender.media.resolve import MediaResolver
from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing import ParsedResponse
from mmrender.pool.admission import closed_error
from mmrender.pool.recipe import Recipe
from mmrender.pool.registry import REGISTRY
from mmrender.pool.sizes import PoolSizes
from mmrender.pool.threads import PoolThreads
from mmrender.probing.profile import TemplateProfile
from mmrender.renderer import Renderer
from mmrender.template.traced import TracedStr
from mmrender.tokens.rendered import RenderedTokens

Result = TypeVar("Result")

_why_not_bridged: contextvars.ContextVar[tuple[int, str | None]] = contextvars.ContextVar("why_not_bridged")


class RendererPool:
    """A renderer that many threads and coroutines share, images included.

    There is one set of tables, one memo and one media cache. Plain methods run on the caller's own thread;
    those that begin with `a` run on a worker and leave the event loop free. Where a conversation holds
    several images, media threads help with them, whatever thread it is rendered on.

    Messages and images must not be changed before the call that was given them returns.

    Args:
        renderer: What renders. It stays usable by itself.
        workers: Threads that carry out `a...` calls; by default one per processor, at most four.
        queue_size: Calls that may wait for a worker, by default four a worker. Beyond that, a call waits to
            be let in, or fails if it was made with `nowait=True`.
        media_threads: Threads that help with images, by default as many as workers; 0 for none.

    Raises:
        InputError: A size is too small.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        workers: int | None = None,
        queue_size: int | None = None,
        media_threads: int | None = None,
    ) -> None:
        self._set_up(renderer, None, PoolSizes.of(workers, queue_size, media_threads))

    @classmethod
    def for_model(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        workers: int | None = None,
        queue_size: int | None = None,
        media_threads: int | None = None,
        **renderer_options: Any,
    ) -> Self:
        """The pool of a model: one and the same for equal arguments in a process, until it is closed.

        Pools that differ in size only share one renderer. Such a pool can be pickled: it arrives as the pool
        for the same arguments in the other process. After a fork, a child makes it anew at its first use.

        Args:
            name_or_path: A directory in hub layout, or a hub id.
            workers: As for the class.
            queue_size: As for the class.
            media_threads: As for the class.
            **renderer_options: Options of `Renderer.from_pretrained`.

        Raises:
            TypeError: There is no such option.
            InputError: A size is too small, or an option cannot be compared.
            ModelError: As for `Renderer.from_pretrained`.
        """
        recipe = Recipe.of(name_or_path, renderer_options)
        return cast(Self, REGISTRY.pool(recipe, PoolSizes.of(workers, queue_size, media_threads), cls))

    @classmethod
    def _made(cls, recipe: Recipe, sizes: PoolSizes) -> Self:
        pool = cls.__new__(cls)
        pool._set_up(REGISTRY.renderer(recipe), recipe, sizes)
        return pool

    def _set_up(self, renderer: Renderer, recipe: Recipe | None, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self._recipe = recipe
        self._closed = False
        self._lock = threading.Lock()
        self._threads: PoolThreads | None = PoolThreads(renderer, sizes)
        REGISTRY.watch(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._recipe is None:
            raise PoolError(
                "a pool made around a renderer cannot be sent to another process",
                remedy="Make it with RendererPool.for_model(...), which says what to load there",
            )
        self._recipe.check_portable()
        return _arrived, (type(self), self._recipe.name, dict(self._recipe.options), self.sizes)

    # --- what renders ---

    @property
    def renderer(self) -> Renderer:
        """The renderer that all calls share.

        Raises:
            PoolClosedError: The pool is closed.
            PoolError: The pool was made around a renderer in the process that this one was forked from.
        """
        return self._running().renderer

    def _running(self) -> PoolThreads:
        if self._closed:
            raise closed_error()
        return self._threads or self._made_anew()

    def _made_anew(self) -> PoolThreads:
        """The threads of a forked child."""
        if self._recipe is None:
            raise PoolError(
                "the pool was made in the process that this one was forked from",
                remedy="Make it with RendererPool.for_model(...), or in this process",
            )
        with self._lock:
            if self._threads is None:
                self._threads = PoolThreads(REGISTRY.renderer(self._recipe), self.sizes)
            return self._threads

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._threads = None

    # --- the renderer's own methods, on the caller's thread ---

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> RenderedTokens:
        """Render on the caller's thread; arguments and errors as for `Renderer.render`."""
        return self.renderer.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
        )

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids alone; arguments and errors as for `Renderer.render`."""
        return self.renderer.render_ids(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
        )

    def render_text(self, messages: Sequence[Any], **options: Any) -> TracedStr:
        """What the template writes; arguments and errors as for `Renderer.render_text`."""
        return self.renderer.render_text(messages, **options)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[Any],
        **options: Any,
    ) -> RenderedTokens | None:
        """Bridge on the caller's thread; arguments and errors as for `Renderer.bridge_to_next_turn`."""
        bridged, reason = _bridged(
            self.renderer, previous_prompt_ids, previous_completion_ids, new_messages, options
        )
        _why_not_bridged.set((id(self), reason))
        return bridged

    @property
    def why_not_bridged(self) -> str | None:
        """Why the last bridge that this thread or task asked for is None; None where there is one."""
        pool, reason = _why_not_bridged.get((0, None))
        return reason if pool == id(self) else None

    def parse_response(self, token_ids: Sequence[int], **options: Any) -> ParsedResponse:
        """Read a completion on the caller's thread; arguments as for `Renderer.parse_response`."""
        return self.renderer.parse_response(token_ids, **options)

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end the assistant's turn."""
        return self.renderer.get_stop_token_ids()

    def is_prefix_stable(self, **template_arguments: Any) -> bool:
        """Whether history stays as it was prompted and written, for these template arguments."""
        return self.renderer.is_prefix_stable(**template_arguments)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.renderer.decode(token_ids)

    @property
    def media(self) -> MediaResolver | None:
        """What turns media parts into items, or None for a text-only model."""
        return self.renderer.media

    @property
    def profile(self) -> TemplateProfile:
        """What was found out about the template, without template arguments."""
        return self.renderer.profile

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.renderer.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self.renderer.vocab_size

    # --- the same on a worker ---

    async def arender(
        self, messages: Sequence[Any], *, nowait: bool = False, **options: Any
    ) -> RenderedTokens:
        """Render on a worker; arguments and errors as for `Renderer.render`.

        Args:
            messages: The conversation.
            nowait: Whether to fail rather than wait where every place in the pool is taken.
            **options: Options of `Renderer.render`.

        Raises:
            PoolFullError: `nowait`, and every place is taken.
            PoolClosedError: The pool is closed.
        """
        return await self._on_worker(lambda renderer: renderer.render(messages, **options), nowait)

    async def abridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[Any],
        *,
        nowait: bool = False,
        **options: Any,
    ) -> RenderedTokens | None:
        """Bridge on a worker; arguments and errors as for `Renderer.bridge_to_next_turn` and `arender`.

        Where it gives None, `why_not_bridged` says why to the task that awaits it.
        """
        bridged, reason = await self._on_worker(
            lambda renderer: _bridged(
                renderer, previous_prompt_ids, previous_completion_ids, new_messages, options
            ),
            nowait,
        )
        _why_not_bridged.set((id(self), reason))
        return bridged

    abridge = abridge_to_next_turn

    async def aparse_response(
        self, token_ids: Sequence[int], *, nowait: bool = False, **options: Any
    ) -> ParsedResponse:
        """Read a completion on a worker; arguments as for `Renderer.parse_response` and `arender`."""
        return await self._on_worker(lambda renderer: renderer.parse_response(token_ids, **options), nowait)

    async def _on_worker(self, call: Callable[[Renderer], Result], nowait: bool) -> Result:
        threads = self._running()
        return await threads.run(functools.partial(call, threads.renderer), nowait=nowait)

    # --- the end ---

    def close(self) -> None:
        """Finish the calls that were let in, refuse all others, and end the threads; twice is no error."""
        with self._lock:
            already, self._closed = self._closed, True
        REGISTRY.forget(self)
        if not already and self._threads is not None:
            self._threads.close()

    async def aclose(self) -> None:
        """`close` without holding up the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _bridged(
    renderer: Renderer,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    new_messages: Sequence[Any],
    options: dict[str, Any],
) -> tuple[RenderedTokens | None, str | None]:
    """A bridge, and the reason where there is none, which the renderer tells this thread only."""
    bridged = renderer.bridge_to_next_turn(prompt_ids, completion_ids, new_messages, **options)
    return bridged, renderer.why_not_bridged


def _arrived(cls: type[RendererPool], name: str, options: dict[str, Any], sizes: PoolSizes) -> RendererPool:
    """The pool of this process that stands for one that was pickled in another."""
    return cls.for_model(
        name,
        workers=sizes.workers,
        queue_size=sizes.queue_size,
        media_threads=sizes.media_threads,
        **options,
    )
