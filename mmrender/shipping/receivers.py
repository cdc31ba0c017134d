"""`ReceiverList`: the addresses of receivers, which may change, and a sender's order of them."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from ssl import SSLContext
from typing import Any, TypeAlias

from blake3 import blake3

from mmrender.errors import ShippingConnectionError, ShippingError
from mmrender.shipping.address import Address, check_tls

Receivers: TypeAlias = str | Sequence[str] | os.PathLike[str] | Callable[[], Sequence[str]]
"""A URL, several of them, a file with one on each line, or a function that returns them."""


class ReceiverList:
    """Where the receivers are.

    Args:
        receivers: See `Receivers`. A file may have empty lines, and comments after `#`. A function is called
            in a thread.
        ssl: As for `Sender`.

    Attributes:
        is_fixed: Whether it is a single URL.

    Raises:
        ShippingError: A URL is malformed, or a TLS context does not fit it.
        ShippingSecurityError: The TLS context does not ask for the receivers' certificates.
    """

    def __init__(self, receivers: Receivers, ssl: SSLContext | None) -> None:
        may_change = callable(receivers) or isinstance(receivers, os.PathLike)
        is_sequence = isinstance(receivers, Sequence) and not isinstance(receivers, str | bytes)
        self.is_fixed = not may_change and not is_sequence
        self._receivers = [receivers] if self.is_fixed else receivers
        self._ssl = ssl
        if not may_change:
            self._parse(self._urls())

    def __str__(self) -> str:
        if callable(self._receivers) or isinstance(self._receivers, os.PathLike):
            return getattr(self._receivers, "__qualname__", str(self._receivers))
        return ", ".join(map(str, self._receivers))[:200]

    async def read(self) -> list[Address]:
        """Return the addresses as they are now.

        Raises:
            ShippingConnectionError: They cannot be read at the moment, or there are none.
        """
        may_wait = callable(self._receivers) or isinstance(self._receivers, os.PathLike)
        try:
            urls = await asyncio.to_thread(self._urls) if may_wait else self._urls()
            addresses = self._parse(urls)
        except Exception as error:
            problem = "the list of receivers cannot be read"
            raise ShippingConnectionError(problem, where=str(self), got=str(error)[:500]) from error
        if not addresses:
            raise ShippingConnectionError("the list of receivers is empty", where=str(self))
        return addresses

    def _urls(self) -> Sequence[Any]:
        if isinstance(self._receivers, os.PathLike):
            lines = Path(self._receivers).read_text("utf-8").splitlines()
            return [url for line in lines if (url := line.partition("#")[0].strip())]
        return self._receivers() if callable(self._receivers) else self._receivers

    def _parse(self, urls: Sequence[Any]) -> list[Address]:
        if isinstance(urls, str | bytes):
            raise ShippingError("a list of URLs is needed", where="receivers", got=repr(urls)[:200])
        addresses = dict.fromkeys(map(Address.parse, urls))
        for address in addresses:
            check_tls(address, self._ssl)
        return [*addresses]


def order_for(sender: bytes, addresses: Sequence[Address]) -> list[Address]:
    """Return addresses in a sender's order of preference, the same whatever else is in the list.

    The order of each sender is a random one, so an address that joins or leaves moves its own share of the
    senders and no others (rendezvous hashing, Thaler and Ravishankar, 1998).
    """
    return sorted(addresses, key=lambda address: blake3(sender + str(address).encode()).digest())
