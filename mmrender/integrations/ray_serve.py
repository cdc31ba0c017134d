"""Gateways on Ray Serve: sessions spread over replicas, and each session always with the same one.

Serve's own sticky routing (`ConsistentHashRouter`) takes the session from a header. A replica that is started
again has another id there, so a session whose replica died would begin anew elsewhere. Here each gateway is a
deployment with one replica and one file, and an ingress forwards requests by the session's name.
"""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from blake3 import blake3
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mmrender.client.types import RendererBackend
from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import InputError, check_count
from mmrender.gateway.app import refusal
from mmrender.gateway.failures import RequestError
from mmrender.gateway.gateway import Gateway
from mmrender.gateway.settings import GatewaySettings
from mmrender.renderer import Renderer
from mmrender.shipping.address import is_loopback

Engines: TypeAlias = str | Sequence[str] | InferenceEngineClient | RendererBackend
ASGIMessage: TypeAlias = Mapping[str, Any]

_MAX_ONGOING: Final = 10_000
"""Requests that a replica answers at a time. The gateway's settings bound them by key."""
_HEALTH_SECONDS: Final = 2.0
"""Seconds between checks. A dead replica is started again after the next one."""
_TAKEN_SECONDS: Final = 60.0
"""Seconds after which an answer that the ingress has not taken counts as undelivered."""
_MAX_OPENING_BYTES: Final = 1 << 20
"""A longer request for a session is read by a gateway alone, once it has checked the key."""
_SCOPE: Final = ("type", "http_version", "method", "scheme", "path", "query_string", "root_path", "headers")


def gateway_deployment(
    engines: str | Sequence[str] | Callable[[Renderer], Engines],
    model: str,
    *,
    out: str | os.PathLike[str],
    gateways: int = 2,
    ingresses: int = 1,
    load: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    settings: GatewaySettings | None = None,
    **options: Any,
) -> Any:
    """Return a Serve application of several gateways, for `serve.run`.

    Requests of a session reach the gateway that its name hashes to. If its replica dies, Serve starts another
    one, which opens the same file and goes on with all sessions. Requests wait for it. A request that it was
    answering gets a 503, which the clients of OpenAI and Anthropic repeat.

    Args:
        engines: URLs of inference servers, or a function that each replica calls with its renderer and that
            returns the `engines` of a `Gateway`.
        model: Model directory or hub id, reachable from all machines.
        out: Folder on a file system that all machines share. Gateway 0 of 2 keeps finished trajectories in
            `gateway-0-of-2.mmr`, and open sessions beside it.
        gateways: Number of gateways. A folder keeps its number.
        ingresses: Number of replicas that forward requests.
        load: Further arguments of `Renderer.from_pretrained`.
        deployment: Serve's options of each gateway, such as `{"ray_actor_options": {"num_cpus": 2}}`.
        settings: Keys and limits. Serve has the address. Without a key, callers of other machines are
            refused, unless `open_to_all`.
        **options: Further arguments of `Gateway`, which are pickled. Its `model` is `engine_model`.

    Raises:
        InputError: `gateways` or `ingresses` is less than 1.
    """
    check_count("gateways", gateways)
    check_count("ingresses", ingresses)
    settings = settings or GatewaySettings()
    shared = {"settings": settings, "model": options.pop("engine_model", model), **options}
    limits: dict[str, Any] = {"max_ongoing_requests": _MAX_ONGOING, "health_check_period_s": _HEALTH_SECONDS}
    replica = serve.deployment(_GatewayReplica).options(**{**limits, **(deployment or {}), "num_replicas": 1})
    bound = [
        replica.options(name=f"gateway-{number}").bind(
            engines,
            model,
            folder=Path(out),
            number=number,
            gateways=gateways,
            load=dict(load or {}),
            options=shared,
        )
        for number in range(gateways)
    ]
    ingress = serve.deployment(_Ingress).options(name="ingress", num_replicas=ingresses, **limits)
    return ingress.bind(settings, *bound)


def gateway_of(session: str, gateways: int) -> int:
    """Return the number of the gateway that has a session."""
    return int.from_bytes(blake3(session.encode("utf-8", "replace")).digest(8), "big") % gateways


class _LeftError(OSError):
    """The caller has left. Servers raise an `OSError` then."""


class _GatewayReplica:
    """One gateway. Serve runs one replica of it, so that one process writes the file."""

    def __init__(
        self,
        engines: Any,
        model: str,
        *,
        folder: Path,
        number: int,
        gateways: int,
        load: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        out = _file(folder, number, gateways)
        renderer = Renderer.from_pretrained(model, **load)
        engines = engines(renderer) if callable(engines) else engines
        self._gateway = Gateway(engines, renderer, out=out, **options)
        self._untaken: dict[str, asyncio.Event] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def check_health(self) -> None:
        """Begin to look after sessions, also those that the replica before has left. Serve calls it."""
        self._gateway.begin()

    async def taken(self, request_id: str) -> None:
        """Note that the ingress has the last part of a response."""
        if (taken := self._untaken.get(request_id)) is not None:
            taken.set()

    async def answer(
        self, request_id: str, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[ASGIMessage]:
        """Run the gateway's application on a request, and yield its messages.

        Serve buffers them, so the last one counts as sent only when `taken` is called.
        """
        messages: asyncio.Queue[ASGIMessage | None] = asyncio.Queue()
        bodies, left, taken = [body], asyncio.Event(), asyncio.Event()
        self._untaken[request_id] = taken

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: ASGIMessage) -> None:
            messages.put_nowait(message)
            if _is_last(message) and not left.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(taken.wait(), _TAKEN_SECONDS)
            if left.is_set() or (_is_last(message) and not taken.is_set()):
                raise _LeftError

        async def run() -> None:
            try:
                await self._gateway.app(dict(scope), receive, send)
            except _LeftError:
                pass
            finally:
                del self._untaken[request_id]
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        self._running.add(task)  # the event loop keeps no reference
        task.add_done_callback(self._running.discard)
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task  # an error breaks the stream
        finally:
            left.set()
            taken.set()


class _Target(NamedTuple):
    """The gateway of a request, and the path that it is asked for."""

    gateway: int
    path: str


class _Ingress:
    """Forwards each request to the gateway of its session."""

    def __init__(self, settings: GatewaySettings, *gateways: Any) -> None:
        self._max_body_bytes = settings.max_body_bytes
        self._is_open = bool(settings.keys) or settings.open_to_all
        self._gateways = gateways

    async def __call__(self, request: Request) -> Response:
        if not self._is_open and not (request.client and is_loopback(request.client.host)):
            message = "the gateways have no key, so only this machine may call them"
            return refusal(request.url.path, RequestError(403, message, code="wrong_caller"))
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                break  # the gateway refuses it
        target = self._target(request, bytes(body))
        if target is None:
            message = "the request names no session: put /s/NAME before /v1 in the base URL. "
            message += "For what one gateway answers, put /gateways/NUMBER before the path"
            return refusal(request.url.path, RequestError(400, message, code="no_session"))
        scope = {name: request.scope[name] for name in _SCOPE} | {"path": target.path}
        request_id, gateway = secrets.token_hex(16), self._gateways[target.gateway]
        answer = gateway.options(stream=True).answer.remote(request_id, scope, bytes(body))
        try:
            start = await anext(aiter(answer))
        except (RayActorError, DeploymentUnavailableError):
            message = "the gateway of this session has died and is started again"
            return refusal(request.url.path, RequestError(503, message, code="gateway_restarts"))
        response = StreamingResponse(self._pieces(gateway, request_id, answer), start["status"])
        response.raw_headers = [(bytes(name), bytes(value)) for name, value in start["headers"]]
        return response

    async def _pieces(self, gateway: Any, request_id: str, answer: Any) -> AsyncIterator[bytes]:
        """Yield the parts of a body. The connection breaks if the gateway dies before the last one."""
        is_whole = False
        try:
            async for message in answer:
                if _is_last(message):
                    is_whole = True
                    with suppress(RayActorError):  # the answer is on disk
                        await gateway.taken.remote(request_id)
                yield message.get("body", b"")
        except RayActorError:
            if not is_whole:
                raise
        finally:
            if not is_whole:
                answer.cancel()

    def _target(self, request: Request, body: bytes) -> _Target | None:
        """Return where a request goes, or None if it names neither a session nor a gateway."""
        root, path, count = request.scope.get("root_path", ""), request.scope["path"], len(self._gateways)
        parts = path.removeprefix(root).strip("/").split("/")
        match [request.method, *parts]:
            case [_, "s" | "sessions", name, *_]:
                return _Target(gateway_of(name, count), path)
            case ["POST", "sessions"]:
                name = _name_in(body)
                if name is None:
                    name = f"session-{secrets.token_hex(8)}"
                    return _Target(gateway_of(name, count), f"{path.rstrip('/')}/{name}")
                return _Target(gateway_of(name, count), path)
            case ["GET", "gateways", number, "sessions" | "metrics" | "health" as asked]:
                if number.isdecimal() and int(number) < count:
                    return _Target(int(number), f"{root}/{asked}")
            case ["GET" | "HEAD", ""] | ["GET", "health"] | ["GET", "v1", "models", *_]:
                return _Target(0, path)
        return None


def _name_in(body: bytes) -> str | None:
    """Return the name of the session that a request wants to open, None also if only the gateway can tell."""
    if len(body) > _MAX_OPENING_BYTES:
        return None
    try:
        name = json.loads(body).get("name")
    except (ValueError, AttributeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _is_last(message: ASGIMessage) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _file(folder: Path, number: int, gateways: int) -> Path:
    """Return the file of a gateway.

    Raises:
        InputError: The folder belongs to another number of gateways, which hashes sessions otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = [
        path.name for path in sorted(folder.glob("gateway-*.mmr")) if not path.match(f"*-of-{gateways}.mmr")
    ]
    if others:
        raise InputError(
            "the folder contains sessions of another number of gateways",
            where=str(folder),
            expected=f"files of {gateways} gateways",
            got=others[0],
            remedy="Name another folder",
        )
    return folder / f"gateway-{number}-of-{gateways}.mmr"
