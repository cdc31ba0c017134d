"""`SGLangBackend` against a running SGLang: run by `make integration-sglang`.

One server does for all; the last test ends it by force.
"""

from itertools import pairwise

import numpy as np
import pytest

from integration.engine_checks import (
    GREEDY,
    LONG,
    MODEL,
    ask,
    ask_directly,
    assert_death,
    assert_logprobs,
    assert_overflow,
    assert_reference,
    assert_stops_and_alternatives,
    cancelled,
    chat_answer,
    connected,
    conversations,
    interrupted,
    picture,
    reference_logprobs,
    reference_model,
    request_of,
    rolled_out,
    until,
    user,
    with_settings,
)
from integration.engine_server import needs_tier
from integration.sglang_server import start_sglang
from mmrender.client.sglang import SGLangBackend
from mmrender.errors import (
    EngineMismatchError,
    EngineTimeoutError,
    EngineUnsupportedError,
    PromptTooLongError,
    SamplingParameterError,
)

pytestmark = needs_tier("sglang")

BACKEND = SGLangBackend()
CONTEXT = 2048
LONGEST = 2041  # of a context of 2048, seen on the running server


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with start_sglang(tiny_model, log=tmp_path_factory.mktemp("sglang") / "server.log") as server:
        yield server


def runs(server, count: int):
    return lambda: server.get("/v1/loads")["loads"][0]["num_running_reqs"] == count


@pytest.mark.parametrize("name", list(conversations()))
def test_logprobs_equal_the_chat_route_and_transformers(server, renderer, tiny_model, name):
    messages = conversations()[name]
    chat = chat_answer(server, messages, max_tokens=12)
    theirs = chat["choices"][0]["logprobs"]["content"]
    generation = ask(server, renderer, backend=BACKEND, messages=messages)
    assert len(generation.prompt_ids) == chat["usage"]["prompt_tokens"]
    assert [renderer.decode([token]) for token in generation.completion_ids] == [e["token"] for e in theirs]
    assert_logprobs(generation.logprobs, chat)
    assert generation.finish_reason == "length"
    assert generation.usage.completion_tokens == 12
    assert_reference(tiny_model, generation)


def test_a_bridged_rollout_with_an_image_a_turn(server, renderer, tiny_model):
    sampling = {"temperature": 1.0, "max_tokens": 10}
    # Without a seed some run would sample a pad token, which is text to SGLang, and an image to Transformers.
    turns, _ = rolled_out(
        server, renderer, tiny_model, backend=BACKEND, sampling_params=sampling, forbid_media_tokens=True
    )
    # The server keeps what it has seen of a prompt; a later turn is served from there up to its images.
    assert turns[-1].usage.cached_tokens > 0


def test_logprobs_are_those_of_the_distribution_at_its_temperature(server, renderer, tiny_model):
    """As the guide says: not those of the model's own distribution, which vLLM reports."""
    messages = conversations()["text"]
    sampling = {"temperature": 0.5, "max_tokens": 12, "logprobs": 0}
    call = {"backend": BACKEND, "messages": messages, "sampling_params": sampling}
    drawn = (ask(server, renderer, **call) for _ in range(20))
    pad = renderer.tokenizer.token_id("<|image_pad|>")  # text to SGLang, and an image to Transformers
    generation = next(each for each in drawn if pad not in each.completion_ids)
    plain = reference_logprobs(
        tiny_model, generation.prompt_ids, generation.completion_ids, generation.multi_modal_data
    )
    assert np.abs(np.array(generation.logprobs) - plain).max() > 0.1
    scaled = at_temperature(tiny_model, generation, 0.5)
    np.testing.assert_allclose(generation.logprobs, scaled, rtol=0, atol=3e-2)


def at_temperature(directory, generation, temperature: float) -> np.ndarray:
    import torch

    ids = torch.tensor([[*generation.prompt_ids, *generation.completion_ids]])
    with torch.inference_mode():
        logits = reference_model(directory)(input_ids=ids).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    start = len(generation.prompt_ids)
    return logprobs[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].numpy()


def test_overflow_before_and_after_sending(server, renderer):
    assert_overflow(server, renderer, BACKEND, LONGEST, told=CONTEXT - 1)


def test_an_image_that_makes_the_prompt_too_long(server, renderer):
    rendered = renderer.render([user("Look.", picture(3, 160, 160))], add_generation_prompt=True)
    ids = [*rendered.token_ids, *[5] * (LONGEST + 1 - len(rendered))]
    with pytest.raises(PromptTooLongError) as caught:
        ask(
            server,
            renderer,
            backend=BACKEND,
            prompt_ids=ids,
            multi_modal_data=rendered.multi_modal_data,
            sampling_params={"max_tokens": 1},
            max_prompt_len=100_000,
        )
    # What was sent, with its placeholder once, was not too long.
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (LONGEST + 1, LONGEST)


def test_the_longest_prompt_and_what_is_cut_of_max_tokens(server, caplog):
    assert connected(server, lambda way: BACKEND.resolve_max_prompt_len(MODEL, way)) == LONGEST

    def sample(length, max_tokens, **sampling):
        sampling = {**GREEDY, "max_tokens": max_tokens, **sampling}
        return ask_directly(server, BACKEND, [5] * length, sampling_params=sampling)

    kept = sample(LONGEST, 5, ignore_eos=True)
    assert (len(kept.completion_ids), caplog.text) == (5, "")
    cut = sample(LONGEST, 7, ignore_eos=True)
    assert len(cut.completion_ids) == 5
    assert "SGLang cut max_tokens from 7 to 5" in caplog.text
    with pytest.raises(PromptTooLongError) as caught:
        sample(LONGEST + 1, 1)
    assert caught.value.max_prompt_len == LONGEST
    with pytest.raises(PromptTooLongError) as caught:
        sample(2040, 20)
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (2040, CONTEXT - 20)
    with pytest.raises(SamplingParameterError, match=r"max_tokens.*at most 2045, got 4000"):
        sample(3, 4000)


def test_another_processor_is_found_by_the_prompt_that_comes_back(server, tiny_model, tmp_path):
    size = {"shortest_edge": 64 << 10, "longest_edge": 4 << 20}
    other = with_settings(tiny_model, tmp_path / "larger", size=size)
    with pytest.raises(
        EngineMismatchError, match=r"prompt_token_ids\[\d+\] \(image 0\): the server saw another"
    ):
        ask(server, other, backend=BACKEND, messages=[user("How large?", picture(5, 900, 700))])


def test_stops_and_alternatives(server):
    assert_stops_and_alternatives(server, BACKEND)


def test_a_cancelled_call_ends_on_the_server(server, renderer):
    async def work(way):
        await cancelled(way, renderer, BACKEND, runs(server, 1))
        # By itself the server notices a disconnect some seconds later.
        await until(runs(server, 0), seconds=1.5)

    connected(server, work)


def test_a_call_that_times_out_ends_on_the_server(server):
    async def work(way):
        with pytest.raises(EngineTimeoutError):
            await BACKEND.generate(request_of([5, 6, 7], sampling_params=LONG), Hasty(way))
        await until(runs(server, 0), seconds=1.5)

    connected(server, work)


class Hasty:
    """A transport that waits for an answer for a second only."""

    def __init__(self, way):
        self._way = way
        self.base_url = way.base_url

    async def request(self, method, path, *, timeout=None, **options):
        return await self._way.request(method, path, timeout=timeout or 1.0, **options)


def test_an_aborted_request_gives_what_it_has(server):
    response = interrupted(server, BACKEND, runs(server, 1), {"/abort_request": {"rid": "direct"}})
    assert response.finish_reason == "abort"
    assert response.request_id == "direct"
    assert len(response.completion_ids) == len(response.logprobs) < 1900


def test_weight_versions_are_spans_of_the_completion(server):
    change = {"/update_weight_version": {"new_version": "step-7", "abort_all_requests": False}}
    spans = interrupted(server, BACKEND, runs(server, 1), change, max_tokens=800).weight_versions
    assert (spans[0].start, spans[-1].version, spans[-1].stop) == (0, "step-7", 800)
    assert all(before.stop == after.start for before, after in pairwise(spans))


def test_seeds_are_refused_since_this_server_ignores_them(server):
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 7}
    with pytest.raises(SamplingParameterError, match="SGLang ignores seeds unless"):
        ask_directly(server, BACKEND, [5, 6], sampling_params=sampling)
    seeded = SGLangBackend(deterministic=True)
    answers = [ask_directly(server, seeded, [5, 6], sampling_params=sampling) for _ in range(4)]
    assert len({tuple(answer.completion_ids) for answer in answers}) > 1


def test_router_choices_of_a_model_without_experts(server):
    with pytest.raises(EngineUnsupportedError, match="without their shape"):
        ask_directly(server, BACKEND, [5, 6], routed_experts=True)
    with pytest.raises(EngineUnsupportedError, match="the server sends none"):
        ask_directly(server, SGLangBackend(routed_experts_shape=(2, 2)), [5, 6], routed_experts=True)


def test_priority_and_salt_are_taken(server):
    response = ask_directly(server, BACKEND, [5, 6, 7], priority=3, cache_salt="one")
    assert response.usage.cached_tokens == 0


def test_a_server_that_dies(server, renderer):
    """Last, since it ends the server."""
    assert_death(server, renderer, BACKEND, runs(server, 1))
