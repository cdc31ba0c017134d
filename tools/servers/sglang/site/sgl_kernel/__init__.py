"""Stands in for SGLang's compiled kernels, of which there is no build for a CPU without AMX.

On such a CPU SGLang runs its models in plain torch, and needs its kernel package for one operator only, which
is here. Whatever else it looks up in this package or in a module below it is found, and raises
NotImplementedError once it is called. In `torch.ops.sgl_kernel` only those names are found that SGLang's
models look up when they are imported: finding others, it would describe to torch kernels that do not exist.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

__version__ = "0+plain.torch"

LOOKED_UP_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, stops: Any, slots: Any, *_: Any
) -> None:
    """Note where the cache keeps each token.

    Args:
        requests: Row of `table` for each request; integers of shape `(n,)`.
        table: Slot by request and position, written in place; integers of shape `(rows, positions)`.
        starts: First position to write, of each request.
        stops: Position after the last.
        slots: The slots of all requests, one request after the other.
    """
    counts = (stops - starts).long()
    begins = torch.cumsum(counts, 0) - counts
    total = int(counts.sum())
    positions = torch.arange(total) + torch.repeat_interleave(starts.long() - begins, counts)
    table[torch.repeat_interleave(requests.long(), counts), positions] = slots[:total].to(table.dtype)


class _Missing:
    """A kernel, or something that holds kernels: whatever is looked up in it is missing too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no stand-in in plain torch")


class _Kernels(types.ModuleType):
    """A namespace in which every public name is a kernel that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives every module below this package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        below = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if below else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


sys.meta_path.append(_Submodules())
sys.modules[__name__].__class__ = _Kernels
for _name in LOOKED_UP_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, _name, _Missing(f"torch.ops.sgl_kernel.{_name}"))
