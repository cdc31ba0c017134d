"""The engine client: routing, failures, pauses, limits, and what it refuses."""

import asyncio
import pickle
from types import SimpleNamespace

import pytest

from engine_cases import HANGING, Faulty, on_fake_clock, patient, setup, sidecar, turns
from kit import error_of, raised, raised_by, user
from mmrender.client.transport import RetryPolicy
from mmrender.client.types import EngineResponse, Usage
from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStateError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
    SamplingParameterError,
)
from scripted_engine import Fault, ScriptedEngine, letters, sampled

PARAMS = {"max_tokens": 12}
LONG = next([2, seed] for seed in range(2, 40) if sampled([2, seed], 200).finish_reason == "length")


def run(coroutine):
    return asyncio.run(coroutine)


def batch(prompts, params=PARAMS):
    return {"prompt_token_ids": prompts, "sampling_params": params}


def wholes(prompts, budget=12):
    """What undisturbed engines sample."""
    return [sampled(prompt, budget).completion_ids for prompt in prompts]


def client_of(*engines, **policy):
    return InferenceEngineClient(engines, **patient(**policy))


REFUSED = {
    "neither form": {},
    "both forms": {"prompts": [[]], "prompt_token_ids": [[1]]},
    "unknown field": {"prompt_ids": [[1]]},
    "a single prompt": batch([1, 2]),
    "no parameters": batch([[1]], None),
    "empty prompt": batch([[]]),
    "too few sessions": batch([[1], [2]]) | {"session_ids": ["a"]},
    "no renderer": {"prompts": [[user("hi")]], "sampling_params": PARAMS},
    "no budget": batch([[1]], {}),
    "budget of 0": batch([[1]], {"max_tokens": 0}),
    "several completions": batch([[1]], {"max_tokens": 5, "n": 2}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_input_that_is_refused(case, sentence):
    engines = setup()
    problem = error_of((InputError, SamplingParameterError), run, engines.client.generate(REFUSED[case]))
    assert problem == sentence
    assert not engines.journal


CLIENTS = {
    "two of one name": lambda: client_of(ScriptedEngine("a"), ScriptedEngine("a")),
    "no engine": client_of,
    "no body": lambda: run(setup().client.chat_completion({"messages": []})),
}


@pytest.mark.parametrize("case", CLIENTS)
def test_clients_and_payloads_that_are_refused(case, sentence):
    assert error_of(InputError, CLIENTS[case]) == sentence


def test_a_client_is_an_engine_so_clients_nest():
    inner = setup([Fault("abort", 1)] * 3, count=2)
    outer = client_of(inner.client)
    assert run(outer.generate(batch([[2, 9]])))["response_ids"] == wholes([[2, 9]])
    assert (outer.tp_size(), outer.pp_size(), outer.dp_size()) == (1, 1, 2)


def test_samples_of_one_prompt_have_seeds_of_their_own():
    case = setup()
    output = run(case.client.sample([2, 5], 3, {"max_tokens": 4, "seed": 7, "n": 3}, session_id="s"))
    assert len(output["response_ids"]) == 3
    assert sorted(asked.params["seed"] for _, asked in case.journal if _ == "asked") == [7, 8, 9]


def test_a_client_with_a_renderer_renders_and_decodes_once():
    class Renderer:
        decoded = 0

        def render(self, messages, **_):
            return SimpleNamespace(token_ids=[2, len(messages)], multi_modal_data=sidecar("one"))

        def decode(self, ids):
            self.decoded += 1
            return letters(ids)

        def get_stop_token_ids(self):
            return [26]

    renderer = Renderer()
    case = setup([Fault("abort", 2), Fault("abort", 1)])
    client = InferenceEngineClient(case.engines, renderer=renderer, **patient())
    output = run(client.generate({"prompts": [["a"], ["a", "b"]], "sampling_params": PARAMS}))
    assert output["responses"] == [letters(sampled([2, count], 12).completion_ids) for count in (1, 2)]
    assert renderer.decoded == 2
    assert {asked.images for _, asked in case.journal} == {("one",)}


def test_what_an_engine_refuses_is_not_asked_again():
    class Refusing(ScriptedEngine):
        async def complete(self, request, **_):
            self.asked.append(request)
            raise EngineStatusError("the server answered 400", status=400)

    engines = Refusing("a"), Refusing("b")
    with pytest.raises(EngineStatusError, match=r"^the server answered 400$"):
        run(client_of(*engines).generate(batch([[1]])))
    assert sum(len(engine.asked) for engine in engines) == 1


@pytest.mark.parametrize("kind", ["error", "drop_logprobs"])
def test_attempts_are_bounded(kind):
    case = setup([Fault(kind, 0)] * 50, policy=patient(attempts=4, attempt_timeout=None))
    with pytest.raises((EngineStatusError, EngineReplyError)):
        run(case.client.generate(batch([LONG])))
    assert len(case.journal) == 4


def test_aborts_without_end_and_no_engine_left_are_errors(sentence):
    case = setup([Fault("abort", 0)] * 90, policy=patient(max_idle_aborts=5))
    assert error_of(EngineUnavailableError, run, case.client.generate(batch([[1, 2]]))) == sentence
    case = setup(count=2, policy=patient(attempts=2))
    case.engines[0].alive = case.engines[1].alive = False
    with pytest.raises((EngineUnavailableError, EngineConnectionError)):
        run(case.client.generate(batch([[1]])))
    assert error_of(EngineUnavailableError, run, case.client.check_health()) == sentence


class AbortsWhilePaused(ScriptedEngine):
    """Aborts what comes while it is paused, in place of holding it; `silent`, it does not say that it is."""

    silent = False

    async def complete(self, request, **options):
        if self.paused is None:
            return await super().complete(request, **options)
        self.asked.append(request)
        return EngineResponse([], [], "abort", Usage(len(request.prompt_ids), 0))

    async def reports_pause(self):
        return None if self.silent else await super().reports_pause()


async def resumed(engine, seconds):
    await asyncio.sleep(seconds)
    await engine.resume_generation()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("routed", [False, True])
@on_fake_clock
async def test_a_pause_of_another_client_is_waited_for(routed):
    """As a trainer pauses in another process: a weight update may take longer than any number of aborts."""
    engine = AbortsWhilePaused("one")
    await engine.pause_generation("abort")
    client = InferenceEngineClient([engine], router=engine if routed else None)
    output, end = await asyncio.gather(client.generate(batch([[1, 2]])), resumed(engine, 1000))
    assert output["response_ids"] == wholes([[1, 2]])
    assert asyncio.get_running_loop().time() - end < 10
    assert len(engine.asked) == 2  # while it is paused, it is asked for nothing but that


@on_fake_clock
async def test_an_engine_that_does_not_report_its_pause_is_asked_until_the_deadline():
    engine = AbortsWhilePaused("one")
    engine.silent = True
    await engine.pause_generation("abort")
    client = InferenceEngineClient([engine])
    output, _ = await asyncio.gather(client.generate(batch([[1, 2]])), resumed(engine, 9000))
    assert output["response_ids"] == wholes([[1, 2]])
    assert len(engine.asked) > 1024
    await engine.pause_generation("abort")
    for silent in (False, True):
        engine.silent = silent
        with pytest.raises(EngineTimeoutError, match="the completion was not finished within 500 s"):
            await InferenceEngineClient([engine], deadline=500).generate(batch([[1, 2]]))


@on_fake_clock
async def test_work_that_waits_for_another_clients_pause_can_be_ended():
    engine = AbortsWhilePaused("one")
    await engine.pause_generation("abort")
    client = InferenceEngineClient([engine])
    work = asyncio.create_task(client.generate(batch([[1, 2]])))
    await asyncio.sleep(100)
    assert await client.reports_pause()
    await client.abort_generation()
    assert (await work)["stop_reasons"] == ["abort"]
    assert asyncio.get_running_loop().time() < 110


@on_fake_clock
async def test_work_leaves_a_paused_engine_that_goes_down():
    paused, well = AbortsWhilePaused("stalling"), ScriptedEngine("good")
    await paused.pause_generation("abort")
    client = InferenceEngineClient([paused, well])
    work = asyncio.create_task(client.generate(batch([[1, 2]]) | {"session_ids": [session_at("stalling")]}))
    await asyncio.sleep(100)
    assert not work.done()
    client._pool.take_down(client.replicas[0], "it was lost")
    paused.alive = False
    assert (await work)["response_ids"] == wholes([[1, 2]])
    await client.teardown()


@on_fake_clock
async def test_an_engine_that_stays_paused_while_others_serve_is_left():
    """As one that obeyed a pause after its client had given up the call, so that nobody resumes it."""
    paused, well = AbortsWhilePaused("stalling"), ScriptedEngine("good")
    await paused.pause_generation("abort")
    client = InferenceEngineClient([paused, well], update_timeout=100)
    there = {"session_ids": [session_at("stalling")]}
    assert (await client.generate(batch([[1, 2]]) | there))["response_ids"] == wholes([[1, 2]])
    assert 100 < asyncio.get_running_loop().time() < 150
    await asyncio.sleep(100)  # it is looked at, and answers for its health
    assert client.replicas[0].down is not None
    await paused.resume_generation()
    await asyncio.sleep(30)
    assert client.replicas[0].down is None
    await client.generate(batch([[1, 2]]) | there)
    assert len(paused.asked) == 2
    await client.teardown()


@on_fake_clock
async def test_a_dead_engine_is_ejected_and_comes_back():
    case = setup(count=2)
    prompts = [[2, n] for n in range(2, 12)]
    case.engines[0].alive = False
    output = await case.client.generate(batch(prompts))
    assert output["response_ids"] == wholes(prompts)
    assert case.client.replicas[0].down == "engine0: the server was not reached"
    case.engines[0].alive = True
    await case.client.generate(batch(prompts))
    assert not case.engines[0].asked
    await asyncio.sleep(20)  # it is looked at meanwhile
    assert case.client.replicas[0].down is None
    await case.client.generate(batch(prompts))
    assert case.engines[0].asked
    await case.client.teardown()
    assert len(asyncio.all_tasks()) == 1


async def test_a_hung_engine_is_found_out_and_its_work_is_done_elsewhere():
    hung = Faulty("hung", {"check_health": "fail"}, faults=lambda: Fault("stall", 0))
    client = client_of(hung, ScriptedEngine("well"))
    prompts = [[2, n] for n in range(2, 8)]
    output = await client.generate(batch(prompts))
    assert output["response_ids"] == wholes(prompts)
    assert hung.asked
    assert not hung.running
    assert client.replicas[0].down == "the server answered 500"
    await client.teardown()


UPDATE = {"names": [], "dtypes": [], "shapes": [], "weight_version": "v2"}
WAYS = {
    "load": lambda client: client.load_weights("step-2", weight_version="v2"),
    "transfer": lambda client: client.update_named_weights(UPDATE),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("count", [1, 2])
async def test_an_engine_that_failed_within_a_weight_update_gets_no_work_until_a_later_one(count, way):
    """Also where all have failed: what they hold may be half of the one and half of the other."""

    engines = [Faulty(f"engine{index}", {"control": "fail late"}) for index in range(count)]
    client = client_of(*engines, attempts=2, attempt_timeout=None)
    with pytest.raises(EngineStatusError):
        await WAYS[way](client)
    for call in (client.check_health(), client.generate(batch([[2, 5]]))):
        with pytest.raises(EngineUnavailableError):
            await call
    assert not any(engine.asked for engine in engines)
    for engine in engines:
        engine.calls = {}
    await WAYS[way](client)
    await client.check_health()
    await client.generate(batch([[2, 5]]))
    assert [replica.down for replica in client.replicas] == [None] * count


def all_ok(results):
    return [each.outcome for each in results] == ["ok"] * len(results)


async def test_an_engine_that_missed_weights_gets_no_work_until_it_has_them():
    case = setup(count=2)
    client, late = case.client, case.engines[1]
    late.alive = False
    results = await client.load_weights("step-1", weight_version="v1")
    assert [(each.name, each.outcome) for each in results] == [("engine0", "ok"), ("engine1", "failed")]
    with pytest.raises(EngineUnavailableError, match=r"^weights are sent to all engines at once"):
        await client.update_named_weights(UPDATE)
    late.alive = True
    assert all_ok(await client.check_health())
    assert (late.controls, late.version) == (["load_weights step-1 v1"], "v1")
    await client.update_named_weights(UPDATE)
    client._pool.take_down(client.replicas[1], "it was lost")
    client.replicas[1].stale = True
    assert [each.outcome for each in await client.check_health()] == ["ok", "failed"]
    missed = "engine1: the engine missed a weight update. Update the weights again"
    assert client.replicas[1].down == missed
    await client.generate(batch([[2, 5], [2, 6], [2, 7]]))
    assert not late.asked
    for update_weights in WAYS.values():
        client.replicas[1].stale, client.replicas[1].down = True, missed
        await update_weights(client)
        await client.check_health()
        assert (client.replicas[1].down, await client.weight_version()) == (None, "v2")


@pytest.mark.parametrize("way", list(WAYS))
async def test_an_engine_that_came_back_with_other_weights_reads_them_or_stays_out(way):
    case = setup(count=2)
    client, restarted = case.client, case.engines[1]
    await WAYS[way](client)
    restarted.version = "v0"  # from its first weights
    with pytest.raises(EngineStateError, match=r"^engines have different weights"):
        await client.weight_version()
    client._pool.take_down(client.replicas[1], "it was lost")
    await client.check_health()
    if way == "load":  # which can be repeated for one engine
        assert (restarted.version, client.replicas[1].down) == ("v2", None)
    else:
        refusal = "engine1: the engine has other weights - expected v2, got v0"
        assert (restarted.version, client.replicas[1].down) == ("v0", refusal)


async def test_an_engine_may_cancel_a_control_call_of_its_own():
    class Cancelling(ScriptedEngine):
        async def control(self, call, /, **arguments):
            if call == "reset_prefix_cache":
                raise asyncio.CancelledError
            return await super().control(call, **arguments)

    client = client_of(Cancelling("cancelling"), ScriptedEngine("well"))
    cancelled, well = await client.reset_prefix_cache()
    assert (cancelled.outcome, str(cancelled.error)) == (
        "failed",
        "cancelling: the engine cancelled the call",
    )
    assert well.outcome == "ok"
    await client.generate(batch([[2, 5]]))
    await client.teardown()


async def test_work_goes_on_elsewhere_if_an_engine_cancels_its_own_request():
    class Cancelling(ScriptedEngine):
        async def complete(self, request, **_):
            raise asyncio.CancelledError

    client = client_of(Cancelling("cancelling"), ScriptedEngine("well"))
    for _ in range(2):  # one of them begins at the engine that cancels
        assert (await client.generate(batch([[2, 5]])))["response_ids"] == wholes([[2, 5]])


async def test_deadlines_bound_everything_but_a_pause():
    case = setup([Fault("stall", 0)], policy=patient(attempt_timeout=None, deadline=0.02))
    with pytest.raises(EngineTimeoutError, match=r"^the completion was not finished within 0.02 s$"):
        await case.client.generate(batch([LONG]))
    assert not any(engine.running for engine in case.engines)
    case = setup(policy=patient(attempt_timeout=0.5))
    generating = asyncio.create_task(case.client.generate(batch([LONG])))
    await turns(6)
    await case.client.pause_generation("keep")
    await asyncio.sleep(0.6)
    await case.client.resume_generation()
    await generating
    assert len([event for event, _ in case.journal if event == "asked"]) == 1


def test_sessions_stay_where_they_are_and_what_has_none_is_spread_evenly():
    case = setup(policy=patient(attempt_timeout=None))
    sessions = [n % 5 for n in range(40)]
    run(case.client.generate(batch([[2, n] for n in range(2, 42)]) | {"session_ids": sessions}))
    homes = [{asked.session_id for asked in engine.asked} for engine in case.engines]
    assert sorted(session for home in homes for session in home) == [0, 1, 2, 3, 4]
    case = setup(policy=patient(attempt_timeout=None))
    run(case.client.generate(batch([[2, n] for n in range(2, 32)])))
    assert [len(engine.asked) for engine in case.engines] == [10, 10, 10]


async def test_work_without_a_session_goes_to_engines_in_turn_whatever_they_have():
    """Load is a router's to balance; each further attempt goes to the next engine of an order of its own."""
    case = setup([Fault("stall", 0)] * 4, count=2, policy=patient(attempt_timeout=None))
    stalled = [asyncio.create_task(case.client.generate(batch([LONG]))) for _ in range(4)]
    await turns(20)
    assert [len(engine.running) for engine in case.engines] == [2, 2]
    for task in stalled[1::2]:
        task.cancel()
    await asyncio.gather(*stalled[1::2], return_exceptions=True)
    assert [len(replica.calls) for replica in case.client.replicas] == [2, 0]
    for _ in range(6):
        await case.client.generate(batch([[2, 5]]))
    assert [len(engine.asked) for engine in case.engines] == [5, 5]
    for task in stalled[::2]:
        task.cancel()
    await asyncio.gather(*stalled[::2], return_exceptions=True)


async def test_work_of_a_failing_engine_moves_to_each_of_the_others():
    pool = InferenceEngineClient([ScriptedEngine(f"engine{number}") for number in range(4)])._pool
    moved = [pool.begin(f"session{number}", "").order[:2] for number in range(400)]
    for first in pool.targets:
        seconds = [second for other, second in moved if other is first]
        assert len(seconds) > 60
        assert {*seconds} == {*pool.targets} - {first}
    fixed = pool.begin("session", "").order
    assert fixed == pool.begin("session", "").order


async def test_pauses_and_resumptions_that_are_refused(sentence):
    client = setup().client
    assert str(await raised_by(EngineStateError, client.resume_generation())) == sentence
    await client.pause_generation("keep")
    assert client.is_paused
    assert str(await raised_by(EngineStateError, client.pause_generation("abort"))) == sentence
    await client.resume_generation()
    assert not client.is_paused
    able, unable = ScriptedEngine("able"), ScriptedEngine("unable", pause_modes=("abort",))
    client = client_of(able, unable)
    assert client.pause_modes == {"abort", "wait"}
    assert str(await raised_by(EngineUnsupportedError, client.pause_generation("keep"))) == sentence
    assert able.paused is None
    assert not client.is_paused
    await client.generate(batch([[2, 5]]))


async def test_aborting_returns_what_there_is():
    case = setup(policy=patient(attempt_timeout=None))
    params = [{"max_tokens": 150}] * 11 + [{"max_tokens": 150, "seed": 3}]
    generating = asyncio.create_task(case.client.generate(batch([LONG] * 12, params)))
    await turns(20)
    await case.client.abort_generation()
    output = await generating
    whole = sampled(LONG, 150)
    assert set(output["stop_reasons"]) == {"abort"}
    for ids, logprobs in zip(output["response_ids"], output["response_logprobs"], strict=True):
        assert ids == whole.completion_ids[: len(ids)] != []
        assert logprobs == whole.logprobs[: len(ids)]
    # It goes on as if nothing had been.
    assert (await case.client.generate(batch([LONG])))["stop_reasons"] == ["length"]


async def test_one_event_loop_uses_a_client_and_other_threads_ask_it_to(sentence):
    """As a trainer pauses while an endpoint samples on a thread of its own."""
    case = setup(policy=patient(attempt_timeout=None))
    prompts = [[2, n] for n in range(2, 20)]
    loop, refusals = asyncio.get_running_loop(), []

    def pause_often():
        caught = raised(EngineStateError, run, case.client.pause_generation())
        refusals.append(caught)
        for mode in ("abort", "wait", "abort"):
            for call in (lambda mode=mode: case.client.pause_generation(mode), case.client.resume_generation):
                asyncio.run_coroutine_threadsafe(call(), loop).result(20)

    sampling = asyncio.create_task(case.client.generate(batch(prompts, {"max_tokens": 150})))
    await turns(6)
    await asyncio.to_thread(pause_often)
    assert (await sampling)["response_ids"] == wholes(prompts, 150)
    assert str(refusals[0]) == sentence


async def test_a_pause_that_fails_behind_its_effect_ends_without_that_engine():
    engine, well = Faulty(calls={"pause_generation": "fail late"}), ScriptedEngine("well")
    client = client_of(engine, well)
    failed, paused = await client.pause_generation("keep")
    assert (failed.outcome, str(failed.error), paused.outcome) == ("failed", "the server answered 500", "ok")
    assert (engine.paused, well.paused, client.is_paused) == ("keep", "keep", True)
    await client.resume_generation()
    assert all_ok(await client.check_health())
    assert (engine.paused, well.paused, client.is_paused) == (None, None, False)


@on_fake_clock
async def test_a_pause_that_is_refused_or_cancelled_behind_its_effect_is_undone():
    class Refusing(Faulty):
        async def pause_generation(self, *arguments, **options):
            await super().pause_generation(*arguments, **options)
            raise EngineStateError("refused", where=self.name)

    for engine in (Refusing(), Faulty(calls={"pause_generation": "hang late"})):
        well = ScriptedEngine("well")
        client = client_of(engine, well, pause_timeout=60)
        with pytest.raises((EngineStateError, TimeoutError)):
            async with asyncio.timeout(1):
                await client.pause_generation("keep")
        assert not client.is_paused
        await client.generate(batch([[2, 5]]))
        assert all_ok(await client.check_health())
        assert (engine.paused, well.paused) == (None, None)
        await client.teardown()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.pause_generation("keep"),
        lambda client: client.load_weights("step-1", weight_version="v1"),
        lambda client: client.update_named_weights(UPDATE),
        lambda client: client.reset_prefix_cache(),
    ],
)
@on_fake_clock
async def test_a_call_right_after_a_cancelled_pause_finds_all_engines(call):
    slow, well = Faulty(calls={"pause_generation": "hang late"}), ScriptedEngine("well")
    client = client_of(slow, well, pause_timeout=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await client.pause_generation("keep")
    slow.calls = {}
    assert all_ok(await call(client))
    await client.teardown()


@on_fake_clock
async def test_an_engine_that_comes_back_amid_two_updates_has_the_later_weights():
    class Slow(ScriptedEngine):
        async def control(self, call, /, **arguments):
            await asyncio.sleep(10 if call == "load_weights" else 0)
            return await super().control(call, **arguments)

    slow, well = Slow("slow"), ScriptedEngine("well")
    client = client_of(slow, well, pause_timeout=60)
    await client.load_weights("step-1", weight_version="v1")
    client._pool.take_down(client.replicas[0], "it was lost")
    client.replicas[0].stale = True
    await asyncio.sleep(5)  # it is being updated
    absent, _ = await client.load_weights("step-2", weight_version="v2")
    assert absent.outcome == "failed"
    await asyncio.sleep(60)
    assert (slow.version, client.replicas[0].down) == ("v2", None)
    assert slow.controls == [f"load_weights step-{step} v{step}" for step in (1, 1, 2)]
    await client.teardown()


async def test_an_engine_that_does_not_resume_is_ejected_until_it_does():
    engine, well = Faulty(calls={"resume_generation": "fail"}), ScriptedEngine("well")
    client = client_of(engine, well)
    await client.pause_generation("keep")
    failed, resumed = await client.resume_generation()
    assert (failed.outcome, str(failed.error), resumed.outcome) == ("failed", "the server answered 500", "ok")
    assert (client.is_paused, well.paused) == (False, None)
    assert client.replicas[0].down == "it did not resume: the server answered 500"
    await client.generate(batch([[2, 5]]))
    engine.calls = {}
    await client.check_health()
    assert (engine.paused, client.replicas[0].down) == (None, None)


@pytest.mark.parametrize("has_router", [False, True])
async def test_where_no_engine_resumes_requests_fail_until_one_does(has_router):
    engine, router = Faulty(calls={"resume_generation": "fail"}), ScriptedEngine("router")
    client = client_of(engine, router=router if has_router else None)
    await client.pause_generation("keep")
    waiting = asyncio.ensure_future(client.generate(batch([[2, 5]])))
    caught = await raised_by(EngineUnavailableError, client.resume_generation())
    said = "no healthy engine is left - got faulty: it did not resume: the server answered 500"
    assert str(caught).startswith(said)
    assert caught.__cause__.__notes__ == ["engine faulty"]
    for request in (waiting, client.generate(batch([[2, 5]]))):
        async with asyncio.timeout(20):
            with pytest.raises(EngineUnavailableError, match=r"no healthy.*: the server answered 500"):
                await request
    engine.calls = {}
    await client.generate(batch([[2, 5]]))
    assert (engine.paused, client.is_paused) == (None, False)


@pytest.mark.parametrize(
    ("modes", "mode", "clear_cache", "told"),
    [
        (("abort", "keep"), "wait", True, ["reset_prefix_cache"]),
        ((), "abort", True, ["reset_prefix_cache"]),
        ((), "abort", False, []),
        (("abort", "keep", "wait"), "keep", True, ["pause_generation keep"]),
    ],
)
def test_caches_are_cleared_where_the_pause_itself_does_not(modes, mode, clear_cache, told):
    engine = ScriptedEngine(pause_modes=modes)
    run(client_of(engine).pause_generation(mode, clear_cache=clear_cache))
    assert engine.controls == told


async def test_a_cache_that_cannot_be_cleared_is_said():
    class Keeping(ScriptedEngine):
        async def reset_prefix_cache(self):
            raise EngineUnsupportedError("no such call", where=self.name)

    client = client_of(Keeping("keeping", pause_modes=()))
    with pytest.raises(EngineUnsupportedError, match=r"^keeping: no such call\n"):
        await client.pause_generation("abort")
    assert not client.is_paused
    await client.pause_generation("abort", clear_cache=False)
    await client.resume_generation()


async def test_control_calls_reach_every_engine():
    case = setup(count=2)
    client = case.client
    update = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]], "weight_version": "v3"}
    await client.sleep(level=2)
    await client.wake_up(tags=["weights"])
    await client.reset_prefix_cache()
    await client.init_weight_update_communicator({"master_port": 1})
    await client.update_named_weights(update)
    await client.set_weight_version("v4")
    assert await client.weight_version() == "v4"
    before = ["sleep 2", "wake_up ['weights']", "reset_prefix_cache"]
    weights = ["init_weight_update_communicator {'master_port': 1}", f"update_named_weights {update}"]
    for engine in case.engines:
        assert engine.controls == [*before, *weights, "set_weight_version v4"]
    with pytest.raises(InputError, match="one entry for each engine"):
        await client.init_weight_update_communicator([{}])


async def test_teardown_ends_everything_and_says_so_or_lets_work_finish(sentence):
    case = setup(policy=patient(attempt_timeout=None))
    generating = asyncio.create_task(case.client.generate(batch([LONG], {"max_tokens": 190})))
    await turns(10)
    await case.client.teardown()
    assert str(await raised_by(EngineStateError, generating)) == sentence
    assert not any(engine.running for engine in case.engines)
    await case.client.teardown()
    assert [engine.controls for engine in case.engines] == [["teardown"]] * 3
    for call in (case.client.pause_generation(), case.client.generate(batch([[1]]))):
        with pytest.raises(EngineStateError):
            await call
    assert len(asyncio.all_tasks()) == 1
    case = setup()
    async with case.client as client:
        generating = asyncio.create_task(client.generate(batch([LONG])))
        await turns(5)
        await client.teardown(wait=20)
        assert (await generating)["response_ids"] == wholes([LONG])


async def test_a_copy_works_and_knows_nothing_of_the_originals_pause():
    engines = [ScriptedEngine("a"), ScriptedEngine("b")]
    client = InferenceEngineClient(engines, retries=RetryPolicy(2), name="n")
    await client.generate(batch([LONG]))
    copy = pickle.loads(pickle.dumps(client))
    await client.pause_generation("keep")
    assert (copy.name, [engine.name for engine in copy.engines]) == ("n", ["a", "b"])
    prompts = [[2, n] for n in range(2, 9)]
    assert (await copy.generate(batch(prompts)))["response_ids"] == wholes(prompts)
    await copy.pause_generation("abort")
    await copy.resume_generation()
    await client.resume_generation()


@on_fake_clock
async def test_the_limit_of_a_hung_engine_is_not_waited_for_again():
    hung, good = Faulty("hung", HANGING), ScriptedEngine("good")
    client = InferenceEngineClient([hung, good], **patient())
    expected = await good.max_prompt_len()
    for _ in range(3):
        assert await client.max_prompt_len() == expected
    assert hung.called.count("max_prompt_len") == 1


@on_fake_clock
async def test_an_engine_that_is_down_holds_up_no_request():
    """It is asked for its health beside the work of others, once at a time and ever more rarely."""
    hung, good = Faulty("hung", HANGING), ScriptedEngine("good")
    client = InferenceEngineClient([hung, good], **patient())
    assert not await client._pool.look_at(client.replicas[0])
    begun, looks = asyncio.get_running_loop().time(), hung.called.count("check_health")
    prompts = [[2, n] for n in range(2, 12)]
    for _ in range(3):
        assert (await client.generate(batch(prompts)))["response_ids"] == wholes(prompts)
    assert asyncio.get_running_loop().time() == begun
    await asyncio.sleep(100)
    assert 4 < hung.called.count("check_health") - looks < 12
    await client.teardown()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("mode", ["abort", "wait"])
@on_fake_clock
async def test_a_pause_ends_without_an_engine_that_hangs(mode):
    hung, good = Faulty("hung", HANGING), ScriptedEngine("good")
    client = InferenceEngineClient([hung, good], **patient(pause_timeout=0.01))
    await client.pause_generation(mode)
    assert client.is_paused
    assert [each.name for each in client.replicas if each.down] == ["hung"]
    await client.resume_generation()
    assert not client.is_paused


@on_fake_clock
async def test_a_pause_that_waits_for_a_hung_engine_can_be_cancelled():
    hung = Faulty("hung", HANGING)
    client = InferenceEngineClient([hung, ScriptedEngine("good")], **patient(pause_timeout=3600))
    pausing = asyncio.create_task(client.pause_generation("abort"))
    while "pause_generation" not in hung.called:
        await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not client.is_paused


@on_fake_clock
async def test_a_pause_that_waits_ends_at_its_deadline(sentence):
    """A request without end holds up nobody: the error names it, and everything goes on."""
    script = iter([Fault("stall", 1)])
    stalling, good = ScriptedEngine("stalling", faults=lambda: next(script, None)), ScriptedEngine("good")
    client = InferenceEngineClient([stalling, good])
    endless = asyncio.create_task(client.generate({**batch([LONG]), "session_ids": [session_at("stalling")]}))
    await asyncio.sleep(1)
    begun = asyncio.get_running_loop().time()
    for options, seconds in (({"deadline": 20}, 20), ({}, 3600)):
        caught = await raised_by(EngineTimeoutError, client.pause_generation("wait", **options))
        begun, took = asyncio.get_running_loop().time(), asyncio.get_running_loop().time() - begun
        assert took == pytest.approx(seconds)
        assert str(caught) == sentence
        assert (client.is_paused, good.paused, stalling.paused) == (False, None, None)
        assert (await client.generate(batch([[1, 2]])))["response_ids"] == wholes([[1, 2]])
    assert not endless.done()
    await client.pause_generation("abort")  # after which the endless one is continued, here without its fault
    await client.resume_generation()
    assert (await endless)["response_ids"] == wholes([LONG])


def session_at(name):
    """A session that hashes to one of `stalling` and `good`."""
    pool = InferenceEngineClient([ScriptedEngine("stalling"), ScriptedEngine("good")])._pool
    sessions = (f"session-{number}" for number in range(99))
    return next(each for each in sessions if pool.begin(each, "").order[0].name == name)


async def test_an_engine_of_a_users_own_may_raise_a_timeout_error():
    class Late(ScriptedEngine):
        async def complete(self, request, **_):
            raise TimeoutError

    client = client_of(Late("late"), attempts=2, attempt_timeout=None)
    with pytest.raises(EngineTimeoutError, match="late: the engine timed out"):
        await client.generate(batch([[2, 3]]))
