"""Inputs of each model family, as data: how its tensors are collated, and how its tokens are numbered.

A family is found by `model_type` of the model's `config.json`. The rules follow the processors and models of
Transformers 5.23. A field without a rule is concatenated, as in most families; a tensor that cannot be
concatenated is an error, never padded by guess.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import msgspec
from blake3 import blake3

from mmrender.caching import FileCache, cache_folder, digest_of_code
from mmrender.errors import BatchError, ModelError
from mmrender.messages import MODALITIES
from mmrender.training.positions import MROPE, SPLIT_FRAMES, MRope

if TYPE_CHECKING:
    from mmrender.sidecar import MediaItem
    from mmrender.training.tensor_list import TensorList

TokenTypes: TypeAlias = Literal["mm_token_type_ids", "token_type_ids"]
Layout: TypeAlias = Literal["right", "left", "packed"]
"""How rows are laid out: padded on the right or on the left, or packed."""
SequenceSplit: TypeAlias = Literal["ring", "ulysses"]
"""How rows are split along the sequence over ranks; see `TrainingBatch.shard`."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Rule by which the tensors of several images become one.

    Attributes:
        layout: `"items"`: concatenated along the first axis, `(sum, ...)`. `"rows"`: an item's leading axis
            of one is dropped, and the model takes `(rows, most of a row, ...)`, zeros where a row has less.
            `"counts"`: the number of images of each sample, whatever the item holds.
        padded: Whether trailing dimensions may differ and are filled with zeros at their ends.
    """

    layout: Literal["items", "rows", "counts"] = "items"
    padded: bool = False

    def trailing(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return an item's shape without the axis along which items are joined, and what leads to it."""
        return shape[2:] if self.layout == "rows" else shape[1:]


_PER_ROW: Final = FieldRule("rows")
_PER_ROW_PADDED: Final = FieldRule("rows", padded=True)
_TILES: Final = {"pixel_values": FieldRule(padded=True)}
_RULES: Final[Mapping[str, Mapping[str, FieldRule]]] = {
    "idefics2": {"pixel_values": _PER_ROW_PADDED, "pixel_attention_mask": _PER_ROW_PADDED},
    "idefics3": {"pixel_values": _PER_ROW, "pixel_attention_mask": _PER_ROW},
    "smolvlm": {"pixel_values": _PER_ROW, "pixel_attention_mask": _PER_ROW},
    "llava": _TILES,
    **dict.fromkeys(("mistral3", "mistral_large4", "lighton_ocr"), _TILES),
    "llava_next": _TILES,
    "llava_onevision": {**_TILES, "batch_num_images": FieldRule("counts")},
}
_TOKEN_TYPES: Final[Mapping[str, TokenTypes]] = {
    "gemma3": "token_type_ids",
    "gemma3n": "token_type_ids",
    "shieldgemma2": "token_type_ids",
    "paligemma": "token_type_ids",
}
_PREFIX: Final = frozenset({"paligemma"})
_NUMBERED_IN_SECONDS: Final = frozenset({"qwen2_5_vl"})
_WINDOW: Final = "sliding_attention"
_WINDOW_TOKENS: Final = 4096
"""Window of Gemma where the configuration names none."""
_IMAGE_BLOCKS: Final = {
    "gemma3": ("full_attention", _WINDOW),
    "shieldgemma2": ("full_attention", _WINDOW),
    "gemma4": (_WINDOW,),
    "gemma4_unified": (_WINDOW,),
}
"""Families whose images see themselves in both directions, and in which kinds of layers."""
_RECURRENT: Final = {"linear_attention": "linear_attn", "conv": "conv"}
"""Kinds of layers that carry a state along the row, and the name of the module that does."""
_RECURRENT_TYPES: Final = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "linear_attn")
"""The same by model type, where a configuration may leave its kinds of layers out."""
_UNSUPPORTED: Final = {"mllama": "its cross-attention mask says for each token which images it sees"}
_QWEN: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PROVED: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (f"{name}_text",) for name in (*_QWEN, "glm4v", "glm4v_moe")},
    "glm46v": ("glm4v_text",),
    "gemma3": ("gemma3_text",),
    "idefics2": ("mistral",),
    "idefics3": ("llama",),
    "internvl": ("qwen2",),
    "llava": ("llama",),
    "llava_next": ("llama",),
    "llava_onevision": ("qwen2",),
    "mistral3": ("mistral",),
    "paligemma": ("gemma",),
    "smolvlm": ("llama",),
}
"""Model types whose batches are proved, and the language models they are proved with."""
_REFUSED: Final[Mapping[str, Mapping[Layout | SequenceSplit, str]]] = {
    "paligemma": {"packed": "packed prompts see each other, since prompts are seen in both directions"},
}
_BIDIRECTIONAL: Final = "text is seen in both directions, with windows that the masks of batches do not have"
_MASKED_PROMPT: Final = "prompts are seen in both directions, by a mask that is not split"
_MASKED_IMAGES: Final = "images are seen in both directions, by masks that attention in a ring does not take"
_FOLDER: Final = "proofs"
_CODE: Final = ("training/*.py", "media/item.py", "media/levels.py", "sidecar.py")
_remembered: dict[str, "Proof"] = {}
"""What was proved in this process, by digest of all that it depends on."""
_ROTARY_LIMITS: Final = ("original_max_position_embeddings", "max_position_embeddings")
_VOLATILE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Settings that make no difference to the architecture."""


class Proof(msgspec.Struct, frozen=True):
    """The findings about a family that its configuration does not say; see `ModelFamily`."""

    token_types: TokenTypes | None
    recurrent: str
    refused: dict[Layout | SequenceSplit, str]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The inputs of a model besides token ids.

    One made by hand is its maker's word; `from_config` gives proved ones, and `prove` proves others.

    Attributes:
        model_type: As `config.json` names it.
        rules: By keyword; `rule` gives that of any keyword.
        token_types: The keyword of the mask that marks tokens of images, for models that take one.
        mrope: How it numbers tokens, or None where each token counts as one.
        feature_token_ids: Id of the feature token, by modality.
        image_blocks: Kinds of layers in which the tokens of an image see each other in both directions.
        sliding_window: How far back tokens see in layers with a window; None for families whose own masks
            serve packed rows.
        recurrent: Name of the modules that carry a state along the row, several with `|` between, so that
            packed samples are not kept apart by an attention mask alone; see
            `mmrender.training.recurrent_segments`. Empty without any.
        prefix: Whether the tokens of a prompt see each other in both directions, as its token types say.
        max_sample_tokens: Length up to which samples may share a batch, since rotary embeddings of the types
            `dynamic` and `longrope` follow the longest sample beyond it; None without such embeddings.
        refused: Layouts that batches must not have, and splits of their rows, and why.
    """

    model_type: str
    rules: Mapping[str, FieldRule] = field(default_factory=dict)
    token_types: TokenTypes | None = None
    mrope: MRope | None = None
    feature_token_ids: Mapping[str, int] = field(default_factory=dict)
    image_blocks: tuple[str, ...] = ()
    sliding_window: int | None = None
    recurrent: str = ""
    prefix: bool = False
    max_sample_tokens: int | None = None
    refused: Mapping[Layout | SequenceSplit, str] = field(default_factory=dict)

    def rule(self, name: str) -> FieldRule:
        """Return the rule of the field `name`."""
        return self.rules.get(name, FieldRule())

    def model_kwargs(self, fields: Mapping[str, "TensorList"]) -> dict[str, Any]:
        """Return image fields as the model takes them; those without a single image are left out."""
        return {
            name: rows.padded() if self.rule(name).layout == "rows" else rows.values
            for name, rows in fields.items()
            if rows.values.shape[0]
        }

    def check_layout(self, layout: Layout | SequenceSplit) -> None:
        """Refuse a layout or split of rows in which batches differ from single forwards.

        Raises:
            BatchError: It is one of `refused`.
        """
        if layout in self.refused:
            others = get_args(Layout if layout in get_args(Layout) else SequenceSplit)
            raise BatchError(
                f"{self.model_type} takes no {layout} rows",
                where="layout",
                expected=" or ".join(one for one in others if one not in self.refused) or "whole rows",
                got=self.refused[layout],
            )

    @classmethod
    def from_config(cls, config: Any) -> "ModelFamily":
        """Read the family from a model's configuration.

        Args:
            config: A model directory or its `config.json`, its content as a dict, or a Transformers
                configuration.

        Raises:
            ModelError: The file cannot be read, or does not say what is needed.
            BatchError: Batches of this family cannot be built, or are not proved.
        """
        settings = _settings(config)
        family = _draft(settings)
        text = (settings.get("text_config") or {}).get("model_type")
        if (text is None and family.model_type in _PROVED) or text in _PROVED.get(family.model_type, ()):
            return replace(family, refused={**family.refused, **_REFUSED.get(family.model_type, {})})
        known = _known(_digest(settings))
        if known is None:
            raise BatchError(
                "no batch of this family is proved to equal single forwards",
                where="config.model_type",
                expected="a family that is proved, such as " + ", ".join(list(_PROVED)[:4]),
                got=repr(family.model_type) + (f" with {text!r}" if text else ""),
                remedy="Prove it first: ModelFamily.prove(config)",
            )
        return replace(family, **msgspec.structs.asdict(known))

    @classmethod
    def prove(cls, model_or_config: Any, *, images: Sequence["MediaItem"] | None = None) -> "ModelFamily":
        """Compare batches of an architecture with single forwards, and return what passes.

        The architecture is built small, with random weights, unless a model in float32 is given, which is
        run as it is. Padded (right and left), packed and split batches of samples with images and without run
        in train mode. What passes is remembered by the configuration: `from_config` gives it, in this
        process, and where the architecture was built here, in others with the same releases of Transformers,
        torch and mmrender, too. `MMRENDER_CACHE` names the folder, and `off` keeps nothing.

        Args:
            model_or_config: A Transformers model, or what `from_config` takes.
            images: Four items of the model's own processor or more, the last two of one size; needed where
                the family's image processor cannot be built from its name alone.

        Returns:
            The family, with the layouts and splits that failed and the module at fault in `refused`.

        Raises:
            ModelError: The configuration cannot be read.
            BatchError: No layout passes, or nothing can be compared.
            MissingDependencyError: Transformers is not installed.
        """
        # By name: a proof builds batches, which are built of families.
        prove = import_module("mmrender.training.proofs").prove
        config = getattr(model_or_config, "config", model_or_config)
        settings = _settings(config)
        proof, built = prove(model_or_config, settings, _draft, images)
        digest = _digest(settings)
        _remembered[digest] = proof
        if built:  # a model of the caller's may hold code of his own, which no configuration names
            FileCache(cache_folder(_FOLDER)).put(digest, proof)
        return replace(_draft(settings), **msgspec.structs.asdict(proof))


def _draft(settings: Mapping[str, Any]) -> ModelFamily:
    """Read off a configuration what it says of the family."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("the configuration has no model_type", expected="a string", got=repr(model_type))
    if model_type in _UNSUPPORTED:
        raise BatchError(f"batches for {model_type} cannot be built: {_UNSUPPORTED[model_type]}")
    text, vision = settings.get("text_config") or {}, settings.get("vision_config") or {}
    mrope = None
    if model_type in MROPE or any(
        "mrope_section" in (part.get(key) or {})
        for part in (settings, text)
        for key in ("rope_scaling", "rope_parameters")
    ):
        seconds = vision.get("tokens_per_second", 4) if model_type in _NUMBERED_IN_SECONDS else None
        mrope = MRope(vision.get("spatial_merge_size", 2), model_type in SPLIT_FRAMES, seconds)
    feature_token_ids: dict[str, int] = {
        modality: settings[key]
        for modality in MODALITIES
        for key in (f"{modality}_token_index", f"{modality}_token_id")
        if isinstance(settings.get(key), int)
    }
    blocks = _IMAGE_BLOCKS.get(model_type, ())
    if model_type.startswith("gemma4") and text.get("use_bidirectional_attention") != "vision":
        blocks = ()
    kinds = text.get("layer_types") or ()
    refused: dict[Layout | SequenceSplit, str] = {}
    if model_type in _PREFIX:
        refused = dict.fromkeys(get_args(SequenceSplit), _MASKED_PROMPT)
    elif blocks:
        refused = {"ring": _MASKED_IMAGES}
    if model_type not in _PREFIX and any(
        part.get("use_bidirectional_attention") in (True, "all") for part in (settings, text)
    ):
        refused |= dict.fromkeys(("packed", *get_args(SequenceSplit)), _BIDIRECTIONAL)
    return ModelFamily(
        model_type=model_type,
        rules=_RULES.get(model_type, {}),
        token_types=_TOKEN_TYPES.get(model_type, "mm_token_type_ids" if mrope else None),
        mrope=mrope,
        feature_token_ids=feature_token_ids,
        image_blocks=blocks,
        sliding_window=int(text.get("sliding_window") or _WINDOW_TOKENS) if blocks else None,
        prefix=model_type in _PREFIX,
        max_sample_tokens=min(_rotary_limits(settings), default=None),
        refused=refused,
        recurrent=_RECURRENT_TYPES.get(model_type)
        or next((name for kind, name in _RECURRENT.items() if kind in kinds), ""),
    )


def _rotary_limits(settings: Mapping[str, Any], where: str = "config") -> Iterator[int]:
    """Yield for each rotary embedding that follows the longest sample the length up to which it does not.

    Transformers computes `dynamic` embeddings anew beyond `max_position_embeddings`, and takes the other
    factors of `longrope` beyond `original_max_position_embeddings`, for all samples of a batch alike.
    """
    for name, part in settings.items():
        if not isinstance(part, Mapping):
            continue
        if name not in ("rope_scaling", "rope_parameters"):
            yield from _rotary_limits(part, f"{where}.{name}")
            continue
        for rope in (part, *[one for one in part.values() if isinstance(one, Mapping)]):
            kind = str(rope.get("rope_type") or rope.get("type"))
            if "dynamic" not in kind and kind != "longrope" and "long_factor" not in rope:
                continue
            limits = [one.get(key) for one in (rope, settings) for key in _ROTARY_LIMITS]
            known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
            if not known:
                raise BatchError(
                    "the rotary embedding follows the longest sample of a batch from an unknown length on",
                    where=f"{where}.{name}",
                    expected=" or ".join(_ROTARY_LIMITS),
                    got=repr(kind),
                    remedy="Pass the configuration as Transformers reads it, which has all defaults",
                )
            yield min(known)


def _known(digest: str) -> Proof | None:
    found = _remembered.get(digest) or FileCache(cache_folder(_FOLDER)).get(digest, Proof)
    if found is not None:
        _remembered[digest] = found
    return found


def _digest(settings: Mapping[str, Any]) -> str:
    """Return the digest of all that a proof depends on, the same for a file and for what it is read into."""
    try:
        from transformers import CONFIG_MAPPING

        if settings["model_type"] in CONFIG_MAPPING:
            settings = CONFIG_MAPPING[settings["model_type"]].from_dict(dict(settings)).to_dict()
    except Exception:  # noqa: BLE001 - a configuration that Transformers cannot read is taken as it is
        settings = dict(settings)
    kept = {name: value for name, value in settings.items() if name not in _VOLATILE}
    releases = [_release(name) for name in ("transformers", "torch")]
    facts = [kept, *releases, digest_of_code(_CODE)]
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(length=16)


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _settings(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        settings: Mapping[str, Any] = config.to_dict()
        return settings
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        problem = "the model's configuration cannot be read"
        raise ModelError(problem, where=str(path), got=str(error)) from error
