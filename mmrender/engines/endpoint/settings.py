"""What an endpoint serves, and to whom. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrender.errors import InputError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of an `EngineServer`.

    Attributes:
        model: Name of the model; a request that names another one is refused.
        aliases: Other names that requests may use.
        host: Address to listen on. Without a key only loopback is allowed.
        port: Port; 0 for any free one.
        api_key: Requests to `/v1/...` must bring it as `Authorization: Bearer ...`.
        open_to_all: Allow any address without a key.
        max_body_bytes: A longer request is refused.
        default_max_tokens: Budget of a chat request that names none; None: what is left of the context, or
            an error where the engine does not say how long that is.
        sampling_defaults: Sampling parameters of requests that do not name them, in vLLM's names.
        stop_seconds: How long running requests may go on when the server stops.

    Raises:
        InputError: A setting is out of range, or the address is open to others and there is no key.
    """

    model: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    open_to_all: bool = False
    max_body_bytes: int = 64 << 20
    default_max_tokens: int | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    stop_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.model:
            raise InputError("the model has no name", where="settings.model")
        if self.api_key == "":
            raise InputError("the key is empty", where="settings.api_key", expected="a key, or None")
        if self.max_body_bytes < 1:
            raise InputError(
                "a setting is out of range", where="settings.max_body_bytes", expected="at least 1"
            )
        if self.api_key is None and not self.open_to_all and not _is_loopback(self.host):
            raise InputError(
                "the endpoint would be open to everybody",
                where="settings.host",
                expected="a loopback address, or a key",
                got=self.host,
                remedy="Give api_key, or open_to_all=True where the network keeps others out",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the model."""
        return (self.model, *self.aliases)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
