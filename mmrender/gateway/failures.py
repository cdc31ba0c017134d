"""Failures: the status, code and text of every error, and whether the caller or the gateway is at fault."""

import asyncio
from typing import Final

from mmrender.errors import (
    EngineConnectionError,
    EngineError,
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
    SessionBudgetError,
    SessionClosedError,
    SessionLimitError,
    SessionUnknownError,
    TemplateError,
)


class RequestError(Exception):
    """An error as every protocol can say it. The gateway itself raises it to refuse a request."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class CallerLeftError(RequestError):
    """The caller closed the connection. 499 is nginx's status for that."""

    def __init__(self) -> None:
        super().__init__(499, "the caller left", code="caller_left")


_STATUSES: Final[tuple[tuple[type[MMRenderError], int, str], ...]] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (InputError, 400, "invalid_value"),
    (RenderError, 400, "render_error"),
    (TemplateError, 400, "template_error"),
    (EngineTimeoutError, 504, "engine_timeout"),
    (EngineUnavailableError, 503, "engine_unavailable"),
    (EngineStateError, 503, "engine_state"),
    (EngineUnsupportedError, 501, "unsupported"),
    (EngineConnectionError, 502, "engine_connection"),
    (EngineError, 502, "engine_error"),
    (PoolError, 503, "renderer_busy"),
    (SessionUnknownError, 404, "session_not_found"),
    (SessionClosedError, 409, "session_finished"),
    (SessionBudgetError, 403, "session_budget"),  # clients repeat a call after 429
    (SessionLimitError, 429, "too_many_sessions"),
    (ModelError, 500, "model_error"),
)


def failure_of(error: BaseException) -> RequestError:
    """Return an error's status, code and text. Unexpected errors reveal nothing of our insides."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PromptTooLongError) and error.prompt_len is not None:
        limit = "" if error.max_prompt_len is None else f" > {error.max_prompt_len} maximum"
        # Harnesses look for this sentence, and shorten their history.
        message = f"prompt is too long: {error.prompt_len} tokens{limit}"
        return RequestError(400, message, code="context_length_exceeded", param=error.where)
    if isinstance(error, EngineStatusError) and error.status < 500:
        # Only refusals are passed on. An engine's failure is a failure of the gateway.
        return RequestError(error.status, str(error), code="engine_refused")
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            return RequestError(status, str(error), code=code, param=error.where)
    return RequestError(500, "internal error", code="internal_error")


def loss_of(error: BaseException) -> str | None:
    """Return why a call that failed is lost, or None if the error refuses it."""
    if isinstance(error, asyncio.CancelledError):
        return "a caller left before its answer was sampled"
    if failure_of(error).status < 500:
        return None
    return f"a call failed: {str(error)[:200] or type(error).__name__}"
