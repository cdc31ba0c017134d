"""The trainer's model, asked for the numbers that an audit compares, as it is or changed for a moment."""

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Float32Array
from mmrender.errors import EngineError, MMRenderError
from mmrender.model.weights import load_model
from mmrender.training import ModelFamily, TrainingBatch, collate
from mmrender.training.predictions import Predictions
from mmrender.training.scoring import Scoring
from mmrender.training.segments import Segment
from mmrender.trajectory.sample import TrainingSample

_Call: TypeAlias = tuple[Callable[..., Any], Any, Any]
"""A call of a vision tower: the tower's forward, its arguments and its output."""
InputChange: TypeAlias = Callable[[dict[str, Any]], None]
"""Changes the keyword arguments of the model's forward in place."""
ModelChange: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Changes the model for as long as its block runs."""

VISION: Final = "vision"
LANGUAGE: Final = "language model"
_SAMPLES_AT_ONCE: Final = 16
_MAX_FEATURES: Final = 4
"""Calls of vision towers that are kept."""
_TOKENS_AT_ONCE: Final = 1 << 14


class TrainerModel:
    """A Transformers model that computes the log-probability of every token of a sample.

    Args:
        model: In evaluation mode.
        dtype: Name of the dtype of pixels, by default the weights' dtype.
    """

    def __init__(self, model: Any, *, dtype: str | None = None) -> None:
        self.model = model
        self.family = ModelFamily.from_config(model.config)
        self._dtype = dtype or str(model.dtype).removeprefix("torch.")
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        # Samples, their batch and its masks, since the model is changed many times for one.
        self._last: list[Any] = []
        self._inputs: tuple[InputChange, ...] = ()
        self._changes: tuple[ModelChange, ...] = ()
        self._features: list[_Call] = []
        self._towers: list[tuple[Any, Any]] = []  # whose features are kept, and their state

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu"
    ) -> "TrainerModel":
        """Load weights from a model directory.

        Raises:
            MissingDependencyError: torch or Transformers is not installed.
            ModelError: Transformers cannot load the model.
        """
        return cls(load_model(directory, dtype, device, purpose="an audit"))

    @property
    def dtype(self) -> str:
        """Name of the dtype that pixels are given in."""
        return self._dtype

    def changed(
        self, *, inputs: InputChange | None = None, model: ModelChange | None = None
    ) -> "TrainerModel":
        """Return the same model, with its inputs or itself changed during each forward."""
        other = copy.copy(self)
        other._inputs += () if inputs is None else (inputs,)
        other._changes += () if model is None else (model,)
        return other

    def steady(self) -> "TrainerModel":
        """Return the same model, which keeps the features of pixels. Changed towers compute them anew."""
        other = copy.copy(self)
        towers = [part for name, part in parts_of(self.model).items() if name.startswith(VISION)]
        other._features, other._towers = [], [(tower, _state_of(tower)) for tower in towers]
        return other

    def sampled_logprobs(self, sample: TrainingSample, *, model: ModelChange | None = None) -> Float32Array:
        """Return the log-probability of each token of the loss mask, given the tokens before it: `(m,)`.

        Each sample runs by itself, through the batch that a trainer builds.

        Args:
            sample: The trainer's sample.
            model: Change of the model meanwhile.

        Raises:
            BatchError: The sample cannot be batched: items or tokens do not fit together.
            PlaceholderError: Its placeholders do not fit its items or tokens.
            EngineError: The model fails on it.
        """
        places = np.flatnonzero(sample.loss_mask)
        return limited_logprobs(self.changed(model=model)._rows([sample], [places])[0], sample, places)

    def sampled_of_many(
        self, samples: Sequence[TrainingSample], positions: Sequence[InputChange | None] = ()
    ) -> list[Float32Array | None]:
        """Return `sampled_logprobs` of each sample, several in a batch; None if the model fails on one.

        Args:
            samples: Of any length.
            positions: For each sample, maybe a change of its row of `position_ids`.
        """
        out: list[Float32Array | None] = []
        changes = positions or len(samples) * [None]
        while len(out) < len(samples):
            some, longest = list[TrainingSample](), 0
            for sample in samples[len(out) : len(out) + _SAMPLES_AT_ONCE]:
                longest = max(longest, len(sample))
                if some and longest * (len(some) + 1) > _TOKENS_AT_ONCE:
                    break
                some.append(sample)
            own = [*zip(some, changes[len(out) :], strict=False)]
            places = [np.flatnonzero(sample.loss_mask) for sample in some]
            inputs = partial(_by_row, own) if any(change for _, change in own) else None
            try:
                rows = self.changed(inputs=inputs)._rows(some, places)
                out += [limited_logprobs(*entry) for entry in zip(rows, some, places, strict=True)]
            except MMRenderError:
                each = (self.sampled_of_many([one], [change])[0] for one, change in own)
                out += each if len(own) > 1 else [None]
        return out

    def logits_at(self, sample: TrainingSample, positions: Sequence[int] | npt.NDArray[Any]) -> Any:
        """Return the logits from which the tokens at `positions` were predicted: `(m, vocabulary)`.

        Raises:
            MMRenderError: As for `sampled_logprobs`.
        """
        return self._rows([sample], [np.asarray(positions)])[0]

    def slopes(self, sample: TrainingSample, places: npt.NDArray[Any]) -> tuple[Any, Any] | None:
        """Return how the numbers at `places` change with the embeddings, which are returned too.

        Shapes are `(m, n, size)` and `(n, size)`, in float32. None if the model fails.
        """
        import torch

        embedding, held = self.model.get_input_embeddings(), list[Any]()

        def keep(_: Any, __: Any, output: Any) -> Any:
            held.append(output.detach().requires_grad_())
            return held[-1]

        ids = torch.from_numpy(sample.token_ids.astype(np.int64)).to(self.model.device)
        hook = embedding.register_forward_hook(keep)
        try:
            with torch.enable_grad(), self.ready([sample]) as inputs:
                logits = self.forward(inputs, sample)[0, places - 1]
                picked = logits.log_softmax(-1).gather(1, ids[places, None])[:, 0]
                slopes = [torch.autograd.grad(one, held[0], retain_graph=True)[0][0] for one in picked]
        except (MMRenderError, RuntimeError):
            return None
        finally:
            hook.remove()
        return torch.stack(slopes).float(), held[0].detach()[0].float()

    def _rows(self, samples: list[TrainingSample], places: list[npt.NDArray[Any]]) -> list[Any]:
        """Return, for the first samples of a batch, the logits that predicted the tokens at their places."""
        import torch

        segments = self._batch(samples).segments
        # Nothing predicts the first token, and the value returned for it is not used.
        columns = [np.maximum(own - 1, 0) + row[0].start for own, row in zip(places, segments, strict=False)]
        kept = np.unique(np.concatenate(columns))
        keep = torch.from_numpy(kept).to(self.model.device)
        with torch.inference_mode(), self.ready(samples) as inputs:
            if self._keeps:
                logits = self.forward(inputs | {"logits_to_keep": keep}, samples[0])
            else:
                logits = self.forward(inputs, samples[0])[:, keep]
        return [logits[row, np.searchsorted(kept, own)] for row, own in enumerate(columns)]

    def _batch(self, samples: list[TrainingSample]) -> TrainingBatch:
        import torch

        if self._last and self._last[0] == samples:
            batch: TrainingBatch = self._last[1]
            return batch
        features = {*self.family.feature_token_ids.values()}
        batch = collate(
            [bare(sample) for sample in samples],
            self.family,
            pad_token_id=next(token for token in range(len(features) + 1) if token not in features),
            padding_side="left",
            dtype=getattr(torch, self._dtype),
            device=self.model.device,
            pin_memory=False,
        )
        self._last[:] = samples, batch, {}
        return batch

    @contextmanager
    def ready(self, samples: list[TrainingSample]) -> Iterator[dict[str, Any]]:
        """Change the model within the block, and return the keyword arguments of its forward."""
        from mmrender.training.recurrent import recurrent_segments

        with ExitStack() as stack:
            batch = self._batch(samples)
            # Rows of several samples are padded on the left, which recurrent layers do not see by themselves.
            stack.enter_context(recurrent_segments(self.model, batch))
            inputs = dict(batch.model_inputs())
            if self._towers:
                masks = self._last[2]
                inputs |= {name: dict(held) for name, held in masks.items()}
                stack.enter_context(_keeping_masks(self.model, masks) if not self._inputs else nullcontext())
            for change in self._inputs:
                change(inputs)
            for make in self._changes:
                stack.enter_context(make())
            if not self.model.training:
                changed = self._changes  # without one, the towers are as they were
                same = [one for one, state in self._towers if not changed or _state_of(one) == state]
                stack.enter_context(_remembering(same, self._features))
            yield inputs

    def forward(self, inputs: dict[str, Any], sample: TrainingSample) -> Any:
        """Return the model's logits.

        Raises:
            EngineError: The model fails.
        """
        try:
            return self.model(**inputs).logits
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            where = sample.sample_id or "sample"
            raise EngineError("the model fails on the sample", where=where, got=str(error)[:200]) from error


def bare(sample: TrainingSample) -> TrainingSample:
    """Return the model's inputs only: masks and numbers of an audited sample may be at fault."""
    mask, name = np.zeros(len(sample), np.bool_), sample.sample_id
    return TrainingSample(sample.token_ids, mask, None, sample.multi_modal_data, sample_id=name)


def parts_of(model: Any) -> dict[str, Any]:
    """Return the parts of a model that are computed or loaded apart: vision, language model and head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base = getattr(model, model.base_model_prefix, model)
    found: dict[str, Any] = {}
    for name, child in base.named_children():
        language = any(module is embedding for module in child.modules())
        found[LANGUAGE if language else f"{VISION} ({name})"] = child
    return found | ({} if head is None else {"head": head})


@contextmanager
def _keeping_masks(model: Any, held: dict[str, Any]) -> Iterator[None]:
    """Keep the masks of attention by kind of layer that a model makes of its inputs, within the block."""

    def keep(_: Any, __: Any, options: dict[str, Any]) -> None:
        if isinstance(masks := options.get("attention_mask"), dict):
            held["attention_mask"] = dict(masks)

    language = parts_of(model).get(LANGUAGE, model)
    hook = language.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _state_of(tower: Any) -> list[Any]:
    """Return something that differs if a parameter, buffer, hook or setting of a module is another object."""
    held = [value for module in tower.modules() for value in vars(module).values()]
    inner = [value for one in held if isinstance(one, dict) for value in one.values()]
    return [*map(id, held), *map(id, inner), *(one.data_ptr() for one in tower.parameters())]


@contextmanager
def _remembering(towers: Sequence[Any], held: list[_Call]) -> Iterator[None]:
    """Let vision towers return their earlier outputs for the same arguments, within the block."""
    import torch

    def call(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            return own(*args, **options)
        given = args, options
        output = next((old for of, before, old in held if of == own and _same(before, given)), None)
        if output is None:
            output = own(*args, **options)
            held[:] = [*held[1 - _MAX_FEATURES :], (own, given, output)]
        return copy.copy(output)  # models put parts of an output in its place

    for tower in towers:
        tower.forward = partial(call, tower.forward)
    try:
        yield
    finally:
        for tower in towers:
            del tower.forward


def _same(one: Any, two: Any) -> bool:
    """Whether two arguments are equal. Values of unknown classes equal no other."""
    import torch
    from torch.utils._pytree import tree_flatten

    (own, shape), (other, form) = tree_flatten(one), tree_flatten(two)
    return shape == form and all(
        type(a) is type(b)
        and (a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for a, b in zip(own, other, strict=True)
    )


def _by_row(rows: Sequence[tuple[TrainingSample, InputChange | None]], inputs: dict[str, Any]) -> None:
    """Change the positions of each row of a batch, which is padded on the left, by a change of its own."""
    inputs["position_ids"] = ids = inputs["position_ids"].clone()
    for row, (sample, change) in enumerate(rows):
        if change is not None:
            own = {"position_ids": ids[..., row : row + 1, ids.shape[-1] - len(sample) :]}
            change(own)
            ids[..., row : row + 1, ids.shape[-1] - len(sample) :] = own["position_ids"]


def limited_logprobs(logits: Any, sample: TrainingSample, places: npt.NDArray[Any]) -> Float32Array:
    """Return the log-probabilities at `places` over the allowed tokens, from their logits."""
    import torch

    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None].to(logits.device)
    if not sample.allowed:
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[0, places, None])[:, 0]
        return np.asarray(logprobs.cpu())
    rows = ((Segment(0, len(sample), sample.sample_id, allowed=sample.allowed),),)
    own = np.arange(len(places))
    predictions = Predictions.of(rows, ids, places, own, shape=(1, len(places)), shift=0)
    return np.asarray(Scoring(predictions).of(logits, None).logprobs.cpu())
