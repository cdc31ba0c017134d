"""Measure what the library costs a rollout, by part, and what share of a step that is.

    PYTHONPATH=examples python -m grpo.costs --game zoom --out runs/zoom

Games are played by a model that costs nothing, so that what is left is the worker's: processor time of all
threads, with the concurrency of a run. `ship` writes the frames of a trajectory and reads them; `collate`
packs the games of a step. Where the folder holds a run with the same settings, its metrics give the share of
a step. That of a model of 7 billion parameters is computed, from `Accelerator` alone.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from grpo.config import Config, build, parse
from grpo.games import CALL, game_of
from grpo.trainer import with_advantages
from grpo.worker import Worker
from mmrender import Renderer, Trajectory
from mmrender.client.transport import NullTransport
from mmrender.client.types import EngineRequest, EngineResponse, Usage
from mmrender.training import ModelFamily, collate, first_fit_decreasing

PARTS: Final = ("render", "bridge", "append", "bookkeeping", "ship", "collate", "game")
STEPS: Final = 4
"""Steps of a measurement, after one that fills memos."""


@dataclass(frozen=True)
class Accelerator:
    """What a step of a larger model is computed from.

    Peak and bandwidth are those of NVIDIA's data sheet of the H100 SXM; the rest is assumed.

    Attributes:
        parameters: Of the model; its vision tower is counted as one of its layers would be.
        peak: Floating-point operations a second, bfloat16, dense.
        used: Share of the peak that prefill and training reach.
        bandwidth: Bytes a second; a decoded token reads all weights once for the whole batch.
        batch: Sequences that are decoded at once.
    """

    parameters: float = 7e9
    peak: float = 989e12
    used: float = 0.4
    bandwidth: float = 3.35e12
    batch: int = 256

    def seconds(self, tokens: float, sampled: float) -> float:
        """Seconds of one accelerator for a rollout: prefilled once, decoded, trained on."""
        passes = (2 + 6) * self.parameters * tokens / (self.peak * self.used)
        return passes + 2 * self.parameters * sampled / self.bandwidth / self.batch


class Scripted:
    """A model that costs nothing: it asks for the first cell, and then answers the first."""

    name: Final = "scripted"

    def __init__(self, renderer: Renderer, game: str) -> None:
        ends = renderer.get_stop_token_ids()[:1] if game == "zoom" else []
        said = [renderer.tokenizer.encode(text) + ends for text in (CALL % "A", "A")]
        self._said = dict(enumerate(said if game == "zoom" else said[1:], 1))
        self.transport = NullTransport()

    async def generate(self, request: EngineRequest, transport: Any, **options: Any) -> EngineResponse:
        """Answer by the number of pictures in the prompt."""
        ids = self._said[len(request.multi_modal_data.mm_items["image"])]
        return EngineResponse(ids, [-1.0] * len(ids), "stop", Usage(len(request.prompt_ids), len(ids)))

    async def resolve_max_prompt_len(self, model: str, transport: Any = None) -> None:
        """Name no bound."""

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether a prompt was too long: none is."""
        return False


def count(spent: dict[str, float], part: str, owner: Any, name: str) -> None:
    """Count the processor time of a method of a class, in the thread that calls it."""
    method: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*arguments, **options)
        finally:
            spent[part] += time.thread_time() - start

    setattr(owner, name, counted)


async def measure(config: Config) -> tuple[dict[str, float], float, float]:
    """Return processor seconds of each part a rollout; and tokens a rollout, all and sampled."""
    directory = build(config)
    renderer, spent = Renderer.from_pretrained(directory), defaultdict[str, float](float)
    family = ModelFamily.from_config(directory)
    worker = Worker(config, renderer, backend=Scripted(renderer, config.game))
    for part, owner, names in (
        ("render", Renderer, ("render",)),
        ("bridge", Renderer, ("bridge_to_next_turn",)),
        ("append", Trajectory, ("append",)),
        ("game", type(game_of(config, renderer)()), ("reset", "step")),
    ):
        for name in names:
            count(spent, part, owner, name)
    rollouts = tokens = sampled = 0
    for step in range(STEPS + 1):
        if step == 1:
            spent.clear()
            rollouts = tokens = sampled = 0
        start, before = time.process_time(), sum(spent.values())
        games = await worker.train_rollouts(step)
        spent["bookkeeping"] += time.process_time() - start - (sum(spent.values()) - before)
        start = time.process_time()
        games = [Trajectory.from_frames(game.to_frames()) for game in games]
        spent["ship"] += time.process_time() - start
        start = time.process_time()
        samples = with_advantages(games)
        lengths = [len(sample) for sample in samples]
        rows = first_fit_decreasing(lengths, max(config.row_tokens, *lengths))
        collate(samples, family, pad_token_id=0, rows=rows)
        spent["collate"] += time.process_time() - start
        rollouts += len(games)
        tokens += sum(lengths)
        sampled += sum(int(sample.loss_mask.sum()) for sample in samples)
    return {part: spent[part] / rollouts for part in PARTS}, tokens / rollouts, sampled / rollouts


def report(config: Config) -> None:
    """Measure, and print a table in Markdown."""
    spent, tokens, sampled = asyncio.run(measure(config))
    file, step = config.out / "metrics.jsonl", None
    if file.exists():
        rows = [row for row in map(json.loads, file.read_text().splitlines()) if "train_processor_s" in row]
        rows = [row for row in rows if "reward" in row][-20:]
        seconds = sum(row["rollout_processor_s"] + row["train_processor_s"] for row in rows)
        step = seconds / len(rows) / config.boards / config.rollouts
    larger = Accelerator().seconds(tokens, sampled)
    print(
        f"{tokens:.0f} tokens a rollout, {sampled:.0f} of them sampled; 7B: {1e3 * larger:.1f} ms, computed"
    )
    print("| part | ms a rollout | share of a step here | of a step at 7B |\n|---|---|---|---|")
    for part, own in [*spent.items(), ("all but the game", sum(spent.values()) - spent["game"])]:
        here = "" if step is None else f"{100 * own / step:.1f} %"
        print(f"| {part} | {1e3 * own:.2f} | {here} | {100 * own / (own + larger):.2f} % |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(parse(program="grpo.costs"))
