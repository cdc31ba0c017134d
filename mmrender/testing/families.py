"""`prove_family`: proof that batches of an architecture have the logits of single forwards.

A family is proved on its own architecture, built small with random weights, or on a model of the caller's.
Samples with images and without run one by one, as the model numbers and masks them itself, and then in
batches that are padded on the right, padded on the left, and packed. A layout with other logits is refused,
with the first module that differs. A model whose logits do not depend on the text or the images before them
proves nothing, and is refused as well.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import numpy as np
from msgspec.structs import replace as replaced
from PIL import Image

from mmrender.caching import cached_property
from mmrender.errors import BatchError, MissingDependencyError, MMRenderError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange, Repeat
from mmrender.testing.small_architecture import build_small
from mmrender.training.batch import TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import (
    Layout,
    ModelFamily,
    Proof,
    TokenTypes,
    read_settings,
    remember_proof,
    unproved_family,
)
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.recurrent import recurrent_segments
from mmrender.training.segments import placed
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample

_TOKEN_TYPES: Final[tuple[TokenTypes, ...]] = ("mm_token_type_ids",)
"""Keywords with one meaning in every family, unlike `token_type_ids`."""
_TOLERANCE: Final = 1e-3
"""Largest difference of a logit, in standard deviations of the logits."""
_SEEN: Final = 10 * _TOLERANCE
"""Smallest change of a logit that another token, or another image, must make."""
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
_SMALLEST: Final[Mapping[str, int]] = {"max_soft_tokens": 70}
"""Budgets that image processors scale every image up to, and the smallest value of each."""
_WITHIN_LAYER: Final = re.compile(r"layers\.\d+\.([\w.]+)$")


def prove_family(model_or_config: Any, *, images: Sequence[MediaItem] | None = None) -> ModelFamily:
    """Compare batches of an architecture with single forwards, and return the family with its findings.

    The architecture is built small, with random weights, unless a model in float32 is passed, which runs as
    it is. Padded (right and left) and packed batches of samples with images and without run in train mode.
    The proof is remembered by the configuration: `ModelFamily.from_config` uses it in this process and, if
    the architecture was built here, in others with the same releases of Transformers, torch and mmrender,
    too. `MMRENDER_CACHE` names the folder, and `off` keeps nothing.

    Args:
        model_or_config: A Transformers model, or a configuration as `ModelFamily.from_config` takes it.
        images: Four items of the model's own processor or more, the last two of one size. Needed if the
            family's image processor cannot be built from its name alone.

    Returns:
        The family, with the layouts that failed and the module at fault in `refused`.

    Raises:
        ModelError: The configuration cannot be read.
        BatchError: All layouts fail, or nothing can be compared.
        MissingDependencyError: Transformers is not installed.
    """
    settings = read_settings(getattr(model_or_config, "config", model_or_config))
    runs = hasattr(model_or_config, "forward") and next(model_or_config.parameters()).dtype == torch.float32
    model = model_or_config if runs else build_small(_transformers_config(model_or_config, settings))
    family = _proved(model, _with_inputs(unproved_family(model.config.to_dict()), model), images)
    proof = Proof(family.token_types, family.recurrent, dict(family.refused))
    # A model of the caller's may have code of its own, which no configuration names.
    remember_proof(settings, proof, on_disk=not runs)
    return unproved_family(settings).proved(proof)


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


def _proved(model: Any, draft: ModelFamily, images: Sequence[MediaItem] | None) -> ModelFamily:
    with _undisturbed(model), torch.no_grad():
        items = list(images or _items(model, draft))
        bench = _Bench(model, draft, _samples(draft, items))
        bench.check_sensitive(items)
        refused = {}
        family = draft
        for layout in get_args(Layout):
            difference = bench.difference(family, layout)
            names: list[str] = [] if not family.recurrent else family.recurrent.split("|")
            mixing = difference
            while mixing is not None and layout == "packed" and mixing.module not in ("", *names):
                # A module that mixes samples along the row may run sample by sample, if nothing else mixes.
                names.append(mixing.module)
                recurrent = replace(family, recurrent="|".join(names))
                mixing = bench.difference(recurrent, layout)
                if mixing is None:
                    family, difference = recurrent, None
            if difference is not None:
                refused[layout] = difference.text
    if len(refused) == len(get_args(Layout)):
        raise BatchError(
            f"batches for {draft.model_type} differ from single forwards in every layout",
            where="config.model_type",
            got="; ".join(dict.fromkeys(refused.values())),
            remedy="Train on one sample at a time with the model's own inputs",
        )
    return replace(family, refused={**draft.refused, **refused})


@dataclass(frozen=True)
class _Difference:
    """The place of a difference, and a module of a layer that could run by sample."""

    text: str
    module: str = ""


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
        """Require that logits depend on the first token and on the pixels of images."""
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

    def difference(self, family: ModelFamily, layout: Layout) -> _Difference | None:
        """Return the place where a layout differs from single forwards, or None."""
        try:
            batch = collate(self.samples, replace(family, refused={}), pad_token_id=0, **_ROWS[layout])
            with recurrent_segments(self.model, batch):
                logits = self.model(**batch.model_inputs()).logits
            together = dict(zip(batch.sample_ids, batch.split(logits), strict=True))
            singles = self.singles
        except MMRenderError as error:
            return _Difference(str(error))
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            return _Difference(f"{layout} rows: {type(error).__name__}: {error}"[:200])
        off = {name: _largest(logits, together[name]) for name, logits in singles.items()}
        name = max(off, key=lambda one: off[one])
        if off[name] <= _TOLERANCE:
            return None
        sample = next(one for one in self.samples if one.sample_id == name)
        path, kind = self._first_module(batch, sample)
        layer = _WITHIN_LAYER.search(path)
        text = f"{layout} rows differ from single forwards in {path or 'no single module'}"
        text = f"{text} ({kind})" if kind else text
        return _Difference(f"{text}, by {off[name]:.2g} deviations", layer[1] if layer else "")

    def _first_module(self, batch: TrainingBatch, sample: TrainingSample) -> tuple[str, str]:
        """Return name and class of the first module that makes equal states differ."""
        with _recorded(self.model) as single:
            self.alone(sample)
        with _recorded(self.model) as whole, recurrent_segments(self.model, batch):
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


def _largest(expected: Any, got: Any) -> float:
    """Return the largest difference, in standard deviations of the expected values."""
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
            count = sum(part.numel() // part.shape[-1] for part in _image_features(model, **tensors))
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
    """Return two items as they are in one sample: some families cut an image only if it is alone."""
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
        raise MissingDependencyError.of_extra("transformers", "hf", "prove_family") from error
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
    """Set an image processor to the sizes of the vision tower, and to the smallest budget."""
    for name, least in _SMALLEST.items():
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
    """Return the features of images, in one tensor or several, on the last axis."""
    owner = model if hasattr(model, "get_image_features") else model.base_model
    found = owner.get_image_features(**tensors)
    pooled = getattr(found, "pooler_output", None)
    found = getattr(found, "last_hidden_state", found) if pooled is None else pooled
    return list(found) if isinstance(found, list | tuple) else [found]


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
    """Return samples with one image, two, none, and another: text alone without images."""
    given = [[*items[:1]], [*items[1:3]], [], [*items[3:4]]]
    return [_sample(family, held, seed=seed, text=7 + 4 * seed) for seed, held in enumerate(given)]
