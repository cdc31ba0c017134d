"""What the client imports before it is used: nothing of an HTTP client, a model or a tracer."""

import subprocess
import sys


def test_calling_a_model_here_needs_no_http_client() -> None:
    code = (
        "import sys\n"
        "from mmrender import generate\n"
        "from mmrender.client.transport import RetryPolicy, TransportConfig\n"
        "from mmrender.client import EngineRequest, SGLangBackend, VLLMBackend\n"
        "print(*{'aiohttp', 'opentelemetry', 'torch', 'transformers', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
