"""The same two ends for threads: an event loop of their own does the work."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mmrender.errors import ShippingClosedError, ShippingConnectionError
from mmrender.shipping.delivery import Delivery, Received
from mmrender.shipping.receiver import Receiver
from mmrender.shipping.sender import Sender
from mmrender.shipping.stats import ReceiverStats, SenderStats

T = TypeVar("T")
S = TypeVar("S")


class LoopThread:
    """An event loop that runs in a thread of its own until it is closed."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and wait for it; one that takes too long is cancelled.

        Raises:
            TimeoutError: It took longer.
            ShippingClosedError: The thread has ended.
        """
        future = self.start(work)
        try:
            return future.result(timeout)
        except CancelledError as error:
            raise _closed() from error
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine there."""
        with self._lock:  # the loop runs all that it is given before it is told to end, and ends it then
            if self._open:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise _closed()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plain function there."""

        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def close(self) -> None:
        """End the thread; whoever waits for it is told that it is closed."""
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _serve(self) -> None:
        with self._runner:
            self._runner.run(self._wait())

    async def _wait(self) -> None:
        await self._closing.wait()


def _closed() -> ShippingClosedError:
    return ShippingClosedError("this end is closed")


class BlockingDelivery:
    """A message on its way.

    Attributes:
        id: The id under which the receiver tells it from others.
    """

    def __init__(self, delivery: Delivery, thread: LoopThread) -> None:
        self.id = delivery.id
        self._delivery = delivery
        self._thread = thread

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has acknowledged it."""
        return self._delivery.acknowledged

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the acknowledgement; what is known already is told also after the sender was closed.

        Raises:
            TimeoutError: It did not come in time.
            ShippingError: As awaiting a `Delivery`.
        """

        async def wait() -> None:
            await self._delivery

        if not self._delivery.done:
            try:
                self._thread.run(wait(), timeout)
            except ShippingClosedError:
                # The thread may have ended in between, after it had settled the message.
                if not self._delivery.done:
                    raise
        self._delivery.check()


class _Blocking(Generic[T]):
    """One end, its thread, and how both are closed."""

    end: T

    def __init__(self, make: Callable[[], T], name: str) -> None:
        self._thread = LoopThread(name)
        try:
            self.end = self._thread.call(make)
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close(0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(30.0 if error is None else 1.0)

    def open(self) -> None:
        """Start."""
        raise NotImplementedError

    def close(self, timeout: float | None = 30.0) -> None:
        """End."""
        raise NotImplementedError

    def _stats(self, read: Callable[[], S]) -> S:
        try:
            return self._thread.call(read)
        except ShippingClosedError:  # no thread changes them any more
            return read()


class BlockingSender(_Blocking[Sender]):
    """`Sender` for threads; any number of them may use one.

    Args:
        url: Address of the receiver.
        **options: Those of `Sender`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(lambda: Sender(url, **options), "mmrender-sender")

    @property
    def stats(self) -> SenderStats:
        """Figures so far, also once it is closed."""
        return self._stats(lambda: self.end.stats)

    def open(self, timeout: float | None = 30.0) -> None:
        """As `Sender.connect`."""
        self._thread.run(self.end.connect(timeout))

    def send(self, value: Any, *, id: str | None = None, timeout: float | None = None) -> BlockingDelivery:
        """As `Sender.send`.

        Raises:
            ShippingConnectionError: There was no room in time; nothing was taken in.
        """

        async def send() -> Delivery:
            return await asyncio.wait_for(self.end.send(value, id=id), timeout)

        try:
            return BlockingDelivery(self._thread.run(send()), self._thread)
        except TimeoutError as error:
            raise ShippingConnectionError(
                "too much is unacknowledged", where=str(self.end.address), got=f"no room for {timeout:g} s"
            ) from error

    def flush(self, timeout: float | None = None) -> None:
        """As `Sender.flush`."""
        self._thread.run(self.end.flush(timeout))

    def close(self, timeout: float | None = 30.0) -> None:
        """As `Sender.aclose`; the thread ends in any case."""
        try:
            self._thread.run(self.end.aclose(timeout))
        except ShippingClosedError:
            return
        finally:
            self._thread.close()


class BlockingReceiver(_Blocking[Receiver]):
    """`Receiver` for a thread, such as a trainer's.

    Args:
        url: Where to listen.
        **options: Those of `Receiver`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(lambda: Receiver(url, **options), "mmrender-receiver")

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        return self.end.url

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far, also once it is closed."""
        return self._stats(lambda: self.end.stats)

    def open(self) -> None:
        """As `Receiver.open`."""
        self._thread.run(self.end.open())

    def receive(self, timeout: float | None = None) -> Received:
        """Wait for the next message.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            TimeoutError: None came in time; none is lost.
            ShippingClosedError: The receiver is closed.
        """

        async def receive() -> Received:
            return await self.end.receive(timeout)

        message = self._thread.run(receive())
        acknowledge = message._acknowledge
        return replace(message, _acknowledge=lambda id: self._thread.call(acknowledge, id))

    def __iter__(self) -> Iterator[Received]:
        while True:
            try:
                message = self.receive()
            except ShippingClosedError:
                return
            yield message

    def close(self, timeout: float | None = 30.0) -> None:
        """As `Receiver.aclose`."""
        try:
            self._thread.run(self.end.aclose())
        except ShippingClosedError:
            return
        finally:
            self._thread.close()
