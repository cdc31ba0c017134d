"""Many completions of a Transformers model at once: each prompt prefilled once, all decoded in one forward.

Prompts that share a prefill have one length and images of one size, so nothing in it is padded, and the
model's own code numbers the positions. A prompt that arrives joins the sequences that are decoded, at their
next step: shorter caches are padded on the left, where nothing attends, and each sequence keeps its
positions. So a completion depends on its companions by no more than the rounding of larger matrix products:
logits differ by some 1e-6, and tokens only where a draw falls within that of a tie. Sequences of a model
whose cache or arguments cannot be padded run with those of their own prefill; a warning says why.
"""

import copy
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mmrender.caching import cached_property
from mmrender.client.token_sampler import TokenSampler
from mmrender.client.types import EngineRequest, FinishReason, OnTokens
from mmrender.errors import EngineUnsupportedError
from mmrender.sidecar import MultiModalData, mm_token_type_ids

_PAD_SETTINGS: Final = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
_PER_SEQUENCE: Final = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""What `generate` carries along besides the cache: `(..., sequences, tokens)`."""
_JOINED_LAYERS: Final = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
"""Layers of a cache that hold states without a length, or keys and values of the last tokens."""


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


def decode(
    model: Any, arrivals: Callable[[int], Sequence[Completion]], version: Callable[[], str], *, most: int
) -> None:
    """Sample completions to their ends; each one's `done` is called when it has ended.

    Args:
        model: A Transformers model that gives logits.
        arrivals: Called before each step with the number of completions that there is room for; returns those
            that begin. Their requests are checked.
        version: Called before each forward, for the name of the weights.
        most: Completions that run at once.
    """
    import torch
    from transformers import GenerationConfig

    # The model's own generation config may set penalties and the like.
    plain = copy.copy(model)
    plain.generation_config = GenerationConfig(pad_token_id=0)
    running: list[_Rows] = []
    with torch.inference_mode():
        while True:
            room = most - sum(len(rows.live) for rows in running)
            begun = [_Rows.prefilled(plain, group, version) for group in _alike(model, arrivals(room))]
            running = _joined([*running, *(rows for rows in begun if rows is not None and rows.live)])
            if not running:
                return
            for rows in running:
                rows.step(version)
            running = [rows for rows in running if rows.live]


def _alike(model: Any, completions: Sequence[Completion]) -> list[list[_Prompt]]:
    """Return the distinct prompts of completions, those together that can share a prefill."""
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
    return list(alike.values())


@dataclass(eq=False)
class _Rows:
    """Sequences that share the forwards of their decoding.

    Attributes:
        model: The model, with a plain generation config.
        live: The completion of each sequence.
        ids: Their tokens, those of padding before them: `(rows, width)`. The last are not in the cache.
        carried: What `generate` carries from step to step: the cache, and tensors of `_PER_SEQUENCE`.
    """

    model: Any
    live: list[Completion]
    ids: Any
    carried: dict[str, Any]

    @classmethod
    def prefilled(cls, model: Any, prompts: Sequence[_Prompt], version: Callable[[], str]) -> "_Rows | None":
        """Run prompts of one form, and sample the first token of each completion; None if the model fails."""
        import torch

        held: list[_Rows] = []
        live = [(row, each) for row, prompt in enumerate(prompts) for each in prompt.completions]

        def begin(_: Any, input_ids: Any, **carried: Any) -> Any:
            """Stand in for the loop of `generate`, which prepares its arguments."""
            for name in ("logits_processor", "stopping_criteria", "generation_config"):
                carried.pop(name, None)
            held.append(cls(model, [], input_ids, carried))
            weights = version()
            inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **carried)
            held[0]._forward(inputs, live, weights)
            return input_ids

        ids = torch.tensor([prompt.ids for prompt in prompts], device=model.device)
        try:
            media = {name: torch.cat([one.media[name] for one in prompts]) for name in prompts[0].media}
            with _stray_pads(model, ids, [prompt.data for prompt in prompts]):
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(each.room for _, each in live),
                    custom_generate=begin,
                    **media,
                )
        except Exception as error:  # noqa: BLE001 - other prompts go on
            for _, each in live:
                each.done(each, error)
            return None
        return held[0]

    def step(self, version: Callable[[], str]) -> None:
        """Sample the next token of each sequence, and drop those that have ended; if the model fails, all."""
        try:
            weights = version()
            inputs = self.model.prepare_inputs_for_generation(
                self.ids, next_sequence_length=1, **self.carried
            )
            self._forward(inputs, list(enumerate(self.live)), weights)
        except Exception as error:  # noqa: BLE001 - other rows go on
            for each in self.live:
                each.done(each, error)
            self.live = []

    def _forward(self, inputs: dict[str, Any], live: list[tuple[int, Completion]], weights: str) -> None:
        """Run the model, and sample for each completion after the row of its sequence."""
        import torch

        outputs = self.model(**inputs, return_dict=True)
        self.carried = self.model._update_model_kwargs_for_generation(outputs, self.carried)
        logits = outputs.logits[:, -1].float().cpu()
        live = [(row, each) for row, each in live if each.sample(logits[row], weights)]
        self.live = [each for _, each in live]
        if not live:
            return
        sampled = torch.tensor([[each.sampler.tokens[-1]] for each in self.live], device=self.ids.device)
        rows = torch.tensor([row for row, _ in live], device=self.ids.device)
        if rows.tolist() != list(range(len(self.ids))):
            self._select(rows)
        self.ids = torch.cat([self.ids, sampled], 1)

    def _select(self, rows: Any) -> None:
        """Keep some sequences, each as often as it is named."""
        self.ids = self.ids[rows]
        for name, value in self.carried.items():
            if hasattr(value, "reorder_cache"):
                value.reorder_cache(rows)
            elif name in _PER_SEQUENCE and value is not None:
                self.carried[name] = value.index_select(-2, rows)
        self._trim()

    def _trim(self) -> None:
        """Drop the padding before the longest sequence, after that of a longer one was dropped."""
        mask = self.carried.get("attention_mask")
        cut = 0 if mask is None else int(mask.any(0).int().argmax())
        if not cut:
            return
        self.ids = self.ids[:, cut:]
        for name in _PER_SEQUENCE:
            if self.carried.get(name) is not None:
                self.carried[name] = self.carried[name][..., cut:]
        for layer in self.carried["past_key_values"].layers:
            length = _keys(layer)
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length -= cut
                cut_here = max(0, length - layer.cumulative_length)
            else:
                cut_here = cut if length else 0
            if cut_here:
                layer.keys, layer.values = layer.keys[..., cut_here:, :], layer.values[..., cut_here:, :]

    def width(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return int(self.ids.shape[1])

    @cached_property
    def form(self) -> Any:
        """What sequences share that are decoded together."""
        if reason := self._apart():
            message = f"{type(self.model).__name__}: sequences of other prompts run apart - got {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return id(self)
        layers = tuple(type(layer).__name__ for layer in self.carried["past_key_values"].layers)
        return layers, self.carried["position_ids"].shape[:-2]

    def _apart(self) -> str:
        """Return why these sequences cannot be joined with others; empty if they can."""
        cache: Any = self.carried.get("past_key_values")
        if self.carried.get("position_ids") is None:
            return "positions that are numbered from the cache"
        if type(cache).__name__ != "DynamicCache":
            return f"a cache of class {type(cache).__name__}"
        if unknown := {type(layer).__name__ for layer in cache.layers} - _JOINED_LAYERS:
            return f"a cache with a {min(unknown)}"
        whole = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)]
        if {*map(_keys, whole)} - {0, self.width() - 1}:
            return "a cache of other sequences than the tokens"
        named = {name for name, value in self.carried.items() if hasattr(value, "shape")} - {*_PER_SEQUENCE}
        return f"{min(named)}, which `generate` carries along" if named else ""


def _keys(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return 0 if keys is None else int(keys.shape[-2])


def _joined(running: Sequence[_Rows]) -> list[_Rows]:
    """Return rows with those of one form joined: the shorter are padded on the left."""
    forms: dict[Any, list[_Rows]] = {}
    for rows in running if len(running) > 1 else ():
        forms.setdefault(rows.form, []).append(rows)
    return [group[0] if len(group) == 1 else _as_one(group) for group in forms.values()] or [*running]


def _as_one(group: Sequence[_Rows]) -> _Rows:
    import torch

    width = max(rows.ids.shape[1] for rows in group)
    carried = dict(group[0].carried)
    for name in _PER_SEQUENCE:
        values = [rows.carried.get(name) for rows in group]
        is_mask = name == "attention_mask"
        if all(value is None for value in values) and not (is_mask and len({*map(_Rows.width, group)}) > 1):
            continue
        # Without a mask all is attended to, and without types of tokens all is text.
        fill = torch.ones_like if is_mask else torch.zeros_like
        held = [fill(rows.ids) if one is None else one for one, rows in zip(values, group, strict=True)]
        carried[name] = torch.cat([_padded(one, width, -1) for one in held], -2)
    caches = [rows.carried["past_key_values"] for rows in group]
    carried["past_key_values"] = joined = copy.copy(caches[0])
    joined.layers = [_as_one_layer(layers) for layers in zip(*(one.layers for one in caches), strict=True)]
    ids = torch.cat([_padded(rows.ids, width, -1) for rows in group])
    return _Rows(group[0].model, [each for rows in group for each in rows.live], ids, carried)


def _as_one_layer(layers: Sequence[Any]) -> Any:
    """Return the layer of a cache that has the sequences of several."""
    import torch

    joined = copy.copy(layers[0])
    if width := max(map(_keys, layers)):
        for name in ("keys", "values"):
            setattr(joined, name, torch.cat([_padded(getattr(one, name), width, -2) for one in layers]))
    if hasattr(joined, "cumulative_length"):
        joined.cumulative_length = max(one.cumulative_length for one in layers)
    for name in ("conv_states", "recurrent_states"):
        if states := getattr(joined, name, None):
            parts = {key: [getattr(one, name)[key] for one in layers] for key in states}
            merged = {key: None if own[0] is None else torch.cat(own) for key, own in parts.items()}
            setattr(joined, name, merged)
    return joined


def _padded(value: Any, width: int, dim: int) -> Any:
    """Return a tensor with zeros before it along one of its last two dimensions, up to a width."""
    import torch

    missing = width - value.shape[dim]
    return torch.nn.functional.pad(value, (missing, 0) if dim == -1 else (0, 0, missing, 0))


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
