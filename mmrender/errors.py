"""Every error that mmrender raises, as one tree.

```
MMRenderError
├── InputError (ValueError)               what the caller passed
│   ├── MessageError                      a message, part or tool call is malformed
│   ├── TrajectoryError                   steps, their token ids or sidecars do not fit together
│   ├── BatchError                        samples do not make a training batch
│   ├── SamplingParameterError            a sampling parameter the engine does not know, or of a wrong value
│   ├── PromptTooLongError                a prompt is longer than the engine takes
│   └── MediaError                        an image or video cannot be used
│       ├── MediaBlockedError             the media policy forbids this source
│       ├── MediaLimitError               too many bytes, pixels or frames, or too slow
│       ├── MediaFetchError               a file or URL could not be read
│       └── MediaDecodeError              the bytes are not a readable image
├── ModelError (ValueError)               the model directory
│   ├── ModelNotFoundError                no such directory or hub repository
│   ├── TokenizerError                    tokenizer files missing or unusable
│   ├── ProcessorError                    image settings missing, unusable or unsupported
│   └── TemplateError                     the chat template
│       ├── TemplateMissingError          the model has none, or none of that name
│       ├── TemplateSyntaxError           it does not compile
│       ├── TemplateRefusedError          its own raise_exception was called
│       ├── TemplateRuntimeError          it failed on these messages
│       ├── TemplateSecurityError         it reached for something outside the sandbox
│       └── TemplateLimitError            it ran too long or wrote too much
├── RenderError (ValueError)              template, tokens and media do not fit together
│   ├── PlaceholderError                  placeholders and media parts differ
│   └── SpecialTokenError                 content holds special tokens that the policy forbids
├── PoolError (RuntimeError)              a renderer pool cannot take or carry out a call
│   ├── PoolFullError                     every place in its queue is taken
│   └── PoolClosedError                   it was closed
├── EngineError (RuntimeError)            an inference server, or the way to it
│   ├── EngineConnectionError             it was not reached, or the connection broke
│   ├── EngineTimeoutError                it did not answer in time
│   ├── EngineStatusError                 it answered with an error status
│   ├── EngineReplyError                  it answered with something that cannot be used
│   ├── EngineMismatchError               it would see other tokens or pixels than the renderer's
│   ├── EngineUnsupportedError            it lacks this call or feature
│   ├── EngineUnavailableError            no healthy engine is left to ask
│   └── EngineStateError                  the call does not fit its state, such as a second pause
├── ShippingError (RuntimeError)          trajectories on their way to the trainer
│   ├── ShippingConnectionError           the peer was not reached, or went away
│   ├── ShippingSecurityError             the peer is not authenticated by TLS
│   ├── ShippingProtocolError             the peer sent what cannot be understood
│   └── ShippingClosedError               this side was closed
├── PluginError (ImportError)             an entry point of another package cannot be used
└── MissingDependencyError (ImportError)  an extra is not installed
```

Each carries `where` (such as `messages[2].content[1]`), `expected`, `got` and `remedy`, and prints them in
that order, so a program can act on the parts and a person can read the sentence.
"""

from typing import Self

from mmcodecs.errors import DetailedError


class MMRenderError(DetailedError):
    """Base of the tree."""


class InputError(MMRenderError, ValueError):
    """Something the caller passed cannot be used."""


class MessageError(InputError):
    """A message, part or tool call is malformed."""


class TrajectoryError(InputError):
    """Trajectory steps, their token ids or their sidecars do not fit together."""


class BatchError(InputError):
    """Samples do not fit together in a training batch."""


class SamplingParameterError(InputError):
    """A sampling parameter is unknown to the engine, or its value is."""


class PromptTooLongError(InputError):
    """A prompt is longer than the engine takes.

    Attributes:
        prompt_len: Number of tokens of the prompt; None where only the engine knows.
        max_prompt_len: The most that the engine takes; None where only the engine knows.
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
    """A limit of the media policy is exceeded: bytes, pixels, frames or time."""


class MediaFetchError(MediaError):
    """A file or URL could not be read."""


class MediaDecodeError(MediaError):
    """The bytes are not an image that can be read whole."""


class ModelError(MMRenderError, ValueError):
    """A model directory cannot be used."""


class ModelNotFoundError(ModelError):
    """There is no such directory or hub repository."""


class TokenizerError(ModelError):
    """The tokenizer files are missing or unusable."""


class ProcessorError(ModelError):
    """Image processor settings are missing, unusable or unsupported."""


class TemplateError(ModelError):
    """The chat template is missing, broken, or refuses these messages."""


class TemplateMissingError(TemplateError):
    """The model has no chat template, or none of the name asked for."""


class TemplateSyntaxError(TemplateError):
    """The chat template does not compile."""


class TemplateRefusedError(TemplateError):
    """The template called its own `raise_exception`; `problem` keeps its text."""


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
    """Every place in the pool's queue is taken, and the caller does not wait."""


class PoolClosedError(PoolError):
    """The pool was closed."""


class EngineError(MMRenderError, RuntimeError):
    """An inference server, or the way to it, failed."""


class EngineConnectionError(EngineError):
    """The server was not reached, or the connection broke."""


class EngineTimeoutError(EngineError):
    """The server did not answer in time."""


class EngineStatusError(EngineError):
    """The server answered with an error status.

    Attributes:
        status: The HTTP status.
        body: The reply as the server wrote it, cut after some thousand bytes.
        retry_after: Seconds that the server asked to wait, where it gave a number.
    """

    def __init__(
        self,
        problem: str,
        *,
        status: int,
        body: str = "",
        retry_after: float | None = None,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.retry_after = retry_after
        super().__init__(problem, where=where, remedy=remedy)


class EngineReplyError(EngineError):
    """The server answered with something that cannot be used."""


class EngineMismatchError(EngineError):
    """The server would see, or saw, other tokens or pixels than the renderer's."""


class EngineUnsupportedError(EngineError):
    """The server lacks this call or feature."""


class EngineUnavailableError(EngineError):
    """No healthy engine is left to ask."""


class EngineStateError(EngineError):
    """The call does not fit the state of the engine or its client."""


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
    """What another package brings by an entry point cannot be used."""


class MissingDependencyError(MMRenderError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of_extra(cls, package: str, extra: str, purpose: str, *, otherwise: str | None = None) -> Self:
        """Build the error for `package`, which `extra` brings and `purpose` needs."""
        remedy = f"Install it with: pip install 'mmrender[{extra}]'"
        return cls(
            f"{purpose} needs {package}, which is not installed",
            remedy=f"{remedy}, or {otherwise}" if otherwise else remedy,
        )
