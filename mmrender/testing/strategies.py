"""Hypothesis strategies over the language of `mmrender.testing.conversations`."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from mmrender.probing.profile import TemplateProfile
from mmrender.testing.conversations import ConversationMaker


def conversations(
    profile: TemplateProfile,
    *,
    images: Sequence[Image.Image] = (),
    literals: Sequence[str] = (),
    max_turns: int = 4,
    tools: bool = True,
) -> st.SearchStrategy[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Messages in Hugging Face form with options for `render`, of the kinds that a template takes."""
    maker = ConversationMaker(profile, images, literals, max_turns, tools)
    return st.randoms(use_true_random=False).map(maker.make)
