"""The processes of `fleet_faults.py`: stub engines over HTTP, workers that play, and ranks that "train".

All goes on from files of the folder: an engine from its journal, a worker from the files of the receivers, a rank from
its journal, which is its checkpoint.
"""

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from PIL import Image

from mmrender import Renderer, RendererClient
from mmrender.client.transport import RetryPolicy
from mmrender.client.vllm import VLLMBackend
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.integrations.fleet import Fleet, Process, Role, receivers
from mmrender.rollout import Observation, rollouts
from mmrender.shipping import Sender
from mmrender.training import Descriptor, ModelFamily, collate_micro_batch, plan_steps
from mmrender.training.packing import MicroBatch

WAIT_S = 600.0
"""Bound on waits that only a defect makes long."""
MAX_TOKENS = 4096
"""Tokens of a micro-batch."""
SAYS = re.compile(r"step (\d+) game (\d+) life (\S+) turn (\d+)")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a simulation, and its deadlines in seconds.

    Attributes:
        folder: Folder of the fleet.
        model: Model directory without weights.
        environments: Games of a step, over all workers.
        turns: Turns of a game.
        engines: Stub engines.
        mortal: Engines with a process of their own, which is killed.
        slow: Engines that take `slow_s` for an answer.
        hung: Engines that hang in the middle of the run.
        control_s: Deadline of a control call on each engine.
        attempt_s: Deadline of a request to one engine.
    """

    folder: Path
    model: Path
    workers: int = 8
    environments: int = 1000
    turns: int = 2
    engines: int = 64
    mortal: int = 4
    slow: int = 8
    hung: int = 4
    receivers: int = 4
    ranks: int = 16
    control_s: float = 10.0
    attempt_s: float = 20.0
    service_s: float = 0.05
    slow_s: float = 1.5

    def fleet(self) -> Fleet:
        """The fleet."""
        spread = {"scheduling_strategy": "SPREAD"}  # on Ray, so that a machine that is lost has some of each
        roles = {
            "engine": Role(Bound(serve, self), 1 + self.mortal, serves=True, options=spread),
            "receiver": receivers(self.receivers, role={"options": spread}, memory_bytes=16 << 20),
            "worker": Role(Bound(play, self), self.workers, options=spread),
            "trainer": Role(Bound(train, self), self.ranks, options=spread),
        }
        return Fleet(self.folder, roles)

    def games(self, worker: int) -> range:
        """The games of a worker in each step."""
        return range(worker, self.environments, self.workers)

    def file(self, name: str) -> Path:
        """A file of the folder."""
        return self.folder / name


@dataclass(frozen=True)
class Bound:
    """A function of a role with its settings."""

    function: Any
    sizes: Sizes

    def __call__(self, process: Process) -> Any:
        return self.function(self.sizes, process)


def write(path: Path, value: Any) -> None:
    """Write JSON as a whole."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(msgspec.json.encode(value))
    new.replace(path)


def read(path: Path) -> Any:
    """Read JSON, None of a file that is not there."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_bytes())


def lines_of(path: Path) -> list[Any]:
    """The whole lines of a journal."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


class Journal:
    """A file of lines, of which a torn last one is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self.lines = lines_of(path)
        data = path.read_bytes() if path.exists() else b""
        self._file = path.open("r+b" if path.exists() else "wb")
        self._file.truncate(data.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)

    def add(self, value: Any) -> None:
        """Append a line, which survives the process."""
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()


def key_of(ids: Any) -> str:
    """The identity of a prompt."""
    return blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=12).hexdigest()


# --- engines ---


class StubEngine:
    """vLLM's routes without a model. An answer is the engine's number and the answer's, in digits."""

    def __init__(self, sizes: Sizes, number: int, tokens: tuple[list[int], int]) -> None:
        self.sizes, self.number = sizes, number
        self.digits, self.stop = tokens
        self.service = sizes.slow_s if number % sizes.engines < sizes.slow else sizes.service_s
        self.journal = Journal(sizes.file(f"engine-{number}.jsonl"))
        self.count = len(self.journal.lines)
        self.journal.lines.clear()
        self.version, self.paused = "v0", asyncio.Event()
        self.is_hung = sizes.file(f"hung-{number}").exists

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, or never."""
        path, body = request.path, await request.read()
        while self.is_hung():
            await asyncio.sleep(3600)
        if path == "/inference/v1/generate":
            return await self.generate(json.loads(body))
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "stub", "max_model_len": 4096}]})
        if path == "/pause":
            self.paused.set()
        elif path == "/resume":
            self.paused = asyncio.Event()
        elif path == "/update_weight_version":
            self.version = json.loads(body)["new_version"]
        return web.json_response({"is_paused": self.paused.is_set(), "weight_version": self.version})

    async def generate(self, body: Any) -> web.Response:
        """Answer after the service time; a pause ends it after half of the tokens."""
        prompt, version, paused = body["token_ids"], self.version, self.paused
        ids: list[int] = []
        if not paused.is_set():
            self.count += 1
            ids = [self.digits[int(digit)] for digit in f"{self.number:03d}{self.count:07d}"] + [self.stop]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(paused.wait(), self.service)
        whole = not paused.is_set()
        ids = ids if whole else ids[: len(ids) // 2]
        if ids:
            self.journal.add({"key": key_of(prompt), "tail": prompt[-80:], "ids": ids, "version": version})
        content = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {
            "finish_reason": "stop" if whole else "abort",
            "token_ids": ids,
            "logprobs": {"content": content},
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}] if ids else None,
        }
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": len(prompt)}})


def engines_of(sizes: Sizes, host: int) -> range:
    """The engines of an engine process: the last `mortal` ones have one each, all others are of process 0."""
    shared = sizes.engines - sizes.mortal
    return range(shared) if host == 0 else range(shared + host - 1, shared + host)


async def serve(sizes: Sizes, process: Process) -> None:
    """Serve engines at ports that they keep."""
    tokens = read(sizes.file("tokens.json"))
    runners, urls = [], []
    for number in engines_of(sizes, process.number):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", StubEngine(sizes, number, tokens).handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        runners.append(runner)
        port = read(sizes.file(f"port-{number}.json")) or 0
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        write(sizes.file(f"port-{number}.json"), runner.addresses[0][1])
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    process.publish(" ".join(urls))
    await asyncio.to_thread(process.wait)
    for runner in runners:
        await runner.cleanup()


async def client_of(
    sizes: Sizes, process: Process, renderer: Renderer | None = None
) -> InferenceEngineClient:
    """A client of all engines, once they listen."""
    urls: list[str] = []
    async with asyncio.timeout(WAIT_S):
        while len(urls) < sizes.engines:
            await asyncio.sleep(0.1)
            urls = " ".join(await asyncio.to_thread(process.addresses, "engine")).split()
    backend = VLLMBackend(images="features", pixels="float32")
    return InferenceEngineClient(
        [HTTPEngine(backend, url, model="stub") for url in urls],
        renderer=renderer,
        retries=RetryPolicy(attempts=10, wait_max=2.0),
        attempt_timeout=sizes.attempt_s,
        pause_timeout=sizes.control_s,
        update_timeout=sizes.control_s,
    )


# --- workers ---


class Game:
    """An environment that shows a picture each turn, and says which turn of which game it is."""

    tools = None

    def __init__(self, turns: int) -> None:
        self._turns, self._turn, self._waited = turns, 0, 0.0

    def _observe(self) -> Observation:
        pixels = np.random.default_rng([self._seed, self._turn]).integers(0, 256, (16, 16, 3), np.uint8)
        text = f"{self._says} turn {self._turn}"
        parts = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": text}]
        self._asked = time.monotonic()
        return Observation([{"role": "user", "content": parts}])

    def reset(self, prompt: Any, extras: Mapping[str, Any]) -> Observation:
        self._seed, self._says = extras["seed"], extras["says"]
        return self._observe()

    def step(self, turn: Any) -> Observation:
        self._turn += 1
        self._waited = max(self._waited, time.monotonic() - self._asked)
        if self._turn == self._turns:
            return Observation(reward=1.0, done=True, info={"waited": self._waited})
        return self._observe()


def recorded(process: Process) -> set[str]:
    """The games in the files of the receivers now, as `STEP/GAME`."""
    return {str(each.group) for each in process.dataset(rank=0, world=1).follow()}


async def play(sizes: Sizes, process: Process) -> None:
    """Play the games of each step that is released, and ship them."""
    lives = Journal(sizes.file(f"worker-{process.number}.jsonl"))
    life = len(lives.lines)
    lives.add(life)
    renderer = Renderer.from_pretrained(sizes.model)
    engines = await client_of(sizes, process, renderer)
    client = RendererClient(renderer, engines, sampling_params={"max_tokens": 16, "temperature": 1.0})
    done = await asyncio.to_thread(recorded, process) if life else set()
    step = attempts = 0
    async with contextlib.AsyncExitStack() as stack:
        sender = Sender(process.receivers)
        stack.push_async_callback(sender.aclose, None)
        await sender.connect(None)
        while (released := read(sizes.file("released.json")) or {"step": -1, "last": False}) and not (
            released["last"] and step > released["step"]
        ):
            if step > released["step"]:
                await asyncio.sleep(0.1)
                continue
            games = [game for game in sizes.games(process.number) if f"{step}/{game}" not in done]
            says = [f"step {step} game {game} life {life}.{attempts}" for game in games]
            extras = [{"seed": game, "says": each} for game, each in zip(games, says, strict=True)]
            names = dict(zip(map(str, range(len(games))), zip(games, says, strict=True), strict=True))
            attempts += 1
            played = rollouts(
                client,
                lambda: Game(sizes.turns),
                [[]] * len(games),
                extras=extras,
                concurrency=len(games) or 1,
            )
            async for trajectory in played:
                if trajectory.error is None:  # else it is played again
                    game, said = names[trajectory.extra["name"].partition("_")[0]]
                    trajectory.extra |= {"group": f"{step}/{game}", "says": said}
                    await sender.send(trajectory)
                    done.add(f"{step}/{game}")
            step += all(f"{step}/{game}" in done for game in sizes.games(process.number))
            done -= {each for each in done if int(each.partition("/")[0]) < step}
    await engines.teardown()


# --- trainer ranks ---


class Planner:
    """Rank 0's view of all files: the first recording of each game of each step."""

    def __init__(self, sizes: Sizes, process: Process) -> None:
        self._sizes = sizes
        self._following = process.dataset(rank=0, world=1, wait=WAIT_S).follow()
        self._games: dict[int, dict[str, Descriptor]] = {}
        self._step = 0

    def games_of(self, step: int) -> list[Descriptor]:
        """Wait until all games of a step are recorded, and return their descriptors."""
        for early in range(self._step, step):
            self._games.pop(early, None)
        self._step = step
        while len(self._games.get(step, ())) < self._sizes.environments:
            descriptor = next(self._following)
            number = int(str(descriptor.group).partition("/")[0])
            if number >= step:
                self._games.setdefault(number, {}).setdefault(str(descriptor.group), descriptor)
        return [*self._games[step].values()]


class Plan(msgspec.Struct):
    """The games of a step, and by rank the micro-batches, each a list of indices of games."""

    games: list[Descriptor]
    ranks: list[list[list[int]]]


def trained_on(sizes: Sizes, plan: Plan, dataset: Any, rank: int) -> list[Any]:
    """Read and batch a rank's part of a step; return what it would train on, by game: prompts and tokens."""
    family = ModelFamily.from_config(sizes.model)
    micro_batches = [MicroBatch(tuple(indices)) for indices in plan.ranks[rank]]
    samples = dataset.load(plan.games, [index for each in micro_batches for index in each.samples])
    for each in filter(lambda one: one.samples, micro_batches):
        batch = collate_micro_batch(samples, each, family, pad_token_id=0)
        if int(batch.loss_mask.sum()) != sum(int(samples[index].loss_mask.sum()) for index in each.samples):
            raise RuntimeError("a batch has other sampled tokens than its samples")
    games = []
    for sample in samples.values():
        ends = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0, append=0))
        turns = [
            [sample.token_ids[:start].tolist(), sample.token_ids[start:stop].tolist()]
            for start, stop in ends.reshape(-1, 2).tolist()
        ]
        extra = sample.extra
        waited = extra["info"]["waited"]
        games.append({"group": extra["group"], "says": extra["says"], "turns": turns, "waited": waited})
    return games


def train(sizes: Sizes, process: Process) -> Any:
    """Train on the steps that rank 0 plans."""
    if process.number == 0:
        return lead(sizes, process)
    journal, dataset = Journal(sizes.file(f"trained-{process.number}.jsonl")), process.dataset()
    step = len(journal.lines)
    journal.lines.clear()
    write(sizes.file(f"done-{process.number}.json"), step)
    while True:
        path = sizes.file(f"plan-{step}.json")
        while not path.exists():
            released = read(sizes.file("released.json"))
            if released and released["last"] and step > released["step"]:
                return None
            time.sleep(0.05)
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
        journal.add({"step": step, "games": trained_on(sizes, plan, dataset, process.number)})
        step += 1
        write(sizes.file(f"done-{process.number}.json"), step)


async def lead(sizes: Sizes, process: Process) -> None:
    """Plan steps, train as rank 0, and update the engines' weights when all ranks are done."""
    journal, dataset = Journal(sizes.file("trained-0.jsonl")), process.dataset()
    updates = Journal(sizes.file("updates.jsonl"))
    first = len(journal.lines)
    journal.lines.clear()
    planner, engines = Planner(sizes, process), await client_of(sizes, process)
    release(sizes, first)
    for step in count(first):
        path = sizes.file(f"plan-{step}.json")
        if not path.exists():
            games = await asyncio.to_thread(planner.games_of, step)
            family = ModelFamily.from_config(sizes.model)
            steps = plan_steps(games, family, ranks=sizes.ranks, max_tokens=MAX_TOKENS)
            ranks = [[list(each[rank].samples) for each in steps] for rank in range(sizes.ranks)]
            write(path, Plan(games, ranks))
        is_last = release(sizes, step + 1)
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
        games = await asyncio.to_thread(trained_on, sizes, plan, dataset, 0)
        while any((read(sizes.file(f"done-{rank}.json")) or 0) <= step for rank in range(1, sizes.ranks)):
            await asyncio.sleep(0.05)
        updates.add({"step": step, "time": time.time(), **await update(engines, f"v{step + 1}")})
        journal.add({"step": step, "games": games})
        sizes.file(f"plan-{step - 1}.json").unlink(missing_ok=True)
        if is_last and step == read(sizes.file("released.json"))["step"]:
            break
    await engines.teardown()


def release(sizes: Sizes, step: int) -> bool:
    """Let workers play up to a step, unless the run is to stop; return whether it is."""
    path = sizes.file("released.json")
    released = read(path) or {"step": -1, "last": False}
    if not released["last"]:
        is_last = sizes.file("stop").exists()
        released = {"step": released["step"] if is_last else max(step, released["step"]), "last": is_last}
        write(path, released)
    return bool(released["last"])


async def update(engines: InferenceEngineClient, version: str) -> dict[str, Any]:
    """Update the weights of all engines; return the seconds of each call, and outcomes by their number."""
    if engines.is_paused:
        raise RuntimeError("the client is paused before an update")
    calls = {
        "pause": lambda: engines.pause_generation("abort"),
        "load": lambda: engines.load_weights("/weights", weight_version=version),
        "resume": engines.resume_generation,
    }
    seen: dict[str, Any] = {}
    for name, control in calls.items():
        begun = time.monotonic()
        results = await control()
        seen[name] = time.monotonic() - begun
        seen[f"{name}_outcomes"] = Counter(each.outcome for each in results)
    return seen
