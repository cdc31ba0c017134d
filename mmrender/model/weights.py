"""A model's weights: loaded with Transformers, and replaced by name. Needs torch when it is called."""

import os
from collections.abc import Iterable
from typing import Any

from mmrender.errors import ModelError, importing


def load_model(directory: str | os.PathLike[str], dtype: str, device: str, *, purpose: str) -> Any:
    """Load weights and configuration from a directory in hub layout, in evaluation mode.

    Args:
        directory: The directory.
        dtype: Of the weights, by torch's name.
        device: Target of loading, by torch's name.
        purpose: Use of the model, for errors.

    Raises:
        MissingDependencyError: torch or Transformers is not installed.
        ModelError: Transformers cannot load the model.
    """
    with importing("torch", "torch", purpose):
        import torch
    with importing("transformers", "hf", purpose):
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForMultimodalLM,
        )
        from transformers.utils import logging
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would be drawn into whatever the host shows
    try:
        config = AutoConfig.from_pretrained(directory)
        kinds = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
        kind = next((one for one in kinds if type(config) in one._model_mapping), AutoModelForCausalLM)
        model = kind.from_pretrained(directory, config=config, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "Transformers cannot load the model", where=str(directory), got=str(error)
        ) from error
    finally:
        if has_bar:
            logging.enable_progress_bar()
    return model.to(device).eval()


def replace_weights(model: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Copy tensors into the parameters of the same names.

    Raises:
        ModelError: A name or a shape is not the model's. Nothing was changed.
    """
    import torch

    parameters, tensors = dict(model.state_dict()), dict(weights)
    for name, tensor in tensors.items():
        if name not in parameters:
            raise ModelError("the model does not have this parameter", where=name)
        if parameters[name].shape != tensor.shape:
            expected, got = str(list(parameters[name].shape)), str(list(tensor.shape))
            raise ModelError("the parameter has another shape", where=name, expected=expected, got=got)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
