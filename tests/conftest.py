"""Fixtures that every kind of test shares, and how Hypothesis searches."""

import asyncio
import inspect
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from syrupy.assertion import SnapshotAssertion

from pages import RoomPage

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests probe for themselves, and leave nothing in the user's cache.
os.environ["MMRENDER_CACHE"] = "off"
# Threads of tiny models wait for each other, and for those of the test process beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded machine must not fail a property, so there are no deadlines. `make test` tries the same examples
# every time; `make fuzz` searches with a fresh seed each round.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def _shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"needs {name}/ in a folder shared/ beside the checkout; {folder} is missing")
    return folder


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Folder of real model directories (no weights); skips where it is missing."""
    return _shared("models")


@pytest.fixture(scope="session")
def shared_images() -> Path:
    """Folder of photographs; skips where it is missing."""
    return _shared("images")


@pytest.fixture(scope="session")
def shared_agents() -> Path:
    """Folder of recorded requests of agents; skips where it is missing."""
    return _shared("agents") / "requests"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration's model directory, weights included."""
    from mmrender.testing.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def renderers(tiny_model: Path) -> Callable[[str], Any]:
    """Renderers by the name of their model, each opened once: "tiny", a small model, or a folder of `shared_models`."""
    from mmrender.renderer import Renderer
    from small_models import MODELS

    @cache
    def opened(name: str) -> Renderer:
        if name in MODELS:
            return MODELS[name].renderer()
        directory = tiny_model if name == "tiny" else _shared("models") / name
        return Renderer.from_pretrained(directory, image_backend="pil")

    return opened


@pytest.fixture(scope="session")
def renderer(renderers: Callable[[str], Any]) -> Any:
    """The renderer of `tiny_model`."""
    return renderers("tiny")


@pytest.fixture
def sentence(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """The expected text of an error, from the page of the test's room; see `pages.py`."""
    return snapshot.use_extension(RoomPage)
