"""mmrender's rollouts in TRL: behind `rollout_func` of its GRPOTrainer, or in a trainer of trajectories.

```python
from mmrender import Renderer, Trajectory
from mmrender.integrations.trl import Rollouts

renderer = Renderer.from_pretrained("MODEL")

async def play(client, prompt):  # a client of the trainer's own engine
    trajectory = Trajectory()
    await client.create_completion(prompt, trajectory=trajectory)
    return trajectory

rollout_func = Rollouts(play, renderer)  # of GRPOTrainer
```
"""

from typing import Any

from mmrender.integrations.trl_rollouts import Rollouts, trainer_client

__all__ = ["GRPOTrainer", "Rollouts", "trainer_client"]  # noqa: F822 - the first is imported on demand


def __getattr__(name: str) -> Any:
    """Import `GRPOTrainer` with TRL itself, which the rest of this module does without."""
    if name == "GRPOTrainer":
        from mmrender.integrations.trl_trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
