"""The guides as MkDocs builds them: axe-core finds no more than minor faults on a page of each kind."""

import functools
import http.server
import os
import subprocess
import sys
import threading

import pytest

from browser.conftest import AXE, ROOT, findings

PAGES = ("", "quickstart/", "training/", "families/", "speed/", "api/mmrender/")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """URL of the built documentation."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.skipif(not AXE.is_file(), reason=f"needs {AXE}, which `make browser` fetches")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_no_more_than_minor_faults_in_the_guides(browser, site, scheme, width):
    tab = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    found = []
    for page in PAGES:
        tab.goto(site + page)
        found += [(page, *one) for one in findings(tab) if one[1] != "minor"]
    tab.close()
    assert found == []
