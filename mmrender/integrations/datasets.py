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
from mmrender.training.samples import CONVERSATION_COLUMNS, row_sample
from mmrender.trajectory.sample import TrainingSample


class RenderRow:
    """Renders a row's conversation to token ids and labels, as columns that Arrow keeps.

    A row holds `messages` (or `prompt` and `completion`), and may hold `images`, `image`, `videos`, `audio`,
    `tools` and `chat_template_kwargs`. Images of an `Image()` column fill the image parts without a source,
    in order. Pixels are not stored: `Collator` makes them from the row's images with each batch.

    Its fingerprint, by which `datasets` finds earlier results, depends on the model's files, the options and
    mmrender's release alone: it is equal in every process, and changes with a template.

    Args:
        model: Model directory or hub id.
        load: Further arguments of `Renderer.from_pretrained`.
        **options: Arguments of `build_training_sample`, such as `train_on`.
    """

    def __init__(self, model: str, *, load: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.model = str(model)
        self.load = dict(load or {})
        self.options = options
        files = find_model(self.model, revision=self.load.get("revision"))
        digest = blake3(__version__.encode())
        kinds = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.py")
        found = [path for kind in kinds for path in sorted(files.path.glob(kind))]
        for path in found + sorted(files.path.rglob("*.jinja")):
            if not path.name.endswith(".index.json"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        self.digest = digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_renderer, (self.model, self.load, self.options, self.digest)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer.from_pretrained(self.model, **self.load)

    def sample(self, row: Mapping[str, Any]) -> TrainingSample:
        """Render a row, with the errors of `build_training_sample`."""
        columns = {name: row.get(name) for name in CONVERSATION_COLUMNS}
        if row.get("image") is not None and not columns["images"]:
            columns["images"] = [row["image"]]
        return row_sample(self._renderer, columns, self.options)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return `input_ids`, `labels`, `mm_token_type_ids` and the identities of the row's images."""
        sample = self.sample(row)
        hashes = [digest for digests in sample.multi_modal_data.mm_hashes.values() for digest in digests]
        return {
            "input_ids": sample.token_ids,
            "labels": sample.labels(),
            "mm_token_type_ids": sample.mm_token_type_ids,
            "image_hashes": hashes,
        }


def _row_renderer(model: str, load: dict[str, Any], options: dict[str, Any], digest: str) -> RenderRow:
    """Make it again on arrival. Only the fingerprint needs the digest."""
    return RenderRow(model, load=load, **options)
