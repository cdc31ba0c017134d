"""Control routes of the engines, as data.

vLLM 0.32: `vllm/entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev/`; they are open where the
server runs with `VLLM_SERVER_DEV_MODE=1`. SGLang 0.5.23: `srt/entrypoints/http_server.py` and
`srt/managers/io_struct.py`. Dynamo 1.6: `dynamo/vllm/worker_factory.py`; its frontend has none of them, they
are on the worker's system server, whose port is `DYN_SYSTEM_PORT`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from mmrender.engines.interface import PauseMode

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
    """Stands for an argument of the call; left out where it is None."""

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
        needs: Argument without which the request is left out.
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
    """What an engine can be told.

    Attributes:
        engine: Its name.
        controls: By call the requests that carry it out, in order.
        pause_modes: By mode the engine's own word for it.
        options: Arguments, by call, that the engine understands; another one, given, is an error.
        busy: Statuses by which the engine says that its caches are in use.
        remedy: What to do where a route is not there.
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

TABLES: Mapping[str, RouteTable] = {table.engine: table for table in (VLLM, SGLANG, DYNAMO)}
"""By the name of the backend."""
