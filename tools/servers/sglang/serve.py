"""Become an SGLang server on 127.0.0.1 that is small enough for a test machine without a GPU.

Usage: `VENV/bin/python serve.py MODEL PORT [flags of sglang]`, with an environment of `../environments.py`.

The model is served as `tiny`. The process id stays, so whoever starts this script owns the server. Ready when
`GET /v1/models` answers 200.
"""

import os
import sys
import tempfile

CONTEXT_LENGTH = 2048

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_DISABLE_REQUEST_LOGGING": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
}
OPTIONS = {
    "--served-model-name": "tiny",
    "--host": "127.0.0.1",
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--context-length": str(CONTEXT_LENGTH),
    "--max-running-requests": "8",
    "--max-total-tokens": str(8 * 1024),
    "--mem-fraction-static": "0.2",
}
SWITCHES = ("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup")


def main() -> None:
    """Replace this process by the server."""
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: {sys.argv[0]} MODEL PORT [flags of sglang]")
    model, port, *flags = sys.argv[1:]
    # The processes of one server meet over a file; the default, a TCP store, listens on all interfaces.
    meeting = os.path.join(tempfile.mkdtemp(prefix="sglang-"), "store")
    environment = {
        **ENVIRONMENT,
        **os.environ,
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}",
    }
    options = [text for pair in OPTIONS.items() for text in pair]
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", model]
    command += ["--port", port, *options, *SWITCHES, *flags]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
