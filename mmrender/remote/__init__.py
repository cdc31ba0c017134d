"""Rendering through a server: images are processed by its `/render` route, text stays the caller's tokens."""

from mmrender.remote.chunks import (
    Chunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    RenderedModelInput,
)
from mmrender.remote.vllm_renderer import VLLMRenderer

__all__ = [
    "Chunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "ModelInput",
    "RenderedModelInput",
    "VLLMRenderer",
]
