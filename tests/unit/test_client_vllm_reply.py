"""vLLM's answers, each form and each way to be wrong."""

import msgspec
import pytest

from kit import error_of
from mmrender.client.reply import FailedInEngineError
from mmrender.client.types import EngineRequest, Usage
from mmrender.client.vllm import read_reply
from mmrender.errors import EngineMismatchError, EngineReplyError
from mmrender.sidecar import MultiModalData, PlaceholderRange

WHERE = "http://server/inference/v1/generate"


def entry(token, logprob, **more):
    return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": [], **more}


def old_entry(token, logprob, *others):
    top = [{"token": f"token_id:{t}", "logprob": value, "bytes": None} for t, value in others]
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": top}


def reply(content=None, *, usage=None, **choice):
    content = [entry(7, -1.5), entry(8, -0.25)] if content is None else content
    fields = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 8],
        "logprobs": {"content": content},
        **choice,
    }
    return {"request_id": "generate-tokens-r", "usage": usage or {"prompt_tokens": 3}, "choices": [fields]}


def asked(**changes):
    fields = {"model": "m", "prompt_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9}, "request_id": "r"}
    return EngineRequest(**(fields | changes))


def read(answer, **changes):
    return read_reply(asked(**changes), msgspec.json.encode(answer), WHERE)


def test_both_shapes_of_logprobs_and_alternatives_are_the_same():
    assert read(reply()) == read(reply([old_entry(7, -1.5), old_entry(8, -0.25)]))
    sampling = {"max_tokens": 9, "logprobs": 2}
    tops = [{"token_id": 7, "logprob": -1.5, "rank": 1}, {"token_id": 2, "logprob": -2.0, "rank": 2}]
    new = reply([entry(7, -1.5, top_logprobs=tops), entry(8, -0.25)])
    old = reply([old_entry(7, -1.5, (7, -1.5), (2, -2.0)), old_entry(8, -0.25)])
    for answer in (new, old):
        response = read(answer, sampling_params=sampling)
        assert (response.completion_ids, response.logprobs) == ([7, 8], [-1.5, -0.25])
        assert response.top_logprobs == (((7, -1.5), (2, -2.0)), ())
    assert read(new).top_logprobs is None


def test_usage_and_a_reason_of_its_own(sentence):
    assert read(reply(finish_reason="repetition")).finish_reason == "stop"
    details = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    assert read(reply(usage=details)).usage == Usage(3, 2, 2)
    assert error_of(EngineMismatchError, read, reply(usage={"prompt_tokens": 4})) == sentence


def test_malformed_and_failed(sentence):
    nameless = reply([entry(7, -1.5), {"token": "ear", "logprob": -0.25}])
    assert error_of(EngineReplyError, read, nameless) == sentence
    versions = reply(weight_versions=[{"version": "a", "start": 0, "end": 3}])
    assert error_of(EngineReplyError, read, versions) == sentence
    # As vLLM 0.27 and 0.28 answer to a hash that they lack.
    answer = reply([], token_ids=[], finish_reason="error")
    assert error_of(FailedInEngineError, read, answer) == sentence


@pytest.mark.parametrize("other", [{"token": "ear", "logprob": -1.0}, {"token_id": 3}])
def test_malformed_alternatives(other, sentence):
    answer = reply([entry(7, -1.5, top_logprobs=[other]), entry(8, -0.25)])
    sampling = {"max_tokens": 9, "logprobs": 1}
    assert error_of(EngineReplyError, read, answer, sampling_params=sampling) == sentence


def widened(**members):
    data = MultiModalData(mm_placeholders={"image": [PlaceholderRange(1, 2)]})
    request = asked(prompt_ids=[1, 9, 9, 3], multi_modal_data=data)
    body = msgspec.json.encode({**reply(usage={"prompt_tokens": 4}), **members})
    return read_reply(request, body, WHERE, widened="anew")


def test_a_returned_prompt_that_is_ours():
    assert widened(prompt_token_ids=[1, 9, 9, 3], mm_placeholders={"image": [{"offset": 1, "length": 2}]})
    assert widened(prompt_token_ids=[1, 9, 9, 3])


@pytest.mark.parametrize("ids", [[1, 9, 3], [1, 9, 9], [1, 9, 9, 3, 3]])
def test_a_returned_prompt_that_is_another(ids, sentence):
    assert error_of(EngineMismatchError, widened, prompt_token_ids=ids) == sentence


def test_images_at_other_places_or_no_prompt_at_all():
    elsewhere = {"image": [{"offset": 2, "length": 1}]}
    with pytest.raises(EngineMismatchError, match="the server has the images at other places"):
        widened(prompt_token_ids=[1, 9, 9, 3], mm_placeholders=elsewhere)
    with pytest.raises(EngineMismatchError, match="the server saw another prompt"):  # which says what to do
        widened(prompt_token_ids=[1, 9, 3], mm_placeholders=elsewhere)
    assert "the reply lacks the server's prompt" in error_of(EngineReplyError, widened)
