"""Control routes of the engines, as data, and `Controller`, which calls them.

vLLM 0.32: `vllm/entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev/`; they are open where the
server runs with `VLLM_SERVER_DEV_MODE=1`. SGLang 0.5.23: `srt/entrypoints/http_server.py` and
`srt/managers/io_struct.py`. Dynamo 1.6: `dynamo/vllm/worker_factory.py`; its frontend has none of them, they
are on the worker's system server, whose port is `DYN_SYSTEM_PORT`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import urlencode

import msgspec

from mmrender.client.transport import Transport
from mmrender.engines.interface import PauseMode
from mmrender.errors import EngineReplyError, EngineStateError, EngineStatusError, EngineUnsupportedError

Control: TypeAlias = Literal[
    "health",
    "pause",
    "resume",
    "sleep",
    "wake_up",
    "reset_prefix_cache",
    "abort_all",
    "init_weights",
    "update_weights",
    "load_weights",
    "get_version",
    "set_version",
]


class Arg(NamedTuple):
    """Placeholder for an argument of the call; left out where that is None."""

    name: str


@dataclass(frozen=True, slots=True)
class Route:
    """One request.

    Attributes:
        method: HTTP method.
        path: Path below the root.
        query: Query parameters, `Arg` for those of the call.
        body: JSON body, `Arg` for arguments at any depth; None for no body.
        spread: Argument whose mapping is merged into the body.
        needs: Argument without which the request is skipped.
        answer: Where the reply holds the result.
        on_worker: Asked of the worker instead of the server that samples.
        idempotent: Whether it may be repeated.
    """

    method: Literal["GET", "POST"]
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    spread: str | None = None
    needs: str | None = None
    answer: str | None = None
    on_worker: bool = False
    idempotent: bool = True


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Control calls of one engine.

    Attributes:
        engine: Its name.
        controls: By call the requests that carry it out, in order.
        pause_modes: By mode the engine's own word for it.
        options: Arguments, by call, that the engine understands; another one, given, is an error.
        busy: Statuses that mean that its caches are in use.
        remedy: What to do where a route is missing.
    """

    engine: str
    controls: Mapping[Control, tuple[Route, ...]]
    pause_modes: Mapping[PauseMode, str]
    options: Mapping[Control, frozenset[str]]
    busy: frozenset[int] = frozenset()
    remedy: str | None = None


def _worker(name: str, body: Mapping[str, Any] | None = None, **more: Any) -> tuple[Route, ...]:
    return (Route("POST", f"/engine/{name}", body=body or {}, on_worker=True, **more),)


_WEIGHTS = {"names": Arg("names"), "dtypes": Arg("dtypes"), "shapes": Arg("shapes")}

VLLM = RouteTable(
    engine="vllm",
    controls={
        "health": (Route("GET", "/health"),),
        "pause": (Route("POST", "/pause", {"mode": Arg("mode"), "clear_cache": Arg("clear_cache")}),),
        "resume": (Route("POST", "/resume"),),
        "sleep": (Route("POST", "/sleep", {"level": Arg("level")}),),
        "wake_up": (Route("POST", "/wake_up", {"tags": Arg("tags")}),),
        "reset_prefix_cache": (Route("POST", "/reset_prefix_cache"),),
        # Ids that a caller knows are not those of the generate route, which has a prefix; no ids means all.
        "abort_all": (Route("POST", "/abort_requests", body={}),),
        "init_weights": (
            Route(
                "POST", "/init_weight_transfer_engine", body={"init_info": Arg("init_info")}, idempotent=False
            ),
        ),
        "update_weights": (
            Route("POST", "/start_weight_update", idempotent=False),
            Route(
                "POST",
                "/update_weights",
                body={
                    "update_info": {
                        "names": Arg("names"),
                        "dtype_names": Arg("dtypes"),
                        "shapes": Arg("shapes"),
                        "extras": Arg("extras"),
                    }
                },
                idempotent=False,
            ),
            Route("POST", "/finish_weight_update", body={"weight_version": Arg("version")}, idempotent=False),
        ),
        "load_weights": (
            Route(
                "POST",
                "/collective_rpc",
                body={"method": "reload_weights", "kwargs": {"weights_path": Arg("path")}},
            ),
            # What was computed with the old weights goes, and frozen requests are computed again.
            Route("POST", "/reset_prefix_cache", {"reset_running_requests": "true"}),
            Route("POST", "/update_weight_version", body={"new_version": Arg("version")}, needs="version"),
        ),
        "get_version": (Route("GET", "/weight_info", answer="weight_version"),),
        "set_version": (Route("POST", "/update_weight_version", body={"new_version": Arg("version")}),),
    },
    pause_modes={"abort": "abort", "keep": "keep", "wait": "wait"},
    options={"sleep": frozenset({"level"}), "wake_up": frozenset({"tags"})},
    remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, which opens its control routes",
)

SGLANG = RouteTable(
    engine="sglang",
    controls={
        # /health_generate is the same route, and both sample a token where the server is idle.
        "health": (Route("GET", "/health"),),
        "pause": (
            Route("POST", "/pause_generation", body={"mode": Arg("mode")}),
            Route("POST", "/flush_cache", needs="flush"),
        ),
        "resume": (Route("POST", "/continue_generation", body={}),),
        "sleep": (Route("POST", "/release_memory_occupation", body={"tags": Arg("tags")}),),
        "wake_up": (Route("POST", "/resume_memory_occupation", body={"tags": Arg("tags")}),),
        "reset_prefix_cache": (Route("POST", "/flush_cache"),),
        "abort_all": (Route("POST", "/abort_request", body={"abort_all": True}),),
        "init_weights": (
            Route("POST", "/init_weights_update_group", body={}, spread="init_info", idempotent=False),
        ),
        "update_weights": (
            Route(
                "POST",
                "/update_weights_from_distributed",
                body={**_WEIGHTS, "weight_version": Arg("version")},
                spread="extras",
                idempotent=False,
            ),
        ),
        "load_weights": (
            Route(
                "POST",
                "/update_weights_from_disk",
                body={"model_path": Arg("path"), "weight_version": Arg("version")},
            ),
        ),
        "get_version": (Route("GET", "/model_info", answer="weight_version"),),
        "set_version": (
            Route(
                "POST",
                "/update_weight_version",
                body={"new_version": Arg("version"), "abort_all_requests": False},
            ),
        ),
    },
    pause_modes={"abort": "abort", "keep": "in_place"},
    options={"sleep": frozenset({"tags"}), "wake_up": frozenset({"tags"})},
    busy=frozenset({400}),
)

DYNAMO = RouteTable(
    engine="dynamo",
    controls={
        "health": (Route("GET", "/health"),),
        "pause": _worker("pause_generation", {"mode": Arg("mode"), "clear_cache": Arg("clear_cache")}),
        "resume": _worker("resume_generation"),
        "sleep": _worker("control/sleep", {"level": Arg("level")}),
        "wake_up": _worker("control/wake_up", {"tags": Arg("tags")}),
        "reset_prefix_cache": _worker("flush_cache"),
        "init_weights": _worker("init_weights_update_group", spread="init_info", idempotent=False),
        "update_weights": _worker(
            "update_weights_from_distributed",
            {**_WEIGHTS, "weight_version": Arg("version")},
            spread="extras",
            idempotent=False,
        ),
        "load_weights": _worker(
            "update_weights_from_disk", {"model_path": Arg("path"), "weight_version": Arg("version")}
        ),
        "get_version": _worker("get_weight_version", answer="version"),
        "set_version": _worker("set_weight_version", {"weight_version": Arg("version")}),
    },
    pause_modes={"abort": "abort", "keep": "keep", "wait": "wait"},
    options={"sleep": frozenset({"level"}), "wake_up": frozenset({"tags"})},
    remedy="Name the worker's system server, on DYN_SYSTEM_PORT, with HTTPEngine(..., control=URL)",
)

TABLES: Final[Mapping[str, RouteTable]] = {table.engine: table for table in (VLLM, SGLANG, DYNAMO)}
"""By the name of the backend."""


class Controller:
    """Calls the control routes of one engine.

    Args:
        table: Its routes.
        server: The server that samples.
        worker: The server that has routes `on_worker`, or None.
        name: The engine's name, for errors.
    """

    def __init__(self, table: RouteTable, server: Transport, worker: Transport | None, name: str) -> None:
        self.table = table
        self._server = server
        self._worker = worker
        self._name = name

    def __contains__(self, control: Control) -> bool:
        routes = self.table.controls.get(control, ())
        return bool(routes) and (self._worker is not None or not routes[0].on_worker)

    async def call(self, control: Control, **arguments: Any) -> Any:
        """Make a call; return the result that its reply holds, or None.

        Raises:
            EngineUnsupportedError: The engine lacks the call, or does not know an argument that was given.
            EngineStateError: The engine says that the call does not fit its state.
            EngineError: The engine was not reached, or refused.
        """
        where = f"{self._name}.{control}"
        if control not in self:
            on_worker = control in self.table.controls
            raise EngineUnsupportedError(
                f"{self.table.engine} has {'this call on its worker only' if on_worker else 'no such call'}",
                where=where,
                remedy=self.table.remedy if on_worker else None,
            )
        options = self.table.options.get(control)
        for name, value in arguments.items():
            if value is not None and options is not None and name not in options:
                raise EngineUnsupportedError(
                    f"{self.table.engine} does not know this argument of {control}",
                    where=f"{where}.{name}",
                    got=repr(value),
                )
        result = None
        for route in self.table.controls[control]:
            if route.needs is None or arguments.get(route.needs):
                result = await self._request(route, arguments, where)
        return result

    async def _request(self, route: Route, arguments: Mapping[str, Any], where: str) -> Any:
        transport = self._worker if route.on_worker and self._worker is not None else self._server
        query = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in _filled(route.query, arguments).items()
        }
        path = f"{route.path}?{urlencode(query, doseq=True)}" if query else route.path
        body = None
        if route.body is not None:
            body = _filled(route.body, arguments) | (arguments.get(route.spread or "") or {})
        try:
            reply = await transport.request(route.method, path, json=body, idempotent=route.idempotent)
        except EngineStatusError as error:
            if error.status in (404, 405):
                raise EngineUnsupportedError(
                    f"the server has no route {route.path}", where=where, remedy=self.table.remedy
                ) from error
            if error.status in self.table.busy and "cache" in route.path:
                raise EngineStateError(
                    "cached prefixes are in use", where=where, got=error.body[:200], remedy="Pause first"
                ) from error
            raise
        try:
            content = msgspec.json.decode(reply.body) if reply.body else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            content = None  # some routes answer in plain text
        if isinstance(content, Mapping):
            if content.get("success") is False or content.get("status") == "error":
                raise EngineStateError(
                    "the engine refused",
                    where=where,
                    got=str(content.get("message") or dict(content))[:300],
                    remedy="Pause first" if "cache" in route.path else None,
                )
            return content.get(route.answer) if route.answer is not None else None
        if route.answer is not None:
            raise EngineReplyError("the reply is not a JSON object", where=where, got=repr(content)[:200])
        return None


def _filled(template: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments in place; a member `extras` is merged into the mapping that holds it."""
    filled: dict[str, Any] = {}
    for name, value in template.items():
        if isinstance(value, Mapping):
            filled[name] = _filled(value, arguments)
        elif not isinstance(value, Arg):
            filled[name] = value
        elif name == "extras":
            filled |= arguments.get(value.name) or {}
        elif arguments.get(value.name) is not None:
            filled[name] = arguments[value.name]
    return filled
