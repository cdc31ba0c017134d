"""Routes of a gateway over real HTTP: protocols, sessions, keys, limits, streams and their ends."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import openai
import pytest

from mmrender import Trajectory
from mmrender.errors import EngineStatusError, EngineTimeoutError, InputError
from mmrender.gateway import GatewaySettings, limits, work
from mmrender.gateway import call as calls
from mmrender.gateway.protocols import PROTOCOLS
from session_cases import Script

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
HELLO = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50},
}


@contextlib.contextmanager
def serving(renderer, *, out=None, aliases=None, alias_keys=None, **settings):
    """A gateway over a scripted engine, on a thread of its own; yields both."""
    script = Script(renderer)
    gateway = script.gateway(
        out, settings=GatewaySettings(**settings), aliases=aliases, alias_keys=alias_keys
    )
    gateway.start()
    try:
        yield gateway, script
    finally:
        gateway.stop()


def ask(gateway, path, body=None, *, key="none", method=None, headers=(), raw=None):
    """Return status and decoded body of a request."""
    at = urlsplit(gateway.url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    sent = {"content-type": "application/json", "authorization": f"Bearer {key}", **dict(headers)}
    data = raw if raw is not None else None if body is None else json.dumps(body)
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
        reply = connection.getresponse()
        text = reply.read()
    finally:
        connection.close()
    is_json = (reply.headers["content-type"] or "").startswith("application/json")
    return reply.status, json.loads(text) if is_json and text else text


def call(gateway, path="/s/a/v1/", protocol=CHAT, *, key="none", headers=(), **fields):
    body = {"model": "any", **HELLO[protocol], **fields}
    return ask(gateway, path + protocol, body, key=key, headers=headers)


def text_of(protocol, reply):
    if protocol == CHAT:
        return reply["choices"][0]["message"]["content"]
    parts = reply["content"] if protocol == MESSAGES else reply["output"][-1]["content"]
    return parts[0]["text"]


def states(gateway, key="none"):
    return {each["name"]: each["steps"] for each in ask(gateway, "/sessions", key=key)[1]["data"]}


@pytest.fixture(scope="module")
def open_gateway(renderer):
    with serving(renderer) as (gateway, script):
        yield gateway, script


# --- protocols and names of sessions ---


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_a_call_is_answered_and_recorded(open_gateway, protocol):
    gateway, _ = open_gateway
    status, reply = call(gateway, f"/s/one-{protocol[:4]}/v1/", protocol)
    assert (status, reply["model"]) == (200, "any")
    assert text_of(protocol, reply).startswith("answer ")
    session = gateway.run(gateway.session(f"one-{protocol[:4]}"))
    trajectory = gateway.run(session.trajectory())
    assert len(trajectory) == 1
    assert (
        trajectory.steps[0].extra["gateway"]["response"] == reply["id"].rpartition("_")[2].rpartition("-")[2]
    )


def test_a_session_is_named_by_path_else_by_key_else_by_header(renderer):
    with serving(renderer) as (gateway, _):
        opened = ask(gateway, "/sessions", {"name": "mine"})[1]
        named = [{"x-session-id": "x"}, {"x-claude-code-session-id": "c"}, {"session-id": "s"}, {}]
        assert call(gateway, "/s/path/v1/", headers={"x-session-id": "no"})[0] == 200
        assert call(gateway, "/v1/", key=opened["api_key"], headers={"x-session-id": "no"})[0] == 200
        for headers in named:
            assert call(gateway, "/v1/", headers=headers)[0] == 200
        found = states(gateway)
        by_key = [name for name in found if name.startswith("key-")]
        assert len(by_key) == 1
        assert found == dict.fromkeys(["mine", "path", "x", "c", "s", *by_key], 1)


def test_anthropics_key_is_a_key(renderer):
    with serving(renderer, api_key="secret") as (gateway, _):
        assert call(gateway, protocol=MESSAGES, key="", headers={"x-api-key": "secret"})[0] == 200
        status, reply = call(gateway, protocol=MESSAGES, key="", headers={"x-api-key": "wrong"})
        assert (status, reply["type"], reply["error"]["type"]) == (401, "error", "authentication_error")


def test_officials_client_lists_models_and_gets_a_stream(renderer):
    with serving(renderer) as (gateway, _):
        caller = openai.OpenAI(base_url=f"{gateway.url}/s/a/v1", api_key="none", max_retries=0)
        with caller:
            assert [model.id for model in caller.models.list()] == ["m"]
            assert caller.models.retrieve("anything").id == "anything"
            whole = caller.chat.completions.create(model="x", messages=HELLO[CHAT]["messages"])
            chunks = list(
                caller.chat.completions.create(
                    model="x",
                    messages=HELLO[CHAT]["messages"],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
    streamed = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert (whole.choices[0].message.content, streamed) == ("answer 1", "answer 2")
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_model_that_is_not_served_is_refused_if_models_are_named(renderer):
    with serving(renderer, models=["m"]) as (gateway, _):
        status, reply = call(gateway)
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert call(gateway, model="m")[0] == 200


def test_the_root_answers_and_tokens_are_counted(open_gateway):
    gateway, _ = open_gateway
    for path in ("/", "/s/a"):
        assert ask(gateway, path, method="HEAD")[0] == 200
    body = {"model": "any", **HELLO[MESSAGES]}
    counted = ask(gateway, "/s/a/v1/messages/count_tokens", body)[1]["input_tokens"]
    reply = call(gateway, "/s/count/v1/", MESSAGES)[1]
    assert counted == reply["usage"]["input_tokens"]
    assert b"mmrender_request_seconds" in ask(gateway, "/metrics")[1]
    assert ask(gateway, "/health") == (200, {"status": "ok"})


# --- sessions over HTTP ---


def test_a_session_lives_and_ends_over_http(renderer, tmp_path):
    with serving(renderer, out=tmp_path / "out.mmr") as (gateway, _):
        wish = {"name": "a", "group": "g", "metadata": {"seed": 7}, "max_turns": 3}
        status, opened = ask(gateway, "/sessions", wish)
        assert (status, opened["base_url"]) == (201, f"{gateway.url}/s/a/v1")
        assert ask(gateway, "/sessions/named", {"name": "other"})[0] == 400
        status, named = ask(gateway, "/sessions/named", {"group": "g"})
        assert (status, named["name"], named["group"]) == (201, "named", "g")
        key = opened["api_key"]
        reply = call(gateway, key=key)[1]
        assert ask(gateway, "/sessions/a/reward", {"value": 0.5, "response_id": reply["id"]})[0] == 200
        assert ask(gateway, "/sessions/a/reward", {"value": 0.5, "step": 4})[0] == 400
        status, data = ask(gateway, "/sessions/a/trajectory")
        partial = Trajectory.from_bytes(data)
        assert (status, len(partial), partial.steps[0].reward) == (200, 1, 0.5)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(ask, gateway, "/sessions/a/wait")
            assert ask(gateway, "/sessions/a/finish", {"reward": 1.0})[1]["state"] == "finished"
            assert waiting.result()[1]["state"] == "finished"
        assert call(gateway, key=key)[0] == 409
        assert ask(gateway, "/sessions", wish)[0] == 409
        assert ask(gateway, "/sessions/b/finish", {})[0] == 404
        call(gateway, "/s/b/v1/")
        assert ask(gateway, "/sessions/b", method="DELETE")[1]["state"] == "abandoned"
    from mmrender.trajectory import load_trajectories

    [left] = load_trajectories(tmp_path / "out.mmr")
    assert (left.trajectory_id, left.reward, left.extra["group"]) == ("a", 1.0, "g")


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/sessions", {"max_turns": "3"}, "max_turns: Expected `int | null`, got `str`", "max_turns"),
        ("/sessions", {"turns": 3}, "turns: unknown field", "turns"),
        ("/sessions/a/reward", {"step": 1}, "value: is missing", "value"),
        ("/sessions/a/finish", {"reward": [1]}, "reward: Expected `float | null`, got `array`", "reward"),
    ],
)
def test_a_malformed_body_of_a_session_is_refused_by_its_field(renderer, path, body, message, param):
    with serving(renderer) as (gateway, _):
        assert ask(gateway, "/sessions/a", {"group": None})[0] == 201
        status, reply = ask(gateway, path, body)
        assert status == 400
        assert (reply["error"]["message"], reply["error"]["param"]) == (message, param)
        assert reply["error"]["code"] == "invalid_value"


def test_unknown_sessions_are_refused_if_calls_may_not_open_them(renderer):
    with serving(renderer, open_sessions=False) as (gateway, _):
        assert call(gateway)[0] == 404
        ask(gateway, "/sessions", {"name": "a"})
        assert call(gateway)[0] == 200


# --- keys and pages ---


def test_a_key_never_reads_sessions_of_another(renderer):
    with serving(renderer, api_key=["one", "two"]) as (gateway, _):
        opened = ask(gateway, "/sessions", {"name": "a"}, key="one")[1]
        assert call(gateway, key="one")[0] == 200
        for path in ("", "/trajectory", "/wait"):
            assert ask(gateway, f"/sessions/a{path}", key="two")[0] == 404
        for path in ("reward", "finish"):
            assert (
                ask(gateway, f"/sessions/a/{path}", {"value": 1.0} if path == "reward" else {}, key="two")[0]
                == 404
            )
        assert ask(gateway, "/sessions/a", method="DELETE", key="two")[0] == 404
        assert call(gateway, key="two")[0] == 400
        assert states(gateway, "two") == {}
        assert call(gateway, key="none")[0] == 401
        own = opened["api_key"]
        assert call(gateway, key=own)[0] == 200
        assert call(gateway, "/v1/", key=own)[0] == 200
        assert call(gateway, "/s/b/v1/", key=own)[0] == 403
        for path in ("/sessions", "/sessions/a", "/metrics"):
            assert ask(gateway, path, key=own)[0] == 401
        assert states(gateway, "one") == {"a": 3}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:80"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:9"}, 200),
        ({"host": "evil.test"}, 403),
        ({"host": "127.0.0.1.evil.test"}, 403),
        ({"origin": "https://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_web_page_cannot_reach_a_gateway_without_a_key(open_gateway, headers, status):
    gateway, _ = open_gateway
    assert call(gateway, "/s/page/v1/", headers=headers)[0] == status


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "", "::", "10.0.0.1", "127.example.com", "localhost.example.com"]
)
def test_a_gateway_that_others_reach_needs_a_key(host):
    with pytest.raises(InputError, match="the gateway would be open to everybody"):
        GatewaySettings(host=host)
    assert GatewaySettings(host=host, api_key="k").keys == ["k"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LocalHost."])
def test_this_machine_needs_no_key(host):
    assert GatewaySettings(host=host).keys == []


# --- work is charged before it is done ---


@pytest.mark.parametrize(
    ("protocol", "fields", "code"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 65}, "too_many_messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 65}]}, None),
        (RESPONSES, {"input": [{"role": "user", "content": "a"}] * 65}, "too_many_messages"),
        (CHAT, {"stop": "x" * (1 << 20)}, "too_many_stops"),
        (CHAT, {"stop": ["x"] * 100}, "too_many_stops"),
        (MESSAGES, {"stop_sequences": ["x" * 9000]}, None),
        (CHAT, {"n": 129}, "invalid_value"),
        (CHAT, {"n": True}, "invalid_value"),
    ],
)
def test_a_request_is_charged_before_it_is_read(renderer, protocol, fields, code):
    with serving(renderer, max_messages=64) as (gateway, script):
        status, reply = call(gateway, protocol=protocol, **fields)
        assert (status, reply["error"].get("code")) == (400, code)
        assert script.asked == 0


def test_answers_of_a_key_are_counted_together(renderer):
    with serving(renderer, max_requests=4) as (gateway, script):
        assert call(gateway, n=5)[0] == 429
        script.gate.clear()
        with ThreadPoolExecutor() as threads:
            first = threads.submit(call, gateway, n=3)
            while script.running < 3:
                time.sleep(0.01)
            assert call(gateway, n=2)[0] == 429
            assert call(gateway, key="another", path="/s/b/v1/", n=5)[0] == 429
            gateway.run(_open(script.gate))
            assert first.result()[0] == 200
        assert call(gateway, n=4)[0] == 200


async def _open(gate):
    gate.set()


def test_bodies_are_bounded_in_bytes_pieces_and_time(renderer):
    head = b"POST /s/a/v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def status(gateway, rest):
        at = urlsplit(gateway.url)
        with socket.create_connection((at.hostname, at.port), timeout=30) as connection:
            connection.sendall(head + rest)
            return connection.recv(1 << 16).split()[1]

    with serving(renderer, max_body_bytes=1 << 16) as (gateway, _):
        assert call(gateway, user="x" * (1 << 16))[0] == 413
        assert status(gateway, b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 8000) == b"400"
    with serving(renderer, read_seconds=0.2) as (gateway, _):
        assert status(gateway, b"Content-Length: 9\r\n\r\n{") == b"408"


def spied(monkeypatch, owner, name):
    """Return a list that receives the name of the thread of each call of a function."""
    seen, function = [], getattr(owner, name)

    def spy(*arguments):
        seen.append(threading.current_thread().name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, spy)
    return seen


SIZES = {
    "small": ({}, True),
    "bytes": ({"user": "x" * (work.LOOP_BYTES + 1)}, False),
    "members": ({"logit_bias": dict.fromkeys(range(work.LOOP_BYTES // work.MEMBER_BYTES), 0)}, False),
}


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_large_request_is_read_in_a_thread_however_it_comes(open_gateway, monkeypatch, size, is_chunked):
    gateway, _ = open_gateway
    fields, is_on_loop = SIZES[size]
    decoding = spied(monkeypatch, limits, "_decoded")
    reading = spied(monkeypatch, PROTOCOLS["chat"], "read")
    digesting = spied(monkeypatch, calls, "message_digest")
    text = json.dumps({"model": "any", **HELLO[CHAT], **fields}).encode()
    pieces = [text[start : start + 65536] for start in range(0, len(text), 65536)]
    path = f"/s/size-{size}-{is_chunked}/v1/chat/completions"
    status, _ = ask(gateway, path, raw=iter(pieces) if is_chunked else text, method="POST")
    assert status == 200
    threads = [*decoding, *reading, *digesting]
    assert [name == "mmrender-gateway" for name in threads] == [is_on_loop] * 3


def test_parts_of_a_reply_leave_at_once_and_clients_end_idle_connections_first(open_gateway):
    gateway, _ = open_gateway
    at = urlsplit(gateway.url)
    with socket.create_connection((at.hostname, at.port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).split()[1] == b"200"
        own = connection.getsockname()
        connections = gateway._server.server_state.connections
        [served] = [each for each in connections if each.transport.get_extra_info("peername") == own]
        assert served.timeout_keep_alive > 15  # aiohttp's, the longest of common clients
        option = served.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert option


# --- streams ---


def events_of(gateway, protocol=CHAT, path="/s/a/v1/", **fields):
    """Return status and text of a streamed answer."""
    status, text = call(gateway, path, protocol, stream=True, **fields)
    return status, text.decode() if isinstance(text, bytes) else text


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_an_error_before_the_first_text_has_its_own_status(renderer, protocol):
    with serving(renderer) as (gateway, script):
        script.fault = EngineTimeoutError("too slow")
        status, reply = events_of(gateway, protocol)
        assert (status, type(reply)) == (504, dict)
        script.fault = EngineStatusError("no", status=400, body=b"")
        assert events_of(gateway, protocol)[0] == 400
        status, text = events_of(gateway, protocol)
        assert (status, "answer 3" in text) == (200, True)


def test_a_late_failure_of_an_engine_breaks_a_chat_stream_and_the_call_can_be_repeated(renderer, capsys):
    with serving(renderer, keep_alive_seconds=0.05) as (gateway, script):
        session = gateway.run(gateway.open_session("a"))
        client = openai.OpenAI(base_url=session.base_url, api_key="none", max_retries=0)

        def ends(fault):
            """The stream's first chunk, and how it goes on once the engine has failed, or not."""
            script.gate.clear()
            script.fault = fault
            stream = client.chat.completions.create(model="m", **HELLO[CHAT], stream=True)
            first = next(stream)
            gateway.run(_open(script.gate))
            return "".join(chunk.choices[0].delta.content or "" for chunk in [first, *stream])

        with client:
            with pytest.raises(openai.APIConnectionError):
                ends(EngineTimeoutError("too slow"))
            assert session.describe()["incomplete"] == "a call failed: too slow"
            assert "Traceback" not in (logged := capsys.readouterr().err)
            assert "a stream broke off: too slow" in logged
            assert b'status="504"' in ask(gateway, "/metrics")[1]
            with pytest.raises(openai.APIError, match="no such model") as refused:
                ends(EngineStatusError("no such model", status=400, body=b""))
            assert not isinstance(refused.value, openai.APIConnectionError)
            assert ends(None) == "answer 3"
        trajectory = gateway.run(session.finish())
    assert (len(trajectory), trajectory.error) == (1, None)


@pytest.mark.parametrize("protocol", [RESPONSES, MESSAGES])
def test_a_slow_answer_has_signs_of_life_and_a_late_error_is_an_event(renderer, protocol):
    sign = b"event: ping" if protocol == MESSAGES else b":"
    body = json.dumps({"model": "any", **HELLO[protocol], "stream": True})
    with serving(renderer, keep_alive_seconds=0.05) as (gateway, script):
        script.gate.clear()
        script.fault = EngineTimeoutError("too slow")
        at = urlsplit(gateway.url)
        with contextlib.closing(http.client.HTTPConnection(at.hostname, at.port, timeout=60)) as connection:
            connection.request("POST", f"/s/a/v1/{protocol}", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            signs = 0
            while signs < 3:
                signs += reply.readline().startswith(sign)
            gateway.run(_open(script.gate))
            text = reply.read().decode()
    assert reply.status == 200
    assert "engine_timeout" in text or "too slow" in text


def test_a_caller_who_leaves_gets_the_same_answer_when_it_comes_back(renderer):
    with serving(renderer) as (gateway, script):
        script.gate.clear()
        at = urlsplit(gateway.url)
        body = json.dumps({"model": "any", **HELLO[CHAT], "stream": True})
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=30)
        connection.request("POST", f"/s/a/v1/{CHAT}", body, {"content-type": "application/json"})
        while not script.running:
            time.sleep(0.01)
        connection.close()
        while b'status="499"' not in ask(gateway, "/metrics")[1]:
            time.sleep(0.01)
        with ThreadPoolExecutor() as threads:
            again = threads.submit(call, gateway)
            gateway.run(_open(script.gate))
            assert text_of(CHAT, again.result()[1]) == "answer 1"
        assert script.asked == 1
        assert text_of(CHAT, call(gateway)[1]) == "answer 2"  # delivered, so asked once more
        assert states(gateway) == {"a": 2}


# --- other models ---


def test_an_aliased_model_is_another_servers_and_is_not_recorded(renderer):
    received = []

    class Small(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["content-length"])
            keys = self.headers["authorization"], self.headers["x-api-key"]
            received.append((self.path, keys, json.loads(self.rfile.read(length))))
            body = b'{"small": true}'
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Small)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        aliases = {"small": url, "locked": url, "gone": "http://127.0.0.1:1"}
        with serving(renderer, aliases=aliases, alias_keys={"locked": "secret"}) as (gateway, script):
            assert call(gateway, protocol=MESSAGES, model="small") == (200, {"small": True})
            assert call(gateway, protocol=MESSAGES, model="locked") == (200, {"small": True})
            assert call(gateway, model="locked", key="", headers={"x-api-key": "mine"})[0] == 200
            assert call(gateway, model="gone")[0] == 502
            assert script.asked == 0
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    path, _, body = received[0]
    assert (path, body["messages"]) == ("/v1/messages", HELLO[MESSAGES]["messages"])
    bearer = ("Bearer secret", None)
    assert [keys for _, keys, _ in received] == [(None, None), bearer, ("Bearer secret", "secret")]


@pytest.mark.parametrize("ends", ["cancelled", "signal"])
def test_several_gateways_serve_in_one_loop(renderer, ends):
    """Handlers of signals are as before, also if the gateways end in the order in which they began."""
    noted = []

    async def run():
        scripts = [Script(renderer) for _ in range(2)]
        gateways = [script.gateway() for script in scripts]
        ready = [asyncio.Event() for _ in gateways]
        tasks = [
            asyncio.create_task(gateway.serve(started=lambda _, event=event: event.set()))
            for gateway, event in zip(gateways, ready, strict=True)
        ]
        for event in ready:
            await event.wait()
        answers = await asyncio.gather(*[asyncio.to_thread(call, gateway) for gateway in gateways])
        if ends == "signal":
            signal.raise_signal(signal.SIGTERM)
        for task in tasks if ends == "cancelled" else ():
            task.cancel()
            await asyncio.wait([task])
        await asyncio.gather(*tasks, return_exceptions=True)
        return [status for status, _ in answers]

    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert asyncio.run(run()) == [200, 200]
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == ([signal.SIGTERM] if ends == "signal" else [])


def test_token_ids_as_keys_of_sampling_parameters_are_kept(renderer, tmp_path):
    """A bias names tokens by number, in Python also as a key."""
    with serving(renderer, out=tmp_path / "out.mmr") as (gateway, _):
        params = {"logit_bias": {7: -100.0}}
        session = gateway.run(gateway.open_session("a", sampling_params=params))
        assert call(gateway, logit_bias={"9": 1.0})[0] == 200
        record = gateway.run(session.trajectory()).steps[0].extra["gateway"]
        assert record["sampling_params"]["logit_bias"] == {"7": -100.0}
        assert record["replaced_params"]["logit_bias"] == {"9": 1.0}
