"""Many completions of a Transformers model at once: each prompt prefilled once, all decoded in one forward.

Prompts that share a prefill have one length and images of one size, so it needs no padding, and the model's
own code numbers the positions. A prompt that arrives joins the decoded sequences at their next step: shorter
caches are padded on the left, with attention masked there, and each sequence keeps its positions. So a
completion depends on its companions only by the rounding of larger matrix products: logits differ by some
1e-6, and tokens only if a draw is that close to a tie. If a model's cache or arguments cannot be padded,
sequences of different prefills run apart, and a warning says why.
"""

import asyncio
import copy
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mmrender.caching import cached_property
from mmrender.client.model_arguments import media_arguments, stray_pads
from mmrender.client.token_sampler import TokenSampler
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.sidecar import MultiModalData
from mmrender.trajectory.engine_data import WeightVersionSpan

_PER_SEQUENCE: Final = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Tensors that `generate` carries along besides the cache, of shape `(..., sequences, tokens)`."""
_JOINED_LAYERS: Final = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
"""Layers of a cache with states without a length, or with keys and values of the last tokens."""


class Completion:
    """One completion in progress, and the call that awaits its response on an event loop.

    Attributes:
        request: The request.
        response: The response.
        stopped: Set to end it before its next token.
        sampler: Chooses and keeps its tokens; set by `begin`.
        room: Maximum number of tokens; set by `begin`.
        versions: Name of the weights that sampled each token.
    """

    sampler: TokenSampler
    room: int

    def __init__(
        self, request: EngineRequest, loop: asyncio.AbstractEventLoop, on_tokens: OnTokens | None
    ) -> None:
        self.request = request
        self.response: asyncio.Future[EngineResponse] = loop.create_future()
        self.stopped = threading.Event()
        self.versions: list[str] = []
        self._loop, self._on_tokens = loop, on_tokens

    def begin(self, sampler: TokenSampler, room: int) -> None:
        """Set the sampler and the maximum number of tokens."""
        self.sampler, self.room = sampler, room

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None before its end."""
        if self.sampler.has_ended:
            return "stop"
        if len(self.sampler.tokens) >= self.room:
            return "length"
        return "abort" if self.stopped.is_set() else None

    def sample(self, logits: Any, version: str) -> bool:
        """Sample one token with weights of this name, and return whether another one follows."""
        if self.finish_reason is None:
            try:
                self.sampler.sample(logits)
            except Exception as error:  # noqa: BLE001 - other completions go on
                self.fail(error)
                return False
            self.versions.append(version)
            self._tell(self.sampler.tokens[-1:], self.sampler.logprobs[-1:], None)
        if self.finish_reason is not None:
            self.succeed()
            return False
        return True

    def succeed(self) -> None:
        """Answer the caller."""
        self._tell([], [], self.finish_reason)
        self._call(self._settle, self.response.set_result, self._response())

    def fail(self, error: BaseException) -> None:
        """Raise an error in the caller, unless it has been answered."""
        self._call(self._settle, self.response.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if not self.response.done():
            settle(outcome)

    def _tell(self, *sampled: Any) -> None:
        if self._on_tokens is not None:
            self._call(self._on_tokens, *sampled)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed, so the caller is gone
            self.stopped.set()

    def _response(self) -> EngineResponse:
        sampler, tokens = self.sampler, self.sampler.tokens
        spans: list[WeightVersionSpan] = []
        for version, sampled in itertools.groupby(self.versions):
            start = spans[-1].stop if spans else 0
            spans.append(WeightVersionSpan(version, start, start + len(list(sampled))))
        # As vLLM: None for the model's own end of turn.
        named = set(tokens[-1:]).intersection(self.request.sampling_params.get("stop_token_ids") or ())
        return EngineResponse(
            completion_ids=tokens,
            logprobs=sampler.logprobs,
            finish_reason=self.finish_reason or "abort",
            usage=Usage(len(self.request.prompt_ids), len(tokens), 0),
            stop_reason=next(iter(named), None),
            allowed=sampler.allowed,
            weight_versions=tuple(spans),
            request_id=self.request.request_id,
            top_logprobs=tuple(sampler.top) or None,
        )


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A prompt, the model's arguments for its media, and its completions."""

    ids: list[int]
    data: MultiModalData
    media: dict[str, Any]
    completions: list[Completion] = field(default_factory=list)

    @property
    def form(self) -> tuple[Any, ...]:
        """Length and sizes, equal for all prompts of one forward."""
        sizes = sorted((name, tuple(tensor.shape)) for name, tensor in self.media.items())
        return len(self.ids), self.options, *sizes

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The model's arguments besides tensors."""
        return (("use_audio_in_video", True),) if self.data.num_tracks else ()


def decode(
    model: Any,
    arrivals: Callable[[int], Sequence[Completion]],
    version: Callable[[], str],
    *,
    max_batch_size: int,
) -> None:
    """Sample completions to their ends, where each answers its caller.

    Args:
        model: A Transformers model that returns logits.
        arrivals: Called before each step with the number of further completions that may run. Returns new
            ones, whose requests are checked.
        version: Called before each forward, for the name of the weights.
        max_batch_size: Maximum number of completions that run at once.
    """
    import torch
    from transformers import GenerationConfig

    # The model's own generation config may set penalties and the like.
    plain = copy.copy(model)
    plain.generation_config = GenerationConfig(pad_token_id=0)
    running: list[_Rows] = []
    with torch.inference_mode():
        while True:
            room = max_batch_size - sum(len(rows.live) for rows in running)
            begun = [_Rows.prefilled(plain, group, version) for group in _groups(model, arrivals(room))]
            running = _joined([*running, *(rows for rows in begun if rows is not None and rows.live)])
            if not running:
                return
            for rows in running:
                rows.step(version)
            running = [rows for rows in running if rows.live]


def _groups(model: Any, completions: Sequence[Completion]) -> list[list[_Prompt]]:
    """Return the distinct prompts of completions, grouped by the prefill that they can share."""
    prompts: dict[Any, _Prompt] = {}
    for completion in completions:
        if completion.finish_reason is not None:
            completion.succeed()
            continue
        ids, data = list(completion.request.prompt_ids), completion.request.multi_modal_data
        items = tuple((span.item.identity, span.modality, span.start) for span in data.spans(len(ids)))
        key = tuple(ids), items
        if key not in prompts:
            try:
                prompts[key] = _Prompt(ids, data, media_arguments(model, data, len(ids)))
            except Exception as error:  # noqa: BLE001 - other completions go on
                completion.fail(error)
                continue
        prompts[key].completions.append(completion)
    groups: dict[Any, list[_Prompt]] = {}
    for prompt in prompts.values():
        groups.setdefault(prompt.form, []).append(prompt)
    return list(groups.values())


@dataclass(eq=False)
class _Rows:
    """Sequences that share the forwards of their decoding.

    Attributes:
        model: The model, with a plain generation config.
        live: The completion of each sequence.
        ids: Their tokens after padding, of shape `(rows, width)`. The last ones are not in the cache.
        carried: The cache and the tensors of `_PER_SEQUENCE`, which `generate` carries from step to step.
    """

    model: Any
    live: list[Completion]
    ids: Any
    carried: dict[str, Any]

    @classmethod
    def prefilled(cls, model: Any, prompts: Sequence[_Prompt], version: Callable[[], str]) -> "_Rows | None":
        """Run prompts of one form, and sample the first tokens. Return None if the model fails."""
        import torch

        begun: list[_Rows] = []
        live = [(row, each) for row, prompt in enumerate(prompts) for each in prompt.completions]

        def begin(_: Any, input_ids: Any, **carried: Any) -> Any:
            """Replace the loop of `generate`, which has prepared its arguments."""
            for name in ("logits_processor", "stopping_criteria", "generation_config"):
                carried.pop(name, None)
            begun.append(cls(model, [], input_ids, carried))
            weights = version()
            inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **carried)
            begun[0]._forward(inputs, live, weights)
            return input_ids

        ids = torch.tensor([prompt.ids for prompt in prompts], device=model.device)
        try:
            media = {name: torch.cat([one.media[name] for one in prompts]) for name in prompts[0].media}
            with stray_pads(model, ids, [prompt.data for prompt in prompts]):
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(each.room for _, each in live),
                    custom_generate=begin,
                    **media,
                    **dict(prompts[0].options),
                )
        except Exception as error:  # noqa: BLE001 - other prompts go on
            for _, each in live:
                each.fail(error)
            return None
        return begun[0]

    def step(self, version: Callable[[], str]) -> None:
        """Sample the next token of each sequence, and drop ended ones, or all if the model fails."""
        try:
            weights = version()
            inputs = self.model.prepare_inputs_for_generation(
                self.ids, next_sequence_length=1, **self.carried
            )
            self._forward(inputs, list(enumerate(self.live)), weights)
        except Exception as error:  # noqa: BLE001 - other rows go on
            for each in self.live:
                each.fail(error)
            self.live = []

    def _forward(self, inputs: dict[str, Any], live: list[tuple[int, Completion]], weights: str) -> None:
        """Run the model, and sample for each completion from the row of its sequence."""
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
        """Keep the sequences of these rows, each as often as it is named."""
        self.ids = self.ids[rows]
        for name, value in self.carried.items():
            if hasattr(value, "reorder_cache"):
                value.reorder_cache(rows)
            elif name in _PER_SEQUENCE and value is not None:
                self.carried[name] = value.index_select(-2, rows)
        self._trim()

    def _trim(self) -> None:
        """Drop padding before the longest sequence, after a longer one has left."""
        mask = self.carried.get("attention_mask")
        cut = 0 if mask is None else int(mask.any(0).int().argmax())
        if not cut:
            return
        self.ids = self.ids[:, cut:]
        for name in _PER_SEQUENCE:
            if self.carried.get(name) is not None:
                self.carried[name] = self.carried[name][..., cut:]
        for layer in self.carried[self._cache].layers:
            length = _keys(layer)
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length -= cut
                cut_here = max(0, length - layer.cumulative_length)
            else:
                cut_here = cut if length else 0
            if cut_here:
                layer.keys, layer.values = layer.keys[..., cut_here:, :], layer.values[..., cut_here:, :]

    @property
    def _cache(self) -> str:
        """Name of the cache in `carried`. Transformers 5.24 renamed it."""
        return "cache" if "cache" in self.carried else "past_key_values"

    @property
    def width(self) -> int:
        """Number of tokens of the longest sequence."""
        return int(self.ids.shape[1])

    @cached_property
    def form(self) -> Any:
        """Key of sequences that are decoded together."""
        if reason := self._apart():
            message = f"{type(self.model).__name__}: sequences of other prompts run apart - got {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return id(self)
        layers = tuple(type(layer).__name__ for layer in self.carried[self._cache].layers)
        return layers, self.carried["position_ids"].shape[:-2]

    def _apart(self) -> str:
        """Return why these sequences cannot be joined with others, or an empty text."""
        cache: Any = self.carried.get(self._cache)
        if self.carried.get("position_ids") is None:
            return "positions that are numbered from the cache"
        if type(cache).__name__ != "DynamicCache":
            return f"a cache of class {type(cache).__name__}"
        if unknown := {type(layer).__name__ for layer in cache.layers} - _JOINED_LAYERS:
            return f"a cache with a {min(unknown)}"
        whole = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)]
        if {*map(_keys, whole)} - {0, self.width - 1}:
            return "a cache of another length than the tokens"
        named = {name for name, value in self.carried.items() if hasattr(value, "shape")} - {*_PER_SEQUENCE}
        return f"{min(named)}, which `generate` carries along" if named else ""


def _keys(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return 0 if keys is None else int(keys.shape[-2])


def _joined(running: Sequence[_Rows]) -> list[_Rows]:
    """Join the rows of each form, with the shorter ones padded on the left."""
    forms: dict[Any, list[_Rows]] = {}
    for rows in running if len(running) > 1 else ():
        forms.setdefault(rows.form, []).append(rows)
    return [group[0] if len(group) == 1 else _as_one(group) for group in forms.values()] or [*running]


def _as_one(group: Sequence[_Rows]) -> _Rows:
    import torch

    width = max(rows.width for rows in group)
    carried = dict(group[0].carried)
    for name in _PER_SEQUENCE:
        values = [rows.carried.get(name) for rows in group]
        is_mask = name == "attention_mask"
        is_padded = len({rows.width for rows in group}) > 1
        if all(value is None for value in values) and not (is_mask and is_padded):
            continue
        # Without a mask all tokens are attended to, and without token types all are text.
        fill = torch.ones_like if is_mask else torch.zeros_like
        full = [fill(rows.ids) if each is None else each for each, rows in zip(values, group, strict=True)]
        carried[name] = torch.cat([_padded(each, width, -1) for each in full], -2)
    caches = [rows.carried[rows._cache] for rows in group]
    carried[group[0]._cache] = joined = copy.copy(caches[0])
    joined.layers = [_as_one_layer(layers) for layers in zip(*(one.layers for one in caches), strict=True)]
    ids = torch.cat([_padded(rows.ids, width, -1) for rows in group])
    return _Rows(group[0].model, [each for rows in group for each in rows.live], ids, carried)


def _as_one_layer(layers: Sequence[Any]) -> Any:
    """Join layers of several caches to one with all sequences."""
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
    """Pad a tensor with zeros before one of its last two dimensions, up to a width."""
    import torch

    missing = width - value.shape[dim]
    return torch.nn.functional.pad(value, (missing, 0) if dim == -1 else (0, 0, missing, 0))
