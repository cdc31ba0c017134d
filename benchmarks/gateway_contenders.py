"""The gateways of `bench_gateway.py`, each in a process of its own, and how each is asked for a session.

A peer runs in the interpreter of a virtual environment that `--venvs` names, `FOLDER/NAME/bin/python`:

    rllm       pip install rllm-model-gateway==0.1.0
    agl        pip install agentlightning==0.3.0 'litellm[proxy]==1.80.11'
    verifiers  pip install verifiers==0.4.0
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TURNS = 30
"""Calls of the agent, and answers of the script."""


@dataclass(frozen=True)
class Left:
    """What a session leaves for the trainer.

    Attributes:
        tokens: Tokens of its training samples.
        nbytes: Bytes of its record, as the trainer gets it.
    """

    tokens: int
    nbytes: int


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def fetch(url: str, body: Any | None = None) -> bytes:
    """Return the answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return bytes(reply.read())


class Gateway:
    """A running gateway. `url` of a session is for clients of OpenAI's chat completions."""

    name = "direct"
    processes: Sequence[subprocess.Popen[str]] = ()

    def __init__(self, server: str, model: str, folder: Path, venvs: Path | None) -> None:
        self.server, self.model, self.folder = server, model, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.venv = None if venvs is None else venvs / self.name / "bin"
        self.root = ""

    def start(self) -> None:
        """Start it. Raises `RuntimeError` if it does not run."""

    def url(self, session: str) -> str:
        return f"{self.server}/v1"

    def key(self, session: str) -> str:
        return "none"

    def left(self, session: str) -> Left | None:
        return None

    def recorded(self, session: str) -> int:
        """Return the number of calls in the record of a session."""
        return 0

    def seconds(self) -> float:
        """Return the processor time of its processes so far."""
        return sum(_seconds(process.pid) for process in self.processes)

    def resident(self) -> int:
        """Return the resident memory of its processes in bytes."""
        return sum(_resident(process.pid) for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def run(self, command: Sequence[str], health: str, seconds: float = 90) -> None:
        """Run a command until its address answers."""
        log = self.folder / "log"
        environment = {
            "HOME": str(self.folder),
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            # Agent Lightning's spans have attributes of each message. With the default it loses late calls.
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "100000",
        }
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, text=True)
        self.processes = [process]
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            try:
                fetch(health)
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else "it does not answer")

    def python(self) -> str:
        if self.venv is None or not (self.venv / "python").exists():
            raise RuntimeError("it is not installed")
        return str(self.venv / "python")


class Ours(Gateway):
    name = "mmrender"

    def start(self) -> None:
        port = free_port()
        self.root = f"http://127.0.0.1:{port}"
        self.out = self.folder / "rollouts.mmr"
        command = [sys.executable, __file__, self.server, self.model, str(self.out), str(port)]
        self.run(command, f"{self.root}/")

    def url(self, session: str) -> str:
        return f"{self.root}/s/{session}/v1"

    def left(self, session: str) -> Left:
        before = self.out.stat().st_size
        fetch(f"{self.root}/sessions/{session}/finish", {"reward": 1.0})
        nbytes = self.out.stat().st_size - before

        from mmrender.trajectory.files import load_trajectories

        [trajectory] = [each for each in load_trajectories(self.out) if each.trajectory_id == session]
        return Left(sum(len(sample.token_ids) for sample in trajectory.samples()), nbytes)

    def recorded(self, session: str) -> int:
        return int(json.loads(fetch(f"{self.root}/sessions/{session}"))["steps"])


class RLLM(Gateway):
    name = "rllm"

    def start(self) -> None:
        port = free_port()
        self.root = f"http://127.0.0.1:{port}"
        command = [self.python(), "-m", "rllm_model_gateway", "--port", str(port), "--host", "127.0.0.1"]
        command += ["--worker", f"{self.server}/v1", "--store", "sqlite", "--log-level", "warning"]
        self.run([*command, "--db-path", str(self.folder / "traces.db")], f"{self.root}/health")

    def url(self, session: str) -> str:
        return f"{self.root}/sessions/{session}/v1"

    def left(self, session: str) -> Left:
        record = fetch(f"{self.root}/sessions/{session}/traces")
        traces = json.loads(record)
        tokens = sum(len(each["prompt_token_ids"]) + len(each["completion_token_ids"]) for each in traces)
        return Left(tokens, len(record))

    def recorded(self, session: str) -> int:
        return len(json.loads(fetch(f"{self.root}/sessions/{session}/traces")))


class AgentLightning(Gateway):
    name = "agl"

    def start(self) -> None:
        port, control = free_port(), free_port()
        self.root, self.control = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control}"
        script = str(HERE / "gateway_agl.py")
        self.run([self.python(), script, self.server, str(port), str(control)], f"{self.control}/", 150)

    def url(self, session: str) -> str:
        rollout, attempt = json.loads(fetch(f"{self.control}/open/{session}"))
        return f"{self.root}/rollout/{rollout}/attempt/{attempt}/v1"

    def left(self, session: str) -> Left:
        return _left(fetch(f"{self.control}/left/{session}/{TURNS}"))

    def recorded(self, session: str) -> int:
        return int(fetch(f"{self.control}/recorded/{session}"))


class Verifiers(Gateway):
    name = "verifiers"

    def start(self) -> None:
        control = free_port()
        self.control = f"http://127.0.0.1:{control}"
        script = str(HERE / "gateway_verifiers.py")
        self.run([self.python(), script, self.server, self.model, str(control)], f"{self.control}/", 150)
        self._keys: dict[str, str] = {}

    def url(self, session: str) -> str:
        url, self._keys[session] = json.loads(fetch(f"{self.control}/open/{session}"))
        return str(url)

    def key(self, session: str) -> str:
        return self._keys[session]

    def left(self, session: str) -> Left:
        return _left(fetch(f"{self.control}/left/{session}"))

    def recorded(self, session: str) -> int:
        return int(fetch(f"{self.control}/recorded/{session}"))


def _left(reply: bytes) -> Left:
    found = json.loads(reply)
    return Left(found["tokens"], found["nbytes"])


GATEWAYS = (Gateway, Ours, RLLM, AgentLightning, Verifiers)


def _seconds(pid: int) -> float:
    """Return the processor time of a process and its children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(map(_seconds, map(int, children)))


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(map(_resident, map(int, children)))


async def serve(server: str, model: str, out: str, port: str) -> None:
    """Serve our gateway. Pixels go as uint8 levels, and once for each picture."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "codecs")]
    from mmrender import Renderer
    from mmrender.client.vllm import VLLMBackend
    from mmrender.engines.client import InferenceEngineClient
    from mmrender.engines.http_engine import HTTPEngine
    from mmrender.gateway import Gateway as Recording
    from mmrender.gateway import GatewaySettings

    renderer = Renderer.from_pretrained(model, image_backend="pil")
    backend = VLLMBackend(images="hash_only", pixels="uint8", trust_cache=True)
    engine = HTTPEngine(backend, server, model="scripted", renderer=renderer)
    gateway = Recording(
        InferenceEngineClient([engine], renderer=renderer),
        renderer,
        out=out,
        settings=GatewaySettings(port=int(port), idle_seconds=3600.0),
    )
    async with gateway:
        await gateway.serve()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
