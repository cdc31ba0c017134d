"""A model's architecture with small sizes and random weights, for proofs on a CPU.

Only sizes are changed. The kinds of layers, of attention and of position embeddings stay as the configuration
has them: of layers that differ in kind, one of each is kept.
"""

from collections.abc import Mapping
from typing import Any, Final

from mmrender.errors import BatchError, MissingDependencyError
from mmrender.training.positions import MROPE
from mmrender.training.tensor_list import torch

_WIDTH: Final = 32
_VOCABULARY: Final = 512
_FIRST_SPECIAL: Final = 448
_PATCHES: Final = 8
"""Side of an image in patches."""
_MOST_LAYERS: Final = 6

_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "embed_dim", "embedding_dim", "dim", "n_embd", "width"), _WIDTH
    ),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), _WIDTH),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "mm_hidden_size", "text_hidden_size"), _WIDTH),
    **dict.fromkeys(("projector_hidden_size", "projection_hidden_size", "connector_hidden_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "n_layer", "layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "hidden_size_per_layer_input": 8,
    "mm_tokens_per_image": 4,
    "position_embedding_size": 128,
    "num_kv_shared_layers": 0,
    "max_position_embeddings": 8192,
}
"""Settings that are sizes, and their small values. Width is heads times the size of a head."""
_INDEXES: Final[Mapping[str, list[int]]] = {
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "vision_feature_layer": [1, 0],
    "vision_feature_layers": [1, 0],
}
_NAMED: Final = frozenset({"timm_wrapper", "gemma3n_vision"})
"""Parts whose sizes follow from the name of an architecture of timm."""
_HALF_HEAD: Final = 8


def small_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the small model, as `config.json` would hold them."""
    small = _shrunk(settings, settings.get("model_type") in MROPE)
    _rename_tokens(small, {})
    before, after = ((one.get("vision_config") or {}).get("image_size") for one in (settings, small))
    if isinstance(before, int) and isinstance(after, int) and small.get("image_grid_pinpoints"):
        # Sizes that images are cut in are multiples of the side of one tile.
        pinpoints = small["image_grid_pinpoints"]
        small["image_grid_pinpoints"] = [[side * after // before for side in one] for one in pinpoints]
    vision = settings.get("vision_config") or {}
    merged = vision.get("hidden_size", 0) * vision.get("merge_size", 0) ** 2
    if merged and settings.get("out_hidden_size") == merged:
        small["out_hidden_size"] = _WIDTH * vision["merge_size"] ** 2
    return small


def build_small(config: Any) -> Any:
    """Build the small model of a Transformers configuration: float32, eager attention, random weights.

    Raises:
        BatchError: Transformers cannot build it.
        MissingDependencyError: Transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        raise MissingDependencyError.of_extra("transformers", "hf", "prove_family") from error
    try:
        small = type(config).from_dict(small_settings(config.to_dict()))
        known = type(small) in AutoModelForImageTextToText._model_mapping
        build = AutoModelForImageTextToText if known else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = build.from_config(small, dtype=torch.float32, attn_implementation="eager")
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and "A_log" not in name:
                    # Unit variance in, unit variance out: with the usual 0.02 logits would be equal.
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    except Exception as error:  # a model's own code may raise anything
        raise BatchError(
            "the architecture cannot be built small",
            where=f"config of {config.model_type}",
            got=f"{type(error).__name__}: {error}"[:200],
            remedy="Pass a model of your own in place of its configuration",
        ) from error
    return model


def _shrunk(settings: Mapping[Any, Any], mrope: bool) -> dict[Any, Any]:
    if settings.get("model_type") in _NAMED:
        return dict(settings)
    kept = _kept_layers(settings)
    out: dict[Any, Any] = {}
    for key, value in settings.items():
        # Zero stays zero.
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if isinstance(value, Mapping):
            numbered = bool(kept) and bool(value) and all(str(one).isdigit() for one in value)
            own = {str(new): value[old] for new, old in enumerate(kept) for old in _same(value, old)}
            out[key] = _shrunk(own if numbered else value, mrope)
        elif isinstance(value, list) and kept and len(value) == _layer_count(settings):
            out[key] = [value[index] for index in kept]
        elif key in _INDEXES and isinstance(value, list):
            out[key] = _INDEXES[key]
        elif key in _LAYER_COUNTS and is_count and kept:
            out[key] = len(kept)
        elif key in _SIZES and is_count:
            out[key] = _SIZES[key]
        elif isinstance(key, str) and key.endswith(("dropout", "_pdrop", "drop_path_rate")):
            out[key] = 0.0 if isinstance(value, float | int) and not isinstance(value, bool) else value
        else:
            out[key] = value
    _keep_relations(settings, out)
    if "mrope_section" in out or (out.get("rope_type") == "default" and mrope):
        out |= {"mrope_section": _sections(out.get("mrope_section")), "partial_rotary_factor": 1.0}
    return out


def _keep_relations(settings: Mapping[Any, Any], out: dict[Any, Any]) -> None:
    """Change small sizes that must fit each other as the whole ones do."""
    rope, rest = settings.get("qk_rope_head_dim"), settings.get("qk_nope_head_dim")
    if isinstance(rope, int) and isinstance(rest, int) and "head_dim" in out:
        # Some families say how wide a head is in all, others how wide its rotated part is.
        rotated = out["qk_rope_head_dim"]
        out["head_dim"] = rotated if settings["head_dim"] == rope else rotated + out["qk_nope_head_dim"]
    patch, image = out.get("patch_size"), out.get("image_size")
    if isinstance(patch, int) and isinstance(image, int | list):
        side = _PATCHES * patch
        out["image_size"] = side if isinstance(image, int) else [side] * len(image)
    ratio = settings.get("pixel_shuffle_ratio")
    if ratio and settings.get("intermediate_size") == settings["hidden_size"] / ratio**2:
        out["intermediate_size"] = int(_WIDTH / ratio**2)


def _sections(whole: Any) -> list[int]:
    """Return the parts of half of a small head that positions on each axis rotate."""
    whole = whole or [2, 1, 1]
    parts = [_HALF_HEAD * one // sum(whole) for one in whole]
    left = _HALF_HEAD - sum(parts)
    return [part + (axis < left) for axis, part in enumerate(parts)]


_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers")


def _layer_count(settings: Mapping[Any, Any]) -> int:
    return next((settings[key] for key in _LAYER_COUNTS if isinstance(settings.get(key), int)), 0)


def _same(numbered: Mapping[Any, Any], index: int) -> list[Any]:
    """Return the key of a mapping by layer, which may be a number or its text."""
    return [key for key in numbered if str(key) == str(index)]


def _kept_layers(settings: Mapping[Any, Any]) -> list[int]:
    """Return one layer of each kind, two at least, if the settings list their layers."""
    count = _layer_count(settings)
    lists = [value for value in settings.values() if isinstance(value, list) and len(value) == count]
    tables = [
        value
        for value in settings.values()
        if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value)
    ]
    if count < 1 or not (lists or tables):
        return []
    kinds: dict[str, int] = {}
    for index in range(count):
        own = [[table[key] for key in _same(table, index)] for table in tables]
        kinds.setdefault(repr(([value[index] for value in lists], own)), index)
    kept = sorted(kinds.values())[:_MOST_LAYERS]
    return kept if len(kept) > 1 else [*kept, *range(1, min(2, count))]


def _rename_tokens(settings: dict[Any, Any], known: dict[int, int]) -> None:
    """Rename tokens beyond the small vocabulary to an id within it, the same wherever they are named."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _rename_tokens(value, known)
        elif isinstance(key, str) and key.endswith(("token_id", "token_index", "token_ids")):
            renamed = [_renamed(one, known) for one in value] if isinstance(value, list) else None
            settings[key] = _renamed(value, known) if renamed is None else renamed


def _renamed(token: Any, known: dict[int, int]) -> Any:
    if isinstance(token, bool) or not isinstance(token, int) or token < _FIRST_SPECIAL:
        return token
    return known.setdefault(token, _FIRST_SPECIAL + len(known) % (_VOCABULARY - _FIRST_SPECIAL))
