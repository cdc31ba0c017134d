"""`prove_family`: proof that batches of an architecture have the logits and gradients of single forwards.

A family is proved on its own architecture, built small with random weights, or on a model of the caller's.
Samples with images and without run one by one, with the inputs of the family's image processor, as the model
numbers and masks them itself, and then in batches: padded on the right, padded on the left, and packed.
Samples lie on both sides of each length of the configuration: windows, chunks, the lengths that rotary
embeddings were trained for. A layout with other logits or gradients is refused, with the first module that
differs. Differences that float64 does not have are rounding. If every layout differs, and none with samples
up to a length, samples are bounded by that length. A model whose logits do not depend on the text or the
images before them proves nothing, and is refused as well.
"""

import copy
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, get_args

import numpy as np

from mmrender.caching import cached_property
from mmrender.errors import BatchError, MissingDependencyError, MMRenderError
from mmrender.sidecar import MediaItem
from mmrender.testing.family_samples import (
    Images,
    make_images,
    make_sample,
    make_samples,
    reference_inputs,
    with_inputs,
)
from mmrender.testing.small_architecture import Length, SmallModel, build_small, unchecked_lengths
from mmrender.training.batch import TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import (
    Layout,
    ModelFamily,
    Proof,
    read_settings,
    remember_proof,
    unproved_family,
)
from mmrender.training.recurrent import recurrent_segments
from mmrender.training.segments import placed
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample

_TOLERANCE: Final = 5e-5
"""Largest difference of a logit, in standard deviations of the logits, and of a gradient, in parts of the
largest of its parameter."""
_SEEN: Final = 1e-2
"""Smallest change of a logit that another token, or another image, must make, in standard deviations."""
_ROUNDING: Final = 1e-3
"""Difference up to which float64 decides whether it is rounding of float32."""
_FLOOR: Final = 1e-3
"""Part of the largest gradient of all below which gradients count as rounding."""
_MOST_TOKENS: Final = 512
"""The longest length that samples of a caller's model cross. Longer ones are crossed by a small model."""
_WITHIN_LAYER: Final = re.compile(r"layers\.\d+\.([\w.]+)$")


@dataclass(frozen=True)
class FamilyReport:
    """Outcome of the comparison of a family's batches with single forwards.

    Attributes:
        family: The family, with its findings.
        lengths: The lengths that samples lie on both sides of.
        logits: Largest difference of a logit by layout, in standard deviations of the logits. Of float64, if
            a larger one of float32 is rounding.
        gradients: Largest difference of a gradient by layout, in parts of the largest of its parameter; empty
            if the model is the caller's.
    """

    family: ModelFamily
    lengths: tuple[Length, ...]
    logits: Mapping[Layout, float] = field(default_factory=dict)
    gradients: Mapping[Layout, float] = field(default_factory=dict)


def prove_family(model_or_config: Any, *, images: Sequence[MediaItem] | None = None) -> ModelFamily:
    """Compare batches of an architecture with single forwards, and return the family with its findings.

    The architecture is built small, with random weights and short windows, unless a model in float32 is
    passed, which runs as it is. Lengths of its configuration beyond 512 tokens are then crossed by a small
    model of its class. Padded (right and left) and packed batches of samples with images and without run in
    train mode. The proof is remembered by the configuration: `ModelFamily.from_config` uses it in this
    process and, if the architecture was built here, in others with the same releases of Transformers, torch
    and mmrender, too. `MMRENDER_CACHE` names the folder, and `off` keeps nothing.

    Args:
        model_or_config: A Transformers model, or a configuration as `ModelFamily.from_config` takes it.
        images: Four items of the model's own processor or more, the last two of one size. Needed if the
            family's image processor cannot be built from its name alone.

    Returns:
        The family, with the layouts that failed and the module at fault in `refused`, and in
        `max_sample_tokens` the length beyond which every layout fails, or that could not be crossed.

    Raises:
        ModelError: The configuration cannot be read.
        BatchError: All layouts fail, or nothing can be compared.
        MissingDependencyError: Transformers is not installed.
    """
    report = compare_family(model_or_config, images=images)
    settings = read_settings(getattr(model_or_config, "config", model_or_config))
    family = report.family
    proof = Proof(family.token_types, family.recurrent, family.max_sample_tokens, dict(family.refused))
    # A model of the caller's may have code of its own, which no configuration names.
    remember_proof(settings, proof, on_disk=not _runs(model_or_config))
    return family


def compare_family(model_or_config: Any, *, images: Sequence[MediaItem] | None = None) -> FamilyReport:
    """Compare as `prove_family`, and return all differences. Nothing is remembered. Raises the same."""
    settings = read_settings(getattr(model_or_config, "config", model_or_config))
    whole = unproved_family(settings)
    if not _runs(model_or_config):
        small = build_small(_transformers_config(model_or_config, settings))
        report = _compared(small.model, small.lengths, images, gradients=True)
    else:
        model = model_or_config
        try:
            # The configuration of a model of the caller's own class may be built small, too.
            small = build_small(model.config, type(model))
            lengths = small.lengths
        except BatchError:
            small, lengths = None, unchecked_lengths(model)
        near = tuple(one._replace(small=one.tokens) for one in lengths if one.tokens <= _MOST_TOKENS)
        report = _compared(model, near, images, gradients=False)
        if len(near) < len(lengths):
            report = _joined(report, _beyond(lengths[len(near) :], small, images))
    bounds = [one for one in (whole.max_sample_tokens, report.family.max_sample_tokens) if one is not None]
    family = replace(
        whole,
        token_types=report.family.token_types,
        recurrent=report.family.recurrent,
        refused=report.family.refused,
        max_sample_tokens=min(bounds, default=None),
    )
    return replace(report, family=family)


def _runs(model_or_config: Any) -> bool:
    """Whether a model in float32 is passed, which runs as it is."""
    if not hasattr(model_or_config, "forward"):
        return False
    return bool(next(model_or_config.parameters()).dtype == torch.float32)


def _transformers_config(given: Any, settings: Mapping[str, Any]) -> Any:
    given = getattr(given, "config", given)
    if hasattr(given, "to_dict"):
        return given
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise MissingDependencyError.of_extra("transformers", "hf", "prove_family") from error
    model_type = settings["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise BatchError(
            "Transformers does not know this family",
            where="config.model_type",
            got=repr(model_type),
            remedy="Pass the model itself, in float32",
        )
    return CONFIG_MAPPING[model_type].from_dict(dict(settings))


def _beyond(lengths: Sequence[Length], small: SmallModel | None, images: Any) -> FamilyReport:
    """Compare a small model of the caller's class across lengths that the caller's model is too long for."""
    if small is not None:
        try:
            return _compared(small.model, small.lengths, None, gradients=True)
        except BatchError:
            pass  # what a small model cannot show stays unknown
    bound = min(one.tokens for one in lengths)
    return FamilyReport(ModelFamily("", max_sample_tokens=bound), ())


def _joined(one: FamilyReport, other: FamilyReport) -> FamilyReport:
    """Return the findings of two comparisons of one family."""
    names = [name for report in (one, other) for name in report.family.recurrent.split("|") if name]
    bounds = [report.family.max_sample_tokens for report in (one, other)]
    family = replace(
        one.family,
        recurrent="|".join(dict.fromkeys(names)),
        refused={**other.family.refused, **one.family.refused},
        max_sample_tokens=min((bound for bound in bounds if bound is not None), default=None),
    )
    logits = {layout: max(report.logits.get(layout, 0.0) for report in (one, other)) for layout in one.logits}
    return FamilyReport(family, other.lengths or one.lengths, logits, other.gradients)


def _compared(
    model: Any, lengths: tuple[Length, ...], given: Sequence[MediaItem] | None, *, gradients: bool
) -> FamilyReport:
    """Compare one model, whose configuration has the small values of the lengths."""
    draft = replace(with_inputs(unproved_family(model.config.to_dict()), model), max_sample_tokens=None)
    with _undisturbed(model):
        images = Images(given) if given else make_images(model, draft)
        samples = make_samples(draft, images.items, sorted({one.small for one in lengths}))
        bench = _Bench(model, draft, images, gradients)
        bench.check_sensitive()
        family, found = _by_layout(bench, draft, samples)
        bound = None
        for length in sorted(lengths, key=lambda one: -one.tokens):
            if not all(one.text for one in found.values()):
                break
            within = [one for one in samples if len(one) <= length.small]
            if not any(one.media_spans for one in within) and any(one.media_spans for one in samples):
                break  # without images nothing is proved of them
            shorter, again = _by_layout(bench, draft, within)
            if not all(one.text for one in again.values()):
                family, found, bound = shorter, again, length.tokens
    refused = {layout: found[layout].text for layout in get_args(Layout) if found[layout].text}
    if len(refused) == len(found):
        raise BatchError(
            f"batches for {draft.model_type} differ from single forwards in every layout",
            where="config.model_type",
            got="; ".join(dict.fromkeys(refused.values())),
            remedy="Train on one sample at a time with the model's own inputs",
        )
    return FamilyReport(
        replace(family, refused={**draft.refused, **refused}, max_sample_tokens=bound),
        lengths,
        {layout: one.logits for layout, one in found.items()},
        {layout: one.gradients for layout, one in found.items()} if gradients else {},
    )


def _by_layout(
    bench: "_Bench", family: ModelFamily, samples: Sequence[TrainingSample]
) -> tuple[ModelFamily, dict[Layout, "_Difference"]]:
    """Return the difference in each layout, and the family with the modules that run sample by sample."""
    packed = bench.difference(family, "packed", samples)
    names: list[str] = [] if not family.recurrent else family.recurrent.split("|")
    mixing = packed
    while mixing.text and mixing.module not in ("", *names):
        # A module that mixes samples along the row may run sample by sample, if nothing else mixes.
        names.append(mixing.module)
        recurrent = replace(family, recurrent="|".join(names))
        mixing = bench.difference(recurrent, "packed", samples)
        if not mixing.text:
            family, packed = recurrent, mixing
    found: dict[Layout, _Difference] = {"packed": packed}
    for layout in get_args(Layout):
        if layout not in found:
            found[layout] = bench.difference(family, layout, samples)
    return family, found


def _options(layout: Layout, count: int) -> dict[str, Any]:
    """Return the options of `collate` for a layout; packed rows hold every other sample."""
    if layout == "packed":
        return {"rows": [[*range(0, count, 2)][::-1], [*range(1, count, 2)]], "multiple": 8}
    return {"padding_side": "left", "multiple": 8} if layout == "left" else {}


@dataclass(frozen=True)
class _Difference:
    """The largest differences of a layout; without a text the layout is proved.

    Attributes:
        logits: In standard deviations of the logits.
        gradients: In parts of the largest of its parameter.
        text: The reason against the layout.
        module: A module of a layer that could run by sample.
    """

    logits: float = float("inf")
    gradients: float = float("inf")
    text: str = ""
    module: str = ""


_Outcome: TypeAlias = tuple[dict[str, Any], list[Any]]
"""Logits by sample, and the gradient of each parameter."""


@dataclass(frozen=True)
class _Bench:
    model: Any
    family: ModelFamily
    images: Images
    gradients: bool
    singles: dict[str, _Outcome] = field(default_factory=dict)

    def alone(self, sample: TrainingSample) -> _Outcome:
        """Return the outcome of one sample with the reference's inputs."""
        if sample.sample_id not in self.singles:
            inputs = reference_inputs(sample, self.family, self.images)
            try:
                outcome = self._outcome(lambda: {sample.sample_id: self._logits(inputs)[0]})
            except Exception as error:  # a model's own code may raise anything
                raise BatchError(
                    "a single forward fails",
                    where=type(self.model).__name__,
                    got=f"{type(error).__name__}: {error}"[:200],
                    remedy="Pass items of the model's own processor as `images`, or a model that runs",
                ) from error
            self.singles[sample.sample_id] = outcome
        return self.singles[sample.sample_id]

    def together(self, batch: TrainingBatch) -> _Outcome:
        """Return the outcome of a batch."""

        def run() -> dict[str, Any]:
            with recurrent_segments(self.model, batch):
                logits = self._logits(batch.model_inputs())
            return dict(zip(batch.sample_ids, batch.split(logits), strict=True))

        return self._outcome(run)

    def _logits(self, inputs: Mapping[str, Any]) -> Any:
        dtype = next(self.model.parameters()).dtype

        def cast(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: cast(one) for name, one in value.items()}
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return self.model(**cast(dict(inputs))).logits

    @cached_property
    def in_float64(self) -> "_Bench":
        """The same with the model in float64, if it may be, with attention that has no float32 within."""
        model = copy.deepcopy(self.model).double()
        with suppress(Exception):  # a model may know eager attention only
            model.set_attn_implementation("sdpa")
        return replace(self, model=model, singles={})

    def _outcome(self, run: Callable[[], dict[str, Any]]) -> _Outcome:
        with _as_before(self.model), torch.set_grad_enabled(self.gradients):
            logits = run()
            if not self.gradients:
                return logits, []
            # A loss with another weight for each logit: a sum of all would hide exchanges.
            loss = sum((one * _weights(name, one.shape).to(one.dtype)).sum() for name, one in logits.items())
            parameters = [one for one in self.model.parameters() if one.requires_grad]
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {name: one.detach() for name, one in logits.items()}, [
            torch.zeros_like(one) if gradient is None else gradient
            for one, gradient in zip(parameters, found, strict=True)
        ]

    def check_sensitive(self) -> None:
        """Require that logits depend on the first token and on the pixels of images."""
        items = self.images.items
        whole = make_sample(self.family, [], seed=0, text=15)
        ids = whole.token_ids.copy()
        ids[0] += 1
        pairs = {"token": [whole, replace(whole, token_ids=ids)]}
        if items:
            pairs["image"] = [make_sample(self.family, [item], seed=0) for item in items[-2:]]
        for name, pair in pairs.items():
            before, after = (
                next(iter(self.alone(replace(one, sample_id=f"{name} {number}"))[0].values()))
                for number, one in enumerate(pair)
            )
            if before.shape != after.shape or not _largest(before[-1:], after[-1:]) > _SEEN:
                raise BatchError(
                    f"nothing is proved: another {name} does not change the logits of the last token",
                    where=type(self.model).__name__,
                    expected=f"a change of {_SEEN} standard deviations or more",
                )

    def difference(
        self, family: ModelFamily, layout: Layout, samples: Sequence[TrainingSample]
    ) -> _Difference:
        """Return how a layout differs from single forwards, apart from rounding."""
        found = self._difference(family, layout, samples)
        is_float32 = next(self.model.parameters()).dtype == torch.float32
        if found.text and max(found.logits, found.gradients) <= _ROUNDING and self.gradients and is_float32:
            try:
                exact = self.in_float64.difference(family, layout, samples)
            except BatchError:
                return found  # a part of the model computes in float32 only
            if max(exact.logits, exact.gradients) <= _TOLERANCE / 10:
                return exact
        return found

    def _difference(
        self, family: ModelFamily, layout: Layout, samples: Sequence[TrainingSample]
    ) -> _Difference:
        singles = {one.sample_id: self.alone(one) for one in samples}
        try:
            batch = collate(
                samples, replace(family, refused={}), pad_token_id=0, **_options(layout, len(samples))
            )
            logits, gradients = self.together(batch)
        except MMRenderError as error:
            return _Difference(text=str(error))
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            return _Difference(text=f"{layout} rows: {type(error).__name__}: {error}"[:200])
        off = {name: _largest(one[name], logits[name]) for name, (one, _) in singles.items()}
        name = max(off, key=lambda one: off[one])
        expected = [sum(each) for each in zip(*(one for _, one in singles.values()), strict=True)]
        steepest = _steepest(expected, gradients)
        if off[name] <= _TOLERANCE and steepest <= _TOLERANCE:
            return _Difference(off[name], steepest)
        if off[name] <= _TOLERANCE:
            text = f"gradients of {layout} rows differ from single forwards, by {steepest:.2g} of the largest"
            return _Difference(off[name], steepest, text)
        sample = next(one for one in samples if one.sample_id == name)
        path, kind = self._first_module(batch, sample)
        layer = _WITHIN_LAYER.search(path)
        text = f"{layout} rows differ from single forwards in {path or 'no single module'}"
        text = f"{text} ({kind})" if kind else text
        text = f"{text}, by {off[name]:.2g} deviations"
        return _Difference(off[name], steepest, text, layer[1] if layer else "")

    def _first_module(self, batch: TrainingBatch, sample: TrainingSample) -> tuple[str, str]:
        """Return name and class of the first module that makes equal states differ."""
        inputs = reference_inputs(sample, self.family, self.images)
        with torch.no_grad(), _as_before(self.model), _recorded(self.model) as single:
            self.model(**inputs)
        apart = recurrent_segments(self.model, batch)
        with torch.no_grad(), _as_before(self.model), _recorded(self.model) as whole, apart:
            self.model(**batch.model_inputs())
        shape = [len(batch), batch.width]
        row, segment = next(pair for pair in placed(batch.segments) if pair[1].sample_id == sample.sample_id)
        for path, (kind, *states) in whole.items():
            if path not in single or any(one is None or [*one.shape[:2]] != shape for one in states):
                continue
            cut = [state[row, segment.start : segment.stop] for state in states]
            expected = [None if state is None else state[0] for state in single[path][1:]]
            if any(one is None or one.shape != cut[0].shape for one in (*expected, *cut)):
                continue  # states have one shape, unlike values that are computed of positions
            off_in, off_out = (_largest(one, other) for one, other in zip(expected, cut, strict=True))
            if off_in <= _TOLERANCE / 10 and off_out > _TOLERANCE / 10:
                return path, kind
        return "", ""


def _weights(name: str, shape: Sequence[int]) -> Any:
    """Return the weight of each logit of a sample in the loss, the same in every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator)


def _steepest(expected: Sequence[Any], got: Sequence[Any]) -> float:
    """Return the largest difference of a gradient, in parts of the largest of its parameter."""
    sizes = [float(one.abs().max()) for one in expected]
    floor = _FLOOR * max(sizes, default=0.0)
    off = [
        float((one - other).abs().max()) / max(floor, size, 1e-30)
        for one, other, size in zip(expected, got, sizes, strict=True)
    ]
    return max((one if np.isfinite(one) else float("inf") for one in off), default=0.0)


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Put back what a forward changes: some rotary embeddings keep the longest length that they have seen."""
    states = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, state, buffers in states:
            vars(module).update(state)
            module._buffers.clear()
            module._buffers.update(buffers)


def _largest(expected: Any, got: Any) -> float:
    """Return the largest difference, in standard deviations of the expected values."""
    scale = float(expected.double().std()) or 1.0
    value = float((expected.double() - got.double()).abs().max()) / scale
    return value if np.isfinite(value) else float("inf")


@contextmanager
def _recorded(model: Any) -> Iterator[dict[str, tuple[str, Any, Any]]]:
    """Note class, first input and first output of each module, in the order in which they finish."""
    seen: dict[str, tuple[str, Any, Any]] = {}

    def hook(path: str) -> Any:
        def note(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            made = output[0] if isinstance(output, tuple) else output
            tensors = (
                one if isinstance(one, torch.Tensor) and one.ndim >= 3 else None for one in (given, made)
            )
            seen.setdefault(path, (type(module).__name__, next(tensors), next(tensors)))

        return note

    with ExitStack() as stack:
        for path, module in model.named_modules():
            handle = module.register_forward_hook(hook(path), with_kwargs=True)
            stack.callback(handle.remove)
        yield seen


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Put the model into train mode without dropout, and put everything back."""
    changed = []
    for module in model.modules():
        changed.append((module, "training", module.training))
        names = [name for name in vars(module) if name == "p" or "dropout" in name]
        changed += [(module, name, getattr(module, name)) for name in names]
    try:
        model.train()
        for module, name, value in changed:
            if isinstance(value, float):
                setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
