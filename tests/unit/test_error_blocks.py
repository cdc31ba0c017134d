"""Blocks that name a missing package, and that add a path to errors."""

import pytest

from mmrender.errors import InputError, MissingDependencyError, importing, located


def test_an_import_that_fails_names_its_package() -> None:
    with (
        pytest.raises(MissingDependencyError, match=r"^a walk needs no_such_package, which is not installed"),
        importing(None, "cli", "a walk"),
    ):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_a_library_that_is_not_found_counts_as_missing() -> None:
    with (
        pytest.raises(
            MissingDependencyError, match=r"^a clip needs soundfile, .*\[audio\]', or pass samples$"
        ),
        importing("soundfile", "audio", "a clip", otherwise="pass samples"),
    ):
        raise OSError("sndfile library not found")


@pytest.mark.parametrize(("own", "where"), [(None, "messages[1]"), ("messages[0]", "messages[0]")])
def test_an_error_keeps_its_own_path(own: str | None, where: str) -> None:
    with pytest.raises(InputError) as caught, located(None), located("messages[1]"):
        raise InputError("not usable", where=own)
    assert caught.value.where == where
