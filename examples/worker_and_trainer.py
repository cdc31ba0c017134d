"""A worker that samples and a trainer that trains, as two processes.

    python examples/worker_and_trainer.py MODEL_DIR photo.jpg

The worker runs the model on the spot; give `RendererClient` a server's URL in its place. The trainer takes
what arrives as one batch, and makes one step of REINFORCE.
"""

import asyncio
import multiprocessing
import sys
import tempfile
from pathlib import Path

from mmrender import Renderer, RendererClient, Trajectory
from mmrender.client.local import LocalBackend
from mmrender.shipping import Receiver, Sender

ROLLOUTS = 2
PATIENCE = 300
"""Seconds for all of them: a worker that died sends nothing."""


async def work(url: str, model: str, photo: str) -> None:
    """Sample rollouts and ship each."""
    renderer = Renderer.from_pretrained(model, image_backend="pil")
    client = RendererClient(
        renderer,
        backend=LocalBackend(model),
        sampling_params={"max_tokens": 8, "temperature": 1.0},
        forbid_media_tokens=True,  # an untrained model samples them, and no trainer takes them
    )
    async with Sender(url) as sender:
        for number in range(ROLLOUTS):
            trajectory = Trajectory(f"rollout-{number}")
            question = [{"type": "image", "image": Path(photo)}, "Which animal is this?"]
            turn = await client.create_completion(
                [{"role": "user", "content": question}], trajectory=trajectory
            )
            trajectory.steps[-1].reward = 1.0 if "cow" in str(turn.message.content).lower() else -1.0
            await sender.send(trajectory)


def run_worker(url: str, model: str, photo: str) -> None:
    """Entry of the worker's process."""
    asyncio.run(work(url, model, photo))


async def receive(url: str) -> list[Trajectory]:
    """Take the trajectories of one training step."""
    received: list[Trajectory] = []
    async with asyncio.timeout(PATIENCE), Receiver(url) as receiver:
        async for message in receiver:
            received.append(message.value)
            if len(received) == ROLLOUTS:
                break
    return received


def train(model_dir: str, trajectories: list[Trajectory]) -> float:
    """Make one step, and return its loss."""
    import torch
    from transformers import AutoModelForImageTextToText

    from mmrender.training import ModelFamily, collate, token_logprobs

    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    batch = collate(samples, ModelFamily.from_config(model.config), pad_token_id=0, dtype=model.dtype)
    rewards = torch.tensor([float(trajectory.steps[-1].reward) for trajectory in trajectories])
    logprobs = token_logprobs(model(**batch.model_inputs()).logits, batch)
    ratio = (logprobs - batch.logprobs).exp()  # one where the trainer has the weights that sampled
    loss = -(ratio * rewards[:, None] * batch.loss_mask).sum() / batch.loss_mask.sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def main(model: str, photo: str) -> float:
    """Run both processes, and return the loss of the step."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"unix://{folder}/rollouts.sock"
        worker = multiprocessing.get_context("spawn").Process(target=run_worker, args=(url, model, photo))
        worker.start()
        received = asyncio.run(receive(url))
        worker.join()
    loss = train(model, received)
    print(f"{len(received)} rollouts, loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:3])
