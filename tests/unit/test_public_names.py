"""The public face: every name is there, and the total stays small."""

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


def test_the_public_face_is_small_without_second_names_and_an_unknown_name_an_attribute_error():
    names = [name for package in PACKAGES for name in import_module(package).__all__]
    assert len(names) == len(set(names)) <= 117
    with pytest.raises(AttributeError, match="Rendrer"):
        mmrender.Rendrer  # noqa: B018
