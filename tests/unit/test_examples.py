"""The examples run: each is a program of at most 120 lines that a reader starts from."""

import asyncio
import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from guided import guided_params
from kit import assistant, shown
from mmrender import RendererClient
from mmrender.client.local import LocalBackend
from mmrender.messages import Message
from mmrender.rollout import Turn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LONGER = {"find_cell.py"}
"""Games, whose rules take room."""


@pytest.fixture
def photo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(str(files("mmrender.testing").joinpath("data", "photo.jpg")), "photo.jpg")
    return tmp_path / "photo.jpg"


def test_examples_are_short():
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {name for name, count in lines.items() if count > 120} <= LONGER


def test_a_worker_and_a_trainer(tiny_model, photo):
    import worker_and_trainer

    assert -2 < worker_and_trainer.main(str(tiny_model), str(photo)) < 2


def test_fine_tuning_with_packing(tiny_model, photo):
    import sft_packed

    recorded = [
        {"messages": [
            {"role": "user", "content": [shown("photo.jpg"), f"Question {number}?"]},
            assistant(f"Answer {number}."),
        ]}
        for number in range(2)
    ]  # fmt: skip
    first, second = sft_packed.train(str(tiny_model), json.loads(json.dumps(recorded)))
    assert second < first


def test_an_audit_of_a_broken_set_up(tiny_model, tmp_path, capsys):
    import audit_broken_setup

    sound, unsound = audit_broken_setup.main(str(tiny_model), str(tmp_path / "audit.html"))
    assert sound.ok
    assert not unsound.ok
    assert "encoded again" in (tmp_path / "audit.html").read_text("utf-8")


def test_a_custom_environment_with_tool_images(tiny_model, renderer, photo, capsys):
    """With a model that is guided to look until its turns are over."""
    import look_closer

    call = {"name": "look", "arguments": {"left": 0.5, "top": 1}}
    guided = guided_params(renderer, [assistant("", tool_calls=[call])])
    sampling = {"max_tokens": 64, "temperature": 1.0, "seed": 1, **guided}
    client = RendererClient(renderer, backend=LocalBackend(tiny_model), sampling_params=sampling)
    first, second = asyncio.run(look_closer.play(client, str(photo), 2, failures="raise"))
    assert [len(first), len(second)] == [4, 4]
    assert len(set(first.steps[-1].multi_modal_data.mm_hashes["image"])) == 2
    assert capsys.readouterr().out.count("4 turns, 4 images, reward 0.00") == 2
    game = look_closer.LookCloser()
    game.reset([], {"photo": photo, "question": "?", "answer": "cow"})
    seen = game.step(Turn(Message(role="assistant", content="A cow.")))
    assert (seen.done, seen.reward, seen.info) == (True, 1.0, {"right": 1.0})
