"""The gateway answers for its own failures only: each request over any protocol is answered or refused by 4xx."""

import http.client
import json
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrender.engines import InferenceEngineClient
from mmrender.gateway import Gateway, GatewaySettings
from mmrender.renderer import Renderer
from scripted_engine import ScriptedEngine

CHAT, RESPONSES, MESSAGES = "/s/a/v1/chat/completions", "/s/a/v1/responses", "/s/a/v1/messages"
DEEP = '{"a":' * 5_000 + "1" + "}" * 5_000

names = st.sampled_from(
    ["role", "content", "type", "text", "image", "image_url", "url", "tool_calls", "function", "name", "id",
     "arguments", "tool_call_id", "tools", "documents", "self", "messages", "reasoning_content", "parameters",
     "properties", "enable_thinking", "images", "json_schema", "schema"]
)  # fmt: skip
odd = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
odd |= st.sampled_from(["\ud800", "<|im_end|>", "data:image/png;base64,", "file:///etc/passwd", "9" * 5000])
values = st.recursive(
    odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "caller", ""])
parts = st.dictionaries(names, values, max_size=3) | st.fixed_dictionaries({"type": names, "text": values})
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": values | st.lists(parts)}), max_size=3)
fields = st.sampled_from(
    ["n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "top_logprobs", "stream",
     "stream_options", "tools", "tool_choice", "response_format", "chat_template_kwargs", "logit_bias",
     "session_id", "priority", "cache_salt", "return_token_ids", "prompt", "messages", "model", "user",
     "max_completion_tokens", "stop_token_ids", "frequency_penalty", "min_tokens", "structured_outputs"]
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model)
    client = InferenceEngineClient([ScriptedEngine("one", limit=64)], renderer=renderer)
    settings = GatewaySettings(max_body_bytes=1 << 16, max_messages=64, models=["m"])
    gateway = Gateway(client, renderer, model="m", settings=settings)
    gateway.start()
    yield gateway
    gateway.stop()


def status_of(server, path, body, method="POST"):
    """Status of the answer to a body; the refusal within a stream counts as one."""
    at = urlsplit(server.url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status >= 400:
        assert json.loads(text)["error"]["message"]
    assert b"server_error" not in text, text
    return answer.status


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")]), messages,
       st.dictionaries(fields, values, max_size=3))  # fmt: skip
def test_no_request_makes_the_gateway_fail(server, protocol, said, more):
    path, field = protocol
    body = json.dumps({"model": "m", field: said, "max_tokens": 3, **more})
    assert status_of(server, path, body) < 500


@pytest.mark.parametrize(
    "path",
    [CHAT, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", "/v1/models", "/v1/models/..%2f..", "/%00",
     "/metrics?a=1", "/sessions", "/sessions/a/reward", "/sessions/a/finish/..", "/s/%2e%2e/v1/responses"],
)  # fmt: skip
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"null", DEEP.encode(), b'{"model":"m"}', b"{" * 99, None]
)
@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
def test_no_bytes_make_the_gateway_fail(server, path, body, method):
    assert status_of(server, path, body, method) < 500
    assert status_of(server, "/health", None, "GET") == 200


# --- a table, with the status of each ---

SAID = [{"role": "user", "content": "hi"}]
IMAGE_URLS = (
    "file:///etc/passwd", "/etc/passwd", "http://127.0.0.1/a.png", "http://169.254.169.254/", "ftp://a.test/a", "data:,",
    "data:image/png;base64,AAAA", "data:image/png;base64,!", "data:text/html,<p>", "", "\x00", "http://[::1", 7, None, {},
)  # fmt: skip
REFUSED: dict[str, tuple[object, ...]] = {
    "messages": (
        None, 7, "hi", {}, [], [None], ["hi"], [[]], [{}], [{"role": 7, "content": "a"}],
        [{"role": "", "content": "a"}], [{"role": "user", "content": 7}], [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [{}]}], [{"role": "user", "content": [{"type": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 7}]}],
        [{"role": "user", "content": "\ud800"}], [{"role": "assistant", "content": "a", "tool_calls": 7}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        *([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}] for url in IMAGE_URLS),
        *([{"role": "user", "content": [{"type": "image", "image": url}]}] for url in IMAGE_URLS[:4]),
    ),
    "max_tokens": (0, -1, "3", 1.5, True, [], {}),
    "n": (0, -1, "2", 1.5, True, [], 10**9, 2**70),
    "temperature": (-1, "1", [], {}, True, 1e999),
    "top_p": (0, -1, 2, "1", [], True),
    "top_k": (-7, 1.5, "1", [], True),
    "seed": ("1", 1.5, [], True),
    "stop": (7, {}, [7], [None], [[]], ""),
    "logprobs": ("yes", [], 7, {}),
    "top_logprobs": (-1, "2", 1.5, 10**9, []),
    "stream": ("yes", 7, []),
    "tools": (7, "f", {}, [7], [{}], [{"type": "function"}], [{"type": "function", "function": 7}]),
    "documents": (5, "a", {}, [5]),
    "chat_template_kwargs": (7, "a", [], {"tools": []}, {"self": 1}, {"messages": []}, {"documents": 5}, {"nobody_reads": 1}),
    "logit_bias": (7, [], {"a": 1}, {"1": "x"}, {"-1": 1}),
    "stop_token_ids": (7, "a", [-1], ["a"], [1.5]),
    "min_tokens": (-1, "a", 10**9, 1.5),
    "response_format": (7, "json", [], {"type": "x"}, {"type": "json_schema"}),
    "surprise": (1,),
}  # fmt: skip


def test_each_of_a_table_of_hostile_requests_has_its_status(server):
    asked = [(field, value) for field, values in REFUSED.items() for value in values]
    found = {}
    for field, value in asked:
        body = json.dumps({"model": "m", "messages": SAID, "max_tokens": 3, field: value})
        found[f"{field}: {value!r}"[:100]] = status_of(server, CHAT, body)
    others = {
        "another model": (404, CHAT, json.dumps({"model": "x", "messages": SAID}), "POST"),
        "no such path": (404, "/v1/chat", "{}", "POST"),
        "another method": (405, CHAT, None, "GET"),
        "too large": (
            413,
            CHAT,
            json.dumps({"model": "m", "messages": [{"role": "user", "content": "a" * 70_000}]}),
            "POST",
        ),
        "deep": (400, CHAT, DEEP, "POST"),
        "no JSON": (400, CHAT, "{", "POST"),
        "a list": (400, CHAT, "[]", "POST"),
    }
    assert len(found) + len(others) >= 120
    for name, (status, path, body, method) in others.items():
        assert (name, status_of(server, path, body, method)) == (name, status)
    assert {name: status for name, status in found.items() if status != 400} == {}
