"""Bridges equal the rendering of the whole conversation, wherever that begins with what was sampled."""

import pytest

from mmrender.testing import bridge_parity
from mmrender.testing.bridge_parity import check_bridge


@pytest.mark.parametrize("name", ["tiny", "glm4_5v", "internvl3", "qwen3_5", "hoisted"])
def test_bridges_of_generated_conversations_equal_the_rendering(renderers, name):
    """The command that users run; the law of every template is in `property/test_bridge.py`."""
    renderer = renderers(name)
    # Of models whose history drops reasoning, few conversations begin with what was sampled.
    cases = 12 if name == "qwen3_5" else 5
    report = check_bridge(renderer, name, cases=cases, seed=3)
    assert report.mismatches == []
    assert report.stable + report.unstable == cases
    # In history, `hoisted` begins a turn otherwise than in its generation prompt.
    assert (report.equal > 0) == (name != "hoisted")
    assert report.declined.total() * 10 <= report.stable


@pytest.mark.parametrize("name", ["qwen3_5", "tiny"])
def test_a_wrong_bridge_is_found(renderers, monkeypatch, name):
    renderer = renderers(name)
    bridge = bridge_parity.Renderer.bridge_to_next_turn

    def without_its_last_message(self, prompt, completion, new_messages, **options):
        return bridge(self, prompt, completion, new_messages[:-1] or new_messages * 2, **options)

    monkeypatch.setattr(bridge_parity.Renderer, "bridge_to_next_turn", without_its_last_message)
    report = check_bridge(renderer, name, cases=12, seed=3)
    assert len(report.mismatches) + report.declined.total() + report.declined_unstable.total() == 12
    assert report.mismatches
    assert report.equal == 0
