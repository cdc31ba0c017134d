"""How SGLang is started for its tier."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from integration.engine_server import SERVERS, EngineServer, environment_of, running
from kit import free_port


@contextlib.contextmanager
def start_sglang(model_dir: Path, flags: Sequence[str] = (), *, log: Path) -> Iterator[EngineServer]:
    """Run SGLang with a model, under the name `tiny`, until the block ends.

    Args:
        model_dir: Model directory with weights.
        flags: Further flags of `sglang.launch_server`.
        log: File for what it prints.
    """
    port = free_port()
    python = environment_of("MMRENDER_SGLANG_ENV", ".venv-sglang")
    command = [python, SERVERS / "sglang" / "serve.py", model_dir, str(port), *flags]
    name = " ".join(["sglang", *flags])
    with running(command, name=name, port=port, log=log, ready="/v1/models", seconds=900) as server:
        yield server
