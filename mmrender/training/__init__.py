"""The trainer's side: samples become the model's keyword arguments, in batches that are padded or packed.

Nothing here imports what the worker that samples needs: a trainer installs no HTTP client. Names are imported
from their modules at first use, so that torch is not imported before.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
