"""Limits of media loading: `MediaPolicy`.

The defaults let a conversation name any `http(s)` URL that resolves to a public address, and no local file
unless the program itself passes it as a `pathlib.Path`. Each refusal names the field to change.
"""

import ipaddress
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from mmrender.errors import InputError, MediaBlockedError, MediaDecodeError, MediaLimitError, check_number
from mmrender.processes import BoundedProcesses

Result = TypeVar("Result")

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

SCHEMES = frozenset({"data", "file", "http", "https"})

Limit: TypeAlias = Literal[
    "max_bytes",
    "max_pixels",
    "max_items",
    "max_frames",
    "max_video_bytes",
    "max_audio_seconds",
    "max_audio_bytes",
]
_LIMITS: Mapping[Limit, tuple[str, str, str]] = {
    "max_bytes": ("the encoded file is too large", "bytes", ""),
    "max_pixels": ("the image or frame is too large to decode", "pixels", " if you trust the source"),
    "max_items": ("the conversation holds too many media", "", ""),
    "max_frames": ("the video has too many frames", "frames", ", or sample it first"),
    "max_video_bytes": (
        "the sampled frames of the video are too large",
        "bytes",
        ", or pass fewer or smaller frames",
    ),
    "max_audio_seconds": ("the audio is too long", "seconds", ", or pass a part of it"),
    "max_audio_bytes": ("the samples of the audio are too large", "bytes", ", or pass a part of it"),
}
"""For each limit the problem of exceeding it, its unit, and another remedy."""

_NOT_PUBLIC = ("unspecified", "loopback", "link_local", "site_local", "multicast", "private", "reserved")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Sources that loading an image, a video or audio may read, and its limits. Frozen and hashable.

    Attributes:
        schemes: URL schemes that may be read, out of `data`, `file`, `http` and `https`.
        local_roots: Folders under which a `str` path or a `file:` URL may name a local file. Symbolic links
            are resolved before the check. A `pathlib.Path` is always read: only the program can make one.
        allow_private_addresses: Whether `http(s)` may reach addresses that are not public: private,
            loopback, link-local, multicast, reserved or unspecified, also inside IPv4-mapped, NAT64 and 6to4
            IPv6 addresses. Checked on the resolved address, before every connection.
        allow_networks: Networks that may be reached although they are not public, such as `"10.2.0.0/16"`.
        deny_networks: Networks that are never reached. Stronger than both of the above.
        max_bytes: Maximum size of an encoded file, in bytes.
        max_pixels: Maximum size of an image or frame, in pixels, checked in the header before decoding.
        max_items: Maximum number of images, videos and audio clips of one conversation.
        max_frames: Maximum number of frames of one video, before sampling.
        max_video_bytes: Maximum size of the sampled frames of one video, in bytes.
        max_audio_seconds: Maximum duration of one audio clip, in seconds, whatever its header states.
        max_audio_bytes: Maximum size of the samples of one audio clip as float32, all channels, in bytes.
        decode_timeout: Seconds for decoding one video or audio clip.
        connect_timeout: Seconds for one name resolution, connection or TLS handshake.
        read_timeout: Seconds of silence allowed to a server.
        total_timeout: Seconds for one source in all, redirects included.
        max_redirects: Maximum number of redirects followed for one URL.
        processes: Bounded child processes in which encoded media are decoded, for a program that
            takes them from anyone; None decodes in this process.

    Raises:
        InputError: a field is out of range, or a network does not parse.
    """

    schemes: frozenset[str] = SCHEMES
    local_roots: tuple[Path, ...] = ()
    allow_private_addresses: bool = False
    allow_networks: tuple[str, ...] = ()
    deny_networks: tuple[str, ...] = ()
    max_bytes: int = 64 * 2**20
    # Pillow warns above this figure, so no warning can escape under the default.
    max_pixels: int = 89_478_485
    max_items: int = 4096
    max_frames: int = 1 << 17
    max_video_bytes: int = 1 << 31
    max_audio_seconds: int = 2400
    max_audio_bytes: int = 1 << 30
    decode_timeout: float = 120.0
    connect_timeout: float = 5.0
    read_timeout: float = 10.0
    total_timeout: float = 30.0
    max_redirects: int = 5
    processes: BoundedProcesses | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.schemes) - SCHEMES:
            raise _bad_field("schemes", f"a subset of {sorted(SCHEMES)}", repr(sorted(unknown)))
        object.__setattr__(self, "schemes", frozenset(self.schemes))
        for name, kind, noun in (
            ("local_roots", Path, "paths"),
            ("allow_networks", str, "networks"),
            ("deny_networks", str, "networks"),
        ):
            values = getattr(self, name)
            if isinstance(values, str | Path):
                raise _bad_field(name, f"a tuple of {noun}", repr(values))
            object.__setattr__(self, name, tuple(kind(value) for value in values))
        for name in ("allow_networks", "deny_networks"):
            _parse_networks(name, getattr(self, name))
        for field in fields(self):
            if field.name.startswith("max_") or field.name.endswith("_timeout"):
                value = getattr(self, field.name)
                if value != math.inf:  # no limit
                    floor = {"minimum": 0} if field.name == "max_redirects" else {"above": 0}
                    check_number(f"MediaPolicy.{field.name}", value, **floor)

    def decode(self, function: Callable[..., Result], data: bytes, *arguments: Any) -> Result:
        """Call a decoder with encoded bytes, this policy and arguments, in a child process if there is one.

        Raises:
            MediaLimitError: The process exceeded its limits.
        """
        if self.processes is None:
            return function(data, self, *arguments)
        alone = replace(self, processes=None)
        result: Result = self.processes.ask(
            "decoded the file", MediaLimitError, function, data, alone, *arguments
        )
        return result

    def check(self, limit: Limit, count: int, *, got: str | None = None, where: str | None = None) -> None:
        """Raise MediaLimitError if `count` exceeds a limit.

        Args:
            limit: Name of the field.
            count: In the limit's unit.
            got: The count for the error, if more than its number is known.
            where: Path of the media, for the error.
        """
        bound = getattr(self, limit)
        if count > bound:
            problem, unit, advice = _LIMITS[limit]
            raise MediaLimitError(
                problem,
                where=where,
                expected=f"at most {bound} {unit}".rstrip(),
                got=got or f"{count} {unit}".rstrip(),
                remedy=f"Raise MediaPolicy({limit}=...){advice}.",
            )

    def check_pixels(self, width: int, height: int) -> None:
        """Refuse an image or frame without pixels, or with more pixels than the policy allows."""
        if width <= 0 or height <= 0:
            raise MediaDecodeError(
                "the image has no pixels", expected="at least 1x1", got=f"{width}x{height}"
            )
        self.check("max_pixels", width * height, got=f"{width}x{height} = {width * height}")

    def check_time(self, started: float, medium: str) -> None:
        """Raise MediaLimitError if decoding a medium, which began at this monotonic time, takes too long."""
        if time.monotonic() - started > self.decode_timeout:
            raise MediaLimitError(
                f"decoding the {medium} takes too long",
                expected=f"at most {self.decode_timeout} s",
                remedy="Raise MediaPolicy(decode_timeout=...), or pass a shorter one.",
            )

    def check_scheme(self, scheme: str) -> None:
        """Raise MediaBlockedError unless URLs of `scheme` may be read."""
        if scheme not in self.schemes:
            raise MediaBlockedError(
                f"the media policy forbids {scheme}: URLs",
                expected=f"one of {sorted(self.schemes)}",
                got=f"{scheme}:",
                remedy=f'Add "{scheme}" to MediaPolicy(schemes=...).',
            )

    def refusal_of(self, address: str) -> str | None:
        """Return why `address` (an IP address as text) may not be reached, or None if it may."""
        parsed = ipaddress.ip_address(address.partition("%")[0])
        embedded = None
        if isinstance(parsed, ipaddress.IPv6Address):  # IPv4-mapped, 6to4 (RFC 3056) or NAT64 (RFC 6052)
            embedded = parsed.ipv4_mapped or parsed.sixtofour
            if parsed in _NAT64:
                embedded = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        target = embedded or parsed

        def network_in(name: str) -> Network | None:
            networks = _parse_networks(name, getattr(self, name))
            return next((network for network in networks if parsed in network or target in network), None)

        if denied := network_in("deny_networks"):
            return f"in {denied}, which MediaPolicy.deny_networks holds"
        if self.allow_private_addresses or network_in("allow_networks"):
            return None
        for kind in _NOT_PUBLIC:
            # Only IPv6 knows site-local addresses.
            if getattr(target, f"is_{kind}", False):
                return f"{kind.replace('_', '-')}, not public"
        return None if target.is_global else "not public"


def _bad_field(name: str, expected: str, got: str) -> InputError:
    return InputError("cannot be used", where=f"MediaPolicy.{name}", expected=expected, got=got)


def _parse_networks(name: str, networks: tuple[str, ...]) -> list[Network]:
    try:
        return [ipaddress.ip_network(network) for network in networks]
    except ValueError as error:
        raise _bad_field(name, "IP networks such as '10.2.0.0/16'", str(error)) from None
