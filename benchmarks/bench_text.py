"""Time of cold text: 16 turns, ours against the peers, and against the reference's tokenizer alone.

    python benchmarks/bench_text.py [MODEL_DIR] [--rounds N] [--clock wall|cpu] [--json FILE]

"new" is a conversation whose words were never rendered, "after a known prompt" one with new words after a
system prompt that was. "tokenizer" is `apply_chat_template` and `tokenizers` over its text, the least that a
renderer on top of them can take. Token ids of all are compared first. Word caches inside engines stay warm.
"""

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

from measure import Contender, machine, medians, shown_ms, shown_ratio, table  # noqa: E402
from render_contenders import Ours, Peer, Reference  # noqa: E402

MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
WORDS = files("mmrender.testing").joinpath("data", "corpus.txt").read_text("utf-8").split()
TURNS = (1, 4, 16, 64)
Messages = list[dict[str, Any]]


def conversation(turns: int, seed: int, *, system: bool) -> Messages:
    source = random.Random(seed)
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": " ".join(random.Random(0).choices(WORDS, k=600))})
    for turn in range(turns):
        messages.append({"role": "user", "content": " ".join(source.choices(WORDS, k=75))})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": " ".join(source.choices(WORDS, k=200))})
    return messages


class Fresh:
    """A contender over conversations that it never saw."""

    def __init__(self, turns: int, render: Callable[[Messages], object], *, known: bool) -> None:
        self._seeds = itertools.count(1)
        self._turns, self._render, self._known = turns, render, known
        self._messages: Messages = []

    def reset(self) -> None:
        self._messages = conversation(self._turns, next(self._seeds), system=self._known)

    def run(self) -> object:
        return self._render(self._messages)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time cold text against peers.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ours, reference = Ours(options.model, "pil"), Reference(options.model, "pil")
    peer = Peer(options.model, reference)
    engine = reference.tokenizer.backend_tokenizer

    def text(messages: Messages) -> str:
        shown: str = reference.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return shown

    renders: dict[str, Callable[[Messages], Any]] = {
        "ours": ours.remade,
        "tokenizer": lambda messages: engine.encode(text(messages), add_special_tokens=False),
    }
    if peer.missing is None:
        renders["renderers"] = peer.render
    rows = []
    for turns, known in itertools.product(TURNS, (False, True)):
        messages = conversation(turns, 0, system=known)
        ids = {
            "ours": ours.remade(messages).token_ids,
            "tokenizer": engine.encode(text(messages), add_special_tokens=False).ids,
        }
        if peer.missing is None:
            ids["renderers"] = list(peer.render(messages).token_ids)
        if any(found != ids["ours"] for found in ids.values()):
            raise SystemExit("token ids differ: what is timed would not be the same work")
        fresh = {name: Fresh(turns, render, known=known) for name, render in renders.items()}
        contenders = {name: Contender(each.run, each.reset) for name, each in fresh.items()}
        seconds = medians(contenders, rounds=options.rounds, clock=options.clock)
        rows.append({"turns": turns, "known": known, "tokens": len(ids["ours"]), "seconds": seconds})
    headings = [
        "turns",
        "words",
        "tokens",
        "ours",
        "tokenizer",
        "renderers",
        "tokenizer/ours",
        "renderers/ours",
    ]
    lines = []
    for row in rows:
        times = row["seconds"]
        others = [times.get(name) for name in ("tokenizer", "renderers")]
        lines.append(
            [
                str(row["turns"]),
                "after a known prompt" if row["known"] else "new",
                f"{row['tokens']:,}",
                *map(shown_ms, (times["ours"], *others)),
                *[shown_ratio(other, times["ours"]) for other in others],
            ]
        )
    here = machine(("tokenizers", "fastokens", "transformers", "renderers"))
    here |= {"encoded by": ours.encoded_by, "clock": options.clock}
    print("\n".join(f"{key}: {value}" for key, value in here.items()))
    print("\nmilliseconds, medians\n\n" + table(headings, lines))
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "text": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
