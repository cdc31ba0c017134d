"""`GatewaySettings`: address, keys and limits of a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmrender.errors import InputError, check_number
from mmrender.shipping.address import is_loopback


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Address, keys and limits of a gateway.

    Attributes:
        host: Address to listen on. Without a key only loopback is allowed.
        port: Port. 0 for any free one.
        api_key: Key, or several, of callers that open and read sessions. One key never reads sessions
            of another. Each session also has its own key, which opens only the model of this session.
        open_to_all: Allow any address without a key.
        models: Names of models that requests may carry. Empty for any name, since many harnesses insist on
            names of their own.
        open_sessions: Whether a call that names an unknown session opens it.
        strict: Whether an answer that comes back changed begins a branch. Otherwise its sampled tokens are
            kept if its ids agree.
        sync: Whether each record waits for the disk, so that an answered turn survives a failure of the
            machine. Without it a turn survives the process.
        max_body_bytes: A longer request is refused. Agents send each picture again with each call.
        max_messages: Maximum number of messages of a request, and of content parts.
        max_requests: Answers that one key may wait for at a time.
        max_sessions: Open sessions of one key.
        max_steps: Calls of one session.
        max_session_bytes: Distinct bytes of one session.
        memory_bytes: Bytes of idle sessions that stay in memory. Others are read back from disk.
        idle_seconds: Seconds without a call after which a session may leave memory.
        expire_seconds: Seconds without a call after which an open session is finished as incomplete. None for
            never.
        retry_seconds: Seconds for which an answer whose caller has left is kept for a retry.
        read_seconds: How long the head of a request may take to come, and its body.
        keep_alive_seconds: Seconds between signs of life in a stream.
        stop_seconds: How long running requests may go on when the gateway stops.

    Raises:
        InputError: The address is open to others without a key, a key is empty, or a limit is not positive.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | Sequence[str] | None = field(default=None, repr=False)
    open_to_all: bool = False
    models: Sequence[str] = ()
    open_sessions: bool = True
    strict: bool = False
    sync: bool = False
    max_body_bytes: int = 256 << 20
    max_messages: int = 10_000
    max_requests: int = 1024
    max_sessions: int = 10_000
    max_steps: int = 10_000
    max_session_bytes: int = 4 << 30
    memory_bytes: int = 4 << 30
    idle_seconds: float = 300.0
    expire_seconds: float | None = None
    retry_seconds: float = 60.0
    read_seconds: float = 60.0
    keep_alive_seconds: float = 10.0
    stop_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.keys and all(self.keys)):
            raise InputError("the key is empty", where="settings.api_key", expected="a key, or None")
        for name in self.__dataclass_fields__:
            is_limit = name.startswith("max_") or name.endswith(("_bytes", "_seconds"))
            if is_limit and not (name == "expire_seconds" and self.expire_seconds is None):
                check_number(f"settings.{name}", getattr(self, name), above=0)
        if not self.keys and not self.open_to_all and not is_loopback(self.host):
            raise InputError(
                "the gateway would be open to everybody",
                where="settings.host",
                expected="a loopback address, or a key",
                got=self.host,
                remedy="Pass api_key, or open_to_all=True if the network keeps others out",
            )

    @property
    def keys(self) -> Sequence[str]:
        """Accepted keys, empty if every caller is accepted."""
        return [self.api_key] if isinstance(self.api_key, str) else self.api_key or []
