"""How Dynamo is started for its tier: a frontend, and a worker with a real model behind it."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.engine_server import SERVERS, EngineServer, environment_of, running
from kit import free_port

LISTED_SECONDS = 90


class DynamoServer:
    """A frontend and its worker.

    Args:
        server: The frontend and what it runs with.
        state: Where the worker writes what it was sent.
    """

    def __init__(self, server: EngineServer, state: Path) -> None:
        self.server = server
        self.base_url = server.base_url
        self._requests = state / "requests.jsonl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    @property
    def received(self) -> list[dict[str, Any]]:
        """What the worker was sent, and `{"cancelled": id}` for what it ended early."""
        return [json.loads(line) for line in self._requests.read_text().splitlines()]

    def wait_until_listed(self) -> None:
        """Wait for the worker, without which the frontend lists no model."""
        deadline = time.monotonic() + LISTED_SECONDS
        while time.monotonic() < deadline:
            if not self.server.alive:
                break
            if any(model["id"] == "tiny" for model in self.server.get("/v1/models")["data"]):
                return
            time.sleep(0.1)
        pytest.fail(f"the Dynamo worker was not listed:\n{self.server.log_tail()}")


@contextlib.contextmanager
def start_dynamo(model_dir: Path, flags: Sequence[str] = (), *, folder: Path) -> Iterator[DynamoServer]:
    """Run a Dynamo frontend and one worker with a model, under the name `tiny`, until the block ends.

    Args:
        model_dir: Model directory with weights.
        flags: Flags of `tools/servers/dynamo/worker.py`.
        folder: For logs and for what the worker was sent.
    """
    port = free_port()
    python = environment_of("MMRENDER_DYNAMO_ENV", ".venv-dynamo")
    state = folder / "state"
    script = SERVERS / "dynamo" / "serve.py"
    command = [python, script, model_dir, str(port), state, "--model-python", sys.executable, *flags]
    name = " ".join(["dynamo", *flags])
    log = folder / "server.log"
    with running(list(map(str, command)), name=name, port=port, log=log, ready="/v1/models") as server:
        dynamo = DynamoServer(server, state)
        dynamo.wait_until_listed()
        yield dynamo
