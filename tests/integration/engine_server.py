"""Real inference servers as child processes: started, waited for, and ended whatever happens.

`running(command, ...)` is the common part; `start_vllm` and its like know one engine's command line. Tiers are
chosen by the environment: tests of a tier skip unless `MMRENDER_TIERS` names it, and `make integration-<tier>`
sets that.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ROOT / "tools" / "servers"
STOP_SECONDS = 25
"""More than the guard takes for a polite end and then a forced one."""


def needs_tier(name: str) -> pytest.MarkDecorator:
    """Mark tests that start real servers: they skip unless `MMRENDER_TIERS` names their tier."""
    chosen = os.environ.get("MMRENDER_TIERS", "").replace(",", " ").split()
    return pytest.mark.skipif(name not in chosen, reason=f"starts real servers: run make integration-{name}")


def environment_of(variable: str, default: str) -> Path:
    """Python of the virtual environment that `variable` names, or of `default` in the checkout.

    Fails rather than skips: whoever chose a tier wants to know that it cannot run.
    """
    folder = Path(os.environ.get(variable) or ROOT / default)
    python = folder / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is missing; set {variable} to a ready environment, or install one with make")
    return python


@dataclass
class EngineServer:
    """A running server, what it wrote, and the process that runs it; see `server_guard`."""

    name: str
    base_url: str
    log: Path
    guard: subprocess.Popen[bytes]

    @property
    def alive(self) -> bool:
        return self.guard.poll() is None

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log, for a failure's message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def get(self, path: str, *, timeout: float = 60) -> Any:
        """Answer to a GET, read as JSON where it is; raises `urllib.error.HTTPError` for an error status."""
        return _call(urllib.request.Request(self.base_url + path), timeout)

    def post(self, path: str, body: Any = None, *, timeout: float = 300) -> Any:
        """Answer to a POST of JSON; errors as for `get`."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"content-type": "application/json"}
        return _call(urllib.request.Request(self.base_url + path, data, headers, method="POST"), timeout)

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Wait for `path` to answer 200; fail with the end of the log where it does not, or the server ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.alive:
                pytest.fail(
                    f"{self.name} ended with code {self.guard.returncode} before it was ready:\n{self.log_tail()}"
                )
            with contextlib.suppress(OSError):  # refused, reset, timed out, or an error status
                self.get(path, timeout=2)
                return
            time.sleep(0.1)
        pytest.fail(f"{self.name} was not ready after {seconds:.0f} s:\n{self.log_tail()}")

    def kill(self) -> None:
        """End it by force, as a crash would."""
        self._end(b"kill\n")

    def stop(self) -> None:
        """End it politely; by force where that takes too long. Does nothing to a server that has ended."""
        self._end(b"")

    def _end(self, word: bytes) -> None:
        pipe = self.guard.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.write(word)
                pipe.flush()
            with contextlib.suppress(OSError):
                pipe.close()
        self.guard.wait(STOP_SECONDS)


def _call(request: urllib.request.Request, timeout: float) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # these servers are on loopback
    with opener.open(request, timeout=timeout) as answer:
        body = answer.read()
    with contextlib.suppress(ValueError):
        return json.loads(body)
    return body


@contextlib.contextmanager
def running(
    command: Sequence[str | os.PathLike[str]],
    *,
    name: str,
    port: int,
    log: Path,
    ready: str = "/health",
    seconds: float = 900,
    environment: Mapping[str, str] | None = None,
) -> Iterator[EngineServer]:
    """Run `command`, a server on 127.0.0.1 at `port`, until the block ends.

    It serves once the path `ready` answers 200, which may take `seconds`. `environment` is added to this process's own.
    """
    guard = [sys.executable, str(Path(__file__).with_name("server_guard.py")), *map(str, command)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            guard,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    server = EngineServer(name, f"http://127.0.0.1:{port}", log, process)
    try:
        server.wait_until_ready(ready, seconds)
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def start_vllm(
    model_dir: Path,
    flags: Sequence[str] = (),
    *,
    port: int | None = None,
    render_only: bool = False,
    environment: Mapping[str, str] | None = None,
    log: Path,
) -> Iterator[EngineServer]:
    """Run vLLM with a model, under the name `tiny`, until the block ends.

    `render_only` runs `vllm launch render`, which needs no weights: it turns chat requests into tokens and tensors.
    """
    port = port or free_port()
    python = environment_of("MMRENDER_VLLM_ENV", ".venv-vllm")
    kind = "render" if render_only else "serve"
    command = [python, SERVERS / "vllm" / "serve.py", kind, model_dir, port, *flags]
    name = " ".join(["vllm", kind, *flags])
    with running(list(map(str, command)), name=name, port=port, log=log, environment=environment) as server:
        yield server


class Running:
    """Servers by their flags, at most `limit` at a time; the one asked for longest ago ends first."""

    def __init__(self, start: Any, limit: int = 1) -> None:
        self._start = start
        self._limit = limit
        self._running: dict[tuple[str, ...], tuple[contextlib.ExitStack, EngineServer]] = {}

    def with_flags(self, *flags: str) -> EngineServer:
        """The server with these flags: the one that runs, or one that is started for it."""
        held = self._running.pop(flags, None)
        if held is not None and not held[1].alive:
            held[0].close()
            held = None
        if held is None:
            while len(self._running) >= self._limit:
                self._end(next(iter(self._running)))
            stack = contextlib.ExitStack()
            held = stack, stack.enter_context(self._start(flags))
        self._running[flags] = held
        return held[1]

    def close(self) -> None:
        """End them all."""
        for flags in list(self._running):
            self._end(flags)

    def _end(self, flags: tuple[str, ...]) -> None:
        self._running.pop(flags)[0].close()
