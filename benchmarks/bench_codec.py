"""Encode and decode a training message by every codec, in one run, against memcpy.

    python benchmarks/bench_codec.py [--mb 123] [--repeats 7] [--json FILE]

The message: 16 arrays of mixed dtypes and shapes, and 92,160 Python scalars in three lists (token ids, log
probabilities, a mask). Times are medians of interleaved repetitions, so that a slow spell of the machine
meets every codec; memory is the peak of the resident set over what it was before, divided by the size of the
arrays. Ratios carry over to other machines, milliseconds do not.
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from codec_peers import Data, Peer, ours, peers

import mmcodecs


def make_data(megabytes: int, *, lists: bool) -> Data:
    rng = np.random.default_rng(0)
    each = megabytes * 1_000_000 // 16
    data: Data = {}
    for index, dtype in enumerate(["float32"] * 8 + ["uint8"] * 4 + ["int64"] * 2 + ["float16"] * 2):
        count = each // np.dtype(dtype).itemsize // 1176
        raw = rng.integers(0, 120, (count, 1176), dtype=np.uint8)
        data[f"array_{index}"] = raw.astype(dtype)
    entries = 30_720
    flat: dict[str, Any] = {
        "token_ids": rng.integers(0, 151_936, entries),
        "logprobs": -rng.random(entries),
        "mask": rng.random(entries) < 0.5,
    }
    return data | {name: value.tolist() if lists else value for name, value in flat.items()}


def same(expected: Any, got: Any) -> bool:
    return set(expected) == set(got) and all(
        np.array_equal(np.asarray(expected[name]), np.asarray(got[name])) for name in expected
    )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class Copy:
    """One memcpy between two warm buffers."""

    def __init__(self, nbytes: int) -> None:
        self.source = np.ones(nbytes, np.uint8)
        self.target = np.ones(nbytes, np.uint8)

    def run(self) -> None:
        np.copyto(self.target, self.source)


class Resident:
    """Peak of the resident set over its value at the start, where the system tells (Linux)."""

    def __init__(self) -> None:
        try:
            self.trim = ctypes.CDLL("libc.so.6").malloc_trim
            Path("/proc/self/clear_refs").write_text("5")
            self.works = True
        except (OSError, AttributeError):
            self.works = False

    @staticmethod
    def _read(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise OSError(f"no {field}")

    def peak(self, call: Callable[[], Any]) -> tuple[int | None, Any]:
        if not self.works:
            return None, call()
        gc.collect()
        self.trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = self._read("VmRSS")
        result = call()
        return max(0, self._read("VmHWM") - before), result


def measure(peer_list: list[Peer], data: Data, repeats: int) -> dict[str, dict[str, float]]:
    tensors = sum(value.nbytes for value in data.values() if isinstance(value, np.ndarray))
    copy = Copy(tensors)
    times: dict[str, dict[str, list[float]]] = {p.name: {"encode": [], "decode": []} for p in peer_list}
    copies = []
    for round_number in range(repeats + 1):
        took, _ = timed(copy.run)
        copies.append(took)
        for peer in peer_list:
            encode_s, message = timed(lambda peer=peer: peer.encode(data))
            decode_s, decoded = timed(lambda peer=peer, message=message: peer.decode(message))
            if round_number == 0:
                if not same(data, decoded):
                    raise SystemExit(f"{peer.name} does not give back what it was given")
            else:
                times[peer.name]["encode"].append(encode_s)
                times[peer.name]["decode"].append(decode_s)
            del decoded, message
    memcpy = statistics.median(copies[1:])
    out = {"memcpy": {"encode_s": memcpy}}
    for name, taken in times.items():
        out[name] = {f"{way}_s": statistics.median(values) for way, values in taken.items()}
    del copy
    resident = Resident()
    for peer in peer_list:
        grew, message = resident.peak(lambda peer=peer: peer.encode(data))
        grew_back, decoded = resident.peak(lambda peer=peer, message=message: peer.decode(message))
        if grew is not None and grew_back is not None:
            out[peer.name] |= {"encode_peak": grew / tensors, "decode_peak": grew_back / tensors}
        del message, decoded
    return out


def longest_hold(encode: Callable[[Data], Any], data: Data, repeats: int) -> float:
    """Give the longest time that another thread could not run while one message was encoded, in seconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    best = float("inf")
    try:
        for _ in range(repeats):
            done = threading.Event()
            worker = threading.Thread(target=lambda done=done: (encode(data), done.set()))
            longest, last = 0.0, time.perf_counter()
            worker.start()
            while not done.is_set():
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            longest = max(longest, time.perf_counter() - last)
            worker.join()
            best = min(best, longest)
    finally:
        sys.setswitchinterval(interval)
    return best


def bars(results: dict[str, dict[str, float]], arrays: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The bar of each figure, what was reached, and whether that is enough."""
    plain, memcpy = results["plain form (msgpack, tagged dict, tobytes)"], results["memcpy"]["encode_s"]
    frames, pooled = results["mmcodecs, frames"], results["mmcodecs, one pooled buffer"]
    fresh, array_frames = results["mmcodecs, one fresh buffer"], arrays["mmcodecs, frames"]
    msgspec = results.get("msgspec, out-of-band frames")
    rows: list[tuple[str, str, float, float | None]] = [
        ("encode, frames: time / memcpy", "at most", 0.12, frames["encode_s"] / memcpy),
        ("encode, frames: times faster than plain", "at least", 100, plain["encode_s"] / frames["encode_s"]),
        ("encode, one pooled buffer: time / memcpy", "at most", 1.25, pooled["encode_s"] / memcpy),
        ("encode, pooled: times faster than plain", "at least", 10, plain["encode_s"] / pooled["encode_s"]),
        ("encode, one fresh buffer: time / memcpy", "at most", 2.5, fresh["encode_s"] / memcpy),
        ("encode, fresh: times faster than plain", "at least", 5, plain["encode_s"] / fresh["encode_s"]),
        ("decode, with lists: time / memcpy", "at most", 0.25, frames["decode_s"] / memcpy),
        (
            "decode, arrays only: time / memcpy",
            "at most",
            0.05,
            array_frames["decode_s"] / arrays["memcpy"]["encode_s"],
        ),
        ("decode: times faster than plain", "at least", 40, plain["decode_s"] / frames["decode_s"]),
        (
            "decode: speed / that of msgspec with arrays out of band",
            "at least",
            0.93,
            None if msgspec is None else msgspec["decode_s"] / frames["decode_s"],
        ),
        ("extra peak / tensors: encode, frames", "at most", 0.1, frames.get("encode_peak")),
        ("extra peak / tensors: encode, one fresh buffer", "at most", 1.1, fresh.get("encode_peak")),
        ("extra peak / tensors: decode", "at most", 0.1, frames.get("decode_peak")),
        ("longest lock hold, pooled: ms", "at most", 5, pooled["hold_s"] * 1e3),
        ("longest lock hold, frames: ms", "at most", 5, frames["hold_s"] * 1e3),
    ]
    out = []
    for figure, sense, bar, reached in rows:
        ok = None if reached is None else reached <= bar if sense == "at most" else reached >= bar
        out.append({"figure": figure, "sense": sense, "bar": bar, "reached": reached, "ok": ok})
    return out


def show(results: dict[str, dict[str, float]], peer_list: list[Peer]) -> None:
    plain, memcpy = results[peer_list[0].name], results["memcpy"]["encode_s"]
    print(f"memcpy: {memcpy * 1e3:.2f} ms\n")
    head = (
        "codec",
        "enc ms",
        "dec ms",
        "enc/memcpy",
        "plain/enc",
        "plain/dec",
        "peak enc",
        "peak dec",
        "views",
    )
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for peer in peer_list:
        row = results[peer.name]
        encode_s, decode_s = row["encode_s"], row["decode_s"]
        cells = [
            peer.name, f"{encode_s * 1e3:.2f}", f"{decode_s * 1e3:.2f}", f"{encode_s / memcpy:.2f}",
            f"{plain['encode_s'] / encode_s:.1f}", f"{plain['decode_s'] / decode_s:.1f}",
            f"{row['encode_peak']:.2f}" if "encode_peak" in row else "-",
            f"{row['decode_peak']:.2f}" if "decode_peak" in row else "-",
            peer.views,
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def show_bars(rows: list[dict[str, Any]]) -> None:
    print("\n| figure | bar | reached | |\n|---|---|---|---|")
    for row in rows:
        reached = "not measured" if row["reached"] is None else f"{row['reached']:.3g}"
        verdict = {True: "pass", False: "FALLS SHORT", None: "-"}[row["ok"]]
        print(f"| {row['figure']} | {row['sense']} {row['bar']} | {reached} | {verdict} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=123, help="megabytes of arrays")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    found = list(peers())
    missing = [peer for peer in found if isinstance(peer, str)]
    peer_list = [peer for peer in found if isinstance(peer, Peer)] + ours()
    data = make_data(options.mb, lists=True)
    results = measure(peer_list, data, options.repeats)
    pool = mmcodecs.BufferPool()
    holders: dict[str, Callable[[Data], Any]] = {
        peer_list[0].name: peer_list[0].encode,
        "mmcodecs, frames": mmcodecs.encode_frames,
        "mmcodecs, one pooled buffer": lambda value: mmcodecs.encode(value, buffer=pool),
    }
    for name, encode in holders.items():
        encode(data)
        results[name]["hold_s"] = longest_hold(encode, data, options.repeats)
    arrays = measure(ours(), make_data(options.mb, lists=False), options.repeats)
    show(results, peer_list)
    if missing:
        print(f"\nnot installed, left out: {', '.join(missing)}")
    holds = ", ".join(f"{name} {results[name]['hold_s'] * 1e3:.2f} ms" for name in holders)
    print(f"\nlongest hold of the interpreter lock while encoding: {holds}")
    rows = bars(results, arrays)
    show_bars(rows)
    if options.json:
        record = {"results": results, "arrays_only": arrays, "bars": rows, "missing": missing}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
