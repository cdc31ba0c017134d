"""Time from messages and decoded pictures to model inputs, against the reference and the best-known peer.

    python benchmarks/bench_render.py [MODEL_DIR] [--backend pil|torch] [--clock wall|cpu] [--json FILE]

Contenders are Transformers (its PIL back end, and its torch back end where torchvision can be imported) and
PyPI `renderers`. Before a case is timed, token ids and pixel values of all of them are compared.

- cold: nothing is kept that depends on the conversation; ours hashes each picture twice in it, to recognise
  the source and to name the item. float32 and bf16 hold the expanded tensors, uint8 the items as kept.
- warm: the same messages again. Nobody computes pixels: the peer returns the arrays that it kept, ours the
  items.
- "no memo" is ours with known pictures and runs of text, but the template is run and all is laid out again.

Pictures are decoded beforehand. Word caches inside `tokenizers` stay warm, for everyone, and torch uses one
thread unless `--threads` says otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import numpy as np  # noqa: E402
from measure import Clock, Contender, machine, medians, shown_ms, shown_ratio, table  # noqa: E402
from render_cases import CASES, LARGE, Case, make_conversation  # noqa: E402
from render_contenders import Ours, Peer, Reference  # noqa: E402

from mmrender.media.pixels import ImageBackend  # noqa: E402
from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402

SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
BACKENDS: tuple[ImageBackend, ...] = ("pil", "torch")
PACKAGES = ("numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers", "renderers")


@dataclass
class Bench:
    """The contenders of one image back end."""

    directory: Path
    backend: ImageBackend
    rounds: int
    clock: Clock

    def __post_init__(self) -> None:
        self.ours = Ours(self.directory, self.backend)
        self.reference = Reference(self.directory, self.backend)
        self.peer_missing = self.reference.missing
        if self.reference.missing is None:
            self.peer = Peer(self.directory, self.reference)
            self.peer_missing = self.peer.missing

    def conversation(self, case: Case) -> dict[str, Any]:
        """Compare, then time, every contender on one conversation."""
        messages, images = make_conversation(case)
        ids = self._checked(messages, images)
        ours = self.ours
        contenders = {
            "float32": Contender(lambda: ours.cold(messages, "float32"), ours.forget),
            "bfloat16": Contender(lambda: ours.cold(messages, "bfloat16"), ours.forget),
            "uint8": Contender(lambda: ours.cold(messages, None), ours.forget),
        }
        if self.reference.missing is None:
            contenders["reference"] = Contender(lambda: self.reference.render(messages, images))
        if self.peer_missing is None:
            contenders["peer cold"] = Contender(lambda: self.peer.render(messages), self.peer.forget)
        seconds = medians(contenders, rounds=self.rounds, clock=self.clock)
        # Apart from the cold ones, whose reset would empty what these find again.
        again = {
            "no memo": Contender(lambda: ours.remade(messages)),
            "warm": Contender(lambda: ours.warm(messages)),
        }
        if self.peer_missing is None:
            again["peer warm"] = Contender(lambda: self.peer.render(messages))
        seconds |= medians(again, rounds=self.rounds, clock=self.clock)
        return {"case": case.name, "backend": self.backend, "tokens": ids, "seconds": seconds}

    def _checked(self, messages: list[dict[str, Any]], images: list[Any]) -> int:
        """Refuse to time contenders that do not compute the same; return the number of tokens."""
        rendered = self.ours.warm(messages)
        pixels = [entry["pixel_values"] for entry in self.ours.expanded(rendered, "float32")]
        if self.reference.missing is None:
            output = self.reference.render(messages, images)
            _same("token ids", "the reference", rendered.token_ids, output["input_ids"][0].tolist())
            if images:
                _same("pixels", "the reference", np.concatenate(pixels), output["pixel_values"].numpy())
        if self.peer_missing is None:
            theirs = self.peer.render(messages)
            _same("token ids", "the peer", rendered.token_ids, list(theirs.token_ids))
            kept = theirs.multi_modal_data.mm_items["image"] if images else ()
            for mine, item in zip(pixels, kept, strict=True):
                _same("pixels", "the peer", mine, np.asarray(item["pixel_values"]))
        return len(rendered)

    def memory(self) -> dict[str, Any]:
        """Measure one large picture, each contender in a process of its own."""
        names = ["ours"] if self.reference.missing is not None else ["ours", "reference"]
        script = [sys.executable, str(ROOT / "benchmarks" / "render_memory.py")]
        found = {}
        for name in names:
            command = [*script, name, str(self.directory), self.backend]
            found[name] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return {"case": f"{LARGE[0]}x{LARGE[1]}", "backend": self.backend, **found}


def _same(what: str, who: str, ours: Any, theirs: Any) -> None:
    equal = np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
    if not equal:
        raise SystemExit(f"{what} differ from those of {who}: what is timed would not be the same work")


def conversation_table(rows: list[dict[str, Any]]) -> str:
    """Cold and warm times in milliseconds, and how many times longer the others take."""
    headings = [
        "conversation (tokens)", "mode", "reference", "peer", "float32", "bf16", "uint8",
        "ref/f32", "peer/f32", "ref/u8", "peer/u8", "peer warm", "no memo", "warm", "peer/warm",
    ]  # fmt: skip
    lines = []
    for row in rows:
        times = row["seconds"]
        reference, peer = times.get("reference"), times.get("peer cold")
        lines.append(
            [
                f"{row['case']} ({row['tokens']:,})",
                row["backend"],
                *[shown_ms(value) for value in (reference, peer)],
                *[shown_ms(times[name]) for name in ("float32", "bfloat16", "uint8")],
                *[
                    shown_ratio(theirs, times[name])
                    for name in ("float32", "uint8")
                    for theirs in (reference, peer)
                ],
                *[shown_ms(times.get(name)) for name in ("peer warm", "no memo", "warm")],
                shown_ratio(times.get("peer warm"), times["warm"]),
            ]
        )
    return table(headings, lines)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Megabytes of one large picture."""
    headings = ["one picture, MB", "mode", "who", "item", "retained", "peak"]
    lines = []
    for row in rows:
        for who in ("ours", "reference"):
            found = row.get(who)
            sizes = ["not here"] * 3
            if found is not None:
                sizes = [f"{found[key] / 1e6:.1f}" for key in ("kept_bytes", "retained_rss", "peak_rss")]
            lines.append([row["case"], row["backend"], who, *sizes])
    return table(headings, lines)


@contextmanager
def model_directory(given: Path | None) -> Iterator[Path]:
    """Yield the model to time: the one given, the real one beside the checkout, or the tiny one."""
    if given is not None or SHARED_MODEL.is_dir():
        yield given or SHARED_MODEL
        return
    with tempfile.TemporaryDirectory() as folder:
        yield build_tiny_model(Path(folder) / "tiny", weights=False)


def run(
    directory: Path, backends: list[ImageBackend], cases: list[int], rounds: int, clock: Clock
) -> dict[str, list[dict[str, Any]]]:
    """Measure everything; progress goes to standard error."""
    results: dict[str, list[dict[str, Any]]] = {"conversations": [], "memory": []}
    for backend in backends:
        bench = Bench(directory, backend, rounds, clock)
        for who, missing in (("reference", bench.reference.missing), ("peer", bench.peer_missing)):
            if missing is not None:
                print(f"{backend}: {who}: {missing}", file=sys.stderr)
        for case in [CASES[index] for index in cases]:
            print(f"{backend}: {case.name} …", file=sys.stderr)
            results["conversations"].append(bench.conversation(case))
        results["memory"].append(bench.memory())
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Time rendering against the reference and a peer.")
    parser.add_argument(
        "model", nargs="?", type=Path, help="model directory; by default Qwen3-VL's, else a tiny one"
    )
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    numbers = range(len(CASES))
    names = "; ".join(f"{index}: {case.name}" for index, case in enumerate(CASES))
    parser.add_argument("--cases", type=int, nargs="+", choices=numbers, default=list(numbers), help=names)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: time of all threads")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for all contenders")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    here = {**machine(PACKAGES), "torch threads": arguments.threads, "clock": arguments.clock}
    with model_directory(arguments.model) as directory:
        backends = arguments.backend or list(BACKENDS)
        results = run(directory, backends, arguments.cases, arguments.rounds, arguments.clock)
        here["model"] = directory.name
    print("\n".join(f"{key}: {value}" for key, value in here.items()))
    print("\nmilliseconds, medians\n\n" + conversation_table(results["conversations"]))
    print("\n" + memory_table(results["memory"]))
    if arguments.json:
        document = {"machine": here, **results}
        arguments.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
