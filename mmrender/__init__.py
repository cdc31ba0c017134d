"""Exact multimodal rendering and tensor transport for training vision-language models.

Names are imported from their modules at first use, so that `import mmrender` costs next to nothing.
"""

from typing import TYPE_CHECKING, Final

from mmrender._lazy import at_first_use
from mmrender._version import __version__

if TYPE_CHECKING:
    from mmrender.client.generate import generate
    from mmrender.errors import MMRenderError
    from mmrender.media.policy import MediaPolicy
    from mmrender.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart
    from mmrender.pool.pool import RendererPool
    from mmrender.protocols import MultimodalRenderer, RendererProtocol, is_multimodal
    from mmrender.renderer import Renderer
    from mmrender.rollout.renderer_client import RendererClient
    from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange
    from mmrender.tokens.rendered import RenderedTokens, TokenSpan
    from mmrender.trajectory.sample import TrainingSample
    from mmrender.trajectory.tree import Trajectory

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
    "RendererClient",
    "RendererPool",
    "RendererProtocol",
    "TextPart",
    "ThinkingPart",
    "TokenSpan",
    "ToolCall",
    "TrainingSample",
    "Trajectory",
    "VideoPart",
    "__version__",
    "generate",
    "is_multimodal",
]

_HOMES: Final = {
    "ImagePart": "messages",
    "MMRenderError": "errors",
    "MediaItem": "spans",
    "MediaPolicy": "media.policy",
    "Message": "messages",
    "MultiModalData": "spans",
    "MultimodalRenderer": "protocols",
    "PlaceholderRange": "spans",
    "RenderedTokens": "tokens.rendered",
    "Renderer": "renderer",
    "RendererClient": "rollout.renderer_client",
    "RendererPool": "pool.pool",
    "RendererProtocol": "protocols",
    "TextPart": "messages",
    "ThinkingPart": "messages",
    "TokenSpan": "tokens.rendered",
    "ToolCall": "messages",
    "TrainingSample": "trajectory.sample",
    "Trajectory": "trajectory.tree",
    "VideoPart": "messages",
    "generate": "client.generate",
    "is_multimodal": "protocols",
}

__getattr__, __dir__ = at_first_use(__name__, _HOMES)
