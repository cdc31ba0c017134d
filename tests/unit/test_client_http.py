"""The HTTP transport against a server in the same loop."""

import asyncio
import gc
import inspect
import os
import pickle
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kit import error_of, free_port, raised_by, until
from mmrender.client.hooks import ClientHooks, RequestEvent
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import LONG_TEXT, JSONText, RetryPolicy, Transport, TransportConfig
from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    InputError,
)
from stub_server import StubServer, stub_server

QUICK = RetryPolicy(wait_initial=0.001, wait_jitter=0.0)
ONCE = RetryPolicy(attempts=1)


def way(url: str, hooks: Sequence[ClientHooks] = (), **settings: Any) -> HTTPTransport:
    return HTTPTransport(TransportConfig(url, **settings), hooks=hooks)


def with_server(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test with a server in its own event loop."""

    def run(**fixtures: Any) -> None:
        async def serve() -> None:
            async with stub_server() as server:
                await test(server, **fixtures)

        asyncio.run(serve())

    _, *others = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature(others)
    return run


async def gone_from(server: StubServer, path: str) -> None:
    """The server notices that its caller went away."""
    await until(lambda: server.gone)
    assert server.gone == [path]


class Recorder(ClientHooks):
    def __init__(self) -> None:
        self.events: list[tuple[str, RequestEvent]] = []

    def on_request(self, event: RequestEvent) -> dict[str, str]:
        self.events.append(("request", event))
        return {"traceparent": "00-1", "x-mine": "hook"}

    def on_retry(self, event: RequestEvent) -> None:
        self.events.append(("retry", event))

    def on_response(self, event: RequestEvent) -> None:
        self.events.append(("response", event))

    def on_error(self, event: RequestEvent) -> None:
        self.events.append(("error", event))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@with_server
async def test_json_goes_out_and_comes_back_also_below_a_path(server):
    transport = way(server.url, api_key="k", headers={"x-session": "7"})
    assert isinstance(transport, Transport)
    reply = await transport.request("POST", "/echo?a=1", json={"ids": [1, 2]}, headers={"x-one": "1"})
    assert (reply.status, bytes(reply.body)) == (200, b'{"ids":[1,2]}')
    method, path, headers, _ = server.seen[0]
    assert (method, path) == ("POST", "/echo?a=1")
    assert headers["Authorization"] == "Bearer k"
    assert (headers["x-session"], headers["x-one"]) == ("7", "1")
    assert headers["Content-Type"] == "application/json"
    transport = HTTPTransport(f"{server.url}/echo/")
    assert transport.base_url == f"{server.url}/echo"
    with pytest.raises(EngineStatusError):
        await transport.request("POST", "/more", json={})
    assert server.seen[1][1] == "/echo/more"


@pytest.mark.parametrize("path", ["/echo", "/chunked"])
@pytest.mark.parametrize("size", [0, 100, 300_000, 3_000_000])
@with_server
async def test_bodies_of_all_sizes_arrive_whole(server, path, size):
    body = {"text": "x" * size}
    reply = await HTTPTransport(server.url).request("POST", path, json=body)
    assert msgspec.json.decode(reply.body) == body
    assert len(server.seen[0][3]) == int(server.seen[0][2]["Content-Length"])


def test_connections_are_used_again_within_a_loop_and_closed_at_its_end():
    transport: list[HTTPTransport] = []

    async def test(server: StubServer) -> None:
        transport.append(transport[0] if transport else HTTPTransport(server.url))
        same = HTTPTransport(server.url) if transport[0].base_url != server.url else transport[0]
        for _ in range(3):
            await same.request("POST", "/echo", json=1)
        assert len(set(server.connections)) == 1
        await same.aclose()
        await same.request("POST", "/echo", json=1)
        assert len(set(server.connections)) == 2

    # Warnings are errors: a session left open in either loop would fail the test.
    with_server(test)()
    with_server(test)()
    gc.collect()


def test_a_loop_that_was_closed_by_hand_is_let_go():
    transport = way("http://127.0.0.1:1", retries=ONCE)

    async def fail() -> None:
        with pytest.raises(EngineConnectionError):
            await transport.request("GET", "/")

    loop = asyncio.new_event_loop()
    loop.run_until_complete(fail())
    loop.close()
    gone = weakref.ref(loop)
    del loop
    asyncio.run(fail())
    gc.collect()
    assert gone() is None


@with_server
async def test_a_dropped_transport_closes_its_connections(server):
    transport = HTTPTransport(server.url)
    await transport.request("POST", "/echo", json=1)
    session, _ = transport._sessions[asyncio.get_running_loop()]
    del transport
    gc.collect()
    await until(lambda: session.closed)


@with_server
async def test_threads_share_a_transport(server):
    transport = HTTPTransport(server.url)
    bodies: list[bytes] = []

    def work() -> None:
        reply = asyncio.run(transport.request("POST", "/echo", json={"n": 1}))
        bodies.append(bytes(reply.body))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(0.005)
    assert bodies == [b'{"n":1}'] * 4


def test_a_transport_is_pickled_with_its_settings_and_printed_without_its_secrets():
    headers = {"x-token": "hidden"}
    transport = way("http://127.0.0.1:1/", [ClientHooks()], api_key="secret", headers=headers, retries=ONCE)
    copy = pickle.loads(pickle.dumps(transport))
    assert (copy.config, copy.base_url) == (transport.config, "http://127.0.0.1:1")
    assert len(copy.hooks) == 1
    for printed in (repr(transport), repr(transport.config)):
        assert "secret" not in printed
        assert "hidden" not in printed


@pytest.mark.parametrize("status", [502, 503, 504])
@with_server
async def test_a_busy_server_is_asked_again_where_that_is_allowed(server, status):
    server.busy, server.busy_status = 2, status
    transport = way(server.url, retries=QUICK)
    reply = await transport.request("GET", "/busy")
    assert reply.body == b'{"ok": true}'
    assert len(server.seen) == 3
    server.busy = 2
    assert (await transport.request("POST", "/busy", json={}, idempotent=True)).status == 200
    assert len(server.seen) == 6


@with_server
async def test_a_call_that_may_have_been_taken_is_not_repeated(server):
    server.busy = 1
    with pytest.raises(EngineStatusError) as caught:
        await way(server.url, retries=QUICK).request("POST", "/busy", json={})
    assert (caught.value.status, caught.value.body) == (503, "busy")
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("path", "status"), [*(("/busy", status) for status in (400, 404, 408, 429, 500, 501)), ("/moved", 307)]
)
@with_server
async def test_other_statuses_are_final(server, path, status):
    server.busy, server.busy_status = 1, status
    error = await raised_by(EngineStatusError, way(server.url, retries=QUICK).request("GET", path))
    assert (error.status, len(server.seen)) == (status, 1)


@with_server
async def test_the_server_may_name_the_wait_up_to_the_bound(server):
    server.busy, server.retry_after = 1, "3600"
    transport = way(server.url, retries=RetryPolicy(wait_initial=3000, wait_max=0.001))
    assert (await transport.request("GET", "/busy")).status == 200
    server.busy = 1
    caught = await raised_by(EngineStatusError, transport.request("POST", "/busy"))
    assert caught.retry_after == 3600.0


async def test_a_connection_that_was_never_made_is_tried_again_for_any_call(sentence):
    hooks = Recorder()
    port = free_port()
    transport = way(f"http://127.0.0.1:{port}", hooks=[hooks], retries=replace(QUICK, attempts=3))
    caught = await raised_by(EngineConnectionError, transport.request("POST", "/generate", json={}))
    assert str(caught).replace(str(port), "PORT").partition(" - ")[0] == sentence
    assert hooks.names == ["request", "retry", "retry", "error"]
    assert [event.attempt for _, event in hooks.events] == [1, 2, 3, 3]


@with_server
async def test_an_answer_that_breaks_off_is_not_asked_for_again(server):
    with pytest.raises(EngineConnectionError, match="the connection broke"):
        await way(server.url, retries=QUICK).request("POST", "/cut", json={}, idempotent=True)
    assert len(server.seen) == 1
    transport = way(server.url, retries=QUICK)
    await transport.request("POST", "/echo", json={})
    with pytest.raises(EngineConnectionError, match="the connection broke"):
        await transport.request("POST", "/cut", json={})
    await transport.request("POST", "/echo", json={})
    with pytest.raises(EngineConnectionError, match="the connection broke"):
        async for _ in transport.stream("POST", "/cut", json={}):
            pass
    assert len(server.seen) == 5


@pytest.mark.parametrize("size", [10, 3 << 20])
@with_server
async def test_a_kept_connection_that_was_closed_is_not_the_callers_to_see(server, size):
    hooks = Recorder()
    transport = way(server.url, retries=QUICK, hooks=[hooks])
    text = "x" * size
    for _ in range(4):
        assert msgspec.json.decode((await transport.request("POST", "/kept", json=text)).body) == text
    assert [line async for line in transport.stream("POST", "/kept", json=text)] == [b'"%s"' % text.encode()]
    assert hooks.names.count("retry") >= 2
    assert hooks.names.count("error") == 0


@with_server
async def test_a_kept_connection_that_breaks_fails_a_call_that_must_not_be_repeated(server):
    transport = way(server.url, retries=QUICK)
    await transport.request("POST", "/kept", json={}, idempotent=False)
    with pytest.raises(EngineConnectionError, match="the connection broke"):
        await transport.request("POST", "/kept", json={}, idempotent=False)
    assert len(server.seen) == 2


@with_server
async def test_the_deadline_is_of_the_whole_call(server, sentence):
    transport = HTTPTransport(server.url)
    caught = await raised_by(EngineTimeoutError, transport.request("POST", "/slow", json={}, timeout=0.05))
    assert str(caught).replace(server.url, "URL") == sentence
    server.busy = 100
    with pytest.raises(EngineTimeoutError):
        await way(server.url, retries=RetryPolicy(wait_initial=60, wait_max=60)).request(
            "GET", "/busy", timeout=0.05
        )
    await transport.request("POST", "/echo", json=1)


@with_server
async def test_cancelling_closes_the_connection(server):
    hooks = Recorder()
    transport = way(server.url, hooks=[hooks])
    task = asyncio.create_task(transport.request("POST", "/slow", json={}))
    while not server.seen:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone_from(server, "/slow")
    await transport.request("POST", "/echo", json=1)
    assert server.connections[0] != server.connections[1]
    assert hooks.names == ["request", "error", "request", "response"]
    assert isinstance(hooks.events[1][1].error, asyncio.CancelledError)


@with_server
async def test_a_refusal_says_what_the_server_said(server, sentence):
    error = await raised_by(EngineStatusError, HTTPTransport(server.url).request("POST", "/refuse", json={}))
    assert str(error).replace(server.url, "URL") == sentence
    assert error.body.startswith('{"error": {"message": "no  such\nthing"}}')
    assert len(error.body) == 8192
    assert len(str(error)) < 500


@pytest.mark.parametrize("path", ["/echo", "/chunked"])
@with_server
async def test_a_reply_that_is_too_long_is_not_read(server, path, sentence):
    transport = way(server.url, max_reply_bytes=1000)
    caught = await raised_by(EngineReplyError, transport.request("POST", path, json="x" * 5000))
    assert str(caught).replace(server.url, "URL") == sentence
    with pytest.raises(EngineReplyError, match=r"expected at most 999 bytes$"):
        await transport.request("POST", path, json="x" * 5000, max_reply_bytes=999)


@with_server
async def test_lines_are_streamed_until_the_reader_leaves(server):
    hooks = Recorder()
    transport = way(server.url, hooks=[hooks])
    lines = [line async for line in transport.stream("POST", "/lines", json={})]
    assert lines == [b"one", b"two", b"", b"three", b"last"]
    with pytest.raises(EngineStatusError):
        async for _ in transport.stream("GET", "/nothing"):
            pass
    assert hooks.names == ["request", "response", "request", "error"]
    stream = HTTPTransport(server.url).stream("GET", "/endless")
    async for line in stream:
        assert line == b"more"
        break
    await stream.aclose()
    await gone_from(server, "/endless")


@with_server
async def test_hooks_are_told_and_may_send_headers(server):
    hooks = Recorder()
    transport = way(server.url, hooks=[hooks], retries=QUICK)
    await transport.request("POST", "/echo?q=1", json={"a": 1}, headers={"x-mine": "caller"})
    assert (server.seen[0][2]["traceparent"], server.seen[0][2]["x-mine"]) == ("00-1", "caller")
    server.busy = 1
    await transport.request("GET", "/busy")
    assert [event.url for _, event in hooks.events] == [f"{server.url}/echo"] * 2 + [f"{server.url}/busy"] * 3
    assert hooks.names == ["request", "response", "request", "retry", "response"]
    begun, ended, _, retried, _ = (event for _, event in hooks.events)
    assert (begun.method, begun.attempt, begun.request_bytes, begun.status) == ("POST", 1, 7, None)
    assert (ended.status, ended.reply_bytes, ended.call_id) == (200, 7, begun.call_id)
    assert ended.seconds >= begun.seconds >= 0
    assert (retried.attempt, retried.status) == (2, 503)
    assert isinstance(retried.error, EngineStatusError)


@with_server
async def test_a_hook_that_fails_is_logged_and_fails_nothing(server, caplog):
    class Broken(ClientHooks):
        def on_request(self, event: RequestEvent) -> None:
            raise KeyError("lost")

    await way(server.url, hooks=[Broken()]).request("POST", "/echo", json=1)
    assert "the hook Broken.on_request failed" in caplog.text


@with_server
async def test_what_is_no_json_is_refused_before_sending(server, sentence):
    hooks = Recorder()
    transport = way(server.url, hooks=[hooks])
    caught = await raised_by(InputError, transport.request("POST", "/echo", json={"a": object()}))
    assert str(caught).partition(", got ")[0] == sentence
    with pytest.raises(InputError, match="the request cannot be sent"):
        await transport.request("POST", "/echo", json={}, headers={"a": "b\r\nc: d"})
    assert not server.seen
    assert hooks.names == ["request", "error"]  # what is not JSON never becomes a call


@pytest.mark.parametrize("sending", ["files", "no files", "no memory", "full socket"])
@with_server
async def test_raw_members_go_out_as_they_are(server, sending, monkeypatch):
    def refuse(*_: Any) -> int:
        raise BlockingIOError

    if sending in ("no files", "no memory"):  # none can be opened, or none can be written
        path = "/nowhere" if sending == "no files" else os.devnull
        monkeypatch.setattr(os, "memfd_create", lambda _: os.open(path, os.O_RDONLY), raising=False)
    elif sending == "full socket":
        monkeypatch.setattr(os, "sendfile", refuse)
    texts = [b"QUJD" * count for count in (3, 200_000, 700_000, 600_000)]
    members = [JSONText(b'"%b"' % text) for text in texts]
    assert [member.data for member in members] == [b'"%b"' % text for text in texts]
    body = {"a": 1, "images": [members[0], None, *members[1:], members[-1]], "z": "end"}
    given = [texts[0].decode(), None, *(text.decode() for text in (*texts[1:], texts[-1]))]
    transport = HTTPTransport(server.url)
    for path in ("/echo", "/chunked"):
        replies = await asyncio.gather(*[transport.request("POST", path, json=body) for _ in range(3)])
        assert [msgspec.json.decode(reply.body) for reply in replies] == 3 * [
            {"a": 1, "images": given, "z": "end"}
        ]


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("size", [LONG_TEXT // 2, 16 * LONG_TEXT])
async def test_a_server_that_refuses_a_body_before_it_has_come_is_heard(size, closes):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        if closes:
            writer.close()
        await heard.wait()
        writer.close()

    heard = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = way(f"http://127.0.0.1:{port}", timeout=60.0)
    with pytest.raises(EngineStatusError, match="413"):
        await transport.request("POST", "/", json=JSONText(b"0" * size))
    heard.set()
    await transport.aclose()
    server.close()


def test_files_of_texts_close_with_them():
    open_files = Path("/proc/self/fd")
    if not open_files.is_dir():
        pytest.skip("the system does not show open files")
    gc.collect()  # of other tests
    before = len(list(open_files.iterdir()))
    texts = [JSONText(b"0" * LONG_TEXT) for _ in range(5)]
    assert len(list(open_files.iterdir())) == before + 5
    del texts
    gc.collect()
    assert len(list(open_files.iterdir())) == before


@pytest.mark.parametrize(
    "settings",
    [{"base_url": "127.0.0.1:8000"}, {"timeout": 0}, {"keepalive": float("nan")}, {"api_key": "a\nb"}],
)
def test_settings_are_checked(settings, sentence):
    assert error_of(InputError, TransportConfig, **{"base_url": "http://127.0.0.1:1", **settings}) == sentence
    with pytest.raises(InputError, match=r"^attempts: is out of range - expected more than 0, got 0$"):
        RetryPolicy(attempts=0)


@with_server
async def test_a_reply_that_is_compressed_all_the_same_is_read(server):
    transport = HTTPTransport(server.url)
    reply = await transport.request("POST", "/packed", json="x" * 5000)
    assert bytes(reply.body) == b'"' + b"x" * 5000 + b'"'
    assert server.seen[0][2]["Accept-Encoding"] == "identity"
    with pytest.raises(EngineReplyError, match="too long"):
        await way(server.url, max_reply_bytes=1000).request("POST", "/packed", json="x" * 5000)


@with_server
async def test_calls_beyond_the_bound_of_connections_wait(server):
    transport = way(server.url, max_connections=2)
    await asyncio.gather(*[transport.request("POST", "/echo", json=n) for n in range(20)])
    assert len(server.seen) == 20
    assert len(set(server.connections)) <= 2


@with_server
async def test_cancelling_at_any_moment_mixes_up_no_answers(server):
    source = random.Random(0)
    transport = way(server.url, max_connections=4)
    answered = 0

    async def ask(number: int) -> None:
        nonlocal answered
        body = {"number": number, "text": "x" * source.choice([0, 1000, 400_000])}
        reply = await transport.request("POST", source.choice(["/echo", "/chunked"]), json=body)
        assert msgspec.json.decode(reply.body) == body
        answered += 1

    tasks = [asyncio.create_task(ask(number)) for number in range(120)]
    for task in source.sample(tasks, 60):
        await asyncio.sleep(source.random() * 0.003)
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert answered + cancelled == len(tasks)
    assert answered >= 60
    # Nothing of the cancelled calls is left behind: every place is free again.
    session, _ = transport._sessions[asyncio.get_running_loop()]
    assert not session.connector._acquired
    await asyncio.gather(*[ask(number) for number in range(8)])
