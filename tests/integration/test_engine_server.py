"""The harness of the tiers, on a server of a few lines: nothing of it may be left behind."""

import os
import signal
import subprocess
import sys
import time
import urllib.error

import pytest

from integration.engine_server import Running, running
from kit import free_port

SERVER = """
import http.server, json, subprocess, sys
# A worker that does not end when it is asked to.
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
worker.stdout.readline()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path in ("/health", "/worker")
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"pid": worker.pid, "flags": sys.argv[2:]}).encode())

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.rfile.read(int(self.headers["content-length"])))

print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path, *flags, program=SERVER, seconds=120.0):
    port = free_port()
    command = [sys.executable, "-c", program, str(port), *flags]
    return running(command, name="a server", port=port, log=tmp_path / f"{port}.log", seconds=seconds)


def exists(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.strip()[:1] not in ("", "Z")


def assert_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(map(exists, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if exists(pid)]}"
        time.sleep(0.02)


def test_a_server_and_its_workers_end_with_the_block(tmp_path):
    with start(tmp_path) as server:
        worker = server.get("/worker")["pid"]
        assert server.alive
        assert exists(worker)
        assert server.post("/echo", {"a": 1}) == {"a": 1}
        assert server.base_url == f"http://127.0.0.1:{server.port}"
        with pytest.raises(urllib.error.HTTPError):
            server.get("/nothing")
    assert not server.alive
    assert_gone(worker)
    assert "listening" in server.log_tail()
    server.stop()


def test_a_server_ends_by_force(tmp_path):
    with start(tmp_path) as server:
        worker = server.get("/worker")["pid"]
        server.kill()
        assert not server.alive
        assert_gone(worker)


def test_a_server_ends_when_its_tests_are_killed(tmp_path):
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
import integration.test_engine_server as tests
with tests.start(Path({str(tmp_path)!r})) as server:
    print(server.get("/worker")["pid"], server.guard.pid, flush=True)
    sys.stdin.read()
"""
    tests = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker, guard = map(int, tests.stdout.readline().split())
    assert exists(worker)
    os.kill(tests.pid, signal.SIGKILL)
    tests.communicate()
    assert_gone(worker, guard)


def test_a_server_that_ends_before_it_is_ready(tmp_path):
    program = "import sys; print('no such model'); sys.exit(3)"
    with pytest.raises(pytest.fail.Exception) as caught, start(tmp_path, program=program):
        pass
    assert str(caught.value) == "a server ended with code 3 before it was ready:\nno such model"


def test_a_server_that_is_never_ready(tmp_path):
    program = "import time; print('still loading', flush=True); time.sleep(600)"
    with (
        pytest.raises(pytest.fail.Exception, match="a server was not ready after 1 s"),
        start(tmp_path, program=program, seconds=1),
    ):
        pass


def test_servers_are_shared_by_their_flags(tmp_path):
    servers = Running(lambda flags: start(tmp_path, *flags), limit=2)
    try:
        first = servers.with_flags("--a")
        assert first.get("/worker")["flags"] == ["--a"]
        second = servers.with_flags("--b")
        assert servers.with_flags("--a") is first
        servers.with_flags("--c")  # the one used longest ago makes room
        assert first.alive
        assert not second.alive
        first.kill()
        again = servers.with_flags("--a")
        assert again.alive
        assert again is not first
    finally:
        servers.close()
    assert not again.alive
