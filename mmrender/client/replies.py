"""HTTP answers as errors, in the same words for every transport."""

import http
from collections.abc import Mapping

from mmrender.client.transport import Reply
from mmrender.errors import EngineStatusError

MAX_ERROR_BYTES = 8192
"""How much of an error's body is kept."""
_EXCERPT = 300


def is_success(status: int) -> bool:
    """Whether a status is one of 2xx."""
    return 200 <= status < 300


def status_error(
    method: str,
    url: str,
    status: int,
    body: bytes | memoryview,
    headers: Mapping[str, str] | None = None,
) -> EngineStatusError:
    """The error of a reply whose status is not one of 2xx."""
    text = bytes(body[:MAX_ERROR_BYTES]).decode("utf-8", "replace")
    excerpt = " ".join(text.split())[:_EXCERPT]
    said = f": {excerpt}" if excerpt else ""
    return EngineStatusError(
        f"the server answered {status}{_phrase(status)}{said}",
        status=status,
        body=text,
        retry_after=_seconds((headers or {}).get("Retry-After")),
        where=f"{method} {url}",
    )


def checked_reply(
    method: str, url: str, status: int, headers: Mapping[str, str], body: bytes | memoryview
) -> Reply:
    """A reply of status 2xx.

    Raises:
        EngineStatusError: The status is another.
    """
    if not is_success(status):
        raise status_error(method, url, status, body, headers)
    return Reply(status, headers, body)


def _phrase(status: int) -> str:
    try:
        return f" {http.HTTPStatus(status).phrase}"
    except ValueError:
        return ""


def _seconds(value: str | None) -> float | None:
    """The seconds of `Retry-After`; its other form, a date, is rare and depends on two clocks."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None
