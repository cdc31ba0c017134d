"""Sampler against trainer: the log-probabilities of a rollout beside those of the model that trains on it."""

from mmrender.audit.compare import Comparison, ImagePlace, compare, image_places
from mmrender.audit.finding import Cause, Finding
from mmrender.audit.inspect_sample import inspect_sample
from mmrender.audit.plot import save_plot
from mmrender.audit.report import AuditReport, Unread
from mmrender.audit.run import DEFAULT_TOLERANCE, audit
from mmrender.audit.trainer import TrainerModel

__all__ = [
    "DEFAULT_TOLERANCE",
    "AuditReport",
    "Cause",
    "Comparison",
    "Finding",
    "ImagePlace",
    "TrainerModel",
    "Unread",
    "audit",
    "compare",
    "image_places",
    "inspect_sample",
    "save_plot",
]
