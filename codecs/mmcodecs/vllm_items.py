"""vLLM's multimodal item on the wire, without importing vLLM.

One item is what a model's processor made of one image, video or sound: tensors by keyword, and for each how
those of several items are joined. vLLM 0.20 to 0.32 write it as

    base64(msgpack({key: {"data": NT, "field": [kind, options]}}))

in standard padded base64, where

- NT is a tensor, an integer, a float, a boolean, or an array of NT; at the top also nil, for data that the
  receiver has cached;
- a tensor is `[dtype, [dimension, ...], Ext(3, elements)]`, the dtype by torch's name (`"bfloat16"`), the
  elements little-endian in C order;
- the kinds are `["batched", {keep_on_cpu}]`, `["flat", {keep_on_cpu, slices, dim}]` and
  `["shared", {keep_on_cpu, batch_size}]`; readers take a missing `keep_on_cpu` or `dim` as false or 0;
- `slices` name the whole batch that the item was cut from, one `[start, stop, step]` or an array of such
  per item.

Extension codes 1 and 2 are pickles, and an integer or map in place of the `Ext` refers to memory outside the
message; both are refused. The bytes equal vLLM's own, up to the order of the keys.
"""

from mmcodecs.vllm_decode import decode_mm_kwargs_item
from mmcodecs.vllm_encode import encode_mm_kwargs_item, encode_mm_kwargs_item_as_bytes
from mmcodecs.vllm_model import (
    BatchedField,
    Field,
    FieldElem,
    FlatField,
    KwargsItem,
    NestedTensors,
    SharedField,
    Slices,
)

__all__ = [
    "BatchedField",
    "Field",
    "FieldElem",
    "FlatField",
    "KwargsItem",
    "NestedTensors",
    "SharedField",
    "Slices",
    "decode_mm_kwargs_item",
    "encode_mm_kwargs_item",
    "encode_mm_kwargs_item_as_bytes",
]
