"""What opening a model costs: each file is read once, each template compiled once, known findings come from the store."""

import sys

from kit import user
from mmrender.renderer import Renderer
from mmrender.template import known
from mmrender.template.environment import TracingEnvironment

CONVERSATION = [user("Hello")]
_listeners = []
# The hook stays, since Python has no way to remove one.
sys.addaudithook(lambda event, given: [each.append(str(given[0])) for each in _listeners if event == "open"])


def opened(call):
    names = []
    _listeners.append(names)
    try:
        call()
    finally:
        _listeners.remove(names)
    return names


def test_nothing_is_read_or_compiled_twice_and_nothing_known_is_probed(tiny_model, tmp_path, monkeypatch):
    def open_model():
        renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
        renderer.render(CONVERSATION, add_generation_prompt=True)

    monkeypatch.setenv("MMRENDER_CACHE", str(tmp_path))
    open_model()
    compiled = []
    compile_template = TracingEnvironment.compile_template

    def compiling(self, source):
        compiled.append(source)
        return compile_template(self, source)

    def probing(*_):
        raise AssertionError("a known template was probed")

    monkeypatch.setattr(TracingEnvironment, "compile_template", compiling)
    monkeypatch.setattr(known, "probe_template", probing)
    read = [name for name in opened(open_model) if name.startswith(str(tiny_model))]
    assert any(name.endswith("tokenizer_config.json") for name in read)
    assert sorted(read) == sorted(set(read))
    assert len(compiled) == len(set(compiled)) == 1
