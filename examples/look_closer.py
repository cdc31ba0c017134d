"""A custom environment whose tool returns images: ask about a photograph that is shown too small to tell.

    python examples/look_closer.py MODEL_DIR photo.jpg http://127.0.0.1:8000

The model sees the photograph reduced, and may call `look` to see a part of it as it is. A tool's image joins
the rollout as a tool message with an image part; the bridge appends its placeholders to what was sampled, and
the trajectory keeps its pixels once. Where the model's template drops images of tools, rendering raises an
error that names the part; show it in a user message then.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmrender import Renderer, RendererClient
from mmrender.messages import ToolCall
from mmrender.rollout import Observation, Turn, rollouts

SIDE = 0.4
"""Of the part that `look` shows, over that of the photograph."""
LOOK = {
    "name": "look",
    "description": "Show a part of the photograph as it is.",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": "number", "minimum": 0, "maximum": 1} for name in ("left", "top")},
        "required": ["left", "top"],
    },
}


class LookCloser:
    """One photograph, one question, and as many looks as the model wants to pay for."""

    tools: Sequence[Any] = (LOOK,)

    def __init__(self, most_turns: int = 4) -> None:
        self.most_turns, self.turns, self.looks = most_turns, 0, 0

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Show the photograph small; `extras` has its path, the question and the answer."""
        self.turns = self.looks = 0
        self.answer = extras["answer"]
        with Image.open(extras["photo"]) as opened:
            self.photo = opened.convert("RGB")
        small = self.photo.resize((160, 160 * self.photo.height // self.photo.width))
        question = [{"type": "image", "image": small}, {"type": "text", "text": extras["question"]}]
        return Observation([*prompt, {"role": "user", "content": question}])

    def step(self, turn: Turn) -> Observation:
        """Answer each call; a turn without any is the model's answer."""
        self.turns += 1
        if not turn.attempts:
            is_right = self.answer in turn.text.lower()
            reward = max(0.0, 1.0 - 0.1 * self.looks) if is_right else 0.0
            return Observation(reward=reward, done=True, info={"right": float(is_right)})
        if self.turns == self.most_turns:
            return Observation(done=True, info={"right": 0.0})
        unread = [attempt for attempt in turn.attempts if attempt.status != "ok"]
        messages = [self._result(call) for call in turn.message.tool_calls]
        if unread:
            messages.append({"role": "user", "content": f"That call cannot be read: {unread[0].status}."})
        return Observation(messages, reward=-0.1 * len(unread))

    def _result(self, call: ToolCall) -> dict[str, Any]:
        """The tool's message: text and a picture, or what was wrong with the call."""
        where = [call.arguments.get(name) for name in ("left", "top")]
        found = [float(each) for each in where if isinstance(each, int | float) and 0 <= each <= 1]
        content: Any = "left and top are numbers from 0 to 1"
        if call.name == "look" and len(found) == len(where):
            self.looks += 1
            width, height = self.photo.size
            left, top = (each * (1 - SIDE) for each in found)
            part = self.photo.crop((left * width, top * height, (left + SIDE) * width, (top + SIDE) * height))
            content = [{"type": "image", "image": part}, {"type": "text", "text": "Here it is."}]
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


async def play(client: RendererClient, photo: str, count: int, **options: Any) -> list[Any]:
    """Play some rollouts at once, and return their trajectories."""
    task = {"photo": Path(photo), "question": "Which animal is this?", "answer": "cow"}
    played = []
    async for trajectory in rollouts(client, LookCloser, [[]] * count, extras=[task] * count, **options):
        images = len(trajectory.steps[-1].multi_modal_data.mm_items.get("image", ()))
        reward = sum(float(step.reward or 0.0) for step in trajectory.steps)
        print(f"{trajectory.trajectory_id}: {len(trajectory)} turns, {images} images, reward {reward:.2f}")
        played.append(trajectory)
    return played


if __name__ == "__main__":
    model, photograph, url = sys.argv[1:4]
    sampler = RendererClient(
        Renderer.from_pretrained(model), url, model=model, sampling_params={"max_tokens": 256}
    )
    asyncio.run(play(sampler, photograph, count=8))
