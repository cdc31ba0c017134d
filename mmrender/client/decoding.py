"""Many completions of a Transformers model at once: each prompt prefilled once, all decoded in one forward.

What shares a forward has prompts of one length and images of one size. So nothing is padded, every family of
models runs as it runs alone, and a completion depends on its companions by no more than the rounding of
larger matrix products: logits differ by some 1e-6, and tokens only where a draw falls within that of a tie.
"""

import copy
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mmrender.client.token_sampler import TokenSampler
from mmrender.client.types import EngineRequest, FinishReason, OnTokens
from mmrender.errors import EngineUnsupportedError
from mmrender.spans import MultiModalData, mm_token_type_ids

_PAD_SETTINGS: Final = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
_PER_SEQUENCE: Final = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""What `generate` carries along besides the cache; of each, the last dimension but one is the sequences."""


@dataclass(eq=False)
class Completion:
    """One completion on its way.

    Attributes:
        request: What was asked for.
        sampler: Chooses and holds its tokens.
        room: The most tokens that it may have.
        tell: Hears of each token.
        done: Called at its end, with what failed or None; calls after the first count for nothing.
        stopped: Set to end it before its next token.
        versions: Name of the weights that sampled each token.
    """

    request: EngineRequest
    sampler: TokenSampler
    room: int
    tell: OnTokens
    done: Callable[["Completion", Exception | None], None]
    stopped: threading.Event
    versions: list[str] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        if self.sampler.has_ended:
            return "stop"
        if len(self.sampler.tokens) >= self.room:
            return "length"
        return "abort" if self.stopped.is_set() else None

    def sample(self, logits: Any, version: str) -> bool:
        """Sample one token of these weights; return whether another one follows."""
        if self.finish_reason is None:
            try:
                self.sampler.sample(logits)
            except Exception as error:  # noqa: BLE001 - the others go on
                self.done(self, error)
                return False
            self.versions.append(version)
            self.tell(self.sampler.tokens[-1:], self.sampler.logprobs[-1:], None)
        if self.finish_reason is not None:
            self.done(self, None)
            return False
        return True


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A prompt, the model's arguments for its media, and the completions that begin with it."""

    ids: list[int]
    data: MultiModalData
    media: dict[str, Any]
    completions: list[Completion] = field(default_factory=list)

    @property
    def form(self) -> tuple[Any, ...]:
        """Length and sizes, which prompts of one forward share."""
        return len(self.ids), *sorted((name, tuple(tensor.shape)) for name, tensor in self.media.items())


def decode(model: Any, completions: Sequence[Completion], version: Callable[[], str]) -> None:
    """Sample completions to their ends; each one's `done` is called when it has ended.

    Args:
        model: A Transformers model that gives logits.
        completions: Their requests are checked.
        version: Called before each forward, for the name of the weights.
    """
    prompts: dict[Any, _Prompt] = {}
    for completion in completions:
        if completion.finish_reason is not None:
            completion.done(completion, None)
            continue
        ids, data = list(completion.request.prompt_ids), completion.request.multi_modal_data
        shown = tuple((span.item.identity, span.modality, span.start) for span in data.spans(len(ids)))
        key = tuple(ids), shown
        if key not in prompts:
            try:
                prompts[key] = _Prompt(ids, data, _media_arguments(model, data, len(ids)))
            except Exception as error:  # noqa: BLE001 - the others go on
                completion.done(completion, error)
                continue
        prompts[key].completions.append(completion)
    alike: dict[Any, list[_Prompt]] = {}
    for prompt in prompts.values():
        alike.setdefault(prompt.form, []).append(prompt)
    for group in alike.values():
        try:
            _decode(model, group, version)
        except Exception as error:  # noqa: BLE001 - other groups go on
            for completion in itertools.chain.from_iterable(prompt.completions for prompt in group):
                completion.done(completion, error)


def _decode(model: Any, prompts: Sequence[_Prompt], version: Callable[[], str]) -> None:
    """Sample all completions of prompts of one form."""
    import torch
    from transformers import GenerationConfig

    def loop(model: Any, input_ids: Any, **carried: Any) -> Any:
        """Decode in place of the loop of `generate`, which keeps sequences that have ended."""
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            carried.pop(name, None)
        weights = version()
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **carried)
        # Each completion, and the row of its sequence in the last forward.
        live = [(row, each) for row, prompt in enumerate(prompts) for each in prompt.completions]
        while True:
            outputs = model(**inputs, return_dict=True)
            carried = model._update_model_kwargs_for_generation(outputs, carried)
            logits = outputs.logits[:, -1].float().cpu()
            live = [(row, each) for row, each in live if each.sample(logits[row], weights)]
            if not live:
                return input_ids
            rows = torch.tensor([row for row, _ in live], device=input_ids.device)
            if rows.tolist() != list(range(len(input_ids))):
                input_ids = input_ids[rows]
                for name, value in carried.items():
                    if hasattr(value, "reorder_cache"):
                        value.reorder_cache(rows)
                    elif name in _PER_SEQUENCE and value is not None:
                        carried[name] = value.index_select(-2, rows)
            sampled = torch.tensor([[each.sampler.tokens[-1]] for _, each in live], device=input_ids.device)
            input_ids = torch.cat([input_ids, sampled], 1)
            live = [(row, each) for row, (_, each) in enumerate(live)]
            weights = version()
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **carried)

    ids = torch.tensor([prompt.ids for prompt in prompts], device=model.device)
    media = {name: torch.cat([prompt.media[name] for prompt in prompts]) for name in prompts[0].media}
    # The model's own generation config may set penalties and the like.
    plain = copy.copy(model)
    plain.generation_config = GenerationConfig(pad_token_id=0)
    with torch.inference_mode(), _stray_pads(model, ids, [prompt.data for prompt in prompts]):
        plain.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(each.room for prompt in prompts for each in prompt.completions),
            custom_generate=loop,
            **media,
        )


def _media_arguments(model: Any, data: MultiModalData, length: int) -> dict[str, Any]:
    """Return the keyword arguments for the items of a prompt, joined in prompt order."""
    import torch

    if not data:
        return {}
    spans = data.spans(length)
    dtype: Any = str(model.dtype).removeprefix("torch.")
    joined: dict[str, list[Any]] = {}
    for span in spans:
        for name, tensor in span.item.tensors(dtype, framework="torch").items():
            joined.setdefault(name, []).append(tensor)
    media = {name: torch.cat(tensors).to(model.device) for name, tensors in joined.items()}
    arguments = inspect.signature(model.forward).parameters
    # Gemma 3 calls them otherwise, and lets the tokens of an image see one another.
    for name in {"mm_token_type_ids", "token_type_ids"} & set(arguments):
        media[name] = torch.from_numpy(mm_token_type_ids(spans, length))[None].to(model.device)
    if unknown := sorted(media.keys() - set(arguments)):
        raise EngineUnsupportedError(
            f"{type(model).__name__} does not take what the items hold",
            where="multi_modal_data",
            expected=f"some of {', '.join(sorted(arguments))}",
            got=", ".join(unknown),
        )
    return media


@contextmanager
def _stray_pads(model: Any, ids: Any, sidecars: Sequence[MultiModalData]) -> Iterator[None]:
    """Let pad tokens without an image, which a model may sample, be ordinary tokens of prompts `(rows, n)`.

    Transformers takes every pad token for an image's. So such a token is given to the model under another id,
    and the embedding that this looks up is replaced by the pad's own.
    """
    import torch

    pads: set[Any] = {getattr(model.config, name, None) for name in _PAD_SETTINGS} - {None}
    stray = torch.isin(ids, torch.tensor(list(pads), device=ids.device))
    for row, data in enumerate(sidecars):
        for place in itertools.chain(*data.mm_placeholders.values()):
            embeds = torch.from_numpy(place.is_embed).to(ids.device)
            stray[row, place.offset : place.offset + place.length] &= ~embeds
    if not bool(stray.any()):
        yield
        return
    meant = ids[stray]
    ids[stray] = next(token for token in itertools.count() if token not in pads)
    embedding = model.get_input_embeddings()

    def embed_as_meant(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if inputs[0].shape == ids.shape:
            output = output.clone()
            output[stray] = embedding.weight[meant].to(output.dtype)
        return output

    handle = embedding.register_forward_hook(embed_as_meant)
    try:
        yield
    finally:
        handle.remove()
