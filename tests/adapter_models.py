"""Small processor directories of families that the shared model directories do not cover.

Each holds what `save_pretrained` of the family's own classes writes: a word-level tokenizer with the family's
tokens, image settings scaled down, and the processor's settings. No weights, nothing downloaded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers


def _write(
    directory: Path, image: dict[str, Any], processor: dict[str, Any], tokens: list[str], **settings: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    words = ["<unk>", "before", "between", "after", "\n\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", *tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    config |= {"eos_token": "</s>", "pad_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "processor_config.json").write_text(json.dumps({**processor, "image_processor": image}))
    return directory


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    **dict.fromkeys(("do_rescale", "do_normalize", "do_resize", "do_convert_rgb"), True),
}
HALF = {**CLIP, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CROPPED = {
    **CLIP,
    "size": {"shortest_edge": 56},
    "crop_size": square(56),
    "do_center_crop": True,
    "resample": 3,
}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def gemma3(directory: Path) -> Path:
    """One fixed number of tokens an image, with blank lines round it."""
    image = {**HALF, "image_processor_type": "Gemma3ImageProcessor", "size": square(64)}
    image |= {"resample": 2, "do_pan_and_scan": None}
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 16}
    return _write(directory, image, processor, [*names.values()], extra_special_tokens=names, **names)


def pixtral(directory: Path) -> Path:
    """A row of tokens, a break, a row."""
    image = {**CLIP, "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 128}}
    image |= {"patch_size": square(16), "resample": 3}
    processor = {"processor_class": "PixtralProcessor", "patch_size": 16, "spatial_merge_size": 1}
    return _write(directory, image, processor, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"])


def llava(directory: Path) -> Path:
    """A square crop and a fixed number of tokens."""
    image = {**CROPPED, "image_processor_type": "CLIPImageProcessor"}
    return _write(directory, image, {**LLAVA, "processor_class": "LlavaProcessor"}, ["<image>"])


def llava_next(directory: Path) -> Path:
    """Tiles of the best of several resolutions."""
    image = {**CROPPED, "image_processor_type": "LlavaNextImageProcessor"}
    image |= {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]}
    return _write(directory, image, {**LLAVA, "processor_class": "LlavaNextProcessor"}, ["<image>"])


def llava_onevision(directory: Path) -> Path:
    """Tiles for one image, none for several."""
    image = {**HALF, "image_processor_type": "LlavaOnevisionImageProcessor", "resample": 3, "do_pad": True}
    image |= {"size": square(56)}
    image |= {"image_grid_pinpoints": [[56 * i, 56 * j] for i in range(1, 4) for j in range(1, 4)]}
    processor = {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16}
    processor |= {"vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    return _write(directory, image, processor, ["<image>", "<video>"])


def mllama(directory: Path) -> Path:
    """Features reach the text by cross-attention: one token an image."""
    image = {**CLIP, "image_processor_type": "MllamaImageProcessor", "size": square(56)}
    image |= {"max_image_tiles": 4, "resample": 2, "do_pad": True}
    return _write(directory, image, {"processor_class": "MllamaProcessor"}, ["<|image|>", "<|python_tag|>"])


def smolvlm(directory: Path) -> Path:
    """Rows of tiles and the whole image; only videos need the package `num2words`."""
    image = {**HALF, "image_processor_type": "SmolVLMImageProcessor", "resample": 1, "do_pad": True}
    image |= {
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56},
        "do_image_splitting": True,
    }
    processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    return _write(directory, image, processor, tokens)


def deepseek_ocr2(directory: Path) -> Path:
    """Tiles in a tensor of their own, which images smaller than a tile lack."""
    image = {**HALF, "image_processor_type": "DeepseekOcr2ImageProcessor", "size": square(64)}
    image |= {"tile_size": 256, "resample": 3}
    processor = {"processor_class": "DeepseekOcr2Processor", "patch_size": 16, "downsample_ratio": 4}
    return _write(directory, image, processor, ["<image>"])


def idefics2(directory: Path) -> Path:
    """Writes a blank after an image before a word, and merges the tokens between two images: refused."""
    image = {**HALF, "image_processor_type": "Idefics2ImageProcessor", "do_image_splitting": False}
    image |= {"size": {"shortest_edge": 56, "longest_edge": 112}, "resample": 2, "do_pad": True}
    processor = {"processor_class": "Idefics2Processor", "image_seq_len": 4}
    return _write(directory, image, processor, ["<image>", "<fake_token_around_image>", "<end_of_utterance>"])


def chameleon(directory: Path) -> Path:
    """Writes a separator after each prompt."""
    image = {**HALF, "image_processor_type": "ChameleonImageProcessor", "size": {"shortest_edge": 56}}
    image |= {"crop_size": square(56), "do_center_crop": True, "resample": 1}
    processor = {"processor_class": "ChameleonProcessor", "image_seq_length": 4, "image_token": "<image>"}
    tokens = ["<image>", "<racm3:break>", "<eoss>", "<sep>"]
    return _write(directory, image, processor, tokens, sep_token="<sep>")


def paligemma(directory: Path) -> Path:
    """Writes BOS behind the last image and a newline after the prompt; takes no prompt without images."""
    image = {**HALF, "image_processor_type": "SiglipImageProcessor", "size": square(32), "resample": 3}
    image |= {"image_seq_length": 4}
    return _write(directory, image, {"processor_class": "PaliGemmaProcessor"}, ["<image>"])


def hunyuan_vl(directory: Path) -> Path:
    """Takes its placeholder only between two tokens."""
    image = {**CLIP, "image_processor_type": "HunYuanVLImageProcessor", "resample": 3, "merge_size": 2}
    image |= {
        "patch_size": 16,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 4096, "longest_edge": 65536},
    }
    names = {"image_token": "<|image|>"}
    names |= {f"image_{side}_token": f"<|image_{side}|>" for side in ("start", "end")}
    processor = {"processor_class": "HunYuanVLProcessor"}
    return _write(directory, image, processor, [*names.values()], extra_special_tokens=names, **names)


_BUILDERS = (gemma3, pixtral, llava, llava_next, llava_onevision, mllama, smolvlm, deepseek_ocr2, chameleon)
ADAPTER_FAMILIES: dict[str, Callable[[Path], Path]] = {
    build.__name__: build for build in (*_BUILDERS, paligemma)
}

TOKENS = {
    "gemma3": ("<start_of_image>", "<image_soft_token>"),
    "pixtral": ("[IMG]", "[IMG]"),
    "smolvlm": ("<image>", "<image>"),
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<fake_token_around_image>PLACEHOLDER' }}"
    "{% endfor %}{% endif %} </s>{% endfor %}"
)


def model(name: str, directory: Path, *, written: str | None = None) -> Path:
    """A directory with a chat template that writes the placeholder, or another text."""
    ADAPTER_FAMILIES[name](directory)
    placeholder, feature = TOKENS[name]
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", written or placeholder))
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    (directory / "config.json").write_text(json.dumps({"image_token_id": ids[feature]}))
    return directory
