"""TRL's `rollout_func` without TRL: rollouts are played from scripts and from notebooks."""

import asyncio
import contextvars
from types import SimpleNamespace

import pytest
import torch

from mmrender import Trajectory
from mmrender.errors import EngineUnsupportedError
from mmrender.integrations.trl import Rollouts

SETTING = contextvars.ContextVar("setting", default=0)


async def play(client, prompt):
    await asyncio.sleep(0)
    trajectory = Trajectory()
    trajectory.append([1, prompt], [SETTING.get()], logprobs=[-0.5], weight_versions=[("4", 0, 1)])
    return trajectory


def trainer(**others):
    """What is read of TRL's trainer."""
    return SimpleNamespace(
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
        max_completion_length=8,
        args=SimpleNamespace(generation_kwargs=None),
        use_vllm=False,
        state=SimpleNamespace(global_step=4),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        model=torch.nn.Linear(1, 1),
        **others,
    )


def test_a_model_that_is_cut_over_processes_is_refused(renderer):
    with pytest.raises(EngineUnsupportedError, match="use_vllm"):
        Rollouts(play, renderer)([2], trainer(is_fsdp_enabled=True))


def test_the_model_trains_on_after_rollouts(renderer):
    asked = trainer()
    seen = []

    async def watched(client, prompt):
        seen.append(asked.model.training)
        return await play(client, prompt)

    Rollouts(watched, renderer)([2], asked)
    assert (seen, asked.model.training) == ([False], True)


def test_rollouts_are_played_where_an_event_loop_runs_too(renderer):
    rollouts = Rollouts(play, renderer)
    SETTING.set(7)
    expected = {"prompt_ids": [[1, 2], [1, 3]], "completion_ids": [[7], [7]], "logprobs": [[-0.5]] * 2}
    expected["env_mask"] = [[1], [1]]

    async def notebook():
        return rollouts([2, 3], trainer())

    assert rollouts([2, 3], trainer()) == asyncio.run(notebook()) == expected
