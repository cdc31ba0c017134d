"""`Collator`: one object that a `Trainer`, a trainer of TRL or a `DataLoader` calls for each batch.

```python
collator = Collator(ModelFamily.from_config(directory), pad_token_id=0, renderer=renderer)
arguments = TrainingArguments("checkpoints", remove_unused_columns=False)
Trainer(model, arguments, data_collator=collator, train_dataset=samples)
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from mmrender.errors import BatchError, InputError
from mmrender.training.batch import PaddingSide, TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import ModelFamily
from mmrender.training.packing import first_fit_decreasing
from mmrender.training.samples import CONVERSATION_COLUMNS, row_sample
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.truncate import truncate

if TYPE_CHECKING:
    from mmrender.protocols import RendererProtocol

_COLUMNS: Final = (*CONVERSATION_COLUMNS, "extra")


@dataclass(frozen=True)
class Collator:
    """Conversations or samples to the model's keyword arguments and `labels`.

    An example is a `TrainingSample`, a list of messages, or a mapping as in TRL's data sets, with `messages`,
    or with `prompt` and `completion`, both lists of messages, of which the second is trained on. Columns
    `tools`, `images`, `videos`, `audio`, `chat_template_kwargs` and `extra`, which travels into the batch,
    are read, too, and may be None. It can be pickled if its renderer was made by `Renderer.from_pretrained`,
    so workers of a `DataLoader` may call it.

    Attributes:
        family: The model's inputs.
        pad_token_id: The token that fills rows.
        renderer: Renders conversations; None if all examples are samples.
        packed: Whether several samples share a row: all of a batch, or up to `max_length` tokens. With `auto`
            they do if trainers can run the family on packed rows. If not, each row is padded.
        max_length: Samples are truncated to this many tokens, at whole images; None leaves them whole.
        padding_side: The side on which rows are filled.
        multiple: Makes the width a multiple of this.
        dtype: Dtype of pixels: torch's float32, float16 or bfloat16.
        flash_attention: Whether the model runs with flash attention, to which packed rows bring their bounds.
        options: Further keyword arguments of `build_training_sample`, such as `on_rewritten`.

    Raises:
        BatchError: The family refuses the layout, or takes packed rows and rows padded on the left only
            within `recurrent_segments`, which trainers do not enter.
    """

    family: ModelFamily
    pad_token_id: int
    renderer: "RendererProtocol | None" = None
    packed: bool | Literal["auto"] = False
    max_length: int | None = None
    padding_side: PaddingSide = "right"
    multiple: int = 1
    dtype: Any = torch.float32
    flash_attention: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.family.check_layout("packed" if self.is_packed else self.padding_side)
        if self.family.recurrent and (self.is_packed or self.padding_side == "left"):
            layout, name, option = "left", "padding_side", 'padding_side="right"'
            if self.is_packed:
                layout, name, option = "packed", "packed", 'packed="auto"'
            raise BatchError(
                f"{layout} rows of {self.family.model_type} need a block around each forward",
                where=name,
                remedy=f"Pass {option}, or call `batch` and enter recurrent_segments yourself",
            )

    @property
    def is_packed(self) -> bool:
        """Whether several samples share a row."""
        if self.packed != "auto":
            return self.packed
        family = self.family
        # Families with image blocks bring a mask for each kind of layer to packed rows, which TRL refuses.
        return not ("packed" in family.refused or family.recurrent or family.image_blocks)

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward, with `labels` int64 `(rows, width)`.

        Labels are token ids where trained on, else -100, not shifted.

        Raises:
            BatchError: Tokens have weights other than 1, which labels cannot carry. Raises as `batch`, too.
        """
        batch = self.batch(examples)
        if batch.loss_weights is not None and not torch.equal(batch.loss_weights, batch.loss_mask.float()):
            raise BatchError(
                "messages have weights, and a loss over labels ignores them",
                where="examples",
                expected="weights of 0 and 1",
                remedy="Call `batch`, and weigh each token's loss with its loss_weights",
            )
        return batch.model_inputs(flash_attention=self.flash_attention) | {"labels": batch.labels()}

    def batch(self, examples: Sequence[Any]) -> TrainingBatch:
        """Return the batch of these examples.

        Raises:
            InputError: An example is something else, has other columns, or needs a renderer.
            BatchError: The samples cannot be batched. See `collate`.
            MMRenderError: A conversation cannot be rendered. See `build_training_sample`.
        """
        samples = [self.sample(example, f"examples[{index}]") for index, example in enumerate(examples)]
        rows = None
        if self.is_packed:
            lengths = [len(sample) for sample in samples]
            rows = first_fit_decreasing(lengths, self.max_length or sum(lengths))
        return collate(
            samples,
            self.family,
            pad_token_id=self.pad_token_id,
            rows=rows,
            padding_side=self.padding_side,
            multiple=self.multiple,
            dtype=self.dtype,
            # A worker process must not touch the device, and a DataLoader pins by itself.
            pin_memory=False,
        )

    def sample(self, example: Any, where: str = "example") -> TrainingSample:
        """Return one example as a sample, truncated.

        Raises:
            BatchError: It has nothing to train on. Raises as `batch`, too.
        """
        sample = example if isinstance(example, TrainingSample) else self._rendered(example, where)
        if self.max_length is not None:
            sample = truncate(sample, self.max_length)
        if not sample.loss_mask.any():
            bound = "" if self.max_length is None else f" of the first {self.max_length}"
            raise BatchError(
                f"no token{bound} is trained on",
                where=where,
                remedy="Leave the example out, change train_on, or raise max_length",
            )
        return sample

    def _rendered(self, example: Any, where: str) -> TrainingSample:
        columns = dict(example) if isinstance(example, Mapping) else {"messages": example}
        unknown = [name for name in columns if name not in _COLUMNS]
        if self.renderer is None or unknown:
            raise InputError(
                "an example has a column that is not read" if unknown else "a conversation needs a renderer",
                where=f"{where}.{unknown[0]}" if unknown else where,
                expected=", ".join(_COLUMNS) if unknown else "a TrainingSample",
                got=None if unknown else type(example).__name__,
                remedy="Remove the column" if unknown else "Pass renderer=Renderer.from_pretrained(...)",
            )
        return row_sample(self.renderer, columns, self.options, where)
