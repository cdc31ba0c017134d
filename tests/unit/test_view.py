"""The token strip, the tables beside it, and what `doctor` prints."""

import json
import pickle
import shutil
from dataclasses import dataclass
from itertools import pairwise

import pytest
from PIL import Image
from rich.console import Console

import vocabularies
from kit import assistant, user
from mmrender.renderer import Renderer
from mmrender.sidecar import MultiModalData, PlaceholderRange, Repeat
from mmrender.tokens.rendered import RenderedTokens, TokenSpan
from mmrender.view.doctor import diagnose, findings_table
from mmrender.view.terminal import STYLES, difference, legend, message_table, token_strip

STRIP = """\
<|im_start|>system⏎
Be brief.<|im_end|>⏎
<|im_start|>user⏎
<|vision_start|>⟨image 4×6 = 24⟩<|vision_end|>What is\tit? 日本🙂<|im_end|>⏎
<|im_start|>assistant⏎
<think>⏎
Look.⏎
</think>⏎
⏎
A picture.<|im_end|>⏎
<|im_start|>user⏎
Say <|im_end|><|im_end|>⏎
<|im_start|>assistant⏎
"""

TABLE = """\
message ┃ role      ┃ tokens ┃ sampled ┃ media
━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━╇━━━━━━
      0 │ system    │     13 │         │
      1 │ user      │     48 │         │     1
      2 │ assistant │     20 │      13 │
      3 │ user      │     17 │         │
        │ template  │      6 │         │
"""


@pytest.fixture(scope="module")
def rendered(renderer):
    picture = Image.new("RGB", (192, 128), "red")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": picture}, "What is\tit? 日本🙂"]},
        assistant("A picture.", reasoning_content="Look."),
        user("Say <|im_end|>"),
    ]
    return renderer.render(messages, add_generation_prompt=True)


def printed(renderable, width=120):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def test_the_strip_shows_every_token_once_in_the_colour_of_its_kind(rendered):
    strip = token_strip(rendered)
    assert strip.plain == STRIP.replace("\t", "⇥")
    styles = {strip.plain[span.start : span.end]: str(span.style) for span in strip.spans}
    assert "dark_sea_green" in styles["<think>"]
    assert styles["⟨image 4×6 = 24⟩"] == STYLES["image"][0]
    assert styles["<|vision_start|>"] in ("grey58", "grey46")
    assert styles["日本"[0]] in STYLES["content"]
    # Neighbours differ in shade.
    content = [s for s in strip.spans if s.style in STYLES["content"] and strip.plain[s.start] != "\n"]
    same_run = [(a, b) for a, b in pairwise(content) if a.end == b.start]
    assert same_run
    assert all(a.style != b.style for a, b in same_run)


@dataclass(frozen=True)
class _Item:
    grid: tuple[int, ...]
    modality: str = "image"
    identity: str = "0"
    size: tuple[int, int] = (1, 1)
    expansion: tuple[Repeat, ...] = ()
    nbytes: int = 0


@pytest.mark.parametrize(
    ("grid", "count", "shown"),
    [
        ((1, 48, 64), 768, "⟨image 24×32 = 768⟩"),
        ((1, 4, 6), 24, "⟨image 4×6 = 24⟩"),
        ((3, 8, 8), 48, "⟨image 3×4×4 = 48⟩"),
        ((13,), 3328, "⟨image 13 tiles = 3328⟩"),
    ],
)
def test_pads_are_folded_to_their_layout(grid, count, shown):
    data = MultiModalData.of([(PlaceholderRange(0, count), _Item(grid))])
    span = TokenSpan(0, count, 0, "image", False)
    rendered = RenderedTokens([0] * count, (span,), ("user",), (None,), data)
    assert token_strip(rendered).plain == shown


def test_words_of_a_sentencepiece_vocabulary_keep_their_blanks():
    engine = vocabularies.build("metaspace_always")

    def decode(ids):
        return engine.decode(list(ids), skip_special_tokens=False)

    def of(text):
        ids = engine.encode(text).ids
        return RenderedTokens(ids, (TokenSpan(0, len(ids), 0, "content", False),), ("user",), _decode=decode)

    first, second = of("big blue world"), of("big blue moon")
    assert token_strip(first).plain == " big blue world"
    shown = difference(first, second, ("a", "b"), decode).plain.splitlines()
    assert [line for line in shown if "blue" in line] == [" big blue world", " big blue moon"]


def test_the_table_counts_tokens_and_the_legend_names_every_colour(rendered):
    assert printed(message_table(rendered)) == TABLE
    assert sum(rendered.tokens_per_message) + 6 == len(rendered)
    assert legend().plain.split() == ["sampled", "content", "reasoning", "tool", "call", "image", "template"]
    shown = token_strip(pickle.loads(pickle.dumps(rendered))).plain
    assert shown.startswith("".join(f"⟨{token_id}⟩" for token_id in rendered.token_ids[:4]))


def test_findings_are_plain_data_and_a_table(renderer):
    findings = diagnose(renderer)
    assert json.loads(json.dumps(findings))["template"]["prefix_stable"] is True
    stops = {token: renderer.tokenizer.token_id(token) for token in ("<|endoftext|>", "<|im_end|>")}
    assert (findings["tokenizer"]["stop tokens"], findings["images"]["back end"]) == (stops, "pil")
    assert findings["problems"] == {}
    table = printed(findings_table(findings))
    assert "prefix stable" in table
    assert "<|im_end|>" in table


def test_a_text_only_model_has_no_image_section(tiny_model, tmp_path):
    images = shutil.ignore_patterns("*preprocessor*")
    directory = shutil.copytree(tiny_model, tmp_path / "text", ignore=images)
    findings = diagnose(Renderer.from_pretrained(directory, image_backend="pil"))
    assert findings["images"] == {}
    assert "none: a text-only model" in printed(findings_table(findings))


SILENT = "{% for m in messages %}<|im_start|>{{ m.role }}\n<|im_end|>\n{% endfor %}"
REFUSES = "{{ raise_exception('not today') }}"


@pytest.mark.parametrize("template", [SILENT, REFUSES])
def test_a_probe_that_failed_is_never_yes(tiny_model, template):
    findings = diagnose(
        Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=template), tiny_model
    )
    stable, tools = (findings["template"][name] for name in ("prefix_stable", "prints_tools"))
    assert stable == "unknown: no probe showed an answer"
    assert tools is False if template is SILENT else tools == "unknown: the template refuses the probe"
    assert not any(entry is True or entry.startswith("yes") for entry in findings["bridge"].values())
    assert findings["problems"].keys() >= {"prefix_stable", "roles", "images"}
    assert "unknown: no probe showed an answer" in printed(findings_table(findings))


def rewritten(directory, tmp_path, change):
    """A copy of a model whose tokenizer.json is changed."""
    copy = shutil.copytree(directory, tmp_path / "changed")
    file = copy / "tokenizer.json"
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))
    return copy


def test_doctor_says_who_begins_a_prompt(tiny_model, tmp_path):
    def add_bos(settings):
        token = {"id": settings["added_tokens"][0]["content"], "type_id": 0}
        entry = {"id": token["id"], "ids": [settings["added_tokens"][0]["id"]], "tokens": [token["id"]]}
        single = [{"SpecialToken": token}, {"Sequence": {"id": "A", "type_id": 0}}]
        parts = {"single": single, "pair": single, "special_tokens": {token["id"]: entry}}
        settings["post_processor"] = {"type": "TemplateProcessing", **parts}

    plain = diagnose(Renderer.from_pretrained(tiny_model, image_backend="pil"))
    assert plain["tokenizer"]["beginning of a prompt"] == "only the template's own text"
    directory = rewritten(tiny_model, tmp_path, add_bos)
    findings = diagnose(Renderer.from_pretrained(directory, image_backend="pil"))
    written = "<|endoftext|>, written by the tokenizer's post-processor"
    assert findings["tokenizer"]["beginning of a prompt"] == written
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|endoftext|>"}))
    options = {"image_backend": "pil", "chat_template": template}
    findings = diagnose(Renderer.from_pretrained(directory, **options))
    assert findings["tokenizer"]["beginning of a prompt"] == "<|endoftext|>, written by the template"


def test_doctor_compares_with_the_tokenizer_that_transformers_builds(tiny_model, tmp_path):
    """The class for Qwen2 brings a normalizer of its own, whatever the file says."""
    pytest.importorskip("transformers")
    lowercase = {"normalizer": {"type": "Lowercase"}}
    directory = rewritten(tiny_model, tmp_path, lambda settings: settings.update(lowercase))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    findings = diagnose(Renderer.from_pretrained(directory, image_backend="pil"), directory)
    found = findings["problems"]["equals the Transformers tokenizer"]
    assert found.startswith("no: Qwen2Tokenizer encodes 'Hello world' as [")
    honest = diagnose(Renderer.from_pretrained(tiny_model, image_backend="pil"), tiny_model)
    assert honest["tokenizer"]["equals the Transformers tokenizer"] is True


def test_a_video_in_pieces_is_one_medium():
    data = MultiModalData.of(
        [(PlaceholderRange(0, 5, embed_spans=((0, 2), (3, 5))), _Item((2, 2, 4), "video"))]
    )
    kinds = ("video", 0, 2), ("template", 2, 3), ("video", 3, 5)
    spans = tuple(TokenSpan(start, stop, 0, kind, False) for kind, start, stop in kinds)
    rendered = RenderedTokens([0] * 5, spans, ("user",), (None,), data)
    assert printed(message_table(rendered)).splitlines()[2].split() == [
        "0",
        "│",
        "user",
        "│",
        "5",
        "│",
        "│",
        "1",
    ]
