"""Run recipes on several gloo processes of this machine."""

import argparse
import os
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

RECIPES = ("fsdp2", "tensor", "context")


def run(rank: int, ranks: int, folder: str, recipes: list[str]) -> None:
    """Run recipes as one rank of a group.

    Raises:
        SystemExit: Losses or gradients differ from one process.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    for name in recipes:
        difference = import_module(f"parallel.{name}").compare()
        if rank == 0:
            print(
                f"{name}: {ranks} ranks, loss and gradients differ from one process by {difference:.1e}",
                flush=True,
            )
        if not difference < 1e-5:
            raise SystemExit(f"{name} differs from one process by {difference}")
    dist.destroy_process_group()
    # Device meshes and default arguments inside PyTorch keep the group. Threads of gloo that still run when
    # the interpreter ends can abort the process, so it leaves without that end.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser("parallel", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=[*RECIPES], help=", ".join(RECIPES))
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, str(Path(folder).resolve()), options.recipes)
        torch.multiprocessing.spawn(run, arguments, options.ranks)
