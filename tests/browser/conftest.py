"""A headless Chromium for the pages of tokens. Runs with `make browser`."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrender import TrainingSample

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / ".browser" / "package" / "axe.min.js"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    "<svg/onload=window.hacked=1>{{data}}'\"&amp;\u202egnp.exe\u2066\x1b[31m\x00\u2028"
)


def findings(tab):
    """What axe-core finds on a page: rule, impact, places and the first place's summary."""
    if not tab.evaluate("'axe' in window"):
        tab.add_script_tag(path=str(AXE))
    return [
        (
            one["id"],
            one["impact"],
            [node["target"] for node in one["nodes"]],
            one["nodes"][0]["failureSummary"],
        )
        for one in tab.evaluate("axe.run()")["violations"]
    ]


@pytest.fixture(scope="session")
def browser():
    if "browser" not in os.environ.get("MMRENDER_TIERS", ""):
        pytest.skip("a tier of its own: make browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page of tokens; whatever it logs as an error, asks the network for or throws fails the test."""
    pages, faults = [], []

    def open_page(page, *, expected=False, **options):
        path = page.save(tmp_path / f"page{len(pages)}.html")
        tab = browser.new_page(**{"viewport": {"width": 1360, "height": 820}, **options})
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on(
            "console",
            lambda message: faults.append(message.text) if message.type == "error" and not expected else None,
        )
        tab.on(
            "request",
            lambda request: (
                faults.append(request.url)
                if request.url[:5] not in ("file:", "data:") and not expected
                else None
            ),
        )
        tab.goto(path.resolve().as_uri())
        pages.append(tab)
        return tab

    yield open_page
    for tab in pages:
        tab.close()
    assert faults == []


@pytest.fixture(scope="session")
def messages():
    """Two turns, a tool's image among them; every text is hostile."""
    across, down = np.meshgrid(np.arange(192), np.arange(128))
    picture = Image.fromarray(np.stack([across, down, across ^ down], -1).astype(np.uint8))
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": picture}, f"What is it? {HOSTILE}"]},
        {"role": "assistant", "content": "A gradient, naïve 日本 🙂 שלום."},
        {
            "role": "user",
            "content": [{"type": "image", "image": picture.rotate(90, expand=True)}, "And this?"],
        },
        {"role": "assistant", "content": "The same gradient."},
    ]


@pytest.fixture(scope="session")
def rendered(renderer, messages):
    return renderer.render(messages)


@pytest.fixture(scope="session")
def long_sample(renderer):
    """A hundred thousand tokens with log-probabilities."""
    text = (ROOT / "mmrender/testing/data/corpus.txt").read_text("utf-8")
    piece = renderer.tokenizer.encode(text[:20000])
    ids = np.array((piece * (100_000 // len(piece) + 1))[:100_000], np.int32)
    mask = np.arange(len(ids)) // 500 % 2 == 1
    logprobs = np.where(mask, -np.random.default_rng(0).gamma(0.4, 1.0, len(ids)), 0).astype(np.float32)
    return TrainingSample(ids, mask, logprobs, sample_id="long")
