"""The code of verl's page under verl's own worker: each step samples with the weights and settings of now."""

import asyncio
import warnings

import pytest
import torch

from doc_pages import lay_out, stand_in
from mmrender.model.weights import load_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's imports of Ray
    from integrations.verl_server import batch_of, configured, page, trainer_logprobs, worker_of

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = (3, 4, 4)


@pytest.fixture
def model(tiny_model):
    return load_model(tiny_model, dtype="float32", device="cpu", purpose="a test")


def changed(model):
    """Move the weights, as a training step and its synchronisation do."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator) * parameter.abs().mean()


@pytest.mark.parametrize("name", ["docs/use-verl.md", "mmrender/integrations/verl.py"])
def test_each_step_samples_with_the_weights_of_now(name, tiny_model, model, renderer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    stand_in(monkeypatch, renderer)
    page(name)
    config = configured(tiny_model, temperature=0.7, top_p=0.9)
    worker, server, balancer = worker_of(config, model)
    logprobs = []
    for step in range(2):
        server.global_steps = step
        output = asyncio.run(worker.generate_sequences(batch_of("find_cell", SEEDS, step=step)))
        mask = output.batch["response_mask"].bool()
        assert (mask.sum(-1) == 6 * server.length).all()  # all turns of the game
        reported = output.batch["rollout_log_probs"][mask]
        recomputed = trainer_logprobs(model, output, 0.7)[mask]
        torch.testing.assert_close(reported, recomputed, atol=1e-4, rtol=0)
        assert output.non_tensor_batch["min_global_steps"].tolist() == [step] * len(SEEDS)
        assert output.non_tensor_batch["max_global_steps"].tolist() == [step] * len(SEEDS)
        assert output.batch["rm_scores"].sum(-1).tolist() == pytest.approx([-0.6] * len(SEEDS))
        logprobs.append((output, reported))
        changed(model)
    stale = trainer_logprobs(model, logprobs[0][0], 0.7)[logprobs[0][0].batch["response_mask"].bool()]
    assert (stale - logprobs[0][1]).abs().max() > 0.01  # what was sampled by other weights would be seen
    for request in server.requests:
        assert request.sampling_params["temperature"] == 0.7
        assert request.sampling_params["top_p"] == 0.9
    assert len(balancer._request_id_to_server) == 2 * len(SEEDS)  # one session for each rollout


def test_validation_samples_by_its_own_settings(tiny_model, model, renderer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    stand_in(monkeypatch, renderer)
    page("docs/use-verl.md")
    config = configured(tiny_model, val_kwargs={"temperature": 0, "top_p": 1.0, "top_k": -1})
    worker, server, _ = worker_of(config, model)
    outputs = [
        asyncio.run(worker.generate_sequences(batch_of("find_cell", SEEDS, validate=True))) for _ in range(2)
    ]
    assert {request.sampling_params["temperature"] for request in server.requests} == {0}
    for name in ("responses", "rollout_log_probs"):
        torch.testing.assert_close(outputs[0].batch[name], outputs[1].batch[name])


def test_a_response_ends_before_verls_limit(tiny_model, model, renderer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    stand_in(monkeypatch, renderer)
    page("docs/use-verl.md")
    worker, server, _ = worker_of(configured(tiny_model, response_length=48), model)
    output = asyncio.run(worker.generate_sequences(batch_of("find_cell", SEEDS)))
    lengths = output.batch["attention_mask"][:, -48:].sum(-1)
    assert (lengths <= 48).all()
    assert 0 < len(server.requests) < 6 * len(SEEDS)
