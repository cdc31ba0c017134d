"""The trainer's model as an audit runs it: each sample by itself, through the batch that a trainer builds."""

import copy
import os
from typing import Any

import numpy as np

from mmrender.audit.compare import Float32Array
from mmrender.client.local_model import LocalModel
from mmrender.errors import EngineError
from mmrender.training import ModelFamily, collate, token_logprobs
from mmrender.trajectory.sample import TrainingSample


class TrainerModel:
    """A Transformers model that gives the log-probability of every token of a sample.

    Args:
        model: In evaluation mode.
        dtype: Name of the dtype that pixels are given in; that of the weights if None.
    """

    def __init__(self, model: Any, *, dtype: str | None = None) -> None:
        self.model = model
        self.family = ModelFamily.from_config(model.config)
        self._dtype = dtype or str(model.dtype).removeprefix("torch.")

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu"
    ) -> "TrainerModel":
        """Load weights from a model directory.

        Raises:
            MissingDependencyError: torch or Transformers is not installed.
            ModelError: Transformers cannot load the model.
        """
        return cls(LocalModel.load(directory, dtype, device).model)

    def logprobs(self, sample: TrainingSample) -> Float32Array:
        """Return the log-probability of each token given those before it, `(tokens,)`; 0.0 for the first.

        Raises:
            BatchError: The sample makes no batch: placeholders, items or tokens do not fit together.
            EngineError: The model fails on it.
        """
        return self._run(sample, own_positions=False)

    def own_positions(self, sample: TrainingSample) -> Float32Array:
        """The same with position ids that the model works out by itself. Raises what `logprobs` raises."""
        return self._run(sample, own_positions=True)

    def low_precision(self) -> "TrainerModel":
        """Return a copy of the model in bfloat16."""
        import torch

        return TrainerModel(copy.deepcopy(self.model).to(torch.bfloat16), dtype="bfloat16")

    def _run(self, sample: TrainingSample, *, own_positions: bool) -> Float32Array:
        import torch

        pad = 0 if self.family.feature_token_ids.get("image") != 0 else 1  # of a batch without padding
        batch = collate(
            [sample],
            self.family,
            pad_token_id=pad,
            dtype=getattr(torch, self._dtype),
            device=self.model.device,
            pin_memory=False,
        )
        inputs = batch.model_inputs()
        if own_positions:
            del inputs["position_ids"]
        try:
            with torch.inference_mode():
                found = token_logprobs(self.model(**inputs).logits, batch)
        except (RuntimeError, ValueError, IndexError) as error:
            raise EngineError(
                "the model fails on the sample", where=sample.sample_id or "sample", got=str(error)[:200]
            ) from error
        return np.asarray(found[0].float().cpu().numpy(), np.float32)
