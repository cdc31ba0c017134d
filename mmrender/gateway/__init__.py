"""An endpoint for agents as they are: it answers three protocols in tokens, and records the sampled turns."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
