"""TRL's trainer on trajectories: late images, branches and packed rows, with sampler and trainer compared."""

import itertools

import datasets
import numpy as np
import pytest
import torch
import trl
from PIL import Image
from transformers import AutoProcessor

from integrations.recipe_cases import run_recipe
from mmrender import Trajectory
from mmrender.errors import InputError
from mmrender.integrations.trl import GRPOTrainer
from mmrender.integrations.trl_trainer import reward_of
from mmrender.model.weights import load_model

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 3e-3,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 8,
    "temperature": 0.9,
    "gradient_checkpointing": False,
}


def shown(number):
    picture = Image.new("RGB", (64 + 32 * (number % 2), 64), (40 * number % 255, 99, 199))
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}


async def play(client, row):
    """Two turns with an image each; the second is sampled twice, and even tokens are rewarded."""
    trajectory, conversation = Trajectory(), [shown(row["number"])]
    options = {"forbid_media_tokens": True, "sampling_params": {"ignore_eos": True}}
    turn = await client.create_completion(conversation, trajectory=trajectory, **options)
    turn.step.reward = 0.25
    conversation += [turn.message, shown(row["number"] + 1)]
    for _ in range(2):
        last = await client.create_completion(
            conversation, trajectory=trajectory, parent=turn.step, **options
        )
        last.step.reward = float(np.mean(last.step.completion_ids % 2 == 0))
    return trajectory


def trainer_of(renderer, tiny_model, tmp_path, played=play, **settings):
    return GRPOTrainer(
        load_model(tiny_model, dtype="float32", device="cpu", purpose="a test"),
        played,
        renderer=renderer,
        row_tokens=200,
        args=trl.GRPOConfig(tmp_path, **{**SETTINGS, **settings}),
        train_dataset=datasets.Dataset.from_list([{"prompt": "", "number": index} for index in range(8)]),
        processing_class=AutoProcessor.from_pretrained(tiny_model),
    )


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_it_trains_on_branches_and_late_images(renderer, tiny_model, tmp_path, loss_type):
    trainer = trainer_of(renderer, tiny_model, tmp_path, loss_type=loss_type, epsilon_high=5.0)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    seen, collated = [], trainer._batch

    def watched(part):
        batch = collated(part)
        seen.append(batch)
        return batch

    trainer._batch = watched
    trainer.train()
    changed = [
        name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert any("visual" in name for name in changed)
    logs = [entry for entry in trainer.state.log_history if "sampler_trainer/max" in entry]
    assert len(logs) == 3
    # Each step samples with the weights of that step: others would differ by far more.
    assert max(entry["sampler_trainer/max"] for entry in logs) < 1e-3
    assert all(0.25 <= entry["reward"] <= 1.25 for entry in logs)
    for batch in seen:
        assert len(batch) < len(batch.seq_lens)  # packed
        assert len(batch.seq_lens) == 2 * SETTINGS["per_device_train_batch_size"]  # two branches each
        assert batch.advantages[~batch.loss_mask].abs().max() == 0


def test_a_token_that_branches_share_is_trained_on_once(renderer, tiny_model, tmp_path):
    ranks = itertools.count()

    async def ranked(client, row):
        trajectory = await play(client, row)
        for step in trajectory.steps:
            step.reward = 0.0
        trajectory.reward = float(next(ranks))
        return trajectory

    trainer = trainer_of(renderer, tiny_model, tmp_path, ranked)
    samples = trainer._parts([{"number": 0}] * 4, 4, 1)[0].samples
    assert [int(sample.loss_mask.sum()) for sample in samples] == [16, 8] * 4
    advantages = [np.unique(sample.advantages[sample.loss_mask]).tolist() for sample in samples]
    assert advantages[::2] == advantages[1::2]
    rewards = np.arange(4.0)
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert sorted(value for [value] in advantages[::2]) == pytest.approx(expected.tolist())


def test_rewards_are_means_over_branches():
    trajectory = Trajectory()
    trajectory.reward = 1.0
    first = trajectory.append([1, 2], [3], logprobs=[-1], reward=0.5)
    for reward in (0.0, 1.0):
        trajectory.append([1, 2, 3, 4], [5], logprobs=[-1], parent=first, reward=reward)
    assert reward_of(trajectory) == pytest.approx(1.0 + 0.5 + 0.5)


@pytest.mark.parametrize(
    ("settings", "name"), [({"beta": 0.1}, "beta"), ({"loss_type": "sapo"}, "loss_type")]
)
def test_settings_without_a_meaning_here_are_refused(renderer, tiny_model, tmp_path, settings, name):
    with pytest.raises(InputError, match=name):
        trainer_of(renderer, tiny_model, tmp_path, **settings)


def test_the_recipe_trains(monkeypatch, capsys, tmp_path):
    lines = [line.split() for line in run_recipe("trl", monkeypatch, capsys, tmp_path) if "nats" in line]
    assert [line[1] for line in lines] == ["1", "2"]
    assert max(float(line[-1]) for line in lines) < 1e-3
