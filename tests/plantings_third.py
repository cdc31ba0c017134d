"""A third table: sixty faults of engines, servers, processor files, tokenizers, templates and trainers, and ten pairs.

Its author knew the two former tables, and none of the audit's rows. `audit_plantings.py third --check` shows that
each fault changes the recorded numbers.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import BOS, OPENER, PAIRS, STOP
from mmrender.trajectory.sample import TrainingSample
from planting import (
    COUNT,
    NEWLINE,
    SYSTEM,
    USER,
    Context,
    Fault,
    Part,
    Parts,
    Planting,
    World,
    dialogue,
)
from planting_faults import (
    CLIP_MEAN,
    CLIP_STD,
    adapted,
    as_jpeg,
    cache_as,
    completion_shifted,
    cut_front,
    earlier,
    edited,
    frequencies,
    inserted,
    kept_steps,
    min_p,
    normalised,
    nucleus,
    numbered_as_text,
    on_channels,
    per_turn,
    repetition,
    resampled,
    rotary,
    rounded,
    target_size,
    top_k,
    trained_further,
    weights_of,
    without,
)
from training_cases import IMAGE_ID, PAD_ID

TOOL, THINK, END_THINK, UNKNOWN = 85, 84, 86, 87

# --- conversations ---


def completed(parts: Parts) -> list[int]:
    """Places of the completions before the present one."""
    return [index for index, part in enumerate(parts) if part.kind == "out"][:-1]


def history(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Parts, Context], Parts]:
    """Earlier completions with other tokens."""

    def edit(parts: Parts, _: Context) -> Parts:
        earlier_outs = completed(parts)
        return [
            replace(one, ids=change(one.ids)) if index in earlier_outs else one
            for index, one in enumerate(parts)
        ]

    return edit


def second_system_block(parts: Parts, _: Context) -> Parts:
    """The template's own system prompt before the caller's."""
    block = [
        Part("header", (OPENER, SYSTEM, NEWLINE)),
        Part("system", (8, 9, 13, 21, 34, 5)),
        Part("close", (STOP, NEWLINE)),
    ]
    return [*parts[:1], *block, *parts[1:]]


def numbered_images(parts: Parts, _: Context) -> Parts:
    """A word and a number before each image."""
    out: list[Part] = []
    count = 0
    for part in parts:
        if part.image is not None:
            count += 1
            out.append(Part("number", (20, 10 + count)))
        out.append(part)
    return out


def second_user_as_tool(parts: Parts, _: Context) -> Parts:
    """The second message of the user with the header of a tool."""
    headers = [index for index, part in enumerate(parts) if part.ids == (OPENER, USER, NEWLINE)]
    return [
        replace(one, ids=(OPENER, TOOL, NEWLINE)) if index in headers[1:] else one
        for index, one in enumerate(parts)
    ]


def empty_thoughts_in_history(parts: Parts, _: Context) -> Parts:
    out = list(parts)
    for index in reversed(completed(parts)):
        out.insert(index, Part("thought", (THINK, NEWLINE, END_THINK, NEWLINE)))
    return out


def before_closers(parts: Parts, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Parts:
    """The last text of each user message with other tokens."""
    closing = [*[part.kind == "close" for part in parts[1:]], False]
    return [
        replace(one, ids=change(one.ids)) if one.kind == "user" and last else one
        for one, last in zip(parts, closing, strict=True)
    ]


def last_texts(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Parts, Context], Parts]:
    return lambda parts, _: before_closers(parts, change)


def within(ids: tuple[int, ...], inside: Sequence[int]) -> tuple[int, ...]:
    """Tokens with others after their second."""
    return (*ids[:2], *inside, *ids[2:])


def first_image_again(parts: Parts, _: Context) -> Parts:
    """The first image at the front of each later user message."""
    image = next(part for part in parts if part.image is not None)
    headers = [index for index, part in enumerate(parts) if part.ids == (OPENER, USER, NEWLINE)]
    out: list[Part] = []
    for index, part in enumerate(parts):
        out.append(part)
        if index in headers[1:]:
            out.append(image)
    return out


def first_turn_left_out(parts: Parts, _: Context) -> Parts:
    """System prompt and the newest message alone."""
    places = completed(parts)
    return [*parts[:4], *parts[places[-1] + 3 :]] if places else parts


def unknown_token(sample: TrainingSample, _: Context) -> TrainingSample:
    """The sixth sampled token of the sample replaced."""
    ids = sample.token_ids.copy()
    ids[np.flatnonzero(sample.loss_mask)[5]] = UNKNOWN
    return replace(sample, token_ids=ids)


# --- pictures and pixels ---


def without_antialias(image: Image.Image, _: int, ctx: Context) -> Image.Image:
    """Resized as `torch.nn.functional.interpolate` does if it is not told otherwise."""
    width, height = target_size(ctx.world, image)
    levels = torch.from_numpy(np.array(image)).movedim(-1, 0)[None].float()
    small = torch.nn.functional.interpolate(levels, (height, width), mode="bilinear", antialias=False)
    return Image.fromarray(small[0].round().clamp(0, 255).byte().movedim(0, -1).numpy())


def one_tile(image: Image.Image, *_: Any) -> Image.Image:
    return image.resize((28, 28), Image.Resampling.BICUBIC)


def of_next_rollout(image: Image.Image, number: int, ctx: Context) -> Image.Image:
    """The picture of the same number in the next rollout."""
    turns = dialogue((ctx.seed + 1) % COUNT)
    pictures = [part.image for parts, _ in turns for part in parts if part.image is not None]
    return pictures[number % len(pictures)]


def patches_by_rows(inputs: dict[str, Any], _: Context) -> None:
    """Patches in rows of the whole image; the model expects the four of a token together."""
    out, start = [], 0
    for frames, height, width in inputs["image_grid_thw"].tolist():
        count = frames * height * width
        places = torch.arange(count).reshape(frames, height // 2, 2, width // 2, 2)
        together = places.permute(0, 1, 3, 2, 4).reshape(-1)
        own = inputs["pixel_values"][start : start + count]
        out.append(own[together.argsort()])
        start += count
    inputs["pixel_values"] = torch.cat(out)


def second_frame_empty(pixels: Any) -> Any:
    """A still image is one frame and a black one, rather than the same frame twice."""
    frames = pixels.reshape(len(pixels), 3, 2, -1)
    frames[:, :, 1] = -1.0
    return frames


# --- positions ---


def images_at_one_position(inputs: dict[str, Any], _: Context) -> None:
    """All tokens of an image have one position, and the text after goes on by one."""
    ids = inputs["input_ids"][0]
    positions = inputs["position_ids"].clone()
    pads = ids == IMAGE_ID
    again = torch.zeros_like(pads)
    again[1:] = pads[1:] & pads[:-1]
    positions[..., :] = positions[..., :1] + torch.arange(len(ids)) - again.cumsum(0)
    inputs["position_ids"] = positions


def second_chunk_by_index(size: int) -> Callable[[dict[str, Any], Context], None]:
    """From a chunk's boundary on, tokens of the prompt are numbered by index on all axes."""

    def edit(inputs: dict[str, Any], ctx: Context) -> None:
        positions = inputs["position_ids"].clone()
        stop = len(ctx.prompt)
        if stop > size:
            positions[..., size:stop] = torch.arange(size, stop)
        inputs["position_ids"] = positions

    return edit


def yarn(factor: float) -> Callable[[Any], Any]:
    """Rotary embeddings of YaRN, with the scale of attention that belongs to them."""

    def edit(model: Any) -> Any:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        for module in rotary(model):
            config = deepcopy(module.config)
            config.rope_parameters = {
                **config.rope_parameters,
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
            module.inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        return model

    return edit


def sections(*lengths: int) -> Callable[[Any], Any]:
    """Other numbers of frequencies for time, height and width."""

    def edit(model: Any) -> Any:
        for module in rotary(model):
            module.mrope_section = list(lengths)
        return model

    return edit


def half_rotated(model: Any) -> Any:
    """Half of each head is rotated, as `partial_rotary_factor` 0.5 says."""
    for module in rotary(model):
        count = len(module.inv_freq) // 2
        module.inv_freq = 1e4 ** -(torch.arange(count) / count)
        module.mrope_section = [length // 2 for length in module.mrope_section]
    return model


def neighbours_rotated(model: Any) -> Any:
    """Dimensions 2i and 2i + 1 of a head are rotated together, rather than i and i + 8."""
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and ("q_proj" in name or "k_proj" in name):
                heads = parameter.reshape(-1, 16, *parameter.shape[1:])
                parameter.copy_(heads[:, order].reshape(parameter.shape))
    return model


def global_base_everywhere(model: Any) -> Any:
    """Layers with a sliding window have the rotary base of the other layers."""
    for module in model.modules():
        if hasattr(module, "sliding_attention_inv_freq"):
            module.sliding_attention_inv_freq = module.full_attention_inv_freq.clone()
    return model


# --- weights ---


def each_weight(change: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """All parameters changed, by their names."""

    def edit(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(change(name, parameter.clone()))
        return model

    return edit


def four_bits(name: str, weight: Any) -> Any:
    """Linear layers in 16 levels between the least and greatest weight of each 16 inputs."""
    if weight.ndim != 2 or "embed" in name or "lm_head" in name or weight.shape[1] % 16:
        return weight
    groups = weight.reshape(len(weight), -1, 16)
    least = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - least) / 15
    return (((groups - least) / step).round() * step + least).reshape(weight.shape)


def step_ahead(model: Any) -> Any:
    return trained_further(model, 0.02, 43)


def kept_neighbours(world: World, _: Any) -> dict[str, Any]:
    """Weights of the step before and of the step after."""
    steps = {"step 41": earlier(), "step 43": step_ahead}
    return {"weights": {name: weights_of(edit(deepcopy(world.model))) for name, edit in steps.items()}}


def halfway_to_step_41(model: Any) -> Any:
    """The mean of the weights of step 41 and of the trainer's."""
    old = dict(earlier()(deepcopy(model)).named_parameters())
    return each_weight(lambda name, weight: (weight + old[name]) / 2)(model)


def adapted_everywhere(model: Any) -> Any:
    """An adapter on language model and vision tower."""
    return adapted(model, lambda name: name.endswith(("q_proj.weight", "v_proj.weight", "attn.qkv.weight")))


def tower_not_adapted(model: Any) -> Any:
    model.add_adapter_times(model, -1, "visual.")
    return model


def attention_by_head_size(model: Any) -> Any:
    """Attention is scaled by the size of a head rather than by `query_pre_attn_scalar`."""
    for name, module in model.named_modules():
        if "language_model" in name and hasattr(module, "scaling"):
            module.scaling = module.head_dim**-0.5
    return model


def features_scaled(model: Any) -> Any:
    """Features of images are multiplied as the embeddings of text are."""
    for name, module in model.named_modules():
        if name.endswith("multi_modal_projector"):
            module.register_forward_hook(lambda *call: call[-1] * 32**0.5)
    return model


def gate_and_up_swapped(name: str, weight: Any) -> Any:
    """Halves of the stacked projection in each other's place."""
    return weight.roll(len(weight) // 2, 0) if "gate_up_proj" in name else weight


def drafted(ctx: Context, inputs: dict[str, Any]) -> Any:
    """Two of three tokens are a draft model's, and so are their numbers."""
    model = ctx.world.sampler if len(ctx.drawn) % 3 else ctx.world.model
    with torch.inference_mode():
        return model(**inputs).logits[0, -1].float().clone()


# --- distributions ---


def frequency(penalty: float) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, ctx: Context) -> Any:
        for token in ctx.drawn:
            logits[token] -= penalty
        return logits

    return rule


def greedy(logits: Any, _: Context) -> Any:
    """All probability on the most probable letter."""
    out = torch.full_like(logits, -torch.inf)
    out[3 + int(logits[3:79].argmax())] = 0.0
    return out


def forced_after(count: int, token: int) -> Callable[[Any, Context], Any]:
    """A budget of thought: after `count` tokens only one token is allowed."""

    def rule(logits: Any, ctx: Context) -> Any:
        if len(ctx.drawn) == count:
            out = torch.full_like(logits, -torch.inf)
            out[token] = logits[token]
            return out
        return logits

    return rule


def no_pair_twice(logits: Any, ctx: Context) -> Any:
    """No token that has followed the last one already."""
    ids = [*ctx.prompt, *ctx.drawn]
    after = [second for first, second in pairwise(ids) if first == ids[-1]]
    logits[after] = -torch.inf
    return logits


# --- records ---


def late(values: Any) -> Any:
    """Each number one place later."""
    return np.append(values[:1], values[:-1])


def five_lost(values: Any) -> Any:
    return np.append(np.zeros(5), values[5:])


def first_stop_lost(values: Any, ctx: Context) -> Any:
    """The first completion's last number left out, and a zero at the end."""
    return np.append(np.delete(values, ctx.lengths[0] - 1), 0.0)


# --- two at once ---


def both(first: Fault, second: Fault) -> Fault:
    """One fault after the other. Neither has a forward pass, tokens or a trainer's model of its own."""
    chains: dict[str, Any] = {
        "sees": lambda parts, ctx: second.sees(first.sees(parts, ctx), ctx),
        "trains": lambda parts, ctx: second.trains(first.trains(parts, ctx), ctx),
        "shows": lambda image, number, ctx: second.shows(first.shows(image, number, ctx), number, ctx),
        "sampler": lambda model: second.sampler(first.sampler(model)),
        "rule": lambda logits, ctx: second.rule(first.rule(logits, ctx), ctx),
        "record": lambda values, ctx: second.record(first.record(values, ctx), ctx),
        "finish": lambda sample, ctx: second.finish(first.finish(sample, ctx), ctx),
        "options": lambda world, samples: {**first.options(world, samples), **second.options(world, samples)},
    }

    def inputs(values: dict[str, Any], ctx: Context) -> None:
        first.inputs(values, ctx)
        second.inputs(values, ctx)

    return Fault(inputs=inputs, **chains)


def cooled(temperature: float) -> Fault:
    return Fault(rule=lambda logits, _: logits / temperature)


STEP_41 = Fault(sampler=earlier(), options=kept_steps)
IN_BF16 = each_weight(lambda _, weight: weight.bfloat16().float())


def case(
    name: str,
    family: str,
    stage: str,
    truth: str,
    source: str,
    cause: str,
    keys: str,
    fault: Fault,
    *,
    wrong: str = "",
    remedy: str = "",
) -> Planting:
    """A row of the table.

    Args:
        cause: In plain words, or `"unknown"` if no audit is expected to name it.
        keys: Words of which a right name has one.
        wrong: Words that no right name has.
        remedy: Words of which a right remedy has one.
    """
    right = "(?i)" + keys
    return Planting(
        name,
        family,
        stage,
        truth,
        source,
        "?" + right if cause == "unknown" else right,
        fault,
        cause=cause,
        wrong=wrong and "(?i)" + wrong,
        remedy=remedy and "(?i)" + remedy,
    )


def pair(
    name: str,
    family: str,
    stage: str,
    cause: tuple[str, str],
    source: str,
    keys: tuple[str, str],
    faults: tuple[Fault, Fault],
    *,
    wrong: str = "",
) -> Planting:
    """Two causes at once, each with words for its own name."""
    return Planting(
        name,
        family,
        stage,
        f"Two at once: {cause[0]}, and {cause[1]}.",
        source,
        "(?i)" + keys[0],
        both(*faults),
        cause=" and ".join(cause),
        wrong=wrong and "(?i)" + wrong,
        second="(?i)" + keys[1],
        halves=faults,
    )


PROMPT = "template|tokens"
ROTARY = "positions|model"
# fmt: off
THIRD = (
    # template
    case("default-system-prompt", "qwen2_5_vl", PROMPT, "The sampler's prompt has a system block of its template before the caller's.", "Qwen2.5's template and gateways that add a default system prompt",
         "a system prompt more", r"system|(more|extra|added|another) .*token|tokens? (more|that the trainer)", Fault(sees=second_system_block), wrong=r"reasoning|truncat|\bdate\b", remedy=r"system|template"),
    case("picture-numbers", "qwen3_vl", PROMPT, "The sampler's template wrote a word and a number before each image.", "add_vision_id=true in vLLM's chat_template_kwargs",
         "a number before each image", r"vision_id|(before|in front of|ahead of) (each|every|all|the|an) (image|picture)|picture|number(s|ed) (the )?image", Fault(sees=numbered_images), wrong=r"reasoning|truncat|generation prompt", remedy=r"vision_id|template|kwargs"),
    case("newline-after-images", "internvl", PROMPT, "The sampler's prompt has a newline after each image.", "vLLM --chat-template-content-format string",
         "a newline after images", r"newline|(after|behind|follow\w*) (each|every|all|the|an) (image|picture)|content.format", Fault(sees=inserted("image", (NEWLINE,), first=False)), wrong=r"generation prompt|between turns", remedy=r"content|template|format"),
    case("tool-as-user", "glm4v", PROMPT, "The second user message has the header of a tool in the sampler's prompt: one token differs.", "Qwen's template writes tool results as the user's",
         "unknown", r"role|header|tool|token \d+.*(differ|other)|(differ|other).*token", Fault(sees=second_user_as_tool), wrong=r"reasoning|\bbos\b|stop token"),
    case("no-generation-prompt", "gemma3", PROMPT, "The sampler's prompts end without the generation prompt of three tokens.", "add_generation_prompt=false in vLLM's chat request",
         "the generation prompt left out", r"generation prompt|(lack|without|missing|left out).*last 3 token|3 tokens? .*before (all|each|every|the) (completion|answer)", Fault(sees=without("prompt")), wrong=r"last 1 token|reasoning", remedy=r"generation_prompt|template"),
    case("empty-thoughts-in-history", "qwen3_vl", PROMPT, "The sampler's second prompt has an empty thought of four tokens before the first completion.", "enable_thinking=false in vLLM's chat_template_kwargs",
         "an empty thought before earlier completions", r"think|thought|reasoning|4 token.*(before|in front of)|before .*(completion|answer)", Fault(sees=empty_thoughts_in_history), wrong=r"lacked|\bbos\b|truncat", remedy=r"think|reasoning|template"),
    case("text-trimmed", "qwen2_vl", PROMPT, "The trainer's user messages end with a newline, which the sampler's template stripped.", "`| trim` of Gemma's and Qwen3.5's templates",
         "user text trimmed", r"trim|strip|blank|newline|whitespace|(lack|without|missing|fewer).*(token|message)", Fault(trains=last_texts(lambda ids: (*ids, NEWLINE))), wrong=r"generation prompt|truncat|reasoning", remedy=r"trim|template|strip"),
    case("stop-doubled", "qwen2_5_vl", PROMPT, "The sampler's second prompt has the first completion's stop token twice.", "clients that keep the stop token in content (skip_special_tokens=false)",
         "the stop token twice", r"stop|twice|doubled|repeated|1 token more|one more token", Fault(sees=inserted("stop", (STOP,), first=False)), wrong=r"truncat|reasoning|\bbos\b", remedy=r"stop|special|template"),
    # tokens
    case("pairs-in-user-text", "glm4v", "tokens|template", "Within user text the trainer has one token for two letters, the sampler two tokens.", "fix_mistral_regex and tokenizer.json's pre_tokenizer",
         "the same text in other tokens", r"(encoded|tokeni[sz]ed) again|re-?(tokeni|encod)|same text|merge|(other|different) token(s|i)", Fault(sees=last_texts(lambda ids: within(ids, (7, 8))), trains=last_texts(lambda ids: within(ids, (PAIRS[4],)))), wrong=r"truncat|reasoning", remedy=r"tokeni[sz]er|ids|encod"),
    case("trainer-cut-in-front", "qwen3_vl", "tokens|template", "The trainer's prompt lacks its first eight tokens, which the sampler's had.", "verl's data.truncation=left with max_prompt_length",
         "the trainer's prompt was cut in front", r"truncat|cut|first 8|lack|(8|more) tokens? (more|in front)|begins? with|began with", Fault(trains=cut_front(8)), wrong=r"reasoning|lacked the last", remedy=r"trunc|max_prompt|length"),
    case("unknown-token", "internvl", "tokens|recording", "The sixth sampled token is another in the trainer's sample.", "convert_tokens_to_ids of a smaller tokenizer.json writes unk_token",
         "unknown", r"(token|id).*(replaced|another|other|differ|unknown|not the sampled)|unk\b", Fault(finish=unknown_token), wrong=r"stop token|truncat|reasoning"),
    case("pads-in-front", "gemma3", "tokens|template", "The sampler's prompt begins with three padding tokens that the model attends to.", "generate without attention_mask after tokenizer.padding_side=left",
         "padding in the prompt", r"\bpad|(3|three) (more )?tokens?|began with|begins with|in front", Fault(sees=lambda parts, _: [Part("pads", (PAD_ID,) * 3), *parts]), wrong=r"\bbos\b|one more token|truncat", remedy=r"pad|mask"),
    case("answer-cut-in-history", "qwen2_5_vl", "tokens|template", "The sampler's second prompt has the first eight tokens of the first completion.", "agents that cut old answers, such as context_management of Claude Code",
         "an earlier completion cut", r"(cut|truncat|lack|left out|short|dropped).*(completion|answer|turn|token)|(completion|answer|turn|token).*(cut|truncat|lack|left out|short|dropped)", Fault(sees=history(lambda ids: ids[:8])), wrong=r"lacked the first|lacked its first|reasoning", remedy=r"histor|cut|trunc|context|agent|bridge"),
    case("image-sent-again", "internvl", "tokens|template", "The sampler's second user message begins with the first image, which the trainer's lacks.", "smolagents repeats the task's picture with each step",
         "an image more in the prompt", r"image.*(more|again|repeat|add|extra|twice)|(more|again|repeat|add|extra|twice|another).*image", Fault(sees=first_image_again), wrong=r"resampl|swap|other's place", remedy=r"image|histor|agent|message"),
    case("first-turn-left-out", "glm4v", "tokens|template", "The sampler's second prompt has neither the first message nor its answer.", "browser-use sends system prompt and newest message alone",
         "earlier turns left out", r"(lack|left out|drop|without|missing|cut|truncat).*(turn|message|histor|completion|token|image)|(turn|message|histor).*(lack|left out|drop|without|missing|cut)", Fault(sees=first_turn_left_out), wrong=r"lacked its first 1 |first 1 token|\bbos\b", remedy=r"histor|context|trunc|agent|turn|bridge"),
    case("special-in-text", "qwen3_vl", "tokens|template", "A stop token that a user typed is one special token in the sampler's prompt, three tokens of text in the trainer's.", "split_special_tokens=false in tokenizer_config.json",
         "text encoded as a special token", r"special|syntax|typed|control|same text|(encoded|tokeni[sz]ed) (again|as)", Fault(sees=last_texts(lambda ids: within(ids, (STOP,))), trains=last_texts(lambda ids: within(ids, (9, 30, 12)))), wrong=r"truncat|reasoning|lacked its", remedy=r"special|tokeni[sz]er|content"),
    # pixels
    case("lanczos", "glm4v", "pixels", "The sampler's images were resized with Lanczos' filter.", "resample=1 in preprocessor_config.json",
         "another filter of resizing", r"lanczos|resampl|filter", Fault(shows=resampled(Image.Resampling.LANCZOS)), wrong=r"bilinear|nearest|jpe?g", remedy=r"resampl|filter|preprocessor"),
    case("no-antialias", "gemma3", "pixels", "The sampler's images were resized without smoothing first.", "torch.nn.functional.interpolate's antialias=False",
         "resized without antialiasing", r"antialias|aliasing|resampl|filter", Fault(shows=without_antialias), wrong=r"jpe?g|lanczos|bicubic|nearest", remedy=r"antialias|resampl|resiz|preprocessor|backend"),
    case("not-normalised", "glm4v", "pixels", "The sampler's pixels are from 0 to 1: mean and deviation were not applied.", "do_normalize=false in preprocessor_config.json",
         "not normalised", r"normali[sz]|mean|std|deviation", Fault(inputs=on_channels(lambda x: x * 0.5 + 0.5)), wrong=r"\bclip\b|imagenet|255 as", remedy=r"normali[sz]e|image_mean|image_std|preprocessor"),
    case("rotated-90", "qwen2_vl", "pixels|tokens", "The sampler's images lie on their side.", "EXIF orientation 6, which cv2.IMREAD_IGNORE_ORIENTATION ignores",
         "rotated", r"rotat|orient|exif|\b90\b|quarter|transpos", Fault(shows=lambda image, *_: image.transpose(Image.Transpose.ROTATE_90)), wrong=r"\b180\b|mirror", remedy=r"exif|orient|rotat"),
    case("one-tile", "internvl", "pixels|tokens", "The sampler's images are one tile each, the trainer's several.", "max_dynamic_patch=1 in vLLM's mm_processor_kwargs",
         "fewer tiles", r"tile|max_?(dynamic_)?patch|crop_to|fewer|smaller|size|resolution|number of pixels|tokens", Fault(shows=one_tile), wrong=r"reasoning|truncat|jpe?g", remedy=r"patch|tile|pixels|mm_processor_kwargs|preprocessor|size"),
    case("image-of-next-rollout", "gemma3", "pixels", "The sampler saw the next rollout's images.", "one multi_modal_uuids for two images in vLLM's mm cache",
         "images of another sample", r"(of|from|in) (an)?other (sample|rollout)|rollout-\d|image .*(of|from) |(an)?other image", Fault(shows=of_next_rollout), wrong=r"resampl|filter|black|swap", remedy=r"cache|hash|uuid|image|identity"),
    case("patches-by-rows", "qwen3_vl", "pixels", "The sampler's patches are in rows of the whole image rather than in groups of four.", "merge_size left out of a re-written Qwen2VLImageProcessor",
         "unknown", r"patch.*(order|group|row|merge)|(order|group|row|merge).*patch", Fault(inputs=patches_by_rows), wrong=r"resampl|jpe?g|mirror|rotat"),
    case("second-frame-empty", "glm4v", "pixels", "The sampler's still images have black as their second frame.", "temporal_patch_size=2 padded with zeros",
         "unknown", r"frame|temporal|second half", Fault(inputs=on_channels(second_frame_empty)), wrong=r"resampl|jpe?g|bgr"),
    # positions
    case("linear-scaling-2", "idefics3", ROTARY, "The sampler's positions are divided by two.", "vLLM --hf-overrides rope_scaling {rope_type: linear, factor: 2}",
         "rotary scaling", r"scal|factor|linear|half|divided|twice|rope|rotary|frequenc", Fault(sampler=frequencies(lambda freq: freq / 2)), wrong=r"theta|\bbase\b|yarn|padding", remedy=r"rope|rotary|scal"),
    case("yarn-4", "qwen2_5_vl", ROTARY, "The sampler has YaRN with factor 4, the trainer none.", "vLLM --hf-overrides rope_scaling {rope_type: yarn, factor: 4}, applied to short prompts as well",
         "rotary scaling", r"yarn|scal|rope|rotary|frequenc", Fault(sampler=yarn(4.0)), wrong=r"theta|\bbase\b|linear|padding", remedy=r"rope|rotary|scal|yarn"),
    case("padding-37", "internvl", "positions", "Positions of the sampler's completions are 37 higher: padding of the prompt was counted.", "position_ids by arange over a left-padded max_prompt_length",
         "a gap before completions", r"padding|(shift|higher|offset|gap|jump|37)|position.*later", Fault(inputs=completion_shifted(37)), wrong=r"theta|scal|rotary base", remedy=r"position|pad|mask"),
    case("completion-one-late", "qwen3_vl", "positions", "Positions of the sampler's completions are one higher.", "mrope_position_delta from the largest position plus two, as from a length that counts the next token",
         "completions one position higher", r"one (position )?(higher|more|later|too)|off by one|shift|\+ ?1\b|by 1\b|\b1 (higher|more|later)|gap", Fault(inputs=completion_shifted(1)), wrong=r"theta|lower|scal", remedy=r"position|delta|pad|mask"),
    case("mrope-section", "glm4v", ROTARY, "The sampler has two, three and three frequencies for time, height and width rather than four, two and two.", "mrope_section in config.json's rope_scaling, or its default",
         "other sections of M-RoPE", r"section|frequenc.*(axes|axis|time|height)|(axes|axis|time|height).*frequenc", Fault(sampler=sections(2, 3, 3)), wrong=r"swap|other's place|theta|interleav", remedy=r"section|rope"),
    case("images-at-one-position", "internvl", "positions", "All tokens of an image have one position in the sampler, and the text after goes on by one.", "CogVLM's build_position_ids; one position an image in a port",
         "unknown", r"(one|same|single|equal) position|share|image.*position", Fault(inputs=images_at_one_position), wrong=r"theta|padding|scal"),
    case("neighbours-rotated", "qwen2_5_vl", ROTARY, "The sampler rotates neighbouring dimensions of a head together rather than dimensions half a head apart.", "is_neox_style=False in vLLM's get_rope; conversion without permute",
         "unknown", r"neox|interleav|neighbour|permut|pairs? of dim|halves|adjacent", Fault(sampler=neighbours_rotated), wrong=r"theta|scal|step \d|fp8|bits"),
    case("half-rotated", "glm4v", ROTARY, "The sampler rotates half of each head's dimensions, the trainer all.", "partial_rotary_factor in config.json",
         "unknown", r"partial|half of|part of (each|the) head|rotary_dim", Fault(sampler=half_rotated), wrong=r"theta|linear|step \d|fp8|bits"),
    case("second-chunk-by-index", "qwen3_vl", "positions", "From token 40 on, the sampler's prompt is numbered by index on all axes: the second chunk of a prefill.", "--chunked-prefill-size of SGLang, --max-num-batched-tokens of vLLM",
         "unknown", r"chunk|from token|by index|index", Fault(inputs=second_chunk_by_index(40)), wrong=r"theta|padding|lower"),
    case("local-base", "gemma3", ROTARY, "The sampler's layers with a sliding window have the rotary base of the other layers.", "rope_local_base_freq in config.json, ignored",
         "unknown", r"local|sliding.*(base|theta|rotary)|(base|theta|rotary).*(sliding|window|layer)", Fault(sampler=global_base_everywhere), wrong=r"window (was )?(ignored|off)|step \d|fp8|bits|scal"),
    # model
    case("weights-in-bf16", "qwen3_vl", "model", "The sampler's weights were rounded to bfloat16; the trainer's are float32.", "vLLM --dtype bfloat16 beside float32 master weights",
         "weights in bfloat16", r"bf16|bfloat16|16[- ]bit|half precision|round", Fault(sampler=IN_BF16), wrong=r"fp8|float8|8[- ]bit|4[- ]bit|int\d|step \d|keys|cache", remedy=r"dtype|bf16|bfloat16|precision"),
    case("four-bit-weights", "qwen2_5_vl", "model", "The sampler's linear layers have weights of four bits in groups of 16.", "vLLM --quantization awq or gptq",
         "weights of four bits", r"\b4[- ]bit|int4|four bits|nf4|fp4|quanti[sz]|awq|gptq", Fault(sampler=each_weight(four_bits)), wrong=r"fp8|float8|8[- ]bit|bf16|bfloat16|keys|cache|step \d", remedy=r"quanti[sz]|bits|dtype"),
    case("layer-of-step-41", "glm4v", "model", "The sampler's second layer of the language model is of step 41, all else of the trainer's step.", "a bucket lost in update_weights_from_distributed of SGLang",
         "a layer of earlier weights", r"layer|layers\.1\b|step 41", Fault(sampler=earlier("language_model.layers.1."), options=kept_steps), wrong=r"\bhead\b|embed|visual|vision|fp8|bits|step 40", remedy=r"weight|update|sync|load"),
    case("one-step-ahead", "internvl", "model", "The sampler had the weights of step 43; the trainer is at step 42.", "asynchronous weight updates; --weight-version not recorded",
         "weights of step 43", r"step 43\b", Fault(sampler=step_ahead, options=kept_neighbours), wrong=r"step 4[012]\b|fp8|bits", remedy=r"weight|version|update|sync"),
    case("cache-in-e5m2", "qwen3_vl", "model", "The sampler's keys and values were rounded to float8 with five bits of exponent.", "vLLM --kv-cache-dtype fp8_e5m2",
         "a key-value cache of another dtype", r"kv|cache|keys", Fault(sampler=cache_as(torch.float8_e5m2)), wrong=r"weights (of|in|were)|e4m3|bf16|bfloat16|step \d", remedy=r"kv|cache|dtype"),
    case("tower-not-adapted", "qwen2_5_vl", "model", "The sampler left the adapter out of the vision tower.", "vLLM without --enable-tower-connector-lora",
         "unknown", r"(adapter|lora|visi|visual|tower).*", Fault(trainer=adapted_everywhere, sampler=tower_not_adapted), wrong=r"without the adapter|base model|adapter (was )?(left out|off|disabled)$|step \d|fp8|bits|jpe?g|resampl"),
    case("attention-scale", "gemma3", "model", "The sampler scaled attention by the size of a head rather than by query_pre_attn_scalar.", "query_pre_attn_scalar in config.json",
         "unknown", r"scal|query_pre|attention", Fault(sampler=attention_by_head_size), wrong=r"window|causal|both directions|step \d|fp8|bits"),
    case("features-scaled", "gemma3", "model", "The sampler multiplied features of images by the factor of text embeddings.", "get_input_embeddings of a port applies Gemma's normalizer after the merge",
         "unknown", r"scal|factor|feature|projector|multipl", Fault(sampler=features_scaled), wrong=r"window|resampl|bgr|jpe?g|step \d|fp8|bits"),
    case("gate-and-up-swapped", "glm4v", "model", "The sampler's stacked projections have gate and up in each other's place.", "packed_modules_mapping of vLLM, gate_up_proj loaded in the other order",
         "unknown", r"gate|up_proj|mlp|swap|order", Fault(sampler=each_weight(gate_and_up_swapped)), wrong=r"image|axes|step \d|fp8|bits|\bhead\b"),
    case("halfway-to-step-41", "internvl", "model", "The sampler's weights are the mean of step 41's and of the trainer's.", "an averaged copy (ema_decay) served in place of the newest weights",
         "unknown", r"(averag|mean|ema|interpolat|half).*|other weights|(other|earlier|older|stale|different) weights", Fault(sampler=halfway_to_step_41, options=kept_steps), wrong=r"\bof step 4[01]\b|fp8|bits|\bhead\b"),
    # sampling
    case("frequency-penalty-0.3", "gemma3", "sampling", "The sampler's log-probabilities are after a frequency penalty of 0.3.", "browser-use sends frequency_penalty 0.3",
         "a frequency penalty", r"frequency|penalt", Fault(rule=frequency(0.3)), wrong=r"presence|repetition|temperature|top[-_ ]?[kp]", remedy=r"frequency|penalt|logprobs_mode|raw"),
    case("second-turn-cooler", "internvl", "sampling", "The second turn's log-probabilities are at temperature 0.6.", "agents that send another temperature with some calls",
         "temperature 0.6 in one turn", r"temperature.*0\.6|0\.6.*temperature", Fault(rule=lambda logits, ctx: logits / 0.6 if ctx.turn else logits), wrong=r"top[-_ ]?[kp]|penalt", remedy=r"temperature"),
    case("temperature-0.97", "qwen3_vl", "sampling", "The sampler's log-probabilities are at temperature 0.97.", "temperature in generation_config.json, with SGLang's log-probabilities after temperature",
         "temperature 0.97", r"temperature.*0\.9[67]|0\.9[67].*temperature", cooled(0.97), wrong=r"top[-_ ]?[kp]|penalt|bf16|bfloat16", remedy=r"temperature"),
    case("repetition-in-completion-1.3", "glm4v", "sampling", "The sampler's log-probabilities are after a repetition penalty of 1.3 that counts completions alone.", "repetition_penalty=1.3 of servers that leave out the prompt, as SGLang's penaltylib",
         "a repetition penalty", r"repetition|penalt", Fault(rule=repetition(1.3, prompt=False)), wrong=r"presence|frequency|temperature|top[-_ ]?[kp]", remedy=r"repetition|penalt|logprobs_mode|raw"),
    case("min-p-0.02", "internvl", "sampling", "The sampler's log-probabilities are over tokens with at least a fiftieth of the largest probability.", "min_p=0.02 with vLLM --logprobs-mode processed_logprobs",
         "min-p", r"min[-_ ]?p\b", Fault(rule=lambda logits, _: min_p(logits, 0.02)), wrong=r"top[-_ ]?[kp]|temperature|grammar", remedy=r"min_?p|logprobs_mode|processed"),
    case("greedy", "idefics3", "sampling|recording", "The sampler took the most probable letter, and its log-probability is 0.", "temperature=0 with vLLM --logprobs-mode processed_logprobs",
         "greedy sampling", r"greedy|temperature.{0,20}\b0\b|\b0(\.0)?\b|zero", Fault(rule=greedy), wrong=r"temperature (of )?0\.\d*[1-9]|mask", remedy=r"temperature|greedy|logprobs_mode|processed|record"),
    case("thinking-budget-6", "qwen3_vl", "sampling|recording", "The seventh token of each completion was forced, with log-probability 0.", "max_thinking_tokens of Dynamo, thinking_token_budget of vLLM",
         "unknown", r"forc|budget|only (one|token)|allowed|\b0(\.0)?\b", Fault(rule=forced_after(6, END_THINK)), wrong=r"temperature|top[-_ ]?[kp]|mask"),
    case("no-pair-twice", "gemma3", "sampling", "A token that had followed the last one before could not follow it again.", "no_repeat_ngram_size=2 in generation_config.json",
         "unknown", r"n-?gram|repeat|pair", Fault(rule=no_pair_twice), wrong=r"temperature|top[-_ ]?[kp]|min[-_ ]?p|penalt"),
    # recording
    case("negated", "glm4v", "recording", "Losses were recorded: the log-probabilities with the other sign.", "torch.nn.functional.cross_entropy in place of log_softmax",
         "the sign", r"sign\b|negat|positive|\bloss|minus|-1\b", Fault(record=lambda values, _: -values), wrong=r"shift|temperature", remedy=r"sign|log|negat|loss|record"),
    case("one-token-late", "gemma3", "recording", "Each recorded number is of the token before.", "output_token_logprobs joined with its first row left out of the ids",
         "numbers one place late", r"shift|token before|previous|late|off by one|place", Fault(record=per_turn(late)), wrong=r"of the next token|place\(s\) earlier|temperature", remedy=r"shift|align|place|index|record|logprob"),
    case("base-2", "idefics3", "recording", "Logarithms to base 2 were recorded.", "bits in place of nats: log2",
         "logarithms to base 2", r"base 2|log2|\bbits\b|binary|base", Fault(record=lambda values, _: values / np.log(2)), wrong=r"base 10|log10|temperature|[48][- ]bit", remedy=r"base|log|natural|record"),
    case("epsilon-in-the-logarithm", "qwen2_vl", "recording", "The logarithm of each probability plus 0.00001 was recorded.", "torch.log(probs + 1e-5) in a trainer's wrapper",
         "unknown", r"eps|\+ ?1e-?0?5|added|floor|(rare|small|low).*probabilit", Fault(record=lambda values, _: np.log(np.exp(values) + 1e-5)), wrong=r"temperature|shift|base|fp8|bits|min[-_ ]?p"),
    case("chunk-without-numbers", "qwen3_vl", "recording", "The first five numbers of each completion are 0.", "an aborted request that was continued, its first part without logprobs",
         "numbers lost", r"\b0(\.0)?\b|zero|missing|no log-?prob|lost|not recorded", Fault(record=per_turn(five_lost)), wrong=r"shift|temperature|greedy|mask", remedy=r"record|logprob|abort|continu|retry"),
    case("first-stop-lost", "glm4v", "recording", "The first completion's stop token has no number, so the second's are one place early, and the last is 0.", "no_stop_trim=false of SGLang, all turns' numbers in one list",
         "unknown", r"(shift|place|early|earlier).*|stop", Fault(record=first_stop_lost), wrong=r"temperature|late\b|mask"),
    case("drafted", "qwen2_5_vl", "recording|model", "Two of three tokens have the numbers of the draft model that proposed them.", "--speculative-config of vLLM, log-probabilities of the drafter",
         "unknown", r"draft|specul|other weights|another model", Fault(sampler=lambda model: trained_further(model, 0.1, 44), forward=drafted), wrong=r"step \d|temperature|fp8|bits"),
    case("scaled-after-softmax", "gemma3", "recording|sampling", "The recorded log-probabilities were divided by 0.7, the temperature, after the softmax.", "logprobs / temperature in a trainer's wrapper",
         "unknown", r"(number|log-?prob|value|record).*(multipl|divid|scal|factor|times)|after.*softmax", Fault(record=lambda values, _: values / 0.7), wrong=r"base|temperature 0\.\d|top[-_ ]?[kp]"),
    # two at once
    pair("bf16-weights-and-temperature", "qwen3_vl", "model|sampling", ("weights in bfloat16", "temperature 0.8"), "vLLM --dtype bfloat16; processed_logprobs",
         (r"bf16|bfloat16|16[- ]bit", r"temperature.*0\.8\b|0\.8\b.*temperature"), (Fault(sampler=IN_BF16), cooled(0.8)), wrong=r"fp8|top[-_ ]?[kp]"),
    pair("bilinear-and-top-p", "qwen2_5_vl", "pixels|sampling", ("images resized bilinearly", "top-p 0.95"), "resample=2 in preprocessor_config.json; top_p with processed_logprobs",
         (r"bilinear|resampl|filter", r"top[-_ ]?p\b|nucleus|most probable.*0\.95"), (Fault(shows=resampled(Image.Resampling.BILINEAR)), Fault(rule=lambda logits, _: nucleus(logits, 0.95))), wrong=r"top[-_ ]?k\b|temperature|jpe?g"),
    pair("no-newline-and-two-decimals", "gemma3", "template|tokens|recording", ("the generation prompt's newline missing", "numbers of two decimals"), "a generation prompt without its newline; rounded JSON",
         (r"generation prompt|last 1 token|newline", r"round|decimal|0\.01\b"), (Fault(sees=edited("prompt", lambda ids: ids[:-1])), Fault(record=lambda values, _: np.round(values, 2))), wrong=r"temperature|bf16|bfloat16"),
    pair("gap-and-step-41", "qwen3_vl", "positions|model", ("completions three positions higher", "weights of step 41"), "padding counted in positions; a late weight update",
         (r"padding|shift|higher|offset|gap|jump", r"step 41\b"), (Fault(inputs=completion_shifted(3)), STEP_41), wrong=r"step 40|theta|fp8"),
    pair("bgr-and-clip", "glm4v", "pixels", ("channels in the order BGR", "CLIP's mean and deviation"), "cv2.imread, and OPENAI_CLIP_MEAN in preprocessor_config.json",
         (r"bgr|channel|red and blue", r"mean|deviation|std|normali"), (Fault(inputs=on_channels(lambda x: x.flip(1))), Fault(inputs=on_channels(normalised(CLIP_MEAN, CLIP_STD)))), wrong=r"jpe?g|resampl|rotat"),
    pair("temperature-and-top-k", "internvl", "sampling", ("temperature 0.7", "top-k 20"), "generation_config.json of Qwen: temperature 0.7, top_k 20",
         (r"temperature.*0\.7\b|0\.7\b.*temperature", r"top[-_ ]?k\b|\b(20|twenty) most"), (cooled(0.7), Fault(rule=lambda logits, _: top_k(logits, 20))), wrong=r"top[-_ ]?p\b|penalt|grammar"),
    pair("cut-and-negated", "glm4v", "tokens|template|recording", ("the prompt cut in front by four tokens", "the other sign"), "truncate_prompt_tokens of vLLM; losses recorded",
         (r"truncat|cut|first 4|without its first|lack", r"sign\b|negat|positive|\bloss|minus|-1\b"), (Fault(sees=cut_front(4)), Fault(record=lambda values, _: -values)), wrong=r"temperature|shift"),
    pair("fp8-weights-and-cache", "qwen2_5_vl", "model", ("weights in fp8", "a key-value cache in fp8"), "vLLM --quantization fp8 --kv-cache-dtype fp8",
         (r"weights.*(fp8|float8|8[- ]bit)|(fp8|float8|8[- ]bit).*weights|quanti[sz]", r"kv|cache|keys"), (Fault(sampler=rounded(torch.float8_e4m3fn)), Fault(sampler=cache_as(torch.float8_e4m3fn))), wrong=r"step \d|bf16|bfloat16|4[- ]bit"),
    pair("second-bos-and-jpeg", "internvl", "template|tokens|pixels", ("a second BOS", "images as JPEG of quality 60"), "add_special_tokens=true after a template with BOS; OpenAI clients that send JPEG",
         (r"\bbos\b|one more token|another token", r"jpe?g|compress|lossy"), (Fault(sees=lambda parts, _: [Part("bos", (BOS,)), *parts]), Fault(shows=as_jpeg(60))), wrong=r"truncat|resampl|reasoning"),
    pair("flat-positions-and-temperature", "qwen2_5_vl", "positions|sampling", ("images numbered as text", "temperature 1.2"), "position_ids left out by the trainer; temperature with processed_logprobs",
         (r"as text|one by one|on one axis|without.*(grid|axes)", r"temperature.*1\.2\b|1\.2\b.*temperature"), (Fault(inputs=numbered_as_text), cooled(1.2)), wrong=r"top[-_ ]?[kp]|theta"),
)
# fmt: on
