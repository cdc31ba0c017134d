"""Time from one turn to the next: ours, the best-known peer's, and rendering the conversation again.

    python benchmarks/bench_bridge.py [MODEL_DIR] [--backend pil|torch] [--clock wall|cpu] [--json FILE]

A conversation of 3, 10 or 30 rounds, with an image in every fifth, was prompted and answered; new messages
follow. "ours" is `bridge_to_next_turn`, "peer" the same of PyPI `renderers`, "reference" Transformers'
`apply_chat_template` and processor over the whole conversation. Every call has a text that was never seen,
and in the image case such a picture. Before a case is timed, the token ids of all are compared.

"to 3 rounds" is our time over that after 3 rounds, which its length should not move.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import numpy as np  # noqa: E402
from measure import Clock, Contender, machine, medians, shown_ms, shown_ratio, table  # noqa: E402
from PIL import Image  # noqa: E402
from render_contenders import Ours, Peer, Reference  # noqa: E402

MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
ROUNDS = (3, 10, 30)
KINDS = ("user text", "tool text", "tool image")
WORDS = [
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "the",
    "window",
    "reports",
    "the",
    "number",
]
Message = dict[str, Any]


def text(seed: int, words: int) -> str:
    """Words that no other seed gives, so that no memo of encoded text can help."""
    chosen = np.random.default_rng(seed).choice(WORDS, words)
    return f"{seed}: " + " ".join(chosen) + "."


def picture(seed: int, size: int = 256) -> Image.Image:
    """A picture that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)


def image_part(image: Image.Image) -> Message:
    return {"type": "image", "image": image}


def conversation(rounds: int) -> list[Message]:
    """Rounds of a question and an answer; the last answer calls a tool, so that anything may follow."""
    messages: list[Message] = [{"role": "system", "content": text(1, 40)}]
    for turn in range(rounds):
        words = {"type": "text", "text": text(1000 + turn, 60)}
        parts = [image_part(picture(turn)), words] if turn % 5 == 0 else [words]
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": text(2000 + turn, 80)},
        ]
    call = {"name": "look", "arguments": {"box": [1, 2, 3, 4]}}
    messages[-1]["tool_calls"] = [{"id": "call1", "type": "function", "function": call}]
    return messages


def extension(kind: str, seed: int) -> list[Message]:
    """The next message, about 40 tokens of text."""
    words = text(seed, 35)
    if kind == "user text":
        return [{"role": "user", "content": words}]
    tool = {"role": "tool", "name": "look", "tool_call_id": "call1"}
    if kind == "tool text":
        return [{**tool, "content": words}]
    return [{**tool, "content": [image_part(picture(seed)), {"type": "text", "text": words}]}]


def pictures(messages: Sequence[Message]) -> list[Image.Image]:
    lists = (message["content"] for message in messages if isinstance(message["content"], list))
    return [part["image"] for part in itertools.chain.from_iterable(lists) if part["type"] == "image"]


@dataclass
class Fresh:
    """Extensions that were never seen: `reset` makes the next, `value` holds it."""

    kind: str
    count: Any = field(default_factory=lambda: itertools.count(10_000))
    value: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        self.value = extension(self.kind, next(self.count))


class Case:
    """One conversation and kind of extension, as callables from new messages to a result."""

    def __init__(self, rounds: int, kind: str, ours: Ours, peer: Peer, reference: Reference) -> None:
        self.kind = kind
        self._messages = conversation(rounds)
        before, answer = self._messages[:-1], self._messages[-1]
        renderer = ours.cold_renderer
        rendered = renderer.render(before, add_generation_prompt=True)
        whole = renderer.render_ids([*before, answer])
        stop = renderer.tokenizer.token_id("<|im_end|>")
        end = len(whole) - whole[::-1].index(stop)
        prompt, completion = rendered.token_ids, whole[len(rendered) : end]
        self.tokens = end

        def bridge(new: list[Message]) -> Any:
            return renderer.bridge_to_next_turn(
                prompt, completion, new, previous_multi_modal_data=rendered.multi_modal_data
            )

        self.ways: dict[str, Callable[[list[Message]], Any]] = {"ours": bridge}
        if peer.missing is None:
            theirs = peer.render(before)

            def peer_bridge(new: list[Message]) -> Any:
                return peer.renderer.bridge_to_next_turn(
                    prompt, completion, new, previous_multi_modal_data=theirs.multi_modal_data
                )

            self.ways["peer"] = peer_bridge
        if reference.missing is None:
            self.ways["reference"] = lambda new: reference.render(
                [*self._messages, *new], pictures([*self._messages, *new])
            )

    def check(self) -> None:
        """Require the same token ids of all."""
        new = extension(self.kind, 9_999)
        expected = self.ways["ours"](new).token_ids
        for name, way in self.ways.items():
            found = way(new)
            ids = found["input_ids"][0].tolist() if name == "reference" else found.token_ids
            if ids != expected:
                raise SystemExit(f"token ids of {name} differ from ours: {self.kind}")

    def seconds(self, rounds: int, clock: Clock) -> dict[str, float]:
        contenders = {}
        for name, way in self.ways.items():
            fresh = Fresh(self.kind)
            contenders[name] = Contender(lambda way=way, fresh=fresh: way(fresh.value), fresh.reset)
        return medians(contenders, rounds=rounds, clock=clock)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--backend", choices=("pil", "torch"), default="pil")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--before", type=int, nargs="+", default=ROUNDS, help="rounds of the conversation")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.model.is_dir():
        print(f"no model directory {options.model}: pass one of Qwen3-VL's")
        return
    reference = Reference(options.model, options.backend)
    ours, peer = Ours(options.model, options.backend), Peer(options.model, reference)
    for name, missing in (("peer", peer.missing), ("reference", reference.missing)):
        if missing is not None:
            print(f"without the {name}: {missing}")
    found: list[dict[str, Any]] = []
    for kind in options.kinds:
        for rounds in options.before:
            case = Case(rounds, kind, ours, peer, reference)
            case.check()
            seconds = case.seconds(options.rounds, options.clock)
            found.append({"kind": kind, "rounds": rounds, "tokens": case.tokens, "seconds": seconds})
    print(report(found))
    if options.json:
        packages = ("tokenizers", "transformers", "renderers")
        document = {"machine": machine(packages), "clock": options.clock, "cases": found}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def report(found: list[dict[str, Any]]) -> str:
    """Medians in milliseconds, and how many times longer the others take."""
    rows = []
    for case in found:
        seconds = case["seconds"]
        mine, peer, reference = (seconds.get(name) for name in ("ours", "peer", "reference"))
        first = next(other for other in found if other["kind"] == case["kind"])["seconds"]["ours"]
        rows.append(
            [
                f"{case['kind']}, {case['rounds']} rounds",
                f"{case['tokens']:,}",
                *[shown_ms(value) for value in (mine, peer, reference)],
                shown_ratio(peer, mine),
                shown_ratio(reference, mine),
                f"{mine / first:.2f}",
            ]
        )
    headings = ["extension", "tokens before", "ours ms", "peer ms", "reference ms"]
    return table([*headings, "peer / ours", "reference / ours", "to 3 rounds"], rows)


if __name__ == "__main__":
    main()
