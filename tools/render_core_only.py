"""Render `conversation.py` with mmrender where no extra is installed."""

import importlib.util
import sys

from conversation import MESSAGES, print_result, with_picture
from mmrender import Renderer

EXTRAS = ("torch", "torchvision", "transformers", "aiohttp", "rich", "vllm", "ray")


def main() -> None:
    """Refuse an environment that holds an extra's package, then render."""
    present = [name for name in EXTRAS if importlib.util.find_spec(name)]
    if present:
        sys.exit(f"the core dependencies bring {', '.join(present)}")
    rendered = Renderer.from_pretrained(sys.argv[1], image_backend="pil").render(
        with_picture(MESSAGES), add_generation_prompt=True
    )
    (item,) = rendered.multi_modal_data.mm_items["image"]
    print_result(rendered.token_ids, item.tensors("float32")["pixel_values"])


if __name__ == "__main__":
    main()
