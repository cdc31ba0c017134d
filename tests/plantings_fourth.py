"""A fourth table: sixty faults, fifteen in each of four families.

Its author had read none of the audit's rows, and of the former tables only names and form. `audit_plantings.py
fourth --check` shows that each fault changes the recorded numbers.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

from audit_cases import ANSWER, STOP, picture
from mmrender.sidecar import Text
from planting import COUNT, NEWLINE, USER, Context, Fault, Part, Parts, World, dialogue
from planting_faults import edited, frequencies, llama3, nucleus, without
from plantings_third import PROMPT, ROTARY, case

CALL, END_CALL, THINK = 82, 83, 84
SEEN = "pixels|model"
"""Stages of a fault of the vision tower: no image's features are as they should be."""
Hook = Callable[[dict[str, Any], Context], None]
Edit = Callable[[Parts, Context], Parts]

# --- conversations ---


def last_generation_prompt(*more: int) -> Edit:
    """More tokens at the end of the last generation prompt."""

    def edit(parts: Parts, _: Context) -> Parts:
        last = max(index for index, one in enumerate(parts) if one.kind == "prompt")
        return [*parts[: last + 1], Part("prefix", more), *parts[last + 1 :]]

    return edit


def without_system_block(parts: Parts, _: Context) -> Parts:
    """The first header, the system's text and its end left out."""
    names = [one.kind for one in parts]
    start, stop = names.index("header"), names.index("close") + 1
    return [*parts[:start], *parts[stop:]]


def system_in_first_user(parts: Parts, ctx: Context) -> Parts:
    """The system's text at the start of the first user message, as in templates without a system role."""
    text = next(one.ids for one in parts if one.kind == "system")
    rest = list(without_system_block(parts, ctx))
    first = next(index for index, one in enumerate(rest) if one.kind == "user")
    return [*rest[:first], Part("user", (*text, NEWLINE)), *rest[first:]]


def without_newline_after_headers(parts: Parts, _: Context) -> Parts:
    names = ("header", "prompt")
    return [replace(one, ids=one.ids[:-1]) if one.kind in names else one for one in parts]


def system_in_last_user(parts: Parts, ctx: Context) -> Parts:
    """The system's text at the start of the last user message, as in Mistral's templates."""
    text = next(one.ids for one in parts if one.kind == "system")
    rest = list(without_system_block(parts, ctx))
    last = max(index for index, one in enumerate(rest) if one.kind == "header" and USER in one.ids)
    return [*rest[: last + 1], Part("user", (*text, NEWLINE)), *rest[last + 1 :]]


def reminded(parts: Parts, _: Context) -> Parts:
    """A reminder at the end of the last user message."""
    last = max(index for index, one in enumerate(parts) if one.kind == "user")
    return [*parts[: last + 1], Part("reminder", (61, 12, 35, 48, 9)), *parts[last + 1 :]]


def first_texts_summarized(parts: Parts, _: Context) -> Parts:
    """Once there is a completion, three tokens stand for the first message's texts."""
    names = [one.kind for one in parts]
    if names.count("prompt") < 2:
        return parts
    end = names.index("prompt")
    kept = [one for one in parts[:end] if one.kind != "user"]
    image = next(index for index, one in enumerate(kept) if one.kind == "image")
    return [*kept[:image], Part("user", (71, 32, 55)), *kept[image:], *parts[end:]]


def blank_after_user_headers(parts: Parts, _: Context) -> Parts:
    return [
        replace(one, ids=(*one.ids, 9)) if one.kind == "header" and USER in one.ids else one for one in parts
    ]


def fields_in_another_order(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Three tokens changed for the next three, as when JSON is read and written again."""
    return (*ids[:2], *ids[5:8], *ids[2:5], *ids[8:])


def spaced(ids: tuple[int, ...]) -> tuple[int, ...]:
    """A blank after each second token of the tools."""
    return (*ids, *(token for index, tool in enumerate(TOOLS) for token in (tool, 9)[: 1 + index % 2]))


def first_user_text_twice(parts: Parts, _: Context) -> Parts:
    first = next(index for index, one in enumerate(parts) if one.kind == "user")
    return [*parts[:first], parts[first], *parts[first:]]


def middle(*tokens: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Tokens in the middle of others."""
    return lambda ids: (*ids[: len(ids) // 2], *tokens, *ids[len(ids) // 2 :])


def calls_a_tool(ctx: Context) -> int | None:
    """The first completion has the two special tokens of a tool call."""
    return {2: CALL, 6: END_CALL}.get(len(ctx.drawn)) if ctx.turn == 0 else None


# --- images and videos ---


def first_images(seed: int) -> list[Image.Image]:
    """Images of a rollout, drawn again."""
    return [one.image for parts, _ in dialogue(seed) for one in parts if one.image is not None]


def images_of_others(world: World) -> dict[str, Image.Image]:
    """Images of all rollouts by the identity of their items."""
    return {world.item(image).identity: image for seed in range(COUNT) for image in first_images(seed)}


def resized_before(image: Image.Image, *_: Any) -> Image.Image:
    """Sides of whole 32 pixels before those of whole 28."""
    width, height = (round(side / 32) * 32 for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def linear_light(image: Image.Image, *_: Any) -> Image.Image:
    return image.point(lambda level: round(255 * (level / 255) ** 2.2))


def limited_range(image: Image.Image, *_: Any) -> Image.Image:
    return image.point(lambda level: round(16 + level * 219 / 255))


def centre(image: Image.Image, *_: Any) -> Image.Image:
    """Seven eighths of each side, enlarged again."""
    width, height = image.size
    box = (width / 16, height / 16, width * 15 / 16, height * 15 / 16)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=box)


def palette(image: Image.Image, *_: Any) -> Image.Image:
    return image.quantize(16).convert("RGB")


def hole(image: Image.Image) -> Image.Image:
    """An image with a transparent ellipse, whose colours a conversion to RGB shows again."""
    alpha = Image.new("L", image.size, 255)
    width, height = image.size
    ImageDraw.Draw(alpha).ellipse((width // 5, height // 4, width * 3 // 4, height * 3 // 4), fill=0)
    out = image.copy()
    out.putalpha(alpha)
    return out


def holes_seen(parts: Parts, ctx: Context) -> Parts:
    """The trainer's images are those with holes, white behind them."""
    for one in parts:
        if one.image is not None and id(one.image) not in ctx.world.items:
            ctx.world.items[id(one.image)] = ctx.world.tiny.process(hole(one.image))
            ctx.world.pictures.append(one.image)
    return parts


def with_holes(world: World, _: Sequence[Any]) -> dict[str, Any]:
    """The images as messages had them."""
    own = {name: hole(image) for name, image in world.sources.items()}
    return {"sources": images_of_others(world) | own}


def with_mark(image: Image.Image, *_: Any) -> Image.Image:
    """An image with a box and a number drawn by a harness."""
    out = image.copy()
    brush = ImageDraw.Draw(out)
    width, height = image.size
    brush.rectangle((width // 4, height // 3, width // 2, height * 2 // 3), outline="red", width=2)
    brush.text((width // 4 + 4, height // 3 + 4), "7", fill="red")
    return out


def profile_ignored(image: Image.Image, *_: Any) -> Image.Image:
    """Levels of Display P3 read as if they were of sRGB: less saturated."""
    to_p3 = np.array([[0.8225, 0.1774, 0.0], [0.0332, 0.9669, 0.0], [0.0171, 0.0724, 0.9108]])
    levels = np.asarray(image) / 255
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4) @ to_p3.T
    linear = linear.clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return Image.fromarray(np.uint8(np.round(encoded * 255)), "RGB")


def pixels(change: Callable[[Any], Any]) -> Hook:
    """Other values of the pixels."""

    def edit(inputs: dict[str, Any], _: Context) -> None:
        inputs["pixel_values"] = change(inputs["pixel_values"].clone())

    return edit


def tiles_by_columns(inputs: dict[str, Any], ctx: Context) -> None:
    """Tiles from top to bottom rather than from left to right; the whole image stays the last of an image's."""
    tiles = inputs["pixel_values"]
    image = first_images(ctx.seed)[0]
    count = ctx.world.tiny.process(image).grid[0]
    rows = 3 if image.height > image.width else (count - 1) // 3
    order = torch.arange(count - 1).reshape(rows, -1).T.flatten().tolist()
    starts = range(0, tiles.shape[1], count)
    inputs["pixel_values"] = tiles[:, [start + place for start in starts for place in (*order, count - 1)]]


def scenes_of(image: Image.Image) -> list[Image.Image]:
    """The twelve frames of a video that begins with an image."""
    rng = np.random.default_rng([13, image.width, image.height])
    scenes = [image, *(picture(rng, image.size) for _ in range(3))]
    return [Image.blend(scenes[at // 4], scenes[min(3, at // 4 + 1)], at % 4 / 4) for at in range(12)]


def film(world: World, image: Image.Image, chosen: Sequence[int], **fields: Any) -> Any:
    """The item of a video that begins with an image: of twelve frames the chosen ones, two a time step."""
    still, frames = world.tiny.process(image), scenes_of(image)
    planes = [world.tiny.process(frames[at]).frames[0] for at in chosen]
    steps = len(planes) // still.layout.temporal
    _, height, width = still.grid
    tokens = height * width // still.layout.merge**2
    mrope = world.tiny.family.mrope
    apart = mrope is not None and mrope.frames_apart
    repeat = msgspec.structs.replace(still.expansion[0], token="<|video_pad|>")
    frame = msgspec.structs.replace(repeat, count=tokens if apart else steps * tokens)
    name = repr((still.identity, tuple(chosen), fields)).encode()
    return msgspec.structs.replace(
        still,
        modality="video",
        identity=hashlib.sha256(name).hexdigest(),
        grid=(steps, height, width),
        frames=np.stack(planes),
        expansion=(Text("<0.5 seconds>"), frame) * steps if apart else (frame,),
        **fields,
    )


def filmed(trained: dict[str, Any], sampled: dict[str, Any]) -> Fault:
    """The first image of a rollout is a video, which sampler and trainer read in two ways."""

    def opening(parts: Parts) -> Image.Image:
        return next(one.image for one in parts if one.image is not None)

    def is_film(image: Image.Image, world: World) -> bool:
        return getattr(world.items.get(id(image)), "modality", "image") == "video"

    def sees(parts: Parts, ctx: Context) -> Parts:
        image = opening(parts)
        if not is_film(image, ctx.world):
            ctx.world.items[id(image)] = film(ctx.world, image, **trained)
            ctx.world.pictures.append(image)
        return parts

    def shows(image: Image.Image, _: int, ctx: Context) -> Image.Image:
        if not is_film(image, ctx.world):
            return image
        other = image.copy()
        ctx.world.items[id(other)] = film(ctx.world, image, **sampled)
        ctx.world.pictures.append(other)
        return other

    def options(world: World, _: Sequence[Any]) -> dict[str, Any]:
        films = [one for one in world.pictures if is_film(one, world)]
        videos = {world.items[id(one)].identity: tuple(scenes_of(one)) for one in films}
        return {"sources": images_of_others(world) | videos}

    return Fault(sees=sees, shows=shows, options=options)


# --- positions ---


def flat(inputs: dict[str, Any], _: Context) -> None:
    """Positions by index on all three axes."""
    known = inputs["position_ids"]
    inputs["position_ids"] = torch.arange(known.shape[-1]).expand_as(known).clone()


def stale_delta(inputs: dict[str, Any], ctx: Context) -> None:
    """The second completion is placed by the first prompt's distance of position and index."""
    if ctx.turn == 0:
        return
    known = inputs["position_ids"].clone()
    first = int((inputs["input_ids"][0] == ANSWER).nonzero()[0])
    start = len(ctx.prompt)
    places = torch.arange(start, known.shape[-1])
    known[..., start:] = places + int(known[0, 0, first]) - first
    inputs["position_ids"] = known


# --- the model ---


def each_parameter(change: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    def edit(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(change(name, parameter))
        return model

    return edit


def whole_attention_in_tower(model: Any) -> Any:
    tower = model.model.visual
    tower.fullatt_block_indexes = list(range(len(tower.blocks)))
    return model


def without_language_biases(name: str, value: Any) -> Any:
    own = "language_model" in name and name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
    return torch.zeros_like(value) if own else value


def time_steps_as_new(name: str, value: Any) -> Any:
    return torch.ones_like(value) if name.endswith("dt_bias") else value


def norms_without_one(name: str, value: Any) -> Any:
    return value - 1 if "language_model" in name and "norm" in name else value


def convolution_state_lost(model: Any) -> Any:
    """The convolutions of linear attention begin to decode with zeros rather than with the prompt's end."""

    def forget(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        if out.shape[1] > 1:
            for state in kwargs["cache_params"].layers[module.layer_idx].conv_states.values():
                state.zero_()
        return out

    for name, module in model.named_modules():
        if name.endswith("linear_attn"):
            module.register_forward_hook(forget, with_kwargs=True)
    return model


def window(size: int) -> Callable[[Any], Any]:
    def edit(model: Any) -> Any:
        model.config.text_config.sliding_window = size
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = size
        return model

    return edit


def quick_gelu(model: Any) -> Any:
    """The tower has the sigmoid's approximation of GELU, as CLIP has."""
    from transformers.activations import ACT2FN

    for name, module in model.named_modules():
        if "vision_tower" in name and hasattr(module, "activation_fn"):
            module.activation_fn = ACT2FN["quick_gelu"]
    return model


def embeddings_unscaled(model: Any) -> Any:
    """Embeddings of text without the square root of their size."""
    model.get_input_embeddings().embed_scale.fill_(1)
    return model


def in_fp8(values: Any) -> Any:
    """Values of e4m3 with a scale for each row, as quantized on the fly."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def fp8_matmuls(model: Any) -> Any:
    """Weights and inputs of the language model's layers in fp8."""
    for name, module in model.named_modules():
        if "language_model.layers" in name and isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.weight.copy_(in_fp8(module.weight))
            module.register_forward_pre_hook(lambda _, args: (in_fp8(args[0]), *args[1:]))
    return model


def shuffled_by_columns(model: Any) -> Any:
    """Features of a square of patches are joined from top to bottom first."""
    connector = model.model.connector
    plain = connector.pixel_shuffle

    def shuffle(features: Any, scale: int = 2) -> Any:
        joined = plain(features, scale)
        parts = joined.unflatten(-1, (scale, scale, features.shape[-1]))
        return parts.transpose(2, 3).flatten(2)

    connector.pixel_shuffle = shuffle
    return model


def left_in_training(model: Any) -> Any:
    """Attention drops a tenth of its weights, as when a model generates in train mode."""
    for module in model.model.text_model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
            module.train()
    return model


def seeded(_: dict[str, Any], ctx: Context) -> None:
    torch.manual_seed(1000 * ctx.seed + 100 * ctx.turn + len(ctx.drawn))


def own_document_only(inputs: dict[str, Any], ctx: Context) -> None:
    """No token of the second turn attends to the first turn: documents end at stop tokens."""
    if ctx.turn == 0:
        return
    ids = inputs["input_ids"][0, : len(ctx.prompt)]
    stops = (ids == STOP).nonzero().flatten()
    # The last but one stop token ends the first completion: the last one ends the user's message.
    mask = inputs["attention_mask"].clone()
    mask[:, : int(stops[-2]) + 1] = 0
    inputs["attention_mask"] = mask


# --- sampling ---


def best(logits: Any, count: int) -> Any:
    return logits.masked_fill(logits < logits.topk(count).values[-1], -torch.inf)


def repeated(penalty: float, logits: Any, ctx: Context) -> Any:
    """A penalty on all tokens of prompt and completion, as in Hugging Face's and vLLM's `repetition_penalty`."""
    seen = sorted({*ctx.prompt, *ctx.drawn})
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def banned(*tokens: int) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, _: Context) -> Any:
        logits[list(tokens)] = -torch.inf
        return logits

    return rule


def typical(share: float, logits: Any) -> Any:
    """Locally typical tokens that hold `share` of the probability."""
    logs = logits.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum()
    order = (-logs - entropy).abs().argsort()
    held = logs[order].exp().cumsum(-1)
    count = int((held < share).sum()) + 1
    out = torch.full_like(logits, -torch.inf)
    out[order[:count]] = logits[order[:count]]
    return out


def stop_boosted(logits: Any, ctx: Context) -> Any:
    """After five tokens the stop token's logit grows, as by `exponential_decay_length_penalty`."""
    more = max(0, len(ctx.drawn) - 5)
    logits[STOP] += abs(logits[STOP]) * (1.1**more - 1)
    return logits


def with_entropy(logits: Any, ctx: Context) -> Any:
    """Logits as they are, whose entropy is kept."""
    logs = logits.log_softmax(-1)
    vars(ctx).setdefault("expected", []).append(float((logs.exp() * logs).sum()))
    return logits


# --- recording ---


def turns(values: Any, ctx: Context) -> list[Any]:
    """Numbers of each turn."""
    return np.split(values, np.cumsum(ctx.lengths)[:-1])


def first_turn_again(values: Any, ctx: Context) -> Any:
    first, second = turns(values, ctx)
    return np.concatenate([first, np.resize(first, len(second))])


def by_turn(change: Callable[[Any], Any]) -> Callable[[Any, Context], Any]:
    return lambda values, ctx: np.concatenate([change(one) for one in turns(values, ctx)])


def merged_bytes(values: Any) -> Any:
    """The numbers of two tokens of one letter are added up at the first one."""
    out = values.copy()
    for place in (3, 7):
        out[place : place + 2] = values[place : place + 2].sum(), 0
    return out


def out_of_order(values: Any) -> Any:
    """The second chunk of four arrives before the first one."""
    return np.concatenate([values[4:8], values[:4], values[8:]])


TOOLS = (60, 11, 47, 5, 23, 52, 8, 70, 19, 33, 6, 44)
STRIDE, SPREAD = (0, 2, 4, 6), (0, 4, 7, 11)
# fmt: off
FOURTH = (
    # qwen2_5_vl
    case("tools-spaced", "qwen2_5_vl", PROMPT, "The tool definitions in the sampler's system block have blanks that the trainer's lack.", "separators of tojson in Hugging Face's templates and of json.dumps in engines",
         "unknown", r"tool|json|blank|space|separator|system|encoded|(more|extra) .*tokens?|tokens? more", Fault(sees=edited("system", spaced), trains=edited("system", lambda ids: ids + TOOLS)), wrong=r"reasoning|truncat|\bdate\b|generation prompt"),
    case("reminder", "qwen2_5_vl", PROMPT, "The sampler's last user message ends with five tokens more.", "agent harnesses that inject a reminder into the prompt and do not store it",
         "text added to the last user message", r"(more|added|extra|another|further|appended) .*tokens?|tokens? (more|that the trainer)|user|message|reminder|5 tokens?", Fault(sees=reminded), wrong=r"reasoning|truncat|generation prompt|image"),
    case("stop-left-out", "qwen2_5_vl", PROMPT, "The sampler's second prompt lacks the stop token of the first completion.", "gateways that rebuild history from text, which vLLM returns without its stop string",
         "the stop token left out of history", r"stop|eos|end of (turn|text)|lack.*1 token|1 token (less|fewer)", Fault(sees=without("stop")), wrong=r"reasoning|truncat|generation prompt"),
    case("call-written-again", "qwen2_5_vl", PROMPT, "In the sampler's second prompt six tokens of the first completion are in another order.", "tool calls that are parsed and dumped again with sorted keys",
         "the completion rewritten in history", r"order|written again|rewrit|re-?seriali|pars|history|earlier completion|first completion|(encoded|tokeni[sz]ed) again|re-?(tokeni|encod)|differ", Fault(sees=edited("out", fields_in_another_order)), wrong=r"truncat|reasoning|same text"),
    case("resized-before", "qwen2_5_vl", "pixels", "The sampler's images were resized to multiples of 32 before they were resized again.", "qwen-vl-utils with the factor of another family, in front of the processor",
         "unknown", r"resiz|resampl|twice|smaller|size|blur|detail|resolution", Fault(shows=resized_before), wrong=r"BGR|gamma|bits|CLIP"),
    case("marks-drawn", "qwen2_5_vl", "pixels", "The sampler's images have a red box and a number.", "agent harnesses that draw marks on a screenshot, and store it as it was",
         "unknown", r"mark|drawn|region|patch(es)? \d|local|part of", Fault(shows=with_mark), wrong=r"BGR|resampl|gamma|bits|levels|CLIP|jpeg|crop"),
    case("profile-ignored", "qwen2_5_vl", "pixels", "The sampler reads the colours of Display P3 as those of sRGB.", "ICC profiles of photographs, which Pillow keeps and does not apply",
         "unknown", r"icc|profile|colou?r|satur|matrix|channel", Fault(shows=profile_ignored), wrong=r"BGR|resampl|gamma|bits|CLIP|jpeg|gr[ea]y"),
    case("frames-by-stride", "qwen2_5_vl", "pixels", "Of a video the sampler has each second frame from the start, the trainer four frames spread over all of it.", "num_frames of vLLM's media_io_kwargs beside fps of qwen-vl-utils",
         "other frames of the video", r"frame|video|fps|stride|sampled", filmed({"chosen": SPREAD}, {"chosen": STRIDE}), wrong=r"BGR|resampl|position"),
    case("seconds-as-one", "qwen2_5_vl", "positions", "The time steps of a video are a second long for the sampler, and two seconds for the trainer.", "second_per_grid_ts missing from the inputs, which stands for 1.0",
         "another duration of a video's time steps", r"second|fps|time|duration|temporal|video", filmed({"chosen": (0, 2, 3, 5, 6, 8, 9, 11), "second_per_grid": 2.0}, {"chosen": (0, 2, 3, 5, 6, 8, 9, 11), "second_per_grid": 1.0})),
    case("frequencies-in-bf16", "qwen2_5_vl", ROTARY, "The sampler's inverse frequencies of rotary embeddings are rounded to bfloat16.", "model.to(bfloat16) casts the buffer inv_freq",
         "rotary frequencies rounded to bfloat16", r"bf16|bfloat16|inv_freq|frequenc|rotary|rope|round", Fault(sampler=frequencies(lambda values: values.bfloat16().float())), wrong=r"theta|linear|yarn|scaling|base \d"),
    case("tower-without-windows", "qwen2_5_vl", SEEN, "All blocks of the sampler's vision tower attend to the whole image rather than to windows.", "fullatt_block_indexes lost in a converted configuration",
         "the tower's windows left out", r"window|fullatt|full attention|vision (tower|attention|config)", Fault(sampler=whole_attention_in_tower), wrong=r"sliding"),
    case("biases-not-loaded", "qwen2_5_vl", "model", "The sampler's attention has no biases: they are zero.", "a weight update that skips biases which the engine has fused into qkv_proj.bias",
         "attention biases that were not loaded", r"bias|not loaded|(q|k|v|qkv)_proj|self_attn|part(ial|ly|s)|missing weights|zero", Fault(sampler=each_parameter(without_language_biases)), wrong=r"logit_bias|step 4|quanti"),
    case("top-k-20", "qwen2_5_vl", "sampling", "The sampler draws among the twenty most probable tokens, and reports their renormalized log-probabilities.", "top_k=20 in Qwen's generation_config.json with logprobs_mode=processed_logprobs",
         "top-k of 20", r"top.?k|20 (most|best|largest)", Fault(rule=lambda logits, _: best(logits, 20)), wrong=r"top.?p|min.?p|temperature"),
    case("repetition-1.05", "qwen2_5_vl", "sampling", "A repetition penalty of 1.05 on the tokens of prompt and completion.", "repetition_penalty in Qwen2.5-VL's generation_config.json",
         "a repetition penalty of 1.05", r"repetition", Fault(rule=partial(repeated, 1.05)), wrong=r"presence|frequency penalty"),
    case("divided-by-length", "qwen2_5_vl", "recording", "Each number is divided by the completion's length.", "losses that normalize by length before numbers are stored",
         "numbers divided by the length of the completion", r"divid|length|number of tokens|factor|scaled|times|multipl|normali", Fault(record=by_turn(lambda values: values / len(values))), wrong=r"base|temperature|nats|bits"),
    # qwen3_5
    case("role-renamed", "qwen3_5", PROMPT, "The role of the answering side is another token in all of the sampler's generation prompts.", "a template of a fine-tune that writes `model` for `assistant`",
         "another role in the generation prompt", r"role|header|generation prompt|1 token|token \d+|differ", Fault(sees=edited("prompt", lambda ids: (ids[0], 45, *ids[2:]))), wrong=r"truncat|reasoning|again"),
    case("header-newline", "qwen3_5", PROMPT, "The sampler's headers end without a newline.", "trim_blocks of a template environment that is not Hugging Face's",
         "no newline after headers", r"newline|trim_blocks|header|blank|whitespace|lack|1 token", Fault(sees=without_newline_after_headers), wrong=r"truncat|reasoning|between turns"),
    case("system-in-last-user", "qwen3_5", PROMPT, "The sampler's template writes the system's text into the last user message.", "Mistral's templates, beside one with a system role",
         "the system block moved into the last user message", r"system|header|role|block|lack|moved|first message", Fault(sees=system_in_last_user), wrong=r"reasoning|truncat|\bdate\b|\bbos\b|generation prompt"),
    case("text-normalized", "qwen3_5", "tokens|template", "The sampler's tokenizer has no normalizer: some letters of user text are other tokens.", "GGUF conversions and tokenizer.json files without their NFC normalizer",
         "unknown", r"normali|user|message|tokens?.*differ|(other|different) token", Fault(sees=edited("user", lambda ids: tuple(one - 17 if one > 30 else one for one in ids))), wrong=r"truncat|reasoning"),
    case("special-lost", "qwen3_5", PROMPT, "The sampler's second prompt lacks the special tokens of the first completion's tool call.", "history rebuilt from text with skip_special_tokens=true",
         "special tokens lost from history", r"special|skip|tool.?call|again|lack|left out|missing|dropped|rewrit", Fault(draw=calls_a_tool, sees=edited("out", lambda ids: tuple(one for one in ids if one not in (CALL, END_CALL)))), wrong=r"truncat|\bbos\b"),
    case("inverted", "qwen3_5", "pixels", "The sampler's images are negatives.", "JPEG files of CMYK with Adobe's inverted levels",
         "inverted colours", r"invert|negativ|cmyk|sign", Fault(shows=lambda image, *_: ImageOps.invert(image)), wrong=r"BGR|bits|CLIP|jpeg|crop"),
    case("limited-range", "qwen3_5", "pixels", "The sampler's levels run from 16 to 235.", "video and JPEG decoders that leave the range of television",
         "levels of limited range", r"limited|range|16|235|contrast|linear|affine|gain|mean|std|normali|rescal", Fault(shows=limited_range), wrong=r"BGR|gamma|CLIP|bits"),
    case("centre-crop", "qwen3_5", "pixels", "The sampler's images are cropped to their middle.", "do_center_crop of CLIP's image processor",
         "images cropped to their centre", r"crop|centre|center|zoom|border|edges?", Fault(shows=centre), wrong=r"BGR|rotat"),
    case("half-the-frames", "qwen3_5", "pixels|tokens", "Of a video the sampler has two frames, the trainer four.", "fps of vLLM's media_io_kwargs beside do_sample_frames of the processor",
         "fewer frames of a video", r"frame|video|fps|fewer|time steps?", filmed({"chosen": SPREAD}, {"chosen": (0, 11)}), wrong=r"truncat|reasoning"),
    case("stale-delta", "qwen3_5", "positions", "The tokens of the sampler's second completion are placed by the distance of position and index of the first prompt.", "rope_deltas that a model keeps between calls of generate",
         "a stale rope delta in decoding", r"delta|(completion|decod|answer)\w*.*(position|offset|shift|index|later|late|earlier|early)|(position|offset|shift).*(completion|decod|answer)", Fault(inputs=stale_delta), wrong=r"padding|theta|scaling"),
    case("flat", "qwen3_5", "positions", "All positions are indices, images too.", "engines without M-RoPE for a new model",
         "positions by index rather than M-RoPE", r"m-?rope|flat|index|1-?D|one.dimension|one axis|one by one|text positions|consecutive|plain", Fault(inputs=flat), wrong=r"padding|theta|scaling"),
    case("convolution-state-lost", "qwen3_5", "model", "The convolutions of linear attention begin each completion with zeros.", "an engine that hands the recurrent state from prefill to decoding, and forgets conv_state",
         "unknown", r"state|cache|recurrent|conv|linear.attention|first (3|three) tokens|layer", Fault(sampler=convolution_state_lost), wrong=r"log.?prob|fp8|e4m3|temperature|step 4"),
    case("dt-bias-not-loaded", "qwen3_5", "model", "The sampler's time steps of linear attention are those of a new model.", "load_weights that skips linear_attn.dt_bias",
         "unknown", r"dt_bias|linear_attn|linear attention|layer|weights|loaded", Fault(sampler=each_parameter(time_steps_as_new)), wrong=r"step 4|quanti|temperature"),
    case("bad-words", "qwen3_5", "sampling", "Eight tokens can not be drawn.", "bad_words of vLLM's SamplingParams and suppress_tokens of a generation configuration",
         "tokens banned from the draw", r"bann|bad.?word|suppress|never|exclu|left out|mask|allow|vocab|subset|renormali|logit_bias", Fault(rule=banned(5, 17, 28, 36, 44, 52, 61, 70)), wrong=r"top.?p|top.?k|min.?p|temperature|penalty"),
    case("bytes-merged", "qwen3_5", "recording", "Twice in a completion the numbers of two tokens are added up at the first, and the second has zero.", "clients that align tokens by text, in which two tokens are one letter",
         "unknown", r"zero|sum|merge|add|0\b|align", Fault(record=by_turn(merged_bytes)), wrong=r"temperature|top.?p|top.?k|base|bf16|late|early"),
    # gemma3
    case("system-in-user", "gemma3", PROMPT, "The sampler's template puts the system's text in front of the first user message, without a block of its own.", "Gemma's template, beside one with a system role",
         "the system block written into the user's message", r"system|header|role|block|lack|first message|differ", Fault(sees=system_in_first_user), wrong=r"reasoning|truncat|\bdate\b|\bbos\b"),
    case("answer-begun", "gemma3", PROMPT, "The sampler's generation prompt ends with four tokens of an answer.", "continue_final_message and prefilled answers of an environment",
         "an answer begun in the generation prompt", r"prefill|prefix|generation prompt|begun|continue_final|4 tokens?|(before|in front of) .*(completion|answer)", Fault(sees=last_generation_prompt(25, 50, 14, 9)), wrong=r"reasoning|truncat|system"),
    case("another-bos", "gemma3", PROMPT, "The sampler's prompts begin with the stop token rather than with that of beginnings.", "bos_token_id that differs between config.json and tokenizer_config.json",
         "another BOS token", r"\bbos\b|begin|first token|token 0|differ|other token|special tokens|starts?", Fault(sees=edited("bos", lambda _: (STOP,))), wrong=r"truncat|reasoning|twice|second|history|again"),
    case("newline-escaped", "gemma3", "tokens|template", "A newline within user text is two tokens, a backslash and a letter, for the sampler.", "gateways that escape JSON twice",
         "unknown", r"newline|escap|user|message|again|(other|different) token|tokens?.*differ|more", Fault(trains=edited("user", middle(NEWLINE)), sees=edited("user", middle(33, 20))), wrong=r"truncat|reasoning"),
    case("rescaled-twice", "gemma3", "pixels", "The sampler's pixels are divided by 255 twice.", "do_rescale of the processor for images of floats between 0 and 1",
         "pixels rescaled twice", r"rescal|255|twice|black|dark|constant|scale", Fault(inputs=pixels(lambda values: (values + 1) / 255 - 1)), wrong=r"BGR|gamma|bits|CLIP"),
    case("palette-16", "gemma3", "pixels", "The sampler's images have sixteen colours.", "screenshots kept as GIF or as PNG with a palette",
         "images of few colours", r"palette|quanti|levels|bits|colou?rs|depth|gif|poster", Fault(shows=palette), wrong=r"BGR|gr[ea]y"),
    case("colours-below-holes", "gemma3", "pixels", "Transparent parts of images are white for the trainer. The sampler has the colours below.", "Pillow's convert('RGB'), beside rgba_background_color of vLLM's media_io_kwargs",
         "transparent parts not laid on white", r"alpha|transparen|white|background|composit|rgba", Fault(sees=holes_seen, shows=lambda image, *_: image.copy(), options=with_holes), wrong=r"BGR|gamma|bits"),
    case("linear-light", "gemma3", "pixels", "The sampler's levels are those of linear light (gamma 2.2).", "renderers and EXR readers that leave out the sRGB curve",
         "levels of linear light (gamma)", r"gamma|linear.light|curve|tone|srgb|power", Fault(shows=linear_light), wrong=r"BGR|bits|CLIP|another image|rescal"),
    case("window-23", "gemma3", "model", "The sampler's sliding window is one token shorter.", "sliding_window that counts the token itself in one library and not in another",
         "a sliding window one token shorter", r"window", Fault(sampler=window(23))),
    case("quick-gelu", "gemma3", SEEN, "The sampler's vision tower has CLIP's quick GELU.", "hidden_act=quick_gelu in a converted vision configuration",
         "another activation function in the tower", r"gelu|activation|hidden_act|tower|vision", Fault(sampler=quick_gelu), wrong=r"softcap|quanti|step 4|BGR|resampl"),
    case("norms-without-one", "gemma3", "model", "The sampler multiplies by a norm's weight rather than by one plus it.", "apply_layernorm_1p of Megatron and conversions to GGUF",
         "norms without their one", r"norm", Fault(sampler=each_parameter(norms_without_one)), wrong=r"normali[sz]ed (pixels|images)|q_norm|temperature"),
    case("fp8-matmuls", "gemma3", "model", "The sampler multiplies in fp8, weights and activations both.", "quantization=fp8 of vLLM without a calibrated checkpoint",
         "quantized weights and activations (fp8)", r"fp8|quanti|8.bits?|e4m3|precision|dtype", Fault(sampler=fp8_matmuls), wrong=r"kv.cache|log.?prob|temperature|step 4"),
    case("embeddings-unscaled", "gemma3", "model", "The sampler's embeddings of text are not multiplied by the root of their size.", "engines that pass inputs_embeds for prompts with images, beside Gemma's scaled embedding",
         "embeddings of text left unscaled", r"embed|normalizer|sqrt|root", Fault(sampler=embeddings_unscaled), wrong=r"temperature|quanti|step 4|lm_head|tied"),
    case("top-p-0.8", "gemma3", "sampling", "The sampler draws among the tokens that hold 0.8 of the probability.", "top_p of a generation configuration, which vLLM takes as its default",
         "top-p of 0.8", r"top.?p|nucleus", Fault(rule=lambda logits, _: nucleus(logits, 0.8)), wrong=r"top.?k|min.?p|temperature"),
    case("expected", "gemma3", "recording", "Each number is the expected log-probability (the negative entropy), not that of the drawn token.", "trainers that keep entropies beside log-probabilities, two of one shape",
         "unknown", r"entrop|expected|mean|average", Fault(rule=with_entropy, record=lambda _, ctx: np.array(vars(ctx)["expected"])), wrong=r"top.?p|top.?k|temperature|most probable"),
    # idefics3
    case("summary", "idefics3", PROMPT, "In the sampler's second prompt three tokens stand for the first message's texts.", "harnesses that compact the earlier conversation",
         "unknown", r"summar|compact|user|message|lack|fewer|cut|differ|history|rewrit|left out|missing", Fault(sees=first_texts_summarized), wrong=r"reasoning|\bbos\b|generation prompt|\bdate\b"),
    case("blank-after-header", "idefics3", PROMPT, "The sampler has a blank more after each user header.", "Idefics3's template, whose header depends on the type of the first part",
         "a blank after user headers", r"blank|space|header|(after|behind|follow\w*|before) .*(user|header|message)|1 token|one (more )?token|whitespace|user", Fault(sees=blank_after_user_headers), wrong=r"reasoning|truncat|generation prompt|\bbos\b"),
    case("text-twice", "idefics3", PROMPT, "The first text of the user comes twice in the sampler's prompts.", "retries of a client that append the message again",
         "a text of the user twice", r"twice|again|repeat|duplicat|more tokens|tokens more|user|message", Fault(sees=first_user_text_twice), wrong=r"reasoning|truncat|generation prompt|\bbos\b|encoded again"),
    case("stop-after-texts", "idefics3", "tokens|template", "The trainer has a stop token after each text of the user.", "add_eos_token=true of the tokenizer's configuration with texts encoded one by one",
         "a stop token after each text", r"stop|eos|end.of|special token|user|1 token|one token|lack|add_eos", Fault(trains=edited("user", lambda ids: (*ids, STOP))), wrong=r"reasoning|truncat|generation prompt|\bbos\b"),
    case("tiles-by-columns", "idefics3", "pixels", "The sampler has the tiles of images by columns.", "a fast image processor that unfolds width first",
         "tiles in another order", r"tile|order|column|transpos|split", Fault(inputs=tiles_by_columns), wrong=r"BGR|another image"),
    case("stop-boosted", "idefics3", "sampling", "The stop token grows more probable with each token after the fifth.", "exponential_decay_length_penalty of Hugging Face's generation",
         "unknown", r"stop|eos|length|decay|end.of", Fault(rule=stop_boosted), wrong=r"temperature|top.?p|top.?k|min_tokens|presence|repetition"),
    case("llama3-scaling", "idefics3", ROTARY, "The sampler scales rotary frequencies as Llama 3.1 does, the trainer does not.", "rope_scaling lost when a checkpoint was converted",
         "rotary embeddings scaled", r"llama|scal|rope|rotary|frequenc", Fault(sampler=frequencies(partial(llama3, 128))), wrong=r"yarn|padding|theta|base|linear"),
    case("shuffled-by-columns", "idefics3", SEEN, "The sampler's connector joins the features of neighbouring patches in another order.", "pixel shuffle written anew in an engine (InternVL's ps_version)",
         "unknown", r"shuffle|connector|projector|tower|features", Fault(sampler=shuffled_by_columns), wrong=r"BGR|resampl|quanti|step 4"),
    case("head-in-bf16", "idefics3", "model|sampling", "The sampler's logits are bfloat16.", "vLLM's and SGLang's language-model head, without enable_fp32_lm_head",
         "logits in bfloat16", r"bf16|bfloat16|head|precision|round|dtype", Fault(rule=lambda logits, _: logits.bfloat16().float()), wrong=r"temperature|fp8|cache|log.?probabilities? .*(round|decimal)"),
    case("documents-apart", "idefics3", "model|tokens|template", "The sampler's second turn does not attend to the first.", "--reset-attention-mask and packing that ends documents at stop tokens",
         "no attention to the earlier turn", r"attend|attention|mask|document|truncat|cut|earlier|context|first turn|not seen|lack|left out", Fault(inputs=own_document_only), wrong=r"temperature|quanti|reasoning"),
    case("in-train-mode", "idefics3", "model", "The sampler drops a tenth of its attention weights at random.", "generate() of Hugging Face within a trainer's step, with model.train() and attention_dropout",
         "dropout while sampling", r"drop.?out|random|nois|train mode|determinis|model\.train", Fault(sampler=left_in_training, inputs=seeded), wrong=r"temperature|quanti|fp8|step 4"),
    case("typical-0.9", "idefics3", "sampling", "The sampler draws among locally typical tokens.", "typical_p of Hugging Face's and TGI's generation",
         "unknown", r"typical|mask|renormali|subset|allow", Fault(rule=lambda logits, _: typical(0.9, logits)), wrong=r"top.?k|temperature|penalty"),
    case("chunks-out-of-order", "idefics3", "recording", "The second chunk of four numbers stands before the first.", "streams whose chunks are joined as they arrive",
         "chunks of numbers in another order", r"order|swap|exchang|chunk|permut|shuffl|(4|four) tokens?|position", Fault(record=by_turn(out_of_order)), wrong=r"base|late|early|revers"),
    case("mean-of-the-turn", "idefics3", "recording", "Each number is the mean of the completion's.", "sequence log-probabilities divided by the length, spread over tokens",
         "the mean of a completion recorded for each token", r"mean|average|constant|same number|equal|one number", Fault(record=by_turn(lambda values: np.full_like(values, values.mean())))),
    case("first-turn-again", "idefics3", "recording", "The second completion has the numbers of the first.", "a buffer of log-probabilities that is not emptied between turns",
         "numbers of another completion", r"(another|other|first|wrong|earlier|previous) (completion|turn|answer)|completion \d has .*completion \d|swap|exchang|again|repeat|buffer|peer|rollout", Fault(record=first_turn_again)),
)  # fmt: skip
