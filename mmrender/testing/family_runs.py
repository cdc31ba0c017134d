"""Runs of one model that a family's proof compares: samples one by one, and in batches of each layout.

A run has logits by sample and, for models of the proof's own, the gradient of each parameter. The difference
of two runs names the first module that makes equal states differ.
"""

import copy
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from mmrender.caching import cached_property
from mmrender.errors import BatchError, MMRenderError
from mmrender.testing.family_samples import Images, make_sample, reference_inputs
from mmrender.training.batch import TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import Layout, ModelFamily
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
_WITHIN_LAYER: Final = re.compile(r"layers\.\d+\.([\w.]+)$")


def _options(layout: Layout, count: int) -> dict[str, Any]:
    """Return the options of `collate` for a layout; packed rows hold every other sample."""
    if layout == "packed":
        return {"rows": [[*range(0, count, 2)][::-1], [*range(1, count, 2)]], "multiple": 8}
    return {"padding_side": "left", "multiple": 8} if layout == "left" else {}


@dataclass(frozen=True)
class Difference:
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
class Bench:
    """Runs one model, and compares its batches with its single forwards.

    Attributes:
        model: A model of Transformers, in train mode without dropout.
        family: Its inputs.
        images: The items of its samples, and the inputs of its own processor for them.
        gradients: Whether runs have gradients.
        singles: Outcomes of single forwards, by sample.
    """

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
    def in_float64(self) -> "Bench":
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
    ) -> Difference:
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
    ) -> Difference:
        singles = {one.sample_id: self.alone(one) for one in samples}
        try:
            batch = collate(
                samples, replace(family, refused={}), pad_token_id=0, **_options(layout, len(samples))
            )
            logits, gradients = self.together(batch)
        except MMRenderError as error:
            return Difference(text=str(error))
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            return Difference(text=f"{layout} rows: {type(error).__name__}: {error}"[:200])
        off = {name: _largest(one[name], logits[name]) for name, (one, _) in singles.items()}
        name = max(off, key=lambda one: off[one])
        expected = [sum(each) for each in zip(*(one for _, one in singles.values()), strict=True)]
        steepest = _steepest(expected, gradients)
        if off[name] <= _TOLERANCE and steepest <= _TOLERANCE:
            return Difference(off[name], steepest)
        if off[name] <= _TOLERANCE:
            text = f"gradients of {layout} rows differ from single forwards, by {steepest:.2g} of the largest"
            return Difference(off[name], steepest, text)
        sample = next(one for one in samples if one.sample_id == name)
        path, kind = self._first_module(batch, sample)
        layer = _WITHIN_LAYER.search(path)
        text = f"{layout} rows differ from single forwards in {path or 'no single module'}"
        text = f"{text} ({kind})" if kind else text
        text = f"{text}, by {off[name]:.2g} deviations"
        return Difference(off[name], steepest, text, layer[1] if layer else "")

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
def undisturbed(model: Any) -> Iterator[None]:
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
