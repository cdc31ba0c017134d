"""A sixth table: fourteen faults, two of each stage, by an author who had not read the audit or another table but one."""

from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import STOP
from planting import NEWLINE, Context, Fault, Part, Parts
from planting_faults import edited, frequencies, llama3, per_turn
from plantings_third import case, no_pair_twice


def system_in_user(parts: Parts, _: Context) -> Parts:
    """The system's text and two line breaks begin the first user message."""
    bos, _, system, _, header, *rest = parts
    return [bos, header, system, Part("inserted", (NEWLINE, NEWLINE)), *rest]


def escaped(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Four letters are entities of three tokens."""
    return tuple(each for id in ids for each in ((7, id + 40, 33) if id % 9 == 4 else (id,)))


def of_draft(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Each fourth token is another, which a draft model had proposed."""
    return tuple(3 + (id + 8) % 37 if at % 4 == 3 else id for at, id in enumerate(ids))


def exchanged(values: Any) -> Any:
    """The second chunk of three comes after the third."""
    return [*values[:3], *values[6:9], *values[3:6], *values[9:]]


def as_709(image: Image.Image, *_: Any) -> Image.Image:
    """YCbCr of BT.601, read as BT.709."""
    y, cb, cr = np.moveaxis(np.asarray(image.convert("YCbCr"), np.float64) - (0, 128, 128), -1, 0)
    rgb = np.stack([y + 1.5748 * cr, y - 0.1873 * cb - 0.4681 * cr, y + 1.8556 * cb], -1)
    return Image.fromarray(rgb.round().clip(0, 255).astype(np.uint8))


def cut_upload(image: Image.Image, *_: Any) -> Image.Image:
    """The lower two fifths never came and are grey."""
    out = image.copy()
    out.paste((128, 128, 128), (0, image.height * 3 // 5, *image.size))
    return out


def clamped(inputs: dict[str, Any], _: Context) -> None:
    inputs["position_ids"] = inputs["position_ids"].clamp(max=72)


def block_overwritten(model: Any) -> Any:
    """Keys and values of the second block of sixteen tokens are another request's."""
    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")) and "vis" not in name:
            seed = len(name) + sum(map(ord, name))

            def hook(_: Any, __: Any, out: Any, seed: int = seed) -> Any:
                if out.shape[1] > 32:
                    noise = torch.randn(out[:, 16:32].shape, generator=torch.Generator().manual_seed(seed))
                    out = torch.cat([out[:, :16], noise * out.std(), out[:, 32:]], 1)
                return out

            module.register_forward_hook(hook)
    return model


def int4_attention(model: Any) -> Any:
    """Queries and keys in four bits, with a scale for each token."""

    def hook(_: Any, __: Any, out: Any) -> Any:
        scale = out.abs().amax(-1, keepdim=True) / 7
        return (out / scale).round() * scale

    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")) and "vis" not in name:
            module.register_forward_hook(hook)
    return model


def ever_likelier_stop(logits: Any, ctx: Context) -> Any:
    """`exponential_decay_length_penalty` (3, 1.15)."""
    logits[STOP] += logits[STOP].abs() * (1.15 ** max(0, len(ctx.drawn) - 3) - 1)
    return logits


def repeated(values: Any) -> Any:
    """The last number of each chunk of four is the one before it."""
    out = values.copy()
    out[3::4] = values[2::4][: len(out[3::4])]
    return out


def best_kept(logits: Any, ctx: Context) -> Any:
    vars(ctx).setdefault("firsts", []).append(int(logits.argmax()))
    return logits


def first_key(values: Any, ctx: Context) -> Any:
    """Of the sampled and the best token, the number of the one whose id comes first as a string."""
    rows = zip(values, ctx.best, ctx.history, vars(ctx)["firsts"], strict=True)
    return np.array([best if str(first) < str(id) else own for own, best, id, first in rows])


# fmt: off
SIXTH = (
    case("system-in-user", "gemma3", "template", "The system message's text begins the first user message.", "templates without a system role, such as Gemma 3's, beside a fine-tune's that has one",
         "system text in the user message", r"system|first message, whose text", Fault(sees=system_in_user), wrong=r"truncat|cut|generation prompt"),
    case("escaped", "internvl", "template", "Four characters of user messages are entities of HTML.", "a gateway that escapes texts of messages",
         "unknown", r"escap|entit|other tokens|inserted|more tokens", Fault(sees=edited("user", escaped)), wrong=r"system|generation prompt|reasoning"),
    case("draft-recorded", "qwen3_vl", "tokens", "Each fourth recorded token is the draft's, which was refused.", "speculative decoding that reports proposals for accepted tokens",
         "unknown", r"other token|another token|sampled token|draft|record", Fault(sees=edited("out", of_draft), trains=edited("out", of_draft)), wrong=r"temperature|quanti|prompt"),
    case("chunks-exchanged", "internvl", "tokens", "Two chunks of each completion are in each other's place, with their numbers.", "a client that gathers a stream's chunks as they come",
         "unknown", r"order|exchang|swap|chunk|place", Fault(sees=edited("out", lambda ids: tuple(exchanged(ids))), trains=edited("out", lambda ids: tuple(exchanged(ids))), record=per_turn(exchanged)), wrong=r"temperature|quanti"),
    case("matrix-709", "glm4v", "pixels", "Colours of BT.601 are read as BT.709.", "decoders of video that take another matrix than the encoder's",
         "unknown", r"709|601|matrix|colou?r", Fault(shows=as_709), wrong=r"BGR|normalis|levels"),
    case("cut-upload", "qwen3_vl", "pixels", "The lower two fifths of images are grey.", "Pillow's LOAD_TRUNCATED_IMAGES with uploads that broke off",
         "unknown", r"grey|gray|truncat|part of|lower", Fault(shows=cut_upload), wrong=r"crop|BGR|mean|std"),
    case("clamped-positions", "qwen3_vl", "positions", "Positions beyond 72 are 72.", "a table of rotary embeddings that is shorter than the sample, whose index is clamped",
         "unknown", r"clamp|beyond|longest|maximum", Fault(inputs=clamped), wrong=r"delta|base|theta"),
    case("llama3-rope", "internvl", "positions", "Rotary frequencies are scaled as Llama 3.1's.", "vLLM --hf-overrides with a rope_scaling of type llama3",
         "scaled rotary frequencies", r"rope|rotary|frequenc|scal", Fault(sampler=frequencies(partial(llama3, 64))), wrong=r"theta|base|linear|yarn"),
    case("block-overwritten", "gemma3", "model", "Keys and values of sixteen tokens of the prompt are another request's.", "a block of a prefix cache that is freed and written while in use",
         "unknown", r"block|cache|keys", Fault(sampler=block_overwritten), wrong=r"step|quanti|temperature"),
    case("int4-attention", "glm4v", "model", "Queries and keys are in four bits.", "SageAttention 2 on one side",
         "unknown", r"quer|attention|int4", Fault(sampler=int4_attention), wrong=r"weights|temperature|step|kv"),
    case("no-pair-twice", "glm4v", "sampling", "No pair of tokens comes twice.", "no_repeat_ngram_size in generation_config.json",
         "tokens that would repeat an n-gram are left out", r"n.?gram|repeat", Fault(rule=no_pair_twice), wrong=r"top.?[kp]|temperature|penalty of"),
    case("decaying-length", "gemma3", "sampling", "The stop token becomes likelier with each token.", "exponential_decay_length_penalty in generation_config.json",
         "a stop token that grows likelier", r"length|stop token|decay|eos", Fault(rule=ever_likelier_stop), wrong=r"temperature|top.?[kp]"),
    case("number-sent-twice", "glm4v", "recording", "Each fourth log-probability is the one before it.", "overlapping parts of a stream of log-probabilities",
         "unknown", r"twice|repeat|before it|previous|neighbou?r", Fault(record=per_turn(repeated)), wrong=r"temperature|top.?[kp]"),
    case("first-key", "internvl", "recording", "Some log-probabilities are the best token's: of two keys, the first as a string.", "top log-probabilities that pass JSON with sorted keys, of which the first is taken",
         "unknown", r"best|most probable|likeliest|highest|greedy", Fault(rule=best_kept, record=first_key), wrong=r"temperature|top.?[kp] of"),
)
# fmt: on
