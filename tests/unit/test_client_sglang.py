"""`SGLangBackend` against what SGLang 0.5.23 answered, and what it refuses before sending."""

import asyncio

import numpy as np
import pybase64
import pytest

from client_prompts import PAD, PromptMaker, qwen_item
from engine_replies import GREEDY, ROWS, Replays, an_image, counted, digested, with_image
from kit import raised
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import Usage
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

SGLANG = Replays(SGLangBackend(), {"request_id": "text"})
EXPERTS = SGLangBackend(routed_experts_shape=(3, 2))
TEXT = SGLANG.recorded("text").answer
COMPLETION, META = TEXT["output_ids"], TEXT["meta_info"]
VERSION = META["weight_version"]
TWO_LOGPROBS = {**GREEDY, "logprobs": 2}
WHERE = "http://memory/generate"
replay, refused, recorded = SGLANG.replay, SGLANG.refused, SGLANG.recorded


# --- requests ---


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("text", {}),
        ("alternatives", {"sampling_params": TWO_LOGPROBS, "cache_salt": "salt", "priority": 3}),
        ("stop_token", {"sampling_params": {**GREEDY, "stop_token_ids": [COMPLETION[1]]}}),
        ("stop_string", {"sampling_params": {**GREEDY, "stop": "low"}}),
    ],
)
def test_the_request_is_the_recorded_one(name, fields):
    recording = recorded(name)
    replay(recording, request_id=name, **fields)
    assert recording.sent == recording.body


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"include_stop_str_in_output": False}, {"no_stop_trim": False}),
        ({"skip_special_tokens": True}, {"skip_special_tokens": True}),
    ],
)
def test_what_is_set_by_default_may_be_asked_otherwise(given, sent):
    recording = recorded("text")
    replay(
        recording,
        SGLangBackend(low_priority_values_first=True),
        priority=3,
        sampling_params={**GREEDY, **given},
    )
    assert recording.sent["sampling_params"] == {**recording.body["sampling_params"], **sent}
    assert recording.sent["priority"] == 3


def test_what_the_server_would_ignore_is_refused(sentence):
    recording = recorded("text")
    for given in ({"seed": 7}, {"logprobs": -1}):
        asked = {"sampling_params": {**GREEDY, **given}}
        assert refused(SamplingParameterError, recording, **asked) == sentence
    assert recording.sent is None
    replay(recording, SGLangBackend(deterministic=True), sampling_params={**GREEDY, "seed": 7})
    assert recording.sent["sampling_params"]["sampling_seed"] == 7


# --- answers ---


def test_an_answer():
    response = replay("text")
    assert response.completion_ids == COMPLETION
    assert response.logprobs == [entry[0] for entry in META["output_token_logprobs"]]
    assert (response.finish_reason, response.stop_reason) == ("length", None)
    assert response.usage == Usage(3, 4, response.usage.cached_tokens)
    assert isinstance(response.usage.cached_tokens, int)
    assert response.weight_versions == (WeightVersionSpan(VERSION, 0, 4),)
    assert (response.request_id, response.top_logprobs, response.routed_experts) == ("text", None, None)


def test_alternatives(sentence):
    response = replay("alternatives", sampling_params=TWO_LOGPROBS)
    assert [len(row) for row in response.top_logprobs] == [2, 2, 2, 2]
    sampled = list(zip(response.completion_ids, response.logprobs, strict=True))
    assert [row[0] for row in response.top_logprobs] == sampled
    fewer = recorded("alternatives").changed(lambda answer: answer["meta_info"]["output_top_logprobs"].pop())
    problem = refused(EngineReplyError, fewer, sampling_params=TWO_LOGPROBS)
    assert problem == sentence


def test_stops_name_what_was_met():
    token = replay("stop_token", sampling_params={**GREEDY, "stop_token_ids": [COMPLETION[1]]})
    assert token.completion_ids == COMPLETION[:2]
    assert (token.finish_reason, token.stop_reason) == ("stop", COMPLETION[1])
    text = replay("stop_string", sampling_params={**GREEDY, "stop": ["low"]})
    assert (text.finish_reason, text.stop_reason) == ("stop", "low")
    assert text.completion_ids == COMPLETION[: len(text.completion_ids)]


def test_an_abort_is_an_answer_of_what_there_is_and_one_with_a_status_an_error(sentence):
    response = replay("aborted", sampling_params={"max_tokens": 2000})
    assert response.finish_reason == "abort"
    assert len(response.completion_ids) == len(response.logprobs) > 0
    finish = {"type": "abort", "message": "out of memory", "status_code": 503, "err_type": "Unavailable"}
    failed = recorded("text").changed(lambda answer: answer["meta_info"].update(finish_reason=finish))
    caught = raised(EngineStatusError, replay, failed)
    assert caught.status == 503
    assert str(caught) == sentence


def test_a_cut_of_max_tokens_is_told(caplog):
    sampling = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}
    response = replay("cut", prompt_ids=[5] * 2041, sampling_params=sampling)
    assert (response.finish_reason, len(response.completion_ids)) == ("length", 5)
    assert caplog.messages == ["SGLang cut max_tokens from 7 to 5, since the prompt has 2041 tokens"]


def test_a_list_of_one_completion_is_one_and_several_are_not(sentence):
    recording = recorded("text")
    recording.answer = [TEXT]
    assert replay(recording).completion_ids == COMPLETION
    assert refused(EngineReplyError, "several") == sentence


def test_weight_versions_are_spans():
    spans = [{"version": "step-7", "start": 0, "end": 3}, {"version": "step-8", "start": 3, "end": 4}]
    two = recorded("text").changed(lambda answer: answer["meta_info"].update(weight_versions=spans))
    expected = (WeightVersionSpan("step-7", 0, 3), WeightVersionSpan("step-8", 3, 4))
    assert replay(two).weight_versions == expected
    one = recorded("text").changed(lambda answer: answer["meta_info"].pop("weight_versions"))
    assert replay(one).weight_versions == (WeightVersionSpan(VERSION, 0, 4),)


# --- images ---


@pytest.fixture(scope="module")
def one_image(tmp_path_factory):
    return an_image(tmp_path_factory.mktemp("models") / "tiny")


def test_an_image_goes_encoded_and_its_placeholder_once(one_image):
    recording = recorded("image")
    response = replay(recording, **with_image(one_image, request_id="image"))
    assert digested(recording.sent) == recording.body
    place = one_image.multi_modal_data.mm_placeholders["image"][0]
    assert len(recording.sent["input_ids"]) == len(one_image) - place.length + 1
    assert recording.sent["image_data"][0].startswith("data:image/png;base64,")
    assert recording.answer["prompt_token_ids"] == one_image.token_ids
    assert response.usage.prompt_tokens == len(one_image)


def test_images_that_the_server_widens_otherwise_or_cannot_be_sent(one_image, sentence):
    place = one_image.multi_modal_data.mm_placeholders["image"][0]
    pad = one_image.token_ids[place.offset]
    wider = recorded("image").changed(lambda answer: answer["prompt_token_ids"].insert(place.offset, pad))
    assert refused(EngineMismatchError, wider, **with_image(one_image)) == sentence
    first, second = qwen_item(4), qwen_item(6)
    prompt = PromptMaker().text([1]).framed(first).text([2]).framed(second).framed(first).text([3])
    recording = recorded("image")
    problem = refused(MediaError, recording, prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar)
    assert "cannot be sent as an encoded image" in problem
    prompt.text([5, PAD, 6])
    problem = refused(PlaceholderError, recording, prompt_ids=prompt.ids, multi_modal_data=prompt.sidecar)
    assert problem == sentence
    assert recording.sent is None


# --- routed experts ---


COUNTED = counted(3, 2, "int32")


def test_router_choices_are_asked_for_as_recorded_with_the_shape_of_the_model(sentence):
    recording = recorded("no_experts")
    asked = {"request_id": "no_experts", "routed_experts": True}
    problem = refused(EngineUnsupportedError, recording, EXPERTS, **asked)
    assert problem == sentence
    assert recording.sent == recording.body
    recording = recorded("text")
    assert refused(EngineUnsupportedError, recording, routed_experts=True) == sentence
    assert recording.sent is None


@pytest.mark.parametrize("start", [None, 0, 2, 3])
def test_router_choices_get_their_shape(start):
    first = start or 0
    rows = pybase64.b64encode(COUNTED[first:].tobytes()).decode()
    recording = recorded("text").changed(lambda answer: answer["meta_info"].update(routed_experts=rows))
    fields = {"routed_experts": True, "routed_experts_prompt_start": start}
    experts = replay(recording, EXPERTS, **fields).routed_experts
    assert recording.sent["routed_experts_start_len"] == first
    assert (experts.start, experts.shape) == (first, (ROWS - first, 3, 2))
    np.testing.assert_array_equal(experts.data, COUNTED[first:])


# --- errors and limits ---


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("error_object", 400, '{"error":{"message":"input_ids cannot be empty.'),
        ("error_text", 400, '{"error":"'),
        ("error_flat", 400, "1 validation error"),
        ("widened", 500, "Internal Server Error"),
    ],
)
def test_error_replies_have_four_shapes(name, status, says):
    caught = raised(EngineStatusError, replay, name)
    assert caught.status == status
    assert says in caught.body
    assert not SGLangBackend().is_overflow_error(caught)


EXPANDED = "Multimodal prompt is too long after expanding multimodal tokens. After expanding "
EXPANDED += "len(req.origin_input_ids_unpadded)=40 => 2100 >= 2042."
"""Read from SGLang's sources, for prompts whose images the scheduler widens."""


@pytest.mark.parametrize(
    ("name", "prompt_len", "max_prompt_len", "max_tokens"),
    [
        ("too_long_input", 2042, 2041, 1),
        ("too_long_context", 3000, 2047, 1),
        ("too_long_total", 2040, 2028, 20),
        ("image_too_long", 2050, 2047, 4),
        (EXPANDED, 2100, 2041, 4),
    ],
)
def test_overflow_replies(name, prompt_len, max_prompt_len, max_tokens):
    recording = recorded("too_long_input" if name is EXPANDED else name)
    if name is EXPANDED:
        recording.answer = {"error": {"message": EXPANDED}}
    sampling = {**GREEDY, "max_tokens": max_tokens}
    caught = raised(PromptTooLongError, replay, recording, sampling_params=sampling)
    assert (caught.prompt_len, caught.max_prompt_len) == (prompt_len, max_prompt_len)
    reply = caught.__cause__
    assert isinstance(reply, EngineStatusError)
    assert SGLangBackend().is_overflow_error(reply)
    assert SGLangBackend().is_overflow_error(caught)
    # The same text with another status is another matter.
    assert not SGLangBackend().is_overflow_error(EngineStatusError("x", status=500, body=reply.body))
    assert not SGLangBackend().is_overflow_error(EngineConnectionError("gone"))


def test_more_tokens_than_the_context_holds_are_the_parameters_fault(sentence):
    sampling = {**GREEDY, "max_tokens": 4000}
    assert refused(SamplingParameterError, "too_many_tokens", sampling_params=sampling) == sentence


def test_the_longest_prompt_is_one_less_than_the_servers_number():
    recording = recorded("server_info")
    assert recording.answer["max_req_input_len"] == 2042
    assert recording.limit(SGLangBackend()) == 2041
    for answer in ({}, {"max_req_input_len": None}):
        transport = MemoryTransport({"GET /server_info": Answer(answer)})
        assert asyncio.run(SGLangBackend().resolve_max_prompt_len("tiny", transport)) is None
