"""Ways to put a mapping of arrays and lists into bytes: ours, the plain form, and the libraries of the field.

A peer is a pair of functions; `views` says whether what it decodes are views of its input. Each gets the same
mapping from names to numpy arrays and lists of Python scalars, and gives back a mapping of the same names.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgpack
import msgspec
import numpy as np

import mmcodecs

Data = dict[str, Any]
_TAG = "__torch_tensor__"


@dataclass(frozen=True)
class Peer:
    name: str
    encode: Callable[[Data], Any]
    decode: Callable[[Any], Any]
    views: str


def _plain() -> Peer:
    def default(value: Any) -> Any:
        return {_TAG: True, "dtype": str(value.dtype), "shape": list(value.shape), "data": value.tobytes()}

    def hook(value: dict[str, Any]) -> Any:
        if value.get(_TAG):
            return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return value

    return Peer(
        "plain form (msgpack, tagged dict, tobytes)",
        lambda data: msgpack.packb(data, default=default),
        lambda raw: msgpack.unpackb(raw, object_hook=hook),
        "no",
    )


def _described(value: Any) -> bytes:
    return json.dumps([value.dtype.str, value.shape]).encode().ljust(64)


def _undescribed(data: Any) -> Any:
    dtype, shape = json.loads(bytes(data[:64]))
    return np.frombuffer(data, dtype, offset=64).reshape(shape)


def _msgpack_ext() -> Peer:
    return Peer(
        "msgpack ExtType",
        lambda data: msgpack.packb(data, default=lambda a: msgpack.ExtType(1, _described(a) + a.tobytes())),
        lambda raw: msgpack.unpackb(raw, ext_hook=lambda _, data: _undescribed(data)),
        "no",
    )


def _msgspec_inline() -> Peer:
    def enc_hook(value: Any) -> Any:
        return [value.dtype.str, value.shape, msgspec.msgpack.Ext(1, value.data.cast("B"))]

    encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
    decoder = msgspec.msgpack.Decoder(ext_hook=lambda _, data: data)

    def decode(raw: Any) -> Any:
        out = decoder.decode(raw)
        for name, value in out.items():
            if len(value) == 3 and isinstance(value[2], memoryview):
                out[name] = np.frombuffer(value[2], value[0]).reshape(value[1])
        return out

    return Peer("msgspec, inline extension", encoder.encode, decode, "yes, unaligned")


def _msgspec_frames() -> Peer:
    def encode(data: Data) -> list[Any]:
        frames: list[Any] = [b""]

        def enc_hook(value: Any) -> Any:
            frames.append(value.data)
            return [value.dtype.str, value.shape, len(frames) - 1]

        frames[0] = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode(data)
        return frames

    def decode(frames: list[Any]) -> Any:
        out = msgspec.msgpack.decode(frames[0])
        for name, value in out.items():
            if len(value) == 3 and isinstance(value[0], str):
                out[name] = np.frombuffer(frames[value[2]], value[0]).reshape(value[1])
        return out

    return Peer("msgspec, out-of-band frames", encode, decode, "yes")


def _pickle() -> Peer:
    def encode(data: Data) -> Any:
        buffers: list[Any] = []
        return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers

    return Peer("pickle 5 out of band", encode, lambda got: pickle.loads(got[0], buffers=got[1]), "yes")


def _ormsgpack() -> Peer:
    import ormsgpack

    return Peer(
        "ormsgpack",
        lambda data: ormsgpack.packb(data, default=lambda a: ormsgpack.Ext(1, _described(a) + a.tobytes())),
        lambda raw: ormsgpack.unpackb(raw, ext_hook=lambda _, data: _undescribed(data)),
        "no",
    )


def _safetensors() -> Peer:
    from safetensors.numpy import load, save

    def encode(data: Data) -> bytes:
        lists = {name: value for name, value in data.items() if isinstance(value, list)}
        arrays = {name: value for name, value in data.items() if not isinstance(value, list)}
        return save(arrays, metadata={"lists": msgspec.json.encode(lists).decode()})

    def decode(raw: bytes) -> Any:
        head = msgspec.json.decode(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        return {**load(raw), **msgspec.json.decode(head["__metadata__"]["lists"])}

    return Peer("safetensors", encode, decode, "no")


def _torch_save() -> Peer:
    import torch

    def encode(data: Data) -> bytes:
        out = io.BytesIO()
        torch.save({n: v if isinstance(v, list) else torch.from_numpy(v) for n, v in data.items()}, out)
        return out.getvalue()

    return Peer("torch.save", encode, lambda raw: torch.load(io.BytesIO(raw), weights_only=True), "no")


def _tensordict() -> Peer:
    import torch
    from tensordict import TensorDict

    def encode(data: Data) -> bytes:
        tensors = {n: torch.from_numpy(v) for n, v in data.items() if not isinstance(v, list)}
        lists = {n: v for n, v in data.items() if isinstance(v, list)}
        return pickle.dumps((TensorDict(tensors).consolidate(), lists), protocol=5)

    def decode(raw: bytes) -> Any:
        tensors, lists = pickle.loads(raw)
        return {**dict(tensors.items()), **lists}

    return Peer("tensordict consolidate + pickle", encode, decode, "no")


def _pyarrow() -> Peer:
    import pyarrow as pa

    def encode(data: Data) -> Any:
        sink = pa.BufferOutputStream()
        lists = {n: v for n, v in data.items() if isinstance(v, list)}
        arrays = {n: v for n, v in data.items() if not isinstance(v, list)}
        names = [*lists, *arrays]
        sink.write(json.dumps([len(lists), names]).encode().ljust(4096))
        for value in lists.values():
            batch = pa.record_batch([pa.array(value)], names=["x"])
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
        for value in arrays.values():
            pa.ipc.write_tensor(pa.Tensor.from_numpy(value), sink)
        return sink.getvalue()

    def decode(raw: Any) -> Any:
        source = pa.BufferReader(raw)
        count, names = json.loads(source.read(4096))
        out = {}
        for name in names[:count]:
            with pa.ipc.open_stream(source) as stream:
                out[name] = stream.read_all()["x"].to_pylist()
        for name in names[count:]:
            out[name] = pa.ipc.read_tensor(source).to_numpy()
        return out

    return Peer("pyarrow IPC", encode, decode, "yes, 8-byte aligned")


def ours() -> list[Peer]:
    pool = mmcodecs.BufferPool()
    return [
        Peer("mmcodecs, frames", mmcodecs.encode_frames, mmcodecs.decode, "yes"),
        Peer(
            "mmcodecs, one pooled buffer",
            lambda data: mmcodecs.encode(data, buffer=pool),
            mmcodecs.decode,
            "yes, 64-byte aligned",
        ),
        Peer("mmcodecs, one fresh buffer", mmcodecs.encode, mmcodecs.decode, "yes, 64-byte aligned"),
    ]


def peers() -> Iterator[Peer | str]:
    """Give each peer that is installed, and the name of each package that is not."""
    yield _plain()
    yield _msgpack_ext()
    yield _msgspec_inline()
    yield _msgspec_frames()
    yield _pickle()
    optional = {
        "ormsgpack": _ormsgpack,
        "safetensors": _safetensors,
        "torch": _torch_save,
        "tensordict": _tensordict,
        "pyarrow": _pyarrow,
    }
    for package, build in optional.items():
        yield build() if find_spec(package) else package
