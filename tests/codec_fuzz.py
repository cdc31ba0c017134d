"""Mutated messages through every decoder: only `CodecError` may come out, in bounded time and memory.

    python tests/codec_fuzz.py --messages 200000 [--seed N] [--seconds S] [--save FOLDER]

What the codec writes is mutated (bit flips, cuts, splices, length bombs, nesting, foreign
tokens); around three of four mutated bodies the head is laid anew, so that they are read at all. Bodies made
from a hostile grammar are mixed in: keys of other types, unknown extensions.

For each message: nothing but `CodecError` is raised; processor time of the reading thread is at most 250 ms
for each started megabyte, twice what msgspec takes to build a megabyte of empty lists; and memory, traced
for one message in ten and for the smaller bombs, peaks at no more than 256 KiB + 90 x the message (150 x a
tagged one) + 300 x its values. What does not hold is written to the folder and ends the run.
"""

import argparse
import base64
import contextlib
import json
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import mmcodecs
from mmcodecs.wire import Message as WireMessage
from mmrender.media.vllm_items import decode_mm_kwargs_item

Message = bytes | list[bytes]
Decode = Callable[[Any], Any]

SECONDS_PER_MEGABYTE = 0.25
SECONDS_PER_100_000_ADDITIONS = 0.003  # of a machine that the bound is meant for
WIRE = Path(__file__).parent / "data" / "wire"
_FIRST_BYTES = "007f80818f90919fa0a1c0c1c4c7c8c9cacbcfd3d4d8d9dbdcdddedfe0ff"
_TOKENS = [bytes([byte]) for byte in bytes.fromhex(_FIRST_BYTES)]
_NUMBERS = (0, 1, -1, 63, 64, 65, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1)


def values() -> list[Any]:
    """What is mutated: every kind of record, some small and some not."""
    return [
        None, [1, -1, 2.5, "text", b"bytes", True, None], {"a": {"b": {"c": [1, [2, [3]]]}}}, 2**63,
        {"ids": list(range(200)), "probs": [0.5] * 100, "mask": [True] * 50, "words": ["ab", "c"] * 20},
        [np.arange(12).reshape(3, 4), np.arange(300, dtype=">f4"), np.array(2.5), np.zeros((0, 3))],
        [np.float32(1), np.bool_(True), np.complex64(1j), np.zeros((0, 3), ">i2")],
        {"same": [np.arange(100)] * 3, "raw": mmcodecs.RawTensor("bfloat16", np.arange(200, dtype="u2"))},
        [(1, (2, [3, ("a",)])), {"t": (None, {"k": ()})}],
        [b"x" * 5000, "y" * 5000, bytearray(b"z"), memoryview(b"m" * 5000)],
        [{"step": step, "reward": 0.5, "pixels": np.full((20, 20), step, "u1")} for step in range(10)],
        [mmcodecs.Shared(np.arange(100), b"key"), mmcodecs.Shared(np.arange(100), b"key")],
    ]  # fmt: skip


def tagged_values() -> list[Any]:
    return [
        {"pixels": np.arange(50, dtype="f4").reshape(5, 10), "grid": np.array([[1, 2, 3]])},
        [{"x": np.zeros(3, "u1"), "ids": list(range(100))}, {"__torch_tensor__": "no"}, "text", None],
    ]


def vllm_messages() -> list[bytes]:
    """Items in vLLM's form, as msgpack before its base64."""
    field_forms: list[Any] = [
        ["batched", {"keep_on_cpu": True}],
        ["flat", {"keep_on_cpu": False, "slices": [[0, 4, None]], "dim": 0}],
        ["shared", {"keep_on_cpu": True, "batch_size": 1}],
    ]
    tensor = ["float32", [4, 2], msgspec.msgpack.Ext(3, bytes(range(32)))]
    grid = ["int64", [3], msgspec.msgpack.Ext(3, bytes(24))]
    data = [grid, 1, 2.5]
    items = [
        {"p": {"data": tensor, "field": form}, "g": {"data": data, "field": form}} for form in field_forms
    ]
    return [msgspec.msgpack.encode(item) for item in items]


UNBOUNDED = mmcodecs.Limits(max_bytes=1 << 60, max_head_bytes=1 << 60, max_frames=1 << 30)


def lay(body: bytes, payloads: Sequence[bytes], *, single: bool) -> Message:
    """A message whose head fits this body and these payloads, whatever they hold."""
    arrays = [np.frombuffer(payload, np.uint8) for payload in payloads]
    message = WireMessage(body, arrays, UNBOUNDED)
    return bytes(message.single(None)) if single else [bytes(frame) for frame in message.frames()]


class Mutator:
    """Damage bytes, and make hostile ones.

    Args:
        rng: Source of every choice.
        corpus: Byte strings to splice from.
    """

    def __init__(self, rng: random.Random, corpus: list[bytes]) -> None:
        self.rng = rng
        self.corpus = corpus

    def mutate(self, data: bytes) -> bytes:
        """Give the data with one to four things done to it."""
        out = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            self._damage(out)
        return bytes(out)

    def _at(self, data: bytearray) -> int:
        # Most of what matters stands at the start.
        size = len(data) or 1
        return self.rng.randrange(min(size, 160)) if self.rng.random() < 0.5 else self.rng.randrange(size)

    def _damage(self, data: bytearray) -> None:
        rng, at = self.rng, self._at(data)
        match rng.randrange(9):
            case 0:
                for _ in range(rng.choice((1, 1, 3, 8)) if data else 0):
                    data[self._at(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + rng.randrange(2)] = rng.choice(_TOKENS)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randrange(1, 40)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 60)] * rng.choice((1, 1, 2, 50))
            case 5:
                other = rng.choice(self.corpus)
                start = rng.randrange(len(other) or 1)
                data[at : at + rng.randrange(30)] = other[start : start + rng.randrange(200)]
            case 6:
                size = rng.choice((1, 2, 4, 8))
                value = rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)
                data[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
            case 7:
                opener = rng.choice((b"\x91", b"\x81\xa1a", b"\xd4\x03\x91", b"\x92\x01", b"\x81\x91"))
                data[at:at] = opener * rng.choice((1, 5, 62, 70, 3000))
            case _:
                data[at : at + rng.randrange(20)] = rng.randbytes(rng.randrange(40))

    def grammar(self, depth: int = 0) -> bytes:
        """Make msgpack that is well-formed and asks for trouble."""
        pick = self.rng.randrange(8 if depth < 6 else 4)
        if pick < 2:
            return self.rng.choice(
                (b"\x01", b"\xc0", b"\xc3", b"\xa1a", b"\xcb" + bytes(8), b"\xc4\x01b", b"\xe0")
            )
        if pick == 2:
            code = self.rng.choice((*range(19), 127, 255))
            payload = self.rng.choice(
                (b"", b"\x00", self.rng.randbytes(self.rng.randrange(40)), self.record())
            )
            return b"\xc8" + struct.pack(">H", len(payload)) + bytes([code]) + payload
        count = self.rng.randrange(5)
        if pick == 3:
            return b"\xa3" + self.rng.choice((b"abc", b"\xff\xfe\xfd", b"\xed\xa0\x80"))
        if pick < 6:
            return bytes([0x90 + count]) + b"".join(self.grammar(depth + 1) for _ in range(count))
        if pick == 6:
            inner = bytes([0x90 + count]) + b"".join(self.grammar(depth + 1) for _ in range(count))
            return b"\xc8" + struct.pack(">H", len(inner)) + bytes([self.rng.choice((2, 3, 3, 3, 6))]) + inner
        keys = (b"\xa1a", b"\xa1a", b"\xa1b", b"\xd9\x01a", b"\x01", b"\xc0", b"\x90")
        pairs = (self.rng.choice(keys) + self.grammar(depth + 1) for _ in range(count))
        return bytes([0x80 + count]) + b"".join(pairs)

    def record(self) -> bytes:
        """Make an array record, each field likely right."""
        ndim = self.rng.choice((0, 1, 1, 2, 9, 40))
        dims = [self.rng.choice((0, 1, 2, 3, 2**32, 2**63)) for _ in range(ndim)]
        start = struct.pack(
            "<BBBBI", self.rng.choice((1, 5, 6, 11, 16, 22, 32, 34, 35, 99)),
            self.rng.choice((0, 8, 9, 16, 24, 12, 64)), ndim, self.rng.choice((0, 0, 3, 99)),
            self.rng.choice((0, 1, 3, 2**31)),
        )  # fmt: skip
        rest = self.rng.choice((b"", bytes(4), bytes(8), b"\xff" * 4, bytes(4) + b"key"))
        return start + struct.pack(f"<{ndim}Q", *dims) + rest


def _read_file(data: bytes, folder: Path) -> Any:
    path = folder / "mutated.mmc"
    path.write_bytes(data)
    return list(mmcodecs.RecordReader(path))


class Decoders:
    """Every way in, by name, each with the kind of message that it takes."""

    def __init__(self, folder: Path) -> None:
        self.codec: dict[str, Decode] = {
            "decode": mmcodecs.decode,
            "decode, torch": lambda data: mmcodecs.decode(data, framework="torch"),
            "decode, copy": lambda data: mmcodecs.decode(data, copy=True),
            "decode, type": lambda data: mmcodecs.decode(data, type=dict[str, list[int]]),
            "Decoder": lambda data: mmcodecs.Decoder(table_bytes=1 << 20).decode(data),
        }
        self.tagged: dict[str, Decode] = {
            "decode_tagged": mmcodecs.decode_tagged,
            "decode_tagged, torch": lambda data: mmcodecs.decode_tagged(data, to_torch=True),
        }
        self.vllm: dict[str, Decode] = {
            "vLLM item": lambda data: decode_mm_kwargs_item(base64.b64encode(data).decode()),
            "vLLM item, torch": lambda data: decode_mm_kwargs_item(base64.b64encode(data), framework="torch"),
        }
        self.files: dict[str, Decode] = {"RecordReader": lambda data: _read_file(data, folder)}


@dataclass
class Report:
    """What a run saw."""

    messages: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    worst_memory: tuple[float, str] = (0.0, "")
    traced: int = 0
    failures: list[tuple[str, str, Message]] = field(default_factory=list)


def touch(value: Any) -> None:
    """Use what was decoded: a view that lies about its memory would show here."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            touch(item)
    elif isinstance(value, mmcodecs.RawTensor):
        value.bits.tobytes()
    elif isinstance(value, np.ndarray):
        value.tobytes()
    elif hasattr(value, "numel"):
        value.clone()


def _retake(decode: Decode, message: Message) -> float:
    """Time a slow message once more, by the pace of this moment: neighbours on the machine slow the
    processor."""
    started = time.thread_time()
    total = 0
    for number in range(100_000):
        total += number
    pace = max(1.0, (time.thread_time() - started) / SECONDS_PER_100_000_ADDITIONS)
    started = time.thread_time()
    with contextlib.suppress(mmcodecs.CodecError):
        decode(message)
    return (time.thread_time() - started) / pace


class Fuzzer:
    """Run messages through decoders and hold what comes out against the bounds.

    Args:
        seed: Of every choice.
        folder: Where record files are written for their reader.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.decoders = Decoders(folder)
        self.report = Report()
        whole = [bytes(mmcodecs.encode(value)) for value in values()]
        encoder = mmcodecs.Encoder(table_bytes=4096)
        whole += [bytes(encoder.encode(mmcodecs.Shared(np.arange(100), b"key"))) for _ in range(2)]
        self.messages = whole + [path.read_bytes() for path in WIRE.glob("*.bin")]
        self.frames = [[bytes(part) for part in mmcodecs.encode_frames(value)] for value in values()]
        self.tagged = [mmcodecs.encode_tagged(value) for value in tagged_values()]
        self.vllm = vllm_messages()
        self.vllm_text = [base64.b64encode(message) for message in self.vllm]
        path = folder / "seed.mmc"
        with mmcodecs.RecordWriter(path) as writer:
            for value in values()[:6]:
                writer.append(value)
        self.file = path.read_bytes()
        self.decoders.codec["decode, torch"](
            self.messages[5]
        )  # else its import is taken for the message's memory
        self.mutator = Mutator(self.rng, self.messages + self.tagged + self.vllm)

    def step(self) -> None:
        """Make one message and read it by one decoder."""
        kind = self.rng.choices(
            ("frames", "bytes", "grammar", "tagged", "vllm", "text", "file"), (8, 4, 5, 3, 2, 1, 1)
        )[0]
        name, decode, message = self._message(kind)
        self.run(name, decode, message, trace=self.rng.random() < 0.1)

    def run(self, name: str, decode: Decode, message: Message, *, trace: bool) -> None:
        """Read one message, and note what happened."""
        report = self.report
        report.messages += 1
        size = len(message) if isinstance(message, bytes) else sum(map(len, message))
        if trace:
            tracemalloc.start()
        started = time.thread_time()
        value = None
        try:
            value = decode(message)
            outcome = "read"
        except mmcodecs.CodecError as error:
            outcome = type(error).__name__
        except BaseException as error:
            outcome = f"FOREIGN {type(error).__name__}"
            report.failures.append((name, f"{type(error).__name__}: {error}", message))
        took = time.thread_time() - started
        if trace:
            self._check_memory(name, message, size)
        report.outcomes[f"{name}: {outcome}"] += 1
        touch(value)
        megabytes = max(1, -(-size // 1_000_000))
        if trace:
            return  # tracing slows the reader several times over
        if took > SECONDS_PER_MEGABYTE * megabytes:
            took = min(_retake(decode, message) for _ in range(5))
        report.slowest = max(report.slowest, (took / megabytes, f"{name}, {size} bytes"))
        if took > SECONDS_PER_MEGABYTE * megabytes:
            report.failures.append((name, f"{took * 1e3:.0f} ms for {size} bytes", message))

    def _check_memory(self, name: str, message: Message, size: int) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.report.traced += 1
        factor = 150 if name.startswith("decode_tagged") else 90
        allowed = 256 * 1024 + factor * size + 300 * min(size, 65_536)
        self.report.worst_memory = max(
            self.report.worst_memory, (peak / allowed, f"{name}: {peak} of {allowed} bytes")
        )
        if peak > allowed:
            self.report.failures.append((name, f"{peak} bytes for {size}", message))

    def _pick(self, decoders: dict[str, Decode]) -> tuple[str, Decode]:
        name = self.rng.choice(list(decoders))
        return name, decoders[name]

    def _message(self, kind: str) -> tuple[str, Decode, Message]:
        """Make a message of one kind, and choose who reads it."""
        decoders, mutate, rng = self.decoders, self.mutator.mutate, self.rng
        match kind:
            case "bytes":
                return *self._pick(decoders.codec), mutate(rng.choice(self.messages))
            case "tagged":
                return *self._pick(decoders.tagged), mutate(rng.choice(self.tagged))
            case "vllm":
                return *self._pick(decoders.vllm), mutate(rng.choice(self.vllm))
            case "text":
                return "vLLM item, text", decode_mm_kwargs_item, mutate(rng.choice(self.vllm_text))
            case "file":
                return *self._pick(decoders.files), mutate(self.file)
            case "grammar":
                body = self.mutator.grammar()
                if rng.random() < 0.3:
                    return *self._pick(decoders.tagged), body
                payloads = [bytes(rng.choice((0, 4, 8, 24))) for _ in range(rng.choice((0, 0, 1, 2)))]
                return *self._pick(decoders.codec), lay(body, payloads, single=True)
        # Mutate body and payloads, and lay a head around them that fits; or leave it as it was.
        head, *payloads = rng.choice(self.frames)
        body = mutate(head[64 + 24 * len(payloads) :])
        if payloads and rng.random() < 0.2:
            at = rng.randrange(len(payloads))
            payloads[at] = mutate(payloads[at])
        if rng.random() < 0.1:
            rng.shuffle(payloads)
        laid: Message = lay(body, payloads, single=rng.random() < 0.5)
        if isinstance(laid, list) and rng.random() < 0.1:
            laid = [mutate(head), *payloads]
        return *self._pick(decoders.codec), laid

    def bombs(self) -> None:
        """Read what is made to be as expensive as it can be, by each decoder that takes it."""
        scalar_record = b"\xc7\x09\x01\x06\x09\x00\x00" + bytes(4) + b"a"
        for token in (
            b"\x90", b"\x80", b"\xc0", b"\xa0", b"\xe0", b"\x91\x01", b"\x81\xa0\x01", b"\xd4\x03\x90",
            b"\xd9\x00", b"\xc4\x00", scalar_record,
        ):  # fmt: skip
            for size in (60_000, 4_000_000):
                count = size // len(token)
                body = b"\xdd" + struct.pack(">I", count) + token * count
                laid = [lay(body, [], single=True)]
                laid += [
                    lay(b"\xc9" + struct.pack(">I", len(body)) + code + body, [], single=True)
                    for code in (b"\x02", b"\x03")
                ]
                runs = [("decode", self.decoders.codec["decode"], message) for message in laid]
                runs.append(("vLLM item", self.decoders.vllm["vLLM item"], body))
                if size == 60_000:  # the tagged dialect has no bound of its own on the number of containers
                    runs += [(name, decode, body) for name, decode in self.decoders.tagged.items()]
                for name, decode, message in runs:
                    self.run(name, decode, message, trace=False)
                    if size == 60_000:  # tracing every object of a large one takes half a minute
                        self.run(name, decode, message, trace=True)


def show(report: Report, seconds: float) -> None:
    print(f"{report.messages} messages in {seconds:.0f} s, memory traced for {report.traced}")
    for name, count in sorted(report.outcomes.items()):
        print(f"  {count:8d}  {name}")
    print(
        f"slowest: {report.slowest[0] * 1e3:.1f} ms per started megabyte ({report.slowest[1]}); bound {SECONDS_PER_MEGABYTE * 1e3:.0f}"
    )
    print(f"most memory: {report.worst_memory[0]:.2f} of what is allowed ({report.worst_memory[1]})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop earlier than that")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--save", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(options.seed, Path(folder))
        fuzzer.bombs()
        while fuzzer.report.messages < options.messages and not fuzzer.report.failures:
            fuzzer.step()
            if time.monotonic() - started > options.seconds:
                break
    show(fuzzer.report, time.monotonic() - started)
    for number, (name, problem, message) in enumerate(fuzzer.report.failures):
        options.save.mkdir(exist_ok=True)
        parts = message if isinstance(message, list) else [message]
        (options.save / f"{number}.json").write_text(
            json.dumps({"decoder": name, "problem": problem, "parts": [part.hex() for part in parts]})
        )
        print(f"FAILED {name}: {problem}; kept in {options.save / f'{number}.json'}")
    sys.exit(bool(fuzzer.report.failures))


if __name__ == "__main__":
    main()
