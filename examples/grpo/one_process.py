"""A run of one process: a model of this process samples, and the same weights are trained."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import chain
from typing import Final

from grpo.config import Config, build
from grpo.report import Report, save_plot
from grpo.trainer import Trainer
from grpo.worker import Player, Worker, counts_of, needs_warm_up, warm_up
from mmrender import Renderer
from mmrender.client.local import LocalBackend
from mmrender.model.weights import load_model
from mmrender.trajectory import load_trajectories, save_trajectories
from mmrender.view import Page

SHOWN: Final = 4
"""Games of the first step and of the last that a page shows."""


CHECKPOINT: Final = "checkpoint.pt"


class Clock:
    """Seconds and processor seconds by part of a step."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what the block takes."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.parts[f"{name}_s"] += time.perf_counter() - wall
        self.parts[f"{name}_processor_s"] += time.process_time() - processor


def ended(config: Config, step: int, report: Report) -> bool:
    """Whether the run has taken all its steps, or plays well enough after the last one."""
    held_out = report.last.get("held_out")
    return step >= config.steps or (step > 0 and held_out is not None and held_out >= config.until)


@asynccontextmanager
async def playing(config: Config, renderer: Renderer, backend: LocalBackend) -> AsyncGenerator[Player, None]:
    """What plays the games: an agent that calls a gateway of this process, or environments."""
    if config.agent:
        from grpo.agent_worker import AgentWorker  # needs a web server, and the client of OpenAI

        async with AgentWorker(config, renderer, backend) as worker:
            yield worker
    else:
        yield Worker(config, renderer, backend=backend)


async def begin(config: Config, trainer: Trainer, worker: Player, report: Report) -> None:
    """Play the held-out boards before the first update, and train on recorded games if the game has some."""
    if not report.last:
        clock = Clock()
        with clock.part("evaluate"):
            share = await worker.held_out()
        report.add({"step": 0, "rollouts": 0, "updates": 0, "held_out": share, **clock.parts})
    while needs_warm_up(config, trainer, report.last["held_out"]):
        clock = Clock()
        with clock.part("train"):
            seen = warm_up(config, trainer, worker.renderer)
        with clock.part("evaluate"):
            seen["held_out"] = await worker.held_out()
        report.add({"step": 0, "rollouts": 0, **seen, **clock.parts})
        trainer.save(config.out / CHECKPOINT)


async def run(config: Config) -> None:
    """Train to the end, or go on from a checkpoint."""
    directory, checkpoint, early = build(config), config.out / CHECKPOINT, config.out / "early.mmr"
    model = load_model(directory, "float32", "cpu", purpose="the example")
    renderer = Renderer.from_pretrained(directory)
    trainer = Trainer(config, model, renderer.tokenizer)
    if checkpoint.exists():
        trainer.load(checkpoint)
    backend = LocalBackend(model, tokenizer=renderer.tokenizer, weight_version=str(trainer.step))
    report = Report(config, trainer.step, trainer.updates)
    async with AsyncExitStack() as stack:
        stack.enter_context(report.display)
        worker = await stack.enter_async_context(playing(config, renderer, backend))
        await begin(config, trainer, worker, report)
        while not ended(config, trainer.step, report):
            clock, number = Clock(), trainer.step
            with clock.part("rollout"):
                trajectories = await worker.train_rollouts(number)
            if config.audit_share:
                with clock.part("audit"):
                    trainer.audit(trajectories[:: config.rollouts])
            with clock.part("train"):
                seen = trainer.update(trajectories)
            if config.audit_share and seen["difference"] > config.tolerance:
                raise SystemExit(
                    f"sampler and trainer differ by {seen['difference']:.2g} nats in step {number}"
                )
            await asyncio.to_thread(backend.update_weights, (), str(trainer.step))
            if trainer.step % config.evaluate_every == 0 or trainer.step == config.steps:
                with clock.part("evaluate"):
                    seen["held_out"] = await worker.held_out()
            seen["tokens_per_s"] = seen.pop("tokens") / sum(
                clock.parts[f"{part}_s"] for part in ("rollout", "train")
            )
            report.add(
                {
                    "step": trainer.step,
                    "rollouts": trainer.step * len(trajectories),
                    **seen,
                    **counts_of(trajectories),
                    **clock.parts,
                }
            )
            if number == 0:
                save_trajectories(early, trajectories[:SHOWN])
            if ended(config, trainer.step, report):
                pairs = zip(load_trajectories(early), trajectories, strict=False)
                page = Page(
                    *chain.from_iterable(pairs),
                    renderer=renderer,
                    tools=worker.tools,
                    title="games of the first step and of the last",
                )
                page.save(config.out / "rollouts.html")
            if "held_out" in seen:
                trainer.save(checkpoint)
                save_plot([config.out], config.out / "plot.png")
