"""TRL's `rollout_func` without TRL: rollouts are played from scripts and from notebooks."""

import asyncio
import contextvars

from mmrender import Trajectory
from mmrender.integrations.trl import Rollouts

SETTING = contextvars.ContextVar("setting", default=0)


async def play(prompt):
    await asyncio.sleep(0)
    trajectory = Trajectory()
    trajectory.append([1, prompt], [SETTING.get()], logprobs=[-0.5])
    return trajectory


def test_rollouts_are_played_where_an_event_loop_runs_too():
    rollouts = Rollouts(play)
    SETTING.set(7)
    expected = {"prompt_ids": [[1, 2], [1, 3]], "completion_ids": [[7], [7]], "logprobs": [[-0.5]] * 2}
    expected["env_mask"] = [[1], [1]]

    async def notebook():
        return rollouts([2, 3], None)

    assert rollouts([2, 3], None) == asyncio.run(notebook()) == expected
