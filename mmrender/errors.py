"""Every error that mmrender raises, as one tree with the root `MMRenderError`.

Each error has `where` (such as `messages[2].content[1]`), `expected`, `got` and `remedy`, and prints them in
this order. So a program can act on the parts and a person can read the sentence.
"""

import math
import numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from mmcodecs.errors import DetailedError


class MMRenderError(DetailedError):
    """Base of all errors of mmrender."""


class InputError(MMRenderError, ValueError):
    """An argument of the caller cannot be used."""


class MessageError(InputError):
    """A message, part or tool call is malformed."""


class TrajectoryError(InputError):
    """Trajectory steps, their token ids or their sidecars do not fit together."""


class BatchError(InputError):
    """Samples do not fit together in a training batch."""


class SamplingParameterError(InputError):
    """The engine does not support a sampling parameter or its value."""


class PromptTooLongError(InputError):
    """A prompt is longer than the engine accepts.

    Attributes:
        prompt_len: Number of tokens of the prompt; None if only the engine knows it.
        max_prompt_len: Maximum number of tokens; None if only the engine knows it.
    """

    def __init__(
        self,
        prompt_len: int | None,
        max_prompt_len: int | None,
        *,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.prompt_len = prompt_len
        self.max_prompt_len = max_prompt_len
        super().__init__(
            "the prompt is longer than the engine takes",
            where=where,
            expected=None if max_prompt_len is None else f"at most {max_prompt_len} tokens",
            got=None if prompt_len is None else str(prompt_len),
            remedy=remedy,
        )


class MediaError(InputError):
    """An image or video cannot be used."""


class MediaBlockedError(MediaError):
    """The media policy forbids this source."""


class MediaLimitError(MediaError):
    """A limit of the media policy is exceeded: bytes, items, pixels, frames or time."""


class MediaFetchError(MediaError):
    """A file or URL could not be read."""


class MediaDecodeError(MediaError):
    """The bytes are not a complete, readable image or video."""


class ModelError(MMRenderError, ValueError):
    """A model directory cannot be used."""


class ModelNotFoundError(ModelError):
    """The directory or hub repository does not exist."""


class TokenizerError(ModelError):
    """The tokenizer files are missing or unusable."""


class ProcessorError(ModelError):
    """Image processor settings are missing, unusable or unsupported."""


class TemplateError(ModelError):
    """The chat template is missing, broken, or refuses these messages."""


class TemplateMissingError(TemplateError):
    """The model lacks a chat template, or a template of this name."""


class TemplateSyntaxError(TemplateError):
    """The chat template does not compile."""


class TemplateRefusedError(TemplateError):
    """The template called its own `raise_exception`, with the text in `problem`."""


class TemplateRuntimeError(TemplateError):
    """The template failed on these messages."""


class TemplateSecurityError(TemplateError):
    """The template reached for something outside the sandbox."""


class TemplateLimitError(TemplateError):
    """The template ran too long, recursed too deep or wrote too much."""


class RenderError(MMRenderError, ValueError):
    """Template, tokens and media do not fit together."""


class PlaceholderError(RenderError):
    """The placeholders that the template wrote and the media parts differ."""


class SpecialTokenError(RenderError):
    """Content holds special tokens, and the policy for its role forbids them."""


class PoolError(MMRenderError, RuntimeError):
    """A renderer pool cannot take or carry out a call, or cannot be sent to another process."""


class PoolFullError(PoolError):
    """The pool's queue is full and `nowait` is set."""


class PoolClosedError(PoolError):
    """The pool was closed."""


class FleetError(MMRenderError, RuntimeError):
    """A process of a fleet has failed, or cannot be placed."""


class EngineError(MMRenderError, RuntimeError):
    """An inference server or the connection to it failed."""


class EngineConnectionError(EngineError):
    """The server was not reached, or the connection broke."""


class EngineTimeoutError(EngineError):
    """The server did not answer in time."""


class EngineStatusError(EngineError):
    """The server answered with an error status.

    Attributes:
        status: The HTTP status.
        body: The server's reply, cut after some thousand bytes.
        retry_after: Seconds that the server asked to wait, or None.
    """

    def __init__(
        self,
        problem: str,
        *,
        status: int,
        body: str = "",
        retry_after: float | None = None,
        where: str | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.retry_after = retry_after
        super().__init__(problem, where=where)


class EngineReplyError(EngineError):
    """The server answered with something that cannot be used."""


class EngineMismatchError(EngineError):
    """The server would see, or saw, other tokens or pixels than the renderer's."""


class EngineUnsupportedError(EngineError):
    """The server lacks this call or feature."""


class EngineUnavailableError(EngineError):
    """All engines are down or unhealthy."""


class EngineStateError(EngineError):
    """The call does not fit the state of the engine or its client."""


class SessionError(MMRenderError, RuntimeError):
    """A session of a gateway cannot take or carry out a call."""


class SessionUnknownError(SessionError):
    """No session of the gateway has this name."""


class SessionClosedError(SessionError):
    """The session has ended, or is ending."""


class SessionBudgetError(SessionError):
    """The turns, tokens or bytes of a session are used up."""


class SessionLimitError(SessionError):
    """Too many sessions are open."""


class ShippingError(MMRenderError, RuntimeError):
    """Trajectories on their way to the trainer."""


class ShippingConnectionError(ShippingError):
    """The peer was not reached, or went away."""


class ShippingSecurityError(ShippingError):
    """The peer is not authenticated by TLS."""


class ShippingProtocolError(ShippingError):
    """The peer sent something that cannot be understood."""


class ShippingClosedError(ShippingError):
    """This side of the connection was closed."""


class PluginError(MMRenderError, ImportError):
    """An entry point of another package cannot be used."""


class MissingDependencyError(MMRenderError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of_extra(cls, package: str, extra: str, purpose: str, *, otherwise: str | None = None) -> Self:
        """Build the error for a `package` of an `extra` that a `purpose` needs."""
        remedy = f"Install it with: pip install 'mmrender[{extra}]'"
        return cls(
            f"{purpose} needs {package}, which is not installed",
            remedy=f"{remedy}, or {otherwise}" if otherwise else remedy,
        )


@contextmanager
def importing(
    package: str | None, extra: str, purpose: str, *, otherwise: str | None = None
) -> Iterator[None]:
    """Import within the block what a `purpose` needs. `package` None means the package that is missing.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        yield
    except (ImportError, OSError) as error:  # OSError: of a library that the package loads
        name = package or getattr(error, "name", None) or extra
        raise MissingDependencyError.of_extra(name, extra, purpose, otherwise=otherwise) from error


@contextmanager
def located(where: str | None) -> Iterator[None]:
    """Add a path, such as `messages[2].content[1]`, to an error of the block that has none."""
    try:
        yield
    except MMRenderError as error:
        if where is not None:
            error.at(where)
        raise


def check_number(where: str, value: Any, *, above: float | None = None, minimum: float | None = None) -> None:
    """Require a finite number above `above`, or of `minimum` or more.

    Raises:
        InputError: It is another value.
    """
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    if not is_number or (above is not None and value <= above) or (minimum is not None and value < minimum):
        bound = f"more than {above}" if above is not None else f"{minimum} or more"
        raise InputError("is out of range", where=where, expected=bound, got=repr(value))


def check_count(
    where: str,
    value: Any,
    *,
    minimum: int = 1,
    maximum: int | None = None,
    error: type[MMRenderError] = InputError,
) -> None:
    """Require a whole number from `minimum` to `maximum`.

    Raises:
        MMRenderError: It is another value. `error` is the class.
    """
    is_whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if not is_whole or value < minimum or (maximum is not None and value > maximum):
        bound = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
        raise error("is out of range", where=where, expected=f"a whole number, {bound}", got=repr(value))


def check_option(
    where: str, value: Any, values: Sequence[str], *, error: type[MMRenderError] = InputError
) -> None:
    """Require one of the values of an option.

    Raises:
        MMRenderError: It is another value. `error` is the class.
    """
    if not isinstance(value, str) or value not in values:  # an array is compared value by value
        expected = one_of([repr(each) for each in values])
        raise error("unknown value of an option", where=where, expected=expected, got=repr(value)[:80])


def one_of(names: Sequence[str]) -> str:
    """Join alternatives: `a, b or c`."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
