"""torch, or the error that says how to install it: what only the trainer's side needs."""

from typing import Any

from mmrender.errors import MissingDependencyError

try:
    import torch as _torch
except ImportError as error:
    raise MissingDependencyError.of_extra("torch", "torch", "mmrender.training") from error

# Type checkers do not follow torch.
torch: Any = _torch
