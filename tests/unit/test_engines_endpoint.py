"""The HTTP endpoint: OpenAI's client and raw requests against it, over engines in memory."""

import asyncio
import dataclasses
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from engine_cases import in_loop, patient, setup, turns
from mmrender.client.types import EngineResponse, Usage
from mmrender.engines import endpoint
from mmrender.engines.callers import failure_of
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.endpoint import EngineServer, ServerSettings
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.interface import new_request
from mmrender.errors import (
    EngineStateError,
    EngineStatusError,
    InputError,
    MediaFetchError,
    PromptTooLongError,
)
from mmrender.rollout import RendererClient
from mmrender.testing.scripted_engine import Fault, ScriptedEngine, letters, sampled
from rollout_cases import TOOLS

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = {"model": "m", "prompt": "abc", "max_tokens": 5}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SETTINGS = ServerSettings(model="m", api_key="secret", max_body_bytes=4096)


class Passing(ScriptedEngine):
    """Has routes for text; each completion is one of the formula's, of the prompt 2."""

    async def openai(self, call, request_payload):
        body = request_payload["json"]
        whole = await self.complete(new_request([2], {"max_tokens": body.get("max_tokens", 4)}))
        choice = {"index": 0, "text": letters(whole.completion_ids), "finish_reason": whole.finish_reason}
        choice["message"] = {"role": "assistant", "content": choice["text"]}
        usage = {"prompt_tokens": 1, "completion_tokens": len(whole.completion_ids), "total_tokens": 9}
        head = {"id": "cmpl-1", "object": call.replace("_", "."), "created": 1, "model": "x"}
        return {**head, "choices": [choice], "usage": usage}

    async def stream_openai(self, call, request_payload):
        self._check_alive()
        reply = await self.openai("completion", request_payload)
        for letter in reply["choices"][0]["text"]:
            yield {**reply, "choices": [{"index": 0, "text": letter, "finish_reason": None}], "usage": None}
        yield {**reply, "choices": []}


class Slow(Passing):
    """Answers after a second."""

    async def openai(self, call, request_payload):
        await asyncio.sleep(1)
        return await super().openai(call, request_payload)


class Saying(ScriptedEngine):
    """Says what it is given, token by token."""

    def __init__(self, ids, name="saying", stop=None, cut=None):
        super().__init__(name, limit=500)
        self.ids = ids
        self.stop = stop
        self.cut = cut

    async def complete(self, request, *, session_id=None, on_tokens=None):
        self.asked.append(request)
        start = 0 if self.cut is None or len(self.asked) == 1 else self.cut
        ids = self.ids[start : start + request.sampling_params["max_tokens"]]
        reason = "stop" if start + len(ids) == len(self.ids) else "length"
        if self.cut is not None and len(self.asked) == 1:
            ids, reason = ids[: self.cut], "abort"
        for token in ids:
            await asyncio.sleep(0)
            if on_tokens is not None:
                on_tokens([token], [-0.25], None)
        top = tuple(((token, -0.25),) for token in ids) if request.sampling_params.get("logprobs") else None
        usage = Usage(len(request.prompt_ids), len(ids), 1)
        stop = self.stop if reason == "stop" else None
        return EngineResponse(ids, [-0.25] * len(ids), reason, usage, stop_reason=stop, top_logprobs=top)


@pytest.fixture(scope="module")
def passing():
    """A server that passes chat on, with its client and engines."""
    case = setup(policy=patient(attempt_timeout=None), kind=Passing)
    with EngineServer(case.client, SETTINGS) as server:
        yield server, case


def caller_of(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, **options)


def raw(server, path, body=None, *, key="secret"):
    """Status, headers and text of an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def test_chat_and_completions_are_passed_on_whole_and_streamed(passing):
    server, _ = passing
    text = letters(sampled([2], 20).completion_ids)
    asked = {"model": "m", "max_tokens": 20}
    with caller_of(server) as caller:
        reply = caller.chat.completions.create(messages=HELLO, **asked)
        assert (reply.choices[0].message.content, reply.model) == (text, "m")
        assert caller.completions.create(prompt="abc", **asked).choices[0].text == text
        chunks = list(caller.completions.create(prompt="abc", stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert {chunk.model for chunk in chunks} == {"m"}


def test_sessions_route_requests(passing):
    server, case = passing
    before = [len(engine.asked) for engine in case.engines]
    asked = {"model": "m", "messages": HELLO, "max_tokens": 2}
    with caller_of(server) as caller:
        for named in ({"extra_headers": {"X-Session-ID": "a"}}, {"extra_body": {"session_id": "a"}}) * 4:
            caller.chat.completions.create(**asked, **named)
    grown = sorted(len(engine.asked) - count for engine, count in zip(case.engines, before, strict=True))
    assert grown == [0, 0, 8]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHAT, {"model": "x", "messages": HELLO}, 404, "model_not_found", "model"),
        (CHAT, {"messages": HELLO}, 404, "model_not_found", "model"),
        (CHAT, b"{", 400, "invalid_json", None),
        (CHAT, b"[1]", 400, "invalid_json", None),
        (CHAT, b"\xff\xfe", 400, "invalid_json", None),
        (CHAT, b'{"a":' * 700, 400, "invalid_json", None),
        (CHAT, {"model": "m", "messages": HELLO, "session_id": [1]}, 400, "invalid_value", "session_id"),
        ("/v1/nothing", {"model": "m"}, 404, "not_found", None),
        ("/health", {"model": "m"}, 405, "method_not_allowed", None),
        (CHAT, b" " * 5000, 413, "request_too_large", None),
    ],
)
def test_refusals_have_openais_envelope(passing, path, body, status, code, param):
    server, _ = passing
    got, headers, text = raw(server, path, body)
    error = json.loads(text)["error"]
    assert error.pop("message")
    assert (got, error) == (status, {"code": code, "param": param, "type": "invalid_request_error"})
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize("key", ["", "secre", "secret2", "sécret"])
def test_keys_are_checked(passing, key):
    server, _ = passing
    status, headers, text = raw(server, "/v1/models", key=key.encode().decode("latin-1"))
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(text)["error"]["message"] == "the API key is missing or wrong"


def test_each_of_several_keys_is_let_in_and_limited_by_itself():
    settings = dataclasses.replace(SETTINGS, api_key=["one", "two"], max_requests=2)
    with EngineServer(InferenceEngineClient([Slow("slow")]), settings) as server:
        assert raw(server, "/v1/models", key="three")[0] == 401
        with ThreadPoolExecutor(8) as threads:
            asked = [
                threads.submit(raw, server, COMPLETIONS, PROMPT, key=key) for key in ["one"] * 5 + ["two"]
            ]
            answers = [future.result() for future in asked]
        assert sorted(status for status, *_ in answers[:5]) == [200, 200, 429, 429, 429]
        assert answers[5][0] == 200
        refused = next(answer for answer in answers if answer[0] == 429)
        assert (refused[1]["retry-after"], json.loads(refused[2])["error"]["code"]) == (
            "1",
            "too_many_requests",
        )
        assert raw(server, COMPLETIONS, PROMPT, key="one")[0] == 200


HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\n"


@pytest.mark.parametrize("keep_alive", [False, True])
@pytest.mark.parametrize(
    ("sent", "status"),
    [("", None), ("POST /v1/comp", None), (HEAD, None), (f"{HEAD}Content-Length: 9\r\n\r\n{{", 408)],
)
def test_requests_that_do_not_come_are_not_waited_for(sent, status, keep_alive):
    settings = dataclasses.replace(SETTINGS, read_seconds=0.3)
    with (
        EngineServer(setup(kind=Passing, count=1).client, settings) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as caller,
    ):
        answer = b""
        if keep_alive:
            caller.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            while not answer.endswith(b"}"):
                answer += caller.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            answer = b""
        caller.sendall(sent.encode())
        while piece := caller.recv(4096):
            answer += piece
            if status is not None:
                break
    assert answer[:12] == (b"" if status is None else f"HTTP/1.1 {status}".encode())


def test_health_needs_no_key_and_metrics_do(passing):
    server, case = passing
    assert raw(server, "/health", key="")[::2] == (200, '{"status":"ok"}')
    raw(server, COMPLETIONS, PROMPT)
    assert raw(server, "/metrics", key="")[0] == 401
    status, headers, text = raw(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['mmrender_requests_total{route="/v1/completions",status="200"}']) >= 1
    assert float(lines['mmrender_tokens_total{kind="completion"}']) >= 5
    for engine in case.engines:
        assert lines[f'mmrender_engine_up{{engine="{engine.name}"}}'] == "1.0"
    assert lines["mmrender_paused"] == "0.0"


def test_a_pause_is_waited_for(passing):
    server, case = passing
    server.run(case.client.pause_generation("abort"))
    answers = []
    asking = threading.Thread(target=lambda: answers.append(raw(server, COMPLETIONS, PROMPT)))
    asking.start()
    assert json.loads(raw(server, "/health")[2]) == {"status": "paused"}
    assert "mmrender_paused 1.0" in raw(server, "/metrics")[2]
    assert not answers
    server.run(case.client.resume_generation())
    asking.join(20)
    assert answers[0][0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_work(stream):
    """The work stands at a pause; it is counted as left, and no engine is asked when the pause ends."""
    case = setup(kind=Passing)
    with EngineServer(case.client, ServerSettings(model="m")) as server:
        server.run(case.client.pause_generation("keep"))
        host, _, port = server.url.removeprefix("http://").partition(":")
        body = json.dumps({**PROMPT, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            assert raw(server, "/health")[0] == 200  # a round trip later it is being worked on
        left = 'mmrender_requests_total{route="/v1/completions",status="499"} 1.0'
        deadline = time.monotonic() + 20
        while left not in raw(server, "/metrics")[2] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left in raw(server, "/metrics")[2]
        server.run(case.client.resume_generation())
        assert raw(server, "/health")[0] == 200
    assert not case.journal


def test_engines_that_fail_are_answered_for():
    case = setup([Fault("error", 0)] * 9, policy=patient(attempts=2), kind=Passing)
    with EngineServer(case.client, ServerSettings(model="m")) as server:

        def answer(path, body):
            status, headers, text = raw(server, path, {"model": "m", **body})
            return status, json.loads(text)["error"]["code"], headers["retry-after"]

        assert answer(COMPLETIONS, PROMPT)[:2] == (502, "engine_error")
        for engine in case.engines:
            engine.alive = False
        assert raw(server, "/health")[0] == 503
        assert answer(CHAT, {"messages": HELLO, "stream": True}) == (503, "engine_unavailable", "1")
        server.run(case.client.teardown())
        assert answer(COMPLETIONS, PROMPT)[:2] == (503, "engine_state")


def test_unexpected_errors_reveal_nothing_of_our_insides():
    internal = {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
    assert failure_of(KeyError("secret"))[1]["error"] == internal
    assert failure_of(PromptTooLongError(9, 5))[1]["error"]["code"] == "context_length_exceeded"
    own = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    assert failure_of(EngineStatusError("no", status=400, body=json.dumps(own))) == (400, own)
    assert failure_of(MediaFetchError("gone", where="messages[0]"))[1]["error"]["param"] == "messages[0]"


def token_server(renderer, engine):
    return EngineServer(InferenceEngineClient([engine], renderer=renderer), ServerSettings(model="m"))


@pytest.fixture(scope="module")
def refusing(renderer):
    """A server whose engine is never asked."""
    engine = Saying([5])
    with token_server(renderer, engine) as server:
        yield server
    assert not engine.asked


def assistant_ids(renderer, message):
    """What a model samples for a message, stop token included."""
    prompt = renderer.render_ids(HELLO, add_generation_prompt=True)
    whole = renderer.render_ids([*HELLO, message])
    stop = next(i for i in range(len(prompt), len(whole)) if whole[i] in renderer.get_stop_token_ids())
    return whole[len(prompt) : stop + 1]


def test_chat_is_rendered_sampled_and_read_here(renderer):
    ids = assistant_ids(renderer, {"role": "assistant", "content": "A cow, I think 🐄."})
    engine = Saying(ids)
    with token_server(renderer, engine) as server, caller_of(server) as caller:
        asked = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 1, "n": 2}
        create, with_ids = caller.chat.completions.create, {"return_token_ids": True}
        reply = create(**asked, seed=5, extra_body=with_ids | {"top_k": 4})
        plain = {**asked, "top_logprobs": None, "stream_options": {"include_usage": True}}
        chunks = list(create(**plain, stream=True, extra_body=with_ids))
        with_others = list(create(**asked, stream=True))
        models = caller.models.list().data
        assert caller.models.retrieve("m").id == models[0].id
    assert models[0].max_model_len == 501
    for choice in reply.choices:
        assert choice.message.content == "A cow, I think 🐄."
        assert (choice.finish_reason, choice.token_ids) == ("stop", ids)
        assert len(choice.logprobs.content) == len(ids)
        assert choice.logprobs.content[0].top_logprobs[0].logprob == -0.25
    prompt = renderer.render_ids(HELLO, add_generation_prompt=True)
    assert reply.prompt_token_ids == prompt
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 2 * len(ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    params = [request.sampling_params for request in engine.asked]
    assert [each.get("seed") for each in params] == [5, 6, None, None, None, None]
    assert params[0]["top_k"] == 4
    assert params[0]["max_tokens"] == 501 - len(prompt)
    assert set(renderer.get_stop_token_ids()) <= set(params[0]["stop_token_ids"])
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "A cow, I think 🐄."
        assert sum(choice.delta.content is not None for choice in mine) > 3
        assert sum(len(choice.logprobs.content) for choice in mine if choice.logprobs) == len(ids)
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        told = [token for choice in mine for token in getattr(choice, "token_ids", None) or ()]
        assert told == ids
        others = [c.choices[0] for c in with_others if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in others) == "A cow, I think 🐄."
        entries = [entry for choice in others if choice.logprobs for entry in choice.logprobs.content]
        assert entries == reply.choices[index].logprobs.content
    assert [c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids")] == [prompt]
    assert chunks[-1].usage.completion_tokens == 2 * len(ids)


def showing(url=None, chat_template_kwargs=None, **image):
    """A request that shows an image: by URL, as a member of its part, or (None) not at all."""
    part = {"type": "image", **image} if url is None else {"type": "image_url", "image_url": {"url": url}}
    request = {"messages": [{"role": "user", "content": [part]}]}
    return request | ({"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else {})


def test_calls_and_reasoning_are_read(renderer):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 3}}}
    message = {"role": "assistant", "content": "Let me see, from here.", "tool_calls": [call]}
    ids = assistant_ids(renderer, message)
    with token_server(renderer, Saying(ids)) as server, caller_of(server) as caller:
        asked = {"model": "m", "messages": HELLO, "tools": TOOLS, "max_tokens": 300}
        reply = caller.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in caller.chat.completions.create(**asked, stream=True)]
    assert reply.finish_reason == "tool_calls"
    (called,) = reply.message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("look", {"at": 3})
    assert "".join(chunk.delta.content or "" for chunk in chunks) == reply.message.content
    (delta,) = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
    assert json.loads(delta[0].function.arguments) == {"at": 3}
    assert chunks[-1].finish_reason == "tool_calls"


def test_the_prompt_may_be_opened_continued_or_left_as_it_is(renderer):
    messages = [*HELLO, {"role": "assistant", "content": "hel"}]
    engine = Saying([5, 6])
    given = (
        {},
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    )
    with token_server(renderer, engine) as server:
        for flags in given:
            assert raw(server, CHAT, {"model": "m", "messages": messages, "max_tokens": 2, **flags})[0] == 200
    expected = [
        renderer.render_ids(messages, **(flags or {"add_generation_prompt": True})) for flags in given
    ]
    assert [request.prompt_ids for request in engine.asked] == expected


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"colour": 1}, "colour"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"enable_thinkng": True}}, "chat_template_kwargs.enable_thinkng"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"temperature": "hot"}, "sampling_params['temperature']"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "sampling_params['max_tokens']"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"documents": 5}}, "chat_template_kwargs.documents"),
        (showing(chat_template_kwargs={"images": ["/etc/hostname"]}), "chat_template_kwargs.images"),
        (showing("file:///etc/passwd"), "messages[0].content[0]"),
        (showing("pyproject.toml"), "messages[0].content[0]"),
        (showing(image="/etc/hostname"), "messages[0].content[0]"),
        (showing("http://127.0.0.1:9/x.png"), "messages[0].content[0]"),
        (showing("data:image/png;base64,AA=="), "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "long " * 800}]}, "prompt"),
    ],
)
def test_requests_that_are_refused_by_name(refusing, more, param):
    status, _, text = raw(refusing, CHAT, {"model": "m", "messages": HELLO, **more})
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert (error["param"] or "").startswith(param)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}, {"json": {"a": 1}}),
    ],
)
def test_structured_outputs_are_asked_for(renderer, given, asked):
    engine = Saying([5, 6])
    with token_server(renderer, engine) as server:
        body = {"model": "m", "messages": HELLO, "response_format": given, "max_tokens": 9}
        assert raw(server, CHAT, body)[0] == 200
    assert engine.asked[0].sampling_params["structured_outputs"] == asked


def test_a_server_leaves_no_thread_and_no_socket():
    case = setup()
    server = EngineServer(case.client, ServerSettings(model="m"))
    before = threading.active_count()
    url = server.start()
    port = int(url.rpartition(":")[2])
    with pytest.raises(EngineStateError, match=r"^the server is running already$"):
        server.start()
    assert raw(server, "/health")[0] == 200
    for _ in range(2):
        server.stop()
    assert threading.active_count() == before
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    with pytest.raises(EngineStateError, match=r"^the server is not running$"):
        _ = server.url
    assert server.start()  # and it can start again
    server.stop()


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EngineServer(setup().client, ServerSettings(model="m", port=port))
        before = threading.active_count()
        with pytest.raises(EngineStateError, match=rf"^127.0.0.1:{port}: the server cannot listen"):
            server.start()
        assert threading.active_count() == before


@in_loop
async def test_serving_on_ones_own_loop_ends_with_its_task():
    urls = []
    server = EngineServer(setup().client, ServerSettings(model="m"))
    serving = asyncio.create_task(server.serve(started=urls.append))
    while not urls:
        await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await turns(3)
    assert len(asyncio.all_tasks()) == 1


SETTINGS_REFUSED = {
    "empty key": {"api_key": ""},
    "no keys": {"api_key": []},
    "no requests": {"max_requests": 0},
    "open to all": {"host": "0.0.0.0"},
}


@pytest.mark.parametrize("case", SETTINGS_REFUSED)
def test_settings_are_checked(case, sentence):
    with pytest.raises(InputError) as caught:
        ServerSettings(model="m", **SETTINGS_REFUSED[case])
    assert str(caught.value) == sentence
    assert "secret" not in repr(SETTINGS)


def test_serving_is_one_call(monkeypatch):
    made = []

    class Recorded(HTTPEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(endpoint, "HTTPEngine", Recorded)
    settings = ServerSettings(model="public")

    def started(url):
        assert url.startswith("http://127.0.0.1:")
        raise KeyboardInterrupt

    urls = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    endpoint.serve(urls, engine_model="inner", settings=settings, started=started)
    assert [(engine.name, engine.model) for engine in made] == [(url, "inner") for url in urls]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_cut_from_the_text_and_their_tokens_returned(renderer, stream):
    ids = renderer.tokenizer.encode("One. Two. END")
    asked = {"model": "m", "messages": HELLO, "stop": ["END"], "extra_body": {"return_token_ids": True}}
    with token_server(renderer, Saying(ids, stop="END")) as server, caller_of(server) as caller:
        if not stream:
            choice = caller.chat.completions.create(**asked).choices[0]
            assert (choice.message.content.rstrip(), choice.token_ids) == ("One. Two.", ids)
            return
        chunks = [chunk.choices[0] for chunk in caller.chat.completions.create(stream=True, **asked)]
    assert "".join(chunk.delta.content or "" for chunk in chunks).rstrip() == "One. Two."
    assert [token for chunk in chunks for token in getattr(chunk, "token_ids", None) or ()] == ids


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_token_ids_survive_an_abort(renderer, stream):
    ids = renderer.tokenizer.encode("One. Two. Three. Four.")
    asked = {"model": "m", "prompt": [[5, 6]], "max_tokens": len(ids), "logprobs": 0}
    engine = Saying(ids, cut=3)
    with token_server(renderer, engine) as server, caller_of(server) as caller:
        if stream:
            chunks = [chunk.choices[0] for chunk in caller.completions.create(stream=True, **asked)]
            text = "".join(chunk.text for chunk in chunks)
            count = sum(len(chunk.logprobs.token_logprobs) for chunk in chunks if chunk.logprobs)
        else:
            choice = caller.completions.create(**asked).choices[0]
            text, count = choice.text, len(choice.logprobs.token_logprobs)
    assert (text, count) == ("One. Two. Three. Four.", len(ids))
    assert [list(request.prompt_ids) for request in engine.asked] == [[5, 6], [5, 6, *ids[:3]]]


@in_loop
async def test_an_abort_beyond_the_limit_returns_what_there_is():
    ids = list(range(5, 15))
    engine = Saying(ids, cut=6)
    engine._limit = 7
    client = InferenceEngineClient([engine])
    response = await client.complete(new_request([1, 2], {"max_tokens": 10}))
    assert (response.completion_ids, response.finish_reason) == (ids[:6], "length")
    assert len(engine.asked) == 1


@in_loop
async def test_turns_sample_through_all_engines(renderer):
    ids = renderer.tokenizer.encode("A cow.") + renderer.get_stop_token_ids()[:1]
    engine = Saying(ids, cut=2)
    client = RendererClient(renderer, InferenceEngineClient([engine]), sampling_params={"max_tokens": 20})
    turn = await client.create_completion(HELLO)
    assert (turn.text, turn.generation.completion_ids, len(engine.asked)) == ("A cow.", ids, 2)


def test_a_call_fails_if_the_server_stops_before_it_ends():
    case = setup(count=1)
    server = EngineServer(case.client, SETTINGS)
    server.start()
    threading.Timer(0.2, server.stop).start()
    with pytest.raises(EngineStateError):
        server.run(asyncio.Event().wait())
    with pytest.raises(EngineStateError, match="not running"):
        server.run(asyncio.sleep(0))
