"""Sessions: each answered turn is recorded once, whoever leaves and comes back."""

import asyncio
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway_cases import gateway
from kit import data_url, noise, until
from mmrender.errors import (
    EngineConnectionError,
    InputError,
    PromptTooLongError,
    SessionBudgetError,
    SessionClosedError,
    SessionLimitError,
    SessionUnknownError,
    TrajectoryError,
)
from mmrender.gateway import store
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.gateway.settings import GatewaySettings
from mmrender.gateway.store import Answered, read_entries
from mmrender.trajectory.files import TrajectoryReader, load_trajectories, received_ids
from session_cases import Agent, Script, ask, said, user
from tree_cases import assert_same


async def left_while_sampling(session, script, call):
    """Send a call whose caller leaves before the answer is sampled."""
    script.gate.clear()
    pending = await session.begin(call)
    await until(lambda: script.running)
    pending.leave()


async def left_while_sent(session, call):
    """Send a call whose caller leaves before the whole answer is sent."""
    pending = await session.begin(call)
    answers = await pending.answers()
    pending.leave()
    return answers


async def test_a_turn_is_on_disk_when_its_answer_returns(renderer, tmp_path):
    async with Script(renderer).gateway(tmp_path / "out.mmr") as here:
        session = await here.open_session("a", group="g", metadata={"level": 3})
        [answer] = await (await session.begin(ask(user("hello", 1)))).answers()
        *_, newest = read_entries(session.file.path)
        assert isinstance(newest.event, Answered)
        assert newest.event.answers[0].id == answer.id
        assert len(newest.piece["items"]["items"]) == 1


@pytest.mark.parametrize("sync", [False, True])
async def test_a_synced_turn_waits_for_the_disk(renderer, tmp_path, monkeypatch, sync):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    async with Script(renderer).gateway(tmp_path / "out.mmr", settings=GatewaySettings(sync=sync)) as here:
        session = await here.open_session("a")
        pending = await session.begin(ask(user("hello", 1)))
        await pending.answers()
        assert (synced[-1:] == [session.file.path.stat().st_size]) is sync
        pending.delivered()
        await session.finish()
        assert (synced[-1:] == [(tmp_path / "out.mmr").stat().st_size]) is sync
    assert bool(synced) is sync


async def test_a_restart_goes_on_with_all_sessions(renderer, tmp_path):
    out = tmp_path / "out.mmr"
    async with Script(renderer).gateway(out) as here:
        talks = [Agent(await here.open_session(name, group=name)) for name in "ab"]
        for number in range(3):
            for talk in talks:
                await talk.turn(f"turn {number}", number)
        response = talks[0].session._memory.trajectory.steps[1].extra["gateway"]["response"]
        await talks[0].session.reward(0.5, response_id=f"chatcmpl-{response}")
        before = [await talk.session.trajectory() for talk in talks]
        keys = [talk.session.api_key for talk in talks]
    async with Script(renderer, asked=6).gateway(out) as here:
        sessions = [here.session_of_key(key) for key in keys]
        assert [session.opened.group for session in sessions] == ["a", "b"]
        for session, tree in zip(sessions, before, strict=True):
            assert_same(tree, await session.trajectory())
        talks[0].session = sessions[0]
        await talks[0].turn("after", 1)
        step = (await sessions[0].trajectory()).steps[-1]
        assert (step.parent.index, step.new_items) == (2, ())


def wishes(chance):
    """What an agent does, step by step: it goes on, asks again, or goes back and says something else."""
    for number in range(chance.randint(4, 8)):
        kind = chance.choice(["go on", "go on", "ask again", "go back", "reward"])
        yield kind, f"words {number}", [chance.randrange(3)] * chance.randrange(2), chance.randrange(1, 3)


@pytest.mark.parametrize("seed", range(6))
async def test_a_session_that_leaves_memory_or_restarts_goes_on_as_if_it_had_stayed(renderer, tmp_path, seed):
    async def played(between):
        script, out = Script(renderer), tmp_path / between
        here = script.gateway(out)
        agent = Agent(await here.open_session("a"))
        for kind, words, pictures, count in wishes(random.Random(seed)):
            if kind == "ask again" and agent.messages:
                await agent.session.answer(ask(*agent.messages[:-1]))
            elif kind == "reward" and agent.messages:
                await agent.session.reward(float(count), step=0)
            else:
                del agent.messages[len(agent.messages) - 2 * count * (kind == "go back") :]
                await agent.turn(words, *pictures)
            if between == "spill":
                await agent.session.spill()
                assert agent.session.nbytes == 0
            elif between == "restart":
                await here.aclose()
                here = script.gateway(out)
                agent.session = await here.session("a")
        nbytes = (await agent.session.trajectory()) and agent.session.nbytes
        tree = await agent.session.finish(reward=1.0)
        await here.aclose()
        assert_same(tree, load_trajectories(out)[0])
        for step in tree.steps:
            del step.extra["gateway"]["response"]
        return tree, nbytes, script.prompts

    stayed = await played("stay")
    for between in ("spill", "restart"):
        tree, nbytes, prompts = await played(between)
        assert_same(stayed[0], tree)
        assert nbytes == pytest.approx(stayed[1], rel=0.05)
        assert prompts == stayed[2]


async def test_a_pinned_seed_differs_by_session_and_call_and_survives_restarts(renderer, tmp_path):
    async def seeds(folder, *, restarts):
        script, seen = Script(renderer), {}
        folder.mkdir()
        names = {name: folder / f"{name}.mmr" for name in "ab"}
        for name, out in names.items():
            call = ask(user("hello"), sampling_params={"seed": 3})
            async with script.gateway(out) as here:
                session = await here.open_session(name, sampling_params={"seed": 7})
                await session.answer(call)
                seen[name, 0] = script.newest.sampling_params["seed"]
                if not restarts:
                    await session.answer(call)
            if restarts:
                async with script.gateway(out) as here:
                    await (await here.session(name)).answer(call)
            seen[name, 1] = script.newest.sampling_params["seed"]
        return seen

    stayed = await seeds(tmp_path / "stayed", restarts=False)
    assert stayed == await seeds(tmp_path / "restarted", restarts=True)
    assert len({*stayed.values(), 3, 7}) == 6


async def test_a_conversation_goes_on_from_a_response_by_its_id(renderer):
    """The prompt is the one that the whole conversation has, also after the session has left memory."""

    def read(given, **fields):
        tools = [{"type": "function", "name": "look"}]
        fields = {"model": "m", "instructions": "Be brief.", "tools": tools, **fields, "input": given}
        return PROTOCOLS["responses"].read(fields, {})

    async with Script(renderer).gateway() as gateway:
        session = await gateway.open_session("a")
        shown = {"type": "input_image", "image_url": data_url(noise(1))}
        asked = [{"role": "user", "content": [shown, {"type": "input_text", "text": "hello"}]}]
        [first] = await session.answer(read(asked))
        await session.spill()
        later = [{"role": "developer", "content": "Be quick."}, {"role": "user", "content": "and?"}]
        [second] = await session.answer(read(later, previous_response_id=f"resp_{first.id}"))
        answered = {"role": "assistant", "content": first.content}
        await session.answer(read([*asked, answered, *later]))
        steps = (await session.trajectory()).steps
        assert [step.extra["gateway"]["prompt"] for step in steps] == ["rendered", "bridged", "repeated"]
        assert steps[1].prompt_ids.tolist() == steps[2].prompt_ids.tolist()
        assert steps[1].previous is steps[0]
        assert second.step == 1
        for fields, problem in (
            ({"instructions": None}, "the instructions of this response were others"),
            ({"tools": None}, "the tools of this response were others"),
            ({"previous_response_id": "resp_x"}, "the session did not make this response"),
            (
                {"input": [{"role": "assistant", "content": "By hand."}, *later]},
                r"messages\[0\] was not sampled here",
            ),
        ):
            body = {"previous_response_id": f"resp_{first.id}", "input": later, **fields}
            with pytest.raises(InputError, match=problem):
                await session.answer(read(body.pop("input"), **body))
        with pytest.raises(InputError, match="tokens are counted of whole conversations"):
            await gateway.count_tokens(read(later, previous_response_id=f"resp_{first.id}"))
        assert session.incomplete is None


async def test_a_retry_attaches_to_the_call_whose_caller_left(renderer):
    script = Script(renderer)
    async with script.gateway() as here:
        session = await here.open_session("a")
        call, streamed = ask(user("hello")), ask(user("hello"), stream=True)
        await left_while_sampling(session, script, streamed)
        script.gate.set()
        again = await session.begin(streamed)
        [answer] = await again.answers()
        texts = [delta.text for delta in await again.more(0)]
        assert (script.asked, again.answer_ids, "".join(texts)) == (1, (answer.id,), answer.content)
        again.leave()
        assert await session.answer(call) == (answer,)
        [sibling] = await session.answer(call)
        assert sibling.id != answer.id
        assert len(await session.trajectory()) == script.asked == 2


async def test_an_engine_streams_only_to_a_caller_that_reads_text_before_the_end(renderer):
    script = Script(renderer)
    async with script.gateway() as here:
        session = await here.open_session("a")
        await session.answer(ask(user("whole")))
        assert script.streamed == 0
        pending = await session.begin(ask(user("stream"), stream=True))
        await pending.answers()
        pending.delivered()
        texts = []
        await session.answer(ask(user("deltas")), lambda delta: texts.append(delta.text))
        assert (script.streamed, "".join(texts)) == (2, "answer 3")


async def test_equal_calls_side_by_side_are_siblings(renderer):
    script = Script(renderer)
    async with script.gateway() as here:
        session = await here.open_session("a")
        pairs = await asyncio.gather(*(session.answer(ask(user("hello"))) for _ in range(3)))
        assert len({answer.id for [answer] in pairs}) == len(await session.trajectory()) == 3


async def test_a_retry_after_a_restart_gets_the_recorded_answer(renderer, tmp_path):
    out, call = tmp_path / "out.mmr", ask(user("hello"), n=2)
    async with Script(renderer).gateway(out) as here:
        session = await here.open_session("a")
        answers = await left_while_sent(session, call)
    script = Script(renderer)
    async with script.gateway(out) as here:
        session = await here.session("a")
        assert await session.answer(call) == answers
        assert script.asked == 0
        await session.answer(call)
        assert script.asked == 2


async def test_an_idempotency_key_gets_one_answer_also_after_delivery(renderer, tmp_path):
    out, call = tmp_path / "out.mmr", ask(user("hello"), idempotency_key="k")
    async with Script(renderer).gateway(out) as here:
        session = await here.open_session("a")
        first, second = await asyncio.gather(session.answer(call), session.answer(call))
        assert first == second
        assert await session.answer(call) == first
        with pytest.raises(InputError, match="another request has this idempotency key"):
            await session.answer(ask(user("other"), idempotency_key="k"))
    async with Script(renderer).gateway(out) as here:
        assert await (await here.session("a")).answer(call) == first


async def test_a_call_that_nobody_comes_back_for_is_given_up(renderer):
    script = Script(renderer)
    async with script.gateway(settings=GatewaySettings(retry_seconds=0.05)) as here:
        session = await here.open_session("a")
        await left_while_sampling(session, script, ask(user("hello")))
        assert session.is_busy
        await until(lambda: not session.is_busy and not script.running)
        assert session.incomplete == "a caller left before its answer was sampled"
        script.gate.set()
        await session.answer(ask(user("hello")))
        assert session.incomplete is None


async def test_a_failed_call_is_lost_until_it_is_answered_and_a_refused_one_is_not(renderer, tmp_path):
    script, out = Script(renderer), tmp_path / "out.mmr"
    async with script.gateway(out) as here:
        session = await here.open_session("a")
        script.fault = PromptTooLongError(9, 8)
        with pytest.raises(PromptTooLongError):
            await session.answer(ask(user("long")))
        assert session.incomplete is None
        script.fault = EngineConnectionError("the connection broke")
        with pytest.raises(EngineConnectionError):
            await session.answer(ask(user("hello")))
        assert session.incomplete == "a call failed: the connection broke"
        assert len(await session.trajectory()) == 0
        await session.spill()
    async with script.gateway(out) as here:
        session = await here.session("a")
        await Agent(session).turn("other")
        await session.finish(reward=1.0)
    [[tree]] = TrajectoryReader(out)
    assert tree.error == "the session is incomplete: a call failed: the connection broke"
    assert tree.extra == {"incomplete": "a call failed: the connection broke"}
    assert tree.reward == 1.0


async def test_finished_sessions_leave_once_and_take_no_more_calls(renderer, tmp_path):
    script, out = Script(renderer), tmp_path / "out.mmr"
    async with script.gateway(out) as here:
        agent = Agent(await here.open_session("a", group="g", metadata={"level": 3}))
        read = asyncio.ensure_future(anext(here.finished()))
        await asyncio.sleep(0)
        await agent.turn("hello", 1)
        script.gate.clear()
        running = asyncio.ensure_future(agent.session.answer(ask(user("late"))))
        await until(lambda: script.running)
        ends = [asyncio.ensure_future(agent.session.finish()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(SessionClosedError, match="got a session that is closing"):
            await agent.session.answer(ask(user("later")))
        script.gate.set()
        await running
        await asyncio.gather(*ends)
        assert await agent.session.wait() == "finished"
        tree = await read
        assert (tree.trajectory_id, len(tree), tree.error) == ("a", 2, None)
        assert tree.extra == {"group": "g", "metadata": {"level": 3}}
        with pytest.raises(SessionClosedError):
            await here.session("a")
        with pytest.raises(SessionClosedError):
            here.session_of_key(agent.session.api_key)
        with pytest.raises(SessionUnknownError):
            await here.session("b")
        assert not list(here._store.folder.iterdir())
    assert received_ids(out) == ["a"]
    async with script.gateway(out) as here:
        with pytest.raises(SessionClosedError):
            await here.open_session("a")
    assert received_ids(out) == ["a"]


async def test_an_answer_that_nobody_received_is_marked(renderer):
    settings = GatewaySettings(stop_seconds=0.05)
    async with Script(renderer).gateway(settings=settings) as here:
        session = await here.open_session("a")
        [first] = await left_while_sent(session, ask(user("one")))
        # The agent goes on from the first answer, so it was received.
        await left_while_sent(session, ask(user("one"), said(first), user("two")))
        await session.finish()
        tree = await anext(here.finished())
        assert [step.extra["gateway"].get("undelivered") for step in tree.steps] == [None, True]


async def test_a_step_without_an_answer_is_marked(renderer):
    script = Script(renderer)
    async with script.gateway(settings=GatewaySettings(stop_seconds=0.05)) as here:
        session = await here.open_session("a")
        script.fault = EngineConnectionError("the connection broke")
        script.asked = 1
        first = asyncio.ensure_future(session.answer(ask(user("hello"), n=2)))
        with pytest.raises(EngineConnectionError):
            await first
        await session.answer(ask(user("other")))
        tree = await session.finish()
        marks = {step.new_messages[0]["content"]: gateway(step).get("undelivered") for step in tree.steps}
        assert marks.pop("other") is None
        assert set(marks.values()) <= {True}
        assert tree.error == "the session is incomplete: a call failed: the connection broke"


async def test_a_session_without_calls_leaves_too(renderer, tmp_path):
    async with Script(renderer).gateway(tmp_path / "out.mmr") as here:
        await (await here.open_session("a")).finish(reward=0.0)
    [tree] = load_trajectories(tmp_path / "out.mmr")
    assert (len(tree), tree.reward, tree.error) == (0, 0.0, None)


async def test_a_full_disk_delays_the_end(renderer, tmp_path, monkeypatch, caplog):
    out = tmp_path / "out.mmr"
    async with Script(renderer).gateway(out) as here:
        session = await here.open_session("a")
        await Agent(session).turn("hello")
        append, full = here._store._out.append, [True]

        def refusing(*arguments, **options):
            if full:
                raise OSError("no space left on device")
            return append(*arguments, **options)

        monkeypatch.setattr(here._store._out, "append", refusing)
        with pytest.raises(OSError, match="no space"):
            await session.finish(reward=1.0)
        assert (session.state, session.has_failed_to_end) == ("closing", True)
        assert "Session('a', closing) could not leave, and tries again: no space" in caplog.text
        full.clear()
        await here._look()
        assert await session.wait() == "finished"
    assert received_ids(out) == ["a"]


async def test_a_damaged_session_does_not_keep_others_from_going_on(renderer, tmp_path, caplog):
    out = tmp_path / "out.mmr"
    async with Script(renderer).gateway(out) as here:
        for name in "ab":
            await Agent(await here.open_session(name)).turn("hello")
        path = here.sessions()[0].file.path
    damaged = bytearray(path.read_bytes())
    damaged[80:100] = bytes(20)
    path.write_bytes(damaged)
    async with Script(renderer).gateway(out) as here:
        assert [each.name for each in here.sessions()] == ["b"]
    assert path.exists()
    assert "a session is left out" in caplog.text


class Trainer:
    """Takes trajectories as a `Sender` does."""

    def __init__(self):
        self.shipped = []

    async def send(self, trajectory):
        self.shipped.append(trajectory.trajectory_id)
        return asyncio.sleep(0)


async def test_trajectories_are_shipped_once(renderer, tmp_path, monkeypatch):
    trainer = Trainer()
    async with Script(renderer).gateway(tmp_path / "out.mmr", sender=trainer) as here:
        leave = here._store.leave

        async def failing(*arguments):
            monkeypatch.setattr(here._store, "leave", leave)
            raise OSError("no space left on device")

        monkeypatch.setattr(here._store, "leave", failing)
        session = await here.open_session("a")
        await Agent(session).turn("hello")
        with pytest.raises(OSError, match="no space"):
            await session.finish()
        await session.finish()
    assert trainer.shipped == received_ids(tmp_path / "out.mmr") == ["a"]


async def test_an_abandoned_session_leaves_nothing(renderer, tmp_path):
    script, out = Script(renderer), tmp_path / "out.mmr"
    async with script.gateway(out) as here:
        session = await here.open_session("a")
        await Agent(session).turn("hello")
        script.gate.clear()
        running = asyncio.ensure_future(session.answer(ask(user("late"))))
        await until(lambda: script.running)
        await session.abandon("the environment broke")
        with pytest.raises(SessionClosedError, match="the call was given up"):
            await running
        assert await session.wait() == "abandoned"
        assert not list(here._store.folder.iterdir())
    assert received_ids(out) == []


async def test_budgets(renderer):
    async with Script(renderer).gateway() as here:
        agent = Agent(await here.open_session(max_turns=2))
        await agent.turn("one")
        await agent.turn("two")
        with pytest.raises(SessionBudgetError, match="the session's turns are used up"):
            await agent.turn("three")
        agent = Agent(await here.open_session(max_tokens=5))
        await agent.turn("one")
        with pytest.raises(SessionBudgetError, match="tokens"):
            await agent.turn("two")
        session = await here.open_session(max_turns=3)
        calls = [session.answer(ask(user("hello"), n=2)) for _ in range(3)]
        # The first of them, whichever it is, has the turns.
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(each, SessionBudgetError) for each in ends) == 2


async def test_sessions_set_parameters_of_requests(renderer):
    script = Script(renderer)
    async with script.gateway(request_options={"routed_experts": True}) as here:
        session = await here.open_session("a", sampling_params={"temperature": 0.5, "max_tokens": 100})
        await session.answer(ask(user("hello"), sampling_params={"temperature": 1.0, "max_tokens": 7}))
        assert script.newest.routed_experts
        params = script.newest.sampling_params
        assert (params["temperature"], params["max_tokens"]) == (0.5, 7)
        assert script.newest.extra_headers["X-Session-ID"] == "a"


async def test_rewards_of_sessions_steps_and_responses(renderer):
    async with Script(renderer).gateway() as here:
        agent = Agent(await here.open_session("a"))
        first, second = await agent.turn("one"), await agent.turn("two")
        await agent.session.reward(0.25)
        await agent.session.reward(1.0, step=first.step)
        await agent.session.reward([0.5] * len(second.token_ids), response_id=f"resp_{second.id}")
        await agent.session.spill()
        for arguments, error in (
            ({"value": 1.0, "step": 2}, InputError),
            ({"value": 1.0, "response_id": "resp_x"}, InputError),
            ({"value": [1.0, 2.0], "step": 0}, TrajectoryError),
            ({"value": float("nan")}, TrajectoryError),
        ):
            with pytest.raises(error):
                await agent.session.reward(**arguments)
        tree = await agent.session.trajectory()
        assert (tree.reward, tree.steps[0].reward) == (0.25, 1.0)
        assert tree.steps[1].reward.tolist() == [0.5] * len(second.token_ids)


async def test_a_turn_that_could_not_be_written_is_not_answered(renderer, monkeypatch):
    script = Script(renderer)
    async with script.gateway() as here:
        session = await here.open_session("a")
        writer = here._store.writer
        full = {"is": False}

        class Full:
            def append(self, record):
                if full["is"] and "piece" in record:
                    raise OSError("no space left on device")
                return writer(session.file.path).append(record)

        monkeypatch.setattr(here._store, "writer", lambda path: Full())
        full["is"] = True
        with pytest.raises(OSError, match="no space"):
            await session.answer(ask(user("hello")))
        full["is"] = False
        [answer] = await session.answer(ask(user("hello")))
        assert (script.asked, answer.step) == (1, 0)
        await session.spill()
        assert session.nbytes == 0
        assert len(await session.trajectory()) == 1


async def test_a_short_call_goes_to_threads_three_times(renderer, monkeypatch):
    """Once to the renderer, for its prompt, and twice to the file: as it begins, and with its turn."""
    monkeypatch.setattr("mmrender.gateway.session._DELIVERY_SECONDS", 3600.0)
    handed = []
    submit = ThreadPoolExecutor.submit

    def counting(self, function, /, *arguments, **options):
        handed.append(self._thread_name_prefix)
        return submit(self, function, *arguments, **options)

    async with Script(renderer).gateway() as here:
        agent = Agent(await here.open_session("a"))
        await agent.turn("hello")
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "submit", counting)
            await agent.turn("and now?")
    assert sorted(handed) == ["mmrender-pool", "mmrender-store", "mmrender-store"]


async def test_records_of_sessions_that_wait_for_the_disk_are_written_together(renderer, monkeypatch):
    async with Script(renderer).gateway() as here:
        sessions = [await here.open_session(f"s{number}") for number in range(5)]
        for session in sessions:
            await session.trajectory()  # so that it is in memory
        batches = []
        write = store._write_files

        def counting(files):
            batches.append(len(files))
            return write(files)

        monkeypatch.setattr(store, "_write_files", counting)
        await asyncio.gather(*(session.reward(1.0) for session in sessions))
        assert batches == [1, 4]
        trees = [await session.trajectory() for session in sessions]
    assert [tree.reward for tree in trees] == [1.0] * 5


async def test_a_record_that_cannot_be_written_fails_its_own_session_alone(renderer, monkeypatch):
    async with Script(renderer).gateway() as here:
        sessions = [await here.open_session(f"s{number}") for number in range(3)]
        for session in sessions:
            await session.trajectory()
        writer, full = here._store.writer, sessions[1].file.path

        def limited(path):
            if path == full:
                raise OSError("no space left on device")
            return writer(path)

        monkeypatch.setattr(here._store, "writer", limited)
        ends = await asyncio.gather(*(each.reward(1.0) for each in sessions), return_exceptions=True)
        assert [str(end) for end in ends] == ["None", "no space left on device", "None"]
        monkeypatch.setattr(here._store, "writer", writer)
        await sessions[1].reward(0.5)


async def test_names(renderer):
    async with Script(renderer).gateway() as here:
        await here.open_session("a")
        for name in ("a", "../a", "", "a b", "x" * 129):
            with pytest.raises(InputError):
                await here.open_session(name)
        with pytest.raises(InputError, match="not plain data"):
            await here.open_session(metadata={"x": object()})


async def test_sessions_that_nobody_calls_leave_memory_and_expire(renderer):
    settings = GatewaySettings(idle_seconds=0.05, expire_seconds=0.4)
    async with Script(renderer).gateway(settings=settings) as here:
        agent = Agent(await here.open_session("a"))
        await agent.turn("hello", 1)
        agent.session.used -= 0.1
        await here._look()
        assert (agent.session.nbytes, agent.session.state) == (0, "open")
        agent.session.used -= 1
        await here._look()
        tree = await anext(here.finished())
        assert tree.error == "the session is incomplete: no call came for 0.4 s"


async def test_idle_sessions_over_the_budget_of_bytes_leave_memory(renderer):
    async with Script(renderer).gateway(settings=GatewaySettings(memory_bytes=70_000)) as here:
        agents = [Agent(await here.open_session(name)) for name in "abc"]
        for agent in agents:
            await agent.turn("hello", 1)
        assert 35_000 < agents[0].session.nbytes < 70_000
        await here._look()
        assert [agent.session.nbytes > 0 for agent in agents] == [False, False, True]


async def test_owners_see_their_own_sessions(renderer):
    async with Script(renderer).gateway(settings=GatewaySettings(max_sessions=2)) as here:
        mine = await here.session("a", "me", open=True)
        assert await here.session("a", "me") is await here.session("a") is mine
        await here.open_session("b", owner="you")
        for arguments in ({"name": "b", "owner": "me"}, {"name": "c", "owner": "me"}):
            with pytest.raises(SessionUnknownError):
                await here.session(**arguments)
        with pytest.raises(InputError, match="has this name already"):
            await here.session("b", "me", open=True)
        await here.session("c", "me", open=True)
        with pytest.raises(SessionLimitError):
            await here.session("d", "me", open=True)
        assert [each.name for each in here.sessions("me")] == ["a", "c"]


async def test_a_description_is_plain(renderer):
    async with Script(renderer).gateway() as here:
        agent = Agent(await here.open_session("a", group="g", sampling_params={"temperature": 1.0}))
        await agent.turn("hello")
        await agent.session.spill()
        plain = json.loads(json.dumps(agent.session.describe()))
        assert {key: plain[key] for key in ("name", "state", "group", "steps", "tokens", "running")} == {
            "name": "a",
            "state": "open",
            "group": "g",
            "steps": 1,
            "tokens": 6,
            "running": 0,
        }
        assert agent.session.api_key not in str(plain)
