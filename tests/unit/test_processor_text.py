"""A processor must write the template's text with expansions in place of placeholders, and nothing more."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_models import TEMPLATE, chameleon, idefics2, mllama
from mmrender import Renderer
from mmrender.errors import ProcessorError
from mmrender.media.processor import ProcessorFiles
from mmrender.media.processors.transformers import TransformersProcessor


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (chameleon, r"adds text of its own to a prompt .*<sep>"),
        (idefics2, "writes an image differently beside other text"),
        (mllama, r"adds text of its own to a prompt .*<s>"),
    ],
)
def test_a_processor_whose_prompts_are_more_than_text_and_expansions_is_refused(
    tmp_path: Path, build: Callable[[Path], Path], problem: str
) -> None:
    with pytest.raises(ProcessorError, match=problem):
        TransformersProcessor(ProcessorFiles.read(build(tmp_path)), "pil")


def test_an_opening_that_the_template_writes_is_no_text_of_the_processor(tmp_path: Path) -> None:
    processor = TransformersProcessor(ProcessorFiles.read(mllama(tmp_path)), "pil", opening="<s>")
    assert processor.geometry(60, 60).num_tokens == 1


def test_a_processor_that_adds_text_without_an_image_is_refused_before_any_image(tmp_path: Path) -> None:
    (chameleon(tmp_path) / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", "<image>"))
    with pytest.raises(ProcessorError, match=r"adds text of its own to a prompt .*<sep>"):
        Renderer.from_pretrained(tmp_path, image_backend="pil")
