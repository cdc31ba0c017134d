"""An agent loop's output under verl's own processing of its images: the same tensors, and as many tokens."""

import asyncio
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from mmrender import Renderer, Trajectory
from mmrender.errors import TrajectoryError
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import run_episode
from mmrender.rollout.rows import TrajectoryID, rows_of
from rollout_cases import ScriptedBackend, ScriptedEnvironment, asks, ends

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's imports of Ray
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker

    from mmrender.integrations.verl import to_agent_loop_output

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def opened(tiny_model):
    return Renderer.from_pretrained(tiny_model), AutoProcessor.from_pretrained(tiny_model)


def played(renderer, *script):
    client = RendererClient(renderer, backend=ScriptedBackend(renderer, lambda _: "Yes."), model="m")
    trajectory = Trajectory()
    try:
        asyncio.run(
            run_episode(client, ScriptedEnvironment(list(script)), [], {"picture": 3}, trajectory=trajectory)
        )
    except RuntimeError as error:
        trajectory.error = str(error)
    return trajectory


def inputs_of(output, processor):
    """What verl's worker computes of an output, before it pads."""
    ids = torch.tensor([[*output.prompt_ids, *output.response_ids]])
    worker = SimpleNamespace(processor=processor, tokenizer=processor.tokenizer)
    worker._get_mm_processor_kwargs = lambda audios=None: {}
    return ids, AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids)


def test_verl_computes_the_tensors_of_every_turn(opened):
    renderer, processor = opened
    trajectory = played(renderer, asks("Sure?", 0.25, image=7), asks("And?", image=9), ends(1.0))
    output = to_agent_loop_output(trajectory)
    assert isinstance(output, AgentLoopOutput)
    (row,) = rows_of(trajectory, TrajectoryID("x"), step_wise=False)
    ids, inputs = inputs_of(output, processor)
    assert ids[0].tolist() == [*row.prompt_token_ids, *row.response_ids]
    items = row.multi_modal_data.mm_items["image"]
    tensors = [item.tensors() for item in items]
    assert len(items) == len(output.multi_modal_data["images"]) == 3
    for name in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(inputs[name].numpy(), np.concatenate([each[name] for each in tensors]))
    columns = output.as_dict()
    assert columns["response_mask"].tolist() == row.loss_mask
    np.testing.assert_allclose(columns["rollout_log_probs"].numpy(), row.logprobs, rtol=1e-6)
    assert columns["rm_scores"].sum().item() == 1.25
    assert output.num_turns == 6


def test_a_cut_leaves_no_half_image(opened):
    renderer, processor = opened
    trajectory = played(renderer, asks("Sure?", image=7), ends(1.0))
    whole = to_agent_loop_output(trajectory)
    pad = renderer.tokenizer.added_ids["<|image_pad|>"]
    for length in range(1, len(whole.response_ids) + 1):
        output = to_agent_loop_output(trajectory, response_length=length)
        assert len(output.response_ids) <= length
        ids, inputs = inputs_of(output, processor)
        assert (ids == pad).sum() == inputs["image_grid_thw"].prod(-1).sum() // 4
    assert whole.response_ids == output.response_ids


def test_a_failed_rollout_teaches_nothing(opened):
    output = to_agent_loop_output(played(opened[0], RuntimeError("broken")))
    assert sum(output.response_mask) == 0
    assert output.reward_score == 0.0
    assert output.extra_fields["error"] == "broken"
    with pytest.raises(TrajectoryError, match="nothing was sampled"):
        to_agent_loop_output(Trajectory())
