"""Record multimodal items as vLLM itself writes them, for tests that run without vLLM.

Usage, with the interpreter of an environment that has vLLM:
`python tools/record_vllm_items.py tests/data/vllm_items`

Each file holds one item: vLLM's own base64 text, and what it says, in a form that needs no vLLM to compare:
dtypes by name, shapes, elements as hex, fields by kind and options.
"""

import argparse
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
)
from vllm.model_executor.models import registry
from vllm.multimodal import inputs as mm
from vllm.multimodal.inputs import MultiModalFieldConfig as Config

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for dim in shape:
        count *= dim
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count * size,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype).view(shape)


def elem(data: Any, config: Config) -> mm.MultiModalFieldElem:
    return mm.MultiModalFieldElem(data=data, field=config.field)


def family(
    architecture: str, batch: dict[str, Any], index: int = 0, modality: str = "image"
) -> mm.MultiModalKwargsItem:
    """The item that vLLM's own processor class of an architecture makes of a batch."""
    config = fields_config(architecture, batch)
    return mm.MultiModalKwargsItems.from_hf_inputs(batch, config)[modality][index]


def fields_config(architecture: str, batch: dict[str, Any]) -> dict[str, Config]:
    """Result of `_get_mm_fields_config`, asked of the processor class without its model."""
    module, name = registry._MULTIMODAL_MODELS[architecture]
    module = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    model = getattr(__import__(module, fromlist=[name]), name)
    processor = model._processor_factory.processor
    if not isinstance(processor, type):  # a function that chooses one by the model's configuration
        chosen = name.removesuffix("ForConditionalGeneration") + "MultiModalProcessor"
        processor = getattr(sys.modules[model.__module__], chosen)
    vision = types.SimpleNamespace(spatial_merge_size=2)
    info = types.SimpleNamespace(
        get_hf_config=lambda: types.SimpleNamespace(vision_config=vision),
        ctx_video_token="<video>",
    )
    found: dict[str, Config] = processor._get_mm_fields_config(bare(processor, info), batch, {})
    return found


def bare(processor: type, info: Any) -> Any:
    instance: Any = object.__new__(processor)
    instance.info = info
    return instance


def cases() -> Iterator[tuple[str, mm.MultiModalKwargsItem]]:
    grid = torch.tensor([[1, 4, 4], [1, 2, 6]])
    qwen = {"pixel_values": tensor((28, 12), torch.uint8), "image_grid_thw": grid}
    yield "qwen2_vl_first_of_two", family("Qwen2VLForConditionalGeneration", qwen, 0)
    yield "qwen2_vl_second_of_two", family("Qwen2VLForConditionalGeneration", qwen, 1)
    video = {
        "pixel_values_videos": tensor((16, 12), torch.bfloat16),
        "video_grid_thw": torch.tensor([[1, 4, 4]]),
        "second_per_grid_ts": torch.tensor([0.5]),
    }
    yield "qwen2_5_vl_video", family("Qwen2_5_VLForConditionalGeneration", video, 0, "video")
    tiles = {
        "pixel_values_flat": tensor((5, 3, 4, 4), torch.float32),
        "image_num_patches": torch.tensor([3, 2]),
        "image_token_id": torch.tensor(151667),
    }
    yield "internvl_chat", family("InternVLChatModel", tiles, 1)
    patches = {
        "pixel_values": tensor((5, 3, 4, 4), torch.bfloat16),
        "pixel_attention_mask": tensor((5, 4, 4), torch.bool),
        "num_patches": torch.tensor([4, 1]),
    }
    yield "idefics3", family("Idefics3ForConditionalGeneration", patches, 0)
    del patches["pixel_attention_mask"]
    yield "gemma3", family("Gemma3ForConditionalGeneration", patches, 1)
    llava = {"pixel_values": [tensor((3, 4, 4), torch.float16), tensor((3, 2, 6), torch.float16)]}
    yield "llava_lists", family("LlavaForConditionalGeneration", llava, 1)
    yield "every_dtype", every_dtype()
    yield "every_nesting", every_nesting()


def every_dtype() -> mm.MultiModalKwargsItem:
    batched = Config.batched("image")
    tensors = {name: tensor((2, 3), getattr(torch, name), seed) for seed, name in enumerate(DTYPES)}
    return mm.MultiModalKwargsItem({name: elem(data, batched) for name, data in tensors.items()})


def every_nesting() -> mm.MultiModalKwargsItem:
    batched = Config.batched("image")
    nested = [[tensor((2,), torch.int16), 3], [2.5, [tensor((1, 1), torch.float64)]]]
    along_1 = Config.flat_from_sizes("image", torch.tensor([3, 300]), dim=1)
    plain_slices = Config.flat("image", [slice(0, 3), slice(None, -1, 2)])
    return mm.MultiModalKwargsItem(
        {
            "nothing": elem(None, batched),
            "integer": elem(-(2**40), batched),
            "number": elem(0.1, Config.shared("image", 3)),
            "scalar": elem(torch.tensor(7), Config.shared("image", 2, keep_on_cpu=True)),
            "empty": elem(torch.zeros(0, 4), batched),
            "list": elem([], batched),
            "nested": elem(nested, batched),
            "transposed": elem(tensor((4, 6), torch.float32).T, batched),
            "along_1": elem(tensor((2, 3), torch.int32), along_1),
            "plain_slices": elem(tensor((3,), torch.uint8), plain_slices),
        }
    )


def described_item(item: mm.MultiModalKwargsItem) -> dict[str, Any]:
    return {key: {"data": described(e.data), "field": described_field(e.field)} for key, e in item.items()}


def described(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        raw = data.flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape), "hex": raw.hex()}
    if isinstance(data, list | tuple):
        return [described(entry) for entry in data]
    return data


def described_field(field: mm.BaseMultiModalField) -> list[Any]:
    kind = type(field).__name__.removeprefix("MultiModal").removesuffix("Field").lower()
    options = {"keep_on_cpu": field.keep_on_cpu}
    if kind == "flat":
        options |= {"dim": field.dim, "slices": described_slices(field.slices)}
    elif kind == "shared":
        options["batch_size"] = field.batch_size
    return [kind, options]


def described_slices(slices: Any) -> Any:
    if isinstance(slices, slice):
        return {"slice": [None if b is None else int(b) for b in (slices.start, slices.stop, slices.step)]}
    return [described_slices(part) for part in slices]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, item in cases():
        text = encode_mm_kwargs_item(item)
        expected = described_item(item)
        assert described_item(decode_mm_kwargs_item(text)) == expected, name
        record = {"vllm": vllm.__version__, "item": expected, "text": text}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(name, len(text))


if __name__ == "__main__":
    main()
