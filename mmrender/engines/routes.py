"""Control routes of the engines, as data.

vLLM 0.32: `vllm/entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev/`, which a server opens with
`VLLM_SERVER_DEV_MODE=1`. SGLang 0.5.23: `srt/entrypoints/http_server.py` and `srt/managers/io_struct.py`.
Dynamo 1.6: `dynamo/vllm/worker_factory.py`. These routes are on the worker's system server, whose port is
`DYN_SYSTEM_PORT`, not on the frontend.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import urlencode

from mmrender.engines.interface import Control, PauseMode

Template: TypeAlias = Mapping[str, Any]
"""Members of a request. `"$name"` stands for an argument of the call, and is left out if that is None. A
mapping under `"**"` is merged into its parent."""


@dataclass(frozen=True, slots=True)
class Route:
    """One request of a control call.

    Attributes:
        path: Method and path, such as `POST /pause`.
        query: Query parameters.
        body: JSON body, or None.
        needs: Argument without which the request is skipped.
        answer: Member of the reply that is the result.
        statuses: Results by status, if the status is the answer.
    """

    path: str
    query: Template = field(default_factory=dict)
    body: Template | None = None
    needs: str | None = None
    answer: str | None = None
    statuses: Mapping[int, Any] = field(default_factory=dict)

    def filled(self, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """Return the path with its query, and the body."""
        path = self.path.partition(" ")[2]
        if query := _filled(self.query, arguments):
            flags = {True: "true", False: "false"}
            texts = {name: flags[each] if isinstance(each, bool) else each for name, each in query.items()}
            path += f"?{urlencode(texts, doseq=True)}"
        return path, None if self.body is None else _filled(self.body, arguments)

    def takes(self, argument: str) -> bool:
        """Whether an argument of the call is sent, on the first level."""
        return f"${argument}" in (*self.query.values(), *(self.body or {}).values())


def _filled(template: Template, arguments: Mapping[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, value in template.items():
        if isinstance(value, Mapping):
            value = _filled(value, arguments)  # noqa: PLW2901
        elif isinstance(value, str) and value.startswith("$"):
            value = arguments.get(value[1:])  # noqa: PLW2901
        if name == "**":
            filled |= value or {}
        elif value is not None:
            filled[name] = value
    return filled


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Control calls of one engine.

    Attributes:
        engine: Its name.
        controls: By call its requests, in order.
        pause_modes: By mode the engine's own word for it.
        on_worker: Whether another server than the sampling one answers all calls but `check_health`.
        busy: Statuses which mean that its caches are in use.
        remedy: Remedy for a missing route.
    """

    engine: str
    controls: Mapping[Control, tuple[Route, ...]]
    pause_modes: Mapping[PauseMode, str]
    on_worker: bool = False
    busy: frozenset[int] = frozenset()
    remedy: str | None = None


_HEALTH = (Route("GET /health"),)
_MODES: Final[Mapping[PauseMode, str]] = {"abort": "abort", "keep": "keep", "wait": "wait"}
_WEIGHTS = {"names": "$names", "shapes": "$shapes", "**": "$extras"}
_UPDATE = {**_WEIGHTS, "dtypes": "$dtypes", "weight_version": "$weight_version"}
_FROM_DISK = {"model_path": "$path", "weight_version": "$weight_version"}

VLLM = RouteTable(
    engine="vllm",
    controls={
        "check_health": _HEALTH,
        "pause_generation": (Route("POST /pause", {"mode": "$mode", "clear_cache": "$clear_cache"}),),
        "resume_generation": (Route("POST /resume"),),
        "reports_pause": (Route("GET /is_paused", answer="is_paused"),),
        # The generate route prefixes the caller's ids, so single ones cannot be named. No ids means all.
        "abort_generation": (Route("POST /abort_requests", body={}),),
        "sleep": (Route("POST /sleep", {"level": "$level"}),),
        "wake_up": (Route("POST /wake_up", {"tags": "$tags"}),),
        "reset_prefix_cache": (Route("POST /reset_prefix_cache"),),
        "init_weight_update_communicator": (
            Route("POST /init_weight_transfer_engine", body={"init_info": "$init_info"}),
        ),
        "update_named_weights": (
            Route("POST /start_weight_update"),
            Route("POST /update_weights", body={"update_info": {**_WEIGHTS, "dtype_names": "$dtypes"}}),
            Route("POST /finish_weight_update", body={"weight_version": "$weight_version"}),
        ),
        "load_weights": (
            Route(
                "POST /collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": "$path"}}
            ),
            # Drop caches of the old weights. Frozen requests are computed again.
            Route("POST /reset_prefix_cache", {"reset_running_requests": "true"}),
            # The worker drops its image embeddings with the weights, and a scheduler that expects them dies.
            Route("POST /reset_encoder_cache"),
            Route(
                "POST /update_weight_version", body={"new_version": "$weight_version"}, needs="weight_version"
            ),
        ),
        "weight_version": (Route("GET /weight_info", answer="weight_version"),),
        "set_weight_version": (Route("POST /update_weight_version", body={"new_version": "$version"}),),
    },
    pause_modes=_MODES,
    remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, which opens its control routes",
)

SGLANG = RouteTable(
    engine="sglang",
    controls={
        # /health_generate is the same route, and both sample a token if the server is idle.
        "check_health": _HEALTH,
        "pause_generation": (
            Route("POST /pause_generation", body={"mode": "$mode"}),
            Route("POST /flush_cache", needs="clear_cache"),
        ),
        "resume_generation": (Route("POST /continue_generation", body={}),),
        "reports_pause": (Route("GET /ready", statuses={200: False, 503: True}),),
        "abort_generation": (Route("POST /abort_request", body={"abort_all": True}),),
        "sleep": (Route("POST /release_memory_occupation", body={"tags": "$tags"}),),
        "wake_up": (Route("POST /resume_memory_occupation", body={"tags": "$tags"}),),
        "reset_prefix_cache": (Route("POST /flush_cache"),),
        "init_weight_update_communicator": (
            Route("POST /init_weights_update_group", body={"**": "$init_info"}),
        ),
        "update_named_weights": (Route("POST /update_weights_from_distributed", body=_UPDATE),),
        "load_weights": (Route("POST /update_weights_from_disk", body=_FROM_DISK),),
        "weight_version": (Route("GET /model_info", answer="weight_version"),),
        "set_weight_version": (
            Route(
                "POST /update_weight_version", body={"new_version": "$version", "abort_all_requests": False}
            ),
        ),
    },
    pause_modes={"abort": "abort", "keep": "in_place"},
    busy=frozenset({400}),
)

_WORKER: Final[Mapping[Control, tuple[str, Template]]] = {
    "pause_generation": ("pause_generation", {"mode": "$mode", "clear_cache": "$clear_cache"}),
    "resume_generation": ("resume_generation", {}),
    "sleep": ("control/sleep", {"level": "$level"}),
    "wake_up": ("control/wake_up", {"tags": "$tags"}),
    "reset_prefix_cache": ("flush_cache", {}),
    "init_weight_update_communicator": ("init_weights_update_group", {"**": "$init_info"}),
    "update_named_weights": ("update_weights_from_distributed", _UPDATE),
    "load_weights": ("update_weights_from_disk", _FROM_DISK),
    "set_weight_version": ("set_weight_version", {"weight_version": "$version"}),
}

DYNAMO = RouteTable(
    engine="dynamo",
    controls={
        "check_health": _HEALTH,
        **{call: (Route(f"POST /engine/{path}", body=body),) for call, (path, body) in _WORKER.items()},
        "weight_version": (Route("POST /engine/get_weight_version", body={}, answer="version"),),
    },
    pause_modes=_MODES,
    on_worker=True,
    remedy="Pass the worker's system server, on DYN_SYSTEM_PORT, as HTTPEngine(..., control=URL)",
)

TABLES: Final[Mapping[str, RouteTable]] = {table.engine: table for table in (VLLM, SGLANG, DYNAMO)}
"""By the name of the backend."""
