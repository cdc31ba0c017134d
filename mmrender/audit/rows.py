"""Rows of the audit: causes by stage, from `rows.toml`, each with its test."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mmrender.audit import computed, images, pixels, positions, prompts, recorded, tokens, weights
from mmrender.audit.case import Case, Recorded, Trial
from mmrender.audit.recorded import View
from mmrender.audit.report import Finding, Stage
from mmrender.trajectory.sample import TrainingSample


@dataclass(frozen=True)
class Row:
    """A cause that something real has.

    Attributes:
        name: Names the cause in findings.
        stage: Its stage.
        about: Description for the documentation.
        sampler: Remedy on the sampler's side.
        trainer: Remedy on the trainer's side.
        reference: Something real that causes it.
        trials: Changes to try for a case, each a forward.
        readings: Numbers to try for a completion, without a forward. A row without either shows in
            a sample or model by itself.
    """

    name: str
    stage: Stage
    about: str
    sampler: str
    trainer: str
    reference: str
    trials: Callable[[Case], Iterable[Trial]] | None = None
    readings: Callable[[View], Iterable[Recorded]] | None = None

    @property
    def remedy(self) -> str:
        """Remedies on both sides."""
        return f"sampler: {self.sampler}. Trainer: {self.trainer}"


_TRIALS: Final[Mapping[str, Callable[[Case], Iterable[Trial]]]] = {
    **prompts.TESTS,
    **tokens.TESTS,
    **pixels.TESTS,
    **images.TESTS,
    **positions.TESTS,
    **computed.TESTS,
    **weights.TESTS,
}


def _rows() -> tuple[Row, ...]:
    data: dict[str, Any] = tomllib.loads(Path(__file__).with_name("rows.toml").read_text("utf-8"))
    readings = recorded.READINGS
    return tuple(
        Row(name, **texts, trials=_TRIALS.get(name), readings=readings.get(name))
        for name, texts in data.items()
    )


ROWS: Final = _rows()
"""All rows, by stage."""


def finding_of(
    name: str,
    statement: str,
    evidence: str,
    sample: TrainingSample,
    *,
    image: int | None = None,
    token: int | None = None,
) -> Finding:
    """Return a finding of the row of this name."""
    row = next(row for row in ROWS if row.name == name)
    return Finding(row.stage, name, statement, evidence, sample.sample_id, row.remedy, image, token)
