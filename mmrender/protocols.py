"""Interface of a renderer, for `Renderer` and for renderers that others write."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeGuard, Unpack, runtime_checkable

from mmrender.bridge.bridge import History
from mmrender.content.ids import TokenIds
from mmrender.media.resolve import MediaResolver
from mmrender.messages import MessageLike, Role
from mmrender.model.tokenizer import Tokenizer
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens

if TYPE_CHECKING:
    from mmrender.parsing.parser import ParsedResponse
    from mmrender.template.profile import TemplateProfile


class RenderOptions(TypedDict, total=False):
    """Keywords of `Renderer.render`. Template variables go into `chat_template_kwargs`."""

    tools: Sequence[Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    images: Sequence[Any] | None
    videos: Sequence[Any] | None
    audio: Sequence[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool | str
    chat_template_kwargs: Mapping[str, Any] | None


class BridgeOptions(TypedDict, total=False):
    """Keywords of `Renderer.bridge_to_next_turn`."""

    tools: Sequence[Any] | None
    previous_multi_modal_data: MultiModalData | None
    previous_roles: Collection[Role] | None
    history: History
    images: Sequence[Any] | None
    videos: Sequence[Any] | None
    audio: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ParseOptions(TypedDict, total=False):
    """Keywords of `Renderer.parse_response`."""

    tools: Sequence[Any] | None
    prompt_ids: Sequence[int] | None
    chat_template_kwargs: Mapping[str, Any] | None


@runtime_checkable
class RendererProtocol(Protocol):
    """Renders conversations to tokens, carries them from turn to turn, and reads completions."""

    def render(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> RenderedTokens:
        """Render a conversation with attribution and sidecar."""

    def render_ids(self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]) -> list[int]:
        """Render a conversation to token ids alone."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[MessageLike],
        **options: Unpack[BridgeOptions],
    ) -> RenderedTokens | None:
        """Append new messages to a sampled turn; None if this cannot be proved right."""

    @property
    def why_not_bridged(self) -> str | None:
        """Reason why the last bridge of this thread or task was refused, or None."""

    def parse_response(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> "ParsedResponse":
        """Read a completion."""

    def get_stop_token_ids(self) -> list[int]:
        """Tokens on which sampling stops."""

    def template_profile(self, *, has_tools: bool = False, **template_arguments: Any) -> "TemplateProfile":
        """Findings about the template, such as its generation prompt and stop tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""


@runtime_checkable
class MultimodalRenderer(RendererProtocol, Protocol):
    """A renderer that takes images."""

    @property
    def media(self) -> MediaResolver | None:
        """Resolver of media parts, or None for a text-only model."""


class VocabularyRenderer(RendererProtocol, Protocol):
    """A renderer that shows the model's vocabulary."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""


@runtime_checkable
class AsyncRenderer(Protocol):
    """A renderer that leaves the event loop free while it works."""

    async def arender(
        self, messages: Sequence[MessageLike], **options: Unpack[RenderOptions]
    ) -> RenderedTokens:
        """Render a conversation."""

    async def abridge_to_next_turn(
        self,
        previous_prompt_ids: TokenIds,
        previous_completion_ids: TokenIds,
        new_messages: Sequence[MessageLike],
        **options: Unpack[BridgeOptions],
    ) -> RenderedTokens | None:
        """Append new messages to a sampled turn; None if this cannot be proved right."""

    async def aparse_response(
        self, token_ids: Sequence[int], **options: Unpack[ParseOptions]
    ) -> "ParsedResponse":
        """Read a completion."""


def has_vocabulary(renderer: object) -> TypeGuard[VocabularyRenderer]:
    """Whether a renderer shows the model's vocabulary."""
    return hasattr(renderer, "tokenizer") and hasattr(renderer, "vocab_size")


def is_multimodal(renderer: object) -> TypeGuard[MultimodalRenderer]:
    """Whether a renderer takes images."""
    # `isinstance` of a protocol takes a tenth of a request in Python 3.11.
    return getattr(renderer, "media", None) is not None
