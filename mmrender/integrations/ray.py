"""mmrender on Ray: conversations to samples over a cluster, and a pool of renderers in actors.

Items, renderings, samples, trajectories and batches pickle with their pixels out of band, so Ray's object
store keeps them without a copy, and `ray.get` on the same machine returns views of its memory.
"""

import asyncio
import json
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray

from mmrender._version import __version__
from mmrender.errors import InputError, PoolError, check_count
from mmrender.messages import MessageLike
from mmrender.renderer import Renderer
from mmrender.tokens.rendered import RenderedTokens
from mmrender.training.samples import CONVERSATION_COLUMNS, build_training_sample, row_sample
from mmrender.trajectory.sample import TrainingSample


class ToSamples:
    """Renders a batch of conversations to training samples: the class that `ray.data` maps batches with.

    ```python
    import ray
    from mmrender.integrations.ray import ToSamples

    messages = [{"role": "user", "content": "Moo?"}, {"role": "assistant", "content": "A cow."}]
    dataset = ray.data.from_items([{"messages": messages}])
    samples = dataset.map_batches(
        ToSamples, fn_constructor_args=("MODEL",), batch_size=16, compute=ray.data.ActorPoolStrategy(size=4)
    )
    ```

    Args:
        model: Model directory or hub id, loaded once in each actor.
        column: Column of the conversations. Columns `tools`, `images`, `videos`, `audio` and
            `chat_template_kwargs` are read, too.
        load: Further arguments of `Renderer.from_pretrained`.
        **options: Arguments of `build_training_sample`, such as `train_on`.
    """

    def __init__(
        self, model: str, column: str = "messages", *, load: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._renderer = Renderer.from_pretrained(model, **(load or {}))
        self._column = column
        self._options = options

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with a column `sample` in place of the columns of conversations.

        Raises:
            MMRenderError: A conversation cannot be rendered. See `build_training_sample`.
        """
        others = {name: name for name in CONVERSATION_COLUMNS[3:] if name in batch}
        columns = {"messages": self._column, **others}
        samples = np.empty(len(batch[self._column]), object)
        for row in range(len(samples)):
            values = {name: batch[column][row] for name, column in columns.items()}
            samples[row] = row_sample(self._renderer, values, self._options, str(row))
        rest = {name: values for name, values in batch.items() if name not in columns.values()}
        return {**rest, "sample": samples}


def render_to_files(
    conversations: Sequence[Sequence[MessageLike]],
    model: str,
    folder: str | os.PathLike[str],
    *,
    shard_size: int = 64,
    in_flight: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[TrainingSample]:
    """Render conversations on a cluster, a shard to each task, and yield the samples in order.

    Each shard is a file, which is complete or missing. Ray repeats the unfinished shards of a worker that
    dies. A driver that dies can be started again, and renders only the shards without a file. The folder's
    `rendering.json` records model and options of the shards, and each shard's name its conversations.

    Args:
        conversations: The data, equal in every call with this folder.
        model: Model directory or hub id, reachable from all machines.
        folder: Folder of the shards, on a file system that all machines share. They are pickles, which run
            code when they are read, so only trusted writers may have access.
        shard_size: Conversations in a shard.
        in_flight: Tasks that are queued or run at a time.
        on_progress: Called with the numbers of finished shards and of all shards after each one.
        **options: Arguments of `build_training_sample`.

    Raises:
        InputError: The folder contains samples of another model, release, number of conversations or options.
        MMRenderError: A conversation cannot be rendered.
        ray.exceptions.RayError: A shard's worker died more often than Ray retries.
    """
    check_count("shard_size", shard_size)
    check_count("in_flight", in_flight)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    _require_same(
        root / "rendering.json",
        {"model": model, "mmrender": __version__, "conversations": len(conversations), "options": options},
    )
    starts = range(0, len(conversations), shard_size)
    # The end is in the name, so that shards of another size have other names.
    stops = {start: min(start + shard_size, len(conversations)) for start in starts}
    paths = {start: root / f"samples-{start:09d}-{stops[start]:09d}.pickle" for start in starts}
    missing = [start for start in starts if not paths[start].exists()]
    running: dict[Any, int] = {}
    done = len(starts) - len(missing)
    while missing or running:
        while missing and len(running) < in_flight:
            start = missing.pop(0)
            shard = list(conversations[start : stops[start]])
            running[_task.remote(model, shard, start, str(paths[start]), options)] = start
        finished, _ = ray.wait(list(running), num_returns=1)
        for task in finished:
            ray.get(task)
            del running[task]
            done += 1
            if on_progress is not None:
                on_progress(done, len(starts))
    for start in starts:
        yield from pickle.loads(paths[start].read_bytes())  # noqa: S301 - written by `_render_to_file`


def _require_same(manifest: Path, facts: Mapping[str, Any]) -> None:
    """Record model and options of a folder's samples, or require the recorded ones."""
    # Functions are compared by name alone.
    text = json.dumps(facts, indent=2, default=lambda value: getattr(value, "__qualname__", repr(value)))
    if not manifest.exists():
        _write_whole(manifest, text.encode())
        return
    recorded = json.loads(manifest.read_text("utf-8"))
    for name, value in json.loads(text).items():
        if recorded.get(name) != value:
            raise InputError(
                "the folder contains samples of another rendering",
                where=f"{manifest}: {name}",
                expected=repr(recorded.get(name)),
                got=repr(value),
                remedy="Name another folder, or empty this one",
            )


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    partial.write_bytes(content)
    partial.replace(path)


@lru_cache(4)
def _renderer(model: str) -> Renderer:
    """Load a renderer once in each of Ray's worker processes, which run many tasks."""
    return Renderer.from_pretrained(model)


def _render_to_file(model: str, shard: list[Any], start: int, path: str, options: Mapping[str, Any]) -> None:
    samples = [
        build_training_sample(_renderer(model), messages, sample_id=str(start + index), **options)
        for index, messages in enumerate(shard)
    ]
    _write_whole(Path(path), pickle.dumps(samples, protocol=5))


_task: Any = ray.remote(max_retries=8)(_render_to_file)


class _RendererActor:
    """One renderer in its own process. If it dies, Ray starts another and repeats its calls."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._renderer = Renderer.from_pretrained(model, **options)

    def call(self, method: str, arguments: Any, options: Any) -> tuple[RenderedTokens | None, str | None]:
        rendered = getattr(self._renderer, method)(*arguments, **options)
        return rendered, self._renderer.why_not_bridged

    def process_id(self) -> int:
        return os.getpid()


class RayRendererPool(Renderer):
    """A renderer whose `arender` and `abridge_to_next_turn` run in actors, on any machine of the cluster.

    Everything else, such as parsing completions, runs in this process. For calls in actors `nowait` is
    ignored, since Ray queues them.

    Args:
        model: Model directory or hub id, reachable from all machines.
        actors: Number of actors.
        resources: Options of each actor, such as `{"num_cpus": 2}`.
        **options: Options of `Renderer.from_pretrained`.
    """

    def __init__(
        self,
        model: str,
        *,
        actors: int = 4,
        resources: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.__dict__.update(vars(Renderer.from_pretrained(model, **{"workers": 1, **options})))
        limits = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1, **(resources or {})}
        actor: Any = ray.remote(**limits)(_RendererActor)
        self.actors = [actor.remote(model, options) for _ in range(actors)]
        self._turn = cycle(self.actors)

    def __reduce__(self) -> NoReturn:
        raise PoolError("actors cannot be sent to another process", remedy="Make the pool in that process")

    async def _on_worker(
        self, method: Callable[..., Any], nowait: bool, *arguments: Any, **options: Any
    ) -> Any:
        """Call a method in an actor, with the renderer's own errors. Completions are parsed here."""
        if method.__name__ == "parse_response":
            return await super()._on_worker(method, nowait, *arguments, **options)
        call = next(self._turn).call.remote(method.__name__, arguments, options)
        rendered, reason = await _result(call)
        if method.__name__ == "bridge_to_next_turn":
            self.set_outcome(reason)
        return None if rendered is None else replace(rendered, _decode=self.decode)

    def close(self) -> None:
        """End the actors. Idempotent."""
        super().close()
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


async def _result(call: Any) -> Any:
    """Await a call, with the renderer's own errors."""
    try:
        return await asyncio.wrap_future(call.future())
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
