"""Proof that a batch gives a model what each of its samples gives it alone, for each layout of rows.

A family is proved on its own architecture, built small with random weights, or on a model of the caller's.
Samples with images and without are run one by one, as the model numbers and masks them itself, and then in
batches that are padded on the right, padded on the left, and packed, and with rows split over ranks, all in
one process. A layout or split whose logits differ is refused, with the module where they part. A model whose
logits do not depend on the text or the images before them proves nothing, and is refused as well.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, get_args

import numpy as np
from msgspec.structs import replace as replaced
from PIL import Image

from mmrender.caching import cached_property
from mmrender.errors import BatchError, MissingDependencyError, MMRenderError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange, Repeat
from mmrender.training.batch import TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import Layout, ModelFamily, Proof, SequenceSplit, TokenTypes
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.segments import recurrent_segments
from mmrender.training.shards import AllRanks
from mmrender.training.tensor_list import torch
from mmrender.training.tiny import build_tiny
from mmrender.trajectory.sample import TrainingSample

_TOKEN_TYPES: Final[tuple[TokenTypes, ...]] = ("mm_token_type_ids",)
"""Keywords of one meaning in every family; that of `token_type_ids` differs."""
_TOLERANCE: Final = 1e-3
"""Largest difference of a logit, in standard deviations of the logits."""
_SEEN: Final = 10 * _TOLERANCE
"""Least difference that another token, or another image, must make."""
_SIZES: Final = ((60, 100), (100, 60), (90, 90))
_ROWS: Final[Mapping[Layout, dict[str, Any]]] = {
    "right": {},
    "left": {"padding_side": "left", "multiple": 8},
    "packed": {"rows": [[2, 0, 1], [3]], "multiple": 8},
}
_NEUTRAL: Final = re.compile(
    "self|kwargs|input_ids|attention_mask|position_ids|labels|past_key_values|use_cache|logits_to_keep|"
    "return_dict|output_.*|.*_embeds|mm_encoder_outputs|vision_.*|interpolate_.*|downsample_mode|"
    "per_layer_inputs|router_.*|.*(video|audio|input_features|input_values|second_per_grid).*|"
    "feature_attention_mask|chunk_sample_lengths|cross_attention_states|(image|pixel|patch|num|tile)_?(?!.*mask).*"
)
"""Parameters of a forward that a batch may leave out: outputs, caches and other modalities."""
_SPLIT_ROWS: Final[tuple[Layout, ...]] = ("packed", "right", "left")
"""Which rows are split for a proof: the first of these that the model takes."""
_RANKS: Final = 2
_LEAST: Final[Mapping[str, int]] = {"max_soft_tokens": 70}
"""Budgets that image processors scale every image up to, and the least that they take."""
_WITHIN_LAYER: Final = re.compile(r"layers\.\d+\.([\w.]+)$")


def prove(
    given: Any,
    settings: Mapping[str, Any],
    draft: Callable[[Mapping[str, Any]], ModelFamily],
    images: Sequence[MediaItem] | None,
) -> tuple[Proof, bool]:
    """Return what is proved of a model or a configuration, and whether the model was built here of it."""
    own = hasattr(given, "forward") and next(given.parameters()).dtype == torch.float32
    model = given if own else build_tiny(_transformers_config(given, settings))
    found = _proved(model, _with_inputs(draft(model.config.to_dict()), model), images)
    return Proof(found.token_types, found.recurrent, dict(found.refused)), not own


def _transformers_config(given: Any, settings: Mapping[str, Any]) -> Any:
    given = getattr(given, "config", given)
    if hasattr(given, "to_dict"):
        return given
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise MissingDependencyError.of_extra("transformers", "hf", "ModelFamily.prove") from error
    model_type = settings["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise BatchError(
            "Transformers does not know this family",
            where="config.model_type",
            got=repr(model_type),
            remedy="Pass the model itself, in float32",
        )
    return CONFIG_MAPPING[model_type].from_dict(dict(settings))


def _proved(model: Any, draft: ModelFamily, images: Sequence[MediaItem] | None) -> ModelFamily:
    with _undisturbed(model), torch.no_grad():
        items = list(images or _items(model, draft))
        bench = _Bench(model, draft, _samples(draft, items))
        bench.check_sensitive(items)
        refused: dict[Layout | SequenceSplit, str] = {}
        family = draft
        for layout in get_args(Layout):
            found = bench.difference(family, layout)
            names: list[str] = [] if not family.recurrent else family.recurrent.split("|")
            mixing = found
            while mixing is not None and layout == "packed" and mixing.module not in ("", *names):
                # What mixes samples along the row may be run sample by sample, if that is all it needs.
                names.append(mixing.module)
                other = replace(family, recurrent="|".join(names))
                mixing = bench.difference(other, layout)
                if mixing is None:
                    family, found = other, None
            if found is not None:
                refused[layout] = found.text
        taken = [layout for layout in get_args(Layout) if layout not in refused]
        for split in get_args(SequenceSplit) if taken else ():
            layout = next(one for one in _SPLIT_ROWS if one in taken)
            found = None if split in draft.refused else bench.difference(family, layout, split)
            if found is not None:
                refused[split] = found.text
    if not taken:
        raise BatchError(
            f"batches for {draft.model_type} differ from single forwards in every layout",
            where="config.model_type",
            got="; ".join(dict.fromkeys(refused.values())),
            remedy="Train on one sample at a time with the model's own inputs",
        )
    return replace(family, refused={**draft.refused, **refused})


@dataclass(frozen=True)
class _Difference:
    """Where a batch parts from single forwards, and the module of a layer that could be run by sample."""

    text: str
    module: str = ""


@dataclass(frozen=True)
class _Together:
    """A forward over a batch: the block it runs in, and the shape and order of its tokens within layers."""

    batch: TrainingBatch
    block: Callable[[], AbstractContextManager[None]]
    inputs: Callable[[], dict[str, Any]]
    shape: list[int]
    ordered: Callable[[Any], Any]


@dataclass(frozen=True)
class _Bench:
    model: Any
    family: ModelFamily
    samples: Sequence[TrainingSample]

    def alone(self, sample: TrainingSample) -> Any:
        """Return the logits of one sample as the model itself numbers and masks it."""
        inputs = collate([sample], self.family, pad_token_id=0).model_inputs(kept_apart=True)
        del inputs["position_ids"], inputs["attention_mask"]
        try:
            return self.model(**inputs).logits[0]
        except Exception as error:  # a model's own code may raise anything
            raise BatchError(
                "a single forward fails",
                where=type(self.model).__name__,
                got=f"{type(error).__name__}: {error}"[:200],
                remedy="Pass items of the model's own processor as `images`, or a model that runs",
            ) from error

    def check_sensitive(self, items: Sequence[MediaItem]) -> None:
        """Require that logits depend on the first token and, where there are images, on their pixels."""
        whole = self.alone(self.samples[2])
        ids = self.samples[2].token_ids.copy()
        ids[0] += 1
        others = {"token": replace(self.samples[2], token_ids=ids)}
        if items:
            others["image"] = _sample(self.family, [items[-1]], seed=0)
            whole_image = self.alone(_sample(self.family, [items[-2]], seed=0))
        for name, other in others.items():
            before = whole if name == "token" else whole_image
            after = self.alone(other)
            if before.shape != after.shape or not _largest(before[-1:], after[-1:]) > _SEEN:
                raise BatchError(
                    f"nothing is proved: another {name} does not change the logits of the last token",
                    where=type(self.model).__name__,
                    expected=f"a change of {_SEEN} standard deviations or more",
                )

    @cached_property
    def singles(self) -> dict[str, Any]:
        """Logits of each sample alone, by its name."""
        return {one.sample_id: self.alone(one) for one in self.samples}

    def together(self, family: ModelFamily, layout: Layout, split: SequenceSplit | None) -> _Together:
        """Return a forward over the samples in one batch."""
        batch = collate(self.samples, replace(family, refused={}), pad_token_id=0, **_ROWS[layout])
        if split is None:
            block = partial(recurrent_segments, self.model, batch)
            shape = [len(batch), batch.width]
            return _Together(batch, block, batch.model_inputs, shape, lambda values: values)
        shard = batch.shard(rank=0, world_size=_RANKS, layout=split)
        ranks = AllRanks(shard.whole, 0, _RANKS, split)
        block = partial(ranks.cut, self.model)
        return _Together(ranks.whole, block, ranks.model_inputs, [*ranks.columns.shape], ranks.ordered)

    def difference(
        self, family: ModelFamily, layout: Layout, split: SequenceSplit | None = None
    ) -> _Difference | None:
        """Return where a layout, or a split of its rows, parts from single forwards, or None."""
        kind_of_rows = split or layout
        try:
            forward = self.together(family, layout, split)
            with forward.block():
                logits = forward.ordered(self.model(**forward.inputs()).logits)
            batch, together = forward.batch, forward.batch.split(logits)
            order = {
                segment.sample_id: logits for segment, logits in zip(_places(batch), together, strict=True)
            }
            apart = self.singles
        except MMRenderError as error:
            return _Difference(str(error))
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            return _Difference(f"{kind_of_rows} rows: {type(error).__name__}: {error}"[:200])
        off = {name: _largest(logits, order[name]) for name, logits in apart.items()}
        name = max(off, key=lambda one: off[one])
        if off[name] <= _TOLERANCE:
            return None
        sample = next(one for one in self.samples if one.sample_id == name)
        path, kind = self._first_part(forward, sample)
        found = _WITHIN_LAYER.search(path)
        text = f"{kind_of_rows} rows part from single forwards in {path or 'no single module'}"
        text = f"{text} ({kind})" if kind else text
        return _Difference(f"{text}, by {off[name]:.2g} deviations", found[1] if found else "")

    def _first_part(self, forward: _Together, sample: TrainingSample) -> tuple[str, str]:
        """Return name and class of the first module that makes of equal states different ones."""
        with _recorded(self.model) as single:
            self.alone(sample)
        batch = forward.batch
        with _recorded(self.model) as whole, forward.block():
            self.model(**forward.inputs())
        row, segment = next(
            (row, one)
            for row, segments in enumerate(batch.segments)
            for one in segments
            if one.sample_id == sample.sample_id
        )
        for path, (kind, *states) in whole.items():
            if path not in single or any(one is None or [*one.shape[:2]] != forward.shape for one in states):
                continue
            own = [forward.ordered(state)[row, segment.start : segment.stop] for state in states]
            expected = [None if state is None else state[0] for state in single[path][1:]]
            if any(one is None or one.shape != own[0].shape for one in (*expected, *own)):
                continue  # states have one shape, unlike what is computed of positions
            off_in, off_out = (_largest(one, mine) for one, mine in zip(expected, own, strict=True))
            if off_in <= _TOLERANCE / 10 and off_out > _TOLERANCE / 10:
                return path, kind
        return "", ""


def _places(batch: TrainingBatch) -> Iterator[Any]:
    return (segment for row in batch.segments for segment in row)


def _largest(expected: Any, got: Any) -> float:
    """Return the largest difference in standard deviations of what is expected; infinite if not a number."""
    scale = float(expected.float().std()) or 1.0
    value = float((expected.float() - got.float()).abs().max()) / scale
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


def _with_inputs(draft: ModelFamily, model: Any) -> ModelFamily:
    """Return the family with the token types that the model's forward takes."""
    takes = inspect.signature(model.forward).parameters
    if draft.token_types is None and (names := [one for one in _TOKEN_TYPES if one in takes]):
        draft = replace(draft, token_types=names[0])
    if "input_ids" not in takes:
        raise BatchError("the model's forward does not take input_ids", where=type(model).__name__)
    return draft


def _check_inputs(draft: ModelFamily, model: Any, given: Sequence[str]) -> None:
    """Require that the batch has all that the model's forward takes."""
    held = {*given, draft.token_types, *draft.rules}
    for name in inspect.signature(model.forward).parameters:
        if name not in held and not _NEUTRAL.fullmatch(name):
            raise BatchError(
                f"the model takes {name}, which batches do not hold",
                where=f"{type(model).__name__}.forward",
                remedy="Train on one sample at a time with the inputs of the model's own processor",
            )


def _items(model: Any, draft: ModelFamily) -> list[MediaItem]:
    """Make items of random pixels by the image processor that Transformers has for the family."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise BatchError(
            "the model is an encoder with a decoder, and batches hold one sequence for each sample",
            where=type(model).__name__,
        )
    if "image" not in draft.feature_token_ids:
        if getattr(model.config, "vision_config", None) is not None:
            problem = "the configuration does not name the token of images"
            raise BatchError(problem, where="config", expected="image_token_id")
        _check_inputs(draft, model, ())
        return []
    processor = _image_processor(draft.model_type, model.config)
    rng = np.random.default_rng(0)
    items: list[ProcessedItem] = []
    for number, size in enumerate((*_SIZES, _SIZES[-1])):
        pixels = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8), "RGB")
        arrays = {}
        try:
            output = processor([[pixels]], return_tensors="pt")
            tensors = {
                name: value.float() if value.is_floating_point() else value
                for name, value in output.items()
                if isinstance(value, torch.Tensor)
            }
            takes = inspect.signature(model.forward).parameters
            tensors = {name: value for name, value in tensors.items() if name in takes}
            count = _feature_count(model, tensors)
        except Exception as error:
            raise BatchError(
                "the features of an image cannot be counted",
                where=f"{type(model).__name__}.get_image_features",
                got=f"{type(error).__name__}: {error}"[:200],
                remedy="Pass items of the model's own processor as `images`",
            ) from error
        arrays = {name: compacted(value.numpy(), None) for name, value in tensors.items()}
        items.append(
            ProcessedItem(
                identity=f"{number + 1:064x}",
                size=size,
                grid=(1,),
                expansion=(Repeat("<image>", count),),
                parts=arrays,
            )
        )
    _check_inputs(draft, model, [*arrays])
    return [items[0], *_counted_together(model, draft, items[1:3]), *items[2:]]


def _counted_together(model: Any, draft: ModelFamily, items: list[ProcessedItem]) -> list[ProcessedItem]:
    """Return two items as they are in one sample: some families cut an image only where it is alone."""
    parts = _image_features(model, **collate_mm_kwargs([_sample(draft, items, seed=0)], draft))
    if len(parts) != len(items):
        return items
    expansions = [(Repeat("<image>", part.numel() // part.shape[-1]),) for part in parts]
    return [
        item if item.expansion == other else replaced(item, expansion=other, identity=item.identity[::-1])
        for item, other in zip(items, expansions, strict=True)
    ]


def _image_processor(model_type: str, config: Any) -> Any:
    """Return the family's image processor with the sizes of the vision tower."""
    try:
        import transformers
        from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    except ImportError as error:
        raise MissingDependencyError.of_extra("transformers", "hf", "ModelFamily.prove") from error
    known = (
        IMAGE_PROCESSOR_MAPPING_NAMES.get(name) for name in (model_type, model_type.removesuffix("_moe"))
    )
    names: Mapping[str, str] = next((one for one in known if one), {})
    for name in [names.get("pil"), names.get("torchvision")]:
        try:
            processor = None if name is None else getattr(transformers, name)()
        except (ImportError, AttributeError):
            continue
        if processor is not None:
            if getattr(config, "image_grid_pinpoints", None):
                processor.image_grid_pinpoints = config.image_grid_pinpoints
            return _fitted(processor, getattr(config, "vision_config", config))
    raise BatchError(
        "no image processor of this family can be built here",
        where=f"config of {model_type}",
        expected=" or ".join(map(str, names.values())) or "an image processor in Transformers",
        remedy="Pass items of the model's own processor as `images`",
    )


def _fitted(processor: Any, vision: Any) -> Any:
    """Give an image processor the sizes that the vision tower is configured for, and the least budget."""
    for name, least in _LEAST.items():
        if getattr(processor, name, least) > least:
            setattr(processor, name, least)
    for own, theirs in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        value = getattr(vision, theirs, None)
        if isinstance(getattr(processor, own, None), int) and isinstance(value, int):
            setattr(processor, own, value)
    if isinstance(getattr(processor, "max_image_size", None), Mapping) and isinstance(
        getattr(vision, "image_size", None), int
    ):
        processor.max_image_size = {"longest_edge": vision.image_size}
        processor.size = {"longest_edge": 2 * vision.image_size}
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    for name in ("size", "crop_size"):
        size = dict(getattr(processor, name, None) or {})
        sides = [key for key in ("height", "width", "shortest_edge") if key in size]
        if isinstance(side, int) and sides:
            kind = type(getattr(processor, name))
            setattr(processor, name, kind(**{**size, **dict.fromkeys(sides, side)}))
    return processor


def _image_features(model: Any, **tensors: Any) -> list[Any]:
    """Return what the model makes of images, in one tensor or several; the last axis is that of features."""
    owner = model if hasattr(model, "get_image_features") else model.base_model
    found = owner.get_image_features(**tensors)
    pooled = getattr(found, "pooler_output", None)
    found = getattr(found, "last_hidden_state", found) if pooled is None else pooled
    return list(found) if isinstance(found, list | tuple) else [found]


def _feature_count(model: Any, tensors: Mapping[str, Any]) -> int:
    return sum(part.numel() // part.shape[-1] for part in _image_features(model, **tensors))


def _sample(family: ModelFamily, items: Sequence[MediaItem], *, seed: int, text: int = 9) -> TrainingSample:
    """Return text of random tokens with images between, the last tokens trained on."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(10, 400, text).tolist()
    entries = []
    for item in items:
        count = sum(piece.count for piece in item.expansion if isinstance(piece, Repeat) and piece.embeds)
        entries.append((PlaceholderRange(len(ids), count), item))
        ids += [family.feature_token_ids[item.modality]] * count
        ids += rng.integers(10, 400, text).tolist()
    mask = np.arange(len(ids)) >= len(ids) - text + 2
    return TrainingSample(
        np.array(ids, np.int32), mask, None, MultiModalData.of(entries), sample_id=f"sample {seed}"
    )


def _samples(family: ModelFamily, items: Sequence[MediaItem]) -> list[TrainingSample]:
    """Return samples with one image, two, none, and another: text alone where there are no images."""
    given = [[*items[:1]], [*items[1:3]], [], [*items[3:4]]]
    return [_sample(family, held, seed=seed, text=7 + 4 * seed) for seed, held in enumerate(given)]
