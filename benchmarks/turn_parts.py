"""Processor time of a turn by part: of each thread within a function of the table, less inner ones."""

import importlib
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

PARTS: dict[str, tuple[str, ...]] = {
    "content": ("mmrender.rollout.client:normalize_messages", "mmrender.renderer:read_request"),
    "media": ("mmrender.rendering:Rendering._items",),
    "template": ("mmrender.template.known:KnownTemplate.render",),
    "tokens": ("mmrender.tokens.encode:TokenWriter.write", "mmrender.tokens.encode:TokenWriter.lay_out"),
    "bridge, besides": ("mmrender.renderer:Renderer.bridge_to_next_turn",),
    "render, besides": ("mmrender.renderer:Renderer.render",),
    "history": ("mmrender.rollout.client:same_message",),
    "request": ("mmrender.client.vllm:check_request", "mmrender.client.http:encode_json"),
    "images on the wire": ("mmrender.client.vllm_parts:PartsPlan.prompts",),
    "reply": ("mmrender.client.vllm:read_reply",),
    "parse": ("mmrender.renderer:Renderer.parse_response",),
    "append": ("mmrender.trajectory.tree:Trajectory.append_turn",),
    "ship": ("mmrender.trajectory.tree:Trajectory.to_frames",),
}
REST = "HTTP, event loop, threads"


class Parts:
    """Seconds by part, once `install` has been called."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._local = threading.local()
        self._lock = threading.Lock()

    def install(self) -> None:
        """Wrap the functions of the table."""
        for part, places in PARTS.items():
            for place in places:
                module, _, name = place.partition(":")
                owner: Any = importlib.import_module(module)
                *path, last = name.split(".")
                for each in path:
                    owner = getattr(owner, each)
                setattr(owner, last, self._timed(part, getattr(owner, last)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        local, now = self._local, time.thread_time

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            begun, outer = now(), getattr(local, "inner", 0.0)
            local.inner = 0.0
            try:
                return function(*arguments, **options)
            finally:
                spent = now() - begun
                with self._lock:
                    self.seconds[part] += spent - local.inner
                local.inner = outer + spent

        return timed

    def take(self) -> dict[str, float]:
        """Return the seconds since the last time."""
        with self._lock:
            taken = dict(self.seconds)
            self.seconds = dict.fromkeys(PARTS, 0.0)
        return taken
