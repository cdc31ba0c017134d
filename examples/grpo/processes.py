"""Train as a fleet of processes: workers that play, receivers of their games, and a trainer.

Usage, while a vLLM with `--enable-scale-out` and `VLLM_SERVER_DEV_MODE=1` serves RUN/model as `tiny`:

    python -m grpo.processes local --out RUN --boards 8 --rollouts 4 --server http://127.0.0.1:8000

or `python -m grpo.processes ray` with the same flags, as actors of Ray. With `--server local` each worker
samples from a model of its own, which reads the same files of weights.

The trainer writes weights, reads them into the paused server, and names them in RUN/latest.json. Workers play
the games of that step, and ship them to receivers, which write them to files. A process that is killed is
started again. A step is trained on its games once. Games are known by step, board and number. Games of
another step, or that came before, are left out. The place in the files is part of the trainer's checkpoint.
"""

import asyncio
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file

from grpo.config import Config, build, parse
from grpo.report import Report
from grpo.trainer import Trainer
from grpo.worker import Worker, counts_of, games_of, needs_warm_up, warm_up
from mmrender import Renderer
from mmrender.client.http import HTTPTransport
from mmrender.client.local import LocalBackend
from mmrender.client.vllm import VLLMBackend
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.integrations.fleet import Fleet, LocalFleet, Process, Role, RunningFleet, receivers
from mmrender.model.weights import load_model
from mmrender.shipping import Sender

_WAIT_SECONDS: Final = 3600.0
"""Seconds that a game may take, with all that is started again meanwhile."""
_KEPT = 2
"""Steps whose weights stay on disk: the one that a server may be reading, and the one before."""


def address_of(config: Config) -> str:
    """Where the trainer listens."""
    return f"unix://{config.out.resolve()}/trainer.sock"


def fleet_of(config: Config) -> Fleet:
    """Describe the run: the same on this machine and on Ray."""
    build(config)
    roles = {
        "worker": Role(partial(play, config), config.workers),
        "receiver": receivers(config.receivers),
        "trainer": Role(partial(train, config)),
    }
    return Fleet(config.out, roles)


async def train(config: Config, process: Process) -> None:
    """Train on the games of each step."""
    directory = config.out / "model"
    renderer = Renderer.from_pretrained(directory)
    model = load_model(directory, "float32", "cpu", purpose="the example")
    trainer, checkpoint = Trainer(config, model, renderer.tokenizer), config.out / "checkpoint.pt"
    dataset = process.dataset(
        wait=_WAIT_SECONDS, make=list
    )  # trajectories, since advantages need whole groups
    if checkpoint.exists():
        trainer.load(checkpoint)
    if trainer.reading is not None:
        dataset.load_state_dict(trainer.reading)
    report = Report(config, trainer.step, trainer.updates)
    if config.warm_up and trainer.step == 0:
        worker = Worker(config, renderer, backend=LocalBackend(model, tokenizer=renderer.tokenizer))
        while needs_warm_up(config, trainer, await worker.held_out()):
            report.add({"step": 0, "rollouts": 0, **warm_up(config, trainer, renderer)})
            trainer.save(checkpoint)
    server = None if config.server == "local" else server_of(config, renderer)
    recorded = iter(dataset)
    count = config.boards * config.rollouts
    while True:
        await publish(config, trainer, server)
        if trainer.step >= config.steps:
            break
        games: dict[tuple[int, int], Any] = {}
        left_out = 0
        while len(games) < count:
            trajectory = next(recorded)
            extra = trajectory.extra
            key = extra["group"], extra["game"]
            if extra["step"] != trainer.step or key in games:
                left_out += 1
            else:
                games[key] = trajectory
        trajectories = [games[key] for key in sorted(games)]
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
        trainer.reading = dataset.state_dict()
        trainer.save(checkpoint)
    if server is not None:
        await server.teardown()


async def publish(config: Config, trainer: Trainer, server: InferenceEngineClient | None) -> None:
    """Write the weights as a model directory, read them into the paused server, and name them."""
    folder = config.out / "weights" / str(trainer.step)
    if not folder.exists():  # else a server may be reading them
        written = config.out / "weights.new"
        shutil.rmtree(written, ignore_errors=True)
        shutil.copytree(config.out / "model", written)
        save_file(trainer.model.state_dict(), written / "model.safetensors", metadata={"format": "pt"})
        folder.parent.mkdir(exist_ok=True)
        written.rename(folder)
    if server is not None:
        await server.pause_generation("wait")
        await server.load_weights(str(folder.resolve()), weight_version=f"step-{trainer.step}")
        await server.resume_generation()
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


def server_of(config: Config, renderer: Renderer) -> InferenceEngineClient:
    """Return a client of the server."""
    engine = HTTPEngine(VLLMBackend(), HTTPTransport(config.server), model="tiny")
    return InferenceEngineClient([engine], renderer=renderer)


async def play(config: Config, process: Process) -> None:
    """Play this worker's games of each step, and ship them."""
    directory = config.out / "model"
    renderer = Renderer.from_pretrained(directory)
    model = LocalModel(directory) if config.server == "local" else None
    if model is None:
        worker = Worker(config, renderer, server_of(config, renderer), model="tiny")
    else:
        worker = Worker(config, renderer, backend=model.backend)
    played, latest = -1, config.out / "latest.json"
    sender = Sender(process.receivers)
    try:
        await sender.connect(timeout=None)
        while True:
            named = json.loads(latest.read_text()) if latest.exists() else {"step": played}
            if named["step"] >= config.steps:
                break
            if named["step"] == played:
                await asyncio.sleep(0.05)
                continue
            if model is not None:
                await model.load_weights(named["path"], weight_version=f"step-{named['step']}")
            games = games_of(config, named["step"])[process.number :: process.count]
            async for trajectory in worker.stream(named["step"], games):
                await sender.send(trajectory)
            played = named["step"]
    finally:
        # The games that the trainer wanted are in the files before it names the last weights.
        await sender.aclose(timeout=0)


def fleet_on(engine: str, config: Config) -> RunningFleet:
    """Return what runs the fleet: `local` processes, or actors on `ray`, whose cluster was joined."""
    if engine == "local":
        return LocalFleet(fleet_of(config))
    from mmrender.integrations.ray_fleet import RayFleet

    return RayFleet(fleet_of(config))


def main() -> None:
    """Run the fleet to its end. On Ray, `RAY_ADDRESS` names the cluster; without it, this machine is one."""
    engine, *flags = sys.argv[1:] or ["--help"]
    if engine not in ("local", "ray"):
        parse(["--help"], program="grpo.processes local|ray")
    config = parse(flags, program=f"grpo.processes {engine}")
    if engine == "ray":
        import ray

        ray.init()
    with fleet_on(engine, config) as fleet:
        fleet.run()


if __name__ == "__main__":
    main()
