"""Laws of the engine client, against engines in memory that abort, spoil, stall, fail and die at random."""

import asyncio
import copy
import gc
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import (
    MODES,
    faults,
    in_loop,
    patient,
    pauses,
    prompts,
    setup,
    sidecar,
    turns,
    while_pausing,
)
from mmrender.client.types import EngineResponse, Usage
from mmrender.engines.continuation import Continuation
from mmrender.engines.interface import new_request
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from scripted_engine import letters, sampled

BUDGETS = st.integers(1, 24)


@given(prompts, BUDGETS, faults, pauses, st.sampled_from([MODES, MODES, (), ("abort",), ("keep",)]))
@settings(max_examples=60)
@in_loop
async def test_a_disturbed_completion_is_the_undisturbed_one(prompts, budget, faults, pauses, modes):
    """Also where engines do not know a mode, so that the client alone holds their requests."""
    case = setup(faults, pause_modes=modes)
    pauses = [pause for pause in pauses if pause[0] in (*modes, "abort", "wait")]
    images = [sidecar(f"image{index}") for index in range(len(prompts))]
    batch = {"prompt_token_ids": prompts, "sampling_params": {"max_tokens": budget, "temperature": 0.0}}
    given = copy.deepcopy(batch)
    output = await while_pausing(case, pauses, case.client.generate(batch | {"multi_modal_data": images}))
    await case.client.teardown()
    assert len(asyncio.all_tasks()) == 1
    assert batch == given  # nothing of the caller's is changed
    for index, prompt in enumerate(prompts):
        whole = sampled(prompt, budget)
        response = output["engine_responses"][index]
        assert output["response_ids"][index] == whole.completion_ids
        assert output["response_logprobs"][index] == whole.logprobs
        assert output["stop_reasons"][index] == whole.finish_reason
        assert (response.usage, response.stop_reason) == (whole.usage, whole.stop_reason)
    _check_requests(case.journal, prompts, budget)


def _check_requests(journal, prompts, budget):
    finished = [0] * len(prompts)
    for event, asked in journal:
        index = int(asked.images[0].removeprefix("image"))  # the image goes with every request
        prompt = tuple(prompts[index])
        assert asked.prompt_ids[: len(prompt)] == prompt
        so_far = asked.prompt_ids[len(prompt) :]
        whole = sampled(prompt, budget)
        assert so_far == tuple(whole.completion_ids[: len(so_far)])
        assert asked.params["max_tokens"] == budget - len(so_far) >= 1
        assert not finished[index]  # nothing is asked again once it has finished
        finished[index] += event == "finished"


@given(prompts, BUDGETS, faults, pauses, st.sampled_from([{}, {"presence_penalty": 0.5}]))
@settings(max_examples=30)
@in_loop
async def test_streamed_tokens_are_those_of_the_completion_each_once(prompts, budget, faults, pauses, more):
    """Also where an aborted completion starts over: then it is asked as a whole each time."""
    shown: list[tuple[int, float]] = []
    ends: list[str | None] = []

    def on_tokens(ids, logprobs, reason):
        shown.extend(zip(ids, logprobs, strict=True))
        ends.append(reason)

    case = setup(faults)
    request = new_request(prompts[0], {"max_tokens": budget, **more}, sidecar("image0"))
    response = await while_pausing(case, pauses, case.client.complete(request, on_tokens=on_tokens))
    await case.client.teardown()
    whole = sampled(prompts[0], budget)
    assert response.completion_ids == whole.completion_ids
    assert shown == list(zip(whole.completion_ids, whole.logprobs, strict=True))
    assert ends[-1] == whole.finish_reason
    assert not any(ends[:-1])
    if more:
        asked = {(asked.prompt_ids, asked.params["max_tokens"]) for _, asked in case.journal}
        assert asked == {(tuple(prompts[0]), budget)}


class Letters:
    """Decodes, which is all of a renderer that stop strings need, and names no stop tokens."""

    def get_stop_token_ids(self) -> list[int]:
        return []

    def decode(self, ids):
        return letters(ids)


@given(prompts, st.integers(4, 40), faults, pauses, st.data(), st.booleans())
@settings(max_examples=60)
@in_loop
async def test_stop_strings_end_a_completion_across_aborts(prompts, budget, faults, pauses, data, streamed):
    text = letters(sampled(prompts[0], budget).completion_ids) or "a"
    start = data.draw(st.integers(0, len(text) - 1), "start")
    stop = text[start : start + data.draw(st.integers(1, 4), "length")]
    shown: list[int] = []
    case = setup(faults, policy=patient(renderer=Letters()))
    request = new_request(prompts[0], {"max_tokens": budget, "stop": [stop]})
    listener = (lambda ids, logprobs, reason: shown.extend(ids)) if streamed else None
    response = await while_pausing(case, pauses, case.client.complete(request, on_tokens=listener))
    whole = sampled(prompts[0], budget, [stop])
    for name in ("completion_ids", "logprobs", "finish_reason"):
        assert getattr(response, name) == getattr(whole, name)
    # The string is named by the end of a reply, which may be lost where its tokens were streamed.
    assert response.stop_reason == whole.stop_reason or (streamed and response.stop_reason is None)
    assert shown == (whole.completion_ids if streamed else [])


@given(st.lists(st.integers(2, 9), min_size=2, max_size=20), st.data())
def test_seeds_and_frequency_penalties_are_carried_over_an_abort(ids, data):
    cut = data.draw(st.integers(1, len(ids) - 1))
    penalty = data.draw(st.sampled_from([0.5, -0.25, 1.0]))
    params = {"max_tokens": 30, "seed": 7, "frequency_penalty": penalty, "logit_bias": {3: 1.5}}
    continuation = Continuation(new_request([1], params))
    assert continuation.next_request().sampling_params == params
    continuation.add(EngineResponse(ids[:cut], [-1.0] * cut, "abort", Usage(1, cut)))
    assert continuation.completion_ids == ids[:cut]  # nothing is given up
    asked = continuation.next_request().sampling_params
    expected = {token: -penalty * ids[:cut].count(token) for token in set(ids[:cut])}
    expected[3] = expected.get(3, 0.0) + 1.5
    assert asked["logit_bias"] == {str(token): bias for token, bias in expected.items()}
    assert asked["frequency_penalty"] == penalty
    assert asked["seed"] != 7
    assert asked["seed"] == continuation.next_request().sampling_params["seed"] >= 0


def test_a_penalty_beyond_what_engines_take_as_bias_starts_over():
    params = {"max_tokens": 300, "frequency_penalty": 2.0}
    shown: list[int] = []
    continuation = Continuation(new_request([1], params), None, lambda ids, *_: shown.extend(ids))
    for _ in range(2):  # the first could be continued, and may still have to start over
        continuation.add(EngineResponse([5] * 30, [-1.0] * 30, "abort", Usage(1, 30)))
    assert continuation.next_request().sampling_params == params
    assert continuation.completion_ids == shown == []


@given(prompts, st.integers(8, 24), pauses)
@settings(max_examples=25)
@in_loop
async def test_weight_versions_cover_the_completion_in_order(prompts, budget, pauses):
    case = setup()
    for engine in case.engines:
        engine.version = "step-0"
    batch = {"prompt_token_ids": prompts, "sampling_params": {"max_tokens": budget}}
    output = await while_pausing(case, pauses, case.client.generate(batch))
    await case.client.teardown()
    for response in output["engine_responses"]:
        ids, spans = response.completion_ids, response.weight_versions
        assert [spans[0].start, *[span.stop for span in spans]] == [*[span.start for span in spans], len(ids)]
        steps = [int(span.version.removeprefix("step-")) for span in spans]
        assert steps == sorted(set(steps))  # rising, and neighbours of one version are one span


@given(st.data())
@settings(max_examples=60)
def test_pieces_make_the_whole_with_router_choices_and_alternatives(data):
    """Cut an uninterrupted answer anywhere; rows that a later piece computes again are not taken from it."""
    prompt_len = data.draw(st.integers(1, 5), "prompt")
    ids = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12), "completion")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids))), "cuts"))
    start = data.draw(st.integers(0, prompt_len - 1), "first row")
    total = prompt_len + len(ids)
    rows = np.arange((total - 1) * 6, dtype=np.uint16).reshape(total - 1, 2, 3)
    continuation = Continuation(new_request(list(range(prompt_len)), {"max_tokens": len(ids), "note": None}))
    bounds = [0, *cuts, len(ids)]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        if continuation.finished is not None:
            break
        asked = continuation.next_request()
        assert len(asked.prompt_ids) == prompt_len + first
        assert asked.sampling_params["max_tokens"] == len(ids) - first >= 1
        again = np.full_like(rows[start : prompt_len + first - 1 if first else start], 60_000)
        fresh = rows[start + len(again) : prompt_len + last - 1]
        experts = RoutedExperts(np.concatenate([again, fresh]), start)
        is_last = number == len(bounds) - 2
        piece = EngineResponse(
            ids[first:last],
            [-float(position) for position in range(first, last)],
            "stop" if is_last else "abort",
            Usage(prompt_len + first, last - first, number),
            routed_experts=experts,
            weight_versions=(WeightVersionSpan(f"v{number // 2}", 0, last - first),) if last > first else (),
            top_logprobs=tuple(((token, 0.0),) for token in ids[first:last]),
            request_id=f"request{number}",
        )
        assert len(piece.completion_ids) <= continuation.remaining
        continuation.add(piece)
    result = continuation.result()
    assert result.completion_ids == ids
    assert result.logprobs == [-float(position) for position in range(len(ids))]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (prompt_len, len(ids))
    assert result.top_logprobs == tuple(((token, 0.0),) for token in ids)
    assert result.routed_experts == RoutedExperts(rows[start:], start)
    for before, after in zip(result.weight_versions, result.weight_versions[1:], strict=False):
        assert before.version != after.version or before.stop != after.start


@given(faults, st.integers(0, 30))
@settings(max_examples=25)
@in_loop
async def test_a_cancelled_batch_leaves_nothing_behind(faults, moment):
    case = setup(faults)
    batch = {"prompt_token_ids": [[5, n] for n in range(2, 8)], "sampling_params": {"max_tokens": 20}}
    generating = asyncio.create_task(case.client.generate(batch))
    await turns(moment)
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)
    await turns(3)
    assert not any(engine.running for engine in case.engines)
    assert not any(replica.calls for replica in case.client.replicas)
    await case.client.teardown()
    assert len(asyncio.all_tasks()) == 1
    gc.collect(1)  # the young: what the batch left
