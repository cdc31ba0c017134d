"""Writing and reading vLLM's multimodal items, against vLLM's own code, in one process.

    python benchmarks/bench_vllm_items.py [--venv DIR] [--rounds 15] [--json FILE]

Needs an environment with vLLM: this one, or `--venv`, or what `MMRENDER_VLLM_ENV` names. Items are those of
a Qwen image: patches and a grid, in torch on vLLM's side and on ours. Contenders take turns; the table gives
medians in milliseconds, and how many times faster ours is. "views" reads to numpy views, "torch" to torch
tensors, and "copies" to torch tensors with memory of their own, which is what vLLM makes.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "codecs")]

PATCHES = (64, 1024, 3072, 7544)
DTYPES = ("uint8", "float32")
BARS = {"encode": 1.4, "decode": 3.0}


def run_elsewhere(options: argparse.Namespace) -> None:
    venv = options.venv or os.environ.get("MMRENDER_VLLM_ENV")
    if not venv:
        raise SystemExit("bench_vllm_items: needs vLLM; give --venv or set MMRENDER_VLLM_ENV")
    python = Path(venv) / "bin" / "python"
    subprocess.run([str(python), "-W", "ignore", *sys.argv], check=True)


def contenders(patches: int, dtype: str) -> dict[str, Callable[[], Any]]:
    import torch
    from vllm.entrypoints.scale_out.token_in_token_out import mm_serde as theirs

    from mmrender.client.vllm_fields import collate_items, layout_of
    from mmrender.media.vllm_items import decode_mm_kwargs_item, encode_mm_kwargs_item

    pixels = torch.arange(patches * 1176, dtype=torch.int64).remainder(251).view(patches, 1176)
    inputs = {
        "pixel_values": pixels.to(getattr(torch, dtype)),
        "image_grid_thw": torch.tensor([[1, 2, patches // 2]]),
    }
    ours = collate_items(layout_of("Qwen3VLForConditionalGeneration"), [inputs])[0]
    text = encode_mm_kwargs_item(ours)
    item = theirs.decode_mm_kwargs_item(text)
    assert theirs.encode_mm_kwargs_item(item) == text
    return {
        "encode vLLM": lambda: theirs.encode_mm_kwargs_item(item),
        "encode ours": lambda: encode_mm_kwargs_item(ours),
        "decode vLLM": lambda: theirs.decode_mm_kwargs_item(text),
        "decode ours, views": lambda: decode_mm_kwargs_item(text),
        "decode ours, torch": lambda: decode_mm_kwargs_item(text, framework="torch"),
        "decode ours, copies": lambda: decode_mm_kwargs_item(text, framework="torch", copy=True),
    }


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        run_elsewhere(options)
        return
    import torch

    torch.set_num_threads(1)
    rows = []
    print(f"{'item':18} {'what':20} {'ms':>9} {'vLLM / ours':>12}")
    for dtype in DTYPES:
        for patches in PATCHES:
            megabytes = patches * 1176 * (1 if dtype == "uint8" else 4) / 1e6
            found = medians(contenders(patches, dtype), options.rounds)
            for name, spent in found.items():
                way = name.split()[0]
                ratio = found[f"{way} vLLM"] / spent
                short = "" if "vLLM" in name or ratio >= BARS[way] else f"  below {BARS[way]}"
                print(f"{megabytes:6.2f} MB {dtype:8} {name:20} {spent:9.3f} {ratio:11.1f}x{short}")
                rows.append({"mb": megabytes, "dtype": dtype, "what": name, "ms": spent, "ratio": ratio})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
