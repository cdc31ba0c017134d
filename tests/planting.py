"""Rollouts of tiny models in which sampler and trainer differ by one fault, and what an audit says of them.

Tables of faults: `audit_plantings.py`. Each rollout is drawn token by token from the sampler as it is with the
fault. The trainer gets the sample that it would have built.
"""

import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import ANSWER, BOS, OPENER, STOP, Row, decode, picture, recorded, scored
from mmrender.audit import AuditReport, TrainerModel, audit
from mmrender.audit.report import Finding
from mmrender.training import collate
from mmrender.trajectory.sample import TrainingSample
from training_cases import PAD_ID
from training_models import TinyFamily, tiny_family

SYSTEM, USER, NEWLINE = 40, 41, 42
STAGES = ("template", "tokens", "pixels", "positions", "model", "sampling", "recording")
COUNT = 6
"""Rollouts in an audit."""
FAULTY = 2
"""The faulty one, if one is."""
SMALL = 1e-3
"""Plantings with smaller differences, in nats, are not counted."""


@dataclass(frozen=True)
class Part:
    """A piece of a conversation: tokens, or an image."""

    kind: str
    ids: tuple[int, ...] = ()
    image: Image.Image | None = None
    sampled: bool = False


Parts = Sequence[Part]


def dialogue(seed: int) -> list[tuple[list[Part], int]]:
    """For each turn the parts before the completion, and its length in tokens."""
    rng = np.random.default_rng([7, seed])

    def letters(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, 40, rng.integers(4, most)).tolist())

    parts = [
        Part("bos", (BOS,)),
        Part("header", (OPENER, SYSTEM, NEWLINE)),
        Part("system", letters(10)),
        Part("close", (STOP, NEWLINE)),
    ]
    turns = []
    size = (int(rng.integers(56, 110)), int(rng.integers(56, 110)))
    for turn in range(2):
        parts += [Part("header", (OPENER, USER, NEWLINE)), Part("user", letters(8))]
        for _ in range(1 + (seed + turn) % 2):
            parts += [Part("image", image=picture(rng, size)), Part("user", letters(6))]
        parts += [Part("close", (STOP, NEWLINE)), Part("prompt", (OPENER, ANSWER, NEWLINE))]
        turns.append((parts, int(rng.integers(10, 16))))
        parts = []
    return turns


@dataclass
class Context:
    """What hooks may look at.

    Attributes:
        world: Models and image processor.
        seed: Of the rollout.
        turn: Number of the completion.
        prompt: Tokens of the sampler before the completion.
        drawn: Tokens of the completion.
        history: Tokens of earlier completions.
        lengths: Sampled tokens of each turn, once it has ended.
    """

    world: "World"
    seed: int
    turn: int = 0
    prompt: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([11, self.seed])


def longer(inputs: Mapping[str, Any], token: int) -> dict[str, Any]:
    """The inputs with one more token of text."""
    out = dict(inputs)
    out["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([[token]])], 1)
    out["position_ids"] = torch.cat([inputs["position_ids"], inputs["position_ids"][..., -1:] + 1], -1)
    out["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            out[name] = torch.nn.functional.pad(inputs[name], (0, 1))
    return out


def decoded(model: Any, inputs: Mapping[str, Any], past: Any) -> tuple[Any, Any]:
    """The logits of the next token, and the cache of keys and values, as an engine decodes."""
    options = {**inputs, "use_cache": True}
    if past is not None:
        names = ("input_ids", "position_ids")
        options = {name: inputs[name][..., -1:] for name in names}
        options |= {"attention_mask": inputs["attention_mask"], "past_key_values": past, "use_cache": True}
    with torch.inference_mode():
        out = model(**options)
    return out.logits[0, -1].float().clone(), out.past_key_values


@dataclass(frozen=True)
class Fault:
    """How the sampler differs from the trainer. By default in nothing.

    Attributes:
        sees: The conversation as the sampler gets it, from the true one.
        trains: The conversation as the trainer builds it.
        shows: The sampler's picture, from the true one and its number.
        inputs: Changes the sampler's model inputs.
        forward: The sampler's logits of the next token from all inputs, if no cache is used.
        sampler: The sampler's model, from a copy of the trainer's.
        trainer: The trainer's model, from a copy of the family's, for healthy rollouts too.
        rule: The reported distribution, as logits, from the model's.
        draw: The next token, if it is not drawn.
        stops: Whether the sampler ends a turn with its stop token.
        record: The log-probabilities as they are recorded.
        finish: The trainer's sample, changed.
        options: Further arguments of the audit.
    """

    sees: Callable[[Parts, Context], Parts] = lambda parts, _: parts
    trains: Callable[[Parts, Context], Parts] = lambda parts, _: parts
    shows: Callable[[Image.Image, int, Context], Image.Image] = lambda image, *_: image
    inputs: Callable[[dict[str, Any], Context], None] = lambda *_: None
    forward: Callable[[Context, dict[str, Any]], Any] | None = None
    sampler: Callable[[Any], Any] = lambda model: model
    trainer: Callable[[Any], Any] = lambda model: model
    rule: Callable[[Any, Context], Any] = lambda logits, _: logits
    draw: Callable[[Context], int | None] = lambda _: None
    stops: bool = True
    record: Callable[[Any, Context], Any] = lambda values, _: values
    finish: Callable[[TrainingSample, Context], TrainingSample] = lambda sample, _: sample
    options: Callable[["World", Sequence[TrainingSample]], Mapping[str, Any]] = lambda *_: {}


HEALTHY = Fault()


@dataclass
class World:
    """One family's trainer and sampler.

    Attributes:
        sources: Images by identity of their items, as trained on.
        seen: By sample id, the sample as the sampler saw it.
    """

    tiny: TinyFamily
    model: Any
    sampler: Any
    sources: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, TrainingSample] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    pictures: list[Image.Image] = field(default_factory=list)

    def item(self, image: Image.Image) -> Any:
        if id(image) not in self.items:
            self.items[id(image)] = self.tiny.process(image)
            self.pictures.append(image)  # or its id might be given to another
        return self.items[id(image)]

    def build(self, parts: Parts, shows: Callable[[Image.Image, int], Image.Image] | None = None) -> Row:
        row, number = Row(), 0
        for part in parts:
            if part.image is None:
                row.add(part.ids, part.sampled)
                continue
            shown = part.image if shows is None else shows(part.image, number)
            item = self.item(shown)
            if shows is None:
                self.sources.setdefault(item.identity, shown)
            row.image(item)
            number += 1
        return row


@cache
def grown(name: str, folder: Path) -> TinyFamily:
    """The family's tiny model, with norms and biases that are not those of a new model."""
    tiny = tiny_family(name, folder)
    model = deepcopy(tiny.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return replace(tiny, model=model)


def world_of(name: str, folder: Path, fault: Fault) -> World:
    tiny = grown(name, folder)
    model = fault.trainer(deepcopy(tiny.model))
    sampler = fault.sampler(deepcopy(model))
    return World(replace(tiny, model=model), model, sampler)


def roll(world: World, seed: int, fault: Fault, name: str = "") -> TrainingSample:
    """Draw one rollout from the sampler, and return the trainer's sample of it."""
    ctx = Context(world, seed)
    generator = torch.Generator().manual_seed(seed)
    shown: dict[tuple[int, int], Image.Image] = {}

    def shows(image: Image.Image, number: int) -> Image.Image:
        key = (id(image), number)
        if key not in shown:
            shown[key] = fault.shows(image, number, ctx)
        return shown[key]

    parts: list[Part] = []
    values: list[float] = []
    inputs: dict[str, Any] = {}
    past: Any = None

    def step() -> Any:
        nonlocal inputs, past
        if not ctx.drawn:
            row = world.build(fault.sees([*parts, Part("out", sampled=True)], ctx), shows)
            ctx.prompt = row.ids
            bare = replace(row.sample(), loss_mask=np.zeros(len(row.ids), bool))
            dtype = world.sampler.dtype
            batch = collate([bare], world.tiny.family, pad_token_id=PAD_ID, dtype=dtype, pin_memory=False)
            inputs, past = batch.model_inputs(), None
        else:
            inputs = longer(inputs, ctx.drawn[-1])
        changed = dict(inputs)
        fault.inputs(changed, ctx)
        if fault.forward is None:
            logits, past = decoded(world.sampler, changed, past)
        else:
            logits = fault.forward(ctx, changed)
        reported = fault.rule(logits.clone(), ctx).log_softmax(-1)
        return logits, reported

    def take(token: int, logits: Any, reported: Any) -> None:
        values.append(float(reported[token]))
        ctx.best.append(float(reported.max()))
        ctx.raw.append(float(logits[token]))
        ctx.drawn.append(token)

    for ctx.turn, (prompt, length) in enumerate(dialogue(seed)):
        parts += prompt
        for _ in range(length):
            logits, reported = step()
            token = fault.draw(ctx)
            if token is None:
                own = torch.full_like(reported, -torch.inf)
                own[3:79] = reported[3:79]
                own = own if torch.isfinite(own).any() else reported
                token = int(torch.multinomial(own.softmax(-1), 1, generator=generator))
            take(token, logits, reported)
        stopped = False
        if fault.stops:
            logits, reported = step()
            stopped = bool(torch.isfinite(reported[STOP]))
            if stopped:
                take(STOP, logits, reported)
        ctx.lengths.append(len(ctx.drawn))
        ctx.history += ctx.drawn
        out = ctx.drawn[:-1] if stopped else ctx.drawn
        parts += [Part("out", tuple(out), sampled=True), Part("stop", (STOP,), sampled=stopped)]
        parts += [Part("end", (NEWLINE,))]
        ctx.drawn = []
    parts.pop()
    name = name or f"rollout-{seed}"
    seen = world.build(fault.sees(parts, ctx), shows).sample(name)
    row = world.build(fault.trains(parts, ctx)).sample(name)
    numbers = np.asarray(fault.record(np.array(values, np.float64), ctx), np.float32)
    sample = recorded(row, numbers) if row.loss_mask.sum() == len(numbers) else row
    if seen.loss_mask.sum() == len(numbers):
        world.seen[name] = recorded(seen, numbers)
    return fault.finish(sample, ctx)


@dataclass(frozen=True)
class Planting:
    """One fault and the truth about it.

    Attributes:
        name: Short name.
        family: Of the model.
        stage: Stages that are right to report, joined by `|`.
        truth: One sentence.
        source: Where it really happened.
        right: Statements that name the cause, as a regular expression. A question mark before it says that no
            audit is expected to name the cause: then only the stage counts, and another name is wrong.
        fault: It.
        cause: The cause in plain words, or `"unknown"` if no audit is expected to name it.
        wrong: Statements that name another cause, even if they match `right`.
        remedy: Remedies that are right.
        second: Statements that name the second cause, if there are two.
        halves: The faults of two causes, each by itself.
    """

    name: str
    family: str
    stage: str
    truth: str
    source: str
    right: str
    fault: Fault
    cause: str = ""
    wrong: str = ""
    remedy: str = ""
    second: str = ""
    halves: tuple[Fault, ...] = ()

    @property
    def exotic(self) -> bool:
        return self.right.startswith("?")

    def named_by(self, statement: str) -> bool:
        """Whether a statement names the cause, or one of two."""
        if self.wrong and re.search(self.wrong, statement):
            return False
        return any(re.search(pattern, statement) for pattern in self.patterns)

    @property
    def patterns(self) -> tuple[str, ...]:
        """For each cause, statements that name it."""
        return tuple(filter(None, (self.right.removeprefix("?"), self.second)))


def names_cause(finding: Finding) -> bool:
    return finding.cause != "unknown"


@dataclass
class Outcome:
    """What an audit said of one planting."""

    name: str
    family: str
    mode: str
    truth: str
    expected: str
    stage: str
    stage_right: bool
    verdict: str
    cause: str
    largest: float
    beside: str = ""
    remedied: bool | None = None
    """Whether a remedy is right, if the cause is named and the table has a remedy."""


KEPT = os.environ.get("PLANTINGS_KEPT", "")
"""A folder in which rollouts are kept between runs, since drawing them takes as long as an audit."""


def kept(name: str, draw: Callable[[], Any]) -> Any:
    """Something drawn, or read from the folder of kept things."""
    path = Path(KEPT) / f"{name}.pickle"
    if KEPT and path.exists():
        return pickle.loads(path.read_bytes())
    drawn = draw()
    if KEPT:
        path.write_bytes(pickle.dumps(drawn))
    return drawn


@cache
def healthy_rollouts(family: str, folder: Path) -> Any:
    """Rollouts without a fault, and their images."""

    def draw() -> Any:
        world = world_of(family, folder, HEALTHY)
        return [roll(world, seed, HEALTHY) for seed in range(COUNT)], world.sources

    return kept(f"healthy-{family}", draw)


@cache
def planted(planting: Planting, mode: str, folder: Path) -> tuple[Any, list[TrainingSample], dict[str, Any]]:
    """The trainer's model, rollouts with the fault in one or all, and further arguments of the audit."""
    fault = planting.fault

    def draw() -> Any:
        world = world_of(planting.family, folder, fault)
        if fault.trainer is HEALTHY.trainer:
            peers, sources = healthy_rollouts(planting.family, folder)
        else:
            healthy = replace(world, sampler=world.model)
            peers, sources = [roll(healthy, seed, HEALTHY) for seed in range(COUNT)], {}
        samples = [roll(world, seed, fault) if seed in faulty(mode) else peers[seed] for seed in range(COUNT)]
        options = {"sources": world.sources | sources, **fault.options(world, samples)}
        edit = options.pop("edit", None)
        return samples if edit is None else edit(samples, faulty(mode)), options

    samples, options = kept(f"{planting.name}-{mode}", draw)
    return fault.trainer(deepcopy(grown(planting.family, folder).model)), samples, options


def faulty(mode: str) -> list[int]:
    """Numbers of the faulty rollouts."""
    return [FAULTY] if mode == "one" else list(range(COUNT))


def audited(
    planting: Planting, mode: str, folder: Path, tolerance: float | None = None, **more: Any
) -> AuditReport:
    model, samples, options = planted(planting, mode, folder)
    return audit(samples, TrainerModel(model), tolerance=tolerance, decode=decode, **options, **more)


def judge(
    planting: Planting, mode: str, folder: Path, tolerance: float | None = None, **more: Any
) -> Outcome:
    """Audit a planting and compare the report with the truth.

    A cause is right if a finding states it and none states another. Of two causes one alone is half. Findings about
    healthy samples are wrong.
    """
    report = audited(planting, mode, folder, tolerance, **more)
    samples = planted(planting, mode, folder)[1]
    ids = {samples[index].sample_id for index in faulty(mode)}
    own = [one for one in report.findings if one.sample_id in ids]
    beside = [one for one in report.findings if one.sample_id not in ids]
    largest = max(
        (one.largest for one in report.comparisons if one.sample.sample_id in ids), default=float("nan")
    )
    stages = sorted({one.stage for one in own})
    expected = planting.stage.split("|")
    named = [one for one in own if names_cause(one)]
    hits = [planting.named_by(one.statement) for one in named]
    if not own and not report.unread and report.largest <= report.tolerance:
        verdict = "missed"
    elif beside or (named and not all(hits)):
        verdict = "wrong"
    elif named:
        whole = all(any(re.search(each, one.statement) for one in named) for each in planting.patterns)
        verdict = "right" if whole else "half"
    else:
        verdict = "unknown"
    said = dict.fromkeys(f"{one.stage}, {one.cause}: {one.statement}" for one in own)
    unread = [f"not compared: {name}: {why}" for name, why in report.unread]
    return Outcome(
        planting.name,
        planting.family,
        mode,
        planting.truth,
        planting.stage,
        "|".join(stages) or "none",
        bool(stages) and set(stages) <= set(expected),
        verdict,
        " || ".join([*said, *unread[:1]]) or "nothing",
        largest,
        " || ".join(str(one) for one in beside),
        any(re.search(planting.remedy, str(one.remedy)) for one in named)
        if named and planting.remedy
        else None,
    )


def departures(model: Any, tiny: TinyFamily, samples: Sequence[TrainingSample]) -> list[Any]:
    """For each sample, how far its recorded numbers are from the trainer's: nats, float32 `(sampled tokens,)`."""
    out = []
    for sample in samples:
        own = scored(model, tiny, sample).logprobs
        out.append(np.abs(own - sample.logprobs)[sample.loss_mask])
    return out


def planted_departures(planting: Planting, folder: Path) -> list[Any]:
    """Departures of all samples with the fault."""
    model, samples, _ = planted(planting, "all", folder)
    return departures(model, grown(planting.family, folder), samples)


@cache
def noise(family: str, folder: Path) -> float:
    """The largest departure without a fault, in nats: of decoding step by step."""
    tiny = grown(family, folder)
    samples, _ = healthy_rollouts(family, folder)
    return float(max(one.max() for one in departures(tiny.model, tiny, samples)))
