"""VLMGenerator: rows, rewards, masks, failures, saving; and the example environment end to end."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from find_cell import FindCell, FindCellSettings, sensible_calls
from guided import guided_params
from kit import error_of
from mmrender.client.local import LocalBackend
from mmrender.errors import EngineConnectionError, InputError, MessageError, MMRenderError
from mmrender.messages import Message
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Observation, turn_seed
from mmrender.rollout.generator import VLMGenerator, rollouts
from mmrender.rollout.rows import TrajectoryID, rows_of
from mmrender.trajectory.tree import Trajectory
from rollout_cases import ScriptedBackend, ScriptedEnvironment, asks, ends


def scripted(renderer, say="Yes.", scripts=(), client=None, limit=None, **options):
    """A generator whose rollouts follow scripts of observations, its batch, backend and environments."""
    backend = ScriptedBackend(renderer, say if callable(say) else lambda _: say, limit=limit)
    made = []

    def make(script):
        made.append(ScriptedEnvironment(list(script)))
        return made[-1]

    environments = {str(index): partial(make, script) for index, script in enumerate(scripts)}
    asking = RendererClient(renderer, backend=backend, **{"model": "m", **(client or {})})
    extras = [{"picture": index} for index in range(len(scripts))]
    batch = {"prompts": [[] for _ in scripts], "env_classes": [*environments], "env_extras": extras}
    return VLMGenerator(asking, environments, **options), batch, backend, made


def generate(generator, batch, *_):
    return asyncio.run(generator.generate(batch))


def turn_of(renderer):
    """Tokens of the turn that scripts answer with."""
    return renderer.tokenizer.encode("Yes.") + renderer.get_stop_token_ids()[:1]


TWO_TURNS = (asks("Sure?", 0.25, image=7), ends(1.0, right=1.0))
ENDLESS = (asks("Again?", 0.1),) * 50


def test_one_row_holds_all_turns(renderer):
    generator, batch, backend, made = scripted(renderer, scripts=[TWO_TURNS], tensors="numpy")
    out = generate(generator, batch)
    first, second = backend.requests
    (prompt,), (response,) = out["prompt_token_ids"], out["response_ids"]
    assert prompt == first.prompt_ids
    assert [*prompt, *response][: len(second.prompt_ids)] == second.prompt_ids
    (mask,), (rewards,), (logprobs,) = out["loss_masks"], out["rewards"], out["rollout_logprobs"]
    assert len(response) == len(mask) == len(rewards) == len(logprobs)
    turn = turn_of(renderer)
    observed = len(second.prompt_ids) - len(first.prompt_ids) - len(turn)
    assert mask == [1] * len(turn) + [0] * observed + [1] * len(turn)
    assert [token for token, trained in zip(response, mask, strict=True) if trained] == turn * 2
    assert [value == 0.0 for value in logprobs] == [not trained for trained in mask]
    expected = [0.0] * len(response)
    expected[len(turn) - 1], expected[-1] = 0.25, 1.0
    assert rewards == expected
    assert (out["stop_reasons"], out["is_last_step"], out["errors"]) == (["done"], [True], [None])
    assert out["rollout_expert_indices"] is None
    assert len(out["multi_modal_data"][0].mm_items["image"]) == 2
    (pixels,), (grids,) = out["pixel_values"], out["image_grid_thw"]
    assert pixels.shape == (grids.prod(1).sum(), 1536)
    assert made[0].closed == 1


def test_step_wise_each_turn_is_a_row(renderer):
    generator, batch, backend, _ = scripted(renderer, scripts=[TWO_TURNS, (ends(0.5),)], step_wise=True)
    out = generate(generator, batch)
    turn = turn_of(renderer)
    assert (out["response_ids"], out["loss_masks"]) == ([turn] * 3, [[1] * len(turn)] * 3)
    assert [row[-1] for row in out["rewards"]] == [0.25, 1.0, 0.5]
    assert out["is_last_step"] == [False, True, True]
    assert [name.instance_id for name in out["trajectory_ids"]] == ["0", "0", "1"]
    asked = {tuple(request.prompt_ids) for request in backend.requests}
    assert {tuple(prompt) for prompt in out["prompt_token_ids"]} == asked
    assert [len(data.mm_items["image"]) for data in out["multi_modal_data"]] == [1, 2, 1]


def test_a_rollout_whose_history_is_rendered_anew_keeps_its_rewards(renderer):
    long = "What do you see here, and where is it? " * 8
    script = (asks(long, 0.5), asks(long, 0.25), asks("And now?", 0.125), ends(1.0))
    leaving_out = {"overlong": "drop_oldest_turns"}
    generator, batch, backend, _ = scripted(renderer, scripts=[script], limit=260, client=leaving_out)
    out = generate(generator, batch)
    assert out["rollout_metrics"]["rollout/rendered_anew"] > 0
    assert sum(out["rewards"][0]) == pytest.approx(1.875)
    trained = sum(out["loss_masks"][0])
    turn = len(turn_of(renderer))
    assert trained % turn == 0
    assert trained < 4 * turn
    whole = [*out["prompt_token_ids"][0], *out["response_ids"][0]]
    assert whole[: len(backend.requests[-1].prompt_ids)] == backend.requests[-1].prompt_ids


def test_what_fails_is_kept_and_the_others_go_on(renderer, caplog):
    def say(request):
        return EngineConnectionError("gone") if len(backend.requests) == 1 else "Yes."

    scripts = [(ends(1.0),), (asks("Sure?", 0.5), KeyError("lost")), (ends(2.0),)]
    one_by_one = {"max_concurrency": 1, "tensors": "torch"}
    generator, batch, backend, made = scripted(renderer, say, scripts=scripts, **one_by_one)
    out = generate(generator, batch)
    assert out["errors"] == ["EngineConnectionError: gone", "KeyError: 'lost'", None]
    assert out["stop_reasons"] == ["error", "error", "done"]
    assert out["response_ids"][0] == out["prompt_token_ids"][0] == []
    assert len(out["response_ids"][1]) == len(out["loss_masks"][1]) > 10
    assert set(out["loss_masks"][1]) == set(out["rewards"][1]) == {0}
    assert out["rewards"][2][-1] == 2.0
    assert [len(pixels) > 0 for pixels in out["pixel_values"]] == [False, True, True]
    assert (out["pixel_values"][0].shape, out["image_grid_thw"][0].shape) == ((0, 1536), (0, 3))
    assert out["rollout_metrics"]["rollout/failed"] == pytest.approx(2 / 3)
    assert [record.message for record in caplog.records] == [
        "rollout 0_0 failed: EngineConnectionError: gone",
        "rollout 1_0 failed: KeyError: 'lost'",
    ]
    assert all(environment.closed == 1 for environment in made)


class Panic(BaseException):
    """As extensions in other languages raise for their own faults."""


async def awaits_what_is_cancelled():
    task = asyncio.ensure_future(asyncio.sleep(3600))
    task.cancel()
    await task


async def cancels_its_own_task():
    asyncio.current_task().cancel()
    await asyncio.sleep(3600)


async def fails_with(error):
    raise error


ENDINGS = {
    "CancelledError": (awaits_what_is_cancelled, ""),
    "CancelledError, of its own task": (cancels_its_own_task, ""),
    "SystemExit": (partial(fails_with, SystemExit(3)), " - got 3"),
    "Panic": (partial(fails_with, Panic("index out of bounds")), " - got index out of bounds"),
    "GeneratorExit": (partial(fails_with, GeneratorExit()), ""),
}


class Ending(ScriptedEnvironment):
    """Ends after its first turn, or in another method, by what no environment should raise."""

    where = "step"

    async def _at(self, method):
        if method == self.where:
            await self.end()

    async def reset(self, prompt, extras):
        await self._at("reset")
        return super().reset(prompt, extras)

    async def step(self, action):
        if self.actions:
            await self._at("step")
        return await super().step(action)

    async def close(self):
        super().close()
        await self._at("close")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("where", ["reset", "step", "close"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_an_environment_ends_its_own_rollout_only_and_keeps_its_turns(renderer, ending, where, concurrency):
    scripts = [(asks("Sure?"), ends()), (ends(1.0),), (asks("Sure?"), ends(2.0)), (ends(3.0),)]
    generator, batch, _, made = scripted(renderer, scripts=scripts, max_concurrency=concurrency)

    def make():
        made.append(environment := Ending(list(scripts[0])))
        environment.where, environment.end = where, ENDINGS[ending][0]
        return environment

    generator.environments["0"] = make
    out = generate(generator, batch)
    problem = f"rollout 0_0: the environment or the engine ended it by {ending.partition(',')[0]}{ENDINGS[ending][1]}"
    assert out["errors"] == [f"MMRenderError: {problem}", None, None, None]
    assert [row[-1] for row in out["rewards"][1:]] == [1.0, 2.0, 3.0]
    assert bool(out["response_ids"][0]) == (where != "reset")  # sampled turns are kept, and not trained on
    assert set(out["loss_masks"][0]) <= {0}
    assert all(environment.closed == 1 for environment in made)
    generator = replace(generator, failures="raise")
    with pytest.raises(MMRenderError) as caught:
        generate(generator, batch)
    assert str(caught.value) == problem


def test_a_worker_that_is_cancelled_does_not_hang_the_batch(renderer, monkeypatch):
    generator, batch, *_ = scripted(renderer, scripts=[(ends(),)] * 2)

    async def fail(*_):
        raise asyncio.CancelledError

    monkeypatch.setattr(VLMGenerator, "_one", fail)
    with pytest.raises(asyncio.CancelledError):
        generate(generator, batch)


def test_a_failure_may_end_the_batch(renderer):
    scripts = [(asks("Sure?"), ends()), (ValueError("broken"),), (asks("Sure?"), ends())]
    generator, batch, _, made = scripted(renderer, scripts=scripts, failures="raise")
    assert error_of(ValueError, generate, generator, batch) == "broken"
    assert all(environment.closed == 1 for environment in made)


async def test_cancelling_a_batch_leaves_no_task(renderer):
    generator, batch, backend, made = scripted(renderer, lambda _: None, scripts=[(ends(),)] * 4)
    task = asyncio.ensure_future(generator.generate(batch))
    while len(backend.requests) < 4:
        await asyncio.sleep(0.001)
    task.cancel()
    ended = await asyncio.gather(task, return_exceptions=True)
    (ended,), left = ended, [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    assert isinstance(ended, asyncio.CancelledError)
    assert left == []
    assert backend.busy == 0
    assert all(environment.closed == 1 for environment in made)


def test_ends_of_a_rollout(renderer, sentence):
    def ended(*script, **options):
        return generate(*scripted(renderer, scripts=[script or ENDLESS], **options))

    turns = ended(max_turns=3)
    assert turns["stop_reasons"] == ["max_turns"]
    assert sum(turns["rewards"][0]) == pytest.approx(0.3)
    assert ended(max_length=120)["stop_reasons"] == ["max_length"]
    stopped = ended(limit=120, client={"overlong": "stop"})
    assert (stopped["stop_reasons"], stopped["errors"]) == (["prompt_too_long"], [None])
    assert sum(stopped["loss_masks"][0]) > 0
    refused = ended(limit=120)
    assert refused["stop_reasons"] == ["error"]
    assert refused["errors"][0].startswith("PromptTooLongError: ")
    assert ended(Observation())["errors"] == [sentence]
    speaking = Observation([Message(role="assistant", content="I am the model")])
    assert ended(speaking)["errors"] == [sentence]
    assert ended(([], 1.0, True, {}))["errors"] == [sentence]  # as a gymnasium's step returns
    assert issubclass(MessageError, InputError)


def test_parameters_of_turns_and_turn_seeds(renderer):
    script = (asks("Sure?", sampling_params={"temperature": 0.1}), ends())
    params = {
        "client": {"sampling_params": {"seed": 5, "temperature": 0.9, "top_k": 7}},
        "sampling_params": {"top_k": 8},
    }
    generator, batch, backend, _ = scripted(renderer, scripts=[script] * 2, max_concurrency=1, **params)
    generate(generator, {**batch, "sampling_params": {"top_p": 0.5}})
    params = [request.sampling_params for request in backend.requests]
    assert [each["temperature"] for each in params] == [0.9, 0.1, 0.9, 0.1]
    assert {(each["top_k"], each["top_p"]) for each in params} == {(8, 0.5)}
    seeds = [turn_seed(5, name, turn) for name in ("0_0", "1_0") for turn in (0, 1)]
    assert [each["seed"] for each in params] == seeds
    assert len({*seeds}) == 4


REFUSED = {
    "too few environments": {"prompts": [[], []]},
    "unknown environment": {"env_classes": ["zoo"]},
    "equal names": {
        **{"prompts": [[], []], "env_classes": ["0", "0"]},
        "trajectory_ids": [TrajectoryID("a")] * 2,
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_are_refused(renderer, case, sentence):
    generator, *_ = scripted(renderer, scripts=[(ends(),)])
    with pytest.raises(InputError) as refused:
        generate(generator, {"prompts": [[]], "env_classes": ["0"], **REFUSED[case]})
    assert str(refused.value) == sentence


def test_an_empty_batch_and_no_concurrency(renderer, sentence):
    out = generate(*scripted(renderer))
    assert (out["response_ids"], out["rollout_metrics"]) == ([], {})
    assert error_of(InputError, scripted, renderer, max_concurrency=0) == sentence


def test_a_game_end_to_end(tiny_model, renderer):
    """Real sampling: every row is what the model gives its tokens, and equal seeds give equal rollouts."""
    torch = pytest.importorskip("torch")
    sampling = {"max_tokens": 96, "seed": 1, "temperature": 2.0}
    sampling |= guided_params(renderer, sensible_calls(3))

    def batch_of(backend, concurrency):
        client = RendererClient(renderer, backend=backend, sampling_params=sampling)
        game = partial(FindCell, FindCellSettings(grid=3, distractors=2, max_turns=3))
        generator = VLMGenerator(client, {"cell": game}, tensors="torch", max_concurrency=concurrency)
        seeds = [0, 0, 0, 1, 1, 1]
        ids = [TrajectoryID(f"board-{seed}", index) for index, seed in enumerate(seeds)]
        batch = {"prompts": [[]] * 6, "env_classes": ["cell"] * 6, "trajectory_ids": ids}
        return generate(generator, batch | {"env_extras": [{"seed": seed} for seed in seeds]})

    backend = LocalBackend(tiny_model)
    out = batch_of(backend, 6)
    assert out["errors"] == [None] * 6
    for name in ("environment/invalid_calls", "rollout/rendered_anew"):
        assert out["rollout_metrics"][name] == 0
    assert max(len(grids) for grids in out["image_grid_thw"]) > 1
    again = batch_of(backend, 2)
    assert (again["response_ids"], again["rewards"]) == (out["response_ids"], out["rewards"])
    row = max(range(6), key=lambda index: len(out["response_ids"][index]))
    ids = [*out["prompt_token_ids"][row], *out["response_ids"][row]]
    kinds = torch.tensor([[token == renderer.tokenizer.token_id("<|image_pad|>") for token in ids]]).int()
    media = {name: out[name][row] for name in ("pixel_values", "image_grid_thw")}
    with torch.inference_mode():
        logits = backend.model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **media).logits[0]
    assert bool(torch.isfinite(logits).all())
    assert sum(out["loss_masks"][row]) < len(out["loss_masks"][row])


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_step_wise_keeps_the_reward_of_an_empty_completion(empty):
    trajectory = Trajectory("t")
    for index in range(3):
        ids = [] if index == empty else [7, 8]
        prompt = list(range(10 * index + 1))
        trajectory.append(prompt, ids, logprobs=[-0.5] * len(ids), reward=0.25 * 2**index)
    rows = rows_of(trajectory, TrajectoryID("t"), step_wise=True)
    assert [row.response_ids for row in rows] == [[7, 8]] * 2
    assert [row.is_last_step for row in rows] == [False, True]
    assert sum(sum(row.rewards) for row in rows) == pytest.approx(1.75)
    assert rows[0].rewards[1] == (0.75 if empty < 2 else 0.25)


def test_trajectories_come_as_they_finish_with_ids_of_their_own(renderer):
    generator, batch, *_ = scripted(renderer, scripts=[(), (ends(1.0),)])

    class Waiting(ScriptedEnvironment):
        async def step(self, action):
            await another_came.wait()
            return await super().step(action)

    batch["env_classes"][0] = lambda: Waiting([ends(1.0)])
    seen = []

    async def run():
        async for trajectory in generator.stream(batch):
            seen.append(trajectory)
            another_came.set()

    for _ in range(2):  # two epochs with the same names
        another_came = asyncio.Event()
        asyncio.run(run())
    assert [trajectory.extra["name"] for trajectory in seen] == ["1_0", "0_0"] * 2
    assert len({trajectory.trajectory_id for trajectory in seen}) == 4


async def test_a_trajectory_that_failed_has_the_stop_reason_of_its_row(renderer):
    generator, batch, *_ = scripted(renderer, scripts=[(asks("Sure?"), KeyError("lost"))])
    (trajectory,) = await generator.roll_out(batch)
    assert (trajectory.error, trajectory.extra["stop_reason"]) == ("KeyError: 'lost'", "error")


async def test_leaving_the_stream_cancels_the_rest(renderer):
    def say(request):
        return "Yes." if len(backend.requests) == 1 else None

    generator, _, backend, made = scripted(renderer, say, scripts=[(ends(1.0),)])
    stream = rollouts(generator.client, generator.environments["0"], [[]] * 3)
    async for trajectory in stream:
        assert trajectory.error is None
        break
    await stream.aclose()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert all(each.closed == 1 for each in made)
