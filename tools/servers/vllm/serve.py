"""Become a vLLM server on 127.0.0.1 that is small enough for a test machine without a GPU.

Usage: `VENV/bin/python serve.py serve|render MODEL PORT [flags of vllm]`, in the environment of `install.py`.

The model is served as `tiny`. The process id stays, so whoever starts this script owns the server. Ready when
`GET /health` answers 200.
"""

import os
import sys

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # every engine would bind to the first core
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # opens /server_info and the control routes
}
COMMON = ("--served-model-name", "tiny", "--host", "127.0.0.1", "--max-model-len", "2048")
ENGINE = (
    "--enable-scale-out",  # opens /inference/v1/generate and /v1/chat/completions/render
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-num-seqs",
    "8",
    "--kv-cache-memory-bytes",
    str(32 << 20),
    "--skip-mm-profiling",
)


def main() -> None:
    """Replace this process by the server."""
    if len(sys.argv) < 4 or sys.argv[1] not in ("serve", "render"):
        raise SystemExit(f"usage: {sys.argv[0]} serve|render MODEL PORT [flags of vllm]")
    kind, model, port, *flags = sys.argv[1:]
    verb = ["serve"] if kind == "serve" else ["launch", "render"]
    options = [*COMMON, "--port", port, *(ENGINE if kind == "serve" else ()), *flags]
    environment = {**ENVIRONMENT, **os.environ}
    # Counted in whole GiB, and it would win over --kv-cache-memory-bytes.
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", *verb, model, *options]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
