"""The page of tokens as a person meets it: seen, searched, read aloud, steered by keys, scrolled."""

import json
from dataclasses import replace

import numpy as np
import pytest

from browser.conftest import AXE, HOSTILE, findings
from mmrender import TrainingSample, Trajectory
from mmrender.audit.report import AuditReport, Comparison, Finding
from mmrender.view import Page
from mmrender.view.text import visible

FOLDS = """async () => {
    for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
    const bottom = (one) => one.getBoundingClientRect().bottom;
    return [...document.querySelectorAll('.card')].map((card) => bottom(card.querySelector('button')) <= bottom(card));
}"""
"""Whether each card of media contains its button, once the page is drawn in its new size."""
SCROLL = """async ({frames, pixels}) => {
  const strip = document.querySelector(".strip");
  const begin = performance.now();
  let shown = 0, most = 0;
  return await new Promise((done) => requestAnimationFrame(function frame() {
    most = Math.max(most, document.querySelectorAll(".t").length);
    if (shown === frames) return done({rate: 1000 * frames / (performance.now() - begin), most, top: strip.scrollTop});
    shown += 1;
    strip.scrollTop += pixels;
    requestAnimationFrame(frame);
  }));
}"""
"""Scrolls by as many pixels in each frame; gives the frames a second that came of it."""


WIDTHS = (390, 768, 1440)


def current(tab):
    """The token that is the current one, as a screen reader is told."""
    cell = tab.locator("#" + tab.locator(".strip").first.get_attribute("aria-activedescendant"))
    return cell.get_attribute("aria-label")


def test_every_token_is_there_in_order_and_images_are_folded(opened, renderer, rendered):
    tab = opened(Page(rendered, title="Two pictures"), viewport={"width": 900, "height": 3000})
    assert tab.inner_text("h1") == "Two pictures"
    cells = tab.locator(".strip [data-token]")
    shown = [int(token) for token in cells.evaluate_all("all => all.map(one => one.dataset.token)")]
    spans = rendered.multi_modal_data.spans(len(rendered))
    hidden = {token for span in spans for token in range(span.start + 1, span.stop)}
    assert shown == [token for token in range(len(rendered)) if token not in hidden]
    texts = tab.locator(".t").all_text_contents()
    assert "".join(texts).replace("·", "").find(visible(HOSTILE)) > 0
    pictures = tab.locator(".card img").evaluate_all("all => all.map(one => one.naturalWidth > 0)")
    assert pictures == [True, True]
    assert "24 tokens" in tab.locator(".card").first.inner_text()
    assert "4 × 6 patches" in tab.locator(".card").first.inner_text()
    mask = rendered.loss_mask()
    trained = tab.locator(".strip .t.trained").evaluate_all("all => all.map(one => +one.dataset.token)")
    assert trained == np.flatnonzero(mask).tolist()


def test_tokens_of_a_line_fit_into_it(opened, rendered):
    """Lines are broken by measured widths; what the browser lays out is no wider, and so is what stands beside images."""
    for width in (1360, 340):
        tab = opened(Page(rendered), viewport={"width": width, "height": 900})
        over = tab.locator(".line-row, .card, .card .about").evaluate_all(
            "all => all.map(one => one.scrollWidth - one.clientWidth)"
        )
        assert max(over) <= 0


def test_hostile_text_stays_text(opened, renderer, rendered, messages):
    tools = [{"name": HOSTILE, "description": HOSTILE}]
    trajectory = Trajectory(HOSTILE)
    count = len(rendered) - 10
    trajectory.append(
        rendered.token_ids[:count],
        rendered.token_ids[count:],
        multi_modal_data=rendered.multi_modal_data,
        messages=messages,
        finish_reason=HOSTILE,
    )
    sample = TrainingSample(
        np.array(rendered.token_ids, np.int32),
        np.arange(len(rendered)) > count,
        np.zeros(len(rendered), np.float32),
        rendered.multi_modal_data,
        sample_id=HOSTILE,
        rewritten={0: HOSTILE},
    )
    comparison = Comparison.of(sample, np.ones(int(sample.loss_mask.sum()), np.float32))
    finding = Finding("pixels", "unknown", HOSTILE, HOSTILE, HOSTILE, image=0, token=count + 1)
    report = AuditReport((comparison,), (finding,), (), 1e-3, _decode=renderer.decode)
    other = replace(rendered, roles=(HOSTILE, *rendered.roles[1:]))
    pages = [Page(rendered, other, title=HOSTILE, names=[HOSTILE, HOSTILE]), Page(sample, renderer=renderer)]
    pages += [Page(report), Page(trajectory), Page(trajectory, renderer=renderer, tools=tools)]
    pages += [Page.of_difference(rendered, other, names=(HOSTILE, HOSTILE))]
    for page in pages:
        tab = opened(page)
        tab.locator(".strip").first.press("End")
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("body img[src=x], body svg").count() == 0
        assert tab.locator("script").count() == 2
        assert "\u202e" not in tab.content()


def test_the_content_policy_stops_what_would_get_in(opened, rendered):
    """As if text had become markup after all: neither script, nor handler, nor request."""
    tab = opened(Page(rendered), expected=True)
    refused = tab.evaluate("""async () => {
      const refused = [];
      addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
      document.body.insertAdjacentHTML("beforeend", "<i onclick='window.hacked=1' id='bait'></i><b style='color:red'></b>");
      document.getElementById("bait").click();
      document.body.append(Object.assign(document.createElement("script"), {textContent: "window.hacked=1"}));
      await fetch("https://example.com").catch(() => 0);
      await new Promise((done) => setTimeout(done, 50));
      return [...new Set(refused)].sort();
    }""")
    assert refused == ["connect-src", "script-src-attr", "script-src-elem", "style-src-attr"]
    assert tab.evaluate("window.hacked") is None


def test_a_patch_and_its_token_find_each_other(opened, rendered):
    tab = opened(Page(rendered))
    (span, _) = rendered.multi_modal_data.spans(len(rendered))
    box = tab.locator(".picture").first.bounding_box()
    for row, column in ((0, 0), (2, 4), (3, 5)):
        tab.mouse.move(
            box["x"] + box["width"] * (column + 0.5) / 6, box["y"] + box["height"] * (row + 0.5) / 4
        )
        facts = dict(
            zip(tab.locator("dt").all_inner_texts(), tab.locator("dd").all_inner_texts(), strict=True)
        )
        assert facts["position"] == str(span.start + row * 6 + column)
        assert (facts["patch row"], facts["patch column"]) == (f"{row + 1} of 4", f"{column + 1} of 6")
    tab.get_by_role("button", name="Show tokens").first.click()
    tab.locator(f'.t[data-token="{span.start + 16}"]').hover()
    facts = dict(zip(tab.locator("dt").all_inner_texts(), tab.locator("dd").all_inner_texts(), strict=True))
    assert (facts["patch row"], facts["patch column"]) == ("3 of 4", "5 of 6")


def test_search_by_text_and_by_id(opened, renderer, rendered):
    tab = opened(Page(rendered))
    tab.keyboard.press("/")
    tab.keyboard.type("GRADIENT")
    assert tab.inner_text("#hits") == "1 of 2"
    found = "".join(tab.locator(".t.found").all_text_contents()).lower()
    assert "gradient" in found
    tab.keyboard.press("Enter")
    assert tab.inner_text("#hits") == "2 of 2"
    assert ", assistant, sampled" in current(tab)
    tab.fill("#query", str(rendered.token_ids[0]))
    assert tab.inner_text("#hits") == f"1 of {rendered.token_ids.count(rendered.token_ids[0])}"
    (first, _) = rendered.multi_modal_data.spans(len(rendered))
    tab.fill("#query", str(rendered.token_ids[first.start]))
    assert tab.inner_text("#hits") == "1 of 2"  # an image is one hit
    tab.fill("#query", "nowhere to be found")
    assert tab.inner_text("#hits") == "none"
    tab.keyboard.press("Escape")
    assert tab.locator(".t.found").count() == 0


def test_keys_reach_everything(opened, renderer, rendered):
    tab = opened(Page(rendered))
    (first, _) = rendered.multi_modal_data.spans(len(rendered))
    strip = tab.locator(".strip")
    strip.focus()
    strip.press("Home")
    assert ", token 0, system" in current(tab)
    strip.press("i")
    assert current(tab).startswith(f"image 0, {first.stop - first.start} tokens")
    strip.press("ArrowRight")
    assert f", token {first.stop}, " in current(tab)
    strip.press("ArrowLeft")
    strip.press("Enter")
    assert tab.locator('[aria-expanded="true"]').count() == 1
    strip.press("ArrowRight")
    assert f"token {first.start + 1}, " in current(tab)
    strip.press("Enter")
    strip.press("i")
    assert current(tab).startswith("image 1")
    strip.press("End")
    assert f", token {len(rendered) - 1}, assistant" in current(tab)
    strip.press("[")
    assert ", user, " in current(tab)
    strip.press("Home")
    lines = [current(tab)]
    for _ in range(tab.locator(".line-row, .card-row").count() - 1):
        strip.press("ArrowDown")
        lines.append(current(tab))
    assert len(set(lines)) == len(lines)


def test_a_hundred_thousand_tokens_scroll(opened, renderer, long_sample):
    """Above 30 frames a second at 240 lines a second, with a few hundred tokens in the document.

    Asked of the processor time of the page's thread, a frame of which may take a thirtieth of a second: the
    frames that come depend on what else the machine does, which says nothing of the page.
    """
    tab = opened(Page(long_sample, renderer=renderer))
    tab.wait_for_selector(".t")
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy():
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    before = busy()
    found = tab.evaluate(SCROLL, {"frames": 90, "pixels": 200})
    spent = (busy() - before) / 90
    print(
        f"{1e3 * spent:.1f} ms of processor time a frame, {found['rate']:.0f} frames a second, "
        f"at most {found['most']} tokens in the document"
    )
    assert found["top"] == 90 * 200
    assert 0 < spent < 1 / 30
    assert found["most"] < 3000
    tab.locator(".strip").press("End")
    assert ", token 99999, " in current(tab)
    tab.locator(".strip").press("Home")
    assert ", token 0, " in current(tab)


def test_colours_by_number_and_mask(opened, renderer, rendered):
    mask = rendered.loss_mask()
    logprobs = np.where(mask, -5.0, 0.0).astype(np.float32)
    sample = TrainingSample(
        np.array(rendered.token_ids, np.int32),
        mask,
        logprobs,
        rendered.multi_modal_data,
        rendered=rendered,
        advantages=np.where(mask, -1.0, 0.0).astype(np.float32),
    )
    tab = opened(Page(sample), viewport={"width": 1360, "height": 2400})
    trained = int(mask.sum())
    tab.get_by_role("radio", name="Log-prob").click()
    assert tab.locator(".strip .t.v4").count() == trained
    tab.get_by_role("radio", name="Advantage").click()
    assert tab.locator(".strip .t.v-4").count() == trained
    tab.get_by_role("radio", name="Loss mask").click()
    assert tab.locator(".strip.masked").count() == 1
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("[role=radio][aria-checked=true]").inner_text() == "Origin"
    tab.locator(".strip .t.trained").first.click()
    facts = dict(zip(tab.locator("dt").all_inner_texts(), tab.locator("dd").all_inner_texts(), strict=True))
    assert (facts["log-probability"], facts["advantage"], facts["trained on"]) == ("−5.0000", "-1", "yes")


def test_a_difference_opens_where_it_begins(opened, renderer, rendered):
    ids = [*rendered.token_ids[:-6], *renderer.tokenizer.encode("quite another"), *rendered.token_ids[-2:]]
    other = TrainingSample(np.array(ids, np.int32), np.arange(len(ids)) > 60)
    tab = opened(Page.of_difference(rendered, other, renderer=renderer, names=("ours", "theirs")))
    assert tab.locator(".pane").count() == 2
    tops = [tab.locator(".t.marked").nth(index).bounding_box()["y"] for index in (0, 1)]
    assert all(0 < top < 820 for top in tops)
    assert f"{len(rendered) - 6} tokens are equal before it" in tab.inner_text("#inspector")
    tab.set_viewport_size({"width": 768, "height": 820})
    inside = tab.evaluate(FOLDS)
    assert inside
    assert all(inside)


@pytest.fixture(scope="module")
def audited(renderer, rendered):
    """An audit with differences of every size and two findings, one of them at the second image."""
    mask = rendered.loss_mask()
    logprobs = np.where(mask, -3.0, 0.0).astype(np.float32)
    sample = TrainingSample(
        np.array(rendered.token_ids, np.int32),
        mask,
        logprobs,
        rendered.multi_modal_data,
        rendered=rendered,
        sample_id="one",
        advantages=np.where(mask, np.linspace(-3, 3, len(mask)), 0).astype(np.float32),
    )
    trainer = np.full(len(rendered), -3.0, np.float32)
    trainer[mask] += np.resize([0, 1e-4, 1e-3, 0.02, 0.3, 3, -1e-3, -0.02, -0.3, -3], mask.sum())
    token = int(np.flatnonzero(mask)[-3])
    named = (
        Finding("pixels", "unknown", "another picture", "0.5 nats", "one", image=1, token=token),
        Finding("tokens", "unknown", "encoded again", "by 3 tokens", "one", token=token - 2),
    )
    comparison = Comparison.of(sample, trainer[sample.loss_mask])
    return token, AuditReport((comparison,), named, (), 1e-3, _decode=renderer.decode)


def test_a_finding_opens_at_its_token_and_image(opened, audited):
    token, report = audited
    tab = opened(Page(report))
    assert "another picture" in tab.inner_text("#inspector")
    tab.locator(".strip").press("Home")
    tab.get_by_role("button", name="pixels: another picture").click()
    assert tab.locator(f'.t.marked.current[data-token="{token}"]').is_visible()
    assert tab.locator(".card.marked").count() == 1
    assert "0.5 nats" in tab.inner_text("#inspector")
    assert tab.locator("#inspector .note img").count() == 1


@pytest.mark.parametrize("width", [390, 768])
def test_findings_are_reached_without_a_keyboard_on_a_narrow_screen(opened, audited, width):
    token, report = audited
    tab = opened(Page(report), viewport={"width": width, "height": 780}, has_touch=True)
    finding = tab.get_by_role("button", name="pixels: another picture")
    assert not finding.is_visible()
    outline = tab.get_by_role("button", name="Outline and 3 marks")
    outline.tap()
    assert outline.get_attribute("aria-expanded") == "true"
    box = finding.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["height"] >= 24
    finding.tap()
    assert not finding.is_visible()
    assert outline.get_attribute("aria-expanded") == "false"
    assert tab.locator(f'.t.marked.current[data-token="{token}"]').is_visible()
    assert "0.5 nats" in tab.inner_text("#inspector")
    outline.tap()
    tab.keyboard.press("Escape")
    assert not finding.is_visible()
    assert tab.evaluate("document.activeElement.id") == "menu"


def test_on_a_phone_there_is_a_panel_only_for_a_chosen_token(opened, rendered):
    tab = opened(Page(replace(rendered, rewritten=(0,))), viewport={"width": 390, "height": 800})
    panel = tab.locator("#inspector")
    assert not panel.is_visible()
    tab.get_by_role("button", name="Outline").click()
    assert "message 0: rewritten by the template" in tab.inner_text("#outline")
    tab.keyboard.press("Escape")
    tab.locator(".strip .t.sampled").first.click()
    assert panel.is_visible()
    tab.get_by_role("button", name="Close").click()
    assert not panel.is_visible()


def test_an_address_leads_to_a_token(opened, renderer, rendered, tmp_path):
    tab = opened(Page(rendered, rendered))
    tab.locator(".strip").first.press("End")
    tab.wait_for_url(f"**#t=0-{len(rendered) - 1}")
    tab.goto(tab.url.partition("#")[0] + "#t=1-5")  # the same page, which scrolls
    assert ", token 5, " in tab.locator(
        "#" + tab.locator(".strip").last.get_attribute("aria-activedescendant")
    ).get_attribute("aria-label")
    tab.reload()
    assert "5" in tab.locator("#inspector dd").all_inner_texts()
    tab.goto(tab.url.partition("#")[0] + "#t=9-9")
    assert tab.inner_text("h1") == "tokens"


def test_the_data_can_be_saved(opened, rendered):
    tab = opened(Page(rendered, title="Saved"))
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Download the data of this page").click()
    saved = json.loads(download.value.path().read_text("utf-8"))
    assert saved["title"] == "Saved"
    assert saved["strips"][0]["ids"] == rendered.token_ids


@pytest.mark.skipif(not AXE.is_file(), reason=f"needs {AXE}, which `make browser` fetches")
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing(opened, rendered, audited, width):
    """On pages of tokens, of a difference and of an audit, in every colouring, and with the outline open.

    Pages are light and dark by turns, and each page at one width and the next.
    """
    other = replace(rendered, token_ids=[*rendered.token_ids[:-1], 7])
    pages = [Page(rendered), Page.of_difference(rendered, other), Page(audited[1])]
    found = []
    for index, page in enumerate(pages, WIDTHS.index(width)):
        scheme = ("light", "dark")[index % 2]
        tab = opened(page, color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
        views = tab.get_by_role("radio")
        for index in range(views.count()):
            views.nth(index).click()
            tab.locator(".strip").first.press("End")
            found += [(views.nth(index).inner_text(), *one) for one in findings(tab)]
        if tab.locator("#menu").is_visible():
            tab.locator("#menu").click()
            found += [("outline", *one) for one in findings(tab)]
            tab.keyboard.press("Escape")
        tab.locator(".strip").first.press("m")
        found += [("mark", *one) for one in findings(tab)]
    assert found == [], json.dumps(found, indent=1)


def test_it_prints_every_token(opened, rendered):
    tab = opened(Page(rendered))
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    spans = rendered.multi_modal_data.spans(len(rendered))
    folded = sum(span.stop - span.start - 1 for span in spans)
    assert tab.locator(".strip [data-token]").count() == len(rendered) - folded
    assert len(tab.pdf()) > 5000
