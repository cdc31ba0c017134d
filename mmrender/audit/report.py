"""What an audit says, as data and as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmrender.audit.compare import Comparison
from mmrender.audit.finding import Finding

Decode = Callable[[Sequence[int]], str]

_MOST_LISTED = 10
_MOST_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Unread:
    """A sample that the trainer's model could not be run on, and why."""

    sample_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Sampler against trainer over many samples.

    Attributes:
        comparisons: One for each sample that the model could be run on.
        findings: Causes, those that samples show by themselves first.
        unread: Samples that the model could not be run on.
        tolerance: In nats a token; beyond it a token departs.
    """

    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    tolerance: float
    _decode: Decode | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether every sample could be compared, no token departs and nothing was found."""
        return self.largest <= self.tolerance and not self.findings and not self.unread

    @property
    def largest(self) -> float:
        """Largest absolute difference of any token, in nats."""
        return max((compared.largest for compared in self.comparisons), default=0.0)

    @property
    def tokens(self) -> int:
        """Number of tokens compared."""
        return sum(len(compared.positions) for compared in self.comparisons)

    @property
    def kl(self) -> float:
        """Estimated KL(sampler || trainer) in nats a token, over all tokens; see `Comparison.kl`."""
        weights = [len(compared.positions) for compared in self.comparisons]
        if not sum(weights):
            return 0.0
        return float(np.average([compared.kl for compared in self.comparisons], weights=weights))

    @property
    def departing(self) -> tuple[Comparison, ...]:
        """Comparisons with a token beyond the tolerance, the largest difference first."""
        found = [compared for compared in self.comparisons if compared.largest > self.tolerance]
        return tuple(sorted(found, key=lambda compared: -compared.largest))

    def text(self) -> str:
        """The report for a terminal."""
        lines = [
            f"{self.tokens} sampled tokens of {len(self.comparisons)} samples compared",
            f"largest difference {self.largest:.4g} nats (tolerance {self.tolerance:g}), "
            f"KL {self.kl:.3g} nats a token",
        ]
        if self.ok:
            return "\n".join([*lines, "the trainer sees what was sampled"])
        lines += self._departures()
        lines += [f"not compared: {unread.sample_id}: {unread.reason}" for unread in self.unread]
        lines += self._causes()
        return "\n".join(lines)

    def _departures(self) -> list[str]:
        departing = self.departing
        if not departing:
            return []
        lines = ["", f"{len(departing)} of {len(self.comparisons)} samples depart, the worst first:"]
        lines += [f"  {self._departure(compared)}" for compared in departing[:_MOST_LISTED]]
        if len(departing) > _MOST_LISTED:
            lines.append(f"  and {len(departing) - _MOST_LISTED} more")
        return lines

    def _departure(self, compared: Comparison) -> str:
        first = compared.first_departure(self.tolerance)
        if first is None:  # not reached: only departing samples are listed
            return ""
        position = int(compared.positions[first])
        token = int(compared.sample.token_ids[position])
        shown = f" {self._decode([token])!r}" if self._decode is not None else ""
        suspects = compared.suspects(first)
        after = f", after {', '.join(map(str, suspects))}" if suspects else ""
        return (
            f"{compared.sample.sample_id or 'sample'}: first at token {position} ({token}{shown}), sampled "
            f"token {first + 1} of {len(compared.positions)}{after}: sampler {compared.sampler[first]:.4f}, "
            f"trainer {compared.trainer[first]:.4f}; largest {compared.largest:.4g}"
        )

    def _causes(self) -> list[str]:
        if not self.findings:
            return []
        lines = ["", "likely causes:"]
        lines += [
            f"  {finding.sample_id or 'sample'}: {finding}" for finding in self.findings[:_MOST_FINDINGS]
        ]
        if len(self.findings) > _MOST_FINDINGS:
            lines.append(f"  and {len(self.findings) - _MOST_FINDINGS} more")
        return lines
