"""One call on its way, and what hooks are told of it."""

import time
from collections.abc import Mapping

from mmrender.client.encoding import Body
from mmrender.client.hooks import HookList, RequestEvent, next_call_id


class Call:
    """One call: where it goes, how often it was tried, and how it went.

    Args:
        method: HTTP method.
        base_url: Root of the server.
        path: Path below it, query included.
        hooks: What is told.
    """

    __slots__ = (
        "_attempt",
        "_begun",
        "_error",
        "_hooks",
        "_id",
        "_size",
        "method",
        "status",
        "target",
        "url",
    )

    def __init__(self, method: str, base_url: str, path: str, hooks: HookList) -> None:
        self.method = method
        self.target = base_url + path
        self.url = self.target.partition("?")[0]
        self.status: int | None = None
        self._hooks = hooks
        self._begun = time.perf_counter()
        self._id = next_call_id() if hooks else 0
        self._attempt = 0
        self._size = 0
        self._error: BaseException | None = None

    @property
    def where(self) -> str:
        """The call in errors."""
        return f"{self.method} {self.url}"

    def begin(self, body: Body | None, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Tell of the begin, and return all headers of the call; the caller's own prevail."""
        self._attempt = 1
        self._size = 0 if body is None else len(body)
        sent = self._hooks.on_request(self._event()) if self._hooks else {}
        if body is not None:
            sent["Content-Type"] = "application/json"
        sent.update(headers or {})
        return sent

    def retry(self, attempt: int, error: BaseException | None) -> None:
        """Tell of a further attempt."""
        self._attempt, self._error = attempt, error
        if self._hooks:
            self._hooks.on_retry(self._event())
        self.status = self._error = None

    def succeed(self, reply_bytes: int) -> None:
        """Tell of the good end."""
        if self._hooks:
            self._hooks.on_response(self._event(reply_bytes))

    def fail(self, error: BaseException) -> None:
        """Tell of the bad end, if the begin was told of."""
        self._error = error
        if self._hooks and self._attempt:
            self._hooks.on_error(self._event())

    def _event(self, reply_bytes: int | None = None) -> RequestEvent:
        return RequestEvent(
            call_id=self._id,
            method=self.method,
            url=self.url,
            attempt=self._attempt,
            request_bytes=self._size,
            seconds=time.perf_counter() - self._begun,
            status=self.status,
            reply_bytes=reply_bytes,
            error=self._error,
        )
