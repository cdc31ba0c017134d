"""Train in two processes: a worker that plays against a server, and a trainer that it ships to.

Usage, while a vLLM with `--enable-scale-out` and `VLLM_SERVER_DEV_MODE=1` serves RUN/model as `tiny`:

    python -m grpo.processes trainer --out RUN --boards 8 --rollouts 4
    python -m grpo.processes worker --out RUN --boards 8 --rollouts 4 --server http://127.0.0.1:8000

or `python -m grpo.processes ray` with the same flags for both, as actors of Ray. With `--server local` the
worker samples from a model of its own, which reads the same files of weights.

The trainer writes weights and names them in RUN/latest.json; the worker reads them into the paused server,
plays the games of that step, and ships them. Either may be killed and started again at any time. A step is
trained on its games once: games are known by step, board and number; those of another step, or that came
before, are left out; and they are acknowledged when the weights that they made are on disk.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file

from grpo.config import Config, build, parse
from grpo.report import Report
from grpo.trainer import Trainer
from grpo.worker import Worker, counts_of, needs_warm_up, warm_up
from mmrender import Renderer
from mmrender.client.http import HTTPTransport
from mmrender.client.local import LocalBackend
from mmrender.client.vllm import VLLMBackend
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.model.weights import load_model
from mmrender.shipping import Receiver, Sender

_KEPT = 2
"""Steps whose weights stay on disk: the one that a server may be reading, and the one before."""


def address_of(config: Config) -> str:
    """Where the trainer listens."""
    return f"unix://{config.out.resolve()}/trainer.sock"


async def train(config: Config) -> None:
    """Train on what comes, step by step."""
    directory = build(config)
    renderer = Renderer.from_pretrained(directory)
    model = load_model(directory, "float32", "cpu", purpose="the example")
    trainer, checkpoint = Trainer(config, model, renderer.tokenizer), config.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    report = Report(config, trainer.step, trainer.updates)
    if config.warm_up and trainer.step == 0:
        worker = Worker(config, renderer, backend=LocalBackend(model, tokenizer=renderer.tokenizer))
        while needs_warm_up(config, trainer, await worker.held_out()):
            report.add({"step": 0, "rollouts": 0, **warm_up(config, trainer, renderer)})
            trainer.save(checkpoint)
    count = config.boards * config.rollouts
    async with Receiver(address_of(config), ack="explicit", window_messages=2 * count) as receiver:
        publish(config, trainer)
        while trainer.step < config.steps:
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
            versions = {
                span.version for one in trajectories for step in one.steps for span in step.weight_versions
            }
            if config.audit_share:
                trainer.audit(trajectories[:: config.rollouts])
            seen = trainer.update(trajectories)
            seen |= {"left_out": left_out, **counts_of(trajectories)}
            named = {"weights": sorted(versions), "games": sorted(games)}
            # A line without its checkpoint is dropped when the run goes on.
            report.add({"step": trainer.step, "rollouts": trainer.step * count, **seen, **named})
            trainer.save(checkpoint)
            for message in games.values():
                message.ack()
            publish(config, trainer)


def publish(config: Config, trainer: Trainer) -> None:
    """Write the weights as a model directory, and name them."""
    folder = config.out / "weights" / str(trainer.step)
    if not folder.exists():  # else a server may be reading them
        written = config.out / "weights.new"
        shutil.rmtree(written, ignore_errors=True)
        shutil.copytree(config.out / "model", written)
        save_file(trainer.model.state_dict(), written / "model.safetensors", metadata={"format": "pt"})
        folder.parent.mkdir(exist_ok=True)
        written.rename(folder)
    latest = config.out / "latest.json"
    latest.with_suffix(".new").write_text(json.dumps({"step": trainer.step, "path": str(folder.resolve())}))
    latest.with_suffix(".new").replace(latest)
    for old in (config.out / "weights").iterdir():
        if int(old.name) <= trainer.step - _KEPT:
            shutil.rmtree(old)


class LocalModel:
    """A model of the worker's own, whose weights are read as a server reads them."""

    def __init__(self, directory: Path) -> None:
        self.backend = LocalBackend(directory)

    async def load_weights(self, path: str, *, weight_version: str) -> None:
        """Read weights from a directory."""
        weights = load_file(Path(path) / "model.safetensors")
        await asyncio.to_thread(self.backend.update_weights, weights.items(), weight_version)


async def play(config: Config) -> None:
    """Play the games of each step, and ship them."""
    directory = build(config)
    renderer = Renderer.from_pretrained(directory)
    server: Any
    if config.server == "local":
        server = LocalModel(directory)
        worker = Worker(config, renderer, backend=server.backend)
    else:
        engine = HTTPEngine(VLLMBackend(), HTTPTransport(config.server), model="tiny")
        server = InferenceEngineClient([engine], renderer=renderer)
        worker = Worker(config, renderer, server, model="tiny")
    played, latest = -1, config.out / "latest.json"
    while not latest.exists():  # then the trainer listens before it names weights
        await asyncio.sleep(0.1)
    sender = Sender(address_of(config))
    try:
        await sender.connect(timeout=None)
        while True:
            named = json.loads(latest.read_text())
            if named["step"] >= config.steps:
                break
            if named["step"] == played:
                await asyncio.sleep(0.05)
                continue
            await load(server, named["path"], f"step-{named['step']}")
            async for trajectory in worker.stream(named["step"]):
                await sender.send(trajectory)
            played = named["step"]
    finally:
        # What the trainer wanted, it has acknowledged before it named the last weights.
        await sender.aclose(timeout=0)


async def load(server: Any, path: str, version: str) -> None:
    """Read weights into a server that is paused meanwhile, or into a model of this process."""
    if isinstance(server, LocalModel):
        await server.load_weights(path, weight_version=version)
        return
    await server.pause_generation("wait")
    await server.load_weights(path, weight_version=version)
    await server.resume_generation()


ROLES: Final = {"trainer": train, "worker": play}


class Process:
    """One of the two, as an actor of Ray."""

    def __init__(self, role: str, config: Config) -> None:
        self._role, self._config = role, config

    def run(self) -> None:
        """Run to the end."""
        asyncio.run(ROLES[self._role](self._config))

    def pid(self) -> int:
        """The process that runs it now."""
        return os.getpid()


def actors(config: Config) -> dict[str, Any]:
    """Start both as actors of Ray, which starts them again when they die.

    They share a socket and the folder of the run, so both run on this machine.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Process).options(
        scheduling_strategy=here, max_restarts=-1, max_task_retries=-1, max_concurrency=2
    )
    return {role: actor.remote(role, config) for role in ROLES}


def on_ray(config: Config) -> None:
    """Run both to the end on the cluster that `RAY_ADDRESS` names, or on one of this machine."""
    import ray

    ray.init()
    ray.get([actor.run.remote() for actor in actors(config).values()])


if __name__ == "__main__":
    role, *flags = sys.argv[1:] or ["--help"]
    if role not in (*ROLES, "ray"):
        parse(["--help"], program="grpo.processes trainer|worker|ray")
    config = parse(flags, program=f"grpo.processes {role}")
    if role == "ray":
        on_ray(config)
    else:
        asyncio.run(ROLES[role](config))
