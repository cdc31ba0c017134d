"""Exact multimodal rendering and tensor transport for training vision-language models."""

from mmrender._version import __version__

__all__ = ["__version__"]
