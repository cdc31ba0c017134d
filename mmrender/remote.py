"""Rendering through a vLLM server: the names of `mmrender.client.vllm_renderer`."""

from mmrender.client.vllm_renderer import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    RenderedModelInput,
    VLLMRenderer,
)

__all__ = [
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "ModelInput",
    "RenderedModelInput",
    "VLLMRenderer",
]
