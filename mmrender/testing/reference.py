"""The reference that mmrender is measured against: `apply_chat_template` and the model's own processor.

Both come from Transformers, and are loaded from a model directory.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import MissingDependencyError, MMRenderError, TokenizerError, importing
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import ProcessorFiles
from mmrender.media.processors.reference import (
    INSTALL_TORCHVISION,
    VideoSettings,
    build_audio_reference,
    build_image_processor,
    build_reference_processor,
    load_tokenizer,
)
from mmrender.model.convert import open_model
from mmrender.template.sources import load_templates

_UNBUILT_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators whose schemas torchvision expects to find when it is imported."""
_KEPT: list[Any] = []
"""A library's definitions vanish with the object."""


def has_reference_backend(backend: ImageBackend) -> bool:
    """Return whether the reference's image processors can run on this back end here."""
    needed = ("transformers", "torchvision") if backend == "torch" else ("transformers",)
    return all(importlib.util.find_spec(name) is not None for name in needed)


def load_reference_image_processor(directory: Path, backend: ImageBackend) -> Any:
    """Load the image processor of Transformers for a model directory, on one named back end.

    Raises:
        MissingDependencyError: Transformers is not installed, or torchvision for the torch back end.
        ProcessorError: Transformers lacks the processor on this back end.
    """
    if not has_reference_backend("pil"):
        raise MissingDependencyError.of_extra("transformers", "hf", "the reference image processor")
    if has_reference_backend("torch"):
        import_torchvision()  # Transformers imports it for either back end
    elif backend == "torch":
        raise MissingDependencyError(
            "the reference's torch back end needs torchvision, which is not installed",
            remedy=f"{INSTALL_TORCHVISION}, or compare with the PIL back end",
        )
    return build_image_processor(ProcessorFiles.read(directory), backend)


@cache
def import_torchvision() -> None:
    """Import torchvision, also if its compiled operators were built for another torch.

    Then its import fails on the schemas of those operators only. With the schemas declared, its transforms
    work, and an image processor uses nothing else.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _UNBUILT_OPERATORS:
            library.define(schema)
        _KEPT.append(library)
        import torchvision  # noqa: F401


@dataclass(frozen=True)
class ReferenceRendering:
    """The reference's rendering of a conversation: text, ids, and the processor's other outputs."""

    text: str
    ids: list[int]
    tensors: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


class ReferenceRenderer:
    """Renders with Transformers, through the processor's own `apply_chat_template` or else the tokenizer's.

    Args:
        directory: The model.
        backend: Of images.
        trust_remote_code: Run code of the directory.

    Attributes:
        processor_missing: Why the model's media cannot be processed here, or None.
        takes_videos: Whether the model's videos can be processed here.
        takes_audio: Whether the model's audio can be processed here.
    """

    def __init__(self, directory: Path, backend: ImageBackend, *, trust_remote_code: bool = False) -> None:
        if has_reference_backend("torch"):
            import_torchvision()  # before Transformers does, which would fail with a CPU torch
        with importing("transformers", "hf", "the reference renderer"):
            from transformers import logging
            from transformers.processing_utils import ProcessorMixin
        logging.set_verbosity_error()  # it warns of every long prompt
        model = open_model(directory, trust_remote_code=trust_remote_code)
        self._files = files = ProcessorFiles.read(model)
        self._trust_remote_code = trust_remote_code
        self.processor: Any = None
        self.processor_missing: str | None = None
        self.takes_videos = self.takes_audio = False
        templates = None
        if files.image or files.audio:
            templates = ProcessorMixin.get_processor_dict(directory)[0].get("chat_template")
            try:
                self.processor = (
                    build_reference_processor(files, backend, trust_remote_code=trust_remote_code)
                    if files.image
                    else build_audio_reference(files, trust_remote_code=trust_remote_code)
                )
            except (MMRenderError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
                self.processor_missing = " ".join(str(error).split()) or type(error).__name__
            if self.processor is not None and not hasattr(self.processor, "tokenizer"):
                self.processor_missing = f"{type(self.processor).__name__} has no tokenizer"
                self.processor = None
            self._find_video_processor(directory)
            self._find_audio_processor(files)
            if getattr(self.processor, "video_processor", self) is None:
                # SmolVLM's `apply_chat_template` reads settings of videos, whether there are any or not.
                self.processor.video_processor = VideoSettings()
        # Loading a tokenizer takes as long as all the rest, so the processor's own is used.
        self.tokenizer = getattr(self.processor, "tokenizer", None) or self._load_tokenizer()
        # Files that Transformers overlooks come last.
        self._templates = templates or self.tokenizer.chat_template or load_templates(files.model)

    def read_text_alone(self, why: str) -> None:
        """Leave the model's processor out, and set the reason as `processor_missing`."""
        self.processor, self.processor_missing = None, why
        self.takes_videos = self.takes_audio = False
        # Some processors change the tokenizer that they are given.
        self.tokenizer = self._load_tokenizer()

    def _load_tokenizer(self) -> Any:
        try:
            return load_tokenizer(self._files, self._trust_remote_code)
        except Exception as error:
            problem, where = "Transformers cannot open the tokenizer", str(self._files.directory)
            raise TokenizerError(problem, where=where, got=str(error)) from error

    def _find_video_processor(self, directory: Path) -> None:
        """Set the processor's part for videos, if it has one that can be built."""
        part = getattr(self.processor, "video_processor", self)
        if (part is None or isinstance(part, VideoSettings)) and has_reference_backend("torch"):
            from transformers import AutoVideoProcessor

            with suppress(ImportError, OSError, ValueError, TypeError, AttributeError, RecursionError):
                self.processor.video_processor = AutoVideoProcessor.from_pretrained(directory)
                self.takes_videos = isinstance(getattr(self.processor, "video_token", None), str)

    def _find_audio_processor(self, files: ProcessorFiles) -> None:
        """Set the processor's part for audio, if it has one that can be built."""
        names = () if self.processor is None else type(self.processor).get_attributes()
        name = next((name for name in ("audio_processor", "feature_extractor") if name in names), None)
        if name is not None and files.audio:
            from transformers import AutoFeatureExtractor

            with suppress(ImportError, OSError, ValueError, TypeError, AttributeError):
                if getattr(self.processor, name, None) is None:
                    setattr(self.processor, name, AutoFeatureExtractor.from_pretrained(files.directory))
                self.takes_audio = isinstance(getattr(self.processor, "audio_token", None), str)

    def _of_videos(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return options that tell the processor the times of a conversation's videos."""
        parts = [part for message in messages for part in message["content"] if part["type"] == "video"]
        if not parts or not self.takes_videos:
            return {}
        is_sampled = any("frames_indices" in part for part in parts)
        samples = bool(self.processor.video_processor.do_sample_frames) and not is_sampled
        metadata = []
        for part in parts:
            count = len(part["video"])
            entry = {"fps": part.get("fps"), "total_num_frames": part.get("total_num_frames", count)}
            if not samples:
                entry["frames_indices"] = list(part.get("frames_indices", range(count)))
            metadata.append(entry)
        return {"video_metadata": [metadata], "do_sample_frames": samples, "return_metadata": True}

    def text(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Run the chat template alone. Its errors pass through."""
        template = self._templates
        if not isinstance(template, str):
            template = template["tool_use" if options.get("tools") and "tool_use" in template else "default"]
        if any("content" in message and message["content"] is None for message in messages):
            # `apply_chat_template` would leave out a key whose value is None, which a template may ask for.
            from transformers.utils.chat_template_utils import render_jinja_template

            variables = {**self.tokenizer.special_tokens_map, **options}
            texts, _ = render_jinja_template(
                conversations=[list(messages)], chat_template=template, **variables
            )
            return str(texts[0])
        text: str = self._speaker.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, **options
        )
        return text

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> ReferenceRendering:
        """Render with `apply_chat_template(tokenize=True, return_dict=True)`.

        Special tokens are syntax wherever they are. Raises whatever Transformers and the template raise.
        """
        text = self.text(messages, **options)
        how: dict[str, Any] = {
            "tokenize": True,
            "return_dict": True,
            # Some pixels are bfloat16, which NumPy lacks.
            "return_tensors": "pt" if importlib.util.find_spec("torch") is not None else "np",
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of functions that Transformers calls
            if self.processor_missing is not None:
                has_bos = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
                return ReferenceRendering(
                    text, self.tokenizer(text, add_special_tokens=not has_bos).input_ids
                )
            # For ids, but not for text, a processor looks for media in the content of every message. Releases
            # of Transformers treat a content that is not a list differently.
            shown = [
                message if isinstance(message.get("content"), list) else {**message, "content": []}
                for message in messages
            ]
            output = self._speaker.apply_chat_template(
                shown, chat_template="{{ written }}", written=text, **how, **self._of_videos(shown)
            )
        others = ("attention_mask", "video_metadata")
        arrays = {name: _as_array(value) for name, value in output.items() if name not in others}
        return ReferenceRendering(text, arrays.pop("input_ids").reshape(-1).tolist(), arrays)

    @property
    def _speaker(self) -> Any:
        return self.processor or self.tokenizer


def _as_array(value: Any) -> npt.NDArray[Any]:
    if not hasattr(value, "numpy"):
        return np.asarray(value)
    array: npt.NDArray[Any] = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    return array
