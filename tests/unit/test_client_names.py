"""The client's public names: typed and found in the same modules, and free of what is not used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mmrender.client


@pytest.mark.parametrize("name", mmrender.client.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(mmrender.client, name) is not None
    assert name in dir(mmrender.client)


def test_types_and_run_time_find_the_same_names() -> None:
    tree = ast.parse(Path(mmrender.client.__file__).read_text("utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == mmrender.client._HOMES
    assert set(typed) == set(mmrender.client.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'mmrender.client' has no attribute 'VLMBackend'$"):
        mmrender.client.VLMBackend  # noqa: B018


def test_calling_a_model_here_needs_no_http_client() -> None:
    code = (
        "import sys\n"
        "from mmrender import generate\n"
        "from mmrender.client import EngineRequest, MemoryTransport, SGLangBackend, VLLMBackend\n"
        "print(*{'aiohttp', 'stamina', 'opentelemetry', 'torch', 'transformers', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
