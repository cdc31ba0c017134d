"""The reference: `apply_chat_template` and the model's own processor, from Transformers.

A family's processor is built whole where the machine can; some need torchvision only for their *video*
processor, and are then built around the image processor alone, which is all that images need.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import MissingDependencyError, MMRenderError
from mmrender.media.pixels import ImageBackend
from mmrender.model.files import ModelDir
from mmrender.testing.reference import (
    has_reference_backend,
    import_torchvision,
    load_reference_image_processor,
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
            self.processor = self._build(directory, backend)
        except (MMRenderError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
            self.processor_missing = str(error).strip().splitlines()[0] or type(error).__name__

    def _build(self, directory: Path, backend: ImageBackend) -> Any:
        import transformers

        image_processor = load_reference_image_processor(directory, backend)
        configs = [
            self.model.read_json(name) for name in ("processor_config.json", "preprocessor_config.json")
        ]
        configs.append(dict(self.model.tokenizer_config))
        name = next((config["processor_class"] for config in configs if "processor_class" in config), None)
        if name is None:
            raise ValueError("the directory names no processor class")
        processor_class = getattr(transformers, name)
        accepted = inspect.signature(processor_class.__init__).parameters
        settings = {
            key: value for key, value in configs[0].items() if key in accepted and not isinstance(value, dict)
        }
        if "video_processor" in accepted:
            settings["video_processor"] = None
        template = self.tokenizer.chat_template or self.model.read_text("chat_template.jinja")
        # The class check is what forbids an empty video processor; everything else is the model's own.
        lenient: Any = type(name, (processor_class,), {"check_argument_for_proper_class": lambda *_: None})
        return lenient(
            image_processor=image_processor, tokenizer=self.tokenizer, chat_template=template, **settings
        )

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
