"""TRL's own trainers on mmrender's batches and rollouts."""

import asyncio
import inspect
from collections import defaultdict
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import trl
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from doc_pages import Page, lay_out, stand_in
from kit import data_url
from mmrender import RendererClient, TrainingSample, Trajectory
from mmrender.client.local import LocalBackend
from mmrender.errors import TrajectoryError
from mmrender.integrations.trl import Rollouts
from mmrender.model.weights import load_model
from mmrender.training import Collator, ModelFamily, collate, score_tokens
from mmrender.training.losses import cispo_loss, dr_grpo_loss, grpo_loss, gspo_loss, ppo_loss, step_counts
from training_models import FAMILIES, make_samples, tiny_family

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


@pytest.mark.parametrize("name", FAMILIES)
def test_sft_trains_every_family_packed_or_else_padded(name, tiny_model, tmp_path_factory, tmp_path):
    tiny = tiny_family(name, tmp_path_factory.getbasetemp())
    model, samples = deepcopy(tiny.model), make_samples(tiny, (1, 2, 0, 1))
    collator, count = (
        Collator(tiny.family, 0, packed="auto"),
        sum(int(each.loss_mask.sum()) for each in samples),
    )
    with torch.no_grad():  # one forward for each sample
        alone = [
            score_tokens(model, collate([each], tiny.family, pad_token_id=0)).logprobs for each in samples
        ]
    rows = []

    def inputs_of(examples):
        inputs = collator([samples[example["index"]] for example in examples])
        rows.append(len(inputs["labels"]))
        return inputs

    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(
            tmp_path,
            per_device_train_batch_size=4,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=None,
            **{**SETTINGS, "max_steps": 1},
        ),
        data_collator=inputs_of,
        train_dataset=datasets.Dataset.from_list([{"index": index} for index in range(4)]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(-sum(float(each.sum()) for each in alone) / count, abs=1e-4)
    assert rows == [4 if name in ("qwen3_5", "gemma3") else 1]


def played(turns):
    """A function that plays a prompt of one or two turns, of which the second asks about the same images."""

    async def play(client, prompt):
        trajectory, conversation = Trajectory(), list(prompt)
        for _ in range(turns):
            turn = await client.create_completion(
                conversation,
                trajectory=trajectory,
                sampling_params={"max_tokens": 6},
                forbid_media_tokens=True,  # the weights are random
            )
            conversation += [turn.message, {"role": "user", "content": "Again?"}]
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

    rollouts = Rollouts(played(turns), renderer)

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


@pytest.mark.parametrize("name", ["docs/use-trl.md", "mmrender/integrations/trl.py"])
def test_each_step_samples_with_the_weights_of_now(name, renderer, tiny_model, tmp_path, monkeypatch):
    """The page's code under TRL's own trainer, whose steps change the weights much."""
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    stand_in(monkeypatch, renderer)
    smaller = partial(
        trl.GRPOConfig, **{**SETTINGS, "max_steps": 3}, max_completion_length=12, temperature=0.8
    )
    monkeypatch.setattr(trl, "GRPOConfig", smaller)
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, **{**SETTINGS, "max_steps": 1}))
    steps, call = [], Rollouts.__call__

    def watched(self, prompts, trainer):
        fields = call(self, prompts, trainer)
        steps.append((fields, [logprobs_of(trainer.model, fields, row) for row in range(len(prompts))]))
        with torch.no_grad():  # as a step does, whatever its rewards
            for parameter in trainer.model.parameters():
                parameter.mul_(1.1)
        stale = [logprobs_of(trainer.model, fields, row) for row in range(len(prompts))]
        assert max(np.abs(one - other).max() for one, other in zip(stale, steps[-1][1], strict=True)) > 0.01
        return fields

    monkeypatch.setattr(Rollouts, "__call__", watched)
    found = Page(name, {}).run()
    if name.endswith(".py"):
        trl.GRPOTrainer(
            str(tiny_model),
            lambda completions, **_: [float(index % 2) for index in range(len(completions))],
            args=trl.GRPOConfig("out", num_generations=4, per_device_train_batch_size=4),
            train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "Moo?"}]}] * 4),
            processing_class=AutoProcessor.from_pretrained(tiny_model),
            rollout_func=found["rollout_func"],
        ).train()
    assert len(steps) == 3
    for fields, recomputed in steps:
        for ours, theirs in zip(fields["logprobs"], recomputed, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


@torch.no_grad()
def logprobs_of(model, fields, row):
    """Log-probabilities of a completion by the trainer's model at TRL's temperature."""
    prompt, completion = fields["prompt_ids"][row], fields["completion_ids"][row]
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float() / 0.8
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].numpy()


def test_turns_of_other_weights_are_refused(renderer, tiny_model, model):
    elsewhere = LocalBackend(tiny_model, weight_version="0")

    async def play(client, prompt):
        trajectory = Trajectory()
        other = RendererClient(renderer, backend=elsewhere, sampling_params={"max_tokens": 4})
        await other.create_completion(prompt, trajectory=trajectory)
        return trajectory

    rollouts, prompts = Rollouts(play, renderer), [[{"role": "user", "content": "Moo?"}]]
    rollouts(prompts, trainer_of(model, step=0))  # weights of the same name
    with pytest.raises(TrajectoryError, match="was not sampled with the trainer's present weights") as caught:
        rollouts(prompts, trainer_of(model, step=1))
    assert "'1'" in str(caught.value)

    async def unnamed(client, prompt):
        trajectory = Trajectory()
        trajectory.append([1, 2], [3], logprobs=[-1])
        return trajectory

    with pytest.raises(TrajectoryError, match="no name of weights"):
        Rollouts(unnamed, renderer)(prompts, trainer_of(model))


def trainer_of(model, *, step=0, **engine):
    """What is read of TRL's trainer."""
    settings = SimpleNamespace(generation_kwargs=None)
    return SimpleNamespace(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=8,
        args=settings,
        use_vllm=bool(engine),
        vllm_generation=SimpleNamespace(**engine),
        state=SimpleNamespace(global_step=step),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, is_main_process=True),
        model=model,
    )


@pytest.fixture
def model(tiny_model):
    return load_model(tiny_model, dtype="float32", device="cpu", purpose="a test")


async def one_turn(client, prompt):
    trajectory = Trajectory()
    await client.create_completion(prompt, trajectory=trajectory)
    return trajectory


def test_trls_server_is_asked_by_its_name(renderer, model, monkeypatch):
    server = stand_in(monkeypatch, renderer)
    engine = {
        "mode": "server",
        "server_base_url": None,
        "server_host": "127.0.0.1",
        "server_port": 8000,
        "vllm_client": SimpleNamespace(model="my-model"),
    }
    trainer = trainer_of(model, step=7, **engine)
    trainer.args.generation_kwargs = {"seed": 3}
    trajectories = Rollouts(one_turn, renderer).trajectories([[{"role": "user", "content": "Moo?"}]], trainer)
    assert [span.version for span in trajectories[0].steps[0].weight_versions] == ["7"]
    (asked,) = server.of_path("/inference/v1/generate")
    assert asked.json["model"] == "my-model"
    assert asked.json["sampling_params"]["max_tokens"] == 8
    assert asked.json["sampling_params"]["seed"] == 3


def test_trls_settings_are_those_that_are_read():
    """The names of TRL's classes that the tests above stand in for."""
    given = set(inspect.signature(VLLMGeneration.__init__).parameters)
    assert {
        "mode",
        "server_base_url",
        "server_host",
        "server_port",
        "tensor_parallel_size",
        "enable_sleep_mode",
    } <= given
    source = inspect.getsource(VLLMGeneration)
    for name in ("self.llm = ", "self.vllm_client = ", "self._llm_weights_sleeping = ", "def sync_weights"):
        assert name in source
    assert "self.model = " in inspect.getsource(VLLMClient.__init__)
    assert "self.vllm_generation.sync_weights()" in inspect.getsource(trl.GRPOTrainer._generate)


async def test_what_trl_cannot_train_on_is_refused_by_name(renderer, model):
    image = {"type": "image", "image": picture(1)}
    branched, empty = Trajectory(), Trajectory()
    now = {"logprobs": [-1], "weight_versions": [("0", 0, 1)]}
    branched.append([1, 2], [3], **now)
    branched.append([4, 5], [6], **now)
    grown = renderer.render([{"role": "user", "content": [image]}])
    late = Trajectory()
    first = late.append([1, 2], [3], **now)
    late.append(
        [1, 2, 3, *grown.token_ids],
        [9],
        **now,
        multi_modal_data=grown.multi_modal_data.shifted(3),
        parent=first,
    )
    empty.append([1, 2])
    for trajectory, problem in (
        (branched, "one sequence"),
        (empty, "one sequence"),
        (late, "an image appears"),
    ):

        async def play(client, prompt, trajectory=trajectory):
            return trajectory

        rollouts = Rollouts(play, renderer)
        with pytest.raises(TrajectoryError, match=problem):
            await asyncio.to_thread(rollouts, ["?"], trainer_of(model))


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
