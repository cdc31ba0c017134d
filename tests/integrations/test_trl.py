"""TRL's own trainers on mmrender's batches and rollouts."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import trl
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from kit import data_url
from mmrender import TrainingSample, Trajectory, TrajectoryError, generate
from mmrender.client.local import LocalBackend
from mmrender.integrations.trl import Rollouts
from mmrender.model.weights import load_model
from mmrender.training import Collator, ModelFamily, collate
from mmrender.training.losses import cispo_loss, dr_grpo_loss, grpo_loss, gspo_loss, ppo_loss, step_counts

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-2,
}


def picture(index):
    return Image.new("RGB", (64 + 32 * (index % 3), 64), (40 * index % 255, 99, 199))


@pytest.mark.parametrize("packed", [False, True])
def test_sft_of_images_trains_with_rows_packed_or_not(renderer, tiny_model, tmp_path, packed):
    rows = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": data_url(picture(index))},
                    {"type": "text", "text": "?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": f"Answer {index}."}]},
        ]
        for index in range(8)
    ]
    arguments = trl.SFTConfig(
        tmp_path,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        **SETTINGS,
    )
    widths = []

    class Seen(Collator):
        def __call__(self, examples):
            inputs = super().__call__(examples)
            widths.append(inputs["input_ids"].shape)
            return inputs

    trainer = trl.SFTTrainer(
        load_model(tiny_model, dtype="float32", device="cpu", purpose="a test"),
        args=arguments,
        data_collator=Seen(ModelFamily.from_config(tiny_model), 0, renderer, packed=packed),
        train_dataset=datasets.Dataset.from_list([{"messages": row} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert {shape[0] for shape in widths} == {1 if packed else 4}


def played(renderer, backend, turns):
    """A function that plays a prompt of one or two turns, of which the second asks about the same images."""

    async def play(prompt):
        trajectory = Trajectory()
        ids, sidecar = None, None
        for turn in range(turns):
            said = await generate(
                renderer=renderer,
                backend=backend,
                model="tiny",
                messages=prompt if turn == 0 else None,
                prompt_ids=ids,
                multi_modal_data=sidecar,
                sampling_params={"max_tokens": 6, "temperature": 1.0},
                forbid_media_tokens=True,  # the weights are random
            )
            trajectory.append_turn(said)
            bridged = renderer.bridge_to_next_turn(
                said.prompt_ids,
                said.completion_ids,
                [{"role": "user", "content": "Again?"}],
                previous_multi_modal_data=said.multi_modal_data,
            )
            ids, sidecar = bridged.token_ids, bridged.multi_modal_data
        return trajectory

    return play


@pytest.mark.parametrize("turns", [1, 2])
def test_grpo_trains_on_trajectories(renderer, tiny_model, tmp_path, turns):
    model = load_model(tiny_model, dtype="float32", device="cpu", purpose="a test")
    processor = AutoProcessor.from_pretrained(tiny_model)
    data = datasets.Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"Which {index}?"}], "image": picture(index)}
            for index in range(4)
        ]
    )
    seen = []

    def reward(completions, **kwargs):
        return [float(index % 2) for index in range(len(completions))]

    rollouts = Rollouts(played(renderer, LocalBackend(model), turns))

    def watched(prompts, trainer):
        seen.append(rollouts(prompts, trainer))
        return seen[-1]

    trainer = trl.GRPOTrainer(
        model,
        reward,
        args=trl.GRPOConfig(
            tmp_path, per_device_train_batch_size=4, num_generations=2, max_completion_length=64, **SETTINGS
        ),
        train_dataset=data,
        processing_class=processor,
        rollout_func=watched,
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert any("visual" in name for name in changed)
    for fields in seen:
        for completion, mask, logprobs in zip(
            fields["completion_ids"], fields["env_mask"], fields["logprobs"], strict=True
        ):
            assert len(completion) == len(mask) == len(logprobs)
            assert (0 in mask) == (turns == 2)


async def test_what_trl_cannot_train_on_is_refused_by_name(renderer):
    image = {"type": "image", "image": picture(1)}
    branched, empty = Trajectory(), Trajectory()
    branched.append([1, 2], [3], logprobs=[-1])
    branched.append([4, 5], [6], logprobs=[-1])
    grown = renderer.render([{"role": "user", "content": [image]}])
    late = Trajectory()
    first = late.append([1, 2], [3], logprobs=[-1])
    late.append(
        [1, 2, 3, *grown.token_ids],
        [9],
        logprobs=[-1],
        multi_modal_data=grown.multi_modal_data.shifted(3),
        parent=first,
    )
    empty.append([1, 2])
    for trajectory, problem in (
        (branched, "one sequence"),
        (empty, "one sequence"),
        (late, "an image appears"),
    ):

        async def play(_, trajectory=trajectory):
            return trajectory

        rollouts = Rollouts(play)
        with pytest.raises(TrajectoryError, match=problem):
            await asyncio.to_thread(rollouts, ["?"], None)


LOSSES = {
    "bnpo": lambda logprobs, batch: ppo_loss(logprobs, batch, tokens=step_counts([batch]).tokens),
    "grpo": lambda logprobs, batch: grpo_loss(logprobs, batch, samples=len(batch)),
    "dr_grpo": lambda logprobs, batch: dr_grpo_loss(logprobs, batch, samples=len(batch), max_tokens=7),
    "cispo": lambda logprobs, batch: cispo_loss(
        logprobs, batch, tokens=step_counts([batch]).tokens, low=1.0, high=0.1
    ),
    "sequence": lambda logprobs, batch: gspo_loss(logprobs, batch, samples=len(batch), low=0.2, high=0.2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_trls(name):
    """TRL's own method on a trainer of the settings that it reads, for log-probabilities that are drawn."""
    rng = np.random.default_rng(0)
    samples = []
    for length in (6, 4, 5):
        advantage = np.full(length, rng.normal(), np.float32)
        logprobs = np.append(0, -rng.random(length - 1)).astype(np.float32)
        ids = rng.integers(1, 50, length).astype(np.int32)
        samples.append(TrainingSample(ids, np.arange(length) > 0, logprobs, advantages=advantage))
    batch = collate(samples, ModelFamily(model_type="text"), pad_token_id=0)
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    ours = (batch.logprobs + 0.3 * noise).requires_grad_()

    class Settings(SimpleNamespace):
        def __getattr__(self, name):
            return None  # TRL asks for many switches, which are all off

    trainer = Settings(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        importance_sampling_level="sequence" if name == "sequence" else "token",
        beta=0.0,
        loss_type="grpo" if name == "sequence" else name,
        epsilon_low=0.2,
        epsilon_high=1.1 if name == "cispo" else 0.2,
        max_completion_length=7,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        args=Settings(steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            ours[:, 1:],
            torch.zeros_like(ours[:, 1:]),
            None,
        ),
    )
    inputs = {
        "prompt_ids": batch.input_ids[:, :1],
        "prompt_mask": batch.attention_mask[:, :1].long(),
        "completion_ids": batch.input_ids[:, 1:],
        "completion_mask": batch.loss_mask[:, 1:].long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.logprobs[:, 1:],
        "num_items_in_batch": batch.loss_mask.sum(),
    }
    theirs = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    mine = LOSSES[name](ours, batch)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad(mine, ours), torch.autograd.grad(theirs, ours))
