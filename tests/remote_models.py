"""Model directories whose processor is Python code of their own, as `trust_remote_code=True` runs it.

The classes are written here, with the interfaces of published ones: tiles with a thumbnail between tokens of
their own (as Ovis and InternVL), and a placeholder of several tokens that a regular expression looks for (as
MiniCPM-V, before Transformers had it).
"""

import json
from pathlib import Path

from adapter_models import HALF, _write, square

IMAGES_CODE = '''
import numpy as np
from PIL import Image
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class TileImageProcessor(BaseImageProcessor):
    """Cuts an image into square tiles, and adds the whole image if there are several."""

    model_input_names = ["pixel_values", "tile_counts"]

    def __init__(self, tile=16, max_tiles=6, image_mean=None, image_std=None, **kwargs):
        super().__init__(**kwargs)
        self.tile, self.max_tiles = tile, max_tiles
        self.image_mean, self.image_std = image_mean or [0.5] * 3, image_std or [0.5] * 3

    def grid(self, height, width):
        rows = max(1, min(3, round(height / self.tile / 4)))
        return rows, max(1, min(self.max_tiles // rows, round(width / self.tile / 4)))

    def preprocess(self, images, return_tensors=None, **kwargs):
        flat = [image for group in images for image in (group if isinstance(group, list) else [group])]
        tiles, counts = [], []
        for image in flat:
            rows, columns = self.grid(image.height, image.width)
            sheet = image.convert("RGB").resize((columns * self.tile, rows * self.tile), Image.BICUBIC)
            boxes = [
                (c * self.tile, r * self.tile, (c + 1) * self.tile, (r + 1) * self.tile)
                for r in range(rows) for c in range(columns)
            ]
            cut = [sheet.crop(box) for box in boxes]
            if len(cut) > 1:
                cut.append(image.convert("RGB").resize((self.tile, self.tile), Image.BICUBIC))
            tiles += cut
            counts.append(len(cut))
        mean, std = np.float32(self.image_mean), np.float32(self.image_std)
        pixels = np.stack([(np.asarray(tile, np.float32) / 255 - mean) / std for tile in tiles])
        data = {"pixel_values": pixels.transpose(0, 3, 1, 2), "tile_counts": np.array(counts)}
        return BatchFeature(data=data, tensor_type=return_tensors)
'''

PROCESSOR_CODE = """
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin


class TileProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, tokens_per_tile=4, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.tokens_per_tile = "<image>", tokens_per_tile

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs):
        texts = [text] if isinstance(text, str) else list(text)
        outputs = {}
        if images is not None:
            outputs = dict(self.image_processor(images, return_tensors=return_tensors))
            counts = iter([int(count) for count in outputs["tile_counts"]])
            filled = []
            for text in texts:
                first, *rest = text.split(self.image_token)
                for piece in rest:
                    tile = "<tile>" + "<atom>" * self.tokens_per_tile
                    first += "<img>" + tile * next(counts) + "</img>" + piece
                filled.append(first)
            texts = filled
        outputs |= dict(self.tokenizer(texts, add_special_tokens=kwargs.get("add_special_tokens", True)))
        return BatchFeature(outputs, tensor_type=return_tensors)
"""

PATTERN_CODE = """
import re

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin


class PatternProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __call__(self, text=None, images=None, return_tensors=None, **kwargs):
        text = text if isinstance(text, str) else text[0]
        outputs = dict(self.image_processor(images, return_tensors=return_tensors)) if images is not None else {}
        if images is not None:
            pieces = re.split(r"\\\\(<img>\\\\./</img>\\\\)", text)
            text = ("<img>" + "<atom>" * 4 + "</img>").join(pieces)
        return BatchFeature({**outputs, **self.tokenizer([text])}, tensor_type=return_tensors)
"""

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else PLACEHOLDER }}"
    "{% endfor %}{% endif %} </s>{% endfor %}"
)
TOKENS = ["<image>", "<img>", "</img>", "<tile>", "<atom>"]


def _remote(directory: Path, name: str, code: str, placeholder: str) -> Path:
    image = {**HALF, "image_processor_type": "TileImageProcessor", "tile": 16, "size": square(16)}
    image |= {"auto_map": {"AutoImageProcessor": "image_processing_tiles.TileImageProcessor"}}
    settings = {"processor_class": name, "auto_map": {"AutoProcessor": f"processing_own.{name}"}}
    _write(directory, image, settings, TOKENS)
    # As in published directories, where the image settings have a file of their own.
    (directory / "processor_config.json").write_text(json.dumps(settings))
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    (directory / "image_processing_tiles.py").write_text(IMAGES_CODE)
    (directory / "processing_own.py").write_text(code)
    template = TEMPLATE.replace("PLACEHOLDER", repr(placeholder))
    (directory / "chat_template.jinja").write_text(template)
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    (directory / "config.json").write_text(json.dumps({"image_token_id": ids["<atom>"]}))
    return directory


def tiles(directory: Path) -> Path:
    """Tiles and a thumbnail, each of some tokens between tokens of its own."""
    return _remote(directory, "TileProcessor", PROCESSOR_CODE, "<image>")


def pattern(directory: Path) -> Path:
    """A placeholder of several tokens, which the processor does not name."""
    return _remote(directory, "PatternProcessor", PATTERN_CODE, "(<img>./</img>)")
