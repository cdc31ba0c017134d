"""The outcome of an audit, as data, as text and as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.notebook import Drawn
from mmrender.sidecar import MediaSpan
from mmrender.trajectory.sample import TrainingSample

Float32Array: TypeAlias = npt.NDArray[np.float32]
Decode: TypeAlias = Callable[[Sequence[int]], str]
Stage: TypeAlias = Literal["template", "tokens", "pixels", "positions", "model", "sampling", "recording"]
"""A stage of the program from messages to log-probabilities, in the order in which they run."""
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
UNKNOWN: Final = "unknown"
"""The cause of a finding that is located and not named."""

_MAX_LISTED: Final = 20
"""Maximum number of entries in a list of the text."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first stage at which sampler and trainer differ, and the cause within it.

    Attributes:
        stage: The stage.
        cause: Name of the row that explains the sample, several joined by "or" if the sample cannot tell them
            apart, two joined by "and" if both are needed, else "unknown".
        statement: A sentence without its full stop.
        evidence: The numbers behind it.
        remedy: A remedy on each side. For an unknown cause, the fact to record.
        sample_id: The sample in which it was found.
        image: Index of the image that it is about, if it is about one.
        token: Index in the sample's `token_ids` of the token that it is about, or of the first that differs.
        layer: Name of the layer in which the model differs, if one is likelier than all others.
        shared: Whether all compared samples have it.
    """

    stage: Stage
    cause: str
    statement: str
    evidence: str
    sample_id: str
    remedy: str = ""
    image: int | None = None
    token: int | None = None
    layer: str | None = None
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.stage}, {self.cause}: {self.statement} ({self.evidence})"


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The sampled tokens of one sample with both log-probabilities.

    Attributes:
        sample: The sample.
        positions: Indices of the compared tokens in `sample.token_ids`, int32 of shape `(m,)`, rising.
        sampler: Log-probabilities that came with the sample, float32 of shape `(m,)`.
        trainer: Log-probabilities of the trainer's model, float32 of shape `(m,)`.
    """

    sample: TrainingSample
    positions: npt.NDArray[np.int32]
    sampler: Float32Array
    trainer: Float32Array

    @classmethod
    def of(cls, sample: TrainingSample, trainer: Float32Array) -> "Comparison":
        """Compare the tokens in the sample's loss mask.

        Args:
            sample: With the sampler's log-probabilities.
            trainer: Log-probability of each token of the loss mask given the tokens before it: `(m,)`.

        Raises:
            TrajectoryError: The shapes differ, or the sample lacks log-probabilities.
        """
        positions = np.flatnonzero(sample.loss_mask).astype(np.int32)
        if sample.logprobs is None or trainer.shape != positions.shape:
            raise TrajectoryError(
                "sampler and trainer cannot be compared",
                where=sample.sample_id or "sample",
                expected=f"log-probabilities of shape ({len(positions)},) from both",
                got="none in the sample" if sample.logprobs is None else f"shape {trainer.shape}",
            )
        return cls(sample, positions, sample.logprobs[positions], trainer.astype(np.float32))

    def before(self, stop: int) -> "Comparison":
        """Return the comparison of the tokens before `stop`."""
        return self.of_rows(self.positions < stop)

    def telling(self) -> "Comparison":
        """Return the comparison of the tokens with a probability below 1.

        A token of probability 1, such as the only one that a grammar allows, agrees whatever the model saw.
        """
        return self.of_rows(self.sampler < 0)

    def of_rows(self, tokens: npt.NDArray[Any] | slice) -> "Comparison":
        """Return the comparison of some tokens, by index into `positions` or marks."""
        return Comparison(self.sample, self.positions[tokens], self.sampler[tokens], self.trainer[tokens])

    def beyond(self, tolerance: float) -> npt.NDArray[np.bool_]:
        """Mark the tokens that differ by more than `tolerance`, or are not finite, bool of shape `(m,)`."""
        beyond: npt.NDArray[np.bool_] = ~(np.abs(self.difference) <= tolerance)
        return beyond

    @property
    def rms(self) -> float:
        """Root of the mean squared difference; 0.0 without tokens."""
        return float(self.size / max(len(self.positions), 1) ** 0.5)

    @property
    def size(self) -> float:
        """Root of the sum of squared differences, in nats."""
        return float(np.linalg.norm(self.difference.astype(np.float64)))

    @property
    def difference(self) -> Float32Array:
        """Trainer minus sampler, float32 of shape `(m,)`. Not finite if either is not."""
        with np.errstate(invalid="ignore"):
            return self.trainer - self.sampler

    @property
    def largest(self) -> float:
        """Largest absolute difference. Infinite if a number is not finite, 0.0 without tokens."""
        is_finite = np.isfinite(self.difference).all()
        return float(np.abs(self.difference).max(initial=0.0)) if is_finite else float("inf")

    @property
    def kl(self) -> float:
        """Estimate of KL(sampler || trainer) in nats a token, non-negative and of low variance.

        The mean of `exp(d) - 1 - d` with `d` the difference (Schulman, "Approximating KL divergence", k3).
        """
        if not len(self.positions):
            return 0.0
        difference = self.difference.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.mean(np.expm1(difference) - difference))

    def first_departure(self, tolerance: float) -> int | None:
        """Index into `positions` of the first token that differs by more than `tolerance`, or None."""
        beyond = self.beyond(tolerance)
        return int(beyond.argmax()) if beyond.any() else None

    def suspects(self, departure: int) -> list[MediaSpan]:
        """Images that the differing token saw and the last telling token before it did not, in order.

        Empty if every image was seen before with agreement.
        """
        stop = int(self.positions[departure])
        agreeing = self.before(stop).telling().positions.max(initial=-1)
        return [span for span in self.sample.media_spans if agreeing < span.start < stop]


def sampled_runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs `[start, stop)` of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def described(span: MediaSpan) -> str:
    """Return a text such as "image 1 (tokens 5 to 20)"."""
    return f"{span.modality} {span.position} (tokens {span.start} to {span.stop - 1})"


@dataclass(frozen=True, slots=True)
class AuditReport(Drawn):
    """Sampler against trainer over many samples.

    Attributes:
        comparisons: One for each sample that the model could be run on.
        findings: Stages and causes, those that samples show by themselves first.
        unread: Names of samples that the model could not be run on, with reasons.
        tolerance: In nats a token. Larger differences are an alarm.
        left_out: Names of samples with completions that are not compared, with reasons: their
            log-probabilities are over the tokens that a grammar allowed.
        notes: Facts that the samples lack, and that would make the verdict sharper.
    """

    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    unread: tuple[tuple[str, str], ...]
    tolerance: float
    left_out: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    _decode: Decode | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether tokens were compared, of every sample, without a difference or finding."""
        is_compared = self.tokens > 0 and not self.unread
        return is_compared and self.largest <= self.tolerance and not self.findings

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
        """Estimated KL(sampler || trainer) in nats a token, over all tokens. See `Comparison.kl`."""
        weights = [len(compared.positions) for compared in self.comparisons]
        if not sum(weights):
            return 0.0
        return float(np.average([compared.kl for compared in self.comparisons], weights=weights))

    @property
    def departing(self) -> list[tuple[Comparison, int]]:
        """Comparisons with a token beyond the tolerance, and the first of these tokens, the worst first."""
        first = [(one, one.first_departure(self.tolerance)) for one in self.comparisons]
        found = [(one, index) for one, index in first if index is not None]
        return sorted(found, key=lambda entry: -entry[0].largest)

    def text(self) -> str:
        """The report for a terminal."""
        lines = [
            f"{self.tokens} sampled tokens of {len(self.comparisons)} samples compared",
            f"largest difference {self.largest:.4g} nats (tolerance {self.tolerance:g}), "
            f"KL {self.kl:.3g} nats a token",
        ]
        lines += [f"left out: {name}: {reason}" for name, reason in self.left_out[:_MAX_LISTED]]
        lines += [f"note: {note}" for note in self.notes]
        if self.ok:
            return "\n".join([*lines, "trainer and sampler agree"])
        if not self.tokens:
            lines.append("nothing was compared, since no sample has a token with a log-probability")
        departures = [f"  {self._departure(compared, first)}" for compared, first in self.departing]
        if departures:
            lines += ["", f"{len(departures)} of {len(self.comparisons)} samples depart, the worst first:"]
            lines += _listed(departures)
        lines += [f"not compared: {name}: {reason}" for name, reason in self.unread]
        if self.findings:
            lines += ["", "first stage that differs, and cause:", *_listed([*map(_lines, self.findings)])]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """The report as plain data for JSON. A number that is not finite is None."""

        def finite(value: float) -> float | None:
            return float(value) if np.isfinite(value) else None

        return {
            "ok": self.ok,
            "tokens": self.tokens,
            "samples": len(self.comparisons),
            "largest": finite(self.largest),
            "tolerance": self.tolerance,
            "kl": finite(self.kl),
            "departing": [
                {
                    "sample_id": compared.sample.sample_id,
                    "token": int(compared.positions[first]),
                    "sampler": finite(compared.sampler[first]),
                    "trainer": finite(compared.trainer[first]),
                }
                for compared, first in self.departing
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "unread": [list(entry) for entry in self.unread],
            "left_out": [list(entry) for entry in self.left_out],
            "notes": list(self.notes),
        }

    def _departure(self, compared: Comparison, first: int) -> str:
        position = int(compared.positions[first])
        token = int(compared.sample.token_ids[position])
        shown = f" {self._decode([token])!r}" if self._decode is not None else ""
        suspects = compared.suspects(first)
        after = f", after {', '.join(map(described, suspects))}" if suspects else ""
        return (
            f"{compared.sample.sample_id or 'sample'}: first at token {position} ({token}{shown}), sampled "
            f"token {first + 1} of {len(compared.positions)}{after}: sampler {compared.sampler[first]:.4f}, "
            f"trainer {compared.trainer[first]:.4f}; largest {compared.largest:.4g}"
        )


def _lines(finding: Finding) -> str:
    where = f"{'all samples, here ' * finding.shared}{finding.sample_id or 'sample'}"
    return f"  {where}: {finding}" + (f"\n    {finding.remedy}" if finding.remedy else "")


def _listed(lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return [*lines[:_MAX_LISTED], *more]
