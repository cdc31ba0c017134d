"""The law to read first: `Renderer` returns the tokens, and the mask, of the renderer that anybody would write."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import assistant, noise, shown, text
from mmrender import Renderer
from mmrender.media.processor import ProcessorFiles
from mmrender.media.processors.reference import build_reference_processor
from naive_renderer import NaiveRenderer

MODELS = {
    "qwen2_5_vl": ("<|image_pad|>", "<|im_end|>"),
    "internvl3": ("<IMG_CONTEXT>", "<|im_end|>"),
}
"""Placeholder and stop token of models whose turns begin with their prompt."""
TEXT = st.text(
    st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda words: words == words.strip())
SIZES = st.tuples(st.integers(28, 160), st.integers(28, 160))


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": [text(draw(TEXT))]}]
    for _ in range(draw(st.integers(1, 3))):
        images = [shown(noise(0, *size)) for size in draw(st.lists(SIZES, max_size=2))]
        parts = draw(st.permutations([*images, text(draw(TEXT))]))
        messages += [{"role": "user", "content": parts}, assistant([text(draw(TEXT))])]
    return messages


@pytest.fixture(scope="module", params=MODELS)
def both(request, with_small_tiles):
    pytest.importorskip("transformers")
    directory, (placeholder, stop) = with_small_tiles(request.param), MODELS[request.param]
    processor = build_reference_processor(ProcessorFiles.read(directory), "pil")

    def expand(image):
        return list(processor(text=[processor.image_token], images=[[image]])["input_ids"][0])

    return Renderer.from_pretrained(directory, image_backend="pil"), NaiveRenderer(
        directory, placeholder, stop, expand
    )


@settings(max_examples=3)
@given(messages=conversations())
def test_both_renderers_agree(both, messages):
    renderer, naive = both
    rendered, expected = renderer.render(messages), naive.render(messages)
    assert rendered.token_ids == expected.token_ids
    assert np.array_equal(rendered.sampled_mask, expected.sampled)
