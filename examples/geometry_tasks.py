"""The questions of `recipes.geometry` as a taskset of verifiers, whose id is `geometry-tasks`.

verifiers and prime-rl import it by this id if this folder is on the path of their processes.
"""

from collections.abc import Iterator

import pybase64
import verifiers.v1 as vf

from recipes.geometry import ASKED, Run, reward_of

__all__ = ["GeometryTaskset"]


class GeometryConfig(vf.TasksetConfig):
    """Options of the taskset.

    Attributes:
        tiny: Draw figures instead of loading the data set.
        count: Number of questions, or None for all.
    """

    tiny: bool = False
    count: int | None = None


class GeometryData(vf.TaskData):
    """A question and its answer."""

    answer: str


class GeometryTask(vf.Task[GeometryData, vf.State, vf.TaskConfig]):
    """Rewards an answer as the environment of the other recipes does."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right answer, and 0.1 for another one in a box."""
        return reward_of(trace.last_reply, self.data.answer)


class GeometryTaskset(vf.Taskset[GeometryTask, GeometryConfig]):
    """Geometry3K."""

    def load(self) -> Iterator[GeometryTask]:
        """Yield the questions, each with its figure as a `data:` URL."""
        run = Run(model="", out=None, steps=0, tiny=self.config.tiny)
        for row in run.rows(self.config.count):
            url = "data:image/png;base64," + pybase64.b64encode(row["image"]).decode()
            content = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": f"{row['problem']} {ASKED}"},
            ]
            prompt = [{"role": "user", "content": content}]
            yield GeometryTask(GeometryData(prompt=prompt, answer=row["answer"]), self.config.task)
