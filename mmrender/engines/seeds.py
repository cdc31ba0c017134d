"""Sampling parameters of several samples of one prompt."""

from collections.abc import Mapping
from typing import Any


def seeded(params: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """One mapping for each sample, with a seed of its own where there is one; `n` is left out."""
    seed = params.get("seed")
    rest = {name: value for name, value in params.items() if name != "n"}
    if seed is None:
        return [rest] * count
    return [{**rest, "seed": seed + index} for index in range(count)]
