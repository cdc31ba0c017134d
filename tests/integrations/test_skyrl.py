"""The adapter under SkyRL's own checks: its validator, and its conversion to a batch of tensors."""

import asyncio
import typing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import typing_extensions
from msgspec.json import encode

if not hasattr(typing.TypedDict, "__pydantic_config__"):
    # Pydantic takes typing's own from Python 3.12 on, and SkyRL 0.3.0 defines models with it.
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.config import SamplingParams
from skyrl.train.generators.base import BatchMetadata, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from doc_pages import Page, lay_out, stand_in
from integrations.recipe_cases import run_recipe
from mmrender.client.http import HTTPTransport
from mmrender.client.local import LocalBackend
from mmrender.client.transport import Reply
from mmrender.client.types import EngineRequest
from mmrender.errors import InputError
from mmrender.integrations.skyrl import Generator, engine_client
from mmrender.model.weights import load_model
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Observation
from mmrender.rollout.generator import VLMGenerator
from rollout_cases import ScriptedBackend, ScriptedEnvironment, asks, ends
from stub_server import vllm_reply

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


@pytest.mark.parametrize("name", ["docs/use-skyrl.md", "mmrender/integrations/skyrl.py"])
def test_each_batch_samples_with_the_weights_of_now(name, renderer, tiny_model, tmp_path, monkeypatch):
    """The page's code, with SkyRL's own client, whose router leads to a model that SkyRL has changed."""
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    stand_in(monkeypatch, renderer)
    model = load_model(tiny_model, dtype="float32", device="cpu", purpose="a test")
    served = LocalBackend(model)
    sent = []

    async def request(self, method, path, *, json=None, **_):
        """The router at the address of SkyRL's client: it serves text prompts with the model of now."""
        assert self.base_url == "http://router:8080"
        if path == "/v1/models":
            return Reply(200, {}, encode({"data": [{"id": "my-model", "max_model_len": 4096}]}))
        assert (method, path, json["model"]) == ("POST", "/inference/v1/generate", "my-model")
        sent.append(json)
        params = {
            "max_tokens": 6,
            "temperature": 1.0,
            "stop_token_ids": json["sampling_params"]["stop_token_ids"],
        }
        sampled = await served.generate(EngineRequest("", json["token_ids"], params, f"{len(sent)}"))
        reply = vllm_reply(sampled.completion_ids, sampled.logprobs)
        reply["usage"] = {"prompt_tokens": len(json["token_ids"])}
        reply["choices"][0]["finish_reason"] = sampled.finish_reason
        return Reply(200, {}, encode(reply))

    monkeypatch.setattr(HTTPTransport, "request", request)
    theirs = RemoteInferenceClient("http://router:8080", ["http://one:8000"], 1, model_name="my-model")
    generator = Page(name, {}).run()["get_generator"](None, None, None, theirs)
    generator.rollouts = replace(generator.rollouts, environments={"talk": Talk})
    for sync in range(2):
        trajectories = asyncio.run(
            generator.rollouts.roll_out({"prompts": [[], []], "env_classes": ["talk", "talk"]})
        )
        for trajectory in trajectories:
            assert trajectory.error is None
            for step in trajectory.steps:
                assert {span.version for span in step.weight_versions} == {str(sync)}
                recomputed = logprobs_of(model, step)
                np.testing.assert_allclose(step.logprobs, recomputed, atol=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        theirs.increment_weight_version()
        assert np.abs(logprobs_of(model, step) - step.logprobs).max() > 0.01


class Talk:
    """Two turns of text."""

    tools = None

    def reset(self, prompt, extras):
        self.turns = 0
        return Observation([{"role": "user", "content": "Moo?"}])

    def step(self, turn):
        self.turns += 1
        return Observation([{"role": "user", "content": "Again?"}], 0.5, done=self.turns == 2)


@torch.no_grad()
def logprobs_of(model, step):
    ids = torch.tensor(step.token_ids.tolist())
    logits = model(ids[None]).logits[0, step.prompt_length - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[step.prompt_length :, None])[:, 0].numpy()


def test_an_adapter_that_skyrl_syncs_must_be_named(renderer):
    theirs = RemoteInferenceClient("http://router:8080", ["http://one:8000"], 1, uses_lora_weight_sync=True)
    with pytest.raises(InputError, match="skyrl-lora"):
        engine_client(theirs, renderer)
    assert engine_client(theirs, renderer, model="skyrl-lora").engine.model == "skyrl-lora"


def test_the_recipe_rehearses(monkeypatch, capsys, tmp_path):
    lines = run_recipe("skyrl", monkeypatch, capsys, tmp_path)
    assert len([line for line in lines if "tokens in" in line]) == 4
