"""A Transformers model as `LocalBackend` drives it: a prompt at a time, each with its own keys and values.

Nothing of one sequence may reach another. So sequences are never batched, since a sum over a larger batch
rounds differently and a seed would no longer decide what is sampled; and `rope_deltas`, which the Qwen-VL and
GLM-V families keep on the module between prefill and decoding, belongs to the sequence here.
"""

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmrender.errors import EngineUnsupportedError, MissingDependencyError, ModelError
from mmrender.spans import MultiModalData
from mmrender.tokens.token_types import mm_token_type_ids

_PAD_SETTINGS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass(slots=True)
class SequenceState:
    """What one sequence has left behind: keys and values, and position offsets by module."""

    cache: Any = None
    rope_deltas: dict[Any, Any] = field(default_factory=dict)


class LocalModel:
    """Runs prompts through a model and yields logits.

    Args:
        model: A Transformers model that gives logits, in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self._text_config = model.config.get_text_config()
        self._with_rope_deltas = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        pads = (getattr(model.config, name, None) for name in _PAD_SETTINGS)
        self._pad_ids = frozenset(pad for pad in pads if isinstance(pad, int))

    @classmethod
    def load(cls, directory: str | os.PathLike[str], dtype: str, device: str) -> "LocalModel":
        """Load weights and configuration from a directory in hub layout.

        Raises:
            MissingDependencyError: torch or Transformers is not installed.
            ModelError: Transformers cannot load the model.
        """
        try:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        except ImportError as error:
            package, extra = ("torch", "torch") if "torch" in str(error.name) else ("transformers", "hf")
            raise MissingDependencyError.of_extra(package, extra, "the local back end") from error
        try:
            config = AutoConfig.from_pretrained(directory)
            is_multimodal = type(config) in AutoModelForImageTextToText._model_mapping
            kind = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
            with _no_progress_bar():
                model = kind.from_pretrained(directory, config=config, dtype=getattr(torch, dtype))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                "Transformers cannot load the model", where=str(directory), got=str(error)
            ) from error
        return cls(model.to(device).eval())

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self._text_config.vocab_size)

    @property
    def context_length(self) -> int:
        """Number of positions that the model was made for."""
        return int(self._text_config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens on which the model's own files say that it stops."""
        generation = getattr(self.model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None)
        if found is None:
            found = getattr(self._text_config, "eos_token_id", None)
        listed = found if isinstance(found, list | tuple) else [found]
        return frozenset(int(token) for token in listed if token is not None)

    def prefill(self, prompt_ids: Sequence[int], sidecar: MultiModalData, state: SequenceState) -> Any:
        """Run a prompt; the logits that follow it, float32 of shape `(vocabulary,)` on the CPU.

        Raises:
            EngineUnsupportedError: The model does not take what the items hold.
        """
        import torch

        ids = torch.tensor([list(prompt_ids)], device=self.model.device)
        media = self._media(sidecar, len(prompt_ids))
        with self._typed_pads(ids, sidecar):
            return self._forward(ids, state, media)

    def decode(self, token: int, state: SequenceState) -> Any:
        """Run one more token; the logits that follow it, as for `prefill`."""
        import torch

        return self._forward(torch.tensor([[token]], device=self.model.device), state, {})

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy named tensors into the model's parameters and buffers.

        Raises:
            ModelError: The model has no parameter of a name, or one of another shape. Nothing was changed.
        """
        import torch

        own = dict(self.model.state_dict())
        given = dict(weights)
        for name, value in given.items():
            if name not in own:
                raise ModelError("the model has no such parameter", where=name)
            if own[name].shape != value.shape:
                expected, got = str(list(own[name].shape)), str(list(value.shape))
                raise ModelError("the parameter has another shape", where=name, expected=expected, got=got)
        with torch.no_grad():
            for name, value in given.items():
                own[name].copy_(value)

    def _forward(self, ids: Any, state: SequenceState, media: Mapping[str, Any]) -> Any:
        import torch

        kept = {"logits_to_keep": 1} if "logits_to_keep" in self._arguments else {}
        with torch.inference_mode(), self._own_rope_deltas(state):
            output = self.model(input_ids=ids, past_key_values=state.cache, use_cache=True, **kept, **media)
            state.cache = output.past_key_values
        # A copy made outside of inference mode may be written into, as the sampler does.
        return output.logits[0, -1].to("cpu", torch.float32, copy=True)

    @contextmanager
    def _own_rope_deltas(self, state: SequenceState) -> Iterator[None]:
        for module in self._with_rope_deltas:
            module.rope_deltas = state.rope_deltas.get(module)
        try:
            yield
        finally:
            for module in self._with_rope_deltas:
                state.rope_deltas[module] = module.rope_deltas
                module.rope_deltas = None

    def _media(self, sidecar: MultiModalData, length: int) -> dict[str, Any]:
        """Keyword arguments for the items of a prompt, joined in prompt order."""
        import torch

        if not sidecar:
            return {}
        dtype = str(self.model.dtype).removeprefix("torch.")
        joined: dict[str, list[Any]] = {}
        for items in sidecar.mm_items.values():
            for item in items:
                for name, tensor in item.tensors(dtype, framework="torch").items():  # type: ignore[arg-type]
                    joined.setdefault(name, []).append(tensor)
        media = {name: torch.cat(tensors).to(self.model.device) for name, tensors in joined.items()}
        # Gemma 3 calls them otherwise, and lets the tokens of an image see one another.
        for name in {"mm_token_type_ids", "token_type_ids"} & self._arguments:
            types = torch.from_numpy(mm_token_type_ids(sidecar.spans(length), length))
            media[name] = types[None].to(self.model.device)
        unknown = sorted(media.keys() - self._arguments)
        if unknown:
            raise EngineUnsupportedError(
                f"{type(self.model).__name__} does not take what the items hold",
                where="multi_modal_data",
                expected=f"some of {', '.join(sorted(self._arguments))}",
                got=", ".join(unknown),
            )
        return media

    @contextmanager
    def _typed_pads(self, ids: Any, sidecar: MultiModalData) -> Iterator[None]:
        """Let pad tokens that stand for no image, which a model may sample, be ordinary tokens.

        Transformers takes every pad token for an image's. So such a token is given to the model under another
        id, and the embedding that this looks up is replaced by the pad's own.
        """
        import torch

        flat = ids[0]
        stray = torch.zeros_like(flat, dtype=torch.bool)
        for pad in self._pad_ids:
            stray |= flat == pad
        for ranges in sidecar.mm_placeholders.values():
            for placeholder in ranges:
                window = slice(placeholder.offset, placeholder.offset + placeholder.length)
                stray[window] &= ~torch.from_numpy(placeholder.is_embed).to(stray.device)
        if not bool(stray.any()):
            yield
            return
        meant = flat[stray]
        flat[stray] = next(token for token in range(self.vocab_size) if token not in self._pad_ids)
        embedding = self.model.get_input_embeddings()

        def embed_as_meant(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            if inputs[0].shape != ids.shape:
                return output
            output = output.clone()
            output[0, stray] = embedding.weight[meant].to(output.dtype)
            return output

        handle = embedding.register_forward_hook(embed_as_meant)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Load weights without the bar that Transformers draws, into whatever its host shows."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
