"""Rows of the audit: causes by stage, from `rows.toml`, each with its test."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
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
        tests: Each yields changes to try for a case, a forward each.
        readings: Numbers to try for a completion, without a forward. A row without either shows in
            a sample or model by itself.
    """

    name: str
    stage: Stage
    about: str
    sampler: str
    trainer: str
    reference: str
    tests: tuple[Callable[[Case], Iterable[Trial]], ...]
    readings: Callable[[View], Iterable[Recorded]] | None

    @property
    def remedy(self) -> str:
        """Remedies on both sides."""
        return f"sampler: {self.sampler}. Trainer: {self.trainer}"

    def trials(self, case: Case) -> Iterable[Trial]:
        """Yield the changes to try for a case."""
        return chain.from_iterable(test(case) for test in self.tests)


_MODULES: Final = (prompts, gradients, tokens, pixels, images, positions, computed, weights)


def _rows() -> dict[str, Row]:
    data: dict[str, Any] = tomllib.loads(Path(__file__).with_name("rows.toml").read_text("utf-8"))
    tests = {name: tuple(one.TESTS[name] for one in _MODULES if name in one.TESTS) for name in data}
    readings = recorded.READINGS.get
    return {
        name: Row(name, **texts, tests=tests[name], readings=readings(name)) for name, texts in data.items()
    }


ROWS: Final[Mapping[str, Row]] = _rows()
"""All rows by name, in the order of stages."""


def finding_of(
    name: str,
    statement: str,
    evidence: str,
    sample: TrainingSample,
    *,
    token: int | None = None,
    image: int | None = None,
) -> Finding:
    """Return a finding of the row of this name."""
    row = ROWS[name]
    return Finding(row.stage, name, statement, evidence, sample.sample_id, row.remedy, image, token)
