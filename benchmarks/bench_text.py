"""Time of cold text: ours, the peers, the reference, and the fast encoder alone, over the number of turns.

    python benchmarks/bench_text.py [MODEL_DIR] [--turns N ...] [--rounds N] [--clock wall|cpu] [--json FILE]

"new" is a conversation whose words were never rendered, "after a known prompt" one with new words after a
system prompt that was. "reference" is `apply_chat_template` and `tokenizers` over its text, "encoder" the
fast encoder over the messages without a template, the least that ours can take. Token ids of all are compared
first. Word caches inside engines stay warm.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

from measure import Clock, fresh, machine, medians, shown_ms, shown_ratio, table  # noqa: E402
from render_cases import conversation  # noqa: E402
from render_contenders import NativePeer, Ours, Peer, Reference  # noqa: E402

MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
TURNS = (1, 4, 16, 64)
LIMIT = "encoder"
Messages = list[dict[str, Any]]
Contenders = dict[str, Callable[[Messages], Any]]


def measure(contenders: Contenders, turns: int, known: bool, rounds: int, clock: Clock) -> dict[str, Any]:
    """Compare the token ids of all, then time them on conversations that none of them saw."""
    messages = conversation(turns, 0, system=known)
    ids = {name: list(render(messages)) for name, render in contenders.items() if name != LIMIT}
    if any(found != ids["ours"] for found in ids.values()):
        raise SystemExit("token ids differ: what is timed would not be the same work")

    def unseen(seed: int) -> Messages:
        return conversation(turns, seed, system=known)

    # Each has conversations of its own: engines that they share have caches.
    timed = {name: fresh(unseen, render) for name, render in contenders.items()}
    seconds = medians(timed, rounds=rounds, clock=clock)
    return {"turns": turns, "known": known, "tokens": len(ids["ours"]), "seconds": seconds}


def make_contenders(directory: Path) -> tuple[Contenders, str]:
    """Return what is timed, by name, and which engine encodes for ours."""
    ours, reference = Ours(directory, "pil"), Reference(directory, "pil")
    engine = reference.tokenizer.backend_tokenizer

    def text(messages: Messages) -> str:
        shown: str = reference.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return shown

    contenders: Contenders = {
        "ours": lambda messages: ours.remade(messages).token_ids,
        "reference": lambda messages: engine.encode(text(messages), add_special_tokens=False).ids,
    }
    fast = ours.cold_renderer.tokenizer.choice.fast
    if fast is not None:
        contenders[LIMIT] = lambda messages: [fast.ids(message["content"]) for message in messages]
    peer, native = Peer(directory, reference), NativePeer(directory)
    if peer.missing is None:
        contenders["renderers"] = lambda messages: peer.render(messages).token_ids
    if native.missing is None:
        contenders["tml-renderers"] = native.render
    for name, missing in (("renderers", peer.missing), ("tml-renderers", native.missing)):
        if missing is not None:
            print(f"without {name}: {missing}", file=sys.stderr)
    return contenders, ours.encoded_by


def main() -> None:
    parser = argparse.ArgumentParser(description="Time cold text against peers.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contenders, encoded_by = make_contenders(options.model)
    rows = [
        measure(contenders, turns, known, options.rounds, options.clock)
        for turns, known in itertools.product(options.turns, (False, True))
    ]
    others = [name for name in contenders if name != "ours"]
    headings = ["turns", "words", "tokens", *contenders, *[f"{name}/ours" for name in others]]
    lines = [
        [
            str(row["turns"]),
            "after a known prompt" if row["known"] else "new",
            f"{row['tokens']:,}",
            *[shown_ms(row["seconds"][name]) for name in contenders],
            *[shown_ratio(row["seconds"][name], row["seconds"]["ours"]) for name in others],
        ]
        for row in rows
    ]
    here = machine(("tokenizers", "fastokens", "transformers", "renderers", "tml-renderers"))
    here |= {"encoded by": encoded_by, "clock": options.clock}
    print("\n".join(f"{key}: {value}" for key, value in here.items()))
    print("\nmilliseconds, medians\n\n" + table(headings, lines))
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "text": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
