"""HTTP engines: what each server is told, what its answers mean, and streams."""

import asyncio
import json
import pickle
from dataclasses import dataclass, field

import msgspec
import pytest

from engine_cases import in_loop, patient, sidecar
from mmrender.client.dynamo import DynamoBackend
from mmrender.client.http import HTTPTransport
from mmrender.client.resolve import as_transport
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest, EngineResponse, Usage
from mmrender.client.vllm import VLLMBackend
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.interface import InferenceEngineInterface, new_request
from mmrender.engines.routes import Route, RouteTable
from mmrender.errors import (
    EngineReplyError,
    EngineStateError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
)
from mmrender.sidecar import Repeat
from mmrender.testing.memory_transport import Answer, MemoryTransport

BACKENDS = {"vllm": VLLMBackend, "sglang": SGLangBackend, "dynamo": DynamoBackend}
GENERATE = "POST /inference/v1/generate"
OK = lambda asked: {}  # noqa: E731
PARAMS = {"max_tokens": 5}
PATIENT = patient(attempt_timeout=None, pause_timeout=60)
HELD = {"X-Session-ID": "s", "X-SMG-Routing-Key": "s"}


def run(coroutine):
    return asyncio.run(coroutine)


def engine_of(kind, routes=None, *, worker=None, **options):
    transport = MemoryTransport(routes or {})
    engine = HTTPEngine(BACKENDS[kind](), transport, model="m", name="e", control=worker, **options)
    return engine, transport


def asked(transport):
    """What a server was asked: method, path with query, body."""
    lines = []
    for each in transport.asked:
        query = f"?{each.query}" if each.query else ""
        body = f" {json.dumps(each.json, sort_keys=True)}" if each.body else ""
        lines.append(f"{each.method} {each.path}{query}{body}")
    return lines


UPDATE = {
    **{"names": ["w"], "dtypes": ["bfloat16"], "shapes": [(2, 3)]},
    **{"weight_version": "v", "extras": {"group_name": "g"}},
}
CALLS = {
    "pause abort": lambda e: e.pause_generation("abort"),
    "pause abort, cache kept": lambda e: e.pause_generation("abort", clear_cache=False),
    "pause keep": lambda e: e.pause_generation("keep"),
    "pause wait": lambda e: e.pause_generation("wait"),
    "abort": lambda e: e.abort_generation(),
    "sleep": lambda e: e.sleep(),
    "wake": lambda e: e.wake_up(tags=["weights", "kv_cache"]),
    "reset": lambda e: e.reset_prefix_cache(),
    "init": lambda e: e.init_weight_update_communicator({"master_address": "h", "master_port": 5}),
    "update": lambda e: e.update_named_weights(UPDATE),
    "load": lambda e: e.load_weights("/weights", weight_version="v"),
    "load, unnamed": lambda e: e.load_weights("/weights"),
    "set version": lambda e: e.set_weight_version("v"),
    "health": lambda e: e.check_health(),
}
EXPECTED = {
    "vllm": """
pause abort: POST /pause?mode=abort&clear_cache=true
pause abort, cache kept: POST /pause?mode=abort&clear_cache=false
pause keep: POST /pause?mode=keep&clear_cache=false
pause wait: POST /pause?mode=wait&clear_cache=true
abort: POST /abort_requests {}
sleep: POST /sleep?level=1
wake: POST /wake_up?tags=weights&tags=kv_cache
reset: POST /reset_prefix_cache
init: POST /init_weight_transfer_engine {"init_info": {"master_address": "h", "master_port": 5}}
update: POST /start_weight_update
update: POST /update_weights {"update_info": {"dtype_names": ["bfloat16"], "group_name": "g", "names": ["w"], "shapes": [[2, 3]]}}
update: POST /finish_weight_update {"weight_version": "v"}
load: POST /collective_rpc {"kwargs": {"weights_path": "/weights"}, "method": "reload_weights"}
load: POST /reset_prefix_cache?reset_running_requests=true
load: POST /reset_encoder_cache
load: POST /update_weight_version {"new_version": "v"}
load, unnamed: POST /collective_rpc {"kwargs": {"weights_path": "/weights"}, "method": "reload_weights"}
load, unnamed: POST /reset_prefix_cache?reset_running_requests=true
load, unnamed: POST /reset_encoder_cache
set version: POST /update_weight_version {"new_version": "v"}
health: GET /health
""",
    "sglang": """
pause abort: POST /pause_generation {"mode": "abort"}
pause abort: POST /flush_cache
pause abort, cache kept: POST /pause_generation {"mode": "abort"}
pause keep: POST /pause_generation {"mode": "in_place"}
pause wait: e.pause_generation: sglang cannot be paused this way - expected abort or keep, got 'wait'
abort: POST /abort_request {"abort_all": true}
sleep: POST /release_memory_occupation {}
wake: POST /resume_memory_occupation {"tags": ["weights", "kv_cache"]}
reset: POST /flush_cache
init: POST /init_weights_update_group {"master_address": "h", "master_port": 5}
update: POST /update_weights_from_distributed {"dtypes": ["bfloat16"], "group_name": "g", "names": ["w"], "shapes": [[2, 3]], "weight_version": "v"}
load: POST /update_weights_from_disk {"model_path": "/weights", "weight_version": "v"}
load, unnamed: POST /update_weights_from_disk {"model_path": "/weights"}
set version: POST /update_weight_version {"abort_all_requests": false, "new_version": "v"}
health: GET /health
""",
    "dynamo": """
pause abort: POST /engine/pause_generation {"clear_cache": true, "mode": "abort"}
pause abort, cache kept: POST /engine/pause_generation {"clear_cache": false, "mode": "abort"}
pause keep: POST /engine/pause_generation {"clear_cache": false, "mode": "keep"}
pause wait: POST /engine/pause_generation {"clear_cache": true, "mode": "wait"}
abort: e.abort_generation: dynamo lacks this call
sleep: POST /engine/control/sleep {"level": 1}
wake: POST /engine/control/wake_up {"tags": ["weights", "kv_cache"]}
reset: POST /engine/flush_cache {}
init: POST /engine/init_weights_update_group {"master_address": "h", "master_port": 5}
update: POST /engine/update_weights_from_distributed {"dtypes": ["bfloat16"], "group_name": "g", "names": ["w"], "shapes": [[2, 3]], "weight_version": "v"}
load: POST /engine/update_weights_from_disk {"model_path": "/weights", "weight_version": "v"}
load, unnamed: POST /engine/update_weights_from_disk {"model_path": "/weights"}
set version: POST /engine/set_weight_version {"weight_version": "v"}
health: GET /health
""",
}
"""Each request that a call makes, or the error it raises."""


class Agreeing(MemoryTransport):
    """Answers everything."""

    async def request(self, method, path, **options):
        self._routes.setdefault(f"{method} {path.partition('?')[0]}", OK)
        return await super().request(method, path, **options)


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("kind", list(BACKENDS))
def test_what_each_server_is_told(kind, call):
    server, worker = Agreeing(), Agreeing()
    backend = DynamoBackend(eos_token_ids=(2,)) if kind == "dynamo" else BACKENDS[kind]()
    engine = HTTPEngine(backend, server, model="m", name="e", control=worker)
    assert isinstance(engine, InferenceEngineInterface)
    expected = [
        line.removeprefix(f"{call}: ") for line in EXPECTED[kind].splitlines() if line.startswith(f"{call}: ")
    ]
    other = server if kind == "dynamo" and call != "health" else worker
    try:
        run(CALLS[call](engine))
        got = []
    except EngineUnsupportedError as error:
        got = [str(error)]
    assert got + asked(server) + asked(worker) == expected
    assert not other.asked


@pytest.mark.parametrize(
    ("kind", "route", "reply", "version"),
    [
        ("vllm", "GET /weight_info", {"weight_version": "v7"}, "v7"),
        ("vllm", "GET /weight_info", {"weight_version": None}, None),
        ("sglang", "GET /model_info", {"model_path": "x", "weight_version": "default"}, "default"),
        ("dynamo", "POST /engine/get_weight_version", {"status": "ok", "version": 12}, "12"),
    ],
)
def test_weight_versions_are_read(kind, route, reply, version):
    engine, _ = engine_of(kind, {route: reply}, worker=MemoryTransport({route: reply}))
    assert run(engine.weight_version()) == version


FLUSH = "POST /flush_cache"
BOOM = MemoryTransport({"POST /engine/flush_cache": {"status": "error", "message": "boom"}})


REFUSALS = {
    "tags to vllm": ("vllm", {}, lambda e: e.sleep(tags=["weights"])),
    "level to sglang": ("sglang", {}, lambda e: e.sleep(level=2)),
    "vllm refuses": (
        "vllm",
        {"POST /reset_prefix_cache": {"success": False}},
        lambda e: e.reset_prefix_cache(),
    ),
    "sglang is busy": (
        *("sglang", {FLUSH: Answer("Flush cache failed.", status=400)}),
        lambda e: e.reset_prefix_cache(),
    ),
    "no route": ("vllm", {}, lambda e: e.pause_generation("abort")),
    "dynamo refuses": ("dynamo", BOOM, lambda e: e.reset_prefix_cache()),
    "no worker": ("dynamo", {}, lambda e: e.pause_generation("keep")),
    "no shapes": ("sglang", {}, lambda e: e.update_named_weights({"names": [], "dtypes": []})),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_calls_that_are_refused(case, sentence):
    kind, routes, call = REFUSALS[case]
    worker = routes if isinstance(routes, MemoryTransport) else None
    engine, _ = engine_of(kind, {} if worker else routes, worker=worker)
    with pytest.raises((EngineUnsupportedError, EngineStateError, InputError)) as caught:
        run(call(engine))
    assert f"{type(caught.value).__name__}: {caught.value}" == sentence


@in_loop
async def test_pausing_twice_and_resuming_unpaused():
    routes = {"POST /pause": [{}, {}, Answer(status=500), {}], "POST /resume": OK}
    engine, transport = engine_of("vllm", routes)
    with pytest.raises(EngineStateError, match=r"^e: the engine is not paused$"):
        await engine.resume_generation()
    await engine.pause_generation("keep")
    with pytest.raises(EngineStateError, match=r"^e: the engine is paused already$"):
        await engine.pause_generation("keep")
    await engine.resume_generation()
    await engine.pause_generation("wait")
    await engine.resume_generation()
    # Whether a pause that failed has reached the server is not known, so both are allowed after it.
    with pytest.raises(EngineStatusError):
        await engine.pause_generation("abort")
    await engine.resume_generation()
    assert len(transport.of_path("/resume")) == 3


@dataclass(frozen=True)
class Echo:
    """A backend that notes its requests."""

    name: str = "vllm"
    requests: list[EngineRequest] = field(default_factory=list)

    async def generate(self, request, transport, *, on_tokens=None):
        self.requests.append(request)
        return EngineResponse([1, 2], [-0.5, -1.0], "stop", Usage(len(request.prompt_ids), 2), request_id="r")

    async def resolve_max_prompt_len(self, model, transport):
        return 77

    def is_overflow_error(self, exc):
        return False


def test_requests_carry_the_engines_model_and_the_session():
    backend = Echo()
    engine = HTTPEngine(backend, MemoryTransport(), model="m", tp_size=2, pp_size=3, dp_size=4)
    images = sidecar("a")
    batch = {"prompt_token_ids": [[5, 6], [7]], "multi_modal_data": [images, None]}
    batch |= {"sampling_params": [{"max_tokens": 2}, {"max_tokens": 3}], "session_ids": ["s", None]}
    output = run(engine.generate(batch))
    first, second = backend.requests
    assert (first.model, first.prompt_ids, first.multi_modal_data) == ("m", [5, 6], images)
    assert (second.prompt_ids, second.sampling_params) == ([7], {"max_tokens": 3})
    assert (first.extra_headers, second.extra_headers) == (HELD, {})
    assert first.request_id != second.request_id
    assert output["response_ids"] == [[1, 2], [1, 2]]
    assert output["responses"] is None
    assert (engine.tp_size(), engine.pp_size(), engine.dp_size()) == (2, 3, 4)
    assert (run(engine.max_prompt_len()), engine.name) == (77, "http://memory")


def test_all_requests_go_to_a_router_and_control_calls_to_the_engines():
    backend = Echo()
    transports = [Agreeing(base_url=f"http://{name}") for name in ("one", "two", "router")]
    *engines, router = [HTTPEngine(backend, each, model="m") for each in transports]
    client = InferenceEngineClient(engines, router=router, **PATIENT)

    async def scenario():
        await client.complete(new_request([5], PARAMS), session_id="s")
        await client.pause_generation("abort")
        await client.resume_generation()

    run(scenario())
    assert len(backend.requests) == 1
    paths = [[asked.path for asked in each.asked] for each in transports]
    assert paths == [["/pause", "/resume"], ["/pause", "/resume"], []]
    assert [replica.name for replica in client.replicas] == ["http://router", "http://one", "http://two"]


def test_dynamo_without_known_ends_refuses_pauses_by_abort(sentence):
    """It reports an abort as a stop, so an aborted completion would be taken for a finished one."""
    worker = Agreeing()
    engine, _ = engine_of("dynamo", worker=worker)
    assert engine.pause_modes == {"keep", "wait"}
    assert not engine_of("dynamo")[0].pause_modes  # without its worker the client alone holds requests
    with pytest.raises(EngineUnsupportedError) as caught:
        run(engine.pause_generation("abort"))
    assert str(caught.value) == sentence
    assert not worker.asked
    for backend, known in ((DynamoBackend(), Knowing()), (DynamoBackend(eos_token_ids=(2,)), None)):
        able = HTTPEngine(backend, MemoryTransport(), model="m", control=Agreeing(), renderer=known)
        run(able.pause_generation("abort"))


def test_a_backend_without_routes_needs_some():
    with pytest.raises(InputError, match=r"^backend: the control routes of this backend are unknown"):
        HTTPEngine(Echo(name="mine"), MemoryTransport(), model="m")
    table = RouteTable("mine", {"check_health": (Route("GET /ok"),)}, {})
    engine = HTTPEngine(Echo(name="mine"), MemoryTransport({"GET /ok": "fine"}), model="m", routes=table)
    run(engine.check_health())
    with pytest.raises(EngineUnsupportedError, match=r"^http://memory.sleep: mine lacks this call$"):
        run(engine.sleep())


def test_chat_is_passed_on_with_the_engines_model_name():
    engine, transport = engine_of("vllm", {"POST /v1/chat/completions": {"choices": [1]}})
    body = {"model": "public", "messages": [], "session_id": "s"}
    assert run(engine.chat_completion({"json": body, "headers": {"x-a": "b"}})) == {"choices": [1]}
    assert transport.asked[0].json == {"model": "m", "messages": []}
    assert transport.asked[0].headers == {"x-a": "b", **HELD}
    assert body["session_id"] == "s"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no json", "not JSON - got JSON is malformed"),
        (Answer([1]), "malformed - expected object, got array"),
    ],
)
def test_replies_that_are_none(answer, problem):
    engine, _ = engine_of("vllm", {"POST /v1/completions": answer})
    with pytest.raises(EngineReplyError, match=rf"^e/v1/completions: the server's reply is {problem}"):
        run(engine.completion({"json": {}}))


@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        ("vllm", ("GET /is_paused", {"is_paused": True}), True),
        ("vllm", ("GET /is_paused", {"is_paused": False}), False),
        ("vllm", ("GET /other", {}), None),  # without its development mode
        ("sglang", ("GET /ready", Answer(b"")), False),
        ("sglang", ("GET /ready", Answer(b"", status=503)), True),
        ("sglang", ("GET /other", {}), None),
        ("dynamo", ("GET /other", {}), None),
    ],
)
def test_whether_a_server_is_paused_by_any_client(kind, answer, expected):
    engine, transport = engine_of(kind, dict([answer]))
    assert run(engine.reports_pause()) is expected
    assert not any(each.idempotent for each in transport.asked)  # a status 503 is an answer


@in_loop
async def test_streams_are_read_to_their_end():
    text = ': comment\n\nevent: x\ndata: {"a": 1}\n\ndata:{"a": 2}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n'
    engine, transport = engine_of("vllm", {"POST /v1/chat/completions": text})
    stream = engine.stream_chat_completion({"json": {"messages": []}})
    assert [event async for event in stream] == [{"a": 1}, {"a": 2}]
    assert transport.asked[0].json["stream"] is True


def chunk(tokens, reason=None, **more):
    entry = {"rank": 1, "top_logprobs": []}
    logprobs = {"content": [entry | {"token_id": token, "logprob": -0.5 * token} for token in tokens]}
    choice = {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, **more}
    return {"request_id": "generate-tokens-r", "choices": [choice]}


USAGE = {**chunk([]), "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
CHUNKS = [
    {**chunk([5]), "prompt_token_ids": [1, 2]},
    chunk([6]),
    chunk([7], "stop", stop_reason=7, weight_versions=[{"version": "v", "start": 0, "end": 3}]),
    USAGE,
]


def sse(chunks, end=b"data: [DONE]\n\n"):
    return b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in chunks) + end


@pytest.mark.parametrize("spoilt", [-9999.0, float("nan"), None])
def test_tokens_of_a_stream_are_checked_before_they_are_told_of(spoilt):
    """What was told of is kept when its stream fails, and nothing looks at it again."""
    bad = chunk([6])
    bad["choices"][0]["logprobs"]["content"][0]["logprob"] = spoilt
    seen = []
    engine, _ = engine_of("vllm", {GENERATE: [sse([chunk([5]), bad]), sse([chunk([7], "stop")])]})
    client = InferenceEngineClient([engine], **PATIENT)
    response = run(client.complete(new_request([1, 2], PARAMS), on_tokens=lambda ids, *_: seen.extend(ids)))
    assert (response.completion_ids, response.logprobs) == ([5, 7], [-2.5, -3.5])
    assert seen == [5, 7]


ERROR = sse([{"error": {"message": "boom"}}], b"")
LATE = [*CHUNKS[:2], chunk([7]), chunk([], "stop", stop_reason=7)]
CONTRADICTED = {**USAGE, "usage": {"prompt_tokens": 99, "completion_tokens": 3}}


@pytest.mark.parametrize(
    ("answer", "budget", "ids", "reason"),
    [
        (sse(CHUNKS[:3], b""), 5, [5, 6, 7], "stop"),
        (sse(CHUNKS[:3], ERROR), 5, [5, 6, 7], "stop"),
        (sse(LATE, ERROR), 5, [5, 6, 7], "stop"),
        (sse([*CHUNKS[:3], CONTRADICTED]), 5, [5, 6, 7], "stop"),
        (sse(CHUNKS[:2], b""), 2, [5, 6], "length"),
    ],
)
def test_a_stream_that_breaks_behind_its_end_is_not_asked_on(answer, budget, ids, reason):
    engine, transport = engine_of("vllm", {GENERATE: answer})
    client = InferenceEngineClient([engine], **PATIENT)
    request = new_request([1, 2], {"max_tokens": budget})
    response = run(client.complete(request, on_tokens=lambda *_: None))
    assert (response.completion_ids, response.finish_reason) == (ids, reason)
    assert len(transport.asked) == 1


class Knowing:
    """What of a renderer says which ids there are."""

    vocab_size = 100

    class tokenizer:  # noqa: N801
        vocab_size = 90  # without what was added to it

        @staticmethod
        def token_id(text):
            return {"<pad>": 7}.get(text)

    def get_stop_token_ids(self):
        return [2]

    def decode(self, ids):
        return ""


@pytest.mark.parametrize("nested", [False, True])
def test_ids_that_a_clients_renderer_does_not_know_do_not_reach_its_engines(nested, sentence):
    """An id that the model has no embedding for kills the engine; only the client has the renderer."""
    engine, transport = engine_of("vllm", {GENERATE: sse(CHUNKS)})
    inner = InferenceEngineClient([engine], **PATIENT) if nested else engine
    client = InferenceEngineClient([inner], renderer=Knowing(), **PATIENT)
    for bad in (100, 5000):
        with pytest.raises(InputError) as caught:
            run(client.complete(new_request([1, bad], PARAMS)))
        assert str(caught.value) == sentence
    assert not transport.asked


def test_what_a_renderer_knows_goes_with_every_request():
    backend = Echo()
    engine = HTTPEngine(backend, MemoryTransport(), model="m")
    client = InferenceEngineClient([engine], renderer=Knowing(), **PATIENT)
    images = sidecar("a")
    images.mm_items["image"][0].expansion = (Repeat("<pad>", 1),)
    run(client.complete(new_request([5, 6], PARAMS, images)))
    (request,) = backend.requests
    assert (request.vocab_size, request.media_token_ids, request.eos_token_ids) == (100, {"<pad>": 7}, [2])


def test_teardown_closes_what_is_the_engines_own():
    url = "http://127.0.0.1:9"
    closed = []
    aclose = HTTPTransport.aclose

    async def noted(self):
        closed.append(self)
        await aclose(self)

    async def scenario(monkey):
        shared, given = as_transport(url), MemoryTransport()
        monkey.setattr(HTTPTransport, "aclose", noted)
        engine = HTTPEngine(VLLMBackend(), url, model="m", control=url)
        assert shared not in (engine.transport, engine.worker)
        copy = pickle.loads(pickle.dumps(engine))
        for each in (engine, copy):
            closed.clear()
            await each.teardown()
            assert closed == [each.transport, each.worker]
        closed.clear()
        await HTTPEngine(VLLMBackend(), given, model="m").teardown()
        await HTTPEngine(VLLMBackend(), shared, model="m").teardown()
        assert (given.closed, closed) == (0, [])

    with pytest.MonkeyPatch.context() as monkey:
        run(scenario(monkey))
