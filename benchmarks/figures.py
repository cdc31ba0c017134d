"""The figures of the one table, each read from what the benchmarks wrote as JSON.

A figure is a time of ours beside that of the reference, of peers and of a physical limit, all of one run.
What is asked of it is a ratio: how many times faster than another it is to be, or at most how many times as
long as a limit it may take.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

OURS, REFERENCE, RENDERERS, NATIVE = "mmrender", "reference", "renderers", "tml-renderers"
TRL = "trl"
ONE, FOUR, WARM = "1 turn, one 1024²", "4 turns, four 1024²", "16 turns, four 1024²"
Document = Mapping[str, Any]
_SHORT_MS = 0.05
"""What plain Jinja takes at most for a short template."""


@dataclass
class Figure:
    """One row.

    Attributes:
        name: What is measured.
        seconds: By contender; `mmrender` is ours.
        limit: What bounds it, and the seconds of that.
        faster: By contender, how many times faster ours is to be.
        at_most: By contender, `limit` or `s`, how many times as long, or how many seconds, ours may take.
    """

    name: str
    seconds: dict[str, float]
    limit: tuple[str, float] | None = None
    faster: dict[str, float] = field(default_factory=dict)
    at_most: dict[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float | None:
        """Seconds of a contender or of the limit; 1 for `s`."""
        if name == "limit":
            return None if self.limit is None else self.limit[1]
        return 1.0 if name == "s" else self.seconds.get(name)

    def verdicts(self) -> Iterator[dict[str, Any]]:
        """Yield what is asked and what was reached; `met` is None where the other is not here."""
        ours = self.seconds[OURS]
        for sense, asked in (("faster than", self.faster), ("at most", self.at_most)):
            for other, ratio in asked.items():
                theirs = self.of(other)
                reached, met = None, None
                if theirs is not None:
                    reached = theirs / ours if sense == "faster than" else ours / theirs
                    met = reached >= ratio if sense == "faster than" else reached <= ratio
                yield {"sense": sense, "other": other, "asked": ratio, "reached": reached, "met": met}


def figures(parts: Mapping[str, Document]) -> list[Figure]:
    """Return the figures of all parts that were run."""
    return [figure for part, read in _READERS.items() if part in parts for figure in read(parts)]


def _turn(parts: Mapping[str, Document]) -> Iterator[Figure]:
    rows = parts["turn"]["contenders"]
    names = {"mmrender": OURS, "verifiers": RENDERERS, "plain": REFERENCE}
    yield Figure(
        f"processor time of a whole turn, {parts['turn']['rollouts']} in flight (renderers by verifiers)",
        {name: rows[key]["turn_s"] for key, name in names.items() if key in rows},
        faster={RENDERERS: 3.0, REFERENCE: 8.0},
    )


def _sft(parts: Mapping[str, Document]) -> Iterator[Figure]:
    yield Figure(
        "processor time of a sample of fine-tuning, two 512² JPEG files and four answers",
        parts["sft"]["seconds"],
        faster={TRL: 4.0},
    )


def _text(parts: Mapping[str, Document]) -> Iterator[Figure]:
    names = {False: "text, 16 turns, cold", True: "text, 16 turns of new words after a known system prompt"}
    asked = {False: {RENDERERS: 8.0, NATIVE: 1.5}, True: {RENDERERS: 8.0}}
    for row in parts["text"]["text"]:
        if row["turns"] == 16:
            yield Figure(
                names[row["known"]],
                _renamed(row["seconds"], {"ours": OURS}),
                _limit("the encoder alone", row["seconds"].get("encoder")),
                faster=asked[row["known"]],
            )


def _images(parts: Mapping[str, Document]) -> Iterator[Figure]:
    sizes = {(row["size"], row["backend"]): row["seconds"] for row in parts["images"]["sizes"]}
    cases = {(row["case"], row["backend"]): row["seconds"] for row in parts["render"]["conversations"]}
    for (case, backend), seconds in cases.items():
        bare = sizes.get(("1024x1024", backend), {})
        floats, levels = bare.get("copy of float32"), _sum(bare, "hashes", "copy of levels")
        mode, is_pil = f", {backend} mode", backend == "pil"
        if case == ONE:
            yield Figure(
                f"one 1024² image as float32, cold{mode}",
                _cold(seconds, "float32"),
                _limit("a copy of the float32 values", floats),
                faster={REFERENCE: 6.0, RENDERERS: 6.0} if is_pil else {},
            )
            yield Figure(
                f"the same as levels{mode}",
                _cold(seconds, "uint8"),
                _limit("both hashes, and a copy of the levels", levels),
                faster={REFERENCE: 20.0, RENDERERS: 20.0} if is_pil else {},
            )
        if case == FOUR:
            yield Figure(
                f"four 1024² images in four turns as levels, cold{mode}",
                _cold(seconds, "uint8"),
                _limit("both hashes, and a copy of the levels", None if levels is None else 4 * levels),
                faster={REFERENCE: 40.0, RENDERERS: 20.0} if is_pil else {},
            )
        if case == WARM:
            yield Figure(
                f"16 turns with four images, seen before{mode}",
                {OURS: seconds["warm"], **_present({RENDERERS: seconds.get("peer warm")})},
                _limit("four fingerprints", None if "fingerprint" not in bare else 4 * bare["fingerprint"]),
                faster={RENDERERS: 60.0} if is_pil else {},
            )
    for (size, backend), seconds in sizes.items():
        if size == "1920x1080":
            yield Figure(
                f"1920x1080, which is resized, as levels, {backend} mode",
                _renamed(seconds, {"levels": OURS}),
                _limit("the bare resampling, and both hashes", _sum(seconds, "resize", "hashes")),
                faster={REFERENCE: 5.0},
            )


def _bridge(parts: Mapping[str, Document]) -> Iterator[Figure]:
    for case in parts["bridge"]["cases"]:
        if case["kind"] == "tool text" and case["rounds"] == 30:
            yield Figure(
                "bridge of a tool result, after 30 rounds",
                _renamed(case["seconds"], {"ours": OURS, "peer": RENDERERS}),
                faster={RENDERERS: 3.0, REFERENCE: 150.0},
            )


def _template(parts: Mapping[str, Document]) -> Iterator[Figure]:
    for is_short, allowed in ((False, 1.5), (True, 3.0)):
        rows = [row for row in parts["template"] if (row["jinja_ms"] <= _SHORT_MS) == is_short]
        if rows:
            row = max(rows, key=lambda row: row["to_jinja"])
            kind = "short" if is_short else "long"
            yield Figure(
                f"the slowest {kind} template: {row['model']}, {row['rounds']} rounds",
                {OURS: row["traced_ms"] / 1e3, REFERENCE: row["transformers_ms"] / 1e3},
                ("plain Jinja", row["jinja_ms"] / 1e3),
                at_most={"limit": allowed},
            )


def _trajectory(parts: Mapping[str, Document]) -> Iterator[Figure]:
    names = {"long text, 1,000 turns": 0.3, "long, 1,000 turns": 1.0}
    for case, allowed in names.items():
        if case in parts["trajectory"]:
            images = "" if "text" in case else ", an image every fourth"
            seconds = {OURS: parts["trajectory"][case]["append_s"]}
            yield Figure(f"1,000 turns appended{images}", seconds, at_most={"s": allowed})


def _rollout(parts: Mapping[str, Document]) -> Iterator[Figure]:
    ways = {row["name"]: row["seconds"] for row in parts["rollout"]["group"]["ways"]}
    yield Figure(
        "trajectories of a group over a Unix socket",
        {
            OURS: ways["ours: trajectories over a Unix socket"],
            "plain form": ways["cumulative, plain form over ZeroMQ"],
            "last step only": ways["last only, our frames over a Unix socket"],
        },
        faster={"plain form": 25.0, "last step only": 1.0},
    )
    seconds = parts["rollout"]["transports"]["seconds"]
    yield Figure(
        "a message of arrays over a Unix socket",
        {OURS: seconds["ours over Unix socket"], "plain form": seconds["plain form over ZeroMQ, ipc"]},
        ("a copy of its bytes", seconds["memcpy"]),
    )


def _client(parts: Mapping[str, Document]) -> Iterator[Figure]:
    requests = parts["client"]["requests"]
    for size, allowed in (("5 MB", 1.5e-3), ("4 KB", 0.6e-3)):
        found = [key for key in requests if key.startswith(size)]
        if found:
            seconds = {name: row["cpu"] for name, row in requests[found[-1]].items()}
            concurrency = found[-1].rpartition(" ")[2]
            yield Figure(
                f"processor time of a request of {size}, {concurrency} in flight",
                seconds,
                at_most={"s": allowed},
            )


def _codec(parts: Mapping[str, Document]) -> Iterator[Figure]:
    results = parts["codec"]["results"]
    frames = {name: row["decode_s"] for name, row in results.items() if "decode_s" in row}
    yield Figure(
        "codec, decoding frames",
        {
            OURS: frames["mmcodecs, frames"],
            "plain form": frames["plain form (msgpack, tagged dict, tobytes)"],
            **_present({"msgspec": frames.get("msgspec, out-of-band frames")}),
        },
        ("a copy of the arrays", results["memcpy"]["encode_s"]),
        faster={"plain form": 28.0},
    )


def _open(parts: Mapping[str, Document]) -> Iterator[Figure]:
    seconds = parts["open"]["seconds"]
    yield Figure(
        "opening a known model",
        {OURS: seconds["ours"], REFERENCE: seconds["tokenizer"]},
        at_most={REFERENCE: 1.1},
    )


_READERS: dict[str, Callable[[Mapping[str, Document]], Iterator[Figure]]] = {
    "turn": _turn,
    "sft": _sft,
    "text": _text,
    "images": _images,
    "bridge": _bridge,
    "template": _template,
    "trajectory": _trajectory,
    "rollout": _rollout,
    "client": _client,
    "codec": _codec,
    "open": _open,
}


def _cold(seconds: Mapping[str, float], form: str) -> dict[str, float]:
    return _renamed(seconds, {form: OURS, "peer cold": RENDERERS})


def _renamed(seconds: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """The contenders of a figure, under the names of the table."""
    kept = {**{name: name for name in (REFERENCE, RENDERERS, NATIVE)}, **names}
    return {kept[name]: value for name, value in seconds.items() if name in kept}


def _present(seconds: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if value is not None}


def _sum(seconds: Mapping[str, float], *names: str) -> float | None:
    return sum(seconds[name] for name in names) if all(name in seconds for name in names) else None


def _limit(name: str, seconds: float | None) -> tuple[str, float] | None:
    return None if seconds is None else (name, seconds)
