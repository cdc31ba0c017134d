"""The code of the guide runs, and trajectories that were shipped make the batches that they would have made."""

import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import mmcodecs
from mmrender.training import collate
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire
from training_cases import PAD_ID, kinds, sample

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(str(files("mmrender.testing").joinpath("data", "photo.jpg")), "photo.jpg")
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), found)
    assert found["batch"].seq_lens == [len(sample) for sample in found["samples"]]
    assert found["ratio"].shape == (6,)
    assert len(found["plan"]) == 1
    assert found["mine"].fields["pixel_values"].values.shape[0] > 0


@pytest.mark.parametrize("kind", ["patches", "tiles", "rows"])
def test_shipped_trajectories_make_the_same_batch(kind: str) -> None:
    family, items = kinds()[kind].family, kinds()[kind].items
    trajectories = []
    for index in range(3):
        whole = sample(items[: index + 1], seed=index)
        cut = len(whole) - 2
        trajectories.append(Trajectory(str(index)))
        trajectories[-1].append(
            whole.token_ids[:cut],
            whole.token_ids[cut:],
            logprobs=[-0.5, -1.0],
            multi_modal_data=whole.multi_modal_data,
            reward=float(index),
        )

    def batch(group: list[Trajectory]) -> Any:
        samples = [one for trajectory in group for one in trajectory.samples()]
        return collate(samples, family, pad_token_id=PAD_ID)

    message = mmcodecs.encode(trajectories_to_wire(trajectories, share=False))
    here, there = batch(trajectories), batch(list(trajectories_from_wire(mmcodecs.decode(message))))
    assert here.sample_ids == there.sample_ids
    for name in ("input_ids", "loss_mask", "logprobs", "rewards", "token_types", "positions"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name
    assert here.fields == there.fields
    assert here.loss_mask.sum() == 6
