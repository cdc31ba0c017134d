"""The public face: every name is there, the total stays small, and `import mmrender` costs nothing."""

import subprocess
import sys
from importlib import import_module

import pytest

import mmrender

PACKAGES = [
    "mmcodecs",
    "mmrender",
    *[
        f"mmrender.{name}"
        for name in ("audit", "client", "content", "engines", "gateway", "media", "parsing")
    ],
    *[f"mmrender.{name}" for name in ("rollout", "shipping", "training", "trajectory", "view")],
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves(package):
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def test_the_public_face_is_small():
    names = {name for package in PACKAGES for name in import_module(package).__all__}
    assert len(names) <= 134


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Rendrer"):
        mmrender.Rendrer  # noqa: B018


def test_the_package_alone_loads_no_third_party():
    code = "import sys, mmrender; print(*{'numpy', 'PIL', 'jinja2', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
