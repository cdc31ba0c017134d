"""Train in two processes: a worker that plays against a vLLM server, and a trainer that it ships to.

Usage, while a vLLM with `--enable-scale-out` and `VLLM_SERVER_DEV_MODE=1` serves RUN/model as `tiny`:

    python -m grpo.processes trainer --out RUN --boards 8 --rollouts 4
    python -m grpo.processes worker --out RUN --boards 8 --rollouts 4 --server http://127.0.0.1:8000

The trainer writes weights and names them in RUN/latest.json; the worker reads them into the paused server,
plays the games of that step, and ships them. Either may be killed and started again at any time. A step is
trained on its games once: games are known by step, board and number; those of another step, or that came
before, are left out; and they are acknowledged when the weights that they made are on disk.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from grpo.config import Config, parse
from grpo.report import Report
from grpo.trainer import Trainer
from grpo.worker import Worker
from mmrender import Renderer
from mmrender.client.http import HTTPTransport
from mmrender.client.vllm import VLLMBackend
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.model.weights import load_model
from mmrender.shipping import Receiver, Sender
from mmrender.testing.tiny_model import build_tiny_model

_KEPT = 2
"""Steps whose weights stay on disk: the one that a server may be reading, and the one before."""


def build(config: Config) -> Path:
    """Build the model that a run begins with, if it is not there."""
    directory = config.out / "model"
    if not directory.exists():
        sizes: dict[str, Any] = {
            name: getattr(config, name) for name in ("seed", "hidden_size", "layers", "patch_size")
        }
        build_tiny_model(directory, **sizes)
    return directory


def address_of(config: Config) -> str:
    """Where the trainer listens."""
    return f"unix://{config.out.resolve()}/trainer.sock"


async def train(config: Config) -> None:
    """Train on what comes, step by step."""
    model = load_model(build(config), "float32", "cpu", purpose="the example")
    trainer, checkpoint = Trainer(config, model), config.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    report = Report(config, trainer.step)
    count = config.boards * config.rollouts
    async with Receiver(address_of(config), ack="explicit", window_messages=2 * count) as receiver:
        while trainer.step < config.steps:
            publish(config, trainer)
            games: dict[tuple[int, int], Any] = {}
            left_out = 0
            while len(games) < count:
                message = await receiver.receive()
                extra = message.value.extra
                key = extra["group"], extra["game"]
                if extra["step"] != trainer.step or key in games:
                    left_out += 1
                    message.ack()
                else:
                    games[key] = message
            trajectories = [games[key].value for key in sorted(games)]
            versions = {span.version for one in trajectories for span in one.steps[-1].weight_versions}
            if config.audit_every and trainer.step % config.audit_every == 0:
                trainer.audit(trajectories[:: config.rollouts])
            seen = trainer.update(trajectories)
            trainer.save(checkpoint)
            for message in games.values():
                message.ack()
            counts = {"games": len(games), "left_out": left_out, "weights": sorted(versions)}
            report.add({"step": trainer.step, "rollouts": trainer.step * count, **seen, **counts})
    publish(config, trainer)


def publish(config: Config, trainer: Trainer) -> None:
    """Write the weights as a model directory, and name them."""
    folder = config.out / "weights" / str(trainer.step)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(config.out / "model", folder)
    save_file(trainer.model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    latest = config.out / "latest.json"
    latest.with_suffix(".new").write_text(json.dumps({"step": trainer.step, "path": str(folder.resolve())}))
    latest.with_suffix(".new").replace(latest)
    shutil.rmtree(config.out / "weights" / str(trainer.step - _KEPT), ignore_errors=True)


async def play(config: Config) -> None:
    """Play the games of each step against the server, and ship them."""
    renderer = Renderer.from_pretrained(build(config))
    engine = HTTPEngine(VLLMBackend(), HTTPTransport(config.server), model="tiny")
    server = InferenceEngineClient([engine], renderer=renderer)
    worker = Worker(config, renderer, server, model="tiny")
    played, latest = -1, config.out / "latest.json"
    while not latest.exists():  # the trainer listens before it names weights
        await asyncio.sleep(0.1)
    async with Sender(address_of(config)) as sender:
        while True:
            named = json.loads(latest.read_text())
            if named["step"] >= config.steps:
                break
            if named["step"] == played:
                await asyncio.sleep(0.05)
                continue
            step = named["step"]
            await server.pause_generation("wait")
            await server.load_weights(named["path"], weight_version=f"step-{step}")
            await server.resume_generation()
            for trajectory in await worker.train_rollouts(step):
                await sender.send(trajectory)
            played = step
        await sender.flush()
    await server.teardown()


if __name__ == "__main__":
    role, *flags = sys.argv[1:]
    asyncio.run({"trainer": train, "worker": play}[role](parse(flags)))
