"""Completions read back into messages: content, reasoning, and every tool call that the model tried."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
