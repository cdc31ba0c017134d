"""What vLLM 0.32 took and answered, replayed: our requests must be those, and its answers must be understood."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from kit import error_of, raised
from mmrender.client.server_facts import facts_of
from mmrender.client.types import Usage
from mmrender.client.vllm import VLLMBackend
from mmrender.client.vllm_images import GENERATE_PATH, RENDER_PATH
from mmrender.errors import EngineStatusError, EngineUnsupportedError, PromptTooLongError
from mmrender.renderer import Renderer
from mmrender.sidecar import MultiModalData
from mmrender.testing.memory_transport import Answer, MemoryTransport
from vllm_contract import (
    ALTERNATIVES,
    GREEDY,
    contract_request,
    digested,
    one_image,
    recorded,
    text_prompt,
    three_images,
)

BASE = "http://memory"
WHERE = f"{BASE}{GENERATE_PATH}"
THREE_TOKENS = SimpleNamespace(token_ids=[5, 6, 7], multi_modal_data=MultiModalData())


@pytest.fixture(scope="module")
def renderer(tiny_model):
    """As the recordings were made: with the default back end for images, which their hashes name."""
    return Renderer.from_pretrained(tiny_model)


def replaying(exchanges):
    """A server that answers as it did when it was recorded."""
    routes = {}
    for exchange in exchanges:
        answer = Answer(exchange["reply"], status=exchange["status"])
        path = exchange["path"].partition("?")[0]
        routes.setdefault(f"{exchange['method']} {path}", []).append(answer)
    return MemoryTransport(routes)


def replay(name, *works):
    """Make calls against a recording; the last one's result, after a look at what was sent."""
    exchanges = recorded(name)
    transport = replaying(exchanges)

    async def run():
        return [await work(transport) for work in works][-1]

    result = asyncio.run(run())
    # Recordings hold what an answer depends on, not the question which process answers.
    questions = [asked for asked in transport.asked if asked.path != "/metrics/"]
    assert [(asked.method, asked.path) for asked in questions] == [
        (exchange["method"], exchange["path"].partition("?")[0]) for exchange in exchanges
    ]
    for asked, exchange in zip(questions, exchanges, strict=True):
        assert digested(asked.json) == exchange["request"]
    return result


def by(backend, rendered, **options):
    return lambda way: backend.generate(contract_request(rendered, **options), way)


def answered(name, **sampling):
    """The backend's response to three tokens, with what the generate route answered in a recording."""
    (answer,) = (
        Answer(found["reply"], status=found["status"])
        for found in recorded(name)
        if found["path"] in (GENERATE_PATH, RENDER_PATH)
    )
    transport = MemoryTransport({f"POST {GENERATE_PATH}": answer})
    request = contract_request(THREE_TOKENS, sampling=sampling or None)
    return asyncio.run(VLLMBackend().generate(request, transport))


def choice_of(name):
    return recorded(name)[-1]["reply"]["choices"][0]


def assert_is(response, name, prompt_len):
    """A response is what the last answer of a recording says."""
    choice = choice_of(name)
    assert response.completion_ids == choice["token_ids"]
    entries, among = choice["logprobs"]["content"], [span.token_ids for span in response.allowed]
    if among:  # vLLM's are of all tokens, the response's of those that were allowed
        tops = [{top["token_id"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
        left = [np.logaddexp.reduce([top[token] for token in among[0]]) for top in tops]
        raw = [entry["logprob"] for entry in entries]
        assert response.logprobs == pytest.approx(np.subtract(raw, left).tolist(), abs=1e-6)
    else:
        assert response.logprobs == [entry["logprob"] for entry in entries]
    assert (response.finish_reason, response.stop_reason) == (choice["finish_reason"], choice["stop_reason"])
    assert response.usage == Usage(prompt_len, len(choice["token_ids"]))
    assert response.weight_versions == (("default", 0, len(choice["token_ids"])),)
    assert response.routed_experts is None
    assert response.request_id == "generate-tokens-contract"


def test_models():
    length = replay("models", lambda way: VLLMBackend().resolve_max_prompt_len("tiny", way))
    assert length == 2047


def test_text(renderer):
    prompt = text_prompt(renderer)
    response = replay("text", by(VLLMBackend(), prompt))
    assert_is(response, "text", len(prompt))
    assert response.top_logprobs is None
    response = replay("alternatives", by(VLLMBackend(), prompt, sampling=ALTERNATIVES))
    assert_is(response, "alternatives", len(prompt))
    entries = choice_of("alternatives")["logprobs"]["content"]
    for entry, others in zip(entries, response.top_logprobs, strict=True):
        assert others == tuple((other["token_id"], other["logprob"]) for other in entry["top_logprobs"])
        assert len(others) == 2


def test_stops(renderer):
    free = choice_of("text")["token_ids"]
    text = renderer.decode([free[2]])
    text = text.strip() or text
    for name, sampling, reason in (
        ("stop_token", {"stop_token_ids": [free[2]]}, free[2]),
        ("stop_text", {"stop": [text]}, text),
        ("stop_eos", {"allowed_token_ids": renderer.get_stop_token_ids()}, None),
    ):
        prompt = text_prompt(renderer)
        response = replay(name, by(VLLMBackend(), prompt, sampling={**GREEDY, **sampling}))
        assert_is(response, name, len(prompt))
        assert bool(response.allowed) == ("allowed_token_ids" in sampling)
        assert (response.finish_reason, response.stop_reason) == ("stop", reason)


@pytest.mark.parametrize(
    ("name", "prompt_of", "images"),
    [
        ("features", one_image, "features"),
        ("features_floats", one_image, "features"),
        ("content_parts", one_image, "content_parts"),
        ("content_parts_three", three_images, "content_parts"),
    ],
)
def test_images(renderer, name, prompt_of, images):
    prompt = prompt_of(renderer)
    assert_is(replay(name, by(VLLMBackend(images=images), prompt)), name, len(prompt))


def test_an_encoded_image_is_named_by_its_uuid_the_second_time(renderer):
    backend, prompt = VLLMBackend(images="content_parts"), three_images(renderer)
    response = replay("content_parts_named", by(backend, prompt), by(backend, prompt))
    assert_is(response, "content_parts_named", len(prompt))
    first, second = (exchange["request"]["content_parts"] for exchange in recorded("content_parts_named"))
    assert ["url" in part for part in (*first, *second)] == [True] * 3 + [False] * 3


def test_hashes_alone_go_the_second_time_and_only_to_a_server_with_a_cache(renderer):
    backend, prompt = VLLMBackend(images="hash_only"), three_images(renderer)
    assert_is(replay("hash_hit", by(backend, prompt), by(backend, prompt)), "hash_hit", len(prompt))
    prompt = one_image(renderer, seed=5)

    async def work(way):
        (digest,) = prompt.multi_modal_data.mm_hashes["image"]
        facts_of(way).hashes.put(f"{digest}-uint8", True)
        return await VLLMBackend(images="hash_only").generate(contract_request(prompt), way)

    assert_is(replay("hash_miss", work), "hash_miss", len(prompt))
    with pytest.raises(EngineUnsupportedError, match="got its processor cache is off"):
        replay("hash_refused", by(VLLMBackend(images="hash_only"), one_image(renderer)))


@pytest.mark.parametrize(
    ("name", "length"), [("context", 3000), ("no_room", 2048), ("no_max_tokens", 3000), ("chat", 2049)]
)
def test_overflow(name, length):
    caught = raised(PromptTooLongError, answered, f"refused_overflow_{name}")
    assert (caught.prompt_len, caught.max_prompt_len) == (length, 2047)
    assert caught.where == WHERE
    assert VLLMBackend().is_overflow_error(caught)
    assert VLLMBackend().is_overflow_error(caught.__cause__)


REFUSALS = {
    "unknown_model": (404, "The model `other` does not exist."),
    "negative_id": (400, "token_ids must not contain negative values"),
    "outside_vocabulary": (400, "Token id 5000 is out of vocabulary"),
    "no_tokens": (400, "List should have at least 1 item"),
    "temperature": (400, "temperature must be non-negative"),
    "logprobs": (400, "Requested sample logprobs of 30, which is greater than max allowed: 20"),
    "empty_salt": (400, "'cache_salt' must be a non-empty string"),
    "part_nested": (400, "multi_modal_data['image'][0] is empty"),
    "part_no_image": (400, "Failed to load image"),
    "part_unknown_uuid": (400, "Cache miss for image at index 0"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_other_refusals_keep_the_servers_words(name):
    status, words = REFUSALS[name]
    caught = raised(EngineStatusError, answered, f"refused_{name}")
    assert caught.status == status
    assert words in caught.body
    assert not VLLMBackend().is_overflow_error(caught)


def test_an_aborted_request_and_weight_versions():
    response = answered("aborted", max_tokens=1900)
    assert response.finish_reason == "abort"
    assert len(response.completion_ids) == len(response.logprobs) < 1900
    response = answered("weight_versions", max_tokens=1900)
    first, second = response.weight_versions
    assert (first.start, second.version, second.stop) == (0, "step-7", len(response.completion_ids))
    assert 0 < first.stop == second.start < second.stop


def test_routes_that_are_closed(renderer, sentence):
    text, image = text_prompt(renderer), one_image(renderer)
    for name, work in {
        "closed_generate": by(VLLMBackend(), text),
        "closed_render": by(VLLMBackend(images="features"), image),
        "closed_info": by(VLLMBackend(images="hash_only", pixels="uint8"), image),
    }.items():
        assert error_of(EngineUnsupportedError, replay, name, work) == sentence
