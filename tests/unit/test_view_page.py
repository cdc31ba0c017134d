"""Pages of tokens: nothing of a conversation is markup, and everything that is known of a token is there."""

import asyncio
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kit import assistant, error_of, user
from mmrender import Trajectory
from mmrender.audit.report import AuditReport, Comparison, Finding
from mmrender.errors import InputError
from mmrender.rollout.client import RendererClient
from mmrender.sidecar import common_prefix
from mmrender.view import Page
from mmrender.view.data import Document, of_difference
from mmrender.view.pictures import token_grid
from mmrender.view.terminal import token_strip
from mmrender.view.text import token_texts, visible
from rollout_cases import TOOLS, ScriptedBackend
from video_cases import frames_of

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202egnp\x1b[31m\x00\u2028 &amp; 日本🙂"
)


@pytest.fixture(scope="module")
def conversation():
    rows = np.arange(128 * 192 * 3, dtype=np.uint32).reshape(128, 192, 3) % 251
    picture = Image.fromarray(rows.astype(np.uint8))
    return [
        {"role": "user", "content": [{"type": "image", "image": picture}, HOSTILE]},
        assistant("A picture.", reasoning_content="Look."),
    ]


@pytest.fixture(scope="module")
def rendered(renderer, conversation):
    return renderer.render(conversation)


@pytest.fixture(scope="module")
def trajectory(renderer, conversation):
    """Two turns, and another second one."""
    made = Trajectory("</script>")
    prompt = renderer.render(conversation[:1], add_generation_prompt=True)
    completion = renderer.render_ids(conversation)[len(prompt) : -1]
    logprobs = np.linspace(-3, -0.1, len(completion)).astype(np.float32)
    data = prompt.multi_modal_data
    first = made.append(
        prompt.token_ids, completion, logprobs=logprobs, multi_modal_data=data, messages=conversation
    )
    for question in ("Why?", "What else?"):
        told = [*conversation, {"role": "user", "content": question}]
        bridged = renderer.bridge_to_next_turn(
            prompt.token_ids, completion, told[2:], previous_multi_modal_data=data
        )
        step = made.append(
            bridged.token_ids,
            completion,
            logprobs=logprobs,
            multi_modal_data=data,
            parent=first,
            messages=told,
        )
        step.reward = 0.5
    return made


def shown(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    return json.loads(found[1])


@given(st.text(max_size=40))
def test_visible_text_is_printable_and_ends_no_line(text):
    assert visible(text).isprintable()
    assert visible(text) == text or not text.isprintable()


@given(st.lists(st.sampled_from(["日本", "🙂", " a", "\n\n", "é", HOSTILE]), max_size=8))
def test_texts_of_tokens_join_to_the_text(renderer, pieces):
    ids = renderer.tokenizer.encode("".join(pieces))
    texts = token_texts(ids, renderer.decode)
    assert len(texts) == len(ids)
    assert "".join(texts) == renderer.decode(ids)


def test_a_conversation_is_never_markup_nor_a_control_of_the_terminal(renderer, rendered, trajectory):
    """One data block and one script, whose digest the policy names; no `<` and no control from outside."""
    for page in (Page(rendered, title=HOSTILE, names=[HOSTILE]), Page(trajectory, renderer=renderer)):
        html = page.html
        assert len(re.findall("<script", html)) == html.count("</script>") == 2
        assert "<img" not in html
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u2028]", html)
        assert "<" not in html.split('id="data">')[1].split("</script>")[0]
        assert "default-src 'none'; script-src 'sha256-" in html
        assert "unsafe" not in html
        assert not re.search(
            r"\son\w+=|\sstyle=|https?://", html.split("<script type")[0].split("</style>")[1]
        )
    assert "&lt;/script&gt;" in page._repr_html_()
    shown = token_strip(rendered).plain
    assert "␛[31m" in shown
    assert "⟨U+202E⟩" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


def test_a_rendering_is_shown_as_it_is(renderer, rendered):
    document = shown(Page(rendered))
    (strip,) = document["strips"]
    assert strip["ids"] == rendered.token_ids
    assert [tuple(span) for span in strip["spans"]] == [tuple(span) for span in rendered.spans]
    mask = np.zeros(len(rendered), bool)
    for start, stop in strip["trained"]:
        mask[start:stop] = True
    assert (mask == rendered.loss_mask()).all()
    assert [section["label"] for section in strip["sections"]] == ["user", "assistant"]
    (medium,) = strip["media"]
    (place,) = rendered.multi_modal_data.mm_placeholders["image"]
    assert (medium["start"], medium["stop"]) == (place.offset, place.offset + place.length)
    assert medium["grid"] == [1, 4, 6]
    item = document["media"][medium["item"]]
    assert (item["width"], item["height"]) == (192, 128)
    assert item["pictures"][0].startswith("data:image/jpeg;base64,")


def test_a_video_is_a_strip_of_some_frames_with_their_times(renderer):
    video = {"type": "video", "video": frames_of(15, 64, 96), "times": [index / 4 for index in range(15)]}
    (item,) = shown(Page(renderer.render([{"role": "user", "content": [video]}])))["media"].values()
    assert (item["modality"], item["frames"], len(item["pictures"])) == ("video", 15, 8)
    assert item["seconds"] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


def test_branches_have_their_messages_numbers_and_beginnings(renderer, trajectory):
    document = shown(Page(trajectory, renderer=renderer))
    first, second = document["strips"]
    assert [strip["name"] for strip in document["strips"]] == ["branch 0", "branch 1"]
    common = common_prefix(first["ids"], second["ids"])
    (mark,) = document["marks"]
    assert (mark["strip"], mark["token"], mark["title"]) == (1, common, "branch 1 begins")
    assert [section["role"] for section in first["sections"]][:3] == ["user", "assistant", "user"]
    for strip, sample in zip((first, second), trajectory.samples(once=False), strict=True):
        sampled = np.zeros(len(sample), bool)
        for start, stop, _, _, is_sampled in strip["spans"]:
            sampled[start:stop] = is_sampled
        assert sampled.sum() == sample.loss_mask.sum()
        values = [value for run in strip["values"]["sampler"].values() for value in run]
        np.testing.assert_allclose(values, sample.logprobs[sample.loss_mask], rtol=1e-5)
        assert sum(map(sum, strip["values"]["reward"].values())) == 0.5
    several = shown(Page(trajectory, trajectory, names=["first"]))["strips"]
    names = [f"{name}, branch {branch}" for name in ("first", trajectory.trajectory_id) for branch in (0, 1)]
    assert [strip["name"] for strip in several] == names
    # Without a renderer there is neither text nor messages, but every step.
    (bare, _) = shown(Page(trajectory))["strips"]
    assert not bare["texts"]
    assert bare["sections"][0]["label"] == "step 0 prompt"


def test_a_rollout_with_tools_is_shown_by_its_messages(renderer):
    """Nobody names the tools again, and yet the text of the user is the user's."""
    backend = ScriptedBackend(renderer, lambda _: "A cow.")
    client, made = RendererClient(renderer, backend=backend, model="m"), Trajectory()
    messages = [{"role": "system", "content": "Be brief."}, user("Which animal is it?")]
    asyncio.run(client.create_completion(messages, tools=TOOLS, trajectory=made))
    (strip,) = shown(Page(made, renderer=renderer))["strips"]
    texts = [strip["vocabulary"][str(token)] for token in strip["ids"]]
    place = texts.index(renderer.decode(renderer.tokenizer.encode("Which animal is it?")[:1]))
    roles = [section["role"] for section in strip["sections"] if section["start"] <= place]
    assert roles[-1] == "user"


def test_a_trajectory_is_shown_with_its_tools(renderer):
    """The system's message with the tools, the user's text, and what was sampled have their own sections."""
    tools = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}]
    messages = [user("Look there."), assistant("A cow.")]
    prompt = renderer.render(messages[:1], tools=tools, add_generation_prompt=True).token_ids
    completion = renderer.render_ids(messages, tools=tools)[len(prompt) : -1]
    roles = {}
    for name, kept in (("kept", tools), ("lost", None)):
        made = Trajectory()
        made.append(prompt, completion, messages=messages, tools=kept)
        (strip,) = shown(Page(made, renderer=renderer))["strips"]
        starts = [(section["start"], section["role"]) for section in strip["sections"]]
        (at,) = (
            place
            for place, token in enumerate(strip["ids"])
            if strip["vocabulary"][str(token)] == renderer.decode(renderer.tokenizer.encode("Look")[:1])
        )
        roles[name] = [
            next(role for start, role in reversed(starts) if start <= token)
            for token in (0, at, len(prompt), len(strip["ids"]) - 1)
        ]
        assert bool(strip["notes"]) == (kept is None)
    assert roles["kept"] == ["template", "user", "assistant", "assistant"]
    # A file from before tools were kept: from the first token that differs on, steps are shown.
    assert roles["lost"][1:] == ["prompt", "assistant", "assistant"]


def test_a_finding_is_at_its_token_and_image(renderer, trajectory):
    sample = trajectory.samples(once=False)[0]
    trainer = sample.logprobs.copy()
    place = int(np.flatnonzero(sample.loss_mask)[2])
    trainer[place] = np.nan
    finding = Finding(
        "pixels", "unknown", "the picture is another", "0.5 nats", sample.sample_id, image=0, token=place
    )
    report = AuditReport(
        (Comparison.of(sample, trainer[sample.loss_mask]),), (finding,), (), 1e-3, _decode=renderer.decode
    )
    document = shown(Page(report))
    assert [mark["token"] for mark in document["marks"]] == [place, place]
    assert document["marks"][0]["medium"] == 0
    runs = document["strips"][0]["values"]["trainer"]
    assert "nan" in [value for run in runs.values() for value in run]
    assert "iframe" in report._repr_html_()


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_a_difference_is_all_that_is_not_shared(first, second):
    document = Document("", strips=[{"ids": first}, {"ids": second}])
    of_difference(document)
    (start, stop), (_, other) = (strip["differs"] for strip in document.strips)
    assert first[:start] == second[:start]
    assert first[stop:] == second[other:]
    if first != second:
        assert start == len(first) or start == len(second) or first[start] != second[start]
    assert bool(document.marks) == (first != second)


def test_pages_of_everything_in_notebooks(rendered, trajectory):
    for thing in (rendered, trajectory, Trajectory()):
        assert thing._repr_html_().startswith('<iframe sandbox="allow-scripts" srcdoc=')
    assert "cannot show this value" in error_of(InputError, Page, "text")
    assert error_of(InputError, Page, [rendered]).endswith(
        "got list. Pass several one by one: Page(*samples)"
    )


@pytest.mark.parametrize(
    ("grid", "count", "expected"),
    [
        ((1, 8, 12), 24, (1, 4, 6)),
        ((2, 8, 12), 48, (2, 4, 6)),
        ((1, 8, 12), 96, (1, 8, 12)),
        ((5,), 64, None),
        ((1, 3, 5), 7, None),
        ((), 4, None),
        ((1, 8, 12), 0, None),
    ],
)
def test_the_grid_of_tokens(grid, count, expected):
    assert token_grid(SimpleNamespace(grid=grid, modality="image"), count) == expected


def test_one_who_differs_in_one_token(rendered):
    other = replace(rendered, token_ids=[*rendered.token_ids[:-1], 7])
    document = shown(Page.of_difference(rendered, other, names=("ours", "theirs")))
    assert document["sideBySide"]
    assert {mark["token"] for mark in document["marks"]} == {len(rendered) - 1}
