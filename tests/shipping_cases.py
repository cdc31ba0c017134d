"""Building blocks for tests of shipping: quick timing, a proxy that cuts connections, messages, certificates."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mmcodecs.shared import Shared
from mmrender.shipping.protocol import Timing

QUICK = Timing(handshake=0.5, heartbeat=0.05, silence=1.0, first_retry=0.001, last_retry=0.01)
PATIENT = Timing(first_retry=0.005, last_retry=0.05)


class CuttingProxy:
    """A socket before another that cuts its first connections after so many bytes, and keeps the rest.

    Args:
        url: Where it listens.
        back: URL of the other.
        budgets: Bytes of each of the first connections.
    """

    def __init__(self, url: str, back: str, budgets: Iterable[int]) -> None:
        self.url, self._back = url, back
        self._budgets = list(budgets)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "CuttingProxy":
        if self.url.startswith("unix://"):
            listening = asyncio.start_unix_server(self._relay, self.url.removeprefix("unix://"))
        else:
            listening = asyncio.start_server(self._relay, *_host_and_port(self.url))
        self._server = await listening
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        left = [self._budgets.pop(0) if self._budgets else 1 << 60]
        try:
            if self._back.startswith("unix://"):
                opening = asyncio.open_unix_connection(self._back.removeprefix("unix://"))
            else:
                opening = asyncio.open_connection(*_host_and_port(self._back))
            far_in, far_out = await opening
        except OSError:
            near_out.close()
            return

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while left[0] > 0 and (data := await source.read(min(65536, left[0]))):
                    left[0] -= len(data)
                    target.write(data)
                    await target.drain()

        pumps = [asyncio.ensure_future(pump(near_in, far_out)), asyncio.ensure_future(pump(far_in, near_out))]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for writer in (near_out, far_out):
                writer.close()


def _host_and_port(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a receiver, of a sender that it lets in, and of a stranger whose certificate it does not know."""

    def certificate(name: str) -> tuple[str, str]:
        key, cert = f"{folder}/{name}.key", f"{folder}/{name}.pem"
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30"
        command += f" -subj /CN={name} -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
        command += f" -keyout {key} -out {cert}"
        subprocess.run(command.split(), check=True, capture_output=True)
        return cert, key

    def context(purpose: ssl.Purpose, own: tuple[str, str], peer: tuple[str, str]) -> ssl.SSLContext:
        made = ssl.create_default_context(purpose, cafile=peer[0])
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_cert_chain(*own)
        return made

    receiver, sender, stranger = map(certificate, ("receiver", "sender", "stranger"))
    return (
        context(ssl.Purpose.CLIENT_AUTH, receiver, sender),
        context(ssl.Purpose.SERVER_AUTH, sender, receiver),
        context(ssl.Purpose.SERVER_AUTH, stranger, receiver),
    )


def picture(number: int, num_bytes: int = 4000) -> np.ndarray:
    return np.full(num_bytes, number % 251, np.uint8)


def message(number: int, pictures: Iterable[int] = (), num_bytes: int = 4000) -> dict[str, Any]:
    """A value that follows from its arguments, with arrays under keys that several messages share."""
    shared = {str(each): Shared(picture(each, num_bytes), b"picture %d" % each) for each in pictures}
    return {"number": number, "tokens": np.arange(number, number + 40), "pictures": shared}


def is_message(value: Any, number: int, pictures: Iterable[int] = (), num_bytes: int = 4000) -> bool:
    wanted = {str(each): picture(each, num_bytes) for each in pictures}
    return (
        value["number"] == number
        and np.array_equal(value["tokens"], np.arange(number, number + 40))
        and value["pictures"].keys() == wanted.keys()
        and all(np.array_equal(value["pictures"][name], array) for name, array in wanted.items())
    )


async def leftovers() -> list[asyncio.Task[Any]]:
    """Tasks that are still there besides the one that asks, after everything had its turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
