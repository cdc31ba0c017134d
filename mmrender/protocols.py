"""What a renderer is to those who use one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from mmrender.bridge.bridge import TokenIds
from mmrender.media.resolve import MediaResolver
from mmrender.tokens.rendered import RenderedTokens

if TYPE_CHECKING:
    from mmrender.parsing import ParsedResponse


@runtime_checkable
class RendererProtocol(Protocol):
    """Renders conversations to tokens."""

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> RenderedTokens:
        """Render a conversation with attribution and sidecar."""
        ...

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> list[int]:
        """Render a conversation to token ids alone."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Tokens on which sampling stops."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        ...


@runtime_checkable
class MultimodalRenderer(RendererProtocol, Protocol):
    """A renderer that takes images."""

    @property
    def media(self) -> MediaResolver | None:
        """What turns media parts into items, or None for a text-only model."""
        ...


@runtime_checkable
class TurnRenderer(RendererProtocol, Protocol):
    """A renderer that carries a conversation from turn to turn."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[Any],
        **options: Any,
    ) -> RenderedTokens | None:
        """Append new messages to what was sampled, or give None where that cannot be proved right."""
        ...

    @property
    def why_not_bridged(self) -> str | None:
        """Why the last bridge is None."""
        ...

    def parse_response(self, token_ids: Sequence[int], **options: Any) -> "ParsedResponse":
        """Read a completion."""
        ...


@runtime_checkable
class AsyncRenderer(Protocol):
    """A renderer that leaves the event loop free while it works."""

    async def arender(self, messages: Sequence[Any], **options: Any) -> RenderedTokens:
        """Render a conversation."""
        ...

    async def abridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[Any],
        **options: Any,
    ) -> RenderedTokens | None:
        """Append new messages to what was sampled, or give None where that cannot be proved right."""
        ...

    async def aparse_response(self, token_ids: Sequence[int], **options: Any) -> "ParsedResponse":
        """Read a completion."""
        ...


def is_multimodal(renderer: object) -> TypeGuard[MultimodalRenderer]:
    """Whether a renderer, a pool of them included, takes images."""
    return isinstance(renderer, MultimodalRenderer) and renderer.media is not None
