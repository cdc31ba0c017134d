"""The example that learns, played by an agent that calls a gateway: every game's trajectory trains."""

import ast
import asyncio
import inspect
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import grpo.agent  # noqa: E402
import grpo.one_process  # noqa: E402
from grpo.agent_worker import AgentWorker  # noqa: E402
from grpo.config import AGENT, ZOOM, Config, build, parse  # noqa: E402
from grpo.games import CALL, ZoomedCell  # noqa: E402
from grpo.one_process import run  # noqa: E402
from grpo.trainer import Trainer, reward_of, with_advantages  # noqa: E402
from grpo.worker import Worker, counts_of  # noqa: E402
from mmrender import Renderer, build_training_sample  # noqa: E402
from mmrender.client.local import LocalBackend  # noqa: E402
from mmrender.model.weights import load_model  # noqa: E402
from rollout_cases import ScriptedBackend  # noqa: E402


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = Config(
        out=tmp_path_factory.mktemp("agent"),
        agent=True,
        grid=2,
        boards=4,
        rollouts=4,
        held_out=8,
        audit_share=1.0,
        explain=0,
        hidden_size=32,
        quiet=True,
    )
    build(config)
    return config


def test_the_agent_knows_the_client_of_openai_alone():
    tree = ast.parse(inspect.getsource(grpo.agent))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"collections.abc", "typing", "openai"}


def test_settings_of_an_agent():
    assert parse(["--agent"]) == Config(agent=True)
    assert parse(["--agent", "--game", "zoom"]) == replace(
        Config(), game="zoom", agent=True, **{**ZOOM, **AGENT}
    )


@pytest.mark.parametrize("game", ["cell", "zoom"])
def test_every_game_trains_with_the_weights_that_sampled_it(small, game):
    async def play():
        config = replace(small, game=game)
        renderer = Renderer.from_pretrained(config.out / "model")
        model = load_model(config.out / "model", "float32", "cpu", purpose="the test")
        backend, trainer = LocalBackend(model, tokenizer=renderer.tokenizer), None
        trainer = Trainer(config, model, renderer.tokenizer)
        async with AgentWorker(config, renderer, backend) as worker:
            for step in range(2):
                games = await worker.train_rollouts(step)
                check(games, step)
                trainer.audit(games)
                assert trainer.update(games)["difference"] < 1e-4
                await asyncio.to_thread(backend.update_weights, (), str(trainer.step))
            assert 0 <= await worker.held_out() <= 1

    def check(games, version):
        assert len(games) == 16
        assert [each.extra["game"] for each in games] == [0, 1, 2, 3] * 4
        turns = [step.completion_ids.tolist() for each in games for step in each.steps[:1]]
        assert len({tuple(turn) for turn in turns}) > 1  # each game has a seed of its own
        for each, sample in zip(games, with_advantages(games), strict=True):
            assert len(each.branches()) == 1
            assert each.extra.get("incomplete") is None
            assert [step.extra["gateway"]["prompt"] for step in each.steps] == [
                "rendered", *["bridged"] * (len(each) - 1),
            ]  # fmt: skip
            assert {span.version for step in each.steps for span in step.weight_versions} == {str(version)}
            sampled = np.concatenate([step.completion_ids for step in each.steps])
            assert sample.token_ids[sample.loss_mask].tolist() == sampled.tolist()
            assert np.isfinite(sample.logprobs[sample.loss_mask]).all()
            assert len(sample.media_spans) == len(each.items) > 0
            assert sample.allowed

    asyncio.run(play())


@pytest.mark.parametrize("game", ["cell", "zoom"])
def test_games_of_the_agent_are_token_for_token_those_of_environments(small, game, monkeypatch):
    config = replace(small, game=game)
    renderer = Renderer.from_pretrained(config.out / "model")
    model = load_model(config.out / "model", "float32", "cpu", purpose="the test")
    backend = LocalBackend(model, tokenizer=renderer.tokenizer)
    allowed = ZoomedCell.sampling.fget
    call = renderer.tokenizer.token_id("<tool_call>")

    def sampling(game):
        """The same for all turns, as a session has it, with more calls than an untrained model makes."""
        return {**allowed(game), "logit_bias": {call: 3.0}}

    monkeypatch.setattr(ZoomedCell, "sampling", property(sampling))
    monkeypatch.setattr(ZoomedCell, "reset", with_sampling(ZoomedCell.reset, sampling))
    monkeypatch.setattr(ZoomedCell, "step", with_sampling(ZoomedCell.step, sampling))

    async def play():
        expected = await Worker(config, renderer, backend=backend).train_rollouts(3)
        async with AgentWorker(config, renderer, backend) as worker:
            return expected, await worker.train_rollouts(3)

    expected, games = asyncio.run(play())
    assert len(games) == len(expected) == 16
    for one, other in zip(games, expected, strict=True):
        assert (one.extra["group"], one.extra["game"]) == (str(other.extra["group"]), other.extra["game"])
        assert reward_of(one) == reward_of(other)
        for step, same in zip(one.steps, other.steps, strict=True):
            assert step.prompt_ids.tolist() == same.prompt_ids.tolist()
            assert step.completion_ids.tolist() == same.completion_ids.tolist()
            assert step.allowed == same.allowed
            assert np.allclose(step.logprobs, same.logprobs, atol=1e-4)
    assert max(len(each) for each in games) == (1 if game == "cell" else 2)


def with_sampling(method, sampling):
    """A method of a game whose observations allow the tokens of any turn."""
    return lambda game, *arguments: replace(method(game, *arguments), sampling_params=sampling(game))


def test_games_with_the_tool_reward_the_right_answer_and_end_after_two_calls(small):
    shown_before, config = Counter(), replace(small, game="zoom", constrained=False, boards=8)
    renderer = Renderer.from_pretrained(config.out / "model")

    def say(request):
        """Turns come in any order, so a letter follows from the picture and how often that was shown."""
        pictures = [item.identity for item in request.multi_modal_data.mm_items["image"]]
        shown_before[pictures[-1]] += 1
        number = int(pictures[-1][:8], 16) + shown_before[pictures[-1]]
        return "ABCD"[number % 4] if len(pictures) == 2 else CALL % "ABCDE"[number % 5]

    async def play():
        async with AgentWorker(config, renderer, ScriptedBackend(renderer, say)) as worker:
            return await worker.train_rollouts(0)

    games = asyncio.run(play())
    # The script ends turns in another stop token than the template.
    stop, end = renderer.get_stop_token_ids()[0], renderer.tokenizer.token_id("<|im_end|>")
    counts = counts_of(games)
    assert counts["turns"] == counts["later_turns"] * 2 == counts["bridged"] * 2 == len(games) * 2
    for game in games:
        expert = ZoomedCell(2, 64)
        recorded = build_training_sample(
            renderer, expert.recorded(int(game.extra["group"])), tools=expert.tools
        )
        pictures = [span.item.identity for span in recorded.media_spans]
        shown = [span.item.identity for span in game.steps[-1].media]
        said = game.steps[-1].messages[-1]["content"]
        if game.extra["info"]["zoomed"]:
            assert shown == pictures
            if said == expert.answer:
                tokens = [end if token == stop else token for token in game.branches()[0].token_ids]
                assert tokens == recorded.token_ids.tolist()[: len(tokens)]
        assert game.extra["info"]["called"] == (len(shown) == 2)
        assert reward_of(game) == (len(shown) == 2 and said == expert.answer)
    assert 0 < sum(map(reward_of, games)) < len(games)


@pytest.mark.parametrize("arguments", ['{"cell": A}', '["A"]', '"A"', "{}", '{"cell": ["A"]}'])
def test_a_call_that_names_no_cell_loses_the_game(small, arguments):
    config = replace(small, game="zoom", constrained=False, boards=1, rollouts=1)
    renderer = Renderer.from_pretrained(config.out / "model")
    call = CALL.replace('{"cell": "%s"}', arguments)

    async def play():
        async with AgentWorker(config, renderer, ScriptedBackend(renderer, lambda _: call)) as worker:
            return await worker.train_rollouts(0)

    [game] = asyncio.run(play())
    assert (reward_of(game), game.extra["info"]["called"], game.extra.get("incomplete")) == (0.0, 0.0, None)


def test_a_run_with_an_agent(small, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.one_process, "save_plot", lambda runs, path: None)
    config = replace(small, out=tmp_path, steps=2, evaluate_every=2, until=2.0)
    asyncio.run(run(config))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["held_out"] <= 1 for row in (rows[0], rows[2]))
    assert (tmp_path / "rollouts.html").exists()
