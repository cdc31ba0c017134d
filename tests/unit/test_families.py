"""The table of families that `make families` builds, and how its vocabularies are made."""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mmrender.testing.difference import Difference
from mmrender.testing.reference import ReferenceRendering
from mmrender.testing.reports import Mismatch, ParityReport
from small_models import train_byte_pairs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "families.py"


def load(script):
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def families():
    return load(SCRIPT)


def test_rows_name_tokens_of_their_own(families):
    for name, row in families.read_table().items():
        tokens = [*row["special"], *row.get("plain", []), *row.get("swallowing", [])]
        config = [value for key, value in row["config"].items() if key != "model_type"]
        named = {*row["tokens"].values(), *row["stop"], *config, *([row["bos"]] if "bos" in row else [])}
        assert named <= set(families.expand(tokens)), name


def test_the_merges_of_a_vocabulary_follow_from_its_order(families):
    trained = json.loads(train_byte_pairs(800, SCRIPT.read_text("utf-8")).to_str())["model"]
    byte_of = {letter: byte for byte, letter in families.byte_letters().items()}
    vocabulary = sorted(trained["vocab"], key=trained["vocab"].get)
    tokens = [bytes(map(byte_of.get, token)) for token in vocabulary if set(token) <= byte_of.keys()]
    expected = [tuple(bytes(map(byte_of.get, part)) for part in merge) for merge in trained["merges"]]
    assert len(expected) > 300
    assert families.merges_of(tokens) == expected


def test_the_page_names_every_family(families):
    page = load(ROOT / "tools" / "families_page.py")
    before, _, rest = (ROOT / "docs" / "families.md").read_text("utf-8").partition(page.BEGIN)
    compared, _, _ = rest.partition(page.END)
    for name in families.read_table():
        assert f"\n| `{name}` |" in before, name
        assert f"\n| `{name}` |" in compared, name
    assert not re.search("differ|leaks", compared)


def test_the_page_says_what_was_not_equal():
    page = load(ROOT / "tools" / "families_page.py")
    equal = ParityReport("a", "torch", cases=9, refusals=Counter({"No\nimages|.": 2}), images=4, tokens=5000)
    other = ParityReport("a", "pil", cases=9, tokens=1, not_compared="no back end")
    mismatch = Mismatch(1, "parse", Difference("text", "x", "y"), [], {})
    broken = ParityReport("b", "pil", cases=2, mismatch=mismatch)
    counts = json.dumps([report.counts() for report in (equal, other, broken)])
    pictures = "a torch: 43 equal, 0 refused by both, 0 broken\nb pil: 9 equal, 0 refused by both, 3 broken\n"
    places = "a: 1,200 renderings, 0 leaks\n  not printed: none\nb: 9 renderings, 2 leaks\nc: 1 renderings, 0 leaks\n"
    found = page.read([("x.json", counts), ("pictures", pictures), ("places", places)])
    written = page.with_table(f"# Page\n{page.BEGIN}old\n{page.END}rest", found)
    assert "| `a` | 7 | not compared | 2: No images\\| | 5,001 | 4 | 0 | 43 | 1,200 |\n" in written
    assert "| `b` | - | differs | - | 0 | 0 | 0 | 3 differ | 2 leaks |\n" in written
    assert "old" not in written
    assert written.endswith(f"|\n\n{page.END}rest")


@pytest.fixture(scope="module")
def processors():
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return load(ROOT / "tools" / "processors_page.py")


def test_the_page_has_a_row_for_every_model_type_with_images(processors):
    rows = processors.rows_of((ROOT / "docs" / "families.md").read_text("utf-8"))
    assert list(rows) == processors.model_types()
    for name, line in rows.items():
        assert set(processors.kinds_of(line)) <= {"exact", "refused", "not for chat"}, name
        assert "<" not in re.sub(r"`[^`]*`", "", line), f"{name}: a token is markup"


def test_tokens_in_a_reason_are_no_markup_of_the_page(processors):
    assert processors.row_of("blip-2", "", {}, "got '<image>'").endswith("| got '&lt;image>' |")


def test_rows_of_processors_are_whole(processors):
    known = set(processors.model_types())
    for name in processors.read_rows():
        family = processors.family_of(name)
        assert name in known
        assert set(family["tokens"].values()) <= set(family["special"]), name


def test_outcomes_of_model_types_follow_from_the_reports_of_parity(processors):
    differs = Mismatch(1, "parse", Difference("text", "x", "y"), [], {})
    fails = Mismatch(1, "parse", Difference("acceptance", "renders", "ValueError: no"), [], {})
    cases = [
        (ParityReport("a", "pil", cases=9, images=3), True, "exact"),
        (ParityReport("a", "pil", cases=9, images=3, mismatch=differs), True, "wrong"),
        (ParityReport("a", "pil", cases=9, images=3, mismatch=fails), True, "reference fails"),
        (ParityReport("a", "pil", cases=9), True, "not compared"),
        (ParityReport("a", "pil", cases=9, not_compared="images: none"), True, "refused"),
        (ParityReport("a", "pil", cases=9, not_compared="images: none", mismatch=differs), True, "wrong"),
        (
            ParityReport("a", "pil", cases=9, not_compared="images: none", mismatch=differs),
            False,
            "not for chat",
        ),
    ]
    for report, for_chat, kind in cases:
        assert processors.judged(report, for_chat=for_chat)[0] == kind


def test_a_model_is_for_chat_if_its_processor_renders_text_with_an_image(processors, monkeypatch):
    for write, expected in (
        (lambda text: [len(text)], True),
        (lambda _: [1], False),  # a prompt of its own
        (lambda _: 1 // 0, False),
    ):

        class Reference:
            def __init__(self, *_):
                pass

            def render(self, messages, write=write):
                return ReferenceRendering("", write(messages[0]["content"][0]["text"]))

        monkeypatch.setattr(processors, "ReferenceRenderer", Reference)
        assert processors.renders_images(Path(), "pil") is expected


def test_a_model_type_counts_by_the_mode_where_it_is_worse(processors):
    lines = ["| `a` | A | minimal | exact | wrong |  |", "| `b` | B | minimal | exact | - |  |"]
    assert processors.summary(lines) == "Of 2: 1 exact, 1 wrong."
