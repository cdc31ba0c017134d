"""Run a Dynamo frontend and one worker on 127.0.0.1 until either ends or this process is asked to.

Usage: `VENV/bin/python serve.py MODEL PORT STATE [--model-python PYTHON] [flags of worker.py]`, with the
environment of `install.py`.

The model is called `tiny`, and is served once `GET /v1/models` lists it. STATE receives `frontend.log`,
`worker.log`, `requests.jsonl` with what the worker was sent, and Dynamo's discovery files.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STOP_SECONDS = 8

ENVIRONMENT = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TOKIO_WORKER_THREADS": "2",
    "TRANSFORMERS_OFFLINE": "1",
}


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start one of the two processes with its output in a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes, politely and then by force."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        process.kill()
        process.wait()


def main() -> int:
    """Serve; return 0 where this process was asked to end, and 1 where a process ended by itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("port")
    parser.add_argument("state", type=Path)
    parser.add_argument("--model-python", default=sys.executable)
    args, worker_flags = parser.parse_known_args()

    state, model = args.state.resolve(), args.model.resolve()
    shutil.rmtree(state / "discovery", ignore_errors=True)
    (state / "discovery").mkdir(parents=True)
    requests = state / "requests.jsonl"
    requests.write_text("")
    environment = {**ENVIRONMENT, **os.environ, "DYN_FILE_KV": str(state / "discovery")}

    frontend = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", args.port]
    worker = [Path(__file__).with_name("worker.py"), model, "--python", args.model_python, "--log", requests]
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    processes = [
        start([sys.executable, *frontend], state / "frontend.log", environment),
        start([sys.executable, *map(str, worker), *worker_flags], state / "worker.log", environment),
    ]
    try:
        while not told and all(process.poll() is None for process in processes):
            time.sleep(0.05)
    finally:
        stop(processes)
    if not told:
        for log in ("frontend.log", "worker.log"):
            print(f"== {log}", *(state / log).read_text(errors="replace").splitlines()[-20:], sep="\n")
    return 0 if told else 1


if __name__ == "__main__":
    raise SystemExit(main())
