"""The guides as MkDocs builds them: axe-core finds nothing on a page of each kind, and the search finds words of the field."""

import functools
import http.server
import os
import subprocess
import sys
import threading

import pytest

from browser.conftest import AXE, ROOT, findings

PAGES = (
    "",
    "quickstart/",
    "concepts/",
    "debug/",
    "gateway/",
    "training/",
    "families/",
    "commands/",
    "speed/",
    "architecture/",
    "faq/",
    "api/mmrender.audit/",
)
WORDS = ("retokenization", "token-in token-out", "TITO", "drift", "off-policy", "mm_kwargs")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """URL of the documentation: that in the folder MMRENDER_SITE, which `make docs` has built, or built here."""
    folder = os.environ.get("MMRENDER_SITE")
    if folder is None:
        folder = tmp_path_factory.mktemp("site")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.skipif(not AXE.is_file(), reason=f"needs {AXE}, which `make browser` fetches")
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_in_the_guides(browser, site, page):
    """At three widths, light and dark by turns, so that pages beside each other have each width in both."""
    tab = browser.new_page()
    tab.goto(site + page)
    # A colour on the way from one to another is none of the page's.
    tab.add_style_tag(content="* { transition: none !important }")
    found = []
    schemes = (("light", "default"), ("dark", "slate"))
    for index, width in enumerate((390, 768, 1440), PAGES.index(page)):
        scheme, name = schemes[index % 2]
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_selector(f"body[data-md-color-scheme={name}]")
        tab.set_viewport_size({"width": width, "height": 900})
        found += [(scheme, width, *one) for one in findings(tab)]
    tab.close()
    assert found == []


@pytest.mark.parametrize("word", WORDS)
def test_the_search_finds_words_of_the_field(browser, site, word):
    tab = browser.new_page()
    tab.goto(f"{site}?q={word}")
    tab.wait_for_selector(".md-search-result__item")
    assert tab.locator(".md-search-result__item mark").count() > 0
    tab.close()


def test_the_first_page_shows_tokens(browser, site):
    """The page in it is the real one, at a picture, and follows the colours of the site."""
    tab = browser.new_page(color_scheme="light", viewport={"width": 1440, "height": 1200})
    tab.goto(site)
    live = tab.frame_locator("iframe.live")
    live.locator(".card img").first.wait_for()
    assert live.locator("#inspector dd").first.inner_text()
    colour = "getComputedStyle(document.body).backgroundColor"
    light = live.locator("body").evaluate(f"() => {colour}")
    tab.evaluate("document.body.setAttribute('data-md-color-scheme', 'slate')")
    live.locator(":root[style*=dark]").wait_for()
    dark = live.locator("body").evaluate(f"() => {colour}")
    tab.close()
    assert light != dark
