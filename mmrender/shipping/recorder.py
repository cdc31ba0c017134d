"""`Recorder`: writes received trajectories to a file, from which a trainer reads them."""

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

from mmrender.errors import ShippingClosedError, ShippingError, TrajectoryError
from mmrender.shipping.receiver import Receiver
from mmrender.trajectory.files import TrajectoryReader, TrajectoryWriter
from mmrender.trajectory.tree import Trajectory


class Recorder:
    """Receives trajectories in a thread, and acknowledges each message once it is written.

    A message is one record, and is written once: records keep the ids of their messages, so a message that
    was written and not acknowledged is known when it comes again, also to the next recorder of the file. If
    writing fails, the receiver is closed, senders keep unacknowledged messages, and `close` raises.

    Several recorders, each with a file of its own, share the senders of a list, see `Sender`.

    Args:
        url: Address to listen at, see `Receiver`.
        path: The file, made if it does not exist.
        sync: Wait for the disk before a record is acknowledged, so that it survives the machine.
        **options: Options of `Receiver`, without `ack` and `seen`.

    Raises:
        ShippingError: An option is one of those that are set here, or cannot be used.
        TrajectoryError: The file is of another kind, or another writer has it open.
        OSError: It cannot be opened.
    """

    def __init__(self, url: str, path: str | os.PathLike[str], *, sync: bool = True, **options: Any) -> None:
        if taken := {"ack", "seen"} & options.keys():
            raise ShippingError("a recorder sets this option itself", where=min(taken))
        self._writer = TrajectoryWriter(path, sync=sync)
        try:
            seen = TrajectoryReader(path, tail=False).ids().last_numbers()
            self._receiver = Receiver(url, **options, ack="explicit", seen=seen)
        except BaseException:
            self._writer.close()
            raise
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="mmrender-recorder", daemon=True
        )
        # A function that ends it, once the receiver is open.
        self._opened: Future[Any] = Future()
        self._error: Exception | None = None

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        return self._receiver.url

    @property
    def is_recording(self) -> bool:
        """Whether it still takes messages. If not, writing has failed, and `close` raises the error."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._writer.close()
            raise
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def close(self) -> None:
        """Stop receiving, and close the file. Raises the error of writing, if any."""
        self._receiver.claim()
        if self._thread.ident is not None:
            with suppress(RuntimeError):  # its event loop has ended
                self._opened.result()()
            self._thread.join()
        self._writer.close()
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        """Record until `close` is called or writing fails."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._receiver:
                recording = loop.create_task(self._record())
                recording.add_done_callback(lambda _: ended.set())
                self._opened.set_result(lambda: loop.call_soon_threadsafe(ended.set))
                await ended.wait()
            await recording
        except Exception as error:  # noqa: BLE001 - raised by `close`
            self._error = error
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _record(self) -> None:
        async for message in self._receiver:
            value = message.value
            group = value if isinstance(value, list) else [value]
            if not group or not all(isinstance(one, Trajectory) for one in group):
                raise TrajectoryError(
                    "a message cannot be recorded",
                    where=f"message {message.id!r} from {message.sender}",
                    expected="a trajectory, or a list of them",
                    got=type(value).__name__,
                )
            await asyncio.to_thread(self._writer.append, group, id=message.id)
            with suppress(ShippingClosedError):  # the next recorder knows it
                message.ack()
