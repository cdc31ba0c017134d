"""Rows of the audit: causes by stage, from `rows.toml`, each with its test."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from mmrender.audit import computed, images, pixels, positions, prompts, recorded, sampling, tokens, weights
from mmrender.audit.case import Case, Trial
from mmrender.audit.recorded import View
from mmrender.audit.report import STAGES, Finding, Stage
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
    """

    name: str
    stage: Stage
    about: str
    sampler: str
    trainer: str
    reference: str

    @property
    def remedy(self) -> str:
        """Remedies on both sides."""
        return f"sampler: {self.sampler}. Trainer: {self.trainer}"

    @property
    def shows(self) -> bool:
        """Whether it shows in a sample or model by itself, without a test."""
        return self.name not in _TESTS and self.name not in _READINGS

    def trials(self, case: Case) -> Iterator[Trial]:
        """Yield the changes to try for a case, a forward each."""
        return chain.from_iterable(test(case) for test in _TESTS.get(self.name, ()))

    def readings(self, view: View) -> list[Trial]:
        """Return the numbers to try for a completion, without a forward."""
        return [*chain.from_iterable(test(view) for test in _READINGS.get(self.name, ()))]


_TESTS: Final[Mapping[str, tuple[Callable[[Case], Iterable[Trial]], ...]]] = {
    "history": (partial(prompts.beside, "history"), prompts.exchanged),
    "opening": (partial(prompts.beside, "opening"), prompts.moved_text),
    "generation prompt": (partial(prompts.beside, "generation prompt"),),
    "image places": (prompts.image_places, partial(prompts.beside, "image places")),
    "prompt text": (partial(prompts.beside, "prompt text"), prompts.texts, tokens.other_tokens),
    "another's prompt": (prompts.others_prompt,),
    "another template": (partial(prompts.alternatives, False),),
    "other media": (partial(prompts.alternatives, True),),
    "encoded again": (tokens.encoded_again,),
    "final token": (tokens.final_token,),
    "altered token": (tokens.altered,),
    "stale image": (partial(images.over_media, images.stale, several=False),),
    "image order": (images.order,),
    "pixel budget": (partial(images.over_media, images.sized),),
    "image unseen": (images.unseen,),
    "frames": (partial(images.over_media, partial(images.reordered, "frame")),),
    "tiles": (partial(images.over_media, partial(images.reordered, "tile")),),
    **{name: (partial(pixels.over_images, table),) for name, table in pixels.TABLES.items()},
    "levels": (partial(pixels.over_images, pixels.TABLES["levels"]), pixels.adjusted),
    "positions": (positions.positions,),
    "grid": (partial(images.over_media, images.grid),),
    "rotary base": (positions.rotary,),
    "attention": (computed.attention,),
    "dtype": (computed.whole_dtype,),
    "dtype of a part": (computed.part_dtype,),
    "recurrent state": (computed.recurrent_state,),
    "left out": (computed.left_out,),
    "settings": (computed.settings,),
    "quantised weights": (weights.quantised,),
    "weights": (weights.other_weights,),
    "stale prefix": (weights.stale_prefix,),
}
"""Changes to try, by row."""
_READINGS: Final[Mapping[str, tuple[Callable[[View], Iterable[Trial]], ...]]] = {
    "logits dtype": (sampling.of_rounded_logits,),
    "soft cap": (partial(sampling.stepped, "soft cap"),),
    "temperature": (partial(sampling.stepped, "temperature"),),
    "penalty": (partial(sampling.stepped, "penalty"), sampling.decayed),
    "truncation": (sampling.truncated,),
    "vocabulary": (sampling.other_support,),
    "bias": (sampling.biased,),
    "restricted": (sampling.restricted,),
    "missing": (recorded.missing,),
    "form": (recorded.forms,),
    "rounded": (recorded.rounded,),
    "shifted numbers": (recorded.shifted,),
    "chunk": (recorded.late,),
    "another's numbers": (recorded.of_another,),
    "scaled": (recorded.scaled,),
    "weights": (recorded.of_other_weights,),
}
"""Numbers to try for a completion, by row."""


class Kind(NamedTuple):
    """A stage: its noun, the fact to record if no cause is found, and the surveyed changes of each row."""

    noun: str
    fact: str
    surveyed: int = 0


_DATA: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("rows.toml").read_text("utf-8"))
KINDS: Final[Mapping[Stage, Kind]] = {stage: Kind(**_DATA["stages"][stage]) for stage in STAGES}
ROWS: Final[Mapping[str, Row]] = {name: Row(name, **of) for name, of in _DATA.items() if name != "stages"}
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
