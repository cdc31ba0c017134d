"""Errors as OpenAI's envelopes."""

from dataclasses import dataclass
from typing import Any

import msgspec

from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineReplyError,
    EngineStateError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
    MMRenderError,
    ModelError,
    PoolError,
    PromptTooLongError,
    RenderError,
    TemplateError,
)


class RequestError(Exception):
    """The endpoint itself refuses a request."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(status, message, "invalid_request_error", code, param)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is answered.

    Attributes:
        status: HTTP status.
        message: What is wrong.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: The parameter that is at fault.
        original: The engine's own envelope, passed on as it is.
    """

    status: int
    message: str
    kind: str = "server_error"
    code: str | None = None
    param: str | None = None
    original: dict[str, Any] | None = None

    def envelope(self) -> dict[str, Any]:
        """The JSON of the answer."""
        if self.original is not None:
            return self.original
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_STATUSES: tuple[tuple[type[MMRenderError], int, str], ...] = (
    (EngineTimeoutError, 504, "engine_timeout"),
    (EngineUnavailableError, 503, "engine_unavailable"),
    (EngineStateError, 503, "engine_state"),
    (EngineUnsupportedError, 501, "unsupported"),
    (EngineConnectionError, 502, "engine_connection"),
    (EngineReplyError, 502, "engine_reply"),
    (EngineError, 502, "engine_error"),
    (PoolError, 503, "renderer_busy"),
)


def failure_of(error: Exception) -> Failure:
    """How an error is answered. What is no error of ours says nothing of its insides."""
    if isinstance(error, RequestError):
        return error.failure
    if isinstance(error, PromptTooLongError):
        return Failure(400, str(error), "invalid_request_error", "context_length_exceeded", "messages")
    if isinstance(error, EngineStatusError):
        return _passed_on(error)
    if isinstance(error, InputError | RenderError | TemplateError):
        return Failure(400, str(error), "invalid_request_error", type(error).__name__, error.where)
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            return Failure(status, str(error), "server_error", code)
    if isinstance(error, ModelError):
        return Failure(500, str(error), "server_error", type(error).__name__)
    return Failure(500, "internal error", "server_error", "internal_error")


def _passed_on(error: EngineStatusError) -> Failure:
    """The engine's own refusal, with its status; its breakdowns are ours to answer for."""
    if error.status >= 500:
        return Failure(502, str(error), "server_error", "engine_error")
    try:
        body = msgspec.json.decode(error.body.encode())
    except msgspec.DecodeError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return Failure(error.status, str(error), original=body)
    return Failure(error.status, str(error), "invalid_request_error", "engine_refused")
