"""The adapter under SkyRL's own checks: its validator, and its conversion to a batch of tensors."""

import asyncio
import typing
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import typing_extensions

if not hasattr(typing.TypedDict, "__pydantic_config__"):
    # Pydantic takes typing's own from Python 3.12 on, and SkyRL 0.3.0 defines models with it.
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.config import SamplingParams
from skyrl.train.generators.base import BatchMetadata, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from mmrender.integrations.skyrl import Generator
from mmrender.rollout.client import RendererClient
from mmrender.rollout.generator import VLMGenerator
from rollout_cases import ScriptedBackend, ScriptedEnvironment, asks, ends

SCRIPTS = {
    "two turns, two images": (asks("Sure?", 0.25, image=7), ends(1.0)),
    "one turn": (ends(0.5),),
    "fails": (RuntimeError("broken"),),
}


def generated(renderer, **options):
    backend = ScriptedBackend(renderer, lambda _: "Yes.")
    client = RendererClient(renderer, backend=backend, model="m")
    environments = {name: partial(ScriptedEnvironment, list(script)) for name, script in SCRIPTS.items()}
    generator = Generator(VLMGenerator(client, environments, **options))
    assert isinstance(generator, GeneratorInterface)
    names = [TrajectoryID(f"p{index}", 1) for index in range(len(SCRIPTS))]
    batch = {
        "prompts": [[{"role": "system", "content": "Play."}] for _ in SCRIPTS],
        "env_classes": list(SCRIPTS),
        "env_extras": [{"picture": index} for index in range(len(SCRIPTS))],
        "sampling_params": get_sampling_params_for_backend("vllm", SamplingParams(max_generate_length=32)),
        "trajectory_ids": names,
        "batch_metadata": BatchMetadata(global_step=3, training_phase="train"),
    }
    return asyncio.run(generator.generate(batch)), names, backend


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_takes_the_rows(renderer, step_wise):
    output, names, backend = generated(renderer, step_wise=step_wise)
    assert set(output) == set(GeneratorOutput.__annotations__)
    validate_generator_output(len(SCRIPTS), output, step_wise=step_wise)
    rows = 4 if step_wise else 3
    assert len(output["response_ids"]) == rows
    assert output["is_last_step"] == ([False, True, True, True] if step_wise else None)
    assert all(each in names for each in output["trajectory_ids"])
    assert backend.requests[0].sampling_params["max_tokens"] == 32
    self = MagicMock(tokenizer=SimpleNamespace(pad_token_id=0))  # its settings, of which these are read
    self.cfg.trainer.algorithm.max_seq_len = 4096
    self.cfg.trainer.algorithm.off_policy_correction = SimpleNamespace(
        tis_ratio_type=None, sequence_mask_metric=None
    )
    self.cfg.trainer.train_batch_size = self.cfg.trainer.policy_mini_batch_size = len(SCRIPTS)
    self.cfg.trainer.critic.model.path = None
    self.cfg.generator = SimpleNamespace(n_samples_per_prompt=1, step_wise_trajectories=step_wise)
    self.pad_batch = lambda batch: batch
    self.dispatch.get_lcm_dp_size = lambda: 1
    uids = [each.instance_id for each in output["trajectory_ids"]]
    batch = RayPPOTrainer.convert_to_training_input(self, output, uids)
    for index in range(rows):
        ids = [*output["prompt_token_ids"][index], *output["response_ids"][index]]
        assert batch["sequences"][index][batch["attention_mask"][index].bool()].tolist() == ids
        places = np.isin(ids, renderer.tokenizer.added_ids["<|image_pad|>"]).sum()
        grid = batch["image_grid_thw"][index]
        assert places == (grid.prod(-1) // 4).sum()
        assert len(batch["pixel_values"][index]) == grid.prod(-1).sum()
        assert batch["pixel_values"][index].dtype == torch.float32
    assert batch["loss_mask"].sum(-1).tolist()[-1] == 0  # the one that failed
    assert batch["rewards"].sum(-1).tolist() == pytest.approx(
        [0.25, 1.0, 0.5, 0.0] if step_wise else [1.25, 0.5, 0.0]
    )
