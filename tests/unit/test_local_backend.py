"""The model in this process: what it samples, what it reports, and what it refuses."""

import asyncio
import gc
import pickle
import threading
import time
import weakref
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import error_of, media_inputs, raised, until
from mmrender.client.decoding import Completion
from mmrender.client.local import LocalBackend
from mmrender.client.resolve import resolve_backend
from mmrender.client.token_sampler import TokenSampler
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, RendererBackend
from mmrender.errors import (
    EngineReplyError,
    EngineStateError,
    EngineUnsupportedError,
    InputError,
    MMRenderError,
    ModelError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.model.tokenizer import Tokenizer
from mmrender.model.weights import load_model
from mmrender.testing.demo import shipped_pictures

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def backend(tiny_model):
    return LocalBackend(tiny_model)


def prompt_of(renderer, *parts):
    kinds = ["text" if isinstance(part, str) else "image" for part in parts]
    content = [{"type": kind, kind: part} for kind, part in zip(kinds, parts, strict=True)]
    return renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.fixture(scope="module")
def prompts(renderer):
    photo, chart = (picture.resize((160, 128)) for picture in shipped_pictures())
    return {
        "text": prompt_of(renderer, "What stands on the beach?"),
        "image": prompt_of(renderer, photo, "Which animal is this?"),
        "images": prompt_of(renderer, "First", photo, chart, "and again", photo),
    }


def request(prompt, request_id="r", **sampling):
    params = {"max_tokens": 12, "seed": 7, **sampling}
    return EngineRequest("tiny", prompt.token_ids, params, request_id, prompt.multi_modal_data)


def generate(backend, *requests):
    async def together():
        return await asyncio.gather(*[backend.generate(each) for each in requests])

    found = asyncio.run(together())
    return found[0] if len(requests) == 1 else found


def only(text):
    """Parameters that let the model say this text alone."""
    return {"structured_outputs": {"choice": [text]}}


def plain_logprobs(backend, prompt, completion):
    """The reference: one forward of everything, nothing cached."""
    ids = [*prompt.token_ids, *completion]
    media = media_inputs(prompt.multi_modal_data, len(ids)) if prompt.multi_modal_data else {}
    with torch.inference_mode():
        logits = backend.model(input_ids=torch.tensor([ids]), **media).logits[0]
    rows = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    return rows[range(len(completion)), completion]


def test_it_is_a_backend_without_a_server_and_needs_a_model(backend, tmp_path):
    assert isinstance(backend, RendererBackend)
    assert isinstance(backend.transport, Transport)
    assert backend.name == "local"
    with pytest.raises(EngineUnsupportedError, match=r"^GET /health: a model in this process has no server$"):
        asyncio.run(backend.transport.request("GET", "/health"))
    with pytest.raises(ModelError, match="Transformers cannot load the model"):
        asyncio.run(LocalBackend(tmp_path).resolve_max_prompt_len("x"))
    with pytest.raises(
        InputError, match=r"^max_model_len: is out of range - expected a whole number, 1 or more, got 0$"
    ):
        LocalBackend(tmp_path, max_model_len=0)


@pytest.mark.parametrize("kind", ["text", "image", "images"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.3}])
def test_logprobs_are_those_of_a_plain_forward(backend, prompts, kind, sampling):
    response = generate(backend, request(prompts[kind], **sampling))
    expected = plain_logprobs(backend, prompts[kind], response.completion_ids)
    assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        len(prompts[kind]),
        len(response.completion_ids),
    )


def mixed_requests(prompts, renderer):
    """Requests with different prompts, lengths and constraints, each of a seed of its own."""
    letters = [renderer.tokenizer.encode(letter)[0] for letter in "ABCDEF"]
    kinds = [
        {},
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
        {"allowed_token_ids": letters, "max_tokens": 3},
        {"structured_outputs": {"choice": ["left", "right side"]}},
    ]
    pairs = [(prompt, sampling) for prompt in prompts.values() for sampling in kinds]
    return [
        request(prompt, f"r{number}", seed=number, **sampling)
        for number, (prompt, sampling) in enumerate(pairs)
    ]


def test_a_seed_decides_whatever_else_runs(tiny_model, prompts, renderer):
    backend, requests = LocalBackend(tiny_model), mixed_requests(prompts, renderer)
    alone = {each.request_id: generate(backend, each) for each in requests}

    @settings(max_examples=5)
    @given(st.lists(st.sampled_from(requests), min_size=2, max_size=12, unique_by=lambda one: one.request_id))
    def batches_agree(batch):
        for found in generate(backend, *batch):
            expected = alone[found.request_id]
            # Of other batches, logits differ by rounding.
            assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
            assert len(found.top_logprobs or ()) == len(expected.top_logprobs or ())
            same = {"logprobs": [], "top_logprobs": None}
            assert replace(found, **same) == replace(expected, **same)

    batches_agree()
    assert len({tuple(response.completion_ids) for response in alone.values()}) > len(alone) / 2
    first, second = (generate(backend, request(prompts["text"], seed=None)) for _ in range(2))
    assert first.completion_ids != second.completion_ids


def test_a_prompt_is_prefilled_once_and_alike_ones_share_a_forward(tiny_model, renderer):
    pictures = [picture.resize((96, 96)) for picture in shipped_pictures()]

    boards = [prompt_of(renderer, picture, "Which?") for picture in pictures]
    other = prompt_of(renderer, "Hello")
    backend = LocalBackend(tiny_model)
    stop = renderer.get_stop_token_ids()[0]
    requests = [
        # The first of each group ends at once, and the others go on.
        request(board, f"{index}-{seed}", seed=seed, logit_bias={stop: 100 * (seed == 0) - 50})
        for index, board in enumerate(boards)
        for seed in range(4)
    ]
    seen, _ = watched(backend)
    # The first request of all keeps the worker busy until the others have come.
    generate(backend, request(other, "first", max_tokens=4, ignore_eos=True), *requests)
    prefills = [shape for shape in seen if shape[1] > 1]
    assert sorted(prefills) == sorted([(1, len(other)), (len(boards), len(boards[0]))])
    # Of 4 in each group, 3 go on to 12 tokens, beside the first request if they came together.
    assert seen.count((6, 1)) + seen.count((7, 1)) == 11


def watched(backend, before=lambda count: None):
    """Shapes of the ids of each forward, and a call before each; `handle.remove()` ends it."""
    seen = []

    def look(_, __, named):
        seen.append(tuple(named["input_ids"].shape))
        before(len(seen))

    return seen, backend.model.register_forward_pre_hook(look, with_kwargs=True)


def test_requests_of_any_length_join_what_runs_at_its_next_token(tiny_model, prompts):
    backend = LocalBackend(tiny_model)
    endless = {"ignore_eos": True, "temperature": 0.8}
    first = request(prompts["images"], "first", **endless)
    late = [
        request(prompts["text"], "text", **endless | {"max_tokens": 4}),
        request(prompts["image"], "image", **endless),
    ]
    alone = {each.request_id: generate(backend, each) for each in (first, *late)}

    async def together():
        loop, calls = asyncio.get_running_loop(), []

        def arrive(count):
            if count == 3:  # the second token after the prompt's is computed
                loop.call_soon_threadsafe(
                    lambda: calls.extend(asyncio.ensure_future(backend.generate(each)) for each in late)
                )
                for _ in range(3000):
                    if len(backend._waiting) == len(late):
                        return
                    time.sleep(0.01)

        seen, handle = watched(backend, arrive)
        found = [await backend.generate(first)]
        found += await asyncio.gather(*calls)
        handle.remove()
        return seen, found

    seen, found = asyncio.run(together())
    lengths = {name: len(prompt) for name, prompt in prompts.items()}
    assert seen == [
        *[(1, lengths["images"]), (1, 1), (1, 1)],
        *[(1, lengths["text"]), (1, lengths["image"])],
        *[(3, 1)] * 3,  # until the text's four tokens are there
        *[(2, 1)] * 6,  # until the first's twelve are
        *[(1, 1)] * 2,
    ]
    for response in found:
        expected = alone[response.request_id]
        assert response.completion_ids == expected.completion_ids
        assert response.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_no_more_run_at_once_than_are_allowed(tiny_model, prompts):
    backend = LocalBackend(tiny_model, max_batch_size=2)
    seen, handle = watched(backend)
    requests = [
        request(prompts["text"], str(number), max_tokens=2 + number, ignore_eos=True) for number in range(5)
    ]
    found = generate(backend, *requests)
    handle.remove()
    assert [len(each.completion_ids) for each in found] == [2, 3, 4, 5, 6]
    assert max(rows for rows, _ in seen) <= 2
    # A place is taken as soon as it is free: the third begins when the first has ended.
    assert len([shape for shape in seen if shape == (2, 1)]) >= 5


def test_a_model_that_is_closed_or_dropped_is_freed(tiny_model, tmp_path, prompts):
    (name := tmp_path / "model").symlink_to(tiny_model)  # no other test has opened it by this name
    named = resolve_backend("local", str(name))
    assert resolve_backend("local", str(name)) is named
    model = weakref.ref(named.model)
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("mmrender-local")}
    generate(named, request(prompts["text"]))
    named._worker.submit(int).result()  # its thread has left the model
    (worker,) = (
        each
        for each in threading.enumerate()
        if each.name.startswith("mmrender-local") and each not in threads
    )
    for number in range(3):  # the newest is kept for the next call that names it, and one that a client holds
        resolve_backend("local", str(tmp_path / str(number)))
        assert (resolve_backend("local", str(name)) is named) == (number < 3)
    resolve_backend("local", str(tmp_path))
    del named
    gc.collect()
    assert model() is None
    worker.join(60)
    assert not worker.is_alive()

    async def closing():
        backend = LocalBackend(tiny_model)
        task = asyncio.ensure_future(backend.generate(request(prompts["text"], **ENDLESS)))
        await until(lambda: backend._running)
        model = weakref.ref(backend.model)
        await backend.aclose()
        await backend.aclose()
        assert (await task).finish_reason == "abort"
        gc.collect()
        assert model() is None
        with pytest.raises(EngineStateError, match=r"^local: the backend is closed\. Make another one$"):
            await backend.generate(request(prompts["text"]))
        assert "the backend is closed" in error_of(EngineStateError, backend.update_weights, [], "1")

    asyncio.run(closing())


async def test_requests_that_have_ended_are_freed_while_others_run(tiny_model, prompts, monkeypatch):
    backend, alive, counts = LocalBackend(tiny_model), weakref.WeakSet(), []

    def watched(*args):
        alive.add(completion := Completion(*args))
        return completion

    monkeypatch.setattr("mmrender.client.local.Completion", watched)
    running = asyncio.ensure_future(backend.generate(request(prompts["text"], "long", **ENDLESS)))
    for number in range(4):
        await backend.generate(request(prompts["text"], str(number), max_tokens=2))
        gc.collect()
        counts.append((len(alive), backend._worker._work_queue.qsize()))
    assert not running.done()
    backend.abort("long")
    await running
    assert max(counts) <= (2, 1)  # the long one and perhaps the last short one
    assert max(queued for _, queued in counts) <= 1


def test_what_cannot_be_padded_runs_apart_and_is_said_why(tiny_model, prompts, monkeypatch):
    from mmrender.client import decoding

    monkeypatch.setattr(decoding, "_JOINED_LAYERS", frozenset())
    backend = LocalBackend(tiny_model)
    requests = [request(prompt, name, ignore_eos=True) for name, prompt in prompts.items()]
    alone = [generate(backend, each) for each in requests]
    seen, handle = watched(backend)
    with pytest.warns(
        RuntimeWarning, match="sequences of other prompts run apart - got a cache with a DynamicLayer"
    ):
        together = generate(backend, *requests)
    handle.remove()
    assert together == alone
    assert seen.count((1, 1)) == 3 * 11


def test_alternatives_are_reported_likeliest_first(backend, prompts):
    response = generate(backend, request(prompts["image"], temperature=0, logprobs=3))
    sampled = zip(response.completion_ids, response.logprobs, strict=True)
    assert [top[0] for top in response.top_logprobs] == list(sampled)
    assert {len(top) for top in response.top_logprobs} == {3}
    assert generate(backend, request(prompts["image"], top_k=1)).completion_ids == response.completion_ids


def test_ends_of_a_completion(backend, prompts, renderer):
    def ending(token, **sampling):
        response = generate(backend, request(prompts["text"], logit_bias={token: 99}, **sampling))
        return response.completion_ids, response.finish_reason, response.stop_reason

    stop, other = renderer.get_stop_token_ids()
    assert ending(stop) == ([stop], "stop", None)
    assert ending(60, stop_token_ids=[60]) == ([60], "stop", 60)
    assert ending(61) == ([61] * 12, "length", None)
    assert ending(0) == ([0] * 12, "length", None)
    assert ending(other, ignore_eos=True) == ([other] * 12, "length", None)
    late, *_ = ending(stop, min_tokens=3)
    assert len(late) == 4
    assert late[-1] == stop not in late[:-1]


def test_one_of_the_choices(backend, prompts, renderer):
    choices = ["left", "right", '<tool_call>\n{"name": "zoom"}\n</tool_call>']
    seen = set()
    guided = {"structured_outputs": {"choice": choices}, "temperature": 2, "max_tokens": 64}
    for seed in range(16):
        response = generate(backend, request(prompts["image"], seed=seed, **guided))
        assert response.finish_reason == "stop"
        assert response.completion_ids[-1] in renderer.get_stop_token_ids()
        seen.add(renderer.decode(response.completion_ids[:-1]))
        assert max(response.logprobs) <= 0
    assert seen == set(choices)
    without_stops = generate(backend, request(prompts["text"], **only("left"), ignore_eos=True))
    assert renderer.decode(without_stops.completion_ids) == "left"
    assert without_stops.finish_reason == "stop"


def test_a_choice_may_begin_another():
    guide = TokenSampler({}, [0], frozenset({9}), [[1, 2], [1, 2, 3], [4]])
    steps = []
    for token in (1, 2, 9):
        steps.append(guide.following())
        guide.tokens.append(token)
    assert [*steps, guide.following()] == [[1, 4], [2], [3, 9], []]


def test_the_bounds_of_a_prompt(tiny_model, prompts):
    prompt = prompts["text"]
    small = LocalBackend(tiny_model, max_model_len=len(prompt) + 3)
    assert asyncio.run(small.resolve_max_prompt_len("tiny")) == len(prompt) + 2
    full = generate(small, request(prompt, ignore_eos=True))
    assert (len(full.completion_ids), full.finish_reason) == (3, "length")
    tight = LocalBackend(tiny_model, max_model_len=len(prompt))
    refused = raised(PromptTooLongError, generate, tight, request(prompt))
    assert (refused.prompt_len, refused.max_prompt_len) == (len(prompt), len(prompt) - 1)
    assert tight.is_overflow_error(refused)
    assert not tight.is_overflow_error(ValueError("no"))
    assert asyncio.run(LocalBackend(tiny_model).resolve_max_prompt_len("tiny")) == 8191


@pytest.mark.parametrize("kind", ["text", "image"])
def test_a_sampled_pad_token_is_an_ordinary_token(backend, prompts, renderer, kind):
    prompt = prompts[kind]
    pad = renderer.tokenizer.token_id("<|image_pad|>")
    # Decoding knows no placeholders, so it shows what the model computes after such a token.
    decoded = generate(backend, request(prompt, logit_bias={pad: 99}, max_tokens=2))
    assert decoded.completion_ids == [pad] * 2
    longer = replace(prompt, token_ids=[*prompt.token_ids, pad])
    prefilled = generate(backend, request(longer, logit_bias={pad: 99}, max_tokens=1))
    assert prefilled.logprobs[0] == pytest.approx(decoded.logprobs[1], abs=1e-4)


async def test_the_loop_is_free_and_hears_of_each_token(backend, prompts):
    heard, go_on = [], threading.Event()
    _, handle = watched(backend, lambda count: count < 3 or go_on.wait(60))
    asked = request(prompts["image"], max_tokens=40)
    task = asyncio.ensure_future(backend.generate(asked, on_tokens=lambda *told: heard.append(told)))
    await until(lambda: heard)  # while the third token waits for this loop
    assert not task.done()
    go_on.set()
    response = await task
    handle.remove()
    assert [token for ids, _, _ in heard for token in ids] == response.completion_ids
    assert [logprob for _, logprobs, _ in heard for logprob in logprobs] == response.logprobs
    assert [reason for _, _, reason in heard][-2:] == [None, response.finish_reason]


ENDLESS = {"ignore_eos": True, "max_tokens": 8000}


def test_cancelling_ends_the_work(tiny_model, prompts):
    backend = LocalBackend(tiny_model)

    async def cancel():
        endless = [request(prompts["text"], str(number), **ENDLESS) for number in range(4)]
        tasks = [asyncio.ensure_future(backend.generate(each)) for each in endless]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        # Its one thread is free again: beside rows that are still ending, logprobs would be rounded otherwise.
        await asyncio.wrap_future(backend._worker.submit(int))
        return await backend.generate(request(prompts["text"], "after"))

    assert asyncio.run(cancel()) == replace(generate(backend, request(prompts["text"])), request_id="after")
    assert backend.abort_all() == 0


async def test_aborting_gives_what_there_is_and_frees_the_id(backend, prompts):
    endless = request(prompts["text"], "long", **ENDLESS)
    task = asyncio.ensure_future(backend.generate(endless))
    await until(lambda: "long" in backend._running)
    with pytest.raises(EngineStateError, match=r"^long: a request of this id is in flight$"):
        await backend.generate(endless)
    while not backend.abort("long"):
        await asyncio.sleep(0.01)
    response = await task
    assert response.finish_reason == "abort"
    assert len(response.completion_ids) == len(response.logprobs) < 8000
    assert not backend.abort("long")


def test_weights_that_change_on_the_way(tiny_model, prompts):
    backend = LocalBackend(tiny_model, weight_version="step-1")
    before = generate(backend, request(prompts["text"]))
    assert before.weight_versions == (("step-1", 0, 12),)
    head = {"lm_head.weight": backend.model.lm_head.weight.detach().flip(0)}

    async def change():
        heard, endless = [], request(prompts["text"], **ENDLESS)
        task = asyncio.ensure_future(backend.generate(endless, on_tokens=lambda ids, *_: heard.extend(ids)))
        await until(lambda: heard)
        await asyncio.to_thread(backend.update_weights, head.items(), "step-2")
        enough = len(heard) + 3
        await until(lambda: len(heard) > enough)
        backend.abort("r")
        return await task

    spans = asyncio.run(change()).weight_versions
    cut = spans[0].stop
    assert [span[:2] for span in spans] == [("step-1", 0), ("step-2", cut)]
    assert generate(backend, request(prompts["text"])).completion_ids != before.completion_ids
    for name, message in [
        ("nothing.weight", r"^nothing\.weight: the model does not have this parameter$"),
        ("lm_head.weight", "the parameter has another shape"),
    ]:
        with pytest.raises(ModelError, match=message):
            backend.update_weights([(name, torch.zeros(1, 1))], "step-3")
    assert backend.weight_version == "step-2"


def test_it_is_sent_with_its_tokenizer_unless_around_a_loaded_model(backend, prompts, tiny_model, renderer):
    around, arrived = LocalBackend(backend.model), pickle.loads(pickle.dumps(backend))
    expected = generate(backend, request(prompts["image"]))
    assert [generate(each, request(prompts["image"])) for each in (arrived, around)] == [expected] * 2
    assert "around a loaded model cannot be sent" in error_of(EngineStateError, pickle.dumps, around)
    with pytest.raises(SamplingParameterError, match="texts cannot be followed without a tokenizer"):
        generate(around, request(prompts["text"], **only("a")))
    engine = tokenizers.Tokenizer.from_file(f"{tiny_model}/tokenizer.json")
    engine.normalizer = tokenizers.normalizers.Lowercase()
    arrived = pickle.loads(pickle.dumps(LocalBackend(tiny_model, tokenizer=Tokenizer(engine))))
    guided = request(prompts["text"], **only("LEFT"), max_tokens=8)
    assert renderer.decode(generate(arrived, guided).completion_ids[:-1]) == "left"


REFUSED = {
    "unknown stop token": {"sampling": {"stop_token_ids": [1, 5000]}},
    "regular expression": {"sampling": {"structured_outputs": {"regex": "a+"}}},
    "no budget": {"sampling": {"max_tokens": None}},
    "bad words": {"sampling": {"bad_words": ["no"]}},
    "no token allowed": {"sampling": {"max_tokens": 9, "min_tokens": 1, "allowed_token_ids": "the stop tokens"}},
    "unknown token": {"prompt_ids": [1, 2, 1024]},
    "images elsewhere": {"multi_modal_data": "shifted"},
    "routed experts": {"routed_experts": True},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_are_refused(backend, prompts, renderer, case, sentence):
    prompt, change = prompts["image"], dict(REFUSED[case])
    sampling = dict(change.pop("sampling", {}))
    if "allowed_token_ids" in sampling:
        sampling["allowed_token_ids"] = renderer.get_stop_token_ids()
    if "multi_modal_data" in change:
        change["multi_modal_data"] = prompt.multi_modal_data.shifted(1)
    error = raised(MMRenderError, generate, backend, replace(request(prompt, **sampling), **change))
    assert f"{type(error).__name__}: {error}" == sentence


def test_logits_that_are_not_numbers_are_said_to_be(tiny_model, prompts):
    backend = LocalBackend(load_model(tiny_model, "float32", "cpu", purpose="a test"))
    with torch.no_grad():
        backend.model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(EngineReplyError, match=r"returned NaN as a logit .* NaN for 1 of "):
        generate(backend, request(prompts["text"], max_tokens=2))


def test_a_request_that_fails_leaves_others_alone(tiny_model, prompts):
    def refuse(_, __, arguments):
        if arguments["input_ids"].shape[1] == len(prompts["image"]):
            raise RuntimeError("no images")

    backend = LocalBackend(load_model(tiny_model, "float32", "cpu", purpose="a test"))
    backend.model.register_forward_pre_hook(refuse, with_kwargs=True)
    good, image = request(prompts["text"], "good"), request(prompts["image"], "image")
    unchecked = request(prompts["text"], "unchecked", temperature="hot")
    unsampled = replace(request(prompts["text"], "unsampled"), forbidden_token_ids=[1 << 40])

    async def together():
        calls = [backend.generate(each) for each in (image, unchecked, unsampled, good)]
        return await asyncio.gather(*calls, return_exceptions=True)

    *failed, response = asyncio.run(together())
    assert [type(error).__name__ for error in failed] == [
        "RuntimeError",
        "SamplingParameterError",
        "IndexError",
    ]
    assert response == generate(LocalBackend(tiny_model), good)


def test_processed_logprobs_are_of_the_distribution_that_was_sampled_from(backend, prompts):
    """At the temperature and among the `top_k` of the request, computed from the logits themselves."""
    settings = {"temperature": 0.5, "top_k": 5, "seed": 3, "max_tokens": 4}
    model = backend.model
    response = generate(LocalBackend(model, processed_logprobs=True), request(prompts["text"], **settings))
    ids = list(prompts["text"].token_ids)
    for token, logprob in zip(response.completion_ids, response.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float() / 0.5
        kept = logits.topk(5)
        assert token in kept.indices.tolist()
        assert logprob == pytest.approx(float(logits[token] - kept.values.logsumexp(0)), abs=1e-4)
        ids.append(token)
    raw = generate(LocalBackend(model), request(prompts["text"], **settings))
    assert raw.completion_ids == response.completion_ids
    assert raw.logprobs != response.logprobs
