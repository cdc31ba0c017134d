"""The transport in memory, and what names a server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from kit import error_of, raised, until
from mmrender.client.http import HTTPTransport
from mmrender.client.resolve import as_transport, server_root
from mmrender.client.transport import RetryPolicy, Transport, TransportConfig
from mmrender.errors import EngineConnectionError, EngineStatusError, EngineTimeoutError, InputError
from mmrender.testing.memory_transport import Answer, MemoryTransport


def ask(transport: MemoryTransport, method: str = "POST", path: str = "/generate", **options: Any) -> Any:
    return asyncio.run(transport.request(method, path, **options))


def test_answers_come_by_route_and_requests_are_kept() -> None:
    transport = MemoryTransport({"POST /generate": {"ids": [1]}, "GET /text": "plain", "GET /raw": b"\x00"})
    assert isinstance(transport, Transport)
    assert ask(transport, path="/generate?x=1", json={"a": (1, 2)}, headers={"h": "v"}).body == b'{"ids":[1]}'
    assert ask(transport, "GET", "/text").body == b"plain"
    assert ask(transport, "GET", "/raw").body == b"\x00"
    asked = transport.asked[0]
    assert (asked.method, asked.path, asked.query) == ("POST", "/generate", "x=1")
    assert (asked.json, dict(asked.headers), asked.idempotent) == ({"a": [1, 2]}, {"h": "v"}, False)
    assert transport.asked[1].json is None
    assert transport.asked[1].idempotent
    assert transport.of_path("/text") == [transport.asked[1]]


def test_a_status_is_the_error_that_a_server_gives(sentence: Any) -> None:
    transport = MemoryTransport({"POST /generate": Answer({"error": "x"}, 503, headers={"Retry-After": "3"})})
    error = raised(EngineStatusError, ask, transport)
    assert (error.status, error.body, error.retry_after) == (503, '{"error":"x"}', 3.0)
    assert str(error) == sentence
    caught = raised(EngineStatusError, ask, transport, path="/nowhere")
    assert caught.status == 404


def test_delays_meet_deadlines_and_cancellation(sentence: Any) -> None:
    transport = MemoryTransport({"POST /generate": Answer({}, delay=30)})
    assert error_of(EngineTimeoutError, ask, transport, timeout=0.01) == sentence

    async def cancel() -> None:
        task = asyncio.create_task(transport.request("POST", "/generate"))
        await until(lambda: len(transport.asked) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert transport.cancelled == [transport.asked[1]]


def test_lines_are_streamed_and_may_break() -> None:
    transport = MemoryTransport(
        {"GET /lines": [b"a\nb\n", Answer("a\r\nb", drop=True), Answer("no", status=500)]}
    )

    async def lines() -> list[bytes]:
        return [line async for line in transport.stream("GET", "/lines")]

    assert asyncio.run(lines()) == [b"a", b"b"]
    with pytest.raises(EngineConnectionError):
        asyncio.run(lines())
    with pytest.raises(EngineStatusError):
        asyncio.run(lines())


def test_a_server_is_named_in_many_ways() -> None:
    memory = MemoryTransport()
    assert as_transport(memory) is memory
    first = as_transport("http://127.0.0.1:9/v1/")
    assert isinstance(first, HTTPTransport)
    assert first.base_url == "http://127.0.0.1:9"
    assert as_transport("http://127.0.0.1:9") is first
    assert as_transport(TransportConfig("http://127.0.0.1:9")) is first
    assert as_transport(TransportConfig("http://127.0.0.1:9", retries=RetryPolicy(attempts=1))) is not first


def test_an_openai_client_brings_url_key_and_headers_and_an_object_with_url_and_key_is_enough() -> None:
    url, headers = "http://127.0.0.1:9/v1", {"X-Session-ID": "s"}
    client = openai.AsyncOpenAI(base_url=url, api_key="k", default_headers=headers)
    brought = {"Authorization": "Bearer k", "X-Session-ID": "s"}
    for named, expected in ((client, brought), (SimpleNamespace(base_url=url, api_key=""), {})):
        transport = as_transport(named)
        assert isinstance(transport, HTTPTransport)
        assert transport.base_url == "http://127.0.0.1:9"
        assert transport.config.all_headers == expected
    assert as_transport(client) is as_transport(client)


ROOTS = {
    "http://h:1": ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"),
    "http://h:1/proxy": ("http://h:1/proxy/v1",),
    "http://h:1/xv1": ("http://h:1/xv1",),
}


@pytest.mark.parametrize(("root", "url"), [(root, url) for root, urls in ROOTS.items() for url in urls])
def test_the_root_of_a_server(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize("client", [None, 3])
def test_what_names_no_server_is_refused(client: Any, sentence: Any) -> None:
    assert error_of(InputError, as_transport, client) == sentence
