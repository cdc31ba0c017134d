"""`SGLangBackend` against what SGLang 0.5.23 answered, and what it refuses before sending."""

import asyncio
from typing import Any

import numpy as np
import pybase64
import pytest

from client_prompts import PAD, PromptMaker, qwen_item
from engine_replies import Recording, an_image, digested
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest, Usage
from mmrender.errors import (
    EngineConnectionError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    MediaError,
    PlaceholderError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.testing.memory_transport import Answer, MemoryTransport
from mmrender.trajectory.engine_data import WeightVersionSpan

PROMPT = [10, 11, 12]
GREEDY = {"temperature": 0.0, "max_tokens": 4}
EXPERTS = SGLangBackend(routed_experts_shape=(3, 2))


def request(**fields: Any) -> EngineRequest:
    values: dict[str, Any] = {
        "model": "tiny",
        "prompt_ids": PROMPT,
        "sampling_params": GREEDY,
        "request_id": "text",
        "vocab_size": 1024,
    }
    return EngineRequest(**{**values, **fields})


def recorded(name: str) -> Recording:
    return Recording.of("sglang", name)


def replay(name: str, backend: SGLangBackend | None = None, **fields: Any) -> Any:
    fields.setdefault("request_id", name)
    return recorded(name).replay(backend or SGLangBackend(), request(**fields))


def refused(error: type[Exception], recording: Recording, **fields: Any) -> str:
    backend = fields.pop("backend", SGLangBackend())
    with pytest.raises(error) as caught:
        recording.replay(backend, request(**fields))
    return str(caught.value)


def changed(change: Any, name: str = "text") -> Recording:
    return recorded(name).changed(change)


COMPLETION = recorded("text").answer["output_ids"]
VERSION = recorded("text").answer["meta_info"]["weight_version"]
LOGPROBS = [entry[0] for entry in recorded("text").answer["meta_info"]["output_token_logprobs"]]


WHERE = "http://memory/generate"


# --- requests ---


@pytest.mark.parametrize(
    ("name", "backend", "fields"),
    [
        ("text", SGLangBackend(), {}),
        (
            "alternatives",
            SGLangBackend(),
            {"sampling_params": {**GREEDY, "logprobs": 2}, "cache_salt": "salt", "priority": 3},
        ),
        ("stop_token", SGLangBackend(), {"sampling_params": {**GREEDY, "stop_token_ids": [COMPLETION[1]]}}),
        ("stop_string", SGLangBackend(), {"sampling_params": {**GREEDY, "stop": "low"}}),
    ],
    ids=["text", "alternatives", "stop_token", "stop_string"],
)
def test_the_request_is_the_recorded_one(name, backend, fields):
    recording = recorded(name)
    recording.replay(backend, request(request_id=name, **fields))
    assert recording.sent == recording.body


def test_priorities_keep_their_sign_where_low_values_come_first():
    recording = recorded("text")
    recording.replay(SGLangBackend(low_priority_values_first=True), request(priority=3))
    assert recording.sent["priority"] == 3
    recording.replay(SGLangBackend(), request(priority=3))
    assert recording.sent["priority"] == -3


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"include_stop_str_in_output": False}, {"no_stop_trim": False}),
        ({"skip_special_tokens": True}, {"skip_special_tokens": True}),
    ],
)
def test_what_is_set_by_default_may_be_asked_otherwise(given, sent):
    recording = recorded("text")
    recording.replay(SGLangBackend(), request(sampling_params={**GREEDY, **given}))
    expected = {**recording.body["sampling_params"], **sent}
    assert recording.sent["sampling_params"] == expected


def test_a_seed_is_refused_unless_the_server_heeds_it():
    recording = recorded("text")
    sampling = {**GREEDY, "seed": 7}
    assert refused(SamplingParameterError, recording, sampling_params=sampling) == (
        "sampling_params['seed']: SGLang ignores seeds unless it runs with --enable-deterministic-inference. "
        "Start it so, and say it with SGLangBackend(deterministic=True)"
    )
    assert recording.sent is None
    recording.replay(SGLangBackend(deterministic=True), request(sampling_params=sampling))
    assert recording.sent["sampling_params"]["sampling_seed"] == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_token_ids", [5]), ("logprobs", -1)],
)
def test_parameters_that_sglang_does_not_have(name, value):
    recording = recorded("text")
    problem = refused(SamplingParameterError, recording, sampling_params={**GREEDY, name: value})
    assert problem.startswith(f"sampling_params['{name}']: ")
    assert recording.sent is None


# --- answers ---


def test_an_answer():
    response = replay("text")
    assert response.completion_ids == COMPLETION
    assert response.logprobs == LOGPROBS
    assert (response.finish_reason, response.stop_reason) == ("length", None)
    assert response.usage == Usage(3, 4, response.usage.cached_tokens)
    assert isinstance(response.usage.cached_tokens, int)
    assert response.weight_versions == (WeightVersionSpan(VERSION, 0, 4),)
    assert response.request_id == "text"
    assert response.top_logprobs is None
    assert response.routed_experts is None
    assert response.raw["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert "output_token_logprobs" not in response.raw["meta_info"]


def test_alternatives():
    response = replay("alternatives", sampling_params={**GREEDY, "logprobs": 2})
    assert [len(row) for row in response.top_logprobs] == [2, 2, 2, 2]
    assert [row[0] for row in response.top_logprobs] == list(
        zip(response.completion_ids, response.logprobs, strict=True)
    )

    def drop(answer):
        answer["meta_info"]["output_top_logprobs"].pop()

    problem = refused(
        EngineReplyError, changed(drop, "alternatives"), sampling_params={**GREEDY, "logprobs": 2}
    )
    assert (
        problem == f"{WHERE} top_logprobs: alternatives and tokens are not equally many - expected 4, got 3"
    )


def test_stops_name_what_was_met():
    token = replay("stop_token", sampling_params={**GREEDY, "stop_token_ids": [COMPLETION[1]]})
    assert token.completion_ids == COMPLETION[:2]
    assert (token.finish_reason, token.stop_reason) == ("stop", COMPLETION[1])
    text = replay("stop_string", sampling_params={**GREEDY, "stop": ["low"]})
    assert (text.finish_reason, text.stop_reason) == ("stop", "low")
    assert text.completion_ids == COMPLETION[: len(text.completion_ids)]


def test_an_abort_is_an_answer_of_what_there_is():
    response = replay("aborted", sampling_params={"max_tokens": 2000})
    assert recorded("aborted").answer["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert response.finish_reason == "abort"
    assert len(response.completion_ids) == len(response.logprobs) > 0


def test_an_abort_with_a_status_is_an_error():
    def fail(answer):
        finish = {"type": "abort", "message": "out of memory", "status_code": 503, "err_type": "Unavailable"}
        answer["meta_info"]["finish_reason"] = finish

    with pytest.raises(EngineStatusError) as caught:
        changed(fail).replay(SGLangBackend(), request())
    assert caught.value.status == 503
    assert str(caught.value) == f"{WHERE} finish_reason: the server gave up: out of memory"


def test_a_cut_of_max_tokens_is_told(caplog):
    sampling = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}
    response = replay("cut", prompt_ids=[5] * 2041, sampling_params=sampling)
    assert (response.finish_reason, len(response.completion_ids)) == ("length", 5)
    assert response.raw["max_tokens_granted"] == 5
    assert caplog.messages == ["SGLang cut max_tokens from 7 to 5, since the prompt has 2041 tokens"]


def test_several_completions_are_not_one():
    recording = recorded("several")
    assert isinstance(recording.answer, list)
    assert refused(EngineReplyError, recording) == (
        f"{WHERE}: the server's reply is malformed - expected object, got array"
    )


def test_a_list_of_one_completion_is_one():
    recording = recorded("text")
    recording.answer = [recording.answer]
    assert recording.replay(SGLangBackend(), request()).completion_ids == COMPLETION


def test_weight_versions_are_spans():
    def two(answer):
        answer["meta_info"]["weight_versions"] = [
            {"version": "step-7", "start": 0, "end": 3},
            {"version": "step-8", "start": 3, "end": 4},
        ]

    versions = changed(two).replay(SGLangBackend(), request()).weight_versions
    assert versions == (WeightVersionSpan("step-7", 0, 3), WeightVersionSpan("step-8", 3, 4))

    def one(answer):
        del answer["meta_info"]["weight_versions"]

    versions = changed(one).replay(SGLangBackend(), request()).weight_versions
    assert versions == (WeightVersionSpan(VERSION, 0, 4),)


# --- images ---


@pytest.fixture(scope="module")
def one_image(tmp_path_factory):
    return an_image(tmp_path_factory.mktemp("models") / "tiny")


def with_image(rendered, **fields):
    fields.setdefault("request_id", "image")
    return request(prompt_ids=rendered.token_ids, multi_modal_data=rendered.multi_modal_data, **fields)


def test_an_image_goes_encoded_and_its_placeholder_once(one_image):
    recording = recorded("image")
    response = recording.replay(SGLangBackend(), with_image(one_image))
    assert digested(recording.sent) == recording.body
    place = one_image.multi_modal_data.mm_placeholders["image"][0]
    assert len(recording.sent["input_ids"]) == len(one_image) - place.length + 1
    assert recording.sent["image_data"][0].startswith("data:image/png;base64,")
    assert recording.answer["prompt_token_ids"] == one_image.token_ids
    assert response.completion_ids == recording.answer["output_ids"]
    assert response.usage.prompt_tokens == len(one_image)


def test_an_image_that_the_server_widens_otherwise(one_image):
    place = one_image.multi_modal_data.mm_placeholders["image"][0]

    def widen(answer):
        answer["prompt_token_ids"].insert(place.offset, answer["prompt_token_ids"][place.offset])

    with pytest.raises(EngineMismatchError) as caught:
        changed(widen, "image").replay(SGLangBackend(), with_image(one_image))
    problem = str(caught.value)
    assert problem.startswith(
        f"{WHERE} prompt_token_ids[{place.offset + place.length}] (image 0): the server saw another"
    )


def three_images() -> PromptMaker:
    first, second = qwen_item(4), qwen_item(6)
    return PromptMaker().text([1]).framed(first).text([2]).framed(second).framed(first).text([3])


def test_a_placeholder_that_the_model_sampled_is_refused_beside_images():
    prompt = three_images().text([5, PAD, 6])
    call = request(prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar)
    with pytest.raises(PlaceholderError) as caught:
        asyncio.run(SGLangBackend().generate(call, MemoryTransport()))
    assert str(caught.value) == (
        f"prompt_ids: SGLang takes every placeholder token for an image - expected 3 of the token {PAD}, one "
        "for each image, got 4. A placeholder that the model itself sampled cannot be sent along with images"
    )


def test_items_that_cannot_be_encoded_are_refused():
    prompt = three_images()
    call = request(prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar)
    transport = MemoryTransport()
    with pytest.raises(MediaError, match="cannot be sent as an encoded image"):
        asyncio.run(SGLangBackend().generate(call, transport))
    assert transport.asked == []


# --- routed experts ---


ROWS = 3 + 4 - 1
COUNTED = np.arange(ROWS * 6, dtype=np.int32).reshape(ROWS, 3, 2)


def with_experts(first: int) -> Recording:
    def add(answer):
        data = np.ascontiguousarray(COUNTED[first:], "<i4").tobytes()
        answer["meta_info"]["routed_experts"] = pybase64.b64encode(data).decode()

    return changed(add)


def test_router_choices_are_asked_for_as_recorded():
    recording = recorded("no_experts")
    with pytest.raises(EngineUnsupportedError) as caught:
        recording.replay(EXPERTS, request(request_id="no_experts", routed_experts=True))
    assert recording.sent == recording.body
    assert str(caught.value) == (
        f"{WHERE} routed_experts: router choices were asked for, and the server gives none. Start it with "
        "--enable-return-routed-experts, with a mixture-of-experts model"
    )


@pytest.mark.parametrize("start", [None, 0, 2, 3])
@pytest.mark.parametrize("server_cuts", [True, False])
def test_router_choices_get_their_shape(start, server_cuts):
    recording = with_experts((start or 0) if server_cuts else 0)
    call = request(routed_experts=True, routed_experts_prompt_start=start)
    experts = recording.replay(EXPERTS, call).routed_experts
    assert recording.sent["routed_experts_start_len"] == (start or 0)
    assert (experts.start, experts.shape) == (start or 0, (ROWS - (start or 0), 3, 2))
    np.testing.assert_array_equal(experts.data, COUNTED[start or 0 :])
    assert experts.dtype == np.int32


def test_router_choices_need_the_shape_of_the_model():
    recording = with_experts(0)
    assert refused(EngineUnsupportedError, recording, routed_experts=True) == (
        "routed_experts: SGLang gives router choices without their shape. Name it with "
        "SGLangBackend(routed_experts_shape=(layers, experts of a token))"
    )
    assert recording.sent is None


# --- errors and limits ---


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("error_object", "input_ids cannot be empty."),
        ("error_text", "unknown field `max_tokens`, expected one of `max_new_tokens`"),
        ("error_flat", "1 validation error"),
        ("widened", "Internal Server Error"),
    ],
)
def test_error_replies_have_four_shapes(name, says):
    recording = recorded(name)
    shape = {
        "error_object": lambda answer: set(answer["error"]) == {"message"},
        "error_text": lambda answer: isinstance(answer["error"], str),
        "error_flat": lambda answer: answer["object"] == "error" and isinstance(answer["message"], str),
        "widened": lambda answer: isinstance(answer, str),
    }[name]
    assert shape(recording.answer)
    with pytest.raises(EngineStatusError) as caught:
        recording.replay(SGLangBackend(), request())
    assert caught.value.status == (500 if name == "widened" else 400)
    assert says in caught.value.body
    assert not SGLangBackend().is_overflow_error(caught.value)


@pytest.mark.parametrize(
    ("name", "prompt_len", "max_prompt_len", "max_tokens"),
    [
        ("too_long_input", 2042, 2041, 1),
        ("too_long_context", 3000, 2047, 1),
        ("too_long_total", 2040, 2028, 20),
        ("image_too_long", 2050, 2047, 4),
    ],
)
def test_overflow_replies(name, prompt_len, max_prompt_len, max_tokens):
    sampling = {**GREEDY, "max_tokens": max_tokens}
    with pytest.raises(PromptTooLongError) as caught:
        replay(name, sampling_params=sampling)
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (prompt_len, max_prompt_len)
    reply = caught.value.__cause__
    assert isinstance(reply, EngineStatusError)
    assert SGLangBackend().is_overflow_error(reply)
    assert SGLangBackend().is_overflow_error(caught.value)


def test_an_overflow_that_the_scheduler_finds():
    """Read from SGLang's sources, for prompts whose images are widened there."""
    text = (
        "Multimodal prompt is too long after expanding multimodal tokens. "
        "After expanding len(req.origin_input_ids_unpadded)=40 => 2100 >= 2042."
    )
    recording = recorded("too_long_input")
    recording.answer = {"error": {"message": text}}
    with pytest.raises(PromptTooLongError) as caught:
        recording.replay(SGLangBackend(), request())
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (2100, 2041)


def test_more_tokens_than_the_context_holds_are_the_parameters_fault():
    problem = refused(
        SamplingParameterError, recorded("too_many_tokens"), sampling_params={**GREEDY, "max_tokens": 4000}
    )
    assert problem == (
        "sampling_params['max_tokens']: is more than the model's context holds - expected at most 2045, got 4000"
    )


def test_an_overflow_text_with_another_status_is_none():
    error = EngineStatusError(
        "x", status=500, body=str(recorded("too_long_input").answer["error"]["message"])
    )
    assert not SGLangBackend().is_overflow_error(error)
    assert not SGLangBackend().is_overflow_error(EngineConnectionError("gone"))


def test_the_longest_prompt_is_one_less_than_the_servers_number():
    recording = recorded("server_info")
    assert recording.answer["max_req_input_len"] == 2042
    assert recording.answer["context_length"] == 2048
    assert recording.limit(SGLangBackend()) == 2041


@pytest.mark.parametrize(("answer", "limit"), [({}, None), ({"max_req_input_len": None}, None)])
def test_servers_that_name_no_limit(answer, limit):
    transport = MemoryTransport({"GET /server_info": Answer(answer)})
    assert asyncio.run(SGLangBackend().resolve_max_prompt_len("tiny", transport)) is limit
