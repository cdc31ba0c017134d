"""mmrender in `Dataset.map` of Hugging Face `datasets`.

```python
from datasets import Dataset
from mmrender.integrations.datasets import RenderRow

messages = [{"role": "user", "content": "Moo?"}, {"role": "assistant", "content": "A cow."}]
dataset = Dataset.from_list([{"messages": messages}])
rendered = dataset.map(RenderRow("MODEL"), remove_columns=dataset.column_names)
```
"""

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from mmrender._version import __version__
from mmrender.caching import cached_property
from mmrender.model.files import find_model
from mmrender.renderer import Renderer
from mmrender.training.samples import build_training_sample, with_row_arguments
from mmrender.trajectory.sample import TrainingSample


class RenderRow:
    """Renders a row's conversation to token ids and labels, as columns that Arrow keeps.

    A row holds `messages` (or `prompt` and `completion`), and may hold `images`, `image`, `tools` and
    `chat_template_kwargs`. Images of an `Image()` column fill the image parts that have no source of their
    own, in order. Pixels are no column: they are made from the row's images with each batch, by `Collator`.

    Its fingerprint, by which `datasets` finds what it has mapped before, follows the model's files, the
    options and mmrender's release, and nothing else: it is equal in every process, and another where a
    template has changed.

    Args:
        model: Model directory or hub id.
        load: Further arguments of `Renderer.from_pretrained`.
        **options: Arguments of `build_training_sample`, such as `train_on`.
    """

    def __init__(self, model: str, *, load: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.model = str(model)
        self.load = dict(load or {})
        self.options = options
        found = find_model(self.model, revision=self.load.get("revision"))
        digest = blake3(__version__.encode())
        for path in sorted(found.path.glob("*.json")) + sorted(found.path.rglob("*.jinja")):
            if not path.name.endswith(".index.json"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        self.digest = digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_renderer, (self.model, self.load, self.options, self.digest)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer.from_pretrained(self.model, **self.load)

    def sample(self, row: Mapping[str, Any]) -> TrainingSample:
        """Render a row; raises as `build_training_sample`."""
        prompt = list(row.get("prompt") or [])
        messages = [*(row.get("messages") or []), *prompt, *(row.get("completion") or [])]
        given: dict[str, Any] = {"completion_start": len(prompt)} if prompt else {}
        images = row.get("images") or ([row["image"]] if row.get("image") is not None else None)
        if images:
            given["images"] = images
        if row.get("tools"):
            given["tools"] = row["tools"]
        arguments = row.get("chat_template_kwargs") or {}
        return build_training_sample(
            self._renderer, messages, **with_row_arguments({**self.options, **given}, arguments)
        )

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return `input_ids`, `labels`, `mm_token_type_ids` and the identities of the row's images."""
        sample = self.sample(row)
        hashes = [digest for found in sample.multi_modal_data.mm_hashes.values() for digest in found]
        return {
            "input_ids": sample.token_ids,
            "labels": sample.labels(),
            "mm_token_type_ids": sample.mm_token_type_ids,
            "image_hashes": hashes,
        }


def _row_renderer(model: str, load: dict[str, Any], options: dict[str, Any], digest: str) -> RenderRow:
    """Make it again where it arrives; the digest is there for the fingerprint."""
    return RenderRow(model, load=load, **options)
