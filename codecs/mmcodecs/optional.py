"""The packages that mmcodecs uses but does not need: imported here, at the call that uses them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmcodecs.errors import FrameworkError


def require(name: str, purpose: str) -> Any:
    """Import an optional package.

    Raises:
        FrameworkError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise FrameworkError(
            f"{purpose} needs the package {name}, which is not installed", remedy=f"pip install {name}"
        ) from error
