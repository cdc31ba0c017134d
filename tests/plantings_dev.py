"""Thirty faults that happened between engines and trainers of vision-language models, planted in tiny ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import BOS, OPENER, PAIRS, Row, as_trained
from mmrender.trajectory.engine_data import WeightVersionSpan
from mmrender.trajectory.sample import TrainingSample
from planting import NEWLINE, SYSTEM, USER, Context, Fault, Part, Parts, Planting, World

# --- conversations ---


def without(kind: str) -> Callable[[Parts, Context], Parts]:
    return lambda parts, _: [part for part in parts if part.kind != kind]


def edited(
    kind: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Callable[[Parts, Context], Parts]:
    """Parts of a kind with other tokens."""
    return lambda parts, _: [replace(one, ids=change(one.ids)) if one.kind == kind else one for one in parts]


def merged(ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens of the same text as a tokenizer encodes it: two letters that have a token of their own are one."""
    out: list[int] = []
    for token in ids:
        if out and 3 <= out[-1] < 39 and token == out[-1] + 1:
            out[-1] = PAIRS[out[-1] - 3]
        else:
            out.append(token)
    return tuple(out)


def rewritten(sample: TrainingSample, headers: bool) -> TrainingSample:
    """The sample with other headers, or without BOS, and the same completions."""
    row, at = Row(), 0 if headers else 1
    ids = sample.token_ids.tolist()
    for index in range(len(ids) - 2):
        if headers and ids[index] == OPENER and ids[index + 1] in (SYSTEM, USER):
            row.take(sample, at, index).add((83, ids[index + 1], NEWLINE, 84))
            at = index + 3
    return as_trained(sample, row.take(sample, at, len(ids)).sample(sample.sample_id))


def two_templates(_: World, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """The samples as two other templates build them."""
    built = {"chatml-v2": True, "without-bos": False}
    return {
        "alternatives": {
            name: [rewritten(one, headers) for one in samples] for name, headers in built.items()
        }
    }


def encoded_again(parts: Parts, ctx: Context) -> Parts:
    """Completions of earlier turns, decoded and encoded."""
    outs = [index for index, part in enumerate(parts) if part.kind == "out"]
    return [
        replace(part, ids=merged(part.ids)) if index in outs[:-1] else part
        for index, part in enumerate(parts)
    ]


def neighbours(ctx: Context) -> int | None:
    """Two letters that have a token of their own, as the fourth and fifth token."""
    return {3: 10, 4: 11}.get(len(ctx.drawn))


def cut_front(tokens: int) -> Callable[[Parts, Context], Parts]:
    def cut(parts: Parts, _: Context) -> Parts:
        left, out = tokens, []
        for part in parts:
            taken = min(left, len(part.ids))
            out.append(replace(part, ids=part.ids[taken:]) if taken else part)
            left -= taken
        return out

    return cut


def swapped_images(parts: Parts, _: Context) -> Parts:
    """The first two images in each other's place."""
    places = [index for index, part in enumerate(parts) if part.image is not None][:2]
    out = list(parts)
    if len(places) == 2:
        first, second = places
        out[first], out[second] = out[second], out[first]
    return out


# --- pictures and pixels ---


def target_size(world: World, image: Image.Image) -> tuple[int, int]:
    """Width and height to which the processor resizes a picture that becomes one tile or patches."""
    item = world.item(image)
    if len(item.grid) == 3:
        return item.grid[2] * item.layout.patch, item.grid[1] * item.layout.patch
    height, width = item.tensors()["pixel_values"].shape[-2:]
    return width, height


def resampled(filter: Image.Resampling) -> Callable[[Image.Image, int, Context], Image.Image]:
    """A picture that is resized by another filter; the processor then leaves its size."""
    return lambda image, _, ctx: image.resize(target_size(ctx.world, image), filter)


def channels(inputs: dict[str, Any]) -> Any:
    """A view of the pixels as `(n, 3, ...)`."""
    pixels = inputs["pixel_values"]
    return pixels.reshape(len(pixels), 3, -1) if pixels.ndim == 2 else pixels.movedim(-3, 1)


def on_channels(change: Callable[[Any], Any]) -> Callable[[dict[str, Any], Context], None]:
    """Change of the pixels as `(n, 3, ...)`."""

    def edit(inputs: dict[str, Any], _: Context) -> None:
        pixels = inputs["pixel_values"]
        new = change(channels(inputs).clone())
        inputs["pixel_values"] = new.reshape(pixels.shape) if pixels.ndim == 2 else new.movedim(1, -3)

    return edit


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def normalised(mean: Sequence[float], std: Sequence[float]) -> Callable[[Any], Any]:
    """From mean and deviation 0.5 to others."""

    def change(pixels: Any) -> Any:
        shape = (1, 3, *[1] * (pixels.ndim - 2))
        return (pixels * 0.5 + 0.5 - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)

    return change


# --- positions ---


def numbered_as_text(inputs: dict[str, Any], _: Context) -> None:
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["position_ids"])


def completion_shifted(by: int) -> Callable[[dict[str, Any], Context], None]:
    def shift(inputs: dict[str, Any], ctx: Context) -> None:
        positions = inputs["position_ids"].clone()
        positions[..., len(ctx.prompt) :] += by
        inputs["position_ids"] = positions

    return shift


def rotary(model: Any) -> Iterator[Any]:
    """The language model's rotary embeddings."""
    for name, module in model.named_modules():
        if hasattr(module, "inv_freq") and "visual" not in name and "vision" not in name:
            yield module


def frequencies(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def edit(model: Any) -> Any:
        for module in rotary(model):
            module.inv_freq = change(module.inv_freq)
        return model

    return edit


# --- weights ---


def weights_of(model: Any) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained_further(model: Any, size: float, seed: int, only: str = "") -> Any:
    """The model after a few steps of training, whose names hold `only`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if only in name:
                parameter.add_(noise * float(parameter.std() if parameter.ndim > 1 else 0.1), alpha=size)
    return model


def earlier(*only: str, size: float = 0.02) -> Callable[[Any], Any]:
    """The sampler's model is one of an earlier step, or has parts of it."""

    def edit(model: Any) -> Any:
        old = trained_further(deepcopy(model), size, 41)
        if not only:
            return old
        with torch.no_grad():
            kept = dict(old.named_parameters())
            for name, parameter in model.named_parameters():
                if any(part in name for part in only):
                    parameter.copy_(kept[name])
        return model

    return edit


def with_earlier_head(model: Any) -> Any:
    """The model with the head of an earlier step, also if it is tied to the embedding."""
    head = earlier()(deepcopy(model)).get_output_embeddings().weight.detach()
    model.get_output_embeddings().weight = torch.nn.Parameter(head.clone())
    return model


def kept_steps(world: World, _: Any) -> dict[str, Any]:
    """Weights that a trainer keeps of the last steps."""
    older = trained_further(deepcopy(world.model), 0.03, 40)
    return {
        "weights": {"step 41": weights_of(earlier()(deepcopy(world.model))), "step 40": weights_of(older)}
    }


def of_language_model(name: str) -> bool:
    """Whether a parameter is a query's or value's of the language model."""
    return (
        ("q_proj.weight" in name or "v_proj.weight" in name) and "visi" not in name and "visual" not in name
    )


def adapted(model: Any, targets: Callable[[str], bool] = of_language_model) -> Any:
    """The model with a merged adapter, which `disable_adapter` takes out, as of PEFT."""
    generator = torch.Generator().manual_seed(5)
    deltas = {}
    for name, parameter in model.named_parameters():
        if targets(name):
            down = torch.randn(4, parameter.shape[1], generator=generator)
            up = torch.randn(parameter.shape[0], 4, generator=generator)
            deltas[name] = up @ down * 0.02

    def apply(to: Any, factor: float, only: str = "") -> None:
        with torch.no_grad():
            for name, parameter in to.named_parameters():
                if name in deltas and only in name:
                    parameter.add_(deltas[name], alpha=factor)

    @contextmanager
    def disable_adapter() -> Iterator[None]:
        apply(model, -1)
        try:
            yield
        finally:
            apply(model, 1)

    apply(model, 1)
    model.add_adapter_times = apply
    model.disable_adapter = disable_adapter
    return model


def base_of_adapted(model: Any) -> Any:
    model.add_adapter_times(model, -1)
    return model


def rounded(dtype: Any) -> Callable[[Any], Any]:
    """Weights of linear layers in eight bits, each with a scale."""

    def edit(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                    scale = parameter.abs().max() / torch.finfo(dtype).max
                    parameter.copy_((parameter / scale).to(dtype).float() * scale)
        return model

    return edit


def without_image_blocks(inputs: dict[str, Any], _: Context) -> None:
    inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])


def two_weights(ctx: Context, inputs: dict[str, Any]) -> Any:
    """The sampler's first weights for five tokens of the last turn, then the trainer's."""
    late = ctx.turn == 1 and len(ctx.drawn) >= 5
    model = ctx.world.model if late else ctx.world.sampler
    with torch.inference_mode():
        return model(**inputs).logits[0, -1].float().clone()


def versions_reported(sample: TrainingSample, ctx: Context) -> TrainingSample:
    at = np.flatnonzero(sample.loss_mask)
    change = int(at[ctx.lengths[0] + 5])
    spans = (
        WeightVersionSpan("step 41", int(at[0]), change),
        WeightVersionSpan("step 42", change, int(at[-1]) + 1),
    )
    return replace(sample, weight_versions=spans)


# --- distributions ---


def nucleus(logits: Any, share: float) -> Any:
    """Logits of the most probable tokens that hold `share` of the probability."""
    order = logits.argsort(descending=True)
    before = logits[order].softmax(-1).cumsum(-1) - logits[order].softmax(-1)
    out = torch.full_like(logits, -torch.inf)
    chosen = order[before < share]
    out[chosen] = logits[chosen]
    return out


def repetition(penalty: float, prompt: bool = True) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, ctx: Context) -> Any:
        seen = sorted({*(ctx.prompt if prompt else ()), *ctx.drawn})
        own = logits[seen]
        logits[seen] = torch.where(own > 0, own / penalty, own * penalty)
        return logits

    return rule


def biased(tokens: Sequence[int], by: float) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, _: Context) -> Any:
        logits[list(tokens)] += by
        return logits

    return rule


def watermarked(logits: Any, ctx: Context) -> Any:
    """Half of the vocabulary, which the token before chooses, is made more probable."""
    last = [*ctx.prompt, *ctx.drawn][-1]
    green = np.random.default_rng([15485863, last]).permutation(len(logits))[: len(logits) // 2]
    logits[torch.from_numpy(green)] += 2.0
    return logits


# --- records ---


def peers_numbers(samples: list[TrainingSample], faulty: list[int]) -> list[TrainingSample]:
    """Samples with the log-probabilities of the next one, as far as they go."""
    out = list(samples)
    for index in faulty:
        other = samples[(index + 1) % len(samples)]
        values = other.logprobs[other.loss_mask]
        sample = samples[index]
        count = int(sample.loss_mask.sum())
        numbers = np.zeros(len(sample), np.float32)
        numbers[sample.loss_mask] = np.resize(values, count)
        out[index] = replace(sample, logprobs=numbers)
    return out


def mask_from_earlier(sample: TrainingSample, _: Context) -> TrainingSample:
    """A loss mask that begins one token before each completion."""
    mask = sample.loss_mask.copy()
    mask[:-1] |= sample.loss_mask[1:]
    return replace(sample, loss_mask=mask)


def appended_stop(sample: TrainingSample, _: Context) -> TrainingSample:
    """The sample with its last token, which the template wrote, trained on."""
    mask = sample.loss_mask.copy()
    mask[-1] = True
    return replace(sample, loss_mask=mask)


TRL, VLLM, VERL = "huggingface/trl#", "vllm-project/vllm#", "verl-project/verl#"
# fmt: off
DEV = (
    Planting("double-bos", "qwen2_5_vl", "template|tokens", "The sampler's prompt begins with two BOS tokens, the trainer's with one.", TRL + "3853",
             r"(?i)\bbos\b|(began|begins) with (one more|another) token, 1\b", Fault(sees=lambda parts, _: [Part("bos", (BOS,)), *parts])),
    Planting("no-newline-in-generation-prompt", "gemma3", "template|tokens", "The sampler's generation prompt lacks its last newline.", "PrimeIntellect-ai/prime-rl#346",
             r"(?i)generation prompt|lack.*last 1 token.*before (all|each|every) completion", Fault(sees=edited("prompt", lambda ids: ids[:-1]))),
    Planting("no-newline-between-turns", "qwen3_vl", "template|tokens", "In the sampler's second prompt no newline follows the first completion's stop token.", "PrimeIntellect-ai/prime-rl#1334",
             r"(?i)(after|follow|behind).*(stop|turn|completion)|between turns|newline", Fault(sees=without("end"))),
    Planting("other-template", "internvl", "template|tokens", "The sampler's prompts are those of the other template, which was given.", VERL + "6854",
             r"(?i)chatml-v2", Fault(sees=edited("header", lambda ids: (83, *ids[1:], 84)),
             options=two_templates)),
    Planting("system-prompt-dropped", "glm4v", "template|tokens", "The trainer's prompt lacks the system prompt that the sampler's had.", "modelscope/ms-swift#10012",
             r"(?i)system|(more|lacks|missing).*(tokens|text)", Fault(trains=lambda parts, _: [*parts[:1], *parts[4:]])),
    Planting("history-encoded-again", "qwen3_vl", "tokens|template", "The sampler's second prompt held the first completion decoded and encoded again, two letters as one token.", TRL + "5224",
             r"(?i)(encoded|tokeni[sz]ed) again|re-?(tokeni|encod)", Fault(sees=encoded_again, draw=neighbours)),
    Planting("prompt-cut-in-front", "qwen2_5_vl", "tokens|template", "The sampler's prompt lacked its first six tokens, which truncation removed.", TRL + "6401",
             r"(?i)truncat|cut|first 6|lack|without its first", Fault(sees=cut_front(6))),
    Planting("mask-one-token-early", "glm4v", "recording|tokens", "The trained tokens include the last token of each generation prompt, which was not sampled.", VERL + "3287",
             r"(?i)(mask|trained|marked|count).*(not sampled|prompt|before|early)|0\.0|zero", Fault(finish=mask_from_earlier)),
    Planting("stop-appended", "internvl", "recording|tokens", "The trainer appended a stop token that was not sampled, with log-probability 0.", "NovaSky-AI/SkyRL#758",
             r"(?i)(not sampled|appended|added).*|\b0(\.0)?\b.*(stop|log-prob)|(stop|log-prob).*\b0(\.0)?\b", Fault(stops=False, finish=appended_stop)),
    Planting("bilinear", "qwen2_5_vl", "pixels", "The sampler's images were resized bilinearly, the trainer's bicubically.", "huggingface/transformers#28847",
             r"(?i)bilinear|resampl|resiz.*filter|filter", Fault(shows=resampled(Image.Resampling.BILINEAR))),
    Planting("bgr", "gemma3", "pixels", "The sampler saw the colour channels in the order BGR.", "pytorch/vision#2950", r"(?i)bgr|channel|red and blue", Fault(inputs=on_channels(lambda pixels: pixels.flip(1)))),
    Planting("clip-mean-and-std", "qwen3_vl", "pixels", "The sampler normalised pixels with CLIP's mean and deviation, the trainer with 0.5.", VLLM + "51472",
             r"(?i)mean|deviation|std|normali", Fault(inputs=on_channels(normalised(CLIP_MEAN, CLIP_STD)))),
    Planting("images-swapped", "internvl", "pixels", "The trainer has the first two images in each other's place.", "om-ai-lab/VLM-R1#263", r"(?i)swap|order|exchang|other's place|image 1.*image 0|image 0.*image 1", Fault(trains=swapped_images)),
    Planting("fewer-pixels", "glm4v", "pixels|tokens", "The server's largest number of pixels is smaller, so its images had fewer tokens.", VLLM + "15364",
             r"(?i)(max_?pixels|number of pixels|smaller|fewer tokens|other size|resolution|size of)", Fault(shows=lambda image, *_: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC))),
    Planting("brighter", "qwen2_5_vl", "pixels", "The sampler's images were made brighter by a tenth.", "no report", r"(?i)bright", Fault(inputs=on_channels(lambda pixels: ((pixels + 1) * 1.1 - 1).clamp(-1, 1)))),
    Planting("images-numbered-as-text", "qwen2_5_vl", "positions", "The sampler numbered image tokens as text, one position each.", TRL + "5785",
             r"(?i)as text|one by one|on one axis|without.*(grid|axes)", Fault(inputs=numbered_as_text)),
    Planting("gap-before-completion", "gemma3", "positions", "Positions of the sampler's completion are five higher: padding between prompt and completion was counted.", VERL + "3653",
             r"(?i)padding|(shift|higher|offset|gap|jump).*(position)?|position.*(shift|higher|offset|gap)", Fault(inputs=completion_shifted(5))),
    Planting("rope-theta", "glm4v", "positions|model", "The sampler's rotary base is 1,000,000, the trainer's 10,000.", "deepspeedai/DeepSpeed#8345",
             r"(?i)theta|rotary base|base of", Fault(sampler=frequencies(lambda freq: freq ** (np.log(1e6) / np.log(1e4))))),
    Planting("one-step-behind", "qwen3_vl", "model", "The sampler had the weights of step 41.", "NVIDIA-NeMo/RL#4018", r"(?i)step 41\b", Fault(sampler=earlier(), options=kept_steps)),
    Planting("head-one-step-behind", "internvl", "model", "The sampler's output head was of step 41, all else of the trainer's step.", VLLM + "51665",
             r"(?i)(head|tied|output|embed).*", Fault(sampler=with_earlier_head, options=kept_steps)),
    Planting("adapter-left-out", "gemma3", "model", "The sampler ran the base model without the adapter.", TRL + "2698", r"(?i)adapter|lora|base model", Fault(trainer=adapted, sampler=base_of_adapted)),
    Planting("weights-in-fp8", "glm4v", "model", "The sampler's weights were rounded to fp8.", VERL + "1803", r"(?i)fp8|float8|8[- ]bit|eight bits|quanti[sz]", Fault(sampler=rounded(torch.float8_e4m3fn))),
    Planting("images-causal", "gemma3", "model|positions", "In the sampler, tokens of an image did not see the later ones of the same image.", VLLM + "40106",
             r"(?i)both directions|bidirectional|causal|token.?type|only backwards", Fault(inputs=without_image_blocks)),
    Planting("weights-changed-in-flight", "qwen2_5_vl", "model", "Tokens before the fifth of the second turn were sampled with the weights of step 41.", "NVIDIA-NeMo/RL#1381",
             r"(?i)step 41\b", Fault(sampler=earlier(), forward=two_weights, finish=versions_reported, options=kept_steps)),
    Planting("temperature-0.7", "qwen3_vl", "sampling", "The sampler's log-probabilities are of the distribution at temperature 0.7.", TRL + "4159", r"(?i)temperature.*0\.7\b|0\.7\b.*temperature", Fault(rule=lambda logits, _: logits / 0.7)),
    Planting("top-p-0.9", "gemma3", "sampling", "The sampler's log-probabilities are over the most probable tokens that hold 0.9.", TRL + "6789", r"(?i)top[-_ ]?p|nucleus|most probable.*0\.9", Fault(rule=lambda logits, _: nucleus(logits, 0.9))),
    Planting("repetition-penalty-1.1", "qwen2_5_vl", "sampling", "The sampler's log-probabilities are after a repetition penalty of 1.1 that the generation config sets.", "NVIDIA-NeMo/RL#3497",
             r"(?i)repetition|penal", Fault(rule=repetition(1.1))),
    Planting("watermark", "internvl", "sampling", "A watermark made half of the vocabulary more probable, which the token before chooses.", "vLLM's sampling parameter watermarking", "?(?i)watermark", Fault(rule=watermarked)),
    Planting("one-token-early", "glm4v", "recording", "Each recorded number is of the next token.", VLLM + "29216", r"(?i)shift|of the next token|1 place\(s\) earlier|off by one", Fault(record=lambda values, _: np.append(values[1:], values[-1]))),
    Planting("numbers-of-another-sample", "internvl", "recording", "The recorded numbers are of another sample of the batch.", "allenai/open-instruct#1483", r"(?i)another (sample|rollout)|of rollout-|other sample", Fault(options=lambda *_: {"edit": peers_numbers})),
    Planting("two-decimals", "qwen3_vl", "recording", "The recorded numbers were rounded to two decimals.", "huggingface/trl#3867", r"(?i)round|decimal|digits|multiples of 0\.01\b", Fault(record=lambda values, _: np.round(values, 2))),
)
# fmt: on
