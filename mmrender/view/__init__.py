"""Looking at tokens: as a page for a browser or a notebook, and in a terminal."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
