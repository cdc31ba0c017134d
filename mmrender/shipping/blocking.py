"""`BlockingSender` and `BlockingReceiver`: the two ends for threads, on an event loop of their own."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar, Unpack

from mmrender.errors import ShippingClosedError, ShippingConnectionError
from mmrender.shipping.protocol import End
from mmrender.shipping.receiver import Received, Receiver, ReceiverOptions, ReceiverStats
from mmrender.shipping.receivers import Receivers
from mmrender.shipping.sender import Delivery, Sender, SenderOptions, SenderStats

T = TypeVar("T")
E = TypeVar("E", bound=Sender | Receiver)


class _LoopThread(End, Generic[E]):
    """A sender or a receiver on an event loop, in a thread from its first use until it is closed."""

    def __init__(self, end: E) -> None:
        self._end = end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and wait for it. After `timeout` seconds it is cancelled.

        Raises:
            TimeoutError: It took longer.
            ShippingClosedError: The thread has ended, or runs in another process.
        """
        try:
            self.claim()  # before the lock, which a thread of the parent may have held at a fork
            with self._lock:  # the loop runs all submitted work before it ends
                if self._closed:
                    raise ShippingClosedError("this end is closed")
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                    self._thread = threading.Thread(
                        target=self._serve,
                        args=(self._loop,),
                        name=f"mmrender-{type(self).__name__}",
                        daemon=True,
                    )
                    self._thread.start()
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise
        try:
            return future.result(timeout)
        except CancelledError as error:
            raise ShippingClosedError("this end is closed") from error
        except BaseException:
            future.cancel()
            raise

    def open(self) -> None:
        """As `Sender.connect` or `Receiver.open`."""
        end = self._end
        self.run(end.open() if isinstance(end, Receiver) else end.connect())

    def close(self, timeout: float | None = 30.0) -> None:
        """As `Sender.aclose` or `Receiver.aclose`. The thread ends in any case."""
        self.claim()
        end = self._end
        try:
            if self._loop is not None:
                self.run(end.aclose() if isinstance(end, Receiver) else end.aclose(timeout))
        except ShippingClosedError:
            return
        finally:
            with self._lock:
                if self._loop is not None and not self._closed:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                self._closed = True
            if self._thread is not None:
                self._thread.join()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close(0)
            raise
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self.close(30.0 if error is None else 1.0)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()


class BlockingDelivery:
    """A message in flight.

    Attributes:
        id: As `Delivery.id`.
    """

    def __init__(self, delivery: Delivery, thread: _LoopThread[Sender]) -> None:
        self.id = delivery.id
        self._delivery = delivery
        self._thread = thread

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has acknowledged it."""
        return self._delivery.acknowledged

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the acknowledgement. A known outcome is reported also after the sender was closed.

        Raises:
            TimeoutError: It did not come in time.
            ShippingError: As awaiting a `Delivery`.
        """
        if not self._delivery.done:
            try:
                self._thread.run(self._delivery.settled.wait(), timeout)
            except ShippingClosedError:
                # The thread may have ended in between, after it had settled the message.
                if not self._delivery.done:
                    raise
        self._delivery.check()


class BlockingSender(_LoopThread[Sender]):
    """`Sender` for any number of threads.

    A sender that is used first after a fork is another sender in each process.

    Args:
        receivers: As for `Sender`.
        **options: Options of `Sender`.
    """

    def __init__(self, receivers: Receivers, **options: Unpack[SenderOptions]) -> None:
        super().__init__(Sender(receivers, **options))

    @property
    def stats(self) -> SenderStats:
        """Figures so far, also once it is closed."""
        return self._end.stats

    def open(self, timeout: float | None = 30.0) -> None:
        """As `Sender.connect`."""
        self.run(self._end.connect(timeout))

    def send(self, value: Any, *, timeout: float | None = None) -> BlockingDelivery:
        """As `Sender.send`.

        Raises:
            ShippingConnectionError: There was no room in time. Nothing was accepted.
        """

        async def send() -> Delivery:
            async with asyncio.timeout(timeout):
                return await self._end.send(value)

        try:
            return BlockingDelivery(self.run(send()), self)
        except TimeoutError as error:
            raise ShippingConnectionError(
                "too much is unacknowledged",
                where=str(self._end.receivers),
                got=f"no room for {timeout:g} s",
            ) from error

    def flush(self, timeout: float | None = None) -> None:
        """As `Sender.flush`."""
        self.run(self._end.flush(timeout))


class BlockingReceiver(_LoopThread[Receiver]):
    """`Receiver` for a thread, such as a trainer's.

    Args:
        url: Where to listen.
        **options: Options of `Receiver`.
    """

    def __init__(self, url: str, **options: Unpack[ReceiverOptions]) -> None:
        super().__init__(Receiver(url, **options))

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        return self._end.url

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far, also once it is closed."""
        return self._end.stats

    def receive(self, timeout: float | None = None) -> Received:
        """Wait for the next message.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            TimeoutError: None came in time. None is lost.
            ShippingClosedError: The receiver is closed.
        """
        message = self.run(self._end.receive(timeout))

        async def acknowledge() -> None:
            message.ack()

        return replace(message, _acknowledge=lambda _: self.run(acknowledge()))

    def __iter__(self) -> Iterator[Received]:
        while True:
            try:
                message = self.receive()
            except ShippingClosedError:
                return
            yield message
