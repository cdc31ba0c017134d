"""Training on a GPU: batches, scores and losses equal those of single forwards there, and those of the CPU.

Skipped without CUDA. In float32 without TF32, which rounds products to ten bits.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_item
from torch.utils.data import DataLoader

import mmcodecs
from mmrender import TrainingSample
from mmrender.audit import TrainerModel, audit
from mmrender.sidecar import MultiModalData
from mmrender.training import (
    ModelFamily,
    TrainingBatch,
    collate,
    importance_weights,
    recurrent_segments,
    score_tokens,
    scoring,
    token_entropy,
    token_logprobs,
)
from mmrender.training.losses import dpo_loss, dr_grpo_loss, gspo_loss, step_counts
from mmrender.training.scoring import OutputHead, Scoring
from mmrender.trajectory import AllowedTokens
from training_models import (
    FAMILIES,
    PAD_ID,
    VOCABULARY,
    TinyFamily,
    make_samples,
    tiny_family,
    video_sample,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch finds no CUDA")
LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {},
    "left": {"padding_side": "left", "multiple": 8},
    "packed": {"rows": [[3, 1, 0], [2, 4]], "multiple": 8},
}
COUNTS = (1, 0, 2, 3, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


def on_gpu(tiny: TinyFamily, dtype: Any = torch.float32) -> Any:
    """A copy of the model, with the attention that Transformers chooses by itself."""
    model = deepcopy(tiny.model).to("cuda", dtype)
    model.set_attn_implementation("sdpa")
    return model


def samples_of(tiny: TinyFamily) -> list[Any]:
    """Samples with advantages, one of them sampled under a constraint."""
    samples = []
    for number, one in enumerate(make_samples(tiny, COUNTS, seed=5)):
        advantages = np.full(len(one), 0.5 - number, np.float32)
        samples.append(replace(one, advantages=advantages))
    last = samples[2]
    listed = tuple(sorted({int(last.token_ids[-1]), 7, 9}))
    samples[2] = replace(last, allowed=(AllowedTokens(len(last) - 1, len(last), listed),))
    return samples


def whole_loss(model: Any, batch: TrainingBatch) -> Any:
    with recurrent_segments(model, batch):
        scores = score_tokens(model, batch, temperature=0.9, entropy=True, tile=(16, 32))
    loss = gspo_loss(scores.logprobs, batch, samples=len(COUNTS), low=0.5, high=0.5)
    return loss - 0.01 * scores.entropy.sum()


def results(model: Any, batches: list[TrainingBatch]) -> dict[str, Any]:
    """The loss and all gradients, on the CPU."""
    model.zero_grad(set_to_none=True)
    loss: Any = sum(whole_loss(model, batch) for batch in batches)
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one.detach().float().cpu() for name, one in {"loss": loss, **gradients}.items()}


def assert_close(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    # Some gradients are zero but for rounding, such as a bias of keys under softmax.
    floor = 1e-3 * max(float(one.abs().max()) for one in expected.values())
    for name, one in expected.items():
        error = float((got[name] - one).abs().max()) / max(floor, float(one.abs().max()))
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_equal_single_forwards(name: str, folder: Path) -> None:
    """Logits, losses and gradients, of batches that are moved and of batches that are expanded on the GPU."""
    tiny = tiny_family(name, folder)
    model, samples = on_gpu(tiny), samples_of(tiny)
    build = partial(collate, family=tiny.family, pad_token_id=PAD_ID)
    singles = [build([one]).to("cuda") for one in samples]
    expected = results(model, singles)
    with torch.no_grad():
        alone = [model(**single.model_inputs()).logits[0] for single in singles]
    assert_close(results(deepcopy(tiny.model), [build(samples)]), expected, 1e-3)
    for options in LAYOUTS.values():
        moved = build(samples, **options).to("cuda", non_blocking=True)
        expanded = build(samples, device="cuda", **options)
        for key, images in moved.fields.items():
            assert torch.equal(images.values, expanded.fields[key].values), key
        with torch.no_grad(), recurrent_segments(model, moved):
            logits = moved.split(model(**moved.model_inputs()).logits)
        for sample, one in zip(samples, alone, strict=True):
            found = logits[moved.sample_ids.index(sample.sample_id)]
            torch.testing.assert_close(found, one, atol=5e-5, rtol=0)
        assert_close(results(model, [expanded]), expected, 1e-4)


def test_seconds_of_videos_of_other_classes_number_positions(folder: Path) -> None:
    tiny = tiny_family("qwen2_5_vl", folder)
    sample = video_sample(tiny, 2)
    video = replace_item(sample.media_spans[0].item, second_per_grid=1.5)

    class Foreign:
        modality, identity, size, grid = "video", "f" * 64, video.size, video.grid
        nbytes, expansion = video.nbytes, video.expansion

        def tensors(self, dtype: Any = "float32", *, framework: Any = "numpy") -> dict[str, Any]:
            return dict(video.tensors(dtype, framework=framework))

    items = [Foreign(), *(span.item for span in sample.media_spans[1:])]
    entries = zip((span.range for span in sample.media_spans), items, strict=True)
    sample = replace(sample, multi_modal_data=MultiModalData.of(entries))
    batches = [collate([sample], tiny.family, pad_token_id=PAD_ID, device=one) for one in (None, "cuda")]
    assert torch.equal(batches[1].positions.cpu(), batches[0].positions)
    assert batches[1].fields["second_per_grid_ts"].values.tolist() == [1.5]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl"])
def test_bfloat16_packed_is_as_near_as_padded(name: str, folder: Path) -> None:
    tiny = tiny_family(name, folder)
    samples, model = samples_of(tiny), on_gpu(tiny, torch.bfloat16)
    exact = on_gpu(tiny)
    errors = []
    for options in ({}, LAYOUTS["packed"]):
        batch = collate(samples, tiny.family, pad_token_id=PAD_ID, device="cuda", **options)
        low = batch.to(dtype=torch.bfloat16)
        with torch.no_grad():
            expected = token_logprobs(exact(**batch.model_inputs()).logits, batch)
            got = score_tokens(model, low, tokens="all").logprobs
        errors.append(float((got - expected)[batch.attention_mask].abs().mean()))
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_equal_those_of_logits(dtype: Any, folder: Path) -> None:
    tiny = tiny_family("qwen2_vl", folder)
    model = on_gpu(tiny, dtype)
    batch = collate(samples_of(tiny), tiny.family, pad_token_id=PAD_ID, dtype=dtype, device="cuda")
    temperature = torch.linspace(0.5, 2.0, batch.input_ids.numel()).view(batch.input_ids.shape)
    logits = model(**batch.model_inputs()).logits
    found = score_tokens(model, batch, temperature=temperature, entropy=True, tile=(3, 32))
    logprobs = token_logprobs(logits, batch, temperature=temperature)
    plain = torch.where(batch.loss_mask, logprobs, 0.0), token_entropy(logits, batch, temperature=temperature)
    assert logits.shape[-1] == VOCABULARY
    tolerance = 5e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[:2], plain, atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_large_tiles_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients equal those from all logits, summed in float64."""
    dtype = torch.bfloat16
    monkeypatch.setattr(scoring, "_failures", [])
    count, vocabulary, generator = 700, 40_000, torch.Generator("cuda").manual_seed(0)
    options: Any = {"device": "cuda", "generator": generator}
    weight = (torch.randn(vocabulary, 64, **options) / 8).to(dtype).requires_grad_()
    hidden = torch.randn(1, count, 64, **options).to(dtype).requires_grad_()
    ids = np.random.default_rng(0).integers(0, vocabulary, count).astype(np.int32)
    mask = np.arange(count) > 0
    listed = tuple(sorted({*range(0, vocabulary, 3), int(ids[9])}))
    allowed = (AllowedTokens(9, 10, listed),)
    sample = TrainingSample(ids, mask, np.zeros(count, np.float32), allowed=allowed)
    batch = collate([sample], ModelFamily(model_type="text"), pad_token_id=0, device="cuda")
    found = Scoring(batch.predictions(), 0.8, entropy=True).of(hidden, OutputHead(weight))
    logits = torch.nn.functional.linear(hidden[0, :-1], weight).double() / 0.8
    closed = torch.ones(vocabulary, dtype=torch.bool, device="cuda")
    closed[list(listed)] = False
    logprobs = logits.masked_fill(closed & (torch.arange(1, count, device="cuda") == 9)[:, None], -1e30)
    logprobs = logprobs.log_softmax(-1)
    plain = logprobs.gather(-1, batch.input_ids[0, 1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    assert not scoring._failures
    gradients = [torch.autograd.grad(sum(both).mean(), [hidden, weight]) for both in (found[:2], plain)]
    assert not scoring._failures
    for mine, exact in zip(found[:2], plain, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=2e-5, rtol=1e-6)
    for mine, exact in zip(*gradients, strict=True):
        largest = float(exact.abs().max())
        torch.testing.assert_close(mine, exact, atol=2e-2 * largest, rtol=0)


def test_losses_equal_those_of_the_cpu(folder: Path) -> None:
    tiny = tiny_family("internvl", folder)
    batch = collate(samples_of(tiny), tiny.family, pad_token_id=PAD_ID, rows=[[0, 1, 2], [3, 4]])
    generator = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(batch.input_ids.shape, generator=generator)
    losses = []
    for one in (batch, batch.to("cuda")):
        logprobs = torch.where(one.loss_mask, one.logprobs + noise.to(one.input_ids.device), 0.0)
        logprobs.requires_grad_()
        counts = step_counts(one.micro_batches(max_tokens=one.width))
        weights = importance_weights(logprobs, one)
        loss = dr_grpo_loss(logprobs, one, samples=counts.samples, max_tokens=8, weights=weights)
        loss = loss + gspo_loss(logprobs, one, samples=counts.samples)
        loss = loss + dpo_loss(logprobs, one.logprobs, one, [("s1", "s4")], pairs=1)
        losses.append([loss.detach().cpu(), torch.autograd.grad(loss, logprobs)[0].cpu()])
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_leave_the_gpu_alone(folder: Path) -> None:
    """CUDA is in use in this process, so a worker that was forked from it cannot have page-locked memory."""
    tiny = tiny_family("qwen2_vl", folder)
    samples = samples_of(tiny)
    build = partial(collate, family=tiny.family, pad_token_id=PAD_ID)
    expected = build(samples[:2]).to("cuda", non_blocking=True)
    (batch,) = DataLoader(samples[:2], batch_size=2, num_workers=1, collate_fn=build, pin_memory=True)
    assert batch.input_ids.is_pinned()
    moved = batch.to("cuda", non_blocking=True)
    assert torch.equal(moved.fields["pixel_values"].values, expected.fields["pixel_values"].values)
    sent = mmcodecs.decode(mmcodecs.encode(moved), framework="torch", type=TrainingBatch)
    assert torch.equal(sent.input_ids, batch.input_ids)
    assert torch.equal(sent.fields["pixel_values"].values, batch.fields["pixel_values"].values)


def test_an_audit_names_causes_of_a_model_on_the_gpu(folder: Path) -> None:
    tiny = tiny_family("qwen2_vl", folder)
    model = on_gpu(tiny)
    sample = make_samples(tiny, (1,), seed=2)[0]
    mask = np.arange(len(sample)) >= len(sample) - 9
    mask[: sample.media_spans[-1].stop + 1] = False
    sample = replace(sample, loss_mask=mask)
    batch = collate([sample], tiny.family, pad_token_id=PAD_ID)
    with torch.no_grad():
        logits = tiny.model(**batch.model_inputs()).logits
    for temperature, ok in ((1.0, True), (0.6, False)):
        logprobs = token_logprobs(logits, batch, temperature=temperature)[0].numpy()
        sampled = replace(sample, logprobs=np.where(mask, logprobs, 0).astype(np.float32))
        report = audit([sampled], TrainerModel(model))
        assert report.ok == ok, report.text()
        assert [finding.cause for finding in report.findings] == ([] if ok else ["temperature"])
