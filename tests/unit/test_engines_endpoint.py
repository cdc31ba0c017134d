"""The HTTP endpoint: OpenAI's client and raw requests against it, over engines in memory."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest

from engine_cases import PATIENT, setup, turns
from mmrender.client.types import EngineResponse, Usage
from mmrender.engines import command
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.endpoint.deltas import DeltaWriter
from mmrender.engines.endpoint.failures import failure_of
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.scripted import Fault, ScriptedEngine
from mmrender.engines.scripted_model import encoded, letters, sampled
from mmrender.engines.scripted_text import chat_text
from mmrender.engines.server import EngineServer, ServerSettings
from mmrender.engines.work import joined, split
from mmrender.errors import (
    EngineStateError,
    EngineStatusError,
    InputError,
    MediaFetchError,
    PromptTooLongError,
)
from mmrender.renderer import Renderer
from mmrender.testing.tiny_model import build_tiny_model

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]
SETTINGS = ServerSettings(model="m", aliases=("alias",), api_key="secret", max_body_bytes=4096)


class Saying(ScriptedEngine):
    """Says what it is given, token by token."""

    def __init__(self, ids, name="saying"):
        super().__init__(name)
        self.ids = ids

    async def generate(self, input_batch):
        self.asked += [input_batch]
        (work,) = split(input_batch)
        ids = self.ids[: work.params["max_tokens"]]
        for token in ids:
            await asyncio.sleep(0)
            if work.on_tokens is not None:
                work.on_tokens([token], [-0.25])
        reason = "stop" if len(ids) == len(self.ids) else "length"
        top = tuple(((token, -0.25),) for token in ids) if work.params.get("logprobs") else None
        usage = Usage(len(work.prompt_ids), len(ids), 1)
        return joined(
            work and [work], [EngineResponse(ids, [-0.25] * len(ids), reason, usage, top_logprobs=top)], None
        )

    async def max_prompt_len(self):
        return 500


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    model = build_tiny_model(tmp_path_factory.mktemp("endpoint") / "tiny", weights=False)
    return Renderer.from_pretrained(model, image_backend="pil")


@pytest.fixture(scope="module")
def passing():
    """A server that passes chat on, with its client and engines."""
    case = setup(policy=PATIENT.replace(attempt_timeout=None))
    with EngineServer(case.client, SETTINGS) as server:
        yield server, case


def caller_of(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, **options)


def raw(server, path, body=None, *, key="secret", headers=()):
    """Status, headers and text of an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data, {"authorization": f"Bearer {key}", **dict(headers)}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


# --- passed on ---


def test_chat_and_completions_whole_and_streamed(passing):
    server, _ = passing
    whole = sampled(encoded(chat_text({"messages": HELLO})), 20)
    with caller_of(server) as caller:
        reply = caller.chat.completions.create(model="m", messages=HELLO, max_tokens=20, logprobs=True)
        assert reply.choices[0].message.content == letters(whole.completion_ids)
        assert [each.logprob for each in reply.choices[0].logprobs.content] == whole.logprobs
        assert reply.usage.completion_tokens == 20
        stream = caller.chat.completions.create(
            model="alias", messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == letters(
            whole.completion_ids
        )
        assert chunks[-1].usage.completion_tokens == 20
        assert len(chunks) > 10
        assert {chunk.model for chunk in chunks} == {"m"}
        batch = caller.completions.create(model="m", prompt=["abc", "xyz"], max_tokens=7)
        assert [choice.text for choice in batch.choices] == [
            letters(sampled(encoded(text), 7).completion_ids) for text in ("abc", "xyz")
        ]
        streamed = caller.completions.create(model="m", prompt="abc", max_tokens=7, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == batch.choices[0].text


def test_sessions_route_requests(passing):
    server, case = passing
    before = [len(engine.asked) for engine in case.engines]
    with caller_of(server) as caller:
        for _ in range(4):
            caller.chat.completions.create(
                model="m", messages=HELLO, max_tokens=2, extra_headers={"X-Session-ID": "a"}
            )
            caller.chat.completions.create(
                model="m", messages=HELLO, max_tokens=2, extra_body={"session_id": "a"}
            )
    grown = sorted(len(engine.asked) - count for engine, count in zip(case.engines, before, strict=True))
    assert grown == [0, 0, 8]


def test_models(passing):
    server, _ = passing
    with caller_of(server) as caller:
        assert [model.id for model in caller.models.list()] == ["m", "alias"]
        assert caller.models.retrieve("alias").id == "alias"
        with pytest.raises(openai.NotFoundError) as caught:
            caller.models.retrieve("other")
    assert caught.value.body["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", {"model": "x", "messages": HELLO}, 404, "model_not_found", "model"),
        ("/v1/chat/completions", {"messages": HELLO}, 404, "model_not_found", "model"),
        ("/v1/chat/completions", b"{", 400, "invalid_json", None),
        ("/v1/chat/completions", b"[1]", 400, "invalid_json", None),
        ("/v1/chat/completions", b"\xff\xfe", 400, "invalid_json", None),
        ("/v1/chat/completions", {"model": "m", "messages": HELLO, "max_tokens": -1}, 400, "SamplingParameterError", "max_tokens"),
        ("/v1/chat/completions", {"model": "m", "messages": HELLO, "session_id": [1]}, 400, "invalid_value", "session_id"),
        ("/v1/completions", {"model": "m", "prompt": []}, 400, "InputError", "prompt"),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "stream": True}, 400, "InputError", "prompt"),
        ("/v1/nothing", {"model": "m"}, 404, "not_found", None),
        ("/health", {"model": "m"}, 405, "method_not_allowed", None),
        ("/v1/chat/completions", b" " * 5000, 413, "request_too_large", None),
    ],
)  # fmt: skip
def test_refusals_have_openais_envelope(passing, path, body, status, code, param):
    server, _ = passing
    got, headers, text = raw(server, path, body)
    error = json.loads(text)["error"]
    assert (got, error["code"], error["param"], error["type"]) == (
        status,
        code,
        param,
        "invalid_request_error",
    )
    assert error["message"]
    assert headers["content-type"] == "application/json"


def test_a_body_without_a_length_is_bounded_too(passing):
    server, _ = passing

    def endless():
        for _ in range(100):
            yield b" " * 1000

    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        endless(),
        {"authorization": "Bearer secret", "transfer-encoding": "chunked"},
    )
    status = 200
    try:
        urllib.request.urlopen(request, timeout=20)
    except urllib.error.HTTPError as error:
        with error:
            status = error.code
    except OSError:
        status = 413  # refused while it was still being sent
    assert status == 413


@pytest.mark.parametrize("key", ["", "secre", "secret2", "sécret"])
def test_keys_are_checked(passing, key):
    server, _ = passing
    status, headers, text = raw(server, "/v1/models", key=key.encode().decode("latin-1"))
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(text)["error"]["message"] == "the API key is missing or wrong"


def test_health_and_metrics_need_no_key(passing):
    server, case = passing
    assert raw(server, "/health", key="")[::2] == (200, '{"status":"ok"}')
    raw(server, "/v1/completions", {"model": "m", "prompt": "abc", "max_tokens": 5})
    status, headers, text = raw(server, "/metrics", key="")
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
    asyncio.run(case.client.pause_generation("abort"))
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(
            raw(server, "/v1/completions", {"model": "m", "prompt": "abc", "max_tokens": 5})
        )
    )
    asking.start()
    assert json.loads(raw(server, "/health")[2]) == {"status": "paused"}
    assert "mmrender_paused 1.0" in raw(server, "/metrics")[2]
    assert not answers
    asyncio.run(case.client.resume_generation())
    asking.join(20)
    assert answers[0][0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_work(stream):
    """The work stands at a pause; it is counted as left, and no engine is asked when the pause ends."""
    case = setup()
    with EngineServer(case.client, ServerSettings(model="m")) as server:
        asyncio.run(case.client.pause_generation("keep"))
        host, _, port = server.url.removeprefix("http://").partition(":")
        body = json.dumps({"model": "m", "prompt": "abc", "max_tokens": 64, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            assert raw(server, "/health")[0] == 200  # a round trip later it is being worked on
        deadline = time.monotonic() + 20
        while _left(server) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _left(server) == 1
        asyncio.run(case.client.resume_generation())
        assert raw(server, "/health")[0] == 200
    assert not case.journal


def _left(server):
    text = raw(server, "/metrics")[2]
    counts = [
        line.rsplit(" ", 1)[1]
        for line in text.splitlines()
        if 'status="499"' in line and line.startswith("mmrender_requests_total")
    ]
    return sum(map(float, counts))


def test_engines_that_fail_are_answered_for():
    case = setup([Fault("error", 0)] * 9, policy=PATIENT.replace(attempts=2))
    with EngineServer(case.client, ServerSettings(model="m")) as server:
        status, _, text = raw(server, "/v1/completions", {"model": "m", "prompt": "abc"})
        assert (status, json.loads(text)["error"]["code"]) == (502, "engine_error")
        for engine in case.engines:
            engine.alive = False
        assert raw(server, "/health")[0] == 503
        status, headers, text = raw(
            server, "/v1/chat/completions", {"model": "m", "messages": HELLO, "stream": True}
        )
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(text)["error"]["code"] == "engine_unavailable"
        asyncio.run(case.client.teardown())
        status, _, text = raw(server, "/v1/completions", {"model": "m", "prompt": "abc"})
        assert (status, json.loads(text)["error"]["code"]) == (503, "engine_state")


def test_an_engines_own_envelope_is_passed_on():
    class Refusing(ScriptedEngine):
        async def chat_completion(self, request_payload):
            body = '{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}'
            raise EngineStatusError("the server answered 400", status=400, body=body)

    with EngineServer(InferenceEngineClient([Refusing()]), ServerSettings(model="m")) as server:
        status, _, text = raw(server, "/v1/chat/completions", {"model": "m", "messages": HELLO})
    assert status == 400
    assert json.loads(text) == {
        "error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}
    }


def test_what_is_no_error_of_ours_says_nothing_of_its_insides():
    assert failure_of(KeyError("secret")).envelope()["error"] == {
        "message": "internal error", "type": "server_error", "param": None, "code": "internal_error",
    }  # fmt: skip
    assert failure_of(PromptTooLongError(9, 5)).code == "context_length_exceeded"
    assert failure_of(MediaFetchError("gone", where="messages[0]")).param == "messages[0]"


# --- in tokens ---


def token_server(renderer, engine, **settings):
    return EngineServer(
        InferenceEngineClient([engine], renderer=renderer), ServerSettings(model="m", **settings)
    )


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
        reply = caller.chat.completions.create(
            **asked, seed=5, extra_body={"return_token_ids": True, "top_k": 4}
        )
        plain = {**asked, "top_logprobs": None}
        chunks = list(
            caller.chat.completions.create(
                **plain,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )
        )
        with_others = list(caller.chat.completions.create(**asked, stream=True))
        models = caller.models.list().data
    assert models[0].max_model_len == 501
    for choice in reply.choices:
        assert choice.message.content == "A cow, I think 🐄."
        assert choice.finish_reason == "stop"
        assert choice.token_ids == ids
        assert len(choice.logprobs.content) == len(ids)
        assert choice.logprobs.content[0].top_logprobs[0].logprob == -0.25
    prompt = renderer.render_ids(HELLO, add_generation_prompt=True)
    assert reply.prompt_token_ids == prompt
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 2 * len(ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    params = [batch["sampling_params"] for batch in engine.asked]
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


def test_calls_and_reasoning_are_read(renderer):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "left"}}}
    ids = assistant_ids(
        renderer, {"role": "assistant", "content": "Let me see, from here.", "tool_calls": [call]}
    )
    with token_server(renderer, Saying(ids)) as server, caller_of(server) as caller:
        asked = {"model": "m", "messages": HELLO, "tools": TOOLS, "max_tokens": 300}
        reply = caller.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in caller.chat.completions.create(**asked, stream=True)]
    assert reply.finish_reason == "tool_calls"
    (called,) = reply.message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("look", {"at": "left"})
    assert "".join(chunk.delta.content or "" for chunk in chunks) == reply.message.content
    (delta,) = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
    assert json.loads(delta[0].function.arguments) == {"at": "left"}
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"colour": 1}, 400, "colour"),
        ({"n": 0}, 400, "n"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"temperature": "hot"}, 400, "sampling_params['temperature']"),
        ({"stream": "yes"}, 400, "stream"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]}, 400, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "long " * 800}]}, 400, "messages"),
    ],
)  # fmt: skip
def test_requests_that_are_refused_by_name(refusing, more, status, param):
    got, _, text = raw(refusing, "/v1/chat/completions", {"model": "m", "messages": HELLO, **more})
    error = json.loads(text)["error"]
    assert (got, error["type"]) == (status, "invalid_request_error")
    assert (error["param"] or "").startswith(param)


def test_structured_outputs_are_asked_for(renderer):
    engine = Saying([5, 6])
    schema = {"type": "object"}
    with token_server(renderer, engine) as server:
        formats = [
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        ]
        for response_format in formats:
            body = {
                "model": "m",
                "messages": HELLO,
                "response_format": response_format,
                "stream": True,
                "max_tokens": 9,
            }
            assert raw(server, "/v1/chat/completions", body)[0] == 200
    asked = [batch["sampling_params"]["structured_outputs"] for batch in engine.asked]
    assert asked == [{"json_object": True}, {"json": schema}]


def test_a_request_without_a_budget_needs_a_default(renderer):
    class Silent(Saying):
        max_prompt_len = None

    with token_server(renderer, Silent([5])) as server:
        assert raw(server, "/v1/chat/completions", {"model": "m", "messages": HELLO})[0] == 400
    engine = Silent([5])
    with token_server(renderer, engine, default_max_tokens=33, sampling_defaults={"top_p": 0.5}) as server:
        assert raw(server, "/v1/chat/completions", {"model": "m", "messages": HELLO})[0] == 200
    assert engine.asked[0]["sampling_params"]["max_tokens"] == 33
    assert engine.asked[0]["sampling_params"]["top_p"] == 0.5


def test_text_is_held_back_while_it_may_become_something_else(renderer):
    ids = assistant_ids(
        renderer, {"role": "assistant", "content": "Bee 🐝 and more words after it, so many of them."}
    )
    prompt = renderer.render_ids(HELLO, add_generation_prompt=True)

    def parse(some):
        return renderer.parse_response(some, prompt_ids=prompt)

    for has_tools in (False, True):
        writer = DeltaWriter(parse, has_tools=has_tools)
        shown = ""
        for token in ids:
            for delta in writer.add([token]):
                shown += delta["content"]
                assert "\ufffd" not in shown
        assert shown
        shown += "".join(delta["content"] for delta in writer.end(parse(ids)))
        assert shown == "Bee 🐝 and more words after it, so many of them."


# --- servers ---


def test_several_servers_in_one_process_share_nothing():
    cases = [setup(), setup()]
    names = ("first", "second")
    with (
        EngineServer(cases[0].client, ServerSettings(model=names[0])) as first,
        EngineServer(cases[1].client, ServerSettings(model=names[1], api_key="k")) as second,
    ):
        assert raw(first, "/v1/completions", {"model": "first", "prompt": "abc", "max_tokens": 2})[0] == 200
        assert raw(first, "/v1/completions", {"model": "second", "prompt": "abc", "max_tokens": 2})[0] == 404
        assert raw(second, "/v1/completions", {"model": "second", "prompt": "abc", "max_tokens": 2})[0] == 401
        assert 'route="/v1/completions",status="200"} 1.0' in raw(first, "/metrics")[2]
        assert 'route="/v1/completions",status="200"}' not in raw(second, "/metrics")[2]
        assert not cases[1].journal


def test_a_server_leaves_no_thread_and_no_socket():
    case = setup()
    server = EngineServer(case.client, ServerSettings(model="m"))
    before = threading.active_count()
    url = server.start()
    port = int(url.rpartition(":")[2])
    with pytest.raises(EngineStateError, match=r"^the server is running already$"):
        server.start()
    assert raw(server, "/health")[0] == 200
    server.stop()
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


def test_serving_on_ones_own_loop_ends_with_its_task():
    async def scenario():
        urls = []
        serving = asyncio.create_task(
            EngineServer(setup().client, ServerSettings(model="m")).serve(started=urls.append)
        )
        while not urls:
            await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await turns(3)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "settings.model: the model has no name"),
        ({"model": "m", "api_key": ""}, "settings.api_key: the key is empty - expected a key, or None"),
        ({"model": "m", "max_body_bytes": 0}, "settings.max_body_bytes: a setting is out of range - expected at least 1"),
        (
            {"model": "m", "host": "0.0.0.0"},
            "settings.host: the endpoint would be open to everybody - expected a loopback address, or a key, got 0.0.0.0. "
            "Give api_key, or open_to_all=True where the network keeps others out",
        ),
    ],
)  # fmt: skip
def test_settings_are_checked(settings, message):
    with pytest.raises(InputError) as caught:
        ServerSettings(**settings)
    assert str(caught.value) == message
    assert "secret" not in repr(SETTINGS)


def test_serving_is_one_call(monkeypatch):
    """As a command line makes it: engines behind URLs, here those of another endpoint's engines."""
    made = []

    class Recorded(HTTPEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(command, "HTTPEngine", Recorded)
    settings = ServerSettings(model="public")
    seen = []

    def started(url):
        seen.append(url)
        raise KeyboardInterrupt

    command.serve(
        ["http://127.0.0.1:9", "http://127.0.0.1:10"],
        engine_model="inner",
        settings=settings,
        started=started,
    )
    assert seen[0].startswith("http://127.0.0.1:")
    assert [(engine.name, engine.model) for engine in made] == [
        ("http://127.0.0.1:9", "inner"),
        ("http://127.0.0.1:10", "inner"),
    ]
    with pytest.raises(InputError, match=r"^controls: there is not one for each engine - expected 1, got 2$"):
        command.serve(["http://127.0.0.1:9"], engine_model="m", settings=settings, controls=["a", "b"])
