"""mmcodecs: values that hold arrays, as bytes, without copying the arrays.

```python
import mmcodecs, numpy as np

message = mmcodecs.encode({"pixels": np.zeros((1024, 1536), np.float32), "grid": (1, 32, 32)})
mmcodecs.decode(message)["pixels"]  # a read-only view of `message`
```
"""

from mmcodecs.buffers import BufferPool
from mmcodecs.codec import decode, encode, encode_frames, encode_parts
from mmcodecs.connection import Decoder, Encoder
from mmcodecs.errors import (
    BufferTooSmallError,
    ChecksumError,
    CodecError,
    ConversionError,
    DecodeError,
    EncodeError,
    FrameworkError,
    LimitError,
    MissingKeyError,
    TruncatedError,
    UnsupportedTypeError,
    VersionError,
)
from mmcodecs.frame import message_length
from mmcodecs.limits import Limits
from mmcodecs.records import RecordReader, RecordWriter, open
from mmcodecs.shared import Shared
from mmcodecs.tagged import (
    decode_tagged,
    decode_tensor_payload,
    encode_tagged,
    to_tagged,
    walk_decode_tensors,
)
from mmcodecs.tensors import RawTensor
from mmcodecs.vllm_items import decode_mm_kwargs_item, encode_mm_kwargs_item

__all__ = [
    "BufferPool",
    "BufferTooSmallError",
    "ChecksumError",
    "CodecError",
    "ConversionError",
    "DecodeError",
    "Decoder",
    "EncodeError",
    "Encoder",
    "FrameworkError",
    "LimitError",
    "Limits",
    "MissingKeyError",
    "RawTensor",
    "RecordReader",
    "RecordWriter",
    "Shared",
    "TruncatedError",
    "UnsupportedTypeError",
    "VersionError",
    "decode",
    "decode_mm_kwargs_item",
    "decode_tagged",
    "decode_tensor_payload",
    "encode",
    "encode_frames",
    "encode_mm_kwargs_item",
    "encode_parts",
    "encode_tagged",
    "message_length",
    "open",
    "to_tagged",
    "walk_decode_tensors",
]
