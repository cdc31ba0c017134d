"""A long rollout: nothing that was sampled is encoded again, and work does not grow with the conversation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image

from bridge_cases import REAL, assert_tail_equals
from kit import shown, user
from mmrender.model.tokenizer import Tokenizer
from mmrender.renderer import Renderer
from mmrender.template.chat import ChatTemplate

TURNS = 30
ANSWER = "The xylograph shows a quokka. "
"""Words that stand nowhere else, so that encoding them again would show."""


@dataclass
class Work:
    """What one bridge did: texts that were encoded, and characters that the template wrote."""

    encoded: list[str] = field(default_factory=list)
    rendered: int = 0


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Count what is encoded and rendered."""
    work = Work()
    encode_run, render = Tokenizer.encode_run, ChatTemplate.render

    def encoding(self: Tokenizer, text: str, **options: Any) -> Any:
        work.encoded.append(text)
        return encode_run(self, text, **options)

    def rendering(self: ChatTemplate, *args: Any, **options: Any) -> Any:
        text = render(self, *args, **options)
        work.rendered += len(text)
        return text

    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode_run", encoding)
        patched.setattr(ChatTemplate, "render", rendering)
        yield work


def _stop_before_user(renderer: Renderer) -> int:
    """The stop token that a user's turn follows; for some models it is that turn's opener."""
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    written = renderer.render_ids(turns)
    stops = set(renderer.get_stop_token_ids())
    after_first = renderer.render_ids(turns[:1])
    return next((token for token in written[len(after_first) :] if token in stops), max(stops))


def _extension(turn: int) -> list[dict[str, Any]]:
    text = {"type": "text", "text": f"Question {turn:02d}."}
    image = shown(Image.new("RGB", (64, 48), (40 + turn, 9, 9)))
    return [{"role": "user", "content": [text] if turn % 2 else [image, text]}]


@pytest.mark.parametrize("name", ["tiny", *REAL])
def test_long_rollout(renderers: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    renderer = renderers(name)
    sampled = [*renderer.tokenizer.encode(ANSWER), _stop_before_user(renderer)]
    current = renderer.render([user("Begin.")], add_generation_prompt=True)
    for turn in range(2):  # prove both shapes of extension
        assert renderer.bridge_to_next_turn(current.token_ids, sampled, _extension(turn)) is not None
    works: list[Work] = []
    images = 0
    for turn in range(TURNS):
        extension = _extension(turn)
        with watched(monkeypatch) as work:
            bridge = renderer.bridge_to_next_turn(
                current.token_ids, sampled, extension, previous_multi_modal_data=current.multi_modal_data
            )
        assert bridge is not None, renderer.why_not_bridged
        works.append(work)
        images += turn % 2 == 0
        base = len(current) + len(sampled)
        assert bridge.token_ids[:base] == current.token_ids + sampled
        assert len(bridge.multi_modal_data.mm_hashes.get("image", ())) == images
        earlier = [*current.multi_modal_data.mm_items.get("image", ())][: images - 1]
        assert bridge.multi_modal_data.mm_items["image"][: images - 1] == earlier
        current = bridge
    re_encoded = [text for work in works for text in work.encoded if "xylograph" in text or "quokka" in text]
    assert re_encoded == []
    for parity in (0, 1):
        early, late = works[2 + parity], works[28 + parity]
        assert sum(map(len, late.encoded)) == sum(map(len, early.encoded))
        assert late.rendered == early.rendered
    # The last tail is that of the whole conversation, rendered at once.
    messages: list[dict[str, Any]] = [user("Begin.")]
    for turn in range(TURNS):
        messages += [{"role": "assistant", "content": ANSWER}, *_extension(turn)]
    full = renderer.render(messages, add_generation_prompt=True)
    assert full.multi_modal_data.mm_hashes == current.multi_modal_data.mm_hashes
    begin = next(span.stop for span in reversed(current.spans) if span.kind == "completion")
    assert_tail_equals(current, full, begin, len(messages) - 1)
