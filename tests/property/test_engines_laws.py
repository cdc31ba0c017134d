"""Laws of the engine client, against engines in memory that abort, spoil, stall, fail and die at random."""

import asyncio
import copy
import gc
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import faults, paused_now_and_then, pauses, prompts, setup, sidecar, turns
from mmrender.client.types import EngineResponse, Usage
from mmrender.engines.continuation import Continuation
from mmrender.engines.scripted_model import encoded, letters, sampled, token_text
from mmrender.engines.scripted_text import chat_text
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

BUDGETS = st.integers(1, 24)


def run(coroutine):
    return asyncio.run(coroutine)


async def _generate(case, batch, plan):
    generating = asyncio.create_task(case.client.generate(batch))
    await turns(1)
    await paused_now_and_then(case, plan)
    return await generating


@given(prompts, BUDGETS, faults, pauses)
@settings(max_examples=100)
def test_a_disturbed_completion_is_the_undisturbed_one(prompts, budget, faults, pauses):
    async def scenario():
        case = setup(faults)
        batch = {
            "prompt_token_ids": prompts,
            "multi_modal_data": [sidecar(f"image{index}") for index in range(len(prompts))],
            "sampling_params": {"max_tokens": budget, "temperature": 0.0},
        }
        given = copy.deepcopy({name: value for name, value in batch.items() if name != "multi_modal_data"})
        output = await _generate(case, batch, pauses)
        await case.client.teardown()
        assert len(asyncio.all_tasks()) == 1
        assert {name: batch[name] for name in given} == given  # nothing of the caller's is changed
        return case, output

    case, output = run(scenario())
    for index, prompt in enumerate(prompts):
        whole = sampled(prompt, budget)
        assert output["response_ids"][index] == whole.completion_ids
        assert output["response_logprobs"][index] == whole.logprobs
        assert output["stop_reasons"][index] == whole.finish_reason
        assert output["usages"][index] == Usage(len(prompt), len(whole.completion_ids), None)
        assert output["engine_responses"][index].stop_reason == (0 if whole.finish_reason == "stop" else None)
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


@given(prompts, BUDGETS, faults, pauses)
@settings(max_examples=40)
def test_streamed_tokens_are_those_of_the_completion_each_once(prompts, budget, faults, pauses):
    shown: list[tuple[int, float]] = []

    async def scenario():
        case = setup(faults)
        batch = {
            "prompt_token_ids": prompts[:1],
            "multi_modal_data": [sidecar("image0")],
            "sampling_params": {"max_tokens": budget},
            "on_tokens": lambda ids, logprobs: shown.extend(zip(ids, logprobs, strict=True)),
        }
        output = await _generate(case, batch, pauses)
        await case.client.teardown()
        return output

    output = run(scenario())
    whole = sampled(prompts[0], budget)
    assert output["response_ids"] == [whole.completion_ids]
    assert shown == list(zip(whole.completion_ids, whole.logprobs, strict=True))


@given(prompts, BUDGETS, faults, pauses)
@settings(max_examples=40)
def test_work_that_cannot_be_continued_starts_over(prompts, budget, faults, pauses):
    """Here every request is the prompt itself, with the whole budget."""
    shown: list[int] = []

    async def scenario():
        case = setup(faults)
        batch = {
            "prompt_token_ids": prompts[:1],
            "multi_modal_data": [sidecar("image0")],
            "sampling_params": {"max_tokens": budget, "presence_penalty": 0.5},
            "on_tokens": lambda ids, logprobs: shown.extend(ids),
        }
        output = await _generate(case, batch, pauses)
        await case.client.teardown()
        return case, output

    case, output = run(scenario())
    assert output["response_ids"] == [sampled(prompts[0], budget).completion_ids] == [shown]
    assert {(asked.prompt_ids, asked.params["max_tokens"]) for _, asked in case.journal} == {
        (tuple(prompts[0]), budget)
    }


@given(st.text("abc xyz", min_size=1, max_size=8), BUDGETS, faults, pauses, st.booleans(), st.booleans())
@settings(max_examples=80)
def test_chat_in_text_is_the_undisturbed_one(text, budget, faults, pauses, streamed, logprobs):
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": budget,
        "logprobs": logprobs,
        "stream_options": {"include_usage": True},
    }
    whole = sampled(encoded(chat_text(body)), budget)
    content, entries, usage, reason = run(_chat(body, faults, pauses, streamed))
    assert content == letters(whole.completion_ids)
    assert reason == whole.finish_reason
    assert usage["completion_tokens"] == len(whole.completion_ids)
    assert usage["prompt_tokens"] == whole.usage.prompt_tokens
    assert usage["total_tokens"] == whole.usage.prompt_tokens + len(whole.completion_ids)
    if logprobs:
        pairs = [
            (token_text(token), value)
            for token, value in zip(whole.completion_ids, whole.logprobs, strict=True)
        ]
        assert [(entry["token"], entry["logprob"]) for entry in entries] == pairs
    else:
        assert entries == []


async def _chat(body, faults, pauses, streamed):
    case = setup(faults)
    given = copy.deepcopy(body)
    payload = {"json": body, "headers": {}}
    chatting = asyncio.create_task(_streamed_chat(case, payload) if streamed else _whole_chat(case, payload))
    await turns(1)
    await paused_now_and_then(case, pauses)
    result = await chatting
    await case.client.teardown()
    assert len(asyncio.all_tasks()) == 1
    assert body == given
    return result


async def _whole_chat(case, payload):
    reply = await case.client.chat_completion(payload)
    (choice,) = reply["choices"]
    entries = (choice["logprobs"] or {}).get("content") or []
    return choice["message"]["content"], entries, reply["usage"], choice["finish_reason"]


async def _streamed_chat(case, payload):
    content, entries, reasons, usage, names = "", [], [], None, set()
    async for chunk in case.client.stream_chat_completion(payload):
        names.add(chunk["id"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            entries += (choice["logprobs"] or {}).get("content") or []
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(names) == len(reasons) == 1  # one stream, with one end
    return content, entries, usage, reasons[0]


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    BUDGETS,
    faults,
    pauses,
    st.booleans(),
)
@settings(max_examples=40)
def test_completions_of_text_and_of_ids_are_the_undisturbed_ones(texts, budget, faults, pauses, as_ids):
    prompts = [encoded(text) for text in texts]
    body = {"model": "m", "prompt": prompts if as_ids else texts, "max_tokens": budget, "logprobs": 1}

    async def scenario():
        case = setup(faults)
        completing = asyncio.create_task(case.client.completion({"json": body}))
        await turns(1)
        await paused_now_and_then(case, pauses)
        reply = await completing
        await case.client.teardown()
        return reply

    reply = run(scenario())
    wholes = [sampled(prompt, budget) for prompt in prompts]
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))
    for choice, whole in zip(reply["choices"], wholes, strict=True):
        assert choice["text"] == letters(whole.completion_ids)
        assert choice["finish_reason"] == whole.finish_reason
        assert choice["logprobs"]["token_logprobs"] == whole.logprobs
        assert choice["logprobs"]["tokens"] == [token_text(token) for token in whole.completion_ids]
        assert "token_ids" not in choice
    assert reply["usage"]["completion_tokens"] == sum(len(whole.completion_ids) for whole in wholes)
    assert reply["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)


@given(prompts, st.integers(8, 24), pauses)
@settings(max_examples=40)
def test_weight_versions_cover_the_completion_in_order(prompts, budget, pauses):
    async def scenario():
        case = setup()
        for engine in case.engines:
            engine.version = "step-0"
        output = await _generate(
            case, {"prompt_token_ids": prompts, "sampling_params": {"max_tokens": budget}}, pauses
        )
        await case.client.teardown()
        return output

    output = run(scenario())
    for ids, spans in zip(output["response_ids"], output["weight_versions"], strict=True):
        assert [spans[0].start, *[span.stop for span in spans]] == [*[span.start for span in spans], len(ids)]
        steps = [int(span.version.removeprefix("step-")) for span in spans]
        assert steps == sorted(set(steps))  # rising, and neighbours of one version are one span


@given(st.data())
@settings(max_examples=100)
def test_pieces_make_the_whole_with_router_choices_and_alternatives(data):
    """Cut an uninterrupted answer anywhere; rows that a later piece computes again are not taken from it."""
    prompt_len = data.draw(st.integers(1, 5), "prompt")
    ids = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12), "completion")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids))), "cuts"))
    start = data.draw(st.integers(0, prompt_len - 1), "first row")
    total = prompt_len + len(ids)
    rows = np.arange((total - 1) * 6, dtype=np.uint16).reshape(total - 1, 2, 3)
    continuation = Continuation(
        list(range(prompt_len)), {"max_tokens": len(ids), "routed_experts_note": None}
    )
    bounds = [0, *cuts, len(ids)]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        if continuation.finished is not None:
            break
        assert len(continuation.next_ids()) == prompt_len + first
        assert continuation.next_params()["max_tokens"] == len(ids) - first >= 1
        again = (
            np.full_like(rows[start : prompt_len + max(first, 1) - 1], 60_000) if first else rows[start:start]
        )
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
        continuation.check(piece)
        continuation.add(piece)
    result = continuation.result()
    assert result.completion_ids == ids
    assert result.logprobs == [-float(position) for position in range(len(ids))]
    assert result.usage.prompt_tokens == prompt_len
    assert result.usage.completion_tokens == len(ids)
    assert result.top_logprobs == tuple(((token, 0.0),) for token in ids)
    assert result.routed_experts == RoutedExperts(rows[start:], start)
    for before, after in zip(result.weight_versions, result.weight_versions[1:], strict=False):
        assert before.version != after.version or before.stop != after.start


@given(faults, st.integers(0, 30))
@settings(max_examples=40)
def test_a_cancelled_batch_leaves_nothing_behind(faults, moment):
    async def scenario():
        case = setup(faults)
        generating = asyncio.create_task(
            case.client.generate(
                {"prompt_token_ids": [[5, n] for n in range(2, 8)], "sampling_params": {"max_tokens": 20}}
            )
        )
        await turns(moment)
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
        await turns(3)
        assert not any(engine.running for engine in case.engines)
        assert all(member.slots.used == member.slots.waiting == 0 for member in case.client.members.values())
        await case.client.teardown()
        assert len(asyncio.all_tasks()) == 1

    run(scenario())
    gc.collect()
