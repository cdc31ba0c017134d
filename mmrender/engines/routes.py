"""Control routes of the engines, as data, and `Controller`, which calls them.

vLLM 0.32: `vllm/entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev/`; they are open where the
server runs with `VLLM_SERVER_DEV_MODE=1`. SGLang 0.5.23: `srt/entrypoints/http_server.py` and
`srt/managers/io_struct.py`. Dynamo 1.6: `dynamo/vllm/worker_factory.py`; its frontend has none of them, they
are on the worker's system server, whose port is `DYN_SYSTEM_PORT`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias
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
Template: TypeAlias = Mapping[str, Any]
"""Members of a request. `"$name"` is an argument of the call, left out where that is None; the mapping under
`"**"` is merged into its parent."""


@dataclass(frozen=True, slots=True)
class Route:
    """One request.

    Attributes:
        path: Path below the root.
        query: Query parameters.
        body: JSON body; None for no body.
        method: HTTP method.
        needs: Argument without which the request is skipped.
        answer: Where the reply holds the result.
        on_worker: Asked of the worker instead of the server that samples.
        idempotent: Whether it may be repeated.
    """

    path: str
    query: Template = field(default_factory=dict)
    body: Template | None = None
    method: Literal["GET", "POST"] = "POST"
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
        busy: Statuses that mean that its caches are in use.
        remedy: What to do where a route is missing.
    """

    engine: str
    controls: Mapping[Control, tuple[Route, ...]]
    pause_modes: Mapping[PauseMode, str]
    busy: frozenset[int] = frozenset()
    remedy: str | None = None


def _worker(name: str, body: Template | None = None, **more: Any) -> tuple[Route, ...]:
    return (Route(f"/engine/{name}", body=body or {}, on_worker=True, **more),)


_HEALTH = (Route("/health", method="GET"),)
_MODES: Final[Mapping[PauseMode, str]] = {"abort": "abort", "keep": "keep", "wait": "wait"}
_UPDATE = {
    "names": "$names",
    "dtypes": "$dtypes",
    "shapes": "$shapes",
    "weight_version": "$version",
    "**": "$extras",
}
_FROM_DISK = {"model_path": "$path", "weight_version": "$version"}

VLLM = RouteTable(
    engine="vllm",
    controls={
        "health": _HEALTH,
        "pause": (Route("/pause", {"mode": "$mode", "clear_cache": "$clear_cache"}),),
        "resume": (Route("/resume"),),
        "sleep": (Route("/sleep", {"level": "$level"}),),
        "wake_up": (Route("/wake_up", {"tags": "$tags"}),),
        "reset_prefix_cache": (Route("/reset_prefix_cache"),),
        # Ids that a caller knows are not those of the generate route, which has a prefix; no ids means all.
        "abort_all": (Route("/abort_requests", body={}),),
        "init_weights": (
            Route("/init_weight_transfer_engine", body={"init_info": "$init_info"}, idempotent=False),
        ),
        "update_weights": (
            Route("/start_weight_update", idempotent=False),
            Route(
                "/update_weights",
                body={
                    "update_info": {
                        "names": "$names",
                        "dtype_names": "$dtypes",
                        "shapes": "$shapes",
                        "**": "$extras",
                    }
                },
                idempotent=False,
            ),
            Route("/finish_weight_update", body={"weight_version": "$version"}, idempotent=False),
        ),
        "load_weights": (
            Route("/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": "$path"}}),
            # What was computed with the old weights goes, and frozen requests are computed again.
            Route("/reset_prefix_cache", {"reset_running_requests": "true"}),
            Route("/update_weight_version", body={"new_version": "$version"}, needs="version"),
        ),
        "get_version": (Route("/weight_info", method="GET", answer="weight_version"),),
        "set_version": (Route("/update_weight_version", body={"new_version": "$version"}),),
    },
    pause_modes=_MODES,
    remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, which opens its control routes",
)

SGLANG = RouteTable(
    engine="sglang",
    controls={
        # /health_generate is the same route, and both sample a token where the server is idle.
        "health": _HEALTH,
        "pause": (
            Route("/pause_generation", body={"mode": "$mode"}),
            Route("/flush_cache", needs="clear_cache"),
        ),
        "resume": (Route("/continue_generation", body={}),),
        "sleep": (Route("/release_memory_occupation", body={"tags": "$tags"}),),
        "wake_up": (Route("/resume_memory_occupation", body={"tags": "$tags"}),),
        "reset_prefix_cache": (Route("/flush_cache"),),
        "abort_all": (Route("/abort_request", body={"abort_all": True}),),
        "init_weights": (Route("/init_weights_update_group", body={"**": "$init_info"}, idempotent=False),),
        "update_weights": (Route("/update_weights_from_distributed", body=_UPDATE, idempotent=False),),
        "load_weights": (Route("/update_weights_from_disk", body=_FROM_DISK),),
        "get_version": (Route("/model_info", method="GET", answer="weight_version"),),
        "set_version": (
            Route("/update_weight_version", body={"new_version": "$version", "abort_all_requests": False}),
        ),
    },
    pause_modes={"abort": "abort", "keep": "in_place"},
    busy=frozenset({400}),
)

DYNAMO = RouteTable(
    engine="dynamo",
    controls={
        "health": _HEALTH,
        "pause": _worker("pause_generation", {"mode": "$mode", "clear_cache": "$clear_cache"}),
        "resume": _worker("resume_generation"),
        "sleep": _worker("control/sleep", {"level": "$level"}),
        "wake_up": _worker("control/wake_up", {"tags": "$tags"}),
        "reset_prefix_cache": _worker("flush_cache"),
        "init_weights": _worker("init_weights_update_group", {"**": "$init_info"}, idempotent=False),
        "update_weights": _worker("update_weights_from_distributed", _UPDATE, idempotent=False),
        "load_weights": _worker("update_weights_from_disk", _FROM_DISK),
        "get_version": _worker("get_weight_version", answer="version"),
        "set_version": _worker("set_weight_version", {"weight_version": "$version"}),
    },
    pause_modes=_MODES,
    remedy="Name the worker's system server, on DYN_SYSTEM_PORT, with HTTPEngine(..., control=URL)",
)

TABLES: Final[Mapping[str, RouteTable]] = {table.engine: table for table in (VLLM, SGLANG, DYNAMO)}
"""By the name of the backend."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Calls the control routes of one engine.

    Attributes:
        table: Its routes.
        server: The server that samples.
        worker: The server that has routes `on_worker`, or None.
        name: The engine's name, for errors.
    """

    table: RouteTable
    server: Transport
    worker: Transport | None
    name: str

    def __contains__(self, control: Control) -> bool:
        routes = self.table.controls.get(control, ())
        return bool(routes) and (self.worker is not None or not routes[0].on_worker)

    async def call(self, control: Control, **arguments: Any) -> Any:
        """Make a call; return the result that its reply holds, or None.

        Raises:
            EngineUnsupportedError: The engine lacks the call or an argument of it.
            EngineStateError: The engine says that the call does not fit its state.
            EngineError: The engine was not reached, or refused.
        """
        where, engine = f"{self.name}.{control}", self.table.engine
        routes = self.table.controls.get(control, ())
        if not routes:
            raise EngineUnsupportedError(f"{engine} has no such call", where=where)
        if control not in self:
            raise EngineUnsupportedError(
                f"{engine} has this call on its worker only", where=where, remedy=self.table.remedy
            )
        if control in ("sleep", "wake_up"):
            known = {value for route in routes for value in {**route.query, **(route.body or {})}.values()}
            for name, value in arguments.items():
                if f"${name}" not in known and value not in (None, 1):  # 1 is the level of all engines
                    raise EngineUnsupportedError(
                        f"{engine} does not know this argument of {control}",
                        where=f"{where}.{name}",
                        got=repr(value),
                    )
        result = None
        for route in routes:
            if route.needs is None or arguments.get(route.needs):
                result = await self._request(route, arguments, where)
        return result

    async def _request(self, route: Route, arguments: Mapping[str, Any], where: str) -> Any:
        transport = self.worker if route.on_worker and self.worker is not None else self.server
        path = route.path
        if query := _filled(route.query, arguments):
            flags = {True: "true", False: "false"}
            query = {
                name: flags[value] if isinstance(value, bool) else value for name, value in query.items()
            }
            path += f"?{urlencode(query, doseq=True)}"
        body = None if route.body is None else _filled(route.body, arguments)
        in_use = "Pause first" if "cache" in route.path else None
        try:
            reply = await transport.request(route.method, path, json=body, idempotent=route.idempotent)
        except EngineStatusError as error:
            if error.status in (404, 405):
                raise EngineUnsupportedError(
                    f"the server has no route {route.path}", where=where, remedy=self.table.remedy
                ) from error
            if error.status in self.table.busy and in_use:
                raise EngineStateError(
                    "cached prefixes are in use", where=where, got=error.body[:200], remedy=in_use
                ) from error
            raise
        try:
            content = msgspec.json.decode(reply.body) if reply.body else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            content = None  # some routes answer in plain text
        if isinstance(content, Mapping):
            if content.get("success") is False or content.get("status") == "error":
                got = str(content.get("message") or dict(content))[:300]
                raise EngineStateError("the engine refused", where=where, got=got, remedy=in_use)
            return None if route.answer is None else content.get(route.answer)
        if route.answer is not None:
            raise EngineReplyError("the reply is not a JSON object", where=where, got=repr(content)[:200])
        return None


def _filled(template: Template, arguments: Mapping[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, given in template.items():
        value = given
        if isinstance(given, Mapping):
            value = _filled(given, arguments)
        elif isinstance(given, str) and given.startswith("$"):
            value = arguments.get(given[1:])
        if name == "**":
            filled |= value or {}
        elif value is not None:
            filled[name] = value
    return filled
