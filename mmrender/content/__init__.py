"""The only tolerant place: it turns the messages of OpenAI and Hugging Face users into canonical ones.

Everything after it is strict. An object that cannot be read is refused with a `MessageError` that names its
path. Nothing is dropped silently. `docs/messages.md` lists the accepted spellings.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
