"""Those that the benchmarks of rendering compare, each behind the same few calls.

All start from the same decoded pictures. Models are loaded, templates compiled and probed, and processors
built beforehand. `forget` brings a contender to its cold state, with nothing kept of any conversation.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from mmrender import Renderer
from mmrender.media.pixels import ImageBackend
from mmrender.media.resolve import MediaCache
from mmrender.sidecar import TensorDtype
from mmrender.testing.reference import ReferenceRenderer
from mmrender.tokens.rendered import RenderedTokens

Messages = Sequence[dict[str, Any]]


class Ours:
    """mmrender. Cold: no memo of renderings, an empty memo of encoded runs, an empty media cache."""

    def __init__(self, directory: Path, backend: ImageBackend) -> None:
        self.cold_renderer = Renderer.from_pretrained(directory, image_backend=backend, memo_bytes=0)
        self.warm_renderer = Renderer.from_pretrained(directory, image_backend=backend)
        self.encoded_by = self.cold_renderer.tokenizer.choice.settle()

    def forget(self) -> None:
        self.cold_renderer.tokenizer._memo.clear()
        if self.cold_renderer.media is not None:
            self.cold_renderer.media.cache = MediaCache()

    def cold(self, messages: Messages, dtype: TensorDtype | None) -> object:
        """Render; with a `dtype` the tensors are expanded too, otherwise items stay uint8."""
        rendered = self.cold_renderer.render(messages, add_generation_prompt=True)
        return rendered, self.expanded(rendered, dtype)

    def warm(self, messages: Messages) -> RenderedTokens:
        """Render what was rendered before; tensors are not expanded."""
        return self.warm_renderer.render(messages, add_generation_prompt=True)

    def remade(self, messages: Messages) -> RenderedTokens:
        """Render with known pictures and runs, but without the memo of whole renderings."""
        return self.cold_renderer.render(messages, add_generation_prompt=True)

    @staticmethod
    def expanded(rendered: RenderedTokens, dtype: TensorDtype | None) -> list[dict[str, Any]]:
        items = rendered.multi_modal_data.mm_items.get("image", ())
        return [] if dtype is None else [item.tensors(dtype) for item in items]


class Reference:
    """Transformers: `apply_chat_template`, then the model's processor on one back end. It keeps nothing."""

    def __init__(self, directory: Path, backend: ImageBackend) -> None:
        renderer = ReferenceRenderer(directory, backend)
        self.missing = renderer.processor_missing
        self.processor = renderer.processor
        self.tokenizer = renderer.tokenizer

    def render(self, messages: Messages, images: Sequence[Image.Image]) -> Any:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        given = list(images) or None
        return self.processor(text=[text], images=given, return_tensors="pt", add_special_tokens=False)


class Peer:
    """PyPI `renderers`, which has a renderer written for Qwen3-VL, over the reference's image processor.

    Cold: an empty cache of images. Its warm renderings return the cached float32 arrays.
    """

    def __init__(self, directory: Path, reference: Reference) -> None:
        self.missing = _why_missing("renderers", directory)
        if self.missing is not None:
            return
        from renderers.qwen3_vl import Qwen3VLRenderer

        # It needs the image processor alone; Qwen's whole processor would need torchvision for its videos.
        processor = SimpleNamespace(image_processor=reference.processor.image_processor)
        self.renderer = Qwen3VLRenderer(reference.tokenizer, processor=processor)

    def forget(self) -> None:
        self.renderer._image_cache.clear()

    def render(self, messages: Messages) -> Any:
        return self.renderer.render(list(messages), add_generation_prompt=True)


class NativePeer:
    """PyPI `tml-renderers`, compiled, with a vocabulary of its own; it renders text of Qwen3-VL alone."""

    def __init__(self, directory: Path) -> None:
        self.missing = _why_missing("tml_renderers", directory)
        if self.missing is None:
            from tml_renderers import chat, renderers

            self._messages = chat.OpenAIMessage.from_oss_messages
            self._renderer = renderers.Qwen3()

    def render(self, messages: Messages) -> list[int]:
        spans, _ = self._renderer.render_for_completion(self._messages(list(messages)))
        return [token for span in spans for token in span.span.tokens]


def _why_missing(module: str, directory: Path) -> str | None:
    """Why this peer cannot render the model, or None."""
    try:
        import_module(module)
    except ImportError as error:
        return "not installed" if error.name == module else f"not importable: {error}"
    model_type = json.loads((directory / "config.json").read_text()).get("model_type")
    return None if model_type == "qwen3_vl" else f"has no renderer for {model_type}"
