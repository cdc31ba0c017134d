"""The public face: every name is there, is typed where it is looked up, and costs nothing before its use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mmrender


@pytest.mark.parametrize("name", mmrender.__all__)
def test_every_public_name_resolves(name):
    assert getattr(mmrender, name) is not None
    assert name in dir(mmrender)


def test_types_and_run_time_find_the_same_names_in_the_same_modules():
    tree = ast.parse(Path(mmrender.__file__).read_text("utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in guard.body for alias in node.names}
    assert typed == mmrender._HOMES
    assert {*typed, "__version__"} == set(mmrender.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'mmrender' has no attribute 'Rendrer'$"):
        mmrender.Rendrer  # noqa: B018


def test_the_package_alone_loads_no_third_party():
    code = "import sys, mmrender; print(*{'numpy', 'PIL', 'jinja2', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
