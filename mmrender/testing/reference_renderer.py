"""The reference: `apply_chat_template` and the model's own processor, from Transformers.

A family's processor is built whole where the machine can; some need torchvision only for their *video*
processor, and are then built around the image processor alone, which is all that images need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import MissingDependencyError, MMRenderError
from mmrender.media.pixels import ImageBackend
from mmrender.media.processors.base import ProcessorFiles
from mmrender.media.processors.reference import build_reference_processor
from mmrender.model.files import ModelDir
from mmrender.testing.reference import (
    has_reference_backend,
    import_torchvision,
)


@dataclass(frozen=True)
class ReferenceRendering:
    """What the reference makes of a conversation: text, ids, and the processor's other outputs."""

    text: str
    ids: list[int]
    tensors: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


class ReferenceRenderer:
    """Renders with Transformers.

    Args:
        directory: A model directory.
        backend: Back end of the image processor.

    Attributes:
        processor_missing: Why images cannot be processed here, or None.
    """

    def __init__(self, directory: Path, backend: ImageBackend) -> None:
        if has_reference_backend("torch"):
            import_torchvision()  # before Transformers does, which would fail beside a CPU torch
        try:
            from transformers import AutoTokenizer, logging
        except ImportError as error:
            raise MissingDependencyError.of_extra("transformers", "hf", "the reference renderer") from error
        logging.set_verbosity_error()  # it warns of every long prompt
        self.model = ModelDir(directory)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.processor: Any = None
        self.processor_missing: str | None = None
        try:
            self.processor = build_reference_processor(ProcessorFiles.read(directory), backend)
        except (MMRenderError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
            self.processor_missing = str(error).strip().splitlines()[0] or type(error).__name__

    def render(
        self, messages: Sequence[dict[str, Any]], images: Sequence[Any], **options: Any
    ) -> ReferenceRendering:
        """Render as `apply_chat_template` and the processor do: special tokens in content are syntax."""
        template = self.tokenizer.chat_template or self.model.read_text("chat_template.jinja")
        text = self.tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, **options
        )
        if self.processor is None or not images:
            return ReferenceRendering(text, self.tokenizer(text, add_special_tokens=False).input_ids)
        output = self.processor(
            text=[text], images=[list(images)], return_tensors="np", add_special_tokens=False
        )
        ids = np.asarray(output.pop("input_ids"))[0].tolist()
        output.pop("attention_mask", None)
        return ReferenceRendering(text, ids, {key: np.asarray(value) for key, value in output.items()})
