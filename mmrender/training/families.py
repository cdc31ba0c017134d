"""Inputs of each model family, as data: how its tensors are collated, and how its tokens are numbered.

A family is found by `model_type` of the model's `config.json`. The rules follow the processors and models of
Transformers 5.23. A field without a rule is concatenated, as in most families; a tensor that cannot be
concatenated is an error, never padded by guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from mmrender.errors import BatchError, ModelError
from mmrender.training.positions import SPLIT_FRAMES, MRope

if TYPE_CHECKING:
    from mmrender.training.tensor_list import TensorList

TokenTypes = Literal["mm_token_type_ids", "token_type_ids"]


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
    "mistral3": _TILES,
    "llava_next": _TILES,
    "llava_onevision": {**_TILES, "batch_num_images": FieldRule("counts")},
}
_TOKEN_TYPES: Final[Mapping[str, TokenTypes]] = {"gemma3": "token_type_ids"}
_NUMBERED_IN_SECONDS: Final = frozenset({"qwen2_5_vl"})
_IMAGE_BLOCKS: Final = {"gemma3": 4096}
"""Families whose images see themselves in both directions, and the window if the configuration has none."""
_RECURRENT: Final = frozenset({"qwen3_5", "qwen3_5_moe"})
_MROPE: Final = SPLIT_FRAMES | {"qwen2_vl", "qwen2_5_vl"}
_UNSUPPORTED: Final = {"mllama": "its cross-attention mask says for each token which images it sees"}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The inputs of a model besides token ids.

    Attributes:
        model_type: As `config.json` names it.
        rules: By keyword; `rule` gives that of any keyword.
        token_types: The keyword of the mask that marks tokens of images, for models that take one.
        mrope: How it numbers tokens, or None where each token counts as one.
        feature_token_ids: Id of the feature token, by modality.
        image_blocks: Whether the tokens of an image see each other in both directions.
        sliding_window: How far back tokens see in layers with a window; None for families whose own masks
            serve packed rows.
        recurrent: Whether some layers carry a state along the row, so that packed samples are not kept apart
            by an attention mask alone; see `mmrender.training.recurrent_segments`.
    """

    model_type: str
    rules: Mapping[str, FieldRule] = field(default_factory=dict)
    token_types: TokenTypes | None = None
    mrope: MRope | None = None
    feature_token_ids: Mapping[str, int] = field(default_factory=dict)
    image_blocks: bool = False
    sliding_window: int | None = None
    recurrent: bool = False

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

    @classmethod
    def from_config(cls, config: Any) -> "ModelFamily":
        """Read the family from a model's configuration.

        Args:
            config: A model directory or its `config.json`, its content as a dict, or a Transformers
                configuration.

        Raises:
            ModelError: The file cannot be read, or does not say what is needed.
            BatchError: Batches of this family cannot be built.
        """
        settings = _settings(config)
        model_type = settings.get("model_type")
        if not isinstance(model_type, str):
            raise ModelError("the configuration has no model_type", expected="a string", got=repr(model_type))
        if model_type in _UNSUPPORTED:
            raise BatchError(f"batches for {model_type} cannot be built: {_UNSUPPORTED[model_type]}")
        text, vision = settings.get("text_config") or {}, settings.get("vision_config") or {}
        mrope = None
        if model_type in _MROPE:
            seconds = vision.get("tokens_per_second", 4) if model_type in _NUMBERED_IN_SECONDS else None
            mrope = MRope(vision.get("spatial_merge_size", 2), model_type in SPLIT_FRAMES, seconds)
        elif any(
            "mrope_section" in (part.get(key) or {})
            for part in (settings, text)
            for key in ("rope_scaling", "rope_parameters")
        ):
            raise BatchError(
                "this family numbers tokens on three axes by rules that are not known here",
                where="config.model_type",
                expected=f"one of {', '.join(sorted(_MROPE))}",
                got=repr(model_type),
            )
        feature_token_ids = {
            modality: settings[key]
            for modality in ("image", "video")
            for key in (f"{modality}_token_index", f"{modality}_token_id")
            if isinstance(settings.get(key), int)
        }
        window = int(text.get("sliding_window") or _IMAGE_BLOCKS.get(model_type, 0))
        return cls(
            model_type=model_type,
            rules=_RULES.get(model_type, {}),
            token_types=_TOKEN_TYPES.get(model_type, "mm_token_type_ids" if mrope else None),
            mrope=mrope,
            feature_token_ids=feature_token_ids,
            image_blocks=model_type in _IMAGE_BLOCKS,
            sliding_window=window if model_type in _IMAGE_BLOCKS else None,
            recurrent=model_type in _RECURRENT or "linear_attention" in (text.get("layer_types") or ()),
        )


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
