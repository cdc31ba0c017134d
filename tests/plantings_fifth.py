"""A fifth table: twelve faults of kinds that no other table has, three in each of four families.

Its author knew the audit's rows, and chose faults by what servers, trainers and clients can do, before any was audited.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from planting import Context, Fault, Parts, dialogue
from planting_faults import earlier, kept_steps
from plantings_third import PROMPT, case


def texts_exchanged(parts: Parts, _: Context) -> Parts:
    """The first message's first two texts in each other's place."""
    one, two = [index for index, part in enumerate(parts) if part.kind == "user"][:2]
    out = list(parts)
    out[one], out[two] = parts[two], parts[one]
    return out


def another_date(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Two tokens of the system's text, as of a day."""
    return (*ids[:1], 3 + (ids[1] + 8) % 40, 3 + (ids[2] + 21) % 40, *ids[3:])


def block_of_another(parts: Parts, ctx: Context) -> Parts:
    """The first sixteen tokens are those of the next rollout, as of a block of a prefix cache."""
    other = [one for part in dialogue(ctx.seed + 1)[0][0] for one in part.ids][:16]
    out = []
    for part in parts:
        taken, other = other[: len(part.ids)], other[len(part.ids) :]
        out.append(replace(part, ids=(*taken, *part.ids[len(taken) :])) if part.image is None else part)
    return out


def letterboxed(image: Image.Image, *_: Any) -> Image.Image:
    side = max(image.size)
    out = Image.new("RGB", (side, side), (114, 114, 114))
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def half_chroma(image: Image.Image, *_: Any) -> Image.Image:
    """Colours in half of the resolution of brightness, as in 4:2:0, without a quantisation."""
    bands = list(image.convert("YCbCr").split())
    half = [(side + 1) // 2 for side in image.size]
    bands[1:] = [
        one.resize(half, Image.Resampling.BOX).resize(image.size, Image.Resampling.BILINEAR)
        for one in bands[1:]
    ]
    return Image.merge("YCbCr", bands).convert("RGB")


def in_linear(change: Any, *, inputs: Any = None) -> Any:
    """The weights of the language model's layers changed, and their inputs."""

    def edit(model: Any) -> Any:
        for name, module in model.named_modules():
            if "layers" in name and "vis" not in name and isinstance(module, torch.nn.Linear):
                with torch.no_grad():
                    module.weight.copy_(change(module.weight))
                if inputs is not None:
                    module.register_forward_pre_hook(lambda _, args: (inputs(args[0]), *args[1:]))
        return model

    return edit


def in_nvfp4(weight: Any) -> Any:
    """Four-bit floats (e2m1) in blocks of 16 with a scale in e4m3 each, and one for all."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    whole = weight.abs().max() / (6 * 448)
    blocks = weight.reshape(-1, 16)
    scale = (blocks.abs().amax(1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float().clamp(
        min=2**-9
    ) * whole
    nearest = levels[((blocks / scale).abs()[..., None] - levels).abs().argmin(-1)]
    return (nearest * blocks.sign() * scale).reshape(weight.shape)


def in_tf32(values: Any) -> Any:
    """Ten bits of mantissa."""
    bits = values.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def scaled_cache(model: Any) -> Any:
    """Keys and values in float8 with scales that were calibrated."""
    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")) and "vis" not in name:
            scale = 0.0037 if name.endswith("k_proj") else 0.0021
            module.register_forward_hook(
                lambda _, __, out, scale=scale: (
                    (out / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(out.dtype) * scale
                )
            )
    return model


def begun_at_step_41(ctx: Context, inputs: dict[str, Any]) -> Any:
    """The first six tokens of each completion are of older weights."""
    model = ctx.world.sampler if len(ctx.drawn) < 6 else ctx.world.model
    with torch.inference_mode():
        return model(**inputs).logits[0, -1].float().clone()


def watermarked(logits: Any, ctx: Context) -> Any:
    """Half of the vocabulary, which the last token decides, is likelier."""
    generator = torch.Generator().manual_seed(15485863 * int((ctx.drawn or ctx.prompt)[-1]))
    green = torch.randperm(len(logits), generator=generator)[: len(logits) // 2]
    logits[green] += 2.0
    return logits


def top_n_sigma(logits: Any, _: Context) -> Any:
    return logits.masked_fill(logits < logits.max() - 1.5 * logits.std(), -torch.inf)


def smoothed(logits: Any, ctx: Context) -> Any:
    """Logits as they are. The mean log-probability of all tokens is kept."""
    vars(ctx).setdefault("means", []).append(float(logits.log_softmax(-1).mean()))
    return logits


# fmt: off
FIFTH = (
    case("texts-exchanged", "qwen3_vl", PROMPT, "The first two texts of the first user message are in each other's place.", "parts of a message that are gathered as they are done",
         "parts of a message in another order", r"order|exchang|place|swap|mov", Fault(sees=texts_exchanged), wrong=r"reasoning|truncat|generation prompt"),
    case("cache-with-scales", "qwen3_vl", "model", "Keys and values are kept in float8 with calibrated scales.", "vLLM --kv-cache-dtype fp8 with k_scale and v_scale of the checkpoint",
         "unknown", r"kv|cache|keys", Fault(sampler=scaled_cache), wrong=r"temperature|step \d|bf16"),
    case("watermark", "qwen3_vl", "sampling", "Half of the vocabulary is favoured, by the last token.", "watermarking_config of Hugging Face's generation",
         "unknown", r"watermark|bias", Fault(rule=watermarked), wrong=r"temperature|top.?[kp]|penalty|quanti"),
    case("date-of-another-day", "internvl", PROMPT, "Two tokens of the system's text are others.", "strftime_now in chat templates, on a server that started on another day",
         "two other tokens in the system prompt", r"another token|other token|differ", Fault(sees=lambda parts, _: [replace(one, ids=another_date(one.ids)) if one.kind == "system" else one for one in parts]), wrong=r"reasoning|truncat|generation prompt"),
    case("begun-at-step-41", "internvl", "model", "The first six tokens of each completion were sampled by older weights.", "partial rollouts: requests that are aborted by an update of weights, and continued",
         "older weights at the beginning of completions", r"weights|step 41", Fault(sampler=earlier(), forward=begun_at_step_41, options=kept_steps), wrong=r"step 40|quanti|temperature"),
    case("label-smoothing", "internvl", "recording", "A tenth of the mean log-probability of all tokens is mixed into each number.", "label_smoothing_factor of Hugging Face's trainer in the loss that is recorded",
         "unknown", r"smooth|mixed|mean", Fault(rule=smoothed, record=lambda values, ctx: 0.9 * values + 0.1 * np.array(vars(ctx)["means"])), wrong=r"temperature|top.?[kp]|epsilon"),
    case("letterbox-114", "gemma3", "pixels", "The sampler's images are padded to a square in grey of level 114.", "letterbox of Ultralytics in a client's preparation of images",
         "images padded to a square", r"pad|letterbox|square", Fault(shows=letterboxed), wrong=r"crop|BGR"),
    case("block-of-another", "gemma3", "template|model", "The first sixteen tokens of the sampler's prompts are another prompt's.", "collisions of hashes of a prefix cache's blocks (CVE-2025-25183 of vLLM)",
         "unknown", r"another|prefix|block|of rollout", Fault(sees=block_of_another), wrong=r"reasoning|truncat|generation prompt"),
    case("nvfp4", "gemma3", "model", "Weights are four-bit floats in blocks of sixteen.", "vLLM with checkpoints of ModelOpt in NVFP4",
         "weights in four bits", r"fp4|float4|nvfp4|4.bit|e2m1", Fault(sampler=in_linear(in_nvfp4)), wrong=r"int4|step \d|temperature"),
    case("top-n-sigma", "glm4v", "sampling", "Tokens more than one and a half deviations below the largest logit are left out.", "top-n-sigma of llama.cpp's samplers",
         "unknown", r"sigma|cut|several", Fault(rule=top_n_sigma), wrong=r"temperature|penalty|top_k of"),
    case("tf32", "glm4v", "model", "Matrices are multiplied with ten bits of mantissa.", "torch.set_float32_matmul_precision('high') on one side",
         "products in TF32", r"tf32|ten bits|10 bits", Fault(sampler=in_linear(in_tf32, inputs=in_tf32)), wrong=r"temperature|step \d|int8"),
    case("half-chroma", "glm4v", "pixels", "Colours of the sampler's images have half of their resolution.", "frames of a browser's stream of video (4:2:0)",
         "unknown", r"chroma|4:2:0|subsampl|colour.*resolution", Fault(shows=half_chroma), wrong=r"jpe?g|webp|palette|BGR|bits"),
)
# fmt: on
