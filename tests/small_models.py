"""Small models without files: a template of `tests/templates/`, a tokenizer trained here, one image processor.

The templates differ in kind; each says in its first line how. The tokenizer is a byte-level BPE; each model adds
the special tokens that its template writes, and added tokens that are not special, as real ones have.
"""

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from mmrender.media.load import LoadedImage
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import Geometry, MediaProcessor, Prepared
from mmrender.media.resolve import MediaCache, MediaResolver
from mmrender.model.tokenizer import Tokenizer
from mmrender.renderer import Renderer
from mmrender.sidecar import Expansion, Repeat, Text
from mmrender.template.known import TemplateSet
from mmrender.testing.tiny_model import train_byte_pairs

TEMPLATES = Path(__file__).parent / "templates"
NOW = datetime.datetime(2026, 7, 26, 9, 5, tzinfo=datetime.UTC)
CHATML = ("<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special: an encoder told to skip special ones still matches them."""


@dataclass(frozen=True)
class Spec:
    """What a template needs.

    Attributes:
        special: Special tokens that it writes.
        placeholder: What it writes for an image, or None where it takes none.
        expansion: What stands in the prompt for an image of `n` tokens.
        stop: Tokens that the model's files name as stop tokens.
        variables: `bos_token` and the like.
        flat: Whether content must be text.
        json_arguments: Whether arguments of calls must be JSON text.
        alternating: Whether the template refuses turns that do not alternate, and with them tools.
    """

    special: Sequence[str]
    stop: Sequence[str]
    placeholder: str | None = None
    expansion: Callable[[int], Expansion] | None = None
    variables: Mapping[str, str] | None = None
    flat: bool = False
    json_arguments: bool = False
    alternating: bool = False


def _pads(token: str) -> Callable[[int], Expansion]:
    return lambda count: (Repeat(token, count),)


def _framed(start: str, token: str, stop: str) -> Callable[[int], Expansion]:
    """Rows with separators and blank lines round them, as tiled families and Gemma 3 write."""
    return lambda count: (
        Text("\n\n"),
        Repeat(start, 1, embeds=False),
        Repeat(token, count),
        Text("\n"),
        Repeat(token, 2),
        Repeat(stop, 1, embeds=False),
        Text("\n\n"),
    )


BOS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECS: dict[str, Spec] = {
    "openers": Spec(
        ("[MASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|begin_image|>", "<|image|>", "<|end_image|>"),
        ("<|user|>", "<|observation|>"), "<|image|>", _pads("<|image|>"),
    ),
    "trimmed": Spec((*CHATML, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), ("<|im_end|>",), "<|image_pad|>", _pads("<|image_pad|>")),
    "hoisted": Spec((*CHATML, "<image>"), ("<|im_end|>",), "<image>", _pads("<image>")),
    "merged_tools": Spec((*CHATML, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), ("<|im_end|>",), "<|image_pad|>", _pads("<|image_pad|>")),
    "tilde": Spec(
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM]", "[/SYSTEM]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]", "[ROW]", "[END]"),
        ("</s>",), "[IMG]", lambda n: (Repeat("[IMG]", n), Repeat("[ROW]", 1, embeds=False), Repeat("[IMG]", n), Repeat("[END]", 1, embeds=False)), BOS,
    ),
    "macros": Spec((*CHATML, "<image>", "<start>", "<stop>"), ("<|im_end|>",), "<image>", _framed("<start>", "<image>", "<stop>")),
    "dated": Spec(("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|image|>"), ("<|eot_id|>",), "<|image|>", _pads("<|image|>"), BOS),
    "string_only": Spec(CHATML, ("<|im_end|>",), flat=True),
    "indices": Spec(("<|turn|>", "<|end|>", "<|wait|>", "<image>"), ("<|end|>",), "<image>", _pads("<image>")),
    "prompt_in_loop": Spec(("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "</s>", "<image>"), ("</s>",), "<image>", _pads("<image>"), BOS),
    "first_user": Spec(
        ("<s>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<soft>", "<end_of_image>"),
        ("<end_of_turn>",), "<start_of_image>", _framed("<start_of_image>", "<soft>", "<end_of_image>"), BOS, alternating=True,
    ),
    "last_user": Spec(("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), ("</s>",), variables=BOS, flat=True),
    "reasoning_dropped": Spec((*CHATML, "<image>"), ("<|im_end|>",), "<image>", _pads("<image>")),
    "reasoning_optional": Spec((*CHATML, "<image>"), ("<|im_end|>",), "<image>", _pads("<image>")),
    "json_arguments": Spec(("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>", "<|end|>", "<image>"), ("<|end|>",), "<image>", _pads("<image>"), json_arguments=True),
    "channels": Spec(("<|start|>", "<|message|>", "<|more|>", "<|end|>"), ("<|end|>",), flat=True),
    "end_of_text": Spec(("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|endoftext|>"), ("<|end|>", "<|endoftext|>"), variables={"eos_token": "<|endoftext|>"}, flat=True),
    "spoken_reasoning": Spec(CHATML, ("<|im_end|>",), flat=True),
    "everything": Spec((*CHATML, "<image>"), ("<|im_end|>",), "<image>", _pads("<image>")),
    "generation": Spec(("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<image>"), ("</s>",), "<image>", _pads("<image>"), BOS),
}  # fmt: skip


@cache
def _trained() -> str:
    # Letters of the markup too, so that merges across what is a token and what is text can happen.
    markup = "<|im_end|> <think> user\nassistant\nsystem\n</s> [INST] <image>\n"
    return train_byte_pairs(800, markup * 20).to_str()


def build_engine(special: Sequence[str], added: Sequence[str] = ADDED) -> Engine:
    engine = Engine.from_str(_trained())
    engine.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    engine.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    return engine


@dataclass(frozen=True)
class SmallItem:
    """An item whose tensor is the image's own pixels."""

    pixels: Any
    identity: str
    expansion: Expansion
    modality: str = "image"

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[:2]

    @property
    def grid(self) -> tuple[int, ...]:
        return (1,)

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes

    def tensors(self, dtype: str = "float32", *, framework: str = "numpy") -> dict[str, Any]:
        return {"pixel_values": self.pixels.astype(np.float32)}


@dataclass(frozen=True)
class SmallProcessor(MediaProcessor):
    """One token for each 8 pixels of width, one at the least."""

    token: str
    expand: Callable[[int], Expansion]
    name = "SmallProcessor"
    image_backend = "pil"
    depends_on_image_count = False

    @property
    def settings_digest(self) -> bytes:
        return repr(self.expand(1)).encode()

    @property
    def placeholder(self) -> Mapping[str, str]:
        return {"image": self.token}

    @property
    def placeholder_tokens(self) -> frozenset[str]:
        return frozenset(
            {self.token, *[piece.token for piece in self.expand(1) if isinstance(piece, Repeat)]}
        )

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        return Geometry((1,), self.expand(max(1, width // 8)))

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        pixels = np.ascontiguousarray(loaded.array)
        identity = hashlib.sha256(
            self.settings_digest + repr(pixels.shape).encode() + pixels.tobytes()
        ).hexdigest()
        expansion = self.geometry(*pixels.shape[:2]).expansion
        return Prepared(identity, lambda: SmallItem(pixels, identity, expansion))


@dataclass(frozen=True)
class SmallModel:
    """A template with what its rendering needs."""

    name: str
    spec: Spec

    @cached_property
    def source(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text("utf-8")

    @cached_property
    def engine(self) -> Engine:
        return build_engine(self.spec.special)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(build_engine(self.spec.special))

    @cached_property
    def processor(self) -> SmallProcessor | None:
        return (
            None
            if self.spec.placeholder is None
            else SmallProcessor(self.spec.placeholder, self.spec.expansion)
        )

    def renderer(self, **options: Any) -> Renderer:
        """A renderer of this model, or with another `tokenizer` or template (`source`); `options` as for `Renderer`."""
        options = {"memo_bytes": 0, "unprinted": "allow", **options}
        tool_images = options.pop("tool_images", "tool")
        tokenizer = options.pop("tokenizer", self.tokenizer)
        templates = TemplateSet(
            {"default": options.pop("source", self.source)},
            tokenizer,
            special_tokens=self.spec.variables,
            model_stop_ids=[self.tokenizer.added_ids[token] for token in self.spec.stop],
            clock=lambda: NOW,
            tool_images=tool_images,
        )
        media = None
        if self.processor is not None:
            media = MediaResolver(self.processor, MediaPolicy(), MediaCache())
        return Renderer(templates, tokenizer, media, **options)

    def as_given(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in the shapes that the template takes, as a user of the reference must pass them."""
        return [self._given(message) for message in messages]

    def _given(self, message: dict[str, Any]) -> dict[str, Any]:
        given = dict(message)
        if self.spec.flat and isinstance(given["content"], list):
            given["content"] = "".join(part["text"] for part in given["content"])
        if self.spec.json_arguments and given.get("tool_calls"):
            given["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                for call in given["tool_calls"]
            ]  # fmt: skip
        return given


MODELS = {name: SmallModel(name, spec) for name, spec in SPECS.items()}
