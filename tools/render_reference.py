"""Build the tiny model in the given folder and print what Transformers makes of `conversation.py`."""

import sys
from pathlib import Path

from transformers import AutoImageProcessor, AutoTokenizer

from conversation import IMAGE_TOKEN, MESSAGES, load_picture, print_result
from mmrender.testing.tiny_model import build_tiny_model


def main() -> None:
    """Tokenize with the model's own template and widen the placeholder by hand."""
    model = build_tiny_model(Path(sys.argv[1]), weights=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    features = processor(images=[load_picture()], return_tensors="np")
    count = int(features["image_grid_thw"][0].prod()) // processor.merge_size**2
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    print_result(
        tokenizer(text.replace(IMAGE_TOKEN, IMAGE_TOKEN * count))["input_ids"], features["pixel_values"]
    )


if __name__ == "__main__":
    main()
