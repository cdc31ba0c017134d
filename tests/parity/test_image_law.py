"""Every odd picture becomes what the model's own processor makes of it; see `image_law`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from image_law import image_law
from mmrender.errors import MMRenderError
from mmrender.media.pixels import IMAGE_BACKENDS, ImageBackend
from mmrender.media.processor import ProcessorFiles
from mmrender.testing.reference import has_reference_backend

ROOT = Path(__file__).parents[2]
NAMES = ("glm4_5v", "internvl3", "qwen2_5_vl")
"""One model of each kind of processor; `python tests/image_law.py` takes any, in some 20 seconds a model."""
FAMILIES = sorted(
    found for found in ROOT.glob(".families/models/*") if found.is_dir() and ProcessorFiles.read(found).image
)
BACKENDS = [backend for backend in IMAGE_BACKENDS if has_reference_backend(backend)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_odd_pictures_of_the_shared_models(
    name: str, backend: ImageBackend, with_small_tiles: Callable[[str], Path]
) -> None:
    outcome = image_law(with_small_tiles(name), backend)
    assert not outcome.broken
    assert outcome.equal > 40


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("directory", FAMILIES, ids=lambda directory: directory.name)
def test_odd_pictures_of_families_that_are_built(directory: Path, backend: ImageBackend) -> None:
    try:
        outcome = image_law(directory, backend)
    except MMRenderError as error:
        pytest.skip(str(error))
    assert not outcome.broken
