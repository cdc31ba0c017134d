"""Trajectories of rollouts, for the worker that samples and the process that trains."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
