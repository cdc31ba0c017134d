"""Rollouts against a running vLLM: example environment and demonstration; run by `make integration-vllm`."""

import asyncio
from functools import partial

import numpy as np
import pytest

from find_cell import FindCell, FindCellSettings, sensible_calls
from guided import guided_params
from integration.engine_checks import MODEL
from integration.engine_server import needs_tier
from kit import media_inputs
from mmrender.client.http import HTTPTransport
from mmrender.client.local import LocalBackend
from mmrender.rollout.client import RendererClient
from mmrender.rollout.generator import VLMGenerator
from mmrender.rollout.rows import TrajectoryID
from mmrender.testing import demo
from mmrender.testing.demo import Report, prove_shipping
from mmrender.testing.receiver import trajectory_digest
from mmrender.trajectory.files import TrajectoryWriter, load_trajectories

pytestmark = needs_tier("vllm")
GAME = FindCellSettings(grid=3, distractors=2, max_turns=4)


@pytest.fixture(scope="module")
def server(vllm_servers):
    return vllm_servers.with_flags()


@pytest.fixture(scope="module")
def local(tiny_model):
    return LocalBackend(tiny_model)


def calls_of(message):
    return [call["name"] for call in message["tool_calls"]]


def rolled_out(server, renderer, *, held, count=8, **client_options):
    """Games of two boards; `held` to zooming in on cells, or free to say anything."""
    zooms = [message for message in sensible_calls(3) if calls_of(message) == ["zoom"]]
    guided = guided_params(renderer, zooms) if held else {}
    batch = {
        "prompts": [[]] * count,
        "env_classes": [partial(FindCell, GAME)] * count,
        "env_extras": [{"seed": index % 2} for index in range(count)],
        "trajectory_ids": [TrajectoryID(f"board-{index % 2}", index) for index in range(count)],
    }

    async def run():
        transport = HTTPTransport(server.base_url)
        # A pad token that is sampled is text to vLLM, and an image to a plain forward of Transformers.
        pad = renderer.tokenizer.token_id("<|image_pad|>")
        bias = {str(pad): -100.0, **guided.get("logit_bias", {})}
        sampling = {"max_tokens": 96, "seed": 5, **guided, "logit_bias": bias}
        client = RendererClient(renderer, transport, model=MODEL, sampling_params=sampling, **client_options)
        generator = VLMGenerator(client, failures="raise")
        try:
            return await generator.roll_out(batch)
        finally:
            await transport.aclose()

    return asyncio.run(run())


def plain_logprobs(model, branch):
    """One forward of a whole branch: row t is of the token t + 1."""
    import torch

    ids = torch.from_numpy(branch.token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=ids, **media_inputs(branch.multi_modal_data, len(branch))).logits[0]
    return logits.float().log_softmax(-1).numpy()


def test_a_game_guided_to_calls(server, renderer):
    trajectories = rolled_out(server, renderer, held=True)
    names = [trajectory.extra["name"] for trajectory in trajectories]
    assert names == [f"board-{index % 2}_{index}" for index in range(8)]
    later = [step for trajectory in trajectories for step in trajectory.steps if step.index]
    assert later
    assert [step.extra["why_rendered"] for step in later] == [None] * len(later)
    assert any(len(trajectory.items) > 1 for trajectory in trajectories)
    for trajectory in trajectories:
        assert trajectory.extra["info"]["invalid_calls"] == 0
        assert {step.finish_reason for step in trajectory.steps} == {"tool_calls"}
        (branch,) = trajectory.branches()
        sample = branch.sample()
        assert (sample.logprobs[sample.loss_mask] <= 0).all()
        for earlier, step in zip(trajectory.steps, trajectory.steps[1:], strict=False):
            assert np.array_equal(step.prompt_ids[: len(earlier)], earlier.token_ids)


def test_free_turns_have_the_logprobs_of_a_plain_forward(server, renderer, local):
    trajectories = rolled_out(server, renderer, held=False, count=4)
    worst = 0.0
    compared = 0
    for trajectory in trajectories:
        (branch,) = trajectory.branches()
        logprobs = plain_logprobs(local.model, branch)
        for step in trajectory.steps:
            rows = logprobs[step.prompt_length - 1 : len(step) - 1]
            plain = rows[np.arange(len(rows)), step.completion_ids]
            worst = max(worst, float(np.abs(plain - step.logprobs).max()))
            compared += len(plain)
    assert compared > 100
    assert worst < 1e-2


def test_what_was_saved_and_shipped_is_what_was_rolled_out(server, renderer, tmp_path):
    trajectories = rolled_out(server, renderer, held=True, count=4)
    digests = {each.trajectory_id: trajectory_digest(each) for each in trajectories}
    with TrajectoryWriter(tmp_path / "saved.mmc") as writer:
        for each in trajectories:
            writer.append(each)
    saved = load_trajectories(tmp_path / "saved.mmc")
    assert {each.trajectory_id: trajectory_digest(each) for each in saved} == digests
    report = Report()
    asyncio.run(prove_shipping(report, trajectories[0], tmp_path))
    assert all(claim.holds for claim in report.claims)


def test_oldest_turns_are_left_out_by_the_servers_limit(server, renderer):
    game = FindCell(GAME)
    opening = game.reset([], {"seed": 0}).messages
    limit = len(renderer.render(opening, tools=game.tools, add_generation_prompt=True)) + 100
    settings = {"overlong": "drop_oldest_turns", "max_prompt_len": limit}
    trajectories = rolled_out(server, renderer, held=False, count=2, **settings)
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert max(step.prompt_length for step in steps) <= limit
    assert any(step.extra.get("left_out") for step in steps)


def test_the_demonstration_runs_against_the_server(server, tiny_model, capsys, tmp_path):
    page = tmp_path / "demo.html"
    assert demo.main(server.base_url, model=MODEL, renderer_of=str(tiny_model), page=page) == 0
    assert "data:image/jpeg" in page.read_text("utf-8")
    assert capsys.readouterr().out.count("✓") == 7


def test_greedy_tokens_are_those_of_the_local_back_end(server, renderer, local):
    board = FindCell(GAME)
    opening = board.reset([], {"seed": 3}).messages
    sampling = {"temperature": 0.0, "max_tokens": 24}

    async def both():
        transport = HTTPTransport(server.base_url)
        try:
            theirs = RendererClient(renderer, transport, model=MODEL, sampling_params=sampling)
            ours = RendererClient(renderer, backend=local, sampling_params=sampling)
            return [await client.create_completion(opening, tools=board.tools) for client in (theirs, ours)]
        finally:
            await transport.aclose()

    theirs, ours = (turn.generation for turn in asyncio.run(both()))
    assert theirs.completion_ids == ours.completion_ids
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-2)
    assert theirs.finish_reason == ours.finish_reason
