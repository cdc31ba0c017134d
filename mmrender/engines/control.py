"""Calls of a route table carried out over transports."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from mmrender.client.transport import Reply, Transport
from mmrender.engines.routes import Arg, Control, Route, RouteTable
from mmrender.errors import (
    EngineReplyError,
    EngineStateError,
    EngineStatusError,
    EngineUnsupportedError,
)

_ABSENT = frozenset({404, 405})


class Controller:
    """Tells one engine what to do.

    Args:
        table: Its routes.
        server: The way to the server that samples.
        worker: The way to the server that has routes `on_worker`, or None.
        name: The engine's name, for errors.
    """

    def __init__(self, table: RouteTable, server: Transport, worker: Transport | None, name: str) -> None:
        self.table = table
        self._server = server
        self._worker = worker
        self._name = name

    def __contains__(self, control: object) -> bool:
        routes = self.table.controls.get(control)  # type: ignore[call-overload]
        return bool(routes) and not (self._worker is None and routes[0].on_worker)

    async def call(self, control: Control, **arguments: Any) -> Any:
        """Carry out a call; return the result that its reply holds, None where it holds none.

        Raises:
            EngineUnsupportedError: The engine has no such call, or does not know an argument that was given.
            EngineStateError: The engine says that the call does not fit its state.
            EngineError: The engine was not reached, or refused.
        """
        routes = self._routes(control)
        understood = self.table.options.get(control)
        for name, value in arguments.items():
            if value is not None and understood is not None and name not in understood:
                raise EngineUnsupportedError(
                    f"{self.table.engine} does not know this argument of {control}",
                    where=f"{self._name}.{control}.{name}",
                    got=repr(value),
                )
        result = None
        for route in routes:
            if route.needs is None or arguments.get(route.needs):
                result = await self._request(control, route, arguments)
        return result

    def _routes(self, control: Control) -> tuple[Route, ...]:
        routes = self.table.controls.get(control)
        if not routes:
            raise EngineUnsupportedError(
                f"{self.table.engine} has no such call", where=f"{self._name}.{control}"
            )
        if self._worker is None and any(route.on_worker for route in routes):
            raise EngineUnsupportedError(
                f"{self.table.engine} has this call on its worker only",
                where=f"{self._name}.{control}",
                remedy=self.table.remedy,
            )
        return routes

    async def _request(self, control: Control, route: Route, arguments: Mapping[str, Any]) -> Any:
        transport = self._worker if route.on_worker and self._worker is not None else self._server
        query = _query(route.query, arguments)
        body = None if route.body is None else _filled(route.body, arguments)
        if body is not None and route.spread:
            body |= arguments.get(route.spread) or {}
        try:
            reply = await transport.request(
                route.method, route.path + query, json=body, idempotent=route.idempotent
            )
        except EngineStatusError as error:
            raise self._explained(control, route, error) from error
        return self._result(control, route, reply)

    def _explained(self, control: Control, route: Route, error: EngineStatusError) -> Exception:
        where = f"{self._name}.{control}"
        if error.status in _ABSENT:
            return EngineUnsupportedError(
                f"the server has no route {route.path}", where=where, remedy=self.table.remedy
            )
        if error.status in self.table.busy and "cache" in route.path:
            return EngineStateError(
                "cached prefixes are in use", where=where, got=error.body[:200], remedy="Pause first"
            )
        return error

    def _result(self, control: Control, route: Route, reply: Reply) -> Any:
        content = _decoded(reply)
        where = f"{self._name}.{control}"
        if isinstance(content, Mapping):
            if content.get("success") is False or content.get("status") == "error":
                raise EngineStateError(
                    "the engine refused",
                    where=where,
                    got=str(content.get("message") or dict(content))[:300],
                    remedy="Pause first" if "cache" in route.path else None,
                )
            if route.answer is not None:
                return content.get(route.answer)
        elif route.answer is not None:
            raise EngineReplyError("the reply is no JSON object", where=where, got=repr(content)[:200])
        return None


def _query(template: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    filled = {name: _spelled(value) for name, value in _filled(template, arguments).items()}
    return f"?{urlencode(filled, doseq=True)}" if filled else ""


def _spelled(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _filled(template: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The template with arguments in place; `extras` are merged into the mapping that names them."""
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


def _decoded(reply: Reply) -> Any:
    try:
        return msgspec.json.decode(reply.body) if reply.body else None
    except msgspec.DecodeError:
        return None  # some routes answer in plain text
