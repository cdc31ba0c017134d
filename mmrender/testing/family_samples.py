"""Samples that prove a family: text with images between, of lengths on both sides of the configuration's.

Images are random pixels. Their tensors come from the image processor that Transformers has for the family,
which also makes the inputs of single forwards.
"""

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from msgspec.structs import replace as replaced
from PIL import Image

from mmrender.errors import BatchError, importing
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange, Repeat
from mmrender.training.families import ModelFamily, TokenTypes
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample

_TOKEN_TYPES: Final[tuple[TokenTypes, ...]] = ("mm_token_type_ids",)
"""Keywords with one meaning in every family, unlike `token_type_ids`."""
_SIZES: Final = ((60, 100), (100, 60), (90, 90))
_LARGE: Final = 150
"""Shorter side of the largest image, in pixels, unless a window of the vision tower is larger."""
_NEUTRAL: Final = re.compile(
    "self|kwargs|input_ids|attention_mask|position_ids|labels|past_key_values|cache|use_cache|logits_to_keep|"
    "return_dict|output_.*|.*_embeds|mm_encoder_outputs|vision_.*|interpolate_.*|downsample_mode|"
    "per_layer_inputs|router_.*|.*(video|audio|input_features|input_values|second_per_grid).*|"
    "feature_attention_mask|chunk_sample_lengths|cross_attention_states|(image|pixel|patch|num|tile)_?(?!.*mask).*"
)
"""Parameters of a forward that a batch may leave out: outputs, caches and other modalities."""
_SMALLEST: Final[Mapping[str, int]] = {"max_soft_tokens": 70}
"""Budgets that image processors scale every image up to, and the smallest value of each."""


def with_inputs(draft: ModelFamily, model: Any) -> ModelFamily:
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


@dataclass(frozen=True)
class Images:
    """Items for samples, the last two of one size, and their source.

    Attributes:
        items: Items of the model's image processor.
        processor: The image processor that made them, or None for items of the caller's.
        pictures: The picture of each item, by identity.
        keywords: The processor's outputs that the model's forward takes.
    """

    items: Sequence[MediaItem]
    processor: Any = None
    pictures: Mapping[str, Image.Image] = field(default_factory=dict)
    keywords: frozenset[str] = frozenset()

    def tensors(self, sample: TrainingSample, family: ModelFamily) -> dict[str, Any]:
        """Return the image inputs of one sample as the image processor makes them.

        Items are made one by one. The inputs of a sample are those of its items if the processor cuts several
        images otherwise than one.
        """
        joined = collate_mm_kwargs([sample], family)
        if self.processor is None or not sample.media_spans:
            return joined
        pictures = [self.pictures[span.item.identity] for span in sample.media_spans]
        whole = _processed(self.processor, pictures, self.keywords)
        shapes = ({name: tuple(value.shape) for name, value in one.items()} for one in (joined, whole))
        return whole if next(shapes) == next(shapes) else joined


def _processed(processor: Any, pictures: Sequence[Image.Image], keywords: Collection[str]) -> dict[str, Any]:
    output = processor([[*pictures]], return_tensors="pt")
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in output.items()
        if isinstance(value, torch.Tensor) and name in keywords
    }


def reference_inputs(sample: TrainingSample, family: ModelFamily, images: Images) -> dict[str, Any]:
    """Return a single sample as the model's own processor passes it: positions are left to the model."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if family.token_types is not None:
        types = torch.from_numpy(sample.mm_token_type_ids.astype(np.int64))[None]
        if family.prefix:
            trained = np.flatnonzero(sample.loss_mask)
            types = (torch.arange(len(sample)) >= (trained[0] if len(trained) else len(sample)))[None].long()
        inputs[family.token_types] = types
    return inputs | images.tensors(sample, family)


def make_images(model: Any, draft: ModelFamily) -> Images:
    """Make items of random pixels by the image processor that Transformers has for the family.

    Raises:
        BatchError: The family has no image processor here, or the model takes inputs that batches lack.
        MissingDependencyError: Transformers is not installed.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise BatchError(
            "the model is an encoder with a decoder, and batches hold one sequence for each sample",
            where=type(model).__name__,
        )
    vision = getattr(model.config, "vision_config", None)
    if "image" not in draft.feature_token_ids:
        if vision is not None:
            problem = "the configuration does not name the token of images"
            raise BatchError(problem, where="config", expected="image_token_id")
        _check_inputs(draft, model, ())
        return Images([])
    processor = _image_processor(draft.model_type, model.config)
    keywords = frozenset(inspect.signature(model.forward).parameters)
    settings = {} if vision is None else vision.to_dict()
    windows = [value for key, value in settings.items() if "window" in key and isinstance(value, int)]
    side = max([_LARGE, *(window + _LARGE // 2 for window in windows)])
    sizes = [*_SIZES, (side, side * 7 // 5), _SIZES[-1], _SIZES[-1]]
    rng = np.random.default_rng(0)
    items: list[ProcessedItem] = []
    pictures: dict[str, Image.Image] = {}
    arrays: dict[str, Any] = {}
    for number, size in enumerate(sizes):
        picture = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8), "RGB")
        try:
            tensors = _processed(processor, [picture], keywords)
            count = sum(part.numel() // part.shape[-1] for part in _image_features(model, **tensors))
        except Exception as error:
            raise BatchError(
                "the features of an image cannot be counted",
                where=f"{type(model).__name__}.get_image_features",
                got=f"{type(error).__name__}: {error}"[:200],
                remedy="Pass items of the model's own processor as `images`",
            ) from error
        arrays = {name: compacted(value.numpy(), None) for name, value in tensors.items()}
        identity = f"{number + 1:064x}"
        pictures |= dict.fromkeys((identity, identity[::-1]), picture)
        expansion = (Repeat("<image>", count),)
        items.append(
            ProcessedItem(identity=identity, size=size, grid=(1,), expansion=expansion, parts=arrays)
        )
    _check_inputs(draft, model, [*arrays])
    items[1:3] = _counted_together(model, draft, items[1:3])
    return Images(items, processor, pictures, keywords)


def _counted_together(model: Any, draft: ModelFamily, items: list[ProcessedItem]) -> list[ProcessedItem]:
    """Return two items as they are in one sample: some families cut an image only if it is alone."""
    parts = _image_features(model, **collate_mm_kwargs([make_sample(draft, items, seed=0)], draft))
    if len(parts) != len(items):
        return items
    expansions = [(Repeat("<image>", part.numel() // part.shape[-1]),) for part in parts]
    return [
        item if item.expansion == other else replaced(item, expansion=other, identity=item.identity[::-1])
        for item, other in zip(items, expansions, strict=True)
    ]


def _image_processor(model_type: str, config: Any) -> Any:
    """Return the family's image processor with the sizes of the vision tower."""
    with importing("transformers", "hf", "prove_family"):
        import transformers
        from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
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


def make_sample(
    family: ModelFamily, items: Sequence[MediaItem], *, seed: int, text: int = 9
) -> TrainingSample:
    """Return text of random tokens with images between, the last tokens trained on."""
    rng = np.random.default_rng(seed)
    words = np.setdiff1d(np.arange(10, 400), list(family.feature_token_ids.values()))
    ids: list[int] = rng.choice(words, text).tolist()
    entries = []
    for item in items:
        count = sum(piece.count for piece in item.expansion if isinstance(piece, Repeat) and piece.embeds)
        entries.append((PlaceholderRange(len(ids), count), item))
        ids += [family.feature_token_ids[item.modality]] * count
        ids += rng.choice(words, text).tolist()
    mask = np.arange(len(ids)) >= max(1, len(ids) - text + 2)
    return TrainingSample(
        np.array(ids, np.int32), mask, None, MultiModalData.of(entries), sample_id=f"sample {seed}"
    )


def make_samples(
    family: ModelFamily, items: Sequence[MediaItem], lengths: Sequence[int]
) -> list[TrainingSample]:
    """Return samples with one image, two, none, and another, and text around each length.

    Text alone without items. For each length there is a sample of as many tokens and a longer one, and beyond
    all lengths one with an image.
    """
    given = [[*items[:1]], [*items[1:3]], [], [*items[3:4]]]
    texts = [7 + 4 * seed for seed in range(len(given))]
    for length in lengths:
        given += [[], []]
        texts += [length, length + 3]
    longest = max(lengths, default=0)
    given += [[*items[:1]], []]
    texts += [longest + 5, 2 * longest + 9]
    return [
        make_sample(family, held, seed=seed, text=text)
        for seed, (held, text) in enumerate(zip(given, texts, strict=True))
    ]
