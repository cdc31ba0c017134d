"""Packed rows through Transformers' own path of flash attention, with its kernels written in plain torch.

The kernels need a GPU. In their place, functions with their signatures compute each sequence by itself, between
the bounds that they get, so a batch's bounds, lengths and dtypes are those that the kernels would see.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from mmrender.training import collate
from training_models import PAD_ID, TinyFamily, make_samples, tiny_family

NAME = "kernels_in_torch"
ROWS = [[3, 1, 0], [2, 4]]


def attention(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> Any:
    """`flash_attn_func`: `(batch, length, heads, size)` each, with fewer heads for keys and values."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    softmax_scale: Any = None,
    causal: bool = False,
) -> Any:
    """`flash_attn_varlen_func`: `(tokens, heads, size)` each, sequence after sequence."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == len(q)
    assert min(lengths) > 0
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    parts = zip(*(one.split(lengths) for one in (q, k, v)), strict=True)
    return torch.cat([attention(*(one[None] for one in part), softmax_scale, causal)[0] for part in parts])


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    monkeypatch.setattr(flash, "_loaded_implementation", NAME)
    kernels = {"_flash_fn": attention, "_flash_varlen_fn": varlen_attention}
    kernels["_process_flash_kwargs_fn"] = flash._lazy_define_process_function(varlen_attention)
    for name, function in kernels.items():
        monkeypatch.setattr(flash, name, function)


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TinyFamily]:
    one = tiny_family(request.param, tmp_path)
    yield one
    one.model.set_attn_implementation("eager")


def logits_of(tiny: TinyFamily, implementation: str, inputs: dict[str, Any]) -> Any:
    tiny.model.set_attn_implementation(implementation)
    with torch.no_grad():
        return tiny.model(**inputs).logits


@pytest.mark.parametrize(
    "tiny", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl", "idefics3"], indirect=True
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_bounds_keep_packed_samples_apart(tiny: TinyFamily, side: Any) -> None:
    samples = make_samples(tiny, (1, 0, 2, 3, 0))
    batch = collate(samples, tiny.family, pad_token_id=PAD_ID, rows=ROWS, padding_side=side, multiple=8)
    expected = batch.split(logits_of(tiny, "sdpa", batch.model_inputs()))
    found = batch.split(logits_of(tiny, NAME, batch.model_inputs(flash_attention=True)))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("tiny", ["qwen2_vl", "internvl"], indirect=True)
def test_without_bounds_several_rows_would_mix_their_samples(tiny: TinyFamily) -> None:
    """The reason for the argument: this fails once Transformers reads the bounds of several rows itself."""
    samples = make_samples(tiny, (1, 0, 2, 3, 0))
    batch = collate(samples, tiny.family, pad_token_id=PAD_ID, rows=ROWS)
    expected = batch.split(logits_of(tiny, "sdpa", batch.model_inputs()))
    mixed = batch.split(logits_of(tiny, NAME, batch.model_inputs()))
    assert float((mixed[1] - expected[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("tiny", ["qwen2_vl"], indirect=True)
def test_padded_rows_take_their_mask(tiny: TinyFamily) -> None:
    samples = make_samples(tiny, (1, 0))
    batch = collate(samples, tiny.family, pad_token_id=PAD_ID)
    assert batch.model_inputs(flash_attention=True).keys() == batch.model_inputs().keys()
