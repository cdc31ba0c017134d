"""mmrender's rollouts behind `rollout_func` of TRL's GRPOTrainer.

In this example the server keeps its first weights: TRL's new weights never reach it.

```python
from mmrender import Renderer, Trajectory, generate
from mmrender.integrations.trl import Rollouts

renderer = Renderer.from_pretrained("MODEL")

async def play(prompt):
    turn = await generate(client="http://localhost:8000", renderer=renderer, model="MODEL", messages=prompt)
    trajectory = Trajectory()
    trajectory.append_turn(turn)
    return trajectory

rollout_func = Rollouts(play)  # of GRPOTrainer
```
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from mmrender.errors import TrajectoryError
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory


@dataclass(frozen=True)
class Rollouts:
    """Plays a trajectory for each prompt, and returns its tokens to TRL.

    TRL trains on one sequence per prompt, and computes pixels itself from the data set's column of images. So
    a trajectory may have turns, with masked tokens of the environment, but no branches and no images after
    its prompt.

    Attributes:
        play: Makes the trajectory of one prompt, whose messages contain the row's images.
        concurrency: Maximum number of trajectories in flight.
    """

    play: Callable[[Any], Awaitable[Trajectory]]
    concurrency: int = 64

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the fields that TRL trains on, one entry for each prompt.

        Raises:
            TrajectoryError: A trajectory has branches, nothing to train on, no log probabilities, or images
                that its first prompt lacks.
        """
        trajectories = _run(self._played(prompts))
        fields: dict[str, list[Any]] = {
            "prompt_ids": [],
            "completion_ids": [],
            "logprobs": [],
            "env_mask": [],
        }
        for index, trajectory in enumerate(trajectories):
            sample, logprobs, start = _only_sample(trajectory, f"prompts[{index}]")
            fields["prompt_ids"].append(sample.token_ids[:start].tolist())
            fields["completion_ids"].append(sample.token_ids[start:].tolist())
            fields["logprobs"].append(logprobs[start:].tolist())
            fields["env_mask"].append(sample.loss_mask[start:].astype(int).tolist())
        return fields

    async def _played(self, prompts: Sequence[Any]) -> list[Trajectory]:
        free = asyncio.Semaphore(self.concurrency)

        async def one(prompt: Any) -> Trajectory:
            async with free:
                return await self.play(prompt)

        return await asyncio.gather(*map(one, prompts))


def _run(playing: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
    """Run to the end, in another thread if this one runs an event loop, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(playing)
    with ThreadPoolExecutor(1, "mmrender-trl") as thread:
        return thread.submit(copy_context().run, asyncio.run, playing).result()


def _only_sample(trajectory: Trajectory, where: str) -> tuple[TrainingSample, Any, int]:
    """Return the trajectory's one sample, its log probabilities, and the length of its first prompt."""
    samples = trajectory.samples()
    if len(samples) != 1:
        raise TrajectoryError(
            "TRL trains on one sequence for each prompt",
            where=where,
            expected="a trajectory of one branch, with sampled tokens",
            got=f"{len(samples)} samples",
            remedy="Train on trajectories with mmrender's own batches, or keep each turn's prompt a prefix",
        )
    (sample,) = samples
    start = int(sample.loss_mask.argmax())
    logprobs: Any = sample.logprobs  # `samples` requires them
    late = [span for span in sample.multi_modal_data.spans(len(sample)) if span.start >= start]
    if late:
        raise TrajectoryError(
            "an image appears after the first prompt, and TRL computes pixels of the data set's images alone",
            where=f"{where}, token {late[0].start}",
            expected="images in the prompt only",
            got=f"{len(late)} later ones",
            remedy="Put all images into the row's prompt, or train with mmrender's own batches",
        )
    return sample, logprobs, start
