"""Lets torchvision's published wheel, which is built for CUDA, be imported beside a CPU build of torch.

Its library of compiled operators then cannot be loaded, and its Python code stops where it describes the
first of them. Image processors use its transforms, which need none. So the two operators that are described
at import are declared beforehand, without an implementation. The `.pth` file beside this one imports it at
every start.
"""

import importlib.abc
import sys
from typing import Any

DECLARATIONS = [
    f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
]


class _SeesTorchvisionComing(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            # Kept for as long as the process lives, since the declarations end with it.
            library = torch.library.Library("torchvision", "FRAGMENT")
            _SeesTorchvisionComing.library = library
            if torch.version.cuda is None and "cu" in _build():
                for declaration in DECLARATIONS:
                    library.define(declaration)


def _build() -> str:
    """Local part of torchvision's version, or `cu` where it has none: published wheels do not say."""
    from importlib.metadata import version

    _, _, local = version("torchvision").partition("+")
    return local or "cu"


sys.meta_path.insert(0, _SeesTorchvisionComing())
