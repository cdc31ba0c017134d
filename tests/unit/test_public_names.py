"""The public face: every name is there, is typed where it is looked up, and costs nothing before its use."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import mmrender

PACKAGES = [
    "mmrender",
    *[f"mmrender.{name}" for name in ("client", "engines", "rollout", "shipping", "training")],
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves(package):
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


@pytest.mark.parametrize("package", PACKAGES)
def test_types_and_run_time_find_the_same_names_in_the_same_modules(package):
    module = import_module(package)
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in guard.body for alias in node.names}
    assert typed == {name: f"{package}.{home}" for name, home in module._HOMES.items()}
    assert set(typed) == {*module.__all__} - {"__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'mmrender' has no attribute 'Rendrer'$"):
        mmrender.Rendrer  # noqa: B018


def test_the_package_alone_loads_no_third_party():
    code = "import sys, mmrender; print(*{'numpy', 'PIL', 'jinja2', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
