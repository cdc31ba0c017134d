"""One connection of a receiver: what comes in, in order and each array once, and what is answered."""

import asyncio
import contextlib
from collections import OrderedDict
from typing import Any

from mmcodecs import Decoder, MissingKeyError
from mmrender.errors import MMRenderError, ShippingError, ShippingProtocolError
from mmrender.shipping.bell import Bell
from mmrender.shipping.channel import Channel, off_loop, total_bytes
from mmrender.shipping.handshake import farewell
from mmrender.shipping.inbox import Inbox
from mmrender.shipping.messages import (
    MAX_KEYS,
    Bye,
    Data,
    Missing,
    Ping,
    Progress,
    Refused,
    Resume,
    Welcome,
)
from mmrender.shipping.options import MAX_ID_BYTES, MAX_UNACKED, Timing, Window
from mmrender.shipping.sending import first_to_end, keep_alive
from mmrender.shipping.values import PLAIN, from_wire

_GOODBYE_S = 1.0
_Arrived = tuple[str, Any, int]


class ReceivingSession:
    """Takes in what one sender sends until the connection ends.

    Messages are handed on in the order of their arrival. One whose shared arrays are missing keeps its place
    in line, empty, until it has been sent again; what came after it waits.

    Args:
        channel: After the sender's Resume.
        inbox: Of the receiver.
        decoder: With an empty table.
        window: What the sender may have under way.
        max_bytes: Longest message.
        timing: Heartbeat and silence.
    """

    def __init__(
        self,
        channel: Channel,
        inbox: Inbox,
        decoder: Decoder,
        *,
        window: Window,
        max_bytes: int,
        timing: Timing,
    ) -> None:
        self.channel = channel
        self.inbox = inbox
        self.decoder = decoder
        self.window = window
        self.max_bytes = max_bytes
        self.timing = timing
        self.peer = channel.peer
        self._framework = decoder.framework
        self.closed = False
        self.received_bytes = 0
        self.received_messages = 0
        self._charged: dict[int, int] = {}
        self._line: OrderedDict[int, _Arrived | None] = OrderedDict()
        self._holes: set[int] = set()
        self._taken: list[int] = []
        self._acked: list[int] = []
        self._bell = Bell()

    def welcome(self, resume: Resume, table_bytes: int) -> Welcome:
        """Tell what of the sender's messages has arrived over earlier connections."""
        found: dict[str, list[int]] = {"acked": [], "held": [], "new": []}
        queued: list[tuple[int, int]] = []
        for seq, id in resume.unacked:
            state = self.inbox.ask(_checked_id(id, self.peer), (self, seq))
            if isinstance(state, str):
                found[state].append(seq)
            else:
                self._charged[seq] = state.wire_bytes
                queued.append((seq, state.wire_bytes))
        return Welcome(
            self.window.messages,
            self.window.num_bytes,
            self.max_bytes,
            table_bytes,
            found["acked"],
            found["held"],
            queued,
        )

    async def run(self) -> None:
        """Serve the connection.

        Raises:
            ShippingError: Why it ended; it always does so by an error.
        """
        await first_to_end(self._read(), self._answer(), keep_alive(self.channel, self.timing))

    def took(self, seq: int) -> None:
        """The consumer took a message: its place in the window is free."""
        self._charged.pop(seq, None)
        self._taken.append(seq)
        self._bell.ring()

    def finished(self, seq: int) -> None:
        """A message is acknowledged."""
        self._acked.append(seq)
        self._bell.ring()

    async def say_goodbye(self) -> None:
        """Pass on what is still to be answered and close, in at most a second."""
        self.closed = True
        with contextlib.suppress(MMRenderError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._tell_progress()
                await self.channel.send(Bye("the receiver was closed"))

    def allowance(self) -> int:
        """Payload bytes that the next message may have."""
        used = sum(self._charged.values())
        if self._holes:
            # Beyond the window a sender may finish what it had begun, and fill the hole.
            return self.window.num_bytes + 2 * self.max_bytes - used
        return self.max_bytes if not self._charged else self.window.num_bytes - used

    async def _read(self) -> None:
        while True:
            message, frames = await self.channel.receive(self.allowance)
            if isinstance(message, Data):
                await self._take_in(message, frames)
            elif isinstance(message, Bye):
                raise farewell(self.peer, message)
            elif not isinstance(message, Ping):
                raise ShippingProtocolError(
                    "a message out of turn", where=self.peer, got=type(message).__name__
                )
            # Or the last message would keep its memory from the pool until the next one comes.
            del message, frames

    async def _take_in(self, data: Data, frames: list[memoryview]) -> None:
        _checked_id(data.id, self.peer)
        wire_bytes = total_bytes(frames)
        self._check_turn(data, wire_bytes)
        try:
            value = await off_loop(wire_bytes, lambda: self._decode(data.kind, frames))
        except MissingKeyError as error:
            self._line[data.seq] = None
            self._holes.add(data.seq)
            await self.channel.send(Missing(data.seq, list(error.keys[:MAX_KEYS])))
            return
        except Exception as error:
            # The sender is told, or it would come back with the same message for ever.
            with contextlib.suppress(ShippingError):
                await self.channel.send(Refused(data.seq, str(error)[:1000]))
            raise ShippingProtocolError(
                "a message that cannot be used", where=f"message {data.id!r} from {self.peer}", got=str(error)
            ) from error
        self.received_messages += 1
        self.received_bytes += wire_bytes
        self._holes.discard(data.seq)
        self._charged[data.seq] = wire_bytes
        self._line[data.seq] = (data.id, value, wire_bytes)
        self._advance()

    def _decode(self, kind: str, frames: list[memoryview]) -> Any:
        self.decoder.framework = self._framework if kind == PLAIN else "numpy"
        return from_wire(kind, self.decoder.decode(frames))

    def _check_turn(self, data: Data, wire_bytes: int) -> None:
        known = data.seq in self._charged or (data.seq in self._line and data.seq not in self._holes)
        crowded = len(self._charged) >= self.window.messages + (1 + len(self._holes) if self._holes else 0)
        if known or crowded or wire_bytes > self.max_bytes:
            raise ShippingProtocolError(
                "a message beyond the window",
                where=self.peer,
                expected=f"{self.window.messages} messages, {self.max_bytes} bytes, each number once",
                got=f"message {data.seq} of {wire_bytes} bytes",
            )

    def _advance(self) -> None:
        """Hand on what is at the front of the line, up to the first hole."""
        while self._line:
            seq, arrived = next(iter(self._line.items()))
            if arrived is None:
                return
            del self._line[seq]
            id, value, wire_bytes = arrived
            self.inbox.put(id, value, wire_bytes, (self, seq))

    async def _answer(self) -> None:
        while True:
            await self._bell.wait_until(lambda: bool(self._taken or self._acked))
            await self._tell_progress()

    async def _tell_progress(self) -> None:
        while self._taken or self._acked:
            taken, self._taken = self._taken[:MAX_UNACKED], self._taken[MAX_UNACKED:]
            acked, self._acked = self._acked[:MAX_UNACKED], self._acked[MAX_UNACKED:]
            await self.channel.send(Progress(taken, acked))


def _checked_id(id: str, peer: str) -> str:
    if not id.isprintable() or len(id.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise ShippingProtocolError("not an id", where=peer, got=repr(id)[:80])
    return id
