"""The functions of the page on other trainers: what a trainer would take from them is the rollout, token for token."""

import asyncio
import enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from doc_pages import Page, lay_out
from mmrender import Trajectory
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import run_episode
from rollout_cases import ScriptedBackend, ScriptedEnvironment, asks, ends

Status = enum.Enum("Status", "COMPLETED")


@pytest.fixture
def page(renderer, tiny_model, tmp_path, monkeypatch):
    """The page's functions, and the trajectory that its `play` returns: two turns, with a picture in each prompt."""
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    client = RendererClient(renderer, backend=ScriptedBackend(renderer, lambda _: "Yes."), model="m")
    trajectory = Trajectory()
    script = ScriptedEnvironment([asks("Sure?", 0.25, image=7), ends(1.0)])
    asyncio.run(run_episode(client, script, [], {"picture": 3}, trajectory=trajectory))

    async def play(*arguments):
        return trajectory

    return SimpleNamespace(**Page("docs/other-trainers.md", {"play": play}).run()), trajectory.samples()[0]


def test_slime(page):
    functions, row = page
    sample = SimpleNamespace(Status=Status)
    asyncio.run(functions.generate(None, sample, {}))
    start = len(sample.tokens) - sample.response_length
    assert sample.tokens == row.token_ids.tolist()
    assert sample.loss_mask == row.loss_mask[start:].tolist()
    assert (sample.loss_mask[0], row.loss_mask[:start].any(), sample.reward) == (1, False, 1.25)
    assert len(sample.rollout_log_probs) == sample.response_length
    assert len(sample.multimodal_train_inputs["image_grid_thw"]) == 2


def test_areal(page):
    functions, row = page
    tensors = asyncio.run(functions.arun_episode(None, {}))
    shapes = {
        tuple(value.shape) for name, value in tensors.items() if name not in ("multi_modal_input", "rewards")
    }
    assert shapes == {(1, len(row.token_ids))}
    patches = tensors["multi_modal_input"][0]["image_grid_thw"].prod(-1).sum()
    assert tensors["mm_token_type_ids"].sum() == patches // 4
    assert torch.equal(tensors["loss_mask"][0].bool(), torch.from_numpy(row.loss_mask.copy()))
    assert tensors["rewards"].tolist() == [1.25]


def test_openrlhf(page):
    functions, row = page
    response = asyncio.run(functions.execute("", "", None, 100, None, None))
    mask = np.zeros(len(row.token_ids), bool)
    for start, stop in response["action_ranges"]:
        mask[start:stop] = True
    assert len(response["action_ranges"]) == 2
    assert mask.tolist() == row.loss_mask.tolist()
    assert response["observation_tokens"] == row.token_ids.tolist()
    assert len(response["mm_train_inputs"]["image_grid_thw"]) == 2
