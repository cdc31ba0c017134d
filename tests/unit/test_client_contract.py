"""What holds for every engine: how a backend asks, reads, refuses and stops. Engine specifics have files of their own."""

import asyncio
import pickle
import threading
from typing import Any

import msgspec
import pytest

from client_prompts import PromptMaker, qwen_item, tiled_item, video_item
from kit import error_of, until
from mmrender.client import exchange, reply, vllm
from mmrender.client.reply import check_completion
from mmrender.client.types import RendererBackend, Usage
from mmrender.client.vllm import VLLMBackend
from mmrender.errors import (
    EngineConnectionError,
    EngineMismatchError,
    EngineReplyError,
    EngineTimeoutError,
    EngineUnsupportedError,
    InputError,
    PlaceholderError,
    SamplingParameterError,
)
from mmrender.testing.memory_transport import DROPPED, Answer, MemoryTransport
from stub_server import ENGINES, IDS, LOGPROBS, Engine, asked


@pytest.fixture(params=ENGINES)
def engine(request: Any) -> Engine:
    return ENGINES[request.param]


def ask(engine: Engine, answer: Any = None, **fields: Any) -> Any:
    transport = MemoryTransport({engine.route: Answer(engine.answer() if answer is None else answer)})
    return asyncio.run(engine.backend.generate(asked(**fields), transport)), transport


def refused(engine: Engine, kind: type[Exception], answer: Any = None, **fields: Any) -> str:
    transport = MemoryTransport({engine.route: Answer(engine.answer() if answer is None else answer)})
    problem = error_of(kind, asyncio.run, engine.backend.generate(asked(**fields), transport))
    if answer is None:
        assert transport.asked == []  # refused before it was sent
    return problem


# --- answers ---


def test_an_answer(engine):
    response, transport = ask(engine, extra_headers={"x-a": "b"})
    assert (response.completion_ids, response.logprobs) == (IDS, LOGPROBS)
    assert (response.finish_reason, response.request_id) == ("stop", "r")
    assert response.usage == Usage(3, 3)
    assert response.top_logprobs is None
    assert transport.asked[0].headers == {"x-a": "b"}
    assert not transport.asked[0].idempotent
    aborted = engine.reply([], [])  # before the first token
    engine.change["reason"](aborted, "abort")
    response, _ = ask(engine, aborted)
    assert (response.completion_ids, response.logprobs, response.finish_reason) == ([], [], "abort")


@pytest.mark.parametrize("name", ["sglang", "dynamo"])
def test_engines_that_do_not_stream_tell_of_all_tokens_at_the_end(name):
    engine, told = ENGINES[name], []
    transport = MemoryTransport({engine.route: engine.answer()})
    asyncio.run(engine.backend.generate(asked(), transport, on_tokens=lambda *seen: told.append(seen)))
    assert told == [(IDS, LOGPROBS, "stop")]


def test_answers_that_are_too_long_or_to_another_prompt(engine):
    assert "the server's reply is too long" in refused(engine, EngineReplyError, b" " * (5 << 20))
    answer = engine.answer()
    engine.change["prompt"](answer, [10, 99, 12])
    refused(engine, EngineMismatchError, answer)


@pytest.mark.parametrize(("padding", "main"), [(0, True), (2 << 20, False)])
def test_large_answers_are_read_off_the_event_loop(engine, monkeypatch, padding, main):
    seen = []

    def check(*given: Any, **options: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return check_completion(*given, **options)

    monkeypatch.setattr(reply, "check_completion", check)
    ask(engine, {**engine.answer(), "padding": "x" * padding})
    assert seen == [main]


# --- refusals before sending ---


@pytest.mark.parametrize("ids", [[], [-1, 2], [1, 1024], [1.5], "abc"])
def test_prompts_that_kill_an_engine(engine, ids):
    refused(engine, InputError, prompt_ids=ids)


def test_sidecars_that_do_not_fit(engine):
    prompt = PromptMaker().text([1]).framed(qwen_item(4)).text([2])
    refused(engine, PlaceholderError, prompt_ids=prompt.ids[:-3], multi_modal_data=prompt.sidecar)
    refused(engine, PlaceholderError, prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar.shifted(1))


@pytest.mark.parametrize("name", ["sglang", "dynamo"])
def test_videos_are_refused(name, sentence):
    prompt = PromptMaker().text([1]).framed(video_item(4)).text([2])
    problem = refused(
        ENGINES[name], EngineUnsupportedError, prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar
    )
    assert problem == sentence


@pytest.mark.parametrize("name", ["vllm", "dynamo"])
def test_ranges_that_the_engine_would_forget_are_refused(name):
    prompt = PromptMaker().text([1]).framed(tiled_item(2, 2)).text([2])
    problem = refused(
        ENGINES[name], EngineUnsupportedError, prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar
    )
    assert "loses which tokens of this range hold features" in problem


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"max_tokens": 4, "n": 2},
        {"max_tokens": 0},
        {"max_tokens": 4, "temprature": 1.0},
        {"max_tokens": 4, "min_tokens": 5},
    ],
    ids=["no length", "several", "nothing", "misspelt", "contradiction"],
)
def test_sampling_parameters_that_are_refused(engine, sampling, sentence):
    assert refused(engine, SamplingParameterError, sampling_params=sampling) == sentence


def test_what_this_version_does_not_know_is_sent_by_name(engine):
    sampling = {"max_tokens": 4, "extra": {"new_parameter": [1]}}
    _, transport = ask(engine, sampling_params=sampling, extra_body={"new_member": {"a": 1}})
    body = transport.asked[0].json
    assert body["new_member"] == {"a": 1}
    assert body.get("sampling_params", body)["new_parameter"] == [1]


def test_what_is_sent_by_name_cannot_replace_what_the_request_says(engine, sentence):
    sampling = {"max_tokens": 4, "temperature": 1.0, "extra": {"temperature": 0.5}}
    assert refused(engine, SamplingParameterError, sampling_params=sampling) == sentence
    _, transport = ask(engine)
    for name in transport.asked[0].json:
        problem = refused(engine, InputError, extra_body={name: 1})
        assert problem == f"extra_body[{name!r}]: the request itself sets this member"


# --- stopping ---


def stopped(engine: Engine, times: int = 1) -> MemoryTransport:
    routes: dict[str, Any] = {engine.route: Answer(delay=60)}
    if engine.abort is not None:
        routes[f"POST {engine.abort[0]}"] = Answer("", delay=0.01)
    transport = MemoryTransport(routes)

    async def work() -> None:
        task = asyncio.create_task(engine.backend.generate(asked(), transport))
        await until(lambda: transport.asked)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.002)
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(work())
    return transport


@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_aborts_by_the_requests_own_id(engine, times):
    transport = stopped(engine, times)
    assert [each.path for each in transport.cancelled] == [engine.path]
    aborts = [(each.path, each.json, each.idempotent) for each in transport.asked[1:]]
    assert aborts == ([] if engine.abort is None else [(*engine.abort, True)])


async def test_cancelling_does_not_wait_for_a_server_that_hangs(engine, monkeypatch):
    """After some turns of the event loop it has ended; the abort is on its way, and is not waited for."""
    monkeypatch.setattr(exchange, "_ABORT_GRACE", 0.0, raising=False)
    path = engine.abort[0] if engine.abort is not None else "/none"
    transport = MemoryTransport({engine.route: Answer(delay=3600), f"POST {path}": Answer(delay=3600)})
    task = asyncio.create_task(engine.backend.generate(asked(), transport))
    while not transport.asked:
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert task.cancelled()
    assert len(transport.asked) == (1 if engine.abort is None else 2)


@pytest.mark.parametrize("abort", [Answer(status=500), DROPPED, Answer("")])
def test_a_timeout_aborts_and_stays_a_timeout(engine, abort):
    path = engine.abort[0] if engine.abort is not None else "/none"
    transport = MemoryTransport({engine.route: EngineTimeoutError("late"), f"POST {path}": abort})
    assert "late" in error_of(EngineTimeoutError, asyncio.run, engine.backend.generate(asked(), transport))
    assert len(transport.asked) == (1 if engine.abort is None else 2)


def test_a_broken_connection_is_not_aborted(engine):
    transport = MemoryTransport({engine.route: DROPPED})
    with pytest.raises(EngineConnectionError):
        asyncio.run(engine.backend.generate(asked(), transport))
    assert len(transport.asked) == 1


# --- limits, and the backend as a value ---


def test_the_longest_prompt_and_the_backend_as_a_value(engine):
    path, answer, expected = engine.limit
    transport = MemoryTransport({f"GET {path}": Answer(answer)})
    assert asyncio.run(engine.backend.resolve_max_prompt_len("m", transport)) == expected
    for malformed in engine.malformed_limits:
        transport = MemoryTransport({f"GET {path}": Answer(malformed)})
        with pytest.raises(EngineReplyError, match=path):
            asyncio.run(engine.backend.resolve_max_prompt_len("m", transport))
    assert pickle.loads(pickle.dumps(engine.backend)) == engine.backend
    assert isinstance(engine.backend, RendererBackend)
    assert ENGINES[engine.backend.name] is engine


# --- streaming, which vLLM does ---


def chunk(ids: list[int], reason: str | None = None, **more: Any) -> bytes:
    content = [{"token_id": token, "logprob": -1.0} for token in ids]
    choice = {"index": 0, "finish_reason": reason, "token_ids": ids, "logprobs": {"content": content}, **more}
    return b"data: " + msgspec.json.encode({"request_id": "r", "choices": [choice]})


USAGE = b'data: {"request_id": "r", "choices": [], "usage": {"prompt_tokens": 3}}'
DONE = b"data: [DONE]"


def stream(*lines: bytes, **answer: Any) -> Any:
    told: list[Any] = []
    transport = MemoryTransport({ENGINES["vllm"].route: Answer(b"\n\n".join(lines), **answer)})
    work = VLLMBackend().generate(asked(), transport, on_tokens=lambda *seen: told.append(seen))
    return work, told, transport


def test_a_stream_gives_what_the_whole_answer_gives_also_if_it_breaks_behind_the_last_token():
    work, told, transport = stream(chunk([50]), chunk([51, 52], "stop", stop_reason=52), USAGE, DONE)
    response = asyncio.run(work)
    assert (response.completion_ids, response.logprobs) == (IDS, [-1.0] * 3)
    assert (response.finish_reason, response.stop_reason, response.usage) == ("stop", 52, Usage(3, 3))
    assert told == [([50], [-1.0], None), ([51, 52], [-1.0] * 2, "stop")]
    body = transport.asked[0].json
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    work, told, _ = stream(chunk([50]), chunk([52], "stop"), drop=True)
    assert asyncio.run(work).completion_ids == [50, 52]
    assert told[-1][2] == "stop"


def test_a_stream_is_decoded_once(monkeypatch):
    monkeypatch.setattr(vllm, "decode_as", None)  # which reads whole bodies
    work, _, _ = stream(chunk([50]), chunk([51, 52], "stop"), USAGE, DONE)
    assert asyncio.run(work).completion_ids == IDS


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([chunk([50])], EngineReplyError),
        ([chunk([50]), b'data: {"error": {"message": "no"}}'], EngineReplyError),
        ([chunk([50]), b"data: {"], EngineReplyError),
        ([chunk([50]), b"data: [1]"], EngineReplyError),
        ([chunk([50]), chunk([51, 52, 53, 54])], EngineReplyError),
        ([chunk([50]), chunk([1024])], EngineReplyError),
        ([chunk([50]), b'data: {"choices": [{"token_ids": [51]}]}'], EngineReplyError),
    ],
    ids=["broken off", "error", "no JSON", "no object", "too many", "outside", "no logprob"],
)
def test_a_stream_that_fails_keeps_what_it_told(lines, kind):
    work, told, _ = stream(*lines)
    with pytest.raises(kind):
        asyncio.run(work)
    assert told == [([50], [-1.0], None)]
