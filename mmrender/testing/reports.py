"""Outcomes of the parity check: counts, a table and explanations for a terminal, and an exit status."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mmrender.testing.difference import Difference

if TYPE_CHECKING:
    from rich.table import Table

Messages: TypeAlias = Sequence[dict[str, Any]]
Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Mismatch:
    """The first difference, in the smallest conversation that shows it.

    Attributes:
        case: Number of the conversation before it was made smaller.
        rules: `"default"` or `"parse"`, the value of `content_special_tokens`.
        difference: The first difference.
        messages: The conversation.
        options: The other arguments of `render`.
    """

    case: int
    rules: str
    difference: Difference
    messages: Messages
    options: Options

    def lines(self) -> list[str]:
        """Return both sides and the input, a line each."""
        options, messages = (json.dumps(value, default=repr) for value in (self.options, self.messages))
        _, ours, reference = self.difference
        return [f"ours: {ours}", f"reference: {reference}", f"options: {options}", f"messages: {messages}"]


@dataclass
class ParityReport:
    """Outcome for one model and one image back end.

    Attributes:
        cases: Number of conversations, compared or refused by both sides.
        refusals: Number of conversations that both sides refused, by our reason.
        replaced: Number of conversations with special tokens that a rule makes text.
        unjudged: Number of them that were compared in text and placeholder ranges alone, since their template
            looks for the token.
        unjoined: Number of conversations that were compared in text alone, since the reference cannot join
            their images or videos.
        reordered: Number of conversations that were compared with the reference's images in the order of the
            template, which differs from the order in the messages.
        images: Images compared.
        videos: Videos compared.
        clips: Audio clips compared.
        tokens: Token ids compared.
        values: Number of equal values, by the name of their tensor.
        seconds: Duration, including the opening of both sides.
        invented: Tokens that the reference adds and no file of the model has. No text holds them.
        not_compared: Why a capability of the model, such as images, was left out, or None.
        mismatch: The first difference, or None.
        without_videos: Why some or all videos that our side takes were left out, or None.
        without_audio: Why the audio that our side takes was left out, or None.
    """

    model: str
    image_backend: str
    cases: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    unjudged: int = 0
    unjoined: int = 0
    reordered: int = 0
    images: int = 0
    videos: int = 0
    clips: int = 0
    tokens: int = 0
    values: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    invented: Sequence[str] = ()
    not_compared: str | None = None
    mismatch: Mismatch | None = None
    without_videos: str | None = None
    without_audio: str | None = None

    @property
    def refused(self) -> int:
        """Number of conversations that both sides refused."""
        return self.refusals.total()

    @property
    def compared(self) -> int:
        """Number of conversations that both sides rendered."""
        return self.cases - self.refused

    @property
    def pixel_values(self) -> int:
        """Number of equal pixel values of images and videos."""
        return self.values["pixel_values"] + self.values["pixel_values_videos"]

    @property
    def outcome(self) -> Literal["equal", "differs", "not compared"]:
        """`"equal"` only if everything that the model takes was compared."""
        if self.mismatch is not None:
            return "differs"
        return "equal" if self.not_compared is None else "not compared"

    def counts(self) -> dict[str, Any]:
        """Return everything but the mismatch, for JSON."""
        names = [entry.name for entry in fields(self) if entry.name not in ("mismatch", "values")]
        counts = {name: getattr(self, name) for name in names}
        return {"outcome": self.outcome, **counts, "pixel_values": self.pixel_values}

    def problem(self, seed: int) -> list[str]:
        """Return a heading and lines about the difference, or about the part that was not compared."""
        where = f"{self.model}, {self.image_backend}"
        if (mismatch := self.mismatch) is not None:
            case = f'case {mismatch.case} of seed {seed}, rules "{mismatch.rules}"'
            return [f"{where}, {case}: {mismatch.difference.what} differ", *mismatch.lines()]
        return [] if self.not_compared is None else [f"{where}: {self.not_compared}"]

    def notes(self) -> list[str]:
        """Return the limits of the comparison, a line each."""
        lines = [f"{count} refused by both: {why}" for why, count in self.refusals.most_common()]
        if self.unjudged:
            lines.append(f"{self.unjudged} of a template that looks for a token: text and ranges alone")
        if self.unjoined:
            lines.append(f"{self.unjoined} of images or videos that the reference cannot join: text alone")
        if self.reordered:
            lines.append(f"{self.reordered} with the reference's images in the order of the template")
        if self.without_videos:
            lines.append(f"without videos: {self.without_videos}")
        if self.without_audio:
            lines.append(f"without audio: {self.without_audio}")
        if self.invented:
            lines.append(
                f"the reference adds {', '.join(self.invented)}, in no file of the model and no text"
            )
        return lines


def parity_table(reports: Sequence[ParityReport]) -> "Table":
    """Return the outcomes and counts of several reports as a table that 80 columns hold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model", "mode", "result"):
        table.add_column(name, overflow="fold", no_wrap=name == "mode")
    # The refused ones are in the notes, with their reasons.
    columns = ("compared", "tokens", "images", "videos", "clips", "pixel_values")
    shown = [name for name in columns if any(getattr(report, name) for report in reports)]
    headings = {"compared": "cases", "pixel_values": "pixels"}
    for name in (*(headings.get(name, name) for name in shown), "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        result = report.outcome if report.mismatch is None else f"{report.mismatch.difference.what} differ"
        colour = "green" if report.outcome == "equal" else "red"
        counts = [_count(getattr(report, name)) for name in shown]
        table.add_row(
            report.model, report.image_backend, f"[{colour}]{result}[/]", *counts, f"{report.seconds:.0f}"
        )
    return table


def _count(number: int) -> str:
    """Return a number, rounded to a tenth of its unit from a million on."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:,}"


def parity_status(reports: Sequence[ParityReport]) -> int:
    """Return an exit status: 1 if something differs, 2 if something was not compared, else 0."""
    outcomes = {report.outcome for report in reports}
    return 1 if "differs" in outcomes else 2 if "not compared" in outcomes else 0
