"""Rollouts: a model sampled over many turns, in an environment, many trajectories at once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
