"""A model's architecture with small sizes and random weights, for proofs on a CPU.

Only sizes and lengths are changed. The kinds of layers, of attention and of position embeddings stay as the
configuration has them: of layers that differ in kind, one of each is kept.

A length is a number of tokens from which on a model behaves differently: a window, a chunk, the length that a
rotary embedding was trained for, the number of keys that sparse attention keeps. Lengths are found by
building: a number of the text configuration is a length if no parameter changes its shape with it. They
become so short that a sample of some hundred tokens crosses them, and keep their order.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mmrender.errors import BatchError, importing
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
_ROTARY_FACTORS: Final = ("short_factor", "long_factor")
"""Lists with a factor for each frequency of a rotary embedding."""
_SHORTEST: Final = 96
"""The shortest length that is made shorter, in tokens, and its new value if it counts tokens."""
_FEWEST: Final = 8
"""The smallest number that may be a length, such as a number of blocks of tokens."""
_NO_LENGTH: Final = re.compile(
    "theta|seed|token_i|version|divisor|intermediate|hidden|heads|layers|experts|vocab|rank|scalar|_dim$"
)
"""Keys of numbers that never count tokens, of which small architectures may lack the parameters."""


class Length(NamedTuple):
    """A number of tokens from which on a model behaves differently.

    Attributes:
        path: Its place in the configuration, such as `text_config.sliding_window`.
        tokens: Its value there.
        small: Its value in the small architecture.
    """

    path: str
    tokens: int
    small: int


class SmallModel(NamedTuple):
    """A small model, and the lengths of its configuration, the shortest first."""

    model: Any
    lengths: tuple[Length, ...]


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


def build_small(config: Any, cls: Any = None) -> SmallModel:
    """Build the small model of a Transformers configuration: float32, eager attention, random weights.

    Args:
        config: The configuration.
        cls: The model's class; None for the class that Transformers has for the configuration.

    Raises:
        BatchError: Transformers cannot build it.
        MissingDependencyError: Transformers is not installed.
    """
    with importing("transformers", "hf", "prove_family"):
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    def build(settings: Mapping[str, Any]) -> Any:
        small = type(config).from_dict(dict(settings))
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        if cls is not None:
            return cls._from_config(small, **options)
        known = type(small) in AutoModelForImageTextToText._model_mapping
        return (AutoModelForImageTextToText if known else AutoModelForCausalLM).from_config(small, **options)

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            settings = small_settings(config.to_dict())
            lengths = _lengths(config, settings, build)
            model = build(_shortened(settings, lengths))
            torch.manual_seed(0)  # weights do not depend on how many models were built before
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
    return SmallModel(model, lengths)


def _lengths(
    config: Any, settings: Mapping[str, Any], build: Callable[[Mapping[str, Any]], Any]
) -> tuple[Length, ...]:
    """Return the lengths among the numbers of the text configuration, by building with each shortened."""
    numbers = dict(_numbers(config.to_dict(), _text_path(config)))
    long = sorted({value for value in numbers.values() if value >= _SHORTEST})
    short = {value: _SHORTEST + _FEWEST * rank for rank, value in enumerate(long)}
    short |= {value: max(2, value // _FEWEST) for value in numbers.values() if value < _SHORTEST}
    candidates = [Length(".".join(path), value, short[value]) for path, value in numbers.items()]
    candidates.sort(key=lambda one: one.tokens)

    def shapes(lengths: Sequence[Length]) -> Any:
        model = build(_shortened(settings, lengths))
        return {name: tuple(one.shape) for name, one in model.named_parameters()}

    whole = shapes(())
    if _tried(shapes, candidates) == whole:
        return tuple(candidates)
    lengths: list[Length] = []
    for one in candidates:
        if _tried(shapes, [*lengths, one]) == whole:
            lengths.append(one)
    return tuple(lengths)


def unchecked_lengths(model: Any) -> tuple[Length, ...]:
    """Return the numbers that may be lengths of a model that is not built small: no size of a parameter."""
    numbers = _numbers(model.config.to_dict(), _text_path(model.config))
    sizes = {size for one in model.parameters() for size in one.shape}
    lengths = [Length(".".join(path), value, value) for path, value in numbers if value not in sizes]
    return tuple(sorted(lengths, key=lambda one: one.tokens))


def _tried(shapes: Callable[[Sequence[Length]], Any], lengths: Sequence[Length]) -> Any:
    try:
        return shapes(lengths)
    except Exception:  # noqa: BLE001 - sizes that do not fit each other raise anything
        return None


def _text_path(config: Any) -> tuple[str, ...]:
    """Return the keys of the text configuration within the whole, none if it is the whole."""
    text = config.get_text_config()

    def find(part: Any, path: tuple[str, ...]) -> tuple[str, ...] | None:
        if part is text:
            return path
        inner = [(key, value) for key, value in vars(part).items() if hasattr(value, "get_text_config")]
        paths = (find(value, (*path, key)) for key, value in inner)
        return next((one for one in paths if one is not None), None)

    return find(config, ()) or ()


def _numbers(settings: Any, inside: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield path and value of each number in a part of the settings that may be a length."""
    part = settings
    for key in inside:
        part = part[key]
    for key, value in part.items():
        path = (*inside, key)
        if isinstance(value, Mapping):
            yield from _numbers(settings, path)
        elif isinstance(value, int) and not isinstance(value, bool) and value >= _FEWEST:
            is_size = key in _SIZES and key != "max_position_embeddings"
            if isinstance(key, str) and not is_size and not _NO_LENGTH.search(key):
                yield path, value


def _shortened(settings: Mapping[str, Any], lengths: Sequence[Length]) -> Mapping[str, Any]:
    """Return settings with these lengths at their small values."""
    out = dict(settings)
    for one in lengths:
        part, (*inside, last) = out, one.path.split(".")
        for key in inside:
            part[key] = part = dict(part[key])
        part[last] = one.small
    return out


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
        elif key in _ROTARY_FACTORS and isinstance(value, list):
            out[key] = value[:: max(1, len(value) // _HALF_HEAD)][:_HALF_HEAD]
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
