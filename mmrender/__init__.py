"""Exact multimodal rendering and tensor transport for training vision-language models."""

from mmrender._version import __version__
from mmrender.errors import MMRenderError
from mmrender.media.item import MediaItem, MultiModalData, PlaceholderRange
from mmrender.media.policy import MediaPolicy
from mmrender.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart
from mmrender.protocols import MultimodalRenderer, RendererProtocol, is_multimodal
from mmrender.rendered import RenderedTokens, TokenSpan
from mmrender.renderer import Renderer

__all__ = [
    "ImagePart",
    "MMRenderError",
    "MediaItem",
    "MediaPolicy",
    "Message",
    "MultiModalData",
    "MultimodalRenderer",
    "PlaceholderRange",
    "RenderedTokens",
    "Renderer",
    "RendererProtocol",
    "TextPart",
    "ThinkingPart",
    "TokenSpan",
    "ToolCall",
    "VideoPart",
    "__version__",
    "is_multimodal",
]
