"""What vLLM itself makes of items: run with the interpreter of an environment that has it.

Usage: `python vllm_oracle.py REQUEST ANSWER`, both JSON files. See `test_vllm_items_real.py`.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
)
from vllm.multimodal.inputs import MultiModalKwargsItems

from record_vllm_items import described, described_item, fields_config


def read(text):
    """Read an item, describe it and write it again."""
    item = decode_mm_kwargs_item(text)
    return {"item": described_item(item), "text": encode_mm_kwargs_item(item)}


def split(architecture, text):
    """Cut a batch as the architecture's processor class says, and join it again."""
    batch = decode_mm_kwargs_item(text).get_data()
    items = MultiModalKwargsItems.from_hf_inputs(batch, fields_config(architecture, batch))
    return {
        "items": {
            modality: [encode_mm_kwargs_item(item) for item in found] for modality, found in items.items()
        },
        "joined": {key: described(value) for key, value in items.get_data().items()},
    }


def main():
    request, answer = map(Path, sys.argv[1:])
    asked = json.loads(request.read_text())
    found = {
        "read": [read(text) for text in asked["read"]],
        "split": [split(*batch) for batch in asked["split"]],
    }
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
