"""aiohttp's exceptions as errors of the tree, and which failures may be tried again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import aiohttp

from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineStatusError,
    EngineTimeoutError,
    InputError,
)

_NEVER_MADE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_UNTRUSTED: Final = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ServerFingerprintMismatch,
)
_BUSY: Final = frozenset({502, 503, 504})


@contextmanager
def engine_errors(where: str) -> Iterator[None]:
    """Turn what aiohttp raises into errors that name the call; the cause stays beneath."""
    try:
        yield
    except EngineError:
        raise
    except _UNTRUSTED as error:
        raise EngineConnectionError("the server cannot be trusted", where=where, got=str(error)) from error
    except _NEVER_MADE as error:
        raise EngineConnectionError("the server was not reached", where=where, got=_said(error)) from error
    except aiohttp.SocketTimeoutError as error:
        raise EngineTimeoutError("the server went silent", where=where, got=_said(error)) from error
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise InputError("the path cannot be asked for", where=where, got=str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineConnectionError("the connection broke", where=where, got=_said(error)) from error
    except (ValueError, TypeError) as error:
        raise InputError("the request cannot be sent", where=where, got=str(error)) from error


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def retry_rule(*, idempotent: bool, wait_max: float) -> Callable[[Exception], bool | float]:
    """Say which failures are tried again, for stamina: False, True, or after how many seconds."""

    def decide(error: Exception) -> bool | float:
        if isinstance(error, EngineConnectionError):
            cause = error.__cause__
            return isinstance(cause, _NEVER_MADE) and not isinstance(cause, _UNTRUSTED)
        if not idempotent or not isinstance(error, EngineStatusError) or error.status not in _BUSY:
            return False
        return True if error.retry_after is None else min(error.retry_after, wait_max)

    return decide
