"""`DynamoBackend` against what Dynamo 1.6.1 answered, and what it refuses before sending."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine_replies import GREEDY, PROMPT, ROWS, Replays, an_image, counted, digested, with_image
from kit import raised
from mmrender.client.dynamo import DynamoBackend
from mmrender.client.types import Usage
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.http_engine import HTTPEngine
from mmrender.errors import (
    EngineConnectionError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
)
from mmrender.testing.memory_transport import MemoryTransport

DYNAMO = Replays(DynamoBackend(), {"request_id": "recorded", "eos_token_ids": [1013]})
WHOLE = DYNAMO.recorded("text").answer
"""The answer that holds everything, in every channel."""
COMPLETION = WHOLE["nvext"]["engine_data"]["completion_token_ids"]
LOGPROBS = WHOLE["nvext"]["engine_data"]["completion_logprobs"]
TWO_LOGPROBS = {**GREEDY, "logprobs": 2}
WHERE = "http://memory/v1/chat/completions"
replay, refused, recorded = DYNAMO.replay, DYNAMO.refused, DYNAMO.recorded


def with_modes(*modes: str) -> DynamoBackend:
    return DynamoBackend(nvext={"annotations": list(modes)})


# --- requests ---


@pytest.mark.parametrize(
    ("name", "modes", "fields"),
    [
        ("text", (), {}),
        ("empty", ("empty",), {}),
        ("routed_experts", ("routed_experts",), {"routed_experts": True}),
        ("alternatives", (), {"cache_salt": "salt", "priority": 3, "sampling_params": TWO_LOGPROBS}),
        ("stop_token", (), {"sampling_params": {**GREEDY, "stop_token_ids": [COMPLETION[1]]}}),
        ("stop_string", (), {"sampling_params": {**GREEDY, "stop": "low"}}),
    ],
)
def test_the_request_is_the_recorded_one(name, modes, fields):
    recording = recorded(name)
    replay(recording, with_modes(*modes) if modes else None, **fields)
    assert recording.sent == recording.body


def test_extra_fields_are_joined_in_order_and_hints_merged():
    backend = DynamoBackend(
        nvext={
            "extra_fields": ["timing", "engine_data"],
            "agent_hints": {"osl": 9, "priority": 1},
            "annotations": ["llm_metrics"],
            "cache_salt": "mine",
        }
    )
    recording = recorded("text")
    replay(recording, backend, priority=-2, cache_salt="call")
    assert recording.sent["nvext"] == {
        "token_data": PROMPT,
        "extra_fields": ["timing", "engine_data", "completion_token_ids", "prompt_token_ids"],
        "agent_hints": {"osl": 9, "priority": 2},
        "annotations": ["llm_metrics"],
        "cache_salt": "call",
    }
    replay(recording, backend)
    assert recording.sent["nvext"]["agent_hints"] == {"osl": 9, "priority": 1}
    assert recording.sent["nvext"]["cache_salt"] == "mine"
    assert backend.nvext["extra_fields"] == ["timing", "engine_data"]


def test_a_prompt_in_nvext_is_refused(sentence):
    assert refused(InputError, "text", DynamoBackend(nvext={"token_data": [1]})) == sentence


# --- answers ---


def test_an_answer_with_every_channel():
    response = replay("text")
    assert (response.completion_ids, response.logprobs) == (COMPLETION, LOGPROBS)
    assert (response.finish_reason, response.usage) == ("length", Usage(3, 4))
    assert (response.top_logprobs, response.routed_experts, response.weight_versions) == (None, None, ())
    assert response.request_id == WHOLE["id"]


def test_the_frontends_ids_where_the_worker_gives_none_else_those_of_the_logprobs():
    response = replay("no_engine_data", with_modes("no_engine_data"))
    assert response.completion_ids == COMPLETION
    # The frontend writes single precision.
    np.testing.assert_allclose(response.logprobs, LOGPROBS, rtol=1e-6)
    assert "nvext" not in recorded("only_content").answer
    assert replay("only_content").completion_ids == COMPLETION


def test_the_worker_comes_before_the_frontend_and_an_empty_answer_before_a_later_channel():
    response = replay("empty", with_modes("empty"))
    # A completion without its end was cut off, whatever the frontend says.
    assert (response.completion_ids, response.logprobs, response.finish_reason) == ([], [], "abort")
    assert response.usage == Usage(3, 0)
    nothing = {"completion_token_ids": [], "completion_logprobs": []}
    emptied = recorded("text").changed(lambda answer: answer["nvext"]["engine_data"].update(nothing))
    assert replay(emptied).completion_ids == []

    def differ(answer):
        answer["nvext"]["completion_token_ids"] = [1, 2, 3, 4]
        for entry in answer["choices"][0]["logprobs"]["content"]:
            entry["logprob"] = -1.0

    response = replay(recorded("text").changed(differ))
    assert (response.completion_ids, response.logprobs) == (COMPLETION, LOGPROBS)


def without_channels(answer):
    answer["choices"][0]["logprobs"] = None
    del answer["nvext"]


def without_names(answer):
    del answer["nvext"]
    for entry in answer["choices"][0]["logprobs"]["content"]:
        del entry["token_id"]


def of_different_lengths(answer):
    """566 ids from one channel, 565 logprobs from another: the id of a stop that the other leaves out."""
    del answer["nvext"]["engine_data"]["completion_logprobs"]
    answer["choices"][0]["logprobs"]["content"].pop()


def of_other_tokens(answer):
    del answer["nvext"]["engine_data"]["completion_logprobs"]
    answer["nvext"]["engine_data"]["completion_token_ids"][2] = 7


def unfinished(answer):
    answer["nvext"]["engine_data"]["finished"] = False


def of_another_prompt(answer):
    del answer["nvext"]["engine_data"]["prompt_token_ids"]
    answer["nvext"]["prompt_token_ids"] = [10, 99, 12]


def of_another_count(answer):
    del answer["nvext"]["engine_data"]["prompt_token_ids"], answer["nvext"]["prompt_token_ids"]
    answer["usage"]["prompt_tokens"] = 4


UNUSABLE = {
    EngineReplyError: (without_channels, without_names, of_different_lengths, of_other_tokens, unfinished),
    EngineMismatchError: (of_another_prompt, of_another_count),
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [(change, kind) for kind, changes in UNUSABLE.items() for change in changes],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_answers_that_cannot_be_trained_on(change, kind, sentence):
    assert refused(kind, recorded("text").changed(change)) == sentence


def test_a_stop_token_belongs_to_the_completion_and_a_stop_string_leaves_the_frontends_channels():
    response = replay("stop_token", sampling_params={**GREEDY, "stop_token_ids": [COMPLETION[1]]})
    assert (response.completion_ids, response.finish_reason) == (COMPLETION[:2], "stop")
    recording = recorded("stop_string")
    assert "engine_data" not in recording.answer["nvext"]
    response = replay(recording, sampling_params={**GREEDY, "stop": ["low"]})
    assert (response.completion_ids, response.finish_reason) == (COMPLETION[:3], "stop")


@pytest.mark.parametrize(
    ("sampling", "eos", "expected"),
    [
        ({}, [1013], "abort"),
        ({"stop_token_ids": [1013]}, [1012], "abort"),
        ({"ignore_eos": True}, None, "abort"),
        ({"ignore_eos": True}, [COMPLETION[-1]], "abort"),
        ({"stop": ["x"]}, [1013], "stop"),
        ({"stop_token_ids": [1013]}, [COMPLETION[-1]], "stop"),
        ({"stop_token_ids": [COMPLETION[-1]]}, [1013], "stop"),
    ],
)
def test_a_stop_that_no_known_token_explains_was_an_abort(sampling, eos, expected):
    recording = recorded("abort")
    assert recording.answer["choices"][0]["finish_reason"] == "stop"
    fields = {"sampling_params": {**GREEDY, **sampling}, "eos_token_ids": eos}
    assert replay(recording, with_modes("abort"), **fields).finish_reason == expected


def test_without_known_ends_nothing_is_guessed(sentence):
    """A frontend says `stop` of aborts too; a caller who ignores the model's own ends names all there are."""
    recording = recorded("abort")
    problem = refused(EngineUnsupportedError, recording, eos_token_ids=None)
    assert problem == sentence
    assert recording.sent is None
    known = DynamoBackend(eos_token_ids=(COMPLETION[-1],), nvext={"annotations": ["abort"]})
    assert replay(recording, known, eos_token_ids=None).finish_reason == "stop"


@pytest.mark.parametrize(("end", "asked"), [(7, 1), (8, 2)], ids=["end", "abort"])
def test_an_engine_goes_on_behind_an_abort_and_never_behind_an_end(end, asked):
    """The model's own end is not among the caller's stop tokens."""

    def reply(_: Any) -> Any:
        ids = [6, 7] if len(transport.asked) == 1 else [9, 8]
        sampled = {"completion_token_ids": ids, "completion_logprobs": [-1.0, -1.0]}
        return {"id": "x", "choices": [{"finish_reason": "stop"}], "nvext": {"engine_data": sampled}}

    renderer = SimpleNamespace(get_stop_token_ids=lambda: [end], decode=str)
    transport = MemoryTransport({"POST /v1/chat/completions": reply})
    engine = HTTPEngine(DynamoBackend(), transport, model="m", renderer=renderer)
    batch = {"prompt_token_ids": [PROMPT], "sampling_params": {"max_tokens": 8, "stop_token_ids": [1013]}}
    output = asyncio.run(InferenceEngineClient([engine]).generate(batch))
    assert output["response_ids"] == [[6, 7] if asked == 1 else [6, 7, 9, 8]]
    assert output["stop_reasons"] == ["stop"]
    prompts = [each.json["nvext"]["token_data"] for each in transport.of_path("/v1/chat/completions")]
    assert prompts == [PROMPT, [*PROMPT, 6, 7]][:asked]


def test_alternatives_name_their_tokens(sentence):
    response = replay("alternatives", sampling_params=TWO_LOGPROBS)
    assert [len(row) for row in response.top_logprobs] == [2, 2, 2, 2]
    assert [row[0][0] for row in response.top_logprobs] == COMPLETION

    def unname(answer):
        answer["choices"][0]["logprobs"]["content"][1]["top_logprobs"][0]["token"] = "Call"

    unnamed = recorded("alternatives").changed(unname)
    assert refused(EngineReplyError, unnamed, sampling_params=TWO_LOGPROBS) == sentence


# --- routed experts ---


COUNTED = counted(2, 2, "uint8")


@pytest.mark.parametrize("name", ["routed_experts", "routed_experts_of_worker"])
@pytest.mark.parametrize("start", [None, 0, 1, 3, ROWS])
def test_router_choices_begin_where_the_caller_asked(name, start):
    fields = {"routed_experts": True, "routed_experts_prompt_start": start}
    experts = replay(name, with_modes("routed_experts"), **fields).routed_experts
    assert experts.start == (start or 0)
    np.testing.assert_array_equal(experts.data, COUNTED[start or 0 :])
    assert experts.dtype == np.uint8


def test_router_choices_that_are_missing(sentence):
    assert refused(EngineUnsupportedError, "text", routed_experts=True) == sentence


# --- images ---


LEVELS = DynamoBackend(pixels="uint8")


@pytest.fixture(scope="module")
def one_image(tmp_path_factory):
    return an_image(tmp_path_factory.mktemp("models") / "tiny")


def test_images_go_by_vllms_route(one_image):
    recording = recorded("image")
    response = replay(recording, LEVELS, **with_image(one_image))
    assert digested(recording.sent) == recording.body
    choice = recording.answer["choices"][0]
    assert response.completion_ids == choice["token_ids"]
    assert response.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert (response.usage, response.request_id) == (Usage(len(one_image), 4), "recorded")


@pytest.mark.parametrize("start", [None, 5])
def test_router_choices_by_vllms_route(one_image, start):
    fields = with_image(one_image, routed_experts=True, routed_experts_prompt_start=start)
    experts = replay("image_routed_experts", LEVELS, **fields).routed_experts
    rows = len(one_image) + 3
    assert (experts.start, len(experts.data)) == (start or 0, rows - (start or 0))
    assert experts.data.reshape(-1)[0] == (start or 0) * 4


def test_images_that_a_worker_would_not_get(one_image, sentence):
    recording = recorded("image")
    assert refused(EngineUnsupportedError, recording, **with_image(one_image)) == sentence
    assert recording.sent is None
    problem = refused(EngineUnsupportedError, "error_closed", LEVELS, **with_image(one_image))
    assert problem == sentence
    assert "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1" in problem
    image, text = recorded("image"), recorded("text")
    fields = with_image(one_image)
    small = DynamoBackend(pixels="uint8", max_image_bytes=100_000)
    assert refused(EngineUnsupportedError, image, small, **fields).partition(", got ")[0] == sentence
    short = DynamoBackend(max_body_bytes=1000)
    assert refused(EngineUnsupportedError, text, short, prompt_ids=[5] * 200) == sentence
    assert image.sent is text.sent is None
    assert replay(image, DynamoBackend(pixels="uint8", max_image_bytes=200_000), **fields)


# --- errors and limits ---


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("error_worker", 400, "Invalid request"),
        ("error_http", 400, "Bad Request"),
        ("error_nvext", 400, "unknown field `unknown`, expected one of"),
        ("error_parameter", 400, "Unsupported parameter(s): `unknown`"),
        ("error_model", 404, "Model not found"),
        ("error_too_long", 400, "Invalid request"),
    ],
)
def test_error_replies_are_flat(name, status, says):
    caught = raised(EngineStatusError, replay, name)
    assert caught.status == status
    assert says in caught.body
    assert not DynamoBackend().is_overflow_error(caught)
    assert ("worker's log has it" in str(caught)) is (status == 400)


@pytest.mark.parametrize(
    ("name", "status"), [("error_generate", 400), ("generate_abort", 499), ("generate_empty", 500)]
)
def test_what_vllms_route_calls_an_error(one_image, name, status):
    caught = raised(EngineStatusError, replay, name, LEVELS, **with_image(one_image))
    assert caught.status == status


def test_the_longest_prompt_and_overflows_seen_here():
    recording = recorded("models")
    assert recording.answer["data"][0]["context_window"] == 2048
    assert "max_model_len" not in recording.answer["data"][0]
    assert recording.limit(DynamoBackend()) == 2047
    assert recording.limit(DynamoBackend(), model="other") is None
    assert DynamoBackend().is_overflow_error(PromptTooLongError(3, 2))
    assert not DynamoBackend().is_overflow_error(EngineConnectionError("gone"))
