"""`mmrender serve`: the endpoint over servers that run already, as one call for a command line."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mmrender.client.generation import BackendName, resolve_backend
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.policy import ClientPolicy
from mmrender.engines.server import EngineServer, ServerSettings
from mmrender.errors import InputError


def serve(
    urls: Sequence[str],
    *,
    engine_model: str,
    settings: ServerSettings,
    backend: BackendName = "vllm",
    controls: Sequence[str] = (),
    renderer: Any = None,
    policy: ClientPolicy | None = None,
    started: Callable[[str], None] = print,
) -> None:
    """Serve OpenAI's routes over engines until interrupted.

    Args:
        urls: The engines' servers.
        engine_model: Name under which they know the model.
        settings: What is served, where, and to whom.
        backend: What kind of server they are.
        controls: For each engine the server that has its control routes, where that is another one.
        renderer: A renderer, to render chat here and sample in tokens; None passes chat on to the engines.
        policy: Routing, limits and times.
        started: Told the URL once it listens.

    Raises:
        InputError: There is no engine, or not one control server for each.
        EngineStateError: The address cannot be listened on.
        MissingDependencyError: The `serve` extra is not installed.
    """
    if controls and len(controls) != len(urls):
        raise InputError(
            "there is not one for each engine",
            where="controls",
            expected=str(len(urls)),
            got=str(len(controls)),
        )
    wire = resolve_backend(backend, None, engine_model)
    ways: Sequence[str | None] = controls or [None] * len(urls)
    engines = [
        HTTPEngine(wire, url, model=engine_model, control=control)
        for url, control in zip(urls, ways, strict=True)
    ]
    client = InferenceEngineClient(engines, renderer=renderer, policy=policy)

    async def run() -> None:
        try:
            await EngineServer(client, settings).serve(started=started)
        finally:
            await client.teardown(wait=settings.stop_seconds)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        return
