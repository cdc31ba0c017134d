"""The example that learns: groups, advantages, what a fault does, and a run that is cut off."""

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from dataclasses import fields, replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from kit import error_of

torch = pytest.importorskip("torch")

import grpo.__main__ as program  # noqa: E402
import grpo.one_process  # noqa: E402
from grpo.config import ZOOM, Config, parse  # noqa: E402
from grpo.faults import encoded_again  # noqa: E402
from grpo.games import CALL, CAPTION, LookedCell, MarkedCell, ZoomedCell, draw  # noqa: E402
from grpo.one_process import run  # noqa: E402
from grpo.report import Report, summary, table  # noqa: E402
from grpo.trainer import Trainer, reward_of, with_advantages  # noqa: E402
from grpo.worker import Worker, counts_of  # noqa: E402
from mmrender import (  # noqa: E402
    Renderer,
    Trajectory,
    build_training_sample,
)
from rollout_cases import ScriptedBackend  # noqa: E402

SMALL = Config(
    grid=2,
    boards=4,
    rollouts=2,
    steps=3,
    until=2.0,
    held_out=8,
    evaluate_every=2,
    audit_share=0,
    hidden_size=32,
    quiet=True,
)


def rows_of(config):
    return [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]


def weights_of(config):
    return torch.load(config.out / "checkpoint.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = replace(SMALL, out=tmp_path_factory.mktemp("runs") / "whole")
    asyncio.run(run(config))
    return config


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """A plot takes a second; that of `whole` is drawn."""
    monkeypatch.setattr(grpo.one_process, "save_plot", lambda runs, path: None)


def test_settings_are_flags():
    assert parse([]) == Config()
    assert parse(["--grid", "4", "--shuffled", "--learning-rate", "1e-3"]) == replace(
        Config(), grid=4, shuffled=True, learning_rate=1e-3
    )
    assert parse(["--game", "zoom"]) == replace(Config(), game="zoom", **ZOOM)
    assert parse(["--boards", "5", "--game", "zoom"]).boards == 5


def test_help_explains_every_flag_and_names_the_defaults_of_each_game(capsys):
    error_of(SystemExit, parse, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"--{setting.name.replace('_', '-')}" in text for setting in fields(Config))
    assert "Games of each board, one group (8, 4 in zoom, 8 with --agent)" in text


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--game", "chess"], "argument --game: invalid choice: 'chess'"),
        (["--grid", "6"], "argument --grid: 6 is not 2 to 5, so that each cell has a letter"),
    ],
)
def test_a_flag_that_no_game_has_is_refused_before_a_folder_is_made(flags, problem, capsys, tmp_path):
    error_of(SystemExit, parse, [*flags, "--out", str(tmp_path / "run")])
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_missing_packages_are_named_before_a_run_begins(monkeypatch, tmp_path):
    present = {"torch", "transformers", "aiohttp", "starlette", "uvicorn"}
    monkeypatch.setattr(program, "find_spec", lambda name: name if name in present else None)
    assert program.missing_packages(Config()) == ["matplotlib", "rich"]
    assert program.missing_packages(Config(quiet=True)) == ["matplotlib"]
    assert program.missing_packages(Config(agent=True)) == ["matplotlib", "rich", "openai"]
    monkeypatch.setattr(sys, "argv", ["grpo", "--out", str(tmp_path / "run")])
    assert error_of(SystemExit, program.main).startswith("the example needs matplotlib, rich: pip install ")
    assert not (tmp_path / "run").exists()


def test_a_run_shows_what_it_did(whole):
    before, *rows = rows_of(whole)
    assert (before["step"], before["rollouts"], before["updates"]) == (0, 0, 0)
    assert 0 <= before["held_out"] <= 1
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["rollouts"] for row in rows] == [8, 16, 24]
    assert all(0 <= row["reward"] <= 1 and row["difference"] < 1e-4 for row in rows)
    assert [row["step"] for row in rows if "held_out" in row] == [2, 3]
    assert {path.name for path in whole.out.iterdir()} == {
        "model", "settings.json", "metrics.jsonl", "checkpoint.pt", "plot.png", "early.mmr", "early.mmr.index",
        "rollouts.html",
    }  # fmt: skip


def test_a_run_ends_by_held_out_boards_that_were_played_after_a_step(tmp_path):
    config = replace(SMALL, out=tmp_path, until=0.0)  # which the score before the first step reaches, too
    asyncio.run(run(config))
    assert [row["step"] for row in rows_of(config)] == [0, 1, 2]


def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(whole, tmp_path):
    config = replace(whole, out=tmp_path / "cut")
    asyncio.run(run(replace(config, steps=2)))
    # A step after the checkpoint was written down, and its weights were lost.
    with (config.out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**rows_of(config)[-1], "step": 3, "reward": -1.0}) + "\n")
    asyncio.run(run(config))
    played = ["held_out", "reward"]
    assert [[row.get(name) for name in played] for row in rows_of(config)] == [
        [row.get(name) for name in played] for row in rows_of(whole)
    ]
    torch.testing.assert_close(weights_of(config), weights_of(whole), atol=1e-5, rtol=1e-4)


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path):
    lines = ['{"step": 1}\n', '{"step": 2}\n', '{"step": 3}\n', '{"ste']
    for kept in range(4):
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        Report(replace(SMALL, out=tmp_path), kept)
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:kept])


def test_a_warm_up_that_was_cut_off_goes_on_from_its_last_play_of_held_out_boards(tmp_path, monkeypatch):
    warm = replace(SMALL, game="zoom", warm_up=7, warm_up_until=2.0, recorded=2, steps=1, row_tokens=1024)
    cut, uncut = replace(warm, out=tmp_path / "cut"), replace(warm, out=tmp_path / "uncut")
    asyncio.run(run(uncut))
    imitate = Trainer.imitate

    def cut_off(trainer, batch):
        if trainer.updates == 6:
            raise RuntimeError("cut off")
        return imitate(trainer, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "imitate", cut_off)
        assert error_of(RuntimeError, asyncio.run, run(cut)) == "cut off"
    assert [row["updates"] for row in rows_of(cut)] == [0, 5]
    asyncio.run(run(cut))
    assert [row.get("updates") for row in rows_of(cut)] == [0, 5, 7, None]
    for row, expected in zip(rows_of(cut), rows_of(uncut), strict=True):
        assert row.get("held_out") == expected.get("held_out")
        assert row.get("loss", 0.0) == pytest.approx(expected.get("loss", 0.0), rel=1e-4)
    torch.testing.assert_close(weights_of(cut), weights_of(uncut), atol=1e-5, rtol=1e-4)


def test_a_log_has_a_line_for_each_play_of_held_out_boards(tmp_path, capsys):
    report = Report(replace(SMALL, out=tmp_path, quiet=False, steps=40), 0)
    report.add({"step": 0, "updates": 5, "loss": 2.5, "held_out": 0.25})
    report.add({"step": 1, "reward": 0.5})
    report.add({"step": 2, "reward": 0.5, "held_out": 0.75})
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}: 0.25 of the held-out boards by chance, at most 40 steps",
        "step 0  updates 5  loss 2.5  held_out 0.25",
        "step 2  held_out 0.75  reward 0.5",
    ]


def test_a_narrow_terminal_shows_the_bar_and_the_held_out_share(tmp_path, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    report = Report(replace(SMALL, out=tmp_path, quiet=False, steps=40), 0)
    measured = {"reward": 0.1211, "entropy": 1.912, "kl": -1.2e-8, "tokens_per_s": 1234.5}
    with report.display:
        report.add({"step": 3, "held_out": 0.234375, **measured})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    shown = [line for line in re.split(r"[\r\n]+", text) if "held_out 0.234  reward 0.121" in line]
    assert shown
    assert all(" 3/40 " in line and len(line) <= 80 for line in shown)


def test_a_summary_and_a_table_of_runs(tmp_path):
    rows = [
        {
            "step": 0,
            "rollouts": 0,
            "updates": 0,
            "held_out": 0.125,
            "evaluate_s": 1,
            "evaluate_processor_s": 2,
        },
        {"step": 0, "rollouts": 0, "updates": 5, "held_out": 0.5, "train_s": 1, "train_processor_s": 2},
        {
            "step": 1,
            "rollouts": 64,
            "reward": 0.5,
            "difference": 2e-6,
            "rollout_s": 9,
            "rollout_processor_s": 8,
        },
        {"step": 2, "rollouts": 128, "reward": 0.6, "difference": 1e-6, "held_out": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table([tmp_path]).splitlines()[-1] == (
        f"| {tmp_path.name} | 0.12 | 0.50 (5 updates) | 0.75 | 2 | 128 | 11 | 12 | 2e-06 |"
    )
    config = replace(SMALL, out=tmp_path, until=0.99, steps=2)
    assert summary(config) == (
        f"{tmp_path}: 6 of 8 held-out boards answered rightly after 2 steps, 128 games; --steps 4 goes on"
    )
    (tmp_path / "plot.png").touch()
    assert summary(replace(config, until=0.75)).splitlines() == [
        f"{tmp_path}: 6 of 8 held-out boards answered rightly after 2 steps, 128 games",
        f"  {tmp_path / 'plot.png'}",
    ]


@pytest.mark.parametrize("flags", [[], ["--agent"]], ids=["environments", "agent"])
def test_a_run_is_stopped_by_an_interrupt_in_the_middle_of_a_step_and_goes_on(
    flags, tmp_path, monkeypatch, capsys
):
    if flags:
        pytest.importorskip("openai")
    small = {"grid": 2, "boards": 4, "rollouts": 2, "held-out": 8, "evaluate-every": 1, "hidden-size": 32}
    sizes = [f"--{name}={value}" for name, value in small.items()]
    command = ["grpo", "--out", str(tmp_path), "--audit-share=0", "--until=2", "--steps=3", *sizes, *flags]
    monkeypatch.setattr(sys, "argv", command)
    step, games = MarkedCell.step, count(1)

    def interrupting(game, turn):
        if next(games) == 8 + 2 * (8 + 8) + 4:  # two steps are done, each with its held-out boards
            os.kill(os.getpid(), signal.SIGINT)
        return step(game, turn)

    # A shell that starts a command in the background makes it ignore interrupts, and these tests with it.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(MarkedCell, "step", interrupting)
            assert error_of(SystemExit, program.main) == "130"
    finally:
        signal.signal(signal.SIGINT, inherited)
    text = capsys.readouterr()
    assert text.err == f"\n{tmp_path}: stopped. The same command goes on from the last checkpoint.\n"
    assert [line.split()[1] for line in text.out.splitlines()[1:]] == ["0", "1", "2"]
    program.main()
    begin, played, end, *_ = capsys.readouterr().out.splitlines()
    assert begin.endswith("at most 3 steps, goes on from step 2")
    assert played.startswith("step 3  held_out ")
    assert "held-out boards answered rightly after 3 steps, 24 games" in end


@pytest.mark.parametrize("answers", [1, 3])
def test_games_with_the_tool_are_bridged_hold_each_picture_once_and_reward_the_right_answer(whole, answers):
    renderer, shown_before = Renderer.from_pretrained(whole.out / "model"), Counter()
    config = replace(SMALL, game="zoom", boards=8, rollouts=4, answers=answers, constrained=False)

    def say(request):
        """Turns come in any order, so a letter follows from the picture and how often that was shown."""
        pictures = [item.identity for item in request.multi_modal_data.mm_items["image"]]
        shown_before[pictures[-1]] += 1
        letter = "ABCDE"[(int(pictures[-1][:8], 16) + shown_before[pictures[-1]]) % 5]
        return letter if len(pictures) == 2 else CALL % letter

    games = asyncio.run(Worker(config, renderer, backend=ScriptedBackend(renderer, say)).train_rollouts(0))
    counts = counts_of(games)
    assert counts["later_turns"] == counts["bridged"] == counts["turns"] - len(games) > 0
    looked = sum(len(game.steps) > 1 for game in games)
    assert counts["items"] == counts["pictures"] == len(games) + looked
    assert counts["turns"] == len(games) + answers * looked
    assert counts["branches"] == len(games) + (answers - 1) * looked
    for game in games:
        expert, said = ZoomedCell(2, 64), [step.messages[-1] for step in game.steps]
        recorded = build_training_sample(renderer, expert.recorded(game.extra["group"]), tools=expert.tools)
        pictures = [span.item.identity for span in recorded.media_spans]
        shown = [span.item.identity for span in game.steps[-1].media]
        cell = said[0]["tool_calls"][0]["function"]["arguments"]
        cell = (json.loads(cell) if isinstance(cell, str) else cell)["cell"]
        assert len(game.steps) == (1 if cell == "E" else 1 + answers)
        assert len(shown) == min(len(game.steps), 2)
        assert (shown == pictures) == (cell == expert.cell)
        right = [each["content"] == expert.answer for each in said[1:]] or [False]
        assert reward_of(game) == pytest.approx(np.mean(right))
    assert 0 < sum(map(reward_of, games)) < len(games)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_recorded_is_encoded_again_as_it_was_but_for_what_a_tool_said(whole, seed):
    renderer, game = Renderer.from_pretrained(whole.out / "model"), ZoomedCell(3, 64)
    sample = build_training_sample(renderer, game.recorded(seed), tools=game.tools)
    same = encoded_again(sample, tokenizer=renderer.tokenizer, sampled=True)
    assert np.array_equal(same.token_ids, sample.token_ids)
    assert np.array_equal(same.loss_mask, sample.loss_mask)
    parsed = encoded_again(sample, tokenizer=renderer.tokenizer, sampled=False)
    special = renderer.tokenizer.token_id(CAPTION)
    assert np.sum(parsed.token_ids == special) == np.sum(sample.token_ids == special) + 1
    assert np.array_equal(parsed.token_ids[parsed.loss_mask], sample.token_ids[sample.loss_mask])
    for before, after in zip(sample.media_spans, parsed.media_spans, strict=True):
        assert before.item is after.item
        assert set(parsed.token_ids[after.start : after.stop]) == set(
            sample.token_ids[before.start : before.stop]
        )


def test_a_folder_with_another_run_is_refused(whole):
    with pytest.raises(SystemExit, match="holds a run with another grid: 2, not 3"):
        asyncio.run(run(replace(whole, grid=3, steps=9)))


def test_an_audit_ends_a_run_with_its_finding(tmp_path):
    config = replace(SMALL, out=tmp_path, fault="stale", steps=1, audit_share=1.0, explain=0)
    assert "sampler and trainer differ before step 0" in error_of(SystemExit, asyncio.run, run(config))


def test_advantages_are_rewards_less_the_mean_of_their_group():
    rng = np.random.default_rng(0)
    games = []
    for number in range(24):
        game = Trajectory(f"t{number}", extra={"group": number % 5})
        for turn in range(1 + number % 3):
            game.append([1, 2] + [3] * turn, [3], logprobs=[-1.0], reward=float(rng.normal()))
        games.append(game)
    groups = {}
    for game in games:
        groups.setdefault(game.extra["group"], []).append(sum(step.reward for step in game.steps))
    samples = iter(with_advantages(games))
    for game in games:
        own = sum(step.reward for step in game.steps)
        expected = own - np.mean(groups[game.extra["group"]])
        for _ in game.samples():
            sample = next(samples)
            assert np.allclose(sample.advantages, np.where(sample.loss_mask, expected, 0), atol=1e-6)


def test_a_turn_that_branches_share_has_their_mean_reward_and_is_trained_on_once():
    game, other = (Trajectory(f"t{number}", extra={"group": 0}) for number in range(2))
    other.append([1, 2], [3], logprobs=[-1.0], reward=0.0)
    call = game.append([1, 2], [3, 4], logprobs=[-1.0, -1.0], reward=0.5)
    for token, reward in ((6, 1.0), (7, 0.0), (8, 0.0)):
        game.append([1, 2, 3, 4, 5], [token], parent=call, logprobs=[-1.0], reward=reward)
    mean = 0.5 + 1 / 3
    assert reward_of(game) == pytest.approx(mean)
    baseline = mean / 2
    expected = [
        [0, 0, mean - baseline, mean - baseline, 0, 1.5 - baseline],
        [0, 0, 0, 0, 0, 0.5 - baseline],
        [0, 0, 0, 0, 0, 0.5 - baseline],
    ]
    samples = with_advantages([game, other])
    assert np.allclose([sample.advantages for sample in samples[:3]], expected)
    assert np.allclose(samples[3].advantages, [0, 0, -baseline])


def test_it_learns(tmp_path):
    """On boards that come again at every step, the reward rises from chance by more than noise explains."""
    config = replace(SMALL, out=tmp_path, rollouts=8, steps=10, cycle=1, evaluate_every=10)
    asyncio.run(run(replace(config, learning_rate=2e-3, entropy_bonus=0.0)))
    rows = rows_of(config)[1:]
    late, count, chance = [row["reward"] for row in rows[-6:]], 6 * 32, 1 / 4
    assert rows[0]["entropy"] > 1.0
    # Three deviations of as many games at chance.
    assert np.mean(late) > chance + 3 * (chance * (1 - chance) / count) ** 0.5
    assert max(row["difference"] for row in rows) < 1e-4


@pytest.mark.parametrize("chosen", ["A", "C"])
def test_a_look_shows_the_board_of_the_chosen_cell(chosen):
    game = LookedCell(2, 64, [1, 2, 3, 4])
    asked = game.reset([], {"seed": 5})
    picture, marked = draw(5, 2, 64)
    assert asked.messages[0]["content"][0]["image"] == picture["image"]
    shown = game.step(SimpleNamespace(text=chosen))
    inside, letter = draw(f"5{chosen}", 2, 64)
    assert (shown.reward, shown.done) == (0.5 * (chosen == marked), False)
    assert [message["role"] for message in shown.messages] == ["tool"]
    assert shown.messages[0]["content"][0]["image"] == inside["image"]
    assert game.step(SimpleNamespace(text=letter)).reward == 0.5
