"""The implementations that mmrender is measured against, loaded from a model directory."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from mmrender.errors import MissingDependencyError
from mmrender.media.pixels import ImageBackend
from mmrender.media.processors.base import ProcessorFiles
from mmrender.media.processors.reference import build_image_processor

_UNBUILT_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators whose schemas torchvision expects to find when it is imported."""


def has_reference_backend(backend: ImageBackend) -> bool:
    """Return whether the reference's image processors can run on this back end here."""
    needed = ("transformers", "torchvision") if backend == "torch" else ("transformers",)
    return all(importlib.util.find_spec(name) is not None for name in needed)


def load_reference_image_processor(directory: Path, backend: ImageBackend) -> Any:
    """Load the image processor of Transformers for a model directory, on one named back end.

    Raises:
        MissingDependencyError: Transformers is not installed, or torchvision for the torch back end.
        ProcessorError: Transformers has no such processor on this back end.
    """
    if not has_reference_backend("pil"):
        raise MissingDependencyError.of_extra("transformers", "hf", "the reference image processor")
    if backend == "torch":
        if not has_reference_backend("torch"):
            raise MissingDependencyError(
                "the reference's torch back end needs torchvision, which is not installed",
                remedy="mmrender itself never needs it; compare with the PIL back end instead.",
            )
        import_torchvision()
    return build_image_processor(ProcessorFiles.read(directory), backend)


@cache
def import_torchvision() -> None:
    """Import torchvision, also beside a torch that its compiled operators were not built for.

    There its import fails on the schemas of those operators only; with the schemas declared, its transforms,
    which are all that an image processor uses, work.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _declare_operators()
        import torchvision  # noqa: F401


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _UNBUILT_OPERATORS:
        library.define(schema)
    _KEPT.append(library)


_KEPT: list[Any] = []
"""A library's definitions vanish with the object."""
