"""Sixty further faults that happened between engines and trainers of vision-language models."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import OPENER, PAIRS, STOP
from mmrender.trajectory.sample import TrainingSample
from planting import NEWLINE, USER, Context, Fault, Part, Parts, Planting
from plantings_dev import (
    TRL,
    VERL,
    VLLM,
    adapted,
    biased,
    completion_shifted,
    earlier,
    edited,
    frequencies,
    kept_steps,
    nucleus,
    on_channels,
    rotary,
    target_size,
    trained_further,
    without,
)
from training_models import END_ID, START_ID

# --- conversations ---


def inserted(after: str, ids: Sequence[int], *, first: bool = True) -> Callable[[Parts, Context], Parts]:
    """Tokens after the first, or each, part of a kind."""

    def insert(parts: Parts, _: Context) -> Parts:
        out: list[Part] = []
        done = False
        for part in parts:
            out.append(part)
            if part.kind == after and not (first and done):
                out.append(Part("inserted", tuple(ids)))
                done = True
        return out

    return insert


def reasoning_dropped(parts: Parts, _: Context) -> Parts:
    """The first five tokens of earlier completions left out."""
    outs = [index for index, part in enumerate(parts) if part.kind == "out"]
    return [replace(one, ids=one.ids[5:]) if index in outs[:-1] else one for index, one in enumerate(parts)]


def images_first(parts: Parts, _: Context) -> Parts:
    """The images of a message before its text."""
    out: list[Part] = []
    held: list[Part] = []
    for part in parts:
        if part.kind == "user":
            held.append(part)
        elif part.image is not None:
            out.append(part)
        else:
            out += held
            held = []
            out.append(part)
    return out


def split_pairs_at_ends(parts: Parts, _: Context) -> Parts:
    """User text ends in one token for two letters."""
    return [replace(one, ids=(*one.ids, PAIRS[4])) if one.kind == "user" else one for one in parts]


def pairs_at_ends(parts: Parts, _: Context) -> Parts:
    """The same text, its end as two tokens."""
    return [replace(one, ids=(*one.ids, 7, 8)) if one.kind == "user" else one for one in parts]


def old_images_dropped(parts: Parts, _: Context) -> Parts:
    """Images before the last completed turn left out."""
    outs = [index for index, part in enumerate(parts) if part.kind == "out"]
    last = outs[-2] if len(outs) > 1 else -1
    return [part for index, part in enumerate(parts) if part.image is None or index > last]


def last_message_cut(parts: Parts, _: Context) -> Parts:
    users = [index for index, part in enumerate(parts) if part.kind == "user"]
    return [replace(one, ids=one.ids[:-3]) if index == users[-1] else one for index, one in enumerate(parts)]


def other_stop(sample: TrainingSample, _: Context) -> TrainingSample:
    """The stop token that the template writes in place of the sampled one."""
    ids = sample.token_ids.copy()
    ids[sample.loss_mask & (ids == STOP)] = 82
    return replace(sample, token_ids=ids)


# --- pictures and pixels ---


def as_jpeg(quality: int) -> Callable[[Image.Image, int, Context], Image.Image]:
    def encode(image: Image.Image, *_: Any) -> Image.Image:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=quality)
        return Image.open(io.BytesIO(data.getvalue())).convert("RGB")

    return encode


def of_another(image: Image.Image, number: int, ctx: Context) -> Image.Image:
    """Another picture of the same size."""
    small = np.random.default_rng([23, ctx.seed, number]).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(image.size, Image.Resampling.BICUBIC)


class FirstImage:
    """Every image of a rollout is its first."""

    def __init__(self) -> None:
        self.first: dict[int, Image.Image] = {}

    def __call__(self, image: Image.Image, number: int, ctx: Context) -> Image.Image:
        return self.first.setdefault(ctx.seed, image)


def shrunk(image: Image.Image, _: int, ctx: Context) -> Image.Image:
    """Sent at half its size, and enlarged to the size of the processor."""
    width, height = target_size(ctx.world, image)
    half = image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)
    return half.resize((width, height), Image.Resampling.BICUBIC)


def squared(image: Image.Image, *_: Any) -> Image.Image:
    """Padded to a square with grey."""
    side = max(image.size)
    out = Image.new("RGB", (side, side), (127, 127, 127))
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def cut_off(image: Image.Image, *_: Any) -> Image.Image:
    """Grey from two thirds down, as of a file that was not read to its end."""
    out = image.copy()
    out.paste((128, 128, 128), (0, image.height * 2 // 3, image.width, image.height))
    return out


def tiles_reversed(inputs: dict[str, Any], _: Context) -> None:
    pixels = inputs["pixel_values"]
    images = int((inputs["input_ids"] == START_ID).sum())
    inputs["pixel_values"] = pixels.reshape(images, -1, *pixels.shape[1:]).flip(1).reshape(pixels.shape)


# --- positions ---


def completion_by_index(inputs: dict[str, Any], ctx: Context) -> None:
    positions = inputs["position_ids"].clone()
    start = len(ctx.prompt)
    positions[..., start:] = torch.arange(start, positions.shape[-1])
    inputs["position_ids"] = positions


def text_by_index(inputs: dict[str, Any], _: Context) -> None:
    """Text numbered by its index, images by their grids from the index of their first token."""
    types = inputs["mm_token_type_ids"][0]
    positions = inputs["position_ids"].clone()
    start = 0
    for index in range(positions.shape[-1]):
        if types[index] == 0:
            positions[..., index] = index
        else:
            if index == 0 or types[index - 1] == 0:
                start = index
                base = int(inputs["position_ids"][0, 0, index])
            positions[:, 0, index] = inputs["position_ids"][:, 0, index] - base + start
    inputs["position_ids"] = positions


def sides_swapped(inputs: dict[str, Any], _: Context) -> None:
    inputs["position_ids"] = inputs["position_ids"][[0, 2, 1]]


def second_turn_from_zero(inputs: dict[str, Any], _: Context) -> None:
    ids = inputs["input_ids"][0]
    starts = [i for i in range(len(ids) - 1) if ids[i] == OPENER and ids[i + 1] == USER]
    if len(starts) > 1:
        positions = inputs["position_ids"].clone()
        positions[..., starts[1] :] -= positions[..., starts[1]].clone()[..., None]
        inputs["position_ids"] = positions


def advancing_by_patches(inputs: dict[str, Any], _: Context) -> None:
    """After an image, positions go on by the longer side in patches rather than in tokens."""
    types = inputs["mm_token_type_ids"][0]
    positions = inputs["position_ids"].clone()
    grids = iter(inputs["image_grid_thw"].tolist())
    for index in range(1, positions.shape[-1]):
        if types[index] == 0 and types[index - 1] == 1:
            _, height, width = next(grids)
            positions[..., index:] += max(height, width) // 2
    inputs["position_ids"] = positions


def sections_in_a_row(model: Any) -> Any:
    """The axes of M-RoPE have runs of frequencies rather than every third one."""

    def contiguous(module: Any) -> Callable[[Any], Any]:
        def recompose(freqs: Any) -> Any:
            out = freqs[0].clone()
            first = 0
            for axis, count in enumerate(module.mrope_section):
                out[..., first : first + count] = freqs[axis][..., first : first + count]
                first += count
            return torch.cat((out, out), dim=-1)

        return recompose

    for module in rotary(model):
        module.recomposition_frequencies = contiguous(module)
    return model


# --- weights ---


def zeroed(*parts: str) -> Callable[[Any], Any]:
    def edit(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in parts):
                    parameter.zero_()
        return model

    return edit


def cache_as(dtype: Any) -> Callable[[Any], Any]:
    """Keys and values of the language model in another dtype."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        return output.to(dtype).to(output.dtype)

    def edit(model: Any) -> Any:
        for name, module in model.named_modules():
            if name.endswith(("k_proj", "v_proj")) and "vis" not in name:
                module.register_forward_hook(hook)
        return model

    return edit


def adapter_twice(model: Any) -> Any:
    model.add_adapter_times(model, 1)
    return model


def without_window(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "sliding_window") and module.sliding_window:
            module.sliding_window = 4096
        for config in (
            getattr(module, "config", None),
            getattr(getattr(module, "config", None), "text_config", None),
        ):
            if getattr(config, "sliding_window", None):
                config.sliding_window = 4096
    return model


def embedding_as_head(model: Any) -> Any:
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.clone())
    return model


def stale_prefix(ctx: Context, inputs: dict[str, Any]) -> Any:
    """Keys and values of the prompt are of the sampler's earlier weights."""
    start = len(ctx.prompt) - 1
    old = {
        name: value
        for name, value in inputs.items()
        if name not in ("input_ids", "position_ids", "attention_mask")
    }
    old |= {"use_cache": True}
    with torch.inference_mode():
        past = ctx.world.sampler(
            input_ids=inputs["input_ids"][:, :start],
            position_ids=inputs["position_ids"][..., :start],
            attention_mask=inputs["attention_mask"][:, :start],
            **old,
        ).past_key_values
        return (
            ctx.world.model(
                input_ids=inputs["input_ids"][:, start:],
                position_ids=inputs["position_ids"][..., start:],
                attention_mask=inputs["attention_mask"],
                past_key_values=past,
                use_cache=True,
            )
            .logits[0, -1]
            .float()
            .clone()
        )


# --- distributions ---


def top_k(logits: Any, count: int) -> Any:
    out = torch.full_like(logits, -torch.inf)
    best = logits.topk(count).indices
    out[best] = logits[best]
    return out


def min_p(logits: Any, share: float) -> Any:
    probabilities = logits.softmax(-1)
    return torch.where(probabilities >= share * probabilities.max(), logits, -torch.inf)


def presence(penalty: float) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, ctx: Context) -> Any:
        logits[sorted({*ctx.drawn})] -= penalty
        return logits

    return rule


def only(tokens: Sequence[int]) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, _: Context) -> Any:
        out = torch.full_like(logits, -torch.inf)
        out[list(tokens)] = logits[list(tokens)]
        return out

    return rule


def no_stop_before(count: int) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, ctx: Context) -> Any:
        if len(ctx.drawn) < count:
            logits[STOP] = -torch.inf
        return logits

    return rule


def larger_vocabulary(logits: Any, _: Context) -> Any:
    return torch.cat([logits, torch.zeros(28)])


# --- records ---


def per_turn(change: Callable[[Any], Any]) -> Callable[[Any, Context], Any]:
    def record(values: Any, ctx: Context) -> Any:
        return np.concatenate([change(part) for part in np.split(values, np.cumsum(ctx.lengths)[:-1])])

    return record


def turns_swapped(values: Any, ctx: Context) -> Any:
    first = ctx.lengths[0]
    return np.concatenate([values[first:], values[:first]])


def with_sentinel(values: Any) -> Any:
    values = values.copy()
    values[4] = -9999.0
    return values


def first_is_zero(values: Any) -> Any:
    return np.append(0.0, values[1:])


def chunk_twice(values: Any) -> Any:
    return np.concatenate([values[:8], values[4:8], values[8:-4]])


# fmt: off
HELD = (
    # template
    Planting("bos-missing", "gemma3", "template|tokens", "The sampler's prompt lacks the BOS token that the trainer's has.", TRL + "3853",
             r"(?i)\bbos\b|lacked the first 1 token", Fault(sees=without("bos"))),
    Planting("think-opener", "qwen2_5_vl", "template|tokens", "The sampler's generation prompt ends with two tokens that open a thought, which the trainer's lacks.", "PrimeIntellect-ai/prime-rl#346",
             r"(?i)generation prompt|think|before (the|each) (completion|answer|sampled)", Fault(sees=inserted("prompt", (84, NEWLINE), first=False))),
    Planting("reasoning-dropped", "glm4v", "template|tokens", "The sampler's second prompt lacks the first five tokens of the first completion: the template drops earlier reasoning.", VERL + "6854",
             r"(?i)reasoning|lacked the first 5 token\(s\) of all completions before", Fault(sees=reasoning_dropped)),
    Planting("tools-left-out", "internvl", "template|tokens", "The sampler's system prompt has tool definitions of twelve tokens that the trainer's lacks.", TRL + "5224",
             r"(?i)tool|system|(more|lacks|missing|extra).*(tokens|text)", Fault(sees=inserted("system", tuple(range(10, 22))))),
    Planting("another-date", "qwen3_vl", "template|tokens", "Two tokens of the system prompt differ: the date, which the template writes.", "Llama 3.x and gpt-oss templates: strftime_now",
             r"?(?i)date|system|tokens? \d+.*differ", Fault(sees=edited("system", lambda ids: (*ids[:2], 33, 34, *ids[4:])))),
    Planting("images-first", "qwen2_5_vl", "template|tokens", "The sampler's messages have their images before their text.", "OpenGVLab/InternVL#1065",
             r"(?i)(image|placeholder).*(before|first|front|place|moved)|order", Fault(sees=images_first)),
    # tokens
    Planting("boundary-merged", "internvl", "tokens|template", "At the end of user text the sampler's prompt has one token for two letters, the trainer's two.", "areal-project/AReaL#1679",
             r"(?i)(encoded|tokeni[sz]ed) again|re-?(tokeni|encod)|same text|merge", Fault(sees=split_pairs_at_ends, trains=pairs_at_ends)),
    Planting("other-stop-token", "gemma3", "tokens|template|recording", "The trained sequence ends with another stop token than was sampled.", TRL + "7039",
             r"(?i)stop", Fault(finish=other_stop)),
    Planting("old-images-dropped", "internvl", "tokens|template", "The agent left the first message's images out of the sampler's second prompt.", "agents that keep the last image only",
             r"(?i)lacked all images but|image.*(left out|dropped)", Fault(sees=old_images_dropped)),
    Planting("last-message-cut", "glm4v", "tokens|template", "The last user message lacks its last three tokens in the sampler's prompt.", "tool responses cut to a length",
             r"?(?i)truncat|cut|lack|missing|short", Fault(sees=last_message_cut)),
    # pixels
    Planting("jpeg-75", "qwen2_5_vl", "pixels", "The sampler's images were sent as JPEG of quality 75.", "OpenAI clients that send JPEG", r"(?i)jpe?g|compress|lossy", Fault(shows=as_jpeg(75))),
    Planting("raw-levels", "qwen3_vl", "pixels", "The sampler took levels from 0 to 255 as pixels.", "vLLM mm_device_do_normalize", r"(?i)levels|255|rescal|normali", Fault(inputs=on_channels(lambda x: (x * 0.5 + 0.5) * 255))),
    Planting("upside-down", "gemma3", "pixels", "The sampler's images are rotated by 180 degrees: EXIF orientation was ignored.", "mistralai/mistral-common#331", r"(?i)rotat|orient|exif|180|upside", Fault(shows=lambda image, *_: image.transpose(Image.Transpose.ROTATE_180))),
    Planting("grey", "qwen2_5_vl", "pixels", "The sampler's images have no colour.", "image.convert('L')", r"(?i)gr[ae]y|colou?r|luminance", Fault(shows=lambda image, *_: image.convert("L").convert("RGB"))),
    Planting("black-image", "glm4v", "pixels", "The sampler saw black in place of the images.", "dummy images of text-only ranks", r"(?i)black|blank|empty|zero|constant", Fault(shows=lambda image, *_: Image.new("RGB", image.size))),
    Planting("image-of-another", "qwen3_vl", "pixels", "A cache returned features of an image that no sample has.", "LMCache/LMCache#4086", r"?(?i)(an)?other image|image.*(mistaken|not of|differs)", Fault(shows=of_another)),
    Planting("first-image-repeated", "internvl", "pixels", "All images of the sampler's prompt are the first one.", "sgl-project/sglang#2151", r"(?i)(image 0|first image|repeat|same image|of image)", Fault(shows=FirstImage())),
    Planting("sent-at-half-size", "glm4v", "pixels", "The sampler's images were halved by the client and enlarged again by the processor.", "sgl-project/sglang#12390", r"(?i)twice|downs|shrunk|half|enlarg|resiz|blur|resolution|smaller", Fault(shows=shrunk)),
    Planting("pixels-in-bf16", "internvl", "pixels", "The sampler's pixels were rounded to bfloat16.", "vLLM renders in the model's dtype", r"(?i)bf16|bfloat16|16[- ]bit|round", Fault(inputs=on_channels(lambda x: x.bfloat16().float()))),
    Planting("padded-to-square", "gemma3", "pixels", "The sampler's images were padded to a square rather than stretched.", "LLaVA expand2square", r"?(?i)pad|square|letterbox|aspect|stretch", Fault(shows=squared)),
    Planting("file-cut-off", "qwen3_vl", "pixels", "The lower third of the sampler's images is grey.", "PIL's LOAD_TRUNCATED_IMAGES", r"?(?i)truncat|incomplete|lower|bottom|part of", Fault(shows=cut_off)),
    Planting("tiles-reversed", "internvl", "pixels", "The sampler's tiles of each image are in reverse order.", VLLM + "21899", r"?(?i)tile", Fault(inputs=tiles_reversed)),
    Planting("mirrored", "glm4v", "pixels", "The sampler's images are mirrored.", "an augmentation left on", r"(?i)mirror|flip", Fault(shows=lambda image, *_: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))),
    # positions
    Planting("decode-without-delta", "qwen3_vl", "positions", "The sampler numbered completions by index, without the offset of the images before.", "Blaizzy/mlx-vlm#1619", r"(?i)delta|index|sequence|offset|completion|sampled", Fault(inputs=completion_by_index)),
    Planting("text-by-index", "glm4v", "positions", "The sampler numbered all text by index, as if each image token before took a position.", "sgl-project/sglang#3605", r"(?i)index|(each|every|one).*token|number of (image )?tokens|text (after|behind)", Fault(inputs=text_by_index)),
    Planting("height-and-width-swapped", "qwen2_5_vl", "positions", "The sampler's positions have height and width in each other's place.", "mlx-node/mlx-node#80", r"(?i)height.*width|axes|swap", Fault(inputs=sides_swapped)),
    Planting("second-turn-from-zero", "internvl", "positions", "The sampler numbered the second turn from 0 again.", "packed rows and per-turn prefills", r"(?i)(turn|restart|again).*(0|zero|start)|restart|from (0|zero)|reset", Fault(inputs=second_turn_from_zero)),
    Planting("advance-by-patches", "qwen3_vl", "positions", "After an image the sampler's positions advance by its side in patches, not in merged tokens.", "Blaizzy/mlx-vlm#1621", r"?(?i)patch|merge", Fault(inputs=advancing_by_patches)),
    Planting("position-repeated", "gemma3", "positions", "The sampler's completion begins at the position of the prompt's last token: all are one lower.", "unslothai/unsloth#3795", r"(?i)one (lower|less|earlier|too)|off by one|shift|-1|by 1", Fault(inputs=completion_shifted(-1))),
    Planting("sections-in-a-row", "qwen3_vl", "positions|model", "The sampler gave the axes of M-RoPE runs of frequencies rather than interleaved ones.", "mlx-node/mlx-node#80", r"(?i)interleav|section|contiguous", Fault(sampler=sections_in_a_row)),
    Planting("rotary-in-bf16", "qwen2_5_vl", "positions|model", "The sampler's rotary frequencies were rounded to bfloat16.", "huggingface/transformers#29285", r"?(?i)(bf16|bfloat16|precision).*(rotary|frequenc|position)|(rotary|frequenc|position).*(bf16|bfloat16|precision)", Fault(sampler=frequencies(lambda freq: freq.bfloat16().float()))),
    # model
    Planting("vision-not-updated", "qwen2_5_vl", "model", "The sampler's vision tower was of step 41, all else of the trainer's step.", "InternLM/xtuner#1410", r"(?i)visi|visual|tower|encoder", Fault(sampler=earlier("visual.", size=0.05), options=kept_steps)),
    Planting("weights-of-unknown-step", "internvl", "model", "The sampler had earlier weights that were not kept.", "NVIDIA-NeMo/RL#4018", r"?(?i)(other|earlier|older|stale|different).*weights|weights.*(other|earlier|older|stale|differ)", Fault(sampler=lambda model: trained_further(model, 0.05, 30))),
    Planting("adapter-twice", "glm4v", "model", "The sampler applied the adapter with twice its scale.", "LoRA alpha over rank", r"?(?i)(adapter|lora).*(twice|scale|double|2)", Fault(trainer=adapted, sampler=adapter_twice)),
    Planting("cache-in-fp8", "gemma3", "model", "The sampler's keys and values were rounded to fp8.", VLLM + "54035", r"(?i)(kv|cache|keys).*|fp8|float8", Fault(sampler=cache_as(torch.float8_e4m3fn))),
    Planting("deepstack-missing", "qwen3_vl", "model", "The sampler left out the deepstack features of images.", VLLM + "43617", r"(?i)deepstack|deep", Fault(sampler=zeroed("deepstack_merger_list.0.linear_fc2"))),
    Planting("window-ignored", "gemma3", "model", "The sampler's layers with a sliding window saw everything.", VLLM + "49202", r"(?i)window|sliding", Fault(sampler=without_window)),
    Planting("embedding-as-head", "glm4v", "model", "The sampler used the token embedding as its output head.", VLLM + "51665", r"(?i)tied|tie|embed.*head|head.*embed", Fault(sampler=embedding_as_head)),
    Planting("stale-prefix", "internvl", "model", "The sampler's prefix cache held keys and values of step 41.", "NVIDIA-NeMo/RL#4018", r"(?i)(prefix|cache|keys)", Fault(sampler=earlier(size=0.05), forward=stale_prefix, options=kept_steps)),
    Planting("last-layer-skipped", "glm4v", "model", "The sampler left out its last layer.", "pipeline-parallel weight updates", "?(?i)last layer|layer 1|skip", Fault(sampler=zeroed("layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"))),
    Planting("soft-capped", "gemma3", "model|sampling", "The sampler's logits were capped softly at 10.", "Gemma's final_logit_softcapping", r"?(?i)cap", Fault(rule=lambda logits, _: 10 * torch.tanh(logits / 10))),
    # sampling
    Planting("temperature-and-top-p", "qwen2_5_vl", "sampling", "The sampler's log-probabilities are at temperature 0.8 and over the most probable tokens that hold 0.95.", TRL + "6789", r"(?i)temperature.*(top|nucleus|0\.95)|(top|nucleus|0\.95).*temperature", Fault(rule=lambda logits, _: nucleus(logits / 0.8, 0.95))),
    Planting("top-k-10", "glm4v", "sampling", "The sampler's log-probabilities are over the ten most probable tokens.", TRL + "6789", r"(?i)top[-_ ]?k|\b(10|ten) most", Fault(rule=lambda logits, _: top_k(logits, 10))),
    Planting("min-p-0.1", "qwen3_vl", "sampling", "The sampler's log-probabilities are over tokens with at least a tenth of the largest probability.", TRL + "6789", r"(?i)min[-_ ]?p", Fault(rule=lambda logits, _: min_p(logits, 0.1))),
    Planting("presence-penalty-0.6", "gemma3", "sampling", "The sampler's log-probabilities are after a presence penalty of 0.6.", "NVIDIA-NeMo/RL#3497", r"(?i)presence", Fault(rule=presence(0.6))),
    Planting("one-token-biased", "internvl", "sampling", "The sampler's log-probabilities are after a bias of 3 on token 20.", "vLLM's sampling parameter logit_bias", r"(?i)bias", Fault(rule=biased((20,), 3.0))),
    Planting("media-tokens-forbidden", "qwen2_5_vl", "sampling", "The sampler's log-probabilities are over all tokens but those of media, which were forbidden.", "vLLM's sampling parameter logit_bias", r"(?i)media|forbid|bias|never|closed|without.*tokens|not allowed", Fault(rule=biased((90, 91, START_ID, END_ID), -100.0))),
    Planting("grammar", "glm4v", "sampling", "The sampler's log-probabilities are over the twenty tokens that a grammar allowed.", "mlc-ai/xgrammar#220", r"(?i)grammar|allow|restrict|structured", Fault(rule=only(range(3, 23)))),
    Planting("no-stop-before-8", "qwen3_vl", "sampling", "The stop token was forbidden for the first eight tokens, min_tokens.", "vLLM's sampling parameter min_tokens", r"?(?i)min_?tokens|token 2 could not be sampled among the first 8", Fault(rule=no_stop_before(8))),
    Planting("padded-vocabulary", "qwen2_5_vl", "sampling|model", "The sampler's softmax included 28 padding rows of the head with logit 0.", "tenstorrent/vllm#330", r"?(?i)28 tokens more", Fault(rule=larger_vocabulary)),
    # recording
    Planting("probabilities", "gemma3", "recording", "Probabilities were recorded rather than their logarithms.", "np.exp left in", r"(?i)probabilities\b.*(not|rather|instead)|without.*log|exp", Fault(record=lambda values, _: np.exp(values))),
    Planting("decimal-logarithms", "internvl", "recording", "Logarithms to base 10 were recorded.", "APIs that return log10", r"(?i)base 10|log10|decimal log", Fault(record=lambda values, _: values / np.log(10))),
    Planting("clamped-at-4", "qwen3_vl", "recording", "Recorded numbers are -4 or higher.", "TRL's sanitize_logprob and floors of APIs", r"(?i)clamp|clip|floor|-4 was recorded in place", Fault(record=lambda values, _: np.maximum(values, -4.0))),
    Planting("most-probable-token", "qwen2_5_vl", "recording", "The recorded number is of the most probable token, not of the sampled one.", TRL + "3867", r"(?i)most probable|top[- ]?1|best|likeliest|highest", Fault(record=lambda _, ctx: np.array(ctx.best))),
    Planting("first-is-zero", "internvl", "recording", "The number of each completion's first token is 0.", "None recorded as 0.0", r"(?i)first token.*(\b0|zero|no log-probability)(?!.*mask)", Fault(record=per_turn(first_is_zero))),
    Planting("sentinel", "gemma3", "recording", "One recorded number is -9999, which stands for none.", "vLLM's sentinel", r"(?i)9999|sentinel|placeholder|no evidence", Fault(record=lambda values, _: with_sentinel(values))),
    Planting("turns-swapped", "glm4v", "recording", "The numbers of the two turns are in each other's place.", VERL + "2368", r"(?i)turn|swap|order", Fault(record=turns_swapped)),
    Planting("cumulative", "qwen3_vl", "recording", "The recorded numbers are sums over the completion so far.", "vLLM's cumulative_logprob", r"(?i)cumul|sum|running", Fault(record=per_turn(np.cumsum))),
    Planting("logits", "gemma3", "recording", "Logits were recorded rather than log-probabilities.", "vLLM's logprobs_mode raw_logits", r"(?i)logits", Fault(record=lambda _, ctx: np.array(ctx.raw))),
    Planting("in-bf16", "qwen2_5_vl", "recording", "The recorded numbers were rounded to bfloat16.", "tensors shipped in bfloat16", r"(?i)bf16|bfloat16|round", Fault(record=lambda values, _: torch.tensor(values).bfloat16().double().numpy())),
    Planting("chunk-twice", "glm4v", "recording", "Four numbers of each completion are repeated, as of a chunk that came twice, and the last four lost.", "sgl-project/sglang#39260", r"?(?i)chunk|twice|repeat|duplicat|shift", Fault(record=per_turn(chunk_twice))),
)
# fmt: on
