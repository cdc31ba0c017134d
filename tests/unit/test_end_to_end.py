"""Rolled out in this process, shipped to another, batched there: training sees what was sampled."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from end_to_end import (
    completions_of,
    no_placeholders,
    picture,
    report_fault,
    roll_out_many,
    samples_of,
    ship_to_trainer,
)
from kit import assistant, encoded, noise, user
from mmrender import Trajectory
from mmrender.audit import TrainerModel
from mmrender.audit.files import audit_files
from mmrender.cli.commands import app
from mmrender.client.local import LocalBackend
from mmrender.client.types import EngineRequest
from mmrender.media.encoded import ReferenceItem
from mmrender.rollout.client import RendererClient
from mmrender.sidecar import MultiModalData
from mmrender.trajectory import save_trajectories


@pytest.fixture(scope="module")
def trajectories(tiny_model, renderer):
    client = RendererClient(
        renderer, backend=LocalBackend(tiny_model), sampling_params=no_placeholders(renderer)
    )
    return asyncio.run(roll_out_many(client, 6))


def test_the_trainer_sees_what_was_sampled(tiny_model, trajectories, tmp_path):
    assert completions_of(trajectories) >= 25
    bridged = [step for trajectory in trajectories for step in trajectory.steps[2:]]
    assert all(step.extra["why_rendered"] is None for step in bridged)
    address = f"unix://{tmp_path}/trainer.sock"
    seen = asyncio.run(ship_to_trainer(trajectories, address, tiny_model, tolerance=1e-3))
    assert seen["completions"] == completions_of(trajectories)
    assert (seen["images"], seen["samples"]) == ([1, 2, 3, 4, 5, 6], 2 * len(trajectories))
    assert seen["ok"], seen["text"]
    assert max(seen["largest"], seen["padded"], seen["packed"]) < 1e-3


def test_a_planted_fault_is_named(tiny_model, trajectories):
    """In this process; the tier of vLLM plants all of them in the trainer's."""
    trainer, samples = TrainerModel.from_pretrained(tiny_model), samples_of(trajectories[0])
    ((cause, statement),) = report_fault(trainer, samples, "ids shifted", 1e-3)["ids shifted"]
    assert (cause, "are shifted" in statement) == ("tokens", True)


def test_the_command_audits_saved_trajectories(tiny_model, trajectories, tmp_path):
    path = tmp_path / "rollouts.mmr"
    save_trajectories(path, trajectories[:3])
    done = CliRunner().invoke(
        app, ["audit", str(path), "--model", str(tiny_model), "--html", str(tmp_path / "a.html")]
    )
    assert done.exit_code == 0, done.stdout
    samples = [sample for trajectory in trajectories[:3] for sample in trajectory.samples()]
    assert f"{sum(int(sample.loss_mask.sum()) for sample in samples)} sampled tokens of" in done.stdout
    # Guided tool calls are compared like all others, by the tokens that were allowed.
    assert any(sample.allowed for sample in samples)
    assert "left out" not in done.stdout
    assert "<html" in (tmp_path / "a.html").read_text()
    missing = CliRunner().invoke(app, ["audit", str(tmp_path / "none.mmr"), "--model", str(tiny_model)])
    assert (
        str(missing.exception) == f"{tmp_path}/none.mmr: cannot read the file - got No such file or directory"
    )


def test_the_command_processes_images_by_reference_again(tiny_model, renderer, tmp_path):
    data = encoded(picture(7))
    message = user("What is it?", data)
    prompt = renderer.render([message], add_generation_prompt=True)
    (item,) = prompt.multi_modal_data.mm_items["image"]
    (place,) = prompt.multi_modal_data.mm_placeholders["image"]
    reference = ReferenceItem.of(item, data, place.length)
    trajectory = Trajectory("by-reference")
    sidecar = MultiModalData.of([(place, reference)])
    response = asyncio.run(complete(LocalBackend(tiny_model), prompt))
    trajectory.append(
        prompt.token_ids, response.completion_ids, logprobs=response.logprobs, multi_modal_data=sidecar
    )
    save_trajectories(tmp_path / "one.mmr", [trajectory])
    report = audit_files([tmp_path / "one.mmr"], str(tiny_model), tolerance=1e-3, explain=0)
    assert report.ok, report.text()
    assert report.tokens == len(response.completion_ids)


def test_the_command_finds_the_images_that_messages_kept(tiny_model, renderer, tmp_path):
    """A sampler that resized otherwise is named by the image as it was before."""
    picture = noise(7, 150, 133)
    message = user("And?", encoded(picture))
    prompt = renderer.render([message], add_generation_prompt=True)
    (item,) = prompt.multi_modal_data.mm_items["image"]
    height, width = item.frames.shape[-2:]
    other = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    seen = msgspec.structs.replace(item, frames=np.ascontiguousarray(other.transpose(2, 0, 1)[None]))
    places = prompt.multi_modal_data.mm_placeholders["image"]
    saw = replace(prompt, multi_modal_data=MultiModalData.of([(places[0], seen)]))
    response = asyncio.run(complete(LocalBackend(tiny_model), saw))
    trajectory = Trajectory("resized otherwise")
    answer = assistant("It is.")
    trajectory.append(
        prompt.token_ids,
        response.completion_ids,
        logprobs=response.logprobs,
        multi_modal_data=prompt.multi_modal_data,
        messages=[message, answer],
    )
    save_trajectories(tmp_path / "one.mmr", [trajectory], media_sources="keep")
    stages: list[str] = []
    report = audit_files([tmp_path / "one.mmr"], str(tiny_model), tolerance=1e-4, progress=stages.append)
    assert [finding.cause for finding in report.findings] == ["resampling"], report.text()
    assert stages == [
        "comparing samples: 1",
        "measuring the arithmetic alone",
        f"looking for the cause in {report.findings[0].sample_id}",
    ]


async def complete(backend, prompt):
    params = {"max_tokens": 8, "temperature": 1.0, "seed": 1}
    return await backend.generate(
        EngineRequest("tiny", prompt.token_ids, params, "r", multi_modal_data=prompt.multi_modal_data)
    )
