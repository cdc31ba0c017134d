"""Sampler against trainer: a rollout's log-probabilities compared with the model that trains on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
