"""A pytest plugin that runs the tests of the `renderers` package on `mmrender.integrations.renderers`.

Their tests make renderers with `create_renderer`; here that gives the facade, with the same options. Models are
named by hub id; those that `hub_cache` lays out are tried, and parameters that name others are left out.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import renderers
import renderers.base
from renderers.base import MODEL_RENDERER_MAP, _resolve_renderer_config

from mmrender.integrations.renderers import MMRenderer, MMRendererConfig

_their_create_renderer = renderers.base.create_renderer


def create_renderer(tokenizer: Any, config: Any = None, *, chat_template_kwargs: Any = None) -> Any:
    """Make the facade with the template's variables and the retention that their config holds."""
    resolved = _resolve_renderer_config(tokenizer, config, chat_template_kwargs=chat_template_kwargs)
    if isinstance(resolved, renderers.CustomRendererConfig | renderers.DefaultRendererConfig):
        return _their_create_renderer(tokenizer, resolved)
    names = resolved.template_field_names() & resolved.model_fields_set
    given = {name: getattr(resolved, name) for name in names}
    ours = MMRendererConfig(thinking_retention=resolved.thinking_retention, **given)
    renderer = MMRenderer(tokenizer, ours)
    renderer.config = resolved
    return renderer


renderers.create_renderer = renderers.base.create_renderer = create_renderer


def hub_cache(home: Path, directories: dict[str, Path]) -> None:
    """Lay model directories out as the cache of the hub's client, so that their ids find them."""
    for name, directory in directories.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / ("0" * 40)).symlink_to(directory, target_is_directory=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the parameters that name a model which is not there."""
    hub = Path(os.environ["HF_HOME"]) / "hub"
    there = {folder.name.removeprefix("models--").replace("--", "/") for folder in hub.iterdir()}

    catalog = (
        {case.model for case in sys.modules["parity"].MODEL_CATALOG} if "parity" in sys.modules else set()
    )
    absent = {*MODEL_RENDERER_MAP, *catalog} - there
    left_out = [
        item
        for item in items
        if hasattr(item, "callspec") and any(name in item.callspec.id for name in absent)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
