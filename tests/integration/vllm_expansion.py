"""How vLLM's own processors widen prompts: run with the interpreter of an environment that has it.

Usage: `python vllm_expansion.py CASES ANSWER`, pickled and JSON; no engine runs and no weights are read. See
`test_vllm_expansion.py`.
"""

import json
import os
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "servers" / "vllm"))

from serve import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs


def processor_of(directory):
    kind = AutoConfig.from_pretrained(directory).model_type
    named = {"architectures": [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]]}
    model = ModelConfig(directory, max_model_len=2048, dtype="float32", hf_overrides=named)
    return MULTIMODAL_REGISTRY.create_processor(model)


def widened(processor, case):
    """Return tokens, and the places of those that hold features; or what was raised."""
    chat = processor.info.get_hf_processor()
    text = chat.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
    ids = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
    try:
        items = processor.info.parse_mm_data(case["data"])
        found = processor.apply(ProcessorInputs(ids, items), TimingContext(enabled=False))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    places = {
        modality: [
            [
                place.offset + index
                for index in range(place.length)
                if place.is_embed is None or bool(place.is_embed[index])
            ]
            for place in ranges
        ]
        for modality, ranges in found["mm_placeholders"].items()
    }
    return {"ids": list(found["prompt_token_ids"]), "places": places}


def main():
    cases, answer = map(Path, sys.argv[1:])
    found = {}
    for directory, asked in pickle.loads(cases.read_bytes()).items():
        processor = processor_of(directory)
        found[directory] = [widened(processor, case) for case in asked]
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
