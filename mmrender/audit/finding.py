"""What an audit finds."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Cause: TypeAlias = Literal["pixels", "ids", "positions", "masks", "sampling", "precision", "unknown"]
"""What differs between sampler and trainer: what the model sees of an image, the tokens or their order, the
rotary positions, which tokens count as sampled, what the sampler was allowed, or only the arithmetic."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, with what speaks for it.

    Attributes:
        cause: Which kind.
        statement: What was found, as a sentence without its full stop.
        evidence: The numbers behind it.
        sample_id: The sample it was found in.
        image: Index of the image, where it is about one.
    """

    cause: Cause
    statement: str
    evidence: str
    sample_id: str
    image: int | None = None

    def __str__(self) -> str:
        return f"{self.cause}: {self.statement} ({self.evidence})"
