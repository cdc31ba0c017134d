"""`RendererPool`: a renderer for many callers at once, threads and coroutines."""

import asyncio
import contextvars
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary

from mmrender.errors import InputError, PoolClosedError, PoolError, PoolFullError
from mmrender.media.resolve import MediaResolver
from mmrender.messages import MessageLike
from mmrender.model.tokenizer import Tokenizer
from mmrender.probing.profile import TemplateProfile
from mmrender.protocols import BridgeOptions, ParseOptions, RenderOptions
from mmrender.renderer import Renderer
from mmrender.template.text import TracedStr
from mmrender.tokens.ids import TokenIds
from mmrender.tokens.rendered import RenderedTokens

if TYPE_CHECKING:
    from mmrender.parsing import ParsedResponse

Result = TypeVar("Result")

_QUEUE_PER_WORKER = 4


class RendererPool:
    """A renderer that many threads and coroutines share, images included.

    There is one set of tables, one memo and one media cache. Plain methods are the renderer's own and run on
    the caller's thread; those that begin with `a` run on a worker and leave the event loop free. The images
    of a conversation are shared out among media threads, whatever thread it is rendered on.

    Messages and images must not be changed before the call that was given them returns.

    Args:
        renderer: What renders. It stays usable by itself.
        workers: Threads that carry out `a...` calls; by default one per processor, at most four.
        queue_size: Calls that may wait for a worker, by default four for each. Beyond that, a call waits to
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
        default = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
        self.workers = _size(workers, default, 1, "workers")
        self.queue_size = _size(queue_size, self.workers * _QUEUE_PER_WORKER, 0, "queue_size")
        self.media_threads = _size(media_threads, self.workers, 0, "media_threads")
        self._renderer = renderer
        self._closed = False
        self._executor = ThreadPoolExecutor(self.workers, "mmrender-pool")
        self._media_executor: ThreadPoolExecutor | None = None
        if self.media_threads and renderer.media is not None:
            self._media_executor = ThreadPoolExecutor(self.media_threads, "mmrender-media")
            self._renderer = renderer.with_executor(self._media_executor)
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __reduce__(self) -> NoReturn:
        raise PoolError(
            "a pool cannot be sent to another process", remedy="Send the model's name, and make a pool there"
        )

    @property
    def renderer(self) -> Renderer:
        """The renderer that all calls share.

        Raises:
            PoolClosedError: The pool is closed.
        """
        if self._closed:
            raise PoolClosedError(
                "the pool is closed", remedy="Make another one, or keep it open until all calls are done"
            )
        return self._renderer

    # The renderer's own members, on the caller's thread.

    def render(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> RenderedTokens:
        """Render on the caller's thread; see `Renderer.render`."""
        return self.renderer.render(messages, **options)

    def render_ids(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> list[int]:
        """Render to token ids alone; see `Renderer.render`."""
        return self.renderer.render_ids(messages, **options)

    def render_text(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> TracedStr:
        """Render to text alone; see `Renderer.render_text`."""
        return self.renderer.render_text(messages, **options)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[MessageLike],
        **options: Unpack[BridgeOptions],
    ) -> RenderedTokens | None:
        """Bridge on the caller's thread; see `Renderer.bridge_to_next_turn`."""
        return self.renderer.bridge_to_next_turn(
            previous_prompt_ids, previous_completion_ids, new_messages, **options
        )

    @property
    def why_not_bridged(self) -> str | None:
        """Why the last bridge that this thread or task asked for is None; None if there was one."""
        return self.renderer.why_not_bridged

    def parse_response(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> "ParsedResponse":
        """Read a completion on the caller's thread; see `Renderer.parse_response`."""
        return self.renderer.parse_response(token_ids, **options)

    def template_profile(self, *, has_tools: bool = False, **template_arguments: Any) -> TemplateProfile:
        """Return the findings about the template for conversations with or without tools."""
        return self.renderer.template_profile(has_tools=has_tools, **template_arguments)

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end the assistant's turn."""
        return self.renderer.get_stop_token_ids()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.renderer.decode(token_ids)

    @property
    def media(self) -> MediaResolver | None:
        """Resolver of media parts, or None for a text-only model."""
        return self.renderer.media

    @property
    def profile(self) -> TemplateProfile:
        """Findings about the template, without template arguments."""
        return self.renderer.profile

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.renderer.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self.renderer.vocab_size

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Sampling parameters that the model's files recommend; nothing applies them unasked."""
        return self.renderer.sampling_defaults

    # The same on a worker.

    async def arender(
        self,
        messages: Sequence[MessageLike],
        *,
        nowait: bool = False,
        **options: Unpack[RenderOptions],
    ) -> RenderedTokens:
        """Render on a worker.

        Args:
            messages: The conversation.
            nowait: Whether to fail rather than wait if every place in the pool is taken.
            **options: Those of `Renderer.render`.

        Raises:
            PoolFullError: `nowait`, and every place is taken.
            PoolClosedError: The pool is closed.
        """
        return await self._on_worker(self._renderer.render, nowait, messages, **options)

    async def abridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        nowait: bool = False,
        **options: Unpack[BridgeOptions],
    ) -> RenderedTokens | None:
        """Bridge on a worker; options of `Renderer.bridge_to_next_turn`, errors as for `arender`.

        If it gives None, `why_not_bridged` says why to the task that awaits it.
        """
        turn = previous_prompt_ids, previous_completion_ids, new_messages
        return await self._on_worker(self._renderer.bridge_to_next_turn, nowait, *turn, **options)

    async def aparse_response(
        self, token_ids: Sequence[int], *, nowait: bool = False, **options: Unpack[ParseOptions]
    ) -> "ParsedResponse":
        """Read a completion on a worker; options of `Renderer.parse_response`, errors as for `arender`."""
        return await self._on_worker(self._renderer.parse_response, nowait, token_ids, **options)

    async def _on_worker(
        self, method: Callable[..., Result], nowait: bool, *arguments: Any, **options: Any
    ) -> Result:
        """Call a renderer's method in a copy of the caller's context, and take over what it says of bridges.

        A caller that is cancelled leaves the queue; a call that has begun runs to its end unheeded.
        """
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.workers + self.queue_size))
        if nowait and places.locked():
            raise PoolFullError(
                "every place in the pool is taken",
                expected=f"fewer than {self.workers + self.queue_size} calls running or waiting",
                remedy="Call again later, leave out nowait, or make the pool with a larger queue_size",
            )
        await places.acquire()
        try:
            renderer = self.renderer  # refuses those that waited while the pool was closed
            context = contextvars.copy_context()
            future: Future[Result] = self._executor.submit(
                context.run, partial(method, *arguments, **options)
            )
        except BaseException:
            places.release()
            raise

        def release(_: object) -> None:
            if not loop.is_closed():  # nobody waits on a closed loop
                loop.call_soon_threadsafe(places.release)

        future.add_done_callback(release)
        result = await asyncio.wrap_future(future)
        renderer.adopt_outcome(context)
        return result

    # The end.

    def close(self) -> None:
        """Finish the accepted calls, refuse all others, and end the threads. Idempotent."""
        self._closed = True
        self._executor.shutdown()
        if self._media_executor is not None:
            self._media_executor.shutdown()

    async def aclose(self) -> None:
        """`close` without holding up the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _size(given: int | None, default: int, least: int, where: str) -> int:
    if given is None:
        return default
    if type(given) is not int or given < least:
        expected = f"a whole number, {least} at least"
        raise InputError("not a size of a pool", where=where, expected=expected, got=repr(given))
    return given
