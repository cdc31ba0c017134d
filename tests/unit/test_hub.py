"""A model from the hub, by the hub's own settings: its address, token, folder, revision, and offline mode."""

import hashlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REVISION = "5" * 40
FILES = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
PROGRAM = "from mmrender.model.files import find_model; print(find_model('org/tiny', revision='v2').path)"


@pytest.fixture
def hub():
    """A hub with one private model at one revision: its URL, and the paths of requests."""
    seen = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            name = self.path.rpartition("/")[2]
            if self.headers["authorization"] != "Bearer secret":
                self.reply(401, b"{}")
            elif self.path.startswith("/api/models/org/tiny/revision/v2"):
                files = ",".join(f'{{"rfilename": "{each}"}}' for each in FILES)
                self.reply(200, f'{{"id": "org/tiny", "sha": "{REVISION}", "siblings": [{files}]}}'.encode())
            elif self.path.startswith(f"/api/models/org/tiny/tree/{REVISION}"):
                rows = [f'{{"type": "file", "path": "{each}", "size": 1, "oid": "0"}}' for each in FILES]
                self.reply(200, f"[{','.join(rows)}]".encode())
            elif self.path == f"/org/tiny/resolve/{REVISION}/{name}" and name in FILES:
                self.reply(200, b"{}")
            else:
                self.reply(404, b"{}")

        do_HEAD = do_GET  # noqa: N815

        def reply(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def test_the_settings_of_the_hub_hold(hub, tmp_path):
    """Read when huggingface_hub is imported, so each load is a process."""
    url, seen = hub

    def load(**settings):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), **settings}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip()), done.stderr

    folder, said = load(HF_TOKEN="secret")
    assert "files" in said  # its progress
    assert folder.is_relative_to(tmp_path / "home")
    assert {path.name for path in folder.iterdir()} == FILES - {"model.safetensors"}
    seen.clear()
    assert load(HF_HUB_OFFLINE="1")[0] == folder
    assert seen == []
