"""Sampler against trainer: the log-probabilities of a rollout beside those of the model that trains on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
