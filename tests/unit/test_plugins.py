"""Processors and grammars that other packages bring by entry points."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from adapter_models import model
from kit import error_of, shown
from mmrender.errors import InputError, PluginError
from mmrender.media.processors import registry
from mmrender.media.processors.registry import DeferredProcessor
from mmrender.plugins import load_plugins
from mmrender.renderer import Renderer
from mmrender.view.doctor import diagnose
from parsing_cases import TURN, case_with

SAYS = TURN + """{{- '[call ' + c.name + ' with ' }}{{- c.arguments | tojson }}{{- ' end]' }}{%- endfor %}"""
GRAMMAR = """
from mmrender.parsing.grammars import Field, Grammar
brackets = Grammar("brackets", call=("[call", Field.NAME, "with", Field.JSON, "end]"))
taken = Grammar("json_tags", call=("[call", Field.OBJECT, "end]"))
"""
PROCESSOR = """
import hashlib
from mmrender.media.processor import Geometry, MediaProcessor, Prepared
from mmrender.sidecar import Repeat
from small_models import SmallItem

class Two(MediaProcessor):
    '''Two tokens for each image.'''
    name, image_backend, settings_digest = "Two", "pil", b"two"
    placeholder = {"image": "[IMG]"}
    placeholder_tokens = frozenset({"[IMG]"})

    @classmethod
    def from_files(cls, files, backend):
        if files.image.get("size") == "broken":
            raise KeyError("size")
        return cls() if files.image_processor_type == "PixtralImageProcessor" else None

    def geometry(self, height, width, *, num_images=1):
        return Geometry((1,), (Repeat("[IMG]", 2),))

    def prepare(self, loaded, *, num_images=1):
        pixels = loaded.array
        identity = hashlib.sha256(pixels.tobytes()).hexdigest()
        return Prepared(identity, lambda: SmallItem(pixels, identity, (Repeat("[IMG]", 2),)))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a small package: its module, and its entry points by group."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    load_plugins.cache_clear()

    def install(source: str, name: str = "extra_pack", **groups: dict[str, str]) -> None:
        (folder / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        info = folder / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = [
            f"[mmrender.{group}]\n" + "".join(f"{key} = {name}:{value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))

    yield install
    load_plugins.cache_clear()


def test_a_grammar_of_another_package_is_proved_and_reads(installed):
    assert str(case_with(SAYS).parser.choice).startswith("none")
    installed(GRAMMAR, grammars={"brackets": "brackets"})
    load_plugins.cache_clear()
    case = case_with(SAYS)
    assert str(case.parser.choice) == "brackets, proved"
    found = case.parser.parse(case.tokenizer.encode('Well.[call look with {"at": [1, "x"]} end]'))
    assert found.content == "Well."
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("look", {"at": [1, "x"]})]
    assert str(case_with("{{- m.content }}", grammar="brackets").parser.choice).startswith("brackets, named")
    assert "or 'brackets', got 'braces'" in error_of(InputError, case_with, SAYS, grammar="braces")


def test_a_processor_of_another_package_comes_before_the_models_own(installed, tmp_path):
    installed(PROCESSOR, processors={"two": "Two"})
    renderer = Renderer.from_pretrained(model("pixtral", tmp_path / "pixtral"), image_backend="pil")
    assert "extra_pack" not in sys.modules
    assert isinstance(renderer.media.processor, DeferredProcessor)
    parts = [shown(Image.new("RGB", (8, 8))) for _ in range(2)]
    rendered = renderer.render([{"role": "user", "content": parts}])
    assert [place.length for place in rendered.multi_modal_data.mm_placeholders["image"]] == [2, 2]
    assert type(renderer.media.processor).__name__ == "Two"


def test_what_a_native_family_knows_asks_no_package(installed, tiny_model):
    installed("raise RuntimeError", processors={"broken": "Broken"}, grammars={"broken": "broken"})
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    renderer.media.require_processor()
    assert str(renderer.response_parser().choice).endswith("proved")


BROKEN = {
    "missing": ("import no_such_module", {}),
    "a number": ("Two = 3", {}),
    "failing": (PROCESSOR, {"size": "broken"}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_processor_is_named_by_the_error_and_by_doctor(case, installed, tmp_path, sentence):
    source, settings = BROKEN[case]
    installed(source, processors={"two": "Two"})
    files = SimpleNamespace(image=settings, image_processor_type="PixtralImageProcessor")
    errors = []
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            registry.processor_of_plugins(files, "pil")
        errors.append(str(caught.value))
    where = caught.value.where
    assert errors[0] == errors[1] == sentence
    if not settings:
        renderer = Renderer.from_pretrained(model("pixtral", tmp_path / "pixtral"), image_backend="pil")
        assert where in diagnose(renderer)["problems"]["images"]


def test_a_broken_grammar_is_named_and_so_are_two_of_one_name(installed):
    installed(GRAMMAR, grammars={"tags": "taken"})
    with pytest.raises(
        PluginError, match=r"'tags' \(extra_pack:taken\) of extra_pack 1.5.*not used by mmrender, got Gram"
    ):
        case_with(SAYS)
    load_plugins.cache_clear()
    (Path(sys.path[0]) / "extra_pack-1.5.dist-info" / "entry_points.txt").write_text(
        "[mmrender.grammars]\nx = extra_pack:brackets\n"
    )
    installed(GRAMMAR, "other_pack", grammars={"x": "brackets"})
    assert "two plugins have one name" in error_of(PluginError, case_with, SAYS)
