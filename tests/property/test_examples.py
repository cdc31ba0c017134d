"""The examples of `make test` are the same on every machine, however many processes share the tests."""

import sys
from types import ModuleType

from hypothesis import given, settings
from hypothesis import strategies as st


def test_examples_do_not_depend_on_what_else_is_imported(tmp_path, monkeypatch):
    drawn = []

    @settings(settings.get_profile("fixed"), max_examples=200)
    @given(st.integers(), st.text())
    def draw(number, text):
        drawn[-1].append((number, text))

    for number in (1, 2):
        (path := tmp_path / f"other_{number}.py").write_text(
            f"names = {[f'{number}-{each}' for each in range(99)]}"
        )
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)
        drawn.append([])
        draw()
    assert drawn[0] == drawn[1]
