"""The output head of a Transformers model, and the hidden states before it, without logits.

The head's `forward` is replaced for one forward of the model. So tokens are scored at the place of the
logits, where FSDP has gathered the head's weights, and their gradients are reduced as ever. Gemma caps its
logits, and Cohere and Granite scale them. This is observed once for a model: it runs with chosen numbers in
place of the head's output.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from sys import modules
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from mmrender.errors import BatchError
from mmrender.training.predictions import BatchRows, Tokens
from mmrender.training.scoring import HiddenStates, OutputHead, Scoring, TokenScores, check_whole, flat
from mmrender.training.tensor_list import torch

_SMALL: Final = 2.0**-12
_LARGE: Final = 2.0**14
_TOLERANCE: Final = 1e-5
"""Relative difference within which a model's logits agree with a scale and a cap."""
_taps: "WeakKeyDictionary[Any, dict[bool, _Tap]]" = WeakKeyDictionary()
_changes: "WeakKeyDictionary[Any, tuple[float, float | None]]" = WeakKeyDictionary()
"""Scale and cap of the logits of each model that was observed."""


def score_tokens(
    model: Any,
    rows: BatchRows,
    *,
    tokens: Tokens = "trained",
    inputs: Mapping[str, Any] | None = None,
    temperature: Any = 1.0,
    entropy: bool = False,
    reference: HiddenStates | None = None,
    dtype: Any = None,
    tile: tuple[int, int] | None = None,
) -> TokenScores:
    """Run a model on a batch and return log-probabilities of its tokens, without ever holding all logits.

    If a token was sampled under a constraint, over the tokens that the constraint allowed. All values and
    gradients equal `token_logprobs(model(**batch.model_inputs()).logits, batch)`.

    Args:
        model: A Transformers model with an output head, also wrapped by FSDP2, DDP, PEFT or `torch.compile`.
        rows: The batch, or a shard of it, for a model whose forward the trainer's hooks split.
        tokens: The tokens to score: `"trained"` of the loss mask, `"all"` also of prompts, or a mask of
            the whole batch, bool `(rows, width)`.
        inputs: Keyword arguments of the forward. None for `rows.model_inputs()`.
        temperature: The sampler's, if its log-probabilities are of the distribution it sampled from. A
            number, or a tensor aligned to the batch's tokens.
        entropy: Whether to return entropies.
        reference: `hidden_states` of another model before the same tokens, to return the divergence from it.
        dtype: Dtype in which logits are computed, such as float32 for a model in bfloat16, since rounded
            logits make sampler and trainer differ (MiniMax, "MiniMax-M1", 2025, section 3.2). None computes
            as the model does.
        tile: Number of tokens and of ids whose logits are held at a time. None decides by the device.

    Returns:
        Scores aligned to the tokens, float32 `(rows, width)`, 0.0 elsewhere.

    Raises:
        BatchError: The model's head is not a linear layer, is not called once, or its output is changed in a
            way that is neither a scale nor a cap. Or the rows, the temperature or the reference are not
            aligned.
    """
    predictions = rows.predictions(tokens)
    scoring = Scoring(predictions, temperature, entropy, reference, dtype, tile)
    scored: list[TokenScores] = []

    def score(hidden: Any, head: OutputHead) -> Any:
        scored.append(scoring.of(hidden, head))
        logprobs = scored[0].logprobs
        return torch.stack([logprobs if one is None else one for one in scored[0]], -1)

    carried = _run(model, rows, inputs, score)[0].unbind(-1)
    joined = (
        None if one is None else predictions.spread(_joined(one, output))
        for one, output in zip(scored[0], carried, strict=True)
    )
    return TokenScores(*joined)


def hidden_states(
    model: Any, rows: BatchRows, *, tokens: Tokens = "trained", inputs: Mapping[str, Any] | None = None
) -> HiddenStates:
    """Run a model on a batch and return the hidden states before the output head, without logits.

    Arguments and errors as for `score_tokens`. Weights of the head that are sharded and need a gradient are
    refused, too. The result has values `(n, hidden)`, one for each token, and the head that makes logits of
    them.
    """
    predictions = rows.predictions(tokens)
    kept: list[tuple[Any, OutputHead]] = []

    def keep(hidden: Any, head: OutputHead) -> Any:
        kept.append((flat(hidden).index_select(0, predictions.sources.to(hidden.device)), head))
        return kept[0][0].sum(-1, keepdim=True)

    output = _run(model, rows, inputs, keep)[0]
    values, head = kept[0]
    module = _output_module(model)
    if hasattr(module.weight, "full_tensor"):
        if torch.is_grad_enabled() and module.weight.requires_grad:
            check_whole(replace(head, weight=module.weight))
        bias = None if module.bias is None else module.bias.full_tensor()
        head = replace(head, weight=module.weight.full_tensor(), bias=bias)
    own = torch.arange(len(predictions), device=predictions.sources.device)
    return HiddenStates(_joined(values, output), head, replace(predictions, sources=own))


def _joined(values: Any, output: Any) -> Any:
    """Return values that depend on the model's output with a gradient of 0, which FSDP and DDP wait for."""
    always = torch.ones_like(output, dtype=torch.bool)
    return torch.where(always, values, output.to(values.dtype))


def _run(
    model: Any,
    rows: BatchRows,
    inputs: Mapping[str, Any] | None,
    compute: Callable[[Any, OutputHead], Any],
) -> Any:
    """Run a model with `compute` in place of its head, and return its output: `(1, n, values)`."""
    module = _output_module(model)
    inputs = rows.model_inputs() if inputs is None else inputs
    if model not in _changes:
        _changes[model] = _observe(model, module, inputs)
    scale, softcap = _changes[model]
    calls = 0

    def instead(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        rows.check_aligned(hidden)
        return compute(hidden, OutputHead(module.weight, module.bias, scale, softcap))[None]

    with _replaced(module, instead):
        logits = model(**inputs).logits
    if calls != 1:
        _refuse(model, "the output head is not called once in a forward", "one call", str(calls))
    return logits


class _Tap:
    """Calls a function in place of a head's forward.

    Attributes:
        forward: Always the same function, so that a compiled model is not compiled again. It is not traced.
    """

    def __init__(self) -> None:
        self.instead: list[Callable[[Any], Any]] = []
        self.forward: Callable[[Any], Any] = self._forward
        if "torch._dynamo" in modules:  # importing it takes seconds, and a compiled model has done so
            self.forward = torch.compiler.disable(self._forward)

    def _forward(self, hidden: Any) -> Any:
        return self.instead[-1](hidden)


@contextmanager
def _replaced(module: Any, instead: Callable[[Any], Any]) -> Iterator[None]:
    taps = _taps.setdefault(module, {})
    tap = taps.setdefault("torch._dynamo" in modules, _Tap())
    tap.instead.append(instead)
    module.forward = tap.forward
    try:
        yield
    finally:
        del module.forward
        tap.instead.pop()


def _output_module(model: Any) -> Any:
    """Return the output head of a model, also of a wrapped one."""
    while not hasattr(model, "get_output_embeddings") and hasattr(model, "module"):
        model = model.module
    module = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = torch.nn.Linear.forward
    if getattr(type(module), "forward", None) is not linear or "forward" in vars(module):
        got = type(module).__name__
        _refuse(model, "the output head is not a plain linear layer", "torch.nn.Linear", got)
    return module


def _observe(model: Any, module: Any, inputs: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return the scale and the cap that a model applies to its head's output."""
    probe = torch.empty(1, 3, module.out_features, dtype=torch.float32, device=module.weight.device)
    probe[0, 0] = 1024 * torch.linspace(-1, 1, probe.shape[-1], device=probe.device) ** 3
    probe[0, 1], probe[0, 2] = _SMALL, _LARGE
    with torch.no_grad(), _replaced(module, lambda hidden: probe.to(hidden.device, copy=True)):
        logits = model(**inputs).logits.to(probe.device)
    if logits.shape != probe.shape:
        expected, got = str([*probe.shape]), str([*logits.shape])
        _refuse(model, "the model changes the shape of its output head's result", expected, got)
    if logits.dtype != torch.float32:
        if torch.equal(logits, probe.to(logits.dtype)):
            return 1.0, None
        _refuse(model, "the model rounds changed logits", "torch.float32", str(logits.dtype))
    scale, bound = float(logits[0, 1, 0]) / _SMALL, float(logits[0, 2, 0])
    if abs(scale - 1.0) < _TOLERANCE / 10:
        scale = 1.0
    softcap = None if abs(bound - scale * _LARGE) <= _TOLERANCE * abs(scale * _LARGE) else bound
    if isfinite(scale) and isfinite(bound) and scale > 0 and bound > 0:
        expected = probe * scale
        if softcap is not None:
            expected = softcap * (expected / softcap).tanh()
        if torch.allclose(logits, expected, rtol=_TOLERANCE, atol=_TOLERANCE * _SMALL * scale):
            return scale, softcap
    problem = "the model changes its logits in a way that is neither a scale nor a cap"
    _refuse(model, problem, "a * logits, or c * tanh(a * logits / c)", None)


def _refuse(model: Any, problem: str, expected: str, got: str | None) -> NoReturn:
    remedy = "Use `token_logprobs` with the model's logits"
    raise BatchError(problem, where=type(model).__name__, expected=expected, got=got, remedy=remedy)
