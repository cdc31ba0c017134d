"""mmrender's rollouts in the form that verl's agent loops return.

The loop below samples from a fixed URL: verl's new weights never reach that server.

```python
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from find_cell import FindCell                     # of mmrender's examples: an environment with pictures
from mmrender import Renderer, Trajectory
from mmrender.integrations.verl import to_agent_loop_output
from mmrender.rollout import run_episode
from mmrender.rollout.client import RendererClient

client = RendererClient(Renderer.from_pretrained("MODEL"), "http://localhost:8000", model="MODEL")


@register("find_cell")  # agent_name of the data set
class FindCellLoop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        trajectory = Trajectory()
        seed = {"seed": row["index"]}
        await run_episode(client, FindCell(), row["raw_prompt"], seed, trajectory=trajectory)
        return to_agent_loop_output(trajectory, response_length=self.rollout_config.response_length)
```
"""

import io
from typing import Any

from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from mmrender.errors import TrajectoryError
from mmrender.media.encoded import encoded_image
from mmrender.rollout.generator import TrajectoryID, rows_of, total_reward
from mmrender.trajectory.prefix import media_before
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.truncate import whole_media_length


def to_agent_loop_output(trajectory: Trajectory, *, response_length: int | None = None) -> Any:
    """Return a rollout's tokens, and its images for verl's own processor.

    verl processes images again. Each is passed in the size that its processor chose, so that its tensors and
    its number of tokens stay the same.

    Args:
        trajectory: The rollout, whose bridged prompts make it one row. If it failed, its mask is 0.
        response_length: Maximum number of tokens after the first prompt. A longer response is cut before an
            incomplete image, while verl itself would cut within one.

    Raises:
        TrajectoryError: Nothing was sampled.
        MediaError: An image's pixels are not kept, or a turn shows a video.
    """
    (row,) = rows_of(trajectory, TrajectoryID(trajectory.trajectory_id), step_wise=False)
    if not row.response_ids:
        raise TrajectoryError("nothing was sampled", where=trajectory.trajectory_id, got=row.error)
    length = len(row.prompt_token_ids) + len(row.response_ids)
    if response_length is not None and len(row.response_ids) > response_length:
        length = whole_media_length(row.multi_modal_data, len(row.prompt_token_ids) + response_length)
    kept = length - len(row.prompt_token_ids)
    spans = media_before(row.multi_modal_data.spans(), length)
    images = [Image.open(io.BytesIO(encoded_image(span.item).data)) for span in spans]
    return AgentLoopOutput(
        prompt_ids=row.prompt_token_ids,
        response_ids=row.response_ids[:kept],
        response_mask=row.loss_mask[:kept],
        response_logprobs=row.logprobs[:kept] or None,
        routed_experts=None if row.expert_indices is None else row.expert_indices[:length],
        multi_modal_data={"images": images} if images else {},
        reward_score=0.0 if row.error is not None else total_reward(trajectory),
        num_turns=2 * len(trajectory),
        metrics=AgentLoopMetrics(),
        extra_fields={"stop_reason": row.stop_reason, "error": row.error},
    )
