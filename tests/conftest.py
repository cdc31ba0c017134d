"""Fixtures that every kind of test shares, and how Hypothesis searches."""

import asyncio
import gc
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from syrupy.assertion import SnapshotAssertion

from pages import RoomPage

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests probe for themselves, and leave nothing in the user's cache.
os.environ["MMRENDER_CACHE"] = "off"
# Threads of tiny models wait for each other, and for those of the test process beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded machine must not fail a property, so there are no deadlines. `make test` tries the same few examples
# every time; `make fuzz` searches with a fresh seed each round.
settings.register_profile(
    "fixed",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


_constants_of_modules = providers._get_local_constants


def _constants() -> providers.Constants:
    """Constants that Hypothesis draws: by default all of the modules that this process happens to have imported."""
    is_fixed = settings.get_current_profile_name() == "fixed"
    return providers.Constants() if is_fixed else _constants_of_modules()


providers._get_local_constants = _constants


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and tests, a million objects, out of the garbage collections that follow, and have few of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def _shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"needs {name}/ in a folder shared/ beside the checkout; {folder} is missing")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_of_shared_models_are_read_once() -> Iterator[None]:
    """Dozens of tests open these models, and to read a tokenizer of a hundred thousand tokens takes a second."""
    from mmrender.model.tokenizer import Tokenizer

    load, kept = Tokenizer.load, {}

    def kept_or_loaded(model: Any) -> Any:
        files = [(model.path / name).resolve() for name in ("tokenizer.json", "tokenizer_config.json")]
        if not files[0].is_relative_to(SHARED):
            return load(model)
        if (key := tuple(files)) not in kept:
            kept[key] = load(model)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", staticmethod(kept_or_loaded))
        yield


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


SMALL_TILES: dict[str, dict[str, dict[str, Any]]] = {
    "idefics3": {
        "processor_config.json": {
            "image_seq_len": 4,
            "image_processor": {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}},
        }
    },
    "internvl3": {
        "preprocessor_config.json": {"size": {"height": 56, "width": 56}},
        "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    },
}
"""Settings of tiled models with as many tiles as their own, an eighth of the side."""


@pytest.fixture(scope="session")
def with_small_tiles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of `shared_models` by name; tiles are small, so that a test of text takes no minute for pixels."""

    @cache
    def copied(name: str) -> Path:
        source = _shared("models") / name
        if name not in SMALL_TILES:
            return source
        directory = tmp_path_factory.mktemp("tiles") / name
        shutil.copytree(source, directory, copy_function=os.symlink)
        for file, changes in SMALL_TILES[name].items():
            path = directory / file
            settings = json.loads(path.read_text()) if path.exists() else {}
            for key, value in changes.items():
                settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
            path.unlink(missing_ok=True)
            path.write_text(json.dumps(settings))
        return directory

    return copied


@pytest.fixture(scope="session")
def renderers(tiny_model: Path, with_small_tiles: Callable[[str], Path]) -> Callable[[str], Any]:
    """Renderers by the name of their model, each opened once: "tiny", a small model, or one `with_small_tiles`."""
    from mmrender.renderer import Renderer
    from small_models import MODELS

    @cache
    def opened(name: str) -> Renderer:
        if name in MODELS:
            return MODELS[name].renderer()
        directory = tiny_model if name == "tiny" else with_small_tiles(name)
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
