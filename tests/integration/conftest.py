"""Servers and the renderer that the tests of a tier share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.engine_server import Running, start_vllm
from mmrender.renderer import Renderer

TEST_SECONDS = 1200
"""A test's time limit: its server takes a minute to start, and many on a machine that is busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def renderer(tiny_model: Path) -> Renderer:
    """The renderer of the tiny model."""
    return Renderer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def vllm_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """vLLM servers with the tiny model, two at a time: `vllm_servers.with_flags(...)`."""
    logs = tmp_path_factory.mktemp("vllm")

    def start(flags: tuple[str, ...]):
        return start_vllm(tiny_model, flags, log=logs / f"server{len(list(logs.iterdir()))}.log")

    servers = Running(start, limit=2)
    yield servers
    servers.close()
