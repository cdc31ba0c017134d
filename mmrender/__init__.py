"""Exact multimodal rendering and tensor transport for training vision-language models.

Names are imported from their modules at first use, so that `import mmrender` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from mmrender._version import __version__

if TYPE_CHECKING:
    from mmrender.client.generate import generate
    from mmrender.errors import MMRenderError
    from mmrender.media.item import MediaItem, MultiModalData, PlaceholderRange
    from mmrender.media.policy import MediaPolicy
    from mmrender.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCall, VideoPart
    from mmrender.pool.pool import RendererPool
    from mmrender.protocols import MultimodalRenderer, RendererProtocol, is_multimodal
    from mmrender.rendered import RenderedTokens, TokenSpan
    from mmrender.renderer import Renderer
    from mmrender.rollout.renderer_client import RendererClient
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
    "ImagePart": "mmrender.messages",
    "MMRenderError": "mmrender.errors",
    "MediaItem": "mmrender.media.item",
    "MediaPolicy": "mmrender.media.policy",
    "Message": "mmrender.messages",
    "MultiModalData": "mmrender.media.item",
    "MultimodalRenderer": "mmrender.protocols",
    "PlaceholderRange": "mmrender.media.item",
    "RenderedTokens": "mmrender.rendered",
    "Renderer": "mmrender.renderer",
    "RendererClient": "mmrender.rollout.renderer_client",
    "RendererPool": "mmrender.pool.pool",
    "RendererProtocol": "mmrender.protocols",
    "TextPart": "mmrender.messages",
    "ThinkingPart": "mmrender.messages",
    "TokenSpan": "mmrender.rendered",
    "ToolCall": "mmrender.messages",
    "TrainingSample": "mmrender.trajectory.sample",
    "Trajectory": "mmrender.trajectory.tree",
    "VideoPart": "mmrender.messages",
    "generate": "mmrender.client.generate",
    "is_multimodal": "mmrender.protocols",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
