"""Inputs of each model family, as data: how its tensors are collated, and how its tokens are numbered.

A family is found by `model_type` of the model's `config.json`. The rules follow the processors and models of
Transformers 5.23. A field without a rule is concatenated, as families usually do. A tensor that cannot be
concatenated is an error, never padded by guess.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import msgspec
from blake3 import blake3

from mmrender.caching import FileCache, cache_folder, digest_of_code, release_of
from mmrender.errors import BatchError, ModelError
from mmrender.messages import MODALITIES, Modality
from mmrender.training.positions import MROPE, OMNI, SPLIT_FRAMES, MRope

if TYPE_CHECKING:
    from mmrender.training.tensor_list import TensorList

TokenTypes: TypeAlias = Literal["mm_token_type_ids", "token_type_ids"]
Layout: TypeAlias = Literal["right", "left", "packed"]
"""How rows are laid out: padded on the right or on the left, or packed."""
SequenceSplit: TypeAlias = Literal["ring", "ulysses"]
"""How rows are split along the sequence over ranks. See `SequenceShard.of`."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Rule by which the tensors of several images become one.

    Attributes:
        layout: `"items"`: concatenated along the first axis, `(sum, ...)`. `"rows"`: an item's leading axis
            of one is dropped, and the model takes `(rows, longest row, ...)`, with zeros after shorter rows.
            `"counts"`: the number of images of each sample, whatever the item holds.
        padded: Whether trailing dimensions may differ and are filled with zeros at their ends.
    """

    layout: Literal["items", "rows", "counts"] = "items"
    padded: bool = False

    def trailing(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the dimensions of an item's shape after the axis along which items are joined."""
        return shape[2:] if self.layout == "rows" else shape[1:]


_PER_ROW: Final = FieldRule("rows")
_PER_ROW_PADDED: Final = FieldRule("rows", padded=True)
_TILES: Final = {"pixel_values": FieldRule(padded=True)}
_CLIPS: Final = dict.fromkeys(
    ("input_features", "input_features_mask", "feature_attention_mask"), FieldRule(padded=True)
)
"""Features of audio whose extractors pad to the longest clip of a prompt."""
_RULES: Final[Mapping[str, Mapping[str, FieldRule]]] = {
    **dict.fromkeys(("gemma3n", "gemma4", *OMNI, "granite_speech"), _CLIPS),
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
"""Window of Gemma, in tokens, if the configuration does not name it."""
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
"""The same by model type, if a configuration may leave its kinds of layers out."""
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
"""Model types with proved batches, and the language models that they are proved with."""
_REFUSED: Final[Mapping[str, Mapping[Layout | SequenceSplit, str]]] = {
    "paligemma": {"packed": "packed prompts see each other, since prompts are seen in both directions"},
}
_BIDIRECTIONAL: Final = "text is seen in both directions, with windows that the masks of batches do not have"
_MASKED_PROMPT: Final = "prompts are seen in both directions, by a mask that is not split"
_MASKED_IMAGES: Final = "images are seen in both directions, by masks that attention in a ring does not take"
_FOLDER: Final = "proofs"
_CODE: Final = (
    *("training/*.py", "testing/famil*.py", "testing/small_architecture.py"),
    *("media/item.py", "media/levels.py", "media/processors/patches.py", "sidecar.py"),
)
_proofs: dict[str, "Proof"] = {}
"""Proofs of this process, by digest of everything that they depend on."""
_ROTARY_LIMITS: Final = ("original_max_position_embeddings", "max_position_embeddings")
_VOLATILE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Settings that do not change the architecture."""


class Proof(msgspec.Struct, frozen=True):
    """Findings about a family beyond its configuration. See `ModelFamily`."""

    token_types: TokenTypes | None
    recurrent: str
    max_sample_tokens: int | None
    refused: dict[Layout | SequenceSplit, str]
    media: tuple[Modality, ...]

    @classmethod
    def of(cls, family: "ModelFamily", media: Iterable[Modality] = ()) -> "Proof":
        """Return the findings about a family, proved with these media."""
        return cls(
            family.token_types, family.recurrent, family.max_sample_tokens, dict(family.refused), tuple(media)
        )

    def joined(self, other: "Proof") -> "Proof":
        """Return the findings of two proofs of one family, with media of several kinds."""
        names = [name for proof in (self, other) for name in proof.recurrent.split("|") if name]
        bounds = [proof.max_sample_tokens for proof in (self, other)]
        return Proof(
            token_types=self.token_types or other.token_types,
            recurrent="|".join(dict.fromkeys(names)),
            max_sample_tokens=min((bound for bound in bounds if bound is not None), default=None),
            refused={**other.refused, **self.refused},
            media=tuple(dict.fromkeys((*self.media, *other.media))),
        )


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The inputs of a model besides token ids.

    Instances made by hand are unverified. `from_config` returns proved ones, and
    `mmrender.testing.families.prove_family` proves more.

    Attributes:
        model_type: As `config.json` names it.
        rules: By keyword; `rule` returns the rule of any keyword.
        token_types: The keyword of the mask that marks tokens of images, for models that take one.
        mrope: How it numbers tokens, or None if each token counts as one.
        feature_token_ids: Id of the feature token, by modality.
        image_blocks: Kinds of layers in which the tokens of an image see each other in both directions.
        sliding_window: Number of tokens that layers with a window see; None for families whose own masks
            serve packed rows.
        recurrent: Name of the modules that carry a state along the row, several with `|` between, so that
            packed samples are not kept apart by an attention mask alone, see
            `mmrender.training.recurrent.recurrent_segments`. Empty without these modules.
        prefix: Whether the tokens of a prompt see each other in both directions, as its token types say.
        max_sample_tokens: Length up to which samples may share a batch. Beyond it the rotary embeddings of
            the types `dynamic` and `longrope` follow the longest sample, or a proof found every layout to
            differ. None without a bound.
        refused: Layouts that batches must not have, and splits of their rows, each with its reason.
        media: Kinds of media of its proof. A proof with images is one with videos, too. None for families
            whose batches may hold any.
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
    media: tuple[Modality, ...] | None = None

    def rule(self, name: str) -> FieldRule:
        """Return the rule of the field `name`."""
        return self.rules.get(name, FieldRule())

    def model_kwargs(self, fields: Mapping[str, "TensorList"]) -> dict[str, Any]:
        """Return image fields as the model takes them, without fields that are empty."""
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

    def check_media(self, kinds: Collection[str]) -> None:
        """Refuse media of a kind that the family is not proved with.

        Raises:
            BatchError: There are some.
        """
        for kind in sorted(kinds):
            shown = "image" if kind == "video" else kind
            if self.media is not None and shown not in self.media:
                noun = "audio" if kind == "audio" else f"{kind}s"
                raise BatchError(
                    f"batches of {self.model_type} with {noun} are not proved to equal single forwards",
                    where="samples",
                    expected=" or ".join(self.media) or "text",
                    got=kind,
                    remedy=f"Prove it first: mmrender.testing.families.prove_family(model, images=...), "
                    f"with four items of mm_items[{shown!r}]",
                )

    @classmethod
    def from_config(cls, config: Any) -> "ModelFamily":
        """Read the family from a model's configuration.

        Args:
            config: A model directory or its `config.json`, its content as a dict, or a Transformers
                configuration.

        Raises:
            ModelError: The file cannot be read, or lacks something.
            BatchError: Batches of this family cannot be built, or are not proved.
        """
        settings = read_settings(config)
        family = unproved_family(settings)
        text = (settings.get("text_config") or {}).get("model_type")
        if (text is None and family.model_type in _PROVED) or text in _PROVED.get(family.model_type, ()):
            return replace(family, refused={**family.refused, **_REFUSED.get(family.model_type, {})})
        digest = _digest(settings)
        proof = _known_proof(digest)
        if proof is None:
            raise BatchError(
                "batches of this family are not proved to equal single forwards",
                where="config.model_type",
                expected="a proved family, such as " + ", ".join(list(_PROVED)[:4]),
                got=repr(family.model_type) + (f" with {text!r}" if text else ""),
                remedy="Prove it first: mmrender.testing.families.prove_family(config)",
            )
        _proofs[digest] = proof
        return family.proved(proof)

    def proved(self, proof: "Proof") -> "ModelFamily":
        """Return the family with the findings of a proof."""
        return replace(self, **msgspec.structs.asdict(proof))


def _known_proof(digest: str) -> Proof | None:
    return _proofs.get(digest) or FileCache(cache_folder(_FOLDER)).get(digest, Proof)


def remember_proof(settings: Mapping[str, Any], proof: Proof, *, on_disk: bool) -> Proof:
    """Let `from_config` return the proved family, in this process, and in others if `on_disk`.

    An earlier proof with media of another kind is joined. Returns what is remembered.
    """
    digest = _digest(settings)
    earlier = _known_proof(digest)
    if earlier is not None and {*earlier.media} - {*proof.media}:
        proof = proof.joined(earlier)
    _proofs[digest] = proof
    if on_disk:
        FileCache(cache_folder(_FOLDER)).put(digest, proof)
    return proof


def unproved_family(settings: Mapping[str, Any]) -> ModelFamily:
    """Return everything about a family that its configuration says.

    Raises:
        ModelError: The configuration lacks its model type.
        BatchError: Batches of this family cannot be built.
    """
    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("the configuration lacks its model_type", expected="a string", got=repr(model_type))
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
        if model_type in OMNI:
            seconds = settings.get("position_id_per_seconds", 25)
        mrope = MRope(
            vision.get("spatial_merge_size", 2),
            model_type in SPLIT_FRAMES,
            seconds,
            counts_time=model_type in OMNI,
            is_whole=model_type != "qwen3_omni_moe_thinker",
            joins_edges=model_type == "qwen2_5_omni_thinker",
        )
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
    prefix = model_type in _PREFIX
    refused: dict[Layout | SequenceSplit, str] = {"ring": _MASKED_IMAGES} if blocks else {}
    if prefix:
        refused = dict.fromkeys(get_args(SequenceSplit), _MASKED_PROMPT)
    elif any(part.get("use_bidirectional_attention") in (True, "all") for part in (settings, text)):
        refused |= dict.fromkeys(("packed", *get_args(SequenceSplit)), _BIDIRECTIONAL)
    return ModelFamily(
        model_type=model_type,
        rules=_RULES.get(model_type, {}),
        token_types=_TOKEN_TYPES.get(
            model_type, "mm_token_type_ids" if mrope and model_type not in OMNI else None
        ),
        mrope=mrope,
        feature_token_ids=feature_token_ids,
        image_blocks=blocks,
        sliding_window=int(text.get("sliding_window") or _WINDOW_TOKENS) if blocks else None,
        prefix=prefix,
        max_sample_tokens=min(_rotary_limits(settings), default=None),
        refused=refused,
        recurrent=_RECURRENT_TYPES.get(model_type)
        or next((name for kind, name in _RECURRENT.items() if kind in kinds), ""),
    )


def _rotary_limits(settings: Mapping[str, Any], where: str = "config") -> Iterator[int]:
    """Yield the length from which each rotary embedding follows the longest sample.

    Transformers recomputes `dynamic` embeddings beyond `max_position_embeddings`, and takes the second list
    of factors of `longrope` beyond `original_max_position_embeddings`, for all samples of a batch.
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
            lengths = [limit for limit in limits if isinstance(limit, int) and limit > 0]
            if not lengths:
                raise BatchError(
                    "the rotary embedding follows the longest sample of a batch from an unknown length on",
                    where=f"{where}.{name}",
                    expected=" or ".join(_ROTARY_LIMITS),
                    got=repr(kind),
                    remedy="Pass the configuration as Transformers reads it, which has all defaults",
                )
            yield min(lengths)


def _digest(settings: Mapping[str, Any]) -> str:
    """Return the digest of everything that a proof depends on, the same for a file and its configuration."""
    try:
        from transformers import CONFIG_MAPPING

        if settings["model_type"] in CONFIG_MAPPING:
            settings = CONFIG_MAPPING[settings["model_type"]].from_dict(dict(settings)).to_dict()
    except Exception:  # noqa: BLE001 - a configuration that Transformers cannot read is taken as it is
        settings = dict(settings)
    kept = {name: value for name, value in settings.items() if name not in _VOLATILE}
    releases = [release_of(name) for name in ("transformers", "torch")]
    facts = [kept, *releases, digest_of_code(_CODE)]
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(length=16)


def read_settings(config: Any) -> Mapping[str, Any]:
    """Return the settings of a configuration, as `ModelFamily.from_config` takes it.

    Raises:
        ModelError: The file cannot be read.
    """
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
