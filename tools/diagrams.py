"""Draw the diagrams of the guides: `docs/images/diagram-*.svg`, readable in light and dark.

Run it as `python tools/diagrams.py` after a change; a test holds the files against it. `Drawing` knows strips
of tokens, boxes, arrows and brackets; each diagram below is a function over these.
"""

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images"
CHARACTER, GAP, HEIGHT = 7.3, 3.0, 26.0
# The colours of the page of tokens (mmrender/view/page.css), for light and for dark.
COLOURS = {
    "ink": ("#1a1e23", "#e8eaec"),
    "quiet": ("#5a626b", "#9ba5af"),
    "line": ("#c9ced2", "#4a525a"),
    "template": ("#f1f2f2", "#24292e"),
    "box": ("#ffffff", "#1b1f23"),
    "user": ("#d3e6f5", "#15405a"),
    "system": ("#f1dbe8", "#4a2e40"),
    "tool": ("#f7e3bd", "#4d3c17"),
    "sampled": ("#bde6d5", "#14513f"),
    "image": ("#dfe3e6", "#39424a"),
    "alert": ("#fddcc8", "#6b3413"),
}
Piece = tuple[str, str]


def _style() -> str:
    def rules(index: int) -> str:
        return "".join(
            f".{name}{{{'fill' if name not in ('line',) else 'stroke'}:{pair[index]}}}"
            for name, pair in COLOURS.items()
        )

    return (
        "text{font:13px Inter,system-ui,sans-serif}"
        ".mono{font:12px 'JetBrains Mono',Menlo,Consolas,monospace;font-variant-ligatures:none}"
        ".line{fill:none;stroke-width:1.2}.strong{font-weight:600}"
        f"{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}"
    )


class Drawing:
    """One SVG, in pixels from its upper left corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title><style>{_style()}</style>'
        )
        self._parts: list[str] = []

    @property
    def svg(self) -> str:
        """The file."""
        return "\n".join([self._head, *self._parts, "</svg>"]) + "\n"

    def text(self, x: float, y: float, words: str, *, kind: str = "ink", anchor: str = "start") -> None:
        """Write words whose baseline is at `y`; `kind` names classes."""
        shown = escape(words)
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}" xml:space="preserve">'
            f"{shown}</text>"
        )

    def cell(self, x: float, y: float, words: str, kind: str, width: float | None = None) -> float:
        """Draw a run of tokens at `x` and return where it ends."""
        wide = width if width is not None else CHARACTER * len(words) + 10
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{HEIGHT:g}" rx="4" class="{kind}"/>'
        )
        ink = "mono quiet" if kind == "template" else "mono ink"
        self.text(x + wide / 2, y + 17, words, kind=ink, anchor="middle")
        return x + wide

    def strip(self, x: float, y: float, pieces: Sequence[Piece]) -> list[tuple[float, float]]:
        """Draw runs side by side and return where each begins and ends."""
        places = []
        for words, kind in pieces:
            end = self.cell(x, y, words, kind)
            places.append((x, end))
            x = end + GAP
        return places

    def box(self, x: float, y: float, width: float, lines: Sequence[str]) -> float:
        """Draw a box with lines of words, the first of them strong; return where it ends below."""
        high = 18 * len(lines) + 14
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{high:g}" rx="8" class="box"/>'
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{high:g}" rx="8" class="line"/>'
        )
        for index, words in enumerate(lines):
            kind = "quiet" if index else "ink strong"
            self.text(x + width / 2, y + 21 + 18 * index, words, kind=kind, anchor="middle")
        return y + high

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points that ends in an arrowhead, going down or to the right at last."""
        (before, _), (x, y) = points[-2:]
        head = f"M{x - 4:g} {y - 5:g}L{x:g} {y:g}L{x + 4:g} {y - 5:g}"
        if before != x:
            head = f"M{x - 5:g} {y - 4:g}L{x:g} {y:g}L{x - 5:g} {y + 4:g}"
        self._parts.append(f'<path class="line" d="M{"L".join(f"{a:g} {b:g}" for a, b in points)}{head}"/>')

    def bracket(self, start: float, stop: float, y: float, words: str) -> None:
        """Draw a bracket under something, with words below its middle."""
        self._parts.append(
            f'<path class="line" d="M{start + 2:g} {y:g}v5H{stop - 2:g}v-5"/>',
        )
        middle = max((start + stop) / 2, 10 + 3.4 * len(words))
        self.text(middle, y + 21, words, kind="quiet", anchor="middle")


def provenance() -> Drawing:
    """Messages, through the template, to text whose every character has an owner."""
    made = Drawing("A template run with strings that remember where they came from", 720, 286)
    made.text(10, 20, "messages", kind="ink strong")
    said = made.strip(10, 32, [("Which animal?", "user"), ("A cow.", "sampled")])
    for start, stop in said:
        made.arrow(((start + stop) / 2, 60), ((start + stop) / 2, 84))
    made.text(
        said[-1][1] + 12, 49, "strings that remember: messages[0].content, characters 0 to 13", kind="quiet"
    )
    made.box(
        10,
        86,
        700,
        [
            "the model's own chat template",
            "slices, joins, strips and replaces keep the origin; what it writes itself has none",
        ],
    )
    made.arrow((360, 136), (360, 160))
    row: list[Piece] = [
        ("<|im_start|>user\u23ce", "template"),
        ("Which animal?", "user"),
        ("<|im_end|>\u23ce", "template"),
    ]
    row += [("<|im_start|>assistant\u23ce", "template"), ("A cow.", "sampled"), ("<|im_end|>", "sampled")]
    made.text(10, 178, "text, equal to apply_chat_template, and an owner for every token", kind="ink strong")
    found = made.strip(10, 190, row)
    made.bracket(*found[0], 220, "no origin")
    made.bracket(*found[1], 220, "messages[0]")
    made.bracket(found[2][0], found[3][1], 220, "no origin: the template wrote it")
    made.bracket(found[4][0], found[5][1], 220, "messages[1], sampled")
    made.text(
        10, 276, "A user who types <|im_end|> writes content, and content is encoded as text.", kind="quiet"
    )
    return made


SAMPLED: list[Piece] = [
    (" wh", "sampled"),
    ("ite", "sampled"),
    (" cow", "sampled"),
    ("<|im_end|>", "sampled"),
]


def bridge() -> Drawing:
    """A turn appended to sampled tokens, and the same conversation encoded again."""
    made = Drawing("A bridge appends to what was sampled; encoding again changes it", 720, 292)
    tail: list[Piece] = [("\u23ce<|im_start|>user\u23ce", "template"), ("Are you sure?", "user")]
    tail += [("<|im_end|>\u23ce\u2026", "template")]
    made.text(10, 20, "what the engine was given, and what it sampled", kind="ink strong")
    first = made.strip(10, 30, [("prompt", "template"), *SAMPLED])
    made.bracket(*first[0], 60, "P")
    made.bracket(first[1][0], first[-1][1], 60, "C: these ids")
    made.text(
        10, 116, "bridge: P + C, and the tail that the template writes after an answer", kind="ink strong"
    )
    whole = made.strip(10, 126, [("prompt", "template"), *SAMPLED, *tail])
    made.bracket(whole[0][0], whole[4][1], 156, "equal, id for id")
    made.bracket(whole[5][0], whole[-1][1], 156, "appended: costs as much as the new turn")
    made.text(10, 212, "decoded and encoded again: ids that nobody sampled", kind="ink strong")
    again: list[Piece] = [(" white", "alert"), (" cow", "sampled"), ("<|im_end|>", "sampled")]
    other = made.strip(10, 222, [("prompt", "template"), *again, *tail])
    made.bracket(*other[1], 252, "one token, not two: its gradient is of something else")
    return made


def tree() -> Drawing:
    """A rollout with a retry, as branches over shared steps."""
    made = Drawing(
        "A trajectory keeps every token and image once; branches share what they begin with", 720, 230
    )
    made.text(10, 20, "steps, each stored as what it adds", kind="ink strong")
    first = made.strip(10, 32, [("prompt", "user"), ("image A", "image"), ("sampled", "sampled")])
    asked = made.strip(first[-1][1] + 24, 32, [("tool", "tool"), ("image B", "image")])
    second = made.cell(asked[-1][1] + 24, 32, "sampled", "sampled")
    third = made.strip(second + 24, 32, [("user", "user"), ("sampled", "sampled")])
    for left, right in (
        (first[-1][1], asked[0][0]),
        (asked[-1][1], asked[-1][1] + 24),
        (second, third[0][0]),
    ):
        made.arrow((left + 3, 45), (right - 3, 45))
    again = made.cell(asked[-1][1] + 24, 92, "sampled", "sampled")
    made.arrow((asked[-1][1] + 10, 45), (asked[-1][1] + 10, 105), (asked[-1][1] + 21, 105))
    made.bracket(first[0][0], first[-1][1], 62, "step 0")
    made.text(third[-1][1] + 14, 49, "branch 0", kind="ink strong")
    made.text(again + 14, 109, "branch 1", kind="ink strong")
    made.text(again + 76, 109, "sampled again: only these tokens are new", kind="quiet")
    made.text(10, 152, "samples for the trainer, one for each branch", kind="ink strong")
    samples: list[Piece] = [
        ("prompt", "user"),
        ("image A", "image"),
        ("sampled", "sampled"),
        ("tool", "tool"),
    ]
    samples += [("image B", "image"), ("sampled", "sampled")]
    end = made.strip(10, 164, [*samples, ("user", "user"), ("sampled", "sampled")])[-1][1]
    made.text(end + 14, 181, "its loss mask: what was sampled", kind="quiet")
    made.strip(10, 194, samples)
    return made


def wire() -> Drawing:
    """The two forms of a message."""
    made = Drawing("A message as frames, and as one buffer", 720, 250)
    made.text(10, 20, "encode_frames: a head, and the arrays' own memory", kind="ink strong")
    head = made.cell(10, 32, "head", "system", 110)
    pixels = made.cell(head + 26, 32, "pixels: uint8 (768, 1024, 3)", "image", 270)
    ids = made.cell(pixels + 26, 32, "token_ids: int32 (4096,)", "sampled", 220)
    made.bracket(10, head, 62, "msgpack")
    made.bracket(head + 26, ids, 62, "views: nothing is copied")
    made.text(
        10, 116, "encode: one buffer, each array copied once, to a multiple of 64 bytes", kind="ink strong"
    )
    x = made.cell(10, 128, "head", "system", 110)
    places = []
    for words, kind, width in (
        ("0", "template", 24.0),
        ("pixels", "image", 290.0),
        ("0", "template", 24.0),
        ("token_ids", "sampled", 240.0),
    ):
        places.append((x + 1, made.cell(x + 1, 128, words, kind, width)))
        x = places[-1][1]
    made.bracket(*places[1], 158, "64-byte aligned")
    made.bracket(*places[3], 158, "64-byte aligned")
    made.text(
        10,
        214,
        "In the head an array is a record: dtype, shape and the number of its frame, in an extension type of",
        kind="quiet",
    )
    made.text(
        10,
        234,
        "msgpack that no value of a user can have. decode gives read-only views of what arrived.",
        kind="quiet",
    )
    return made


def audit() -> Drawing:
    """Log-probabilities of both sides, the token where they part, and the cause."""
    made = Drawing("An audit compares both sides' log-probabilities and tries causes", 720, 306)
    columns = [150.0, 260.0, 370.0, 480.0, 590.0]
    made.text(10, 20, "for example, one completion as sampler and trainer saw it", kind="ink strong")
    rows = [
        ("sample", ["On", " a", " beach", ",", " by"], ["sampled"] * 5),
        ("sampler", ["\u22120.41", "\u22120.22", "\u22121.10", "\u22120.35", "\u22120.71"], ["template"] * 5),
        ("trainer", ["\u22120.41", "\u22120.22", "\u22122.96", "\u22120.90", "\u22121.64"], ["template"] * 5),
        (
            "difference",
            ["0", "0", "\u22121.86", "\u22120.55", "\u22120.93"],
            ["template", "template"] + ["alert"] * 3,
        ),
    ]
    for index, (name, cells, kinds) in enumerate(rows):
        y = 34 + 32 * index
        made.text(10, y + 17, name, kind="quiet")
        for x, words, kind in zip(columns, cells, kinds, strict=True):
            made.cell(x, y, words, kind, 104)
    made.bracket(370, 474, 162, "the first token beyond what arithmetic alone makes")
    made.arrow((422, 190), (422, 208))
    low = made.box(
        150,
        210,
        544,
        [
            "what may the sampler have had in its place?",
            "each variation of images, tokens, positions and numbers runs through the model",
        ],
    )
    made.arrow((422, low), (422, low + 18))
    made.text(
        422,
        low + 36,
        "image 1 with red and blue exchanged: 0 remains, and that is the cause",
        anchor="middle",
    )
    return made


def architecture() -> Drawing:
    """The rooms, from messages to batches. Imports go up."""
    made = Drawing("Rooms of mmrender: from messages to tokens, rollouts and batches", 720, 500)

    def room(x: float, y: float, width: float, name: str, idea: str) -> None:
        made.box(x, y, width, [name, idea])

    made.text(10, 20, "ground", kind="quiet")
    room(90, 8, 150, "mmcodecs", "tensors as bytes")
    room(250, 8, 220, "errors, caching, processes", "one tree, bounded, limited")
    room(480, 8, 230, "messages, sidecar, model", "requests, places, files")
    made.arrow((160, 60), (160, 82))
    made.arrow((360, 60), (360, 82))
    made.arrow((595, 60), (595, 82))
    made.text(10, 102, "render", kind="quiet")
    room(90, 84, 140, "content", "checked messages")
    room(250, 84, 140, "template", "traced text")
    room(410, 84, 140, "turns", "where answers lie")
    room(570, 84, 140, "tokens", "ids and owners")
    for x in (230, 390, 550):
        made.arrow((x + 2, 109), (x + 18, 109))
    room(250, 146, 140, "media", "pixels, identity")
    made.arrow((160, 134), (160, 171), (248, 171))
    made.arrow((392, 171), (640, 171), (640, 204))
    made.arrow((660, 134), (660, 204))
    room(90, 206, 620, "rendering, renderer", "RenderedTokens: ids, spans, sidecar")
    room(90, 272, 300, "bridge, parsing", "the next turn, completions read back")
    room(410, 272, 300, "trajectory, shipping", "trees of steps, carried to the trainer")
    for x in (240, 560):
        made.arrow((x, 256), (x, 270))
    made.text(10, 362, "sample,", kind="quiet")
    made.text(10, 380, "train", kind="quiet")
    room(90, 342, 300, "client, engines, rollout, gateway", "servers, environments, agents")
    room(410, 342, 300, "training", "samples, packing, batches, losses")
    for x in (240, 560):
        made.arrow((x, 322), (x, 340))
    made.text(10, 432, "on top", kind="quiet")
    room(90, 412, 620, "audit, view, integrations, testing, cli", "compare, look, translate, prove")
    for x in (240, 560):
        made.arrow((x, 392), (x, 410))
    made.text(
        90,
        486,
        "A room imports rooms above it. Training imports nothing of client, engines, rollout and gateway.",
        kind="quiet",
    )
    return made


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "provenance": provenance,
    "bridge": bridge,
    "tree": tree,
    "wire": wire,
    "audit": audit,
    "architecture": architecture,
}


def files() -> dict[Path, str]:
    """Every diagram by the file that it belongs into."""
    return {TARGET / f"diagram-{name}.svg": draw().svg for name, draw in DIAGRAMS.items()}


def main() -> int:
    """Write the files."""
    for path, svg in files().items():
        path.write_text(svg, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
