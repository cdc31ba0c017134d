"""What the guide to the client shows is true: its first example runs, and its tables name what there is."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from mmrender.client.sampling import DEFAULT_MAX_TOKENS
from mmrender.client.transport import TransportConfig
from mmrender.errors import EngineConnectionError, EngineStatusError
from mmrender.renderer import Renderer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> dict[str, Any]:
    """What the page's code leaves, with a tiny model in place of its directory."""
    load = Renderer.from_pretrained
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Renderer, "from_pretrained", lambda path, **rest: load(path, image_backend="pil", **rest)
        )
        for block in BLOCKS:
            exec(compile(block.replace("MODEL_DIR", str(tiny_model)), str(PAGE), "exec"), names)
    return names


def test_the_first_example_samples(found: dict[str, Any]) -> None:
    turn = found["turn"]
    assert 1 <= len(turn.completion_ids) <= 16
    assert len(turn.logprobs) == len(turn.completion_ids)
    assert turn.message.role == "assistant"


def test_the_script_of_the_last_example_plays(found: dict[str, Any]) -> None:
    async def play() -> list[type[BaseException] | None]:
        outcomes: list[type[BaseException] | None] = []
        for _ in range(3):
            try:
                await found["server"].request("POST", "/inference/v1/generate", json={})
                outcomes.append(None)
            except (EngineStatusError, EngineConnectionError) as error:
                outcomes.append(type(error))
        return outcomes

    assert asyncio.run(play()) == [EngineStatusError, EngineConnectionError, None]


def test_defaults_are_as_the_table_says() -> None:
    config = TransportConfig("http://127.0.0.1:1")
    text = PAGE.read_text("utf-8")
    assert f"| `timeout` | {config.timeout:g} s |" in text
    assert f"| `connect_timeout` | {config.connect_timeout:g} s |" in text
    assert f"| `retries` | `{config.retries}` |" in text
    assert f"| `max_connections` | {config.max_connections} |" in text
    assert f"| `keepalive` | {config.keepalive:g} s |" in text
    assert f"| `max_reply_bytes` | {config.max_reply_bytes >> 20} MiB |" in text
    assert f"it is {DEFAULT_MAX_TOKENS}." in text
