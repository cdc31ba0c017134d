"""What a renderer is to those who use one."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from mmrender.media.resolve import MediaResolver
from mmrender.rendered import RenderedTokens


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


def is_multimodal(renderer: object) -> TypeGuard[MultimodalRenderer]:
    """Whether a renderer, a pool of them included, takes images."""
    return isinstance(renderer, MultimodalRenderer) and renderer.media is not None
