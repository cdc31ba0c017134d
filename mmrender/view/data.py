"""Content of a page as plain data: strips of tokens, their media, and marks on single tokens.

Attribution comes from `RenderedTokens`, steps from `Trajectory`, differences from `AuditReport`. A sequence
without attribution shows the sampled tokens of each step instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import AuditReport, sampled_runs
from mmrender.content import normalize_messages
from mmrender.errors import MMRenderError
from mmrender.media.encoded import encoded_image
from mmrender.media.processors.patches import PatchItem
from mmrender.messages import ImagePart
from mmrender.renderer import Renderer
from mmrender.sidecar import MediaItem, MediaSpan, common_prefix
from mmrender.tokens.rendered import RenderedTokens, TokenSpan
from mmrender.trajectory import Branch
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory
from mmrender.view.pictures import shown_frames, sound_of, thumbnails, token_grid
from mmrender.view.text import Decode, token_texts, visible

Data: TypeAlias = dict[str, Any]
_MAX_MARKS = 200


@dataclass
class Document:
    """Everything that one page shows.

    Attributes:
        title: Heading of the page.
        strips: Sequences of tokens, as `Document.add` makes them.
        media: Distinct items by identity, with their thumbnails.
        marks: Tokens to look at: the strip, the token, the medium if there is one, and the reason.
        side_by_side: Whether all strips are shown from the start.
    """

    title: str
    strips: list[Data] = field(default_factory=list)
    media: dict[str, Data] = field(default_factory=dict)
    marks: list[Data] = field(default_factory=list)
    side_by_side: bool = False

    def as_json(self) -> Data:
        """Return plain data for JSON."""
        return {
            "title": visible(self.title),
            "strips": self.strips,
            "media": self.media,
            "marks": self.marks[:_MAX_MARKS],
            "sideBySide": self.side_by_side,
        }

    def add(
        self,
        name: str,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        decode: Decode | None,
        *,
        spans: Iterable[TokenSpan],
        sections: list[Data],
        media: Sequence[MediaSpan],
        trained: npt.NDArray[np.bool_] | None = None,
        values: Mapping[str, Data | None] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Add one sequence."""
        ids = [int(token_id) for token_id in token_ids]
        texts = token_texts(ids, decode) if decode is not None else [""] * len(ids)
        vocabulary: dict[int, str] = {}
        odd = {}
        for index, (token_id, text) in enumerate(zip(ids, texts, strict=True)):
            if vocabulary.setdefault(token_id, shown := visible(text)) != shown:
                odd[index] = shown
        self.strips.append(
            {
                "name": visible(name),
                "ids": ids,
                "vocabulary": vocabulary,
                "odd": odd,
                "texts": decode is not None,
                "spans": [[span.start, span.stop, span.message, span.kind, span.sampled] for span in spans],
                "sections": sections,
                "media": [self._medium(span) for span in media],
                "trained": None if trained is None else sampled_runs(trained),
                "values": {name: runs for name, runs in (values or {}).items() if runs},
                "notes": [visible(note) for note in notes],
            }
        )

    def mark(self, strip: int, token: int, title: str, text: str, medium: int | None = None) -> None:
        """Add a mark on one token."""
        where = {"strip": strip, "token": token, "medium": medium}
        self.marks.append({**where, "title": visible(title), "text": visible(text)})

    def _medium(self, span: MediaSpan) -> Data:
        item = span.item
        if item.identity not in self.media:
            self.media[item.identity] = _shown_item(item)
        return {
            "item": item.identity,
            "start": span.start,
            "stop": span.stop,
            "grid": token_grid(item, span.range.num_embeds),
            "features": span.range.embed_spans,
            "position": span.position,
        }


def _shown_item(item: MediaItem) -> Data:
    height, width = item.size
    duration = 0.0
    if item.modality == "audio":
        height, duration = 1, width / height
    pictures = thumbnails(item)
    seconds = item.times if isinstance(item, PatchItem) else ()
    return {
        "frames": len(seconds),
        "seconds": [seconds[frame] for frame in shown_frames(len(seconds))],
        "modality": item.modality,
        "height": height,
        "width": width,
        "layout": list(item.grid),
        "pictures": pictures,
        "duration": duration,
        "sound": sound_of(item),
    }


def of_rendered(document: Document, rendered: RenderedTokens, name: str, decode: Decode | None) -> None:
    """Add a rendered conversation."""
    notes = [f"message {index}: rewritten by the template, not sampled" for index in rendered.rewritten]
    notes += [
        f"message {index}: without reasoning, its answer alone sampled" for index in rendered.answer_only
    ]
    document.add(
        name,
        rendered.token_ids,
        decode or rendered._decode,
        spans=rendered.spans,
        sections=_messages(rendered),
        media=rendered.multi_modal_data.spans(len(rendered)),
        trained=rendered.loss_mask(),
        notes=notes,
    )


def of_sample(
    document: Document,
    sample: TrainingSample,
    name: str,
    decode: Decode | None,
    *,
    trainer: Data | None = None,
) -> None:
    """Add a training sample. `trainer` has the values of a trainer's model."""
    rendered = sample.rendered
    values = {"sampler": _runs(sample.logprobs, sample.loss_mask), **(trainer or {})}
    values |= {"reward": _runs(sample.rewards, None), "advantage": _runs(sample.advantages, None)}
    if sample.loss_weights is not None and np.any(sample.loss_weights[sample.loss_mask] != 1):
        values["weight"] = _runs(sample.loss_weights, sample.loss_mask)
    spans = rendered.spans if rendered is not None else _from_mask(sample)
    decode = decode if decode is not None or rendered is None else rendered._decode
    document.add(
        sample.sample_id or name,
        sample.token_ids,
        decode,
        spans=spans,
        sections=_messages(rendered)
        if rendered is not None
        else [
            _section(span.start, *(("sampled", "assistant") if span.sampled else ("prompt", "prompt")))
            for span in spans
        ],
        media=sample.media_spans,
        trained=sample.loss_mask,
        values=values,
        notes=[f"message {index}: {why}" for index, why in sample.rewritten.items()],
    )


def of_trajectory(
    document: Document,
    trajectory: Trajectory,
    name: str,
    renderer: Renderer | None,
    tools: Any,
) -> None:
    """Add every branch of a trajectory, with a mark at its first token that no earlier branch shares."""
    decode = renderer.decode if renderer is not None else None
    earlier: list[tuple[int, npt.NDArray[np.int32]]] = []
    branches = trajectory.branches()
    for branch in branches:
        titles = [name] if name else []
        if not name or len(branches) > 1:
            titles.append(f"branch {branch.index}")
        sample = branch.sample(require_logprobs=False)
        ids = sample.token_ids
        (spans, sections), notes = _by_step(branch), []
        offered = branch.tip.tools if tools is None else tools
        rendered = _attributed(branch, renderer, offered) if renderer is not None else None
        if rendered is not None:
            same = common_prefix(rendered.token_ids, ids)
            if same < len(ids):
                notes.append(f"rendering the whole conversation again produces other tokens from {same} on")
            spans = _overlaid(rendered, spans, same)
            sections = _messages(rendered, same, _from(sections, same, len(ids)))
        place = len(document.strips)
        document.add(
            ", ".join(titles),
            ids,
            decode,
            spans=spans,
            sections=sections,
            media=sample.media_spans,
            trained=sample.loss_mask,
            values={
                "sampler": _runs(sample.logprobs, sample.loss_mask),
                "reward": _runs(sample.rewards, None if sample.rewards is None else sample.rewards != 0),
            },
            notes=notes,
        )
        if earlier:
            other, common = max(
                ((index, common_prefix(before, ids)) for index, before in earlier), key=lambda found: found[1]
            )
            if common < len(ids):
                text = f"{common:,} tokens are shared with branch {other - earlier[0][0]}"
                document.mark(place, common, f"branch {branch.index} begins", text)
        earlier.append((place, ids))


def of_audit(document: Document, report: AuditReport) -> None:
    """Add every compared sample, with its findings at their tokens and images."""
    strips: dict[str, int] = {}
    for compared in sorted(report.comparisons, key=lambda one: -one.largest):
        strips[compared.sample.sample_id] = len(document.strips)
        trainer, mask = np.zeros(len(compared.sample)), np.zeros(len(compared.sample), np.bool_)
        trainer[compared.positions], mask[compared.positions] = compared.trainer, True
        values = {"trainer": _runs(trainer, mask)}
        of_sample(document, compared.sample, "sample", report._decode, trainer=values)
    for finding in report.findings:
        strip = strips.get(finding.sample_id)
        if strip is None:
            continue
        media = document.strips[strip]["media"]
        at = finding.token if finding.token is not None else 0
        if finding.token is None and finding.image is not None and finding.image < len(media):
            at = media[finding.image]["start"]
        title = f"{finding.stage}: {finding.statement}"
        document.mark(strip, at, title, finding.evidence, finding.image)
    for compared, first in report.departing:
        difference = float(compared.difference[first])
        text = f"sampler {compared.sampler[first]:.4f}, trainer {compared.trainer[first]:.4f} nats"
        strip = strips[compared.sample.sample_id]
        title = f"first departure, {difference:+.4g} nats"
        at = int(compared.positions[first])
        document.mark(strip, at, title.replace("-", "\u2212"), text.replace("-", "\u2212"))


def of_difference(document: Document) -> None:
    """Mark the first and the last difference between the two strips of a document."""
    first, second = document.strips
    start = common_prefix(first["ids"], second["ids"])
    rest = [np.array(strip["ids"][start:][::-1], np.int64) for strip in (first, second)]
    back = common_prefix(*rest)
    document.side_by_side = True
    for index, strip in enumerate(document.strips):
        stop = len(strip["ids"]) - back
        strip["differs"] = [start, stop]
        if start < max(len(first["ids"]), len(second["ids"])):
            text = f"{start:,} tokens are equal before it, {back:,} after it; {stop - start:,} here differ"
            document.mark(index, min(start, len(strip["ids"]) - 1), "first difference", text)


def _runs(values: npt.NDArray[Any] | None, mask: npt.NDArray[np.bool_] | None) -> Data | None:
    """Return the values under the mask, as runs. Infinities and NaN become text."""
    if values is None:
        return None
    runs = [(0, len(values))] if mask is None else sampled_runs(mask)
    return {str(start): [_number(value) for value in values[start:stop].tolist()] for start, stop in runs}


def _number(value: float) -> float | str:
    return float(f"{value:.6g}") if np.isfinite(value) else str(value)


def _messages(rendered: RenderedTokens, stop: int | None = None, after: Sequence[Data] = ()) -> list[Data]:
    """Return a section per message of a rendering, up to `stop`, followed by `after`."""
    stop = len(rendered) if stop is None else stop
    sections: list[Data] = []
    owned = [span for span in rendered.spans if span.start < stop]
    last = max((span.start for span in owned if span.message >= 0), default=-1)
    for message, spans in groupby(owned, key=lambda span: span.message):
        start = next(spans).start
        if message < 0:
            if start > last or not sections:
                kind = "generation prompt" if start > last and sections else "template"
                sections.append(_section(start, kind, "assistant" if sections else "template"))
            continue
        name = rendered.tool_names[message] if message < len(rendered.tool_names) else None
        label = f"{rendered.roles[message]} {name}" if name else rendered.roles[message]
        if not sections or sections[-1]["message"] != message:
            sections.append(_section(start, label, rendered.roles[message], message))
    return [*sections, *after]


def _section(start: int, label: str, role: str, message: int = -1) -> Data:
    return {"start": start, "label": visible(label), "role": visible(role), "message": message}


def _from(sections: Sequence[Data], start: int, length: int) -> list[Data]:
    """Return the sections of the tokens from `start` on. The first of them begins at `start`."""
    stops = [*(section["start"] for section in sections[1:]), length]
    return [
        {**section, "start": max(section["start"], start)}
        for section, stop in zip(sections, stops, strict=True)
        if start < stop
    ]


def _by_step(branch: Branch) -> tuple[list[TokenSpan], list[Data]]:
    """Return spans and sections of a branch: the prompt and the completion of each step."""
    spans, sections = [], []
    for part in branch.tip.parts():
        (start, stop), step = part.sampled, part.step
        if step.keep < (end := min(start, part.stop)):
            spans.append(TokenSpan(step.keep, end, -1, "prompt", False))
            sections.append(_section(step.keep, f"step {step.index} prompt", "prompt"))
        if start < stop:
            reason = f", {step.finish_reason}" if step.finish_reason and part.whole else ""
            spans.append(TokenSpan(start, stop, -1, "completion", True))
            sections.append(_section(start, f"step {step.index} sampled{reason}", "assistant"))
    return spans, sections


def _from_mask(sample: TrainingSample) -> list[TokenSpan]:
    edges = [0, *(place for run in sampled_runs(sample.loss_mask) for place in run), len(sample)]
    return [
        TokenSpan(start, stop, -1, "completion" if index % 2 else "prompt", bool(index % 2))
        for index, (start, stop) in enumerate(pairwise(edges))
        if start < stop
    ]


def _overlaid(rendered: RenderedTokens, steps: Sequence[TokenSpan], same: int) -> list[TokenSpan]:
    """Attribute the first `same` tokens to messages and the rest to steps. Steps say which are sampled."""
    spans = []
    for span in steps:
        for owner in rendered.spans:
            start, stop = max(span.start, owner.start), min(span.stop, owner.stop, same)
            if start < stop:
                spans.append(TokenSpan(start, stop, owner.message, owner.kind, span.sampled))
        if span.stop > same:
            spans.append(span._replace(start=max(span.start, same)))
    return spans


def _attributed(branch: Branch, renderer: Renderer, tools: Any) -> RenderedTokens | None:
    """Return a rendering of a branch's whole conversation, or None if that fails.

    Its attribution holds for the tokens that it shares with the branch. Images missing from the messages are
    taken from the items.
    """
    try:
        messages = normalize_messages(branch.tip.messages)
        contents = [message.content for message in messages]
        parts = [part for content in contents if isinstance(content, tuple) for part in content]
        media = branch.tip.media
        missing = [
            span.item
            for span, part in zip(media, [part for part in parts if hasattr(part, "source")], strict=False)
            if isinstance(part, ImagePart) and part.source is None
        ]
        urls = [encoded_image(item).data_url for item in missing]
        return renderer.render(messages, tools=tools, images=urls or None)
    except MMRenderError:
        return None
