"""Rows of the audit: causes by stage, from `rows.toml`, each with its test."""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from mmrender.audit import computed, gradients, images, pixels, positions, prompts, recorded, tokens, weights
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


_MODULES: Final = (prompts, gradients, tokens, pixels, images, positions, computed, weights)


def _trials(name: str) -> Callable[[Case], Iterable[Trial]] | None:
    """Return the changes of all modules for a row."""
    tests = [module.TESTS[name] for module in _MODULES if name in module.TESTS]
    return (lambda case: chain.from_iterable(test(case) for test in tests)) if tests else None


def _rows() -> tuple[Row, ...]:
    data: dict[str, Any] = tomllib.loads(Path(__file__).with_name("rows.toml").read_text("utf-8"))
    readings = recorded.READINGS
    return tuple(
        Row(name, **texts, trials=_trials(name), readings=readings.get(name)) for name, texts in data.items()
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
