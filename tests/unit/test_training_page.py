"""The code of the guide runs."""

import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrender.training import token_logprobs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(str(files("mmrender.testing").joinpath("data", "photo.jpg")), "photo.jpg")
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), found)
    assert found["batch"].seq_lens == [len(sample) for sample in found["samples"]]
    assert found["ratio"].shape == (6,)
    batch, shard = found["batch"], found["shard"]
    whole = token_logprobs(found["model"](**batch.model_inputs()).logits, batch)  # after the page's steps
    torch.testing.assert_close(found["logprobs"][shard.loss_mask], whole[batch.loss_mask])
    assert len(found["plan"]) == 1
    assert len(found["again"]) == len(found["rest"]) == 1
    assert all(
        torch.equal(found["again"][0][name], value)
        for name, value in found["rest"][0].items()
        if name != "use_cache"
    )
    assert found["mine"].fields["pixel_values"].values.shape[0] > 0


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_the_guide_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="the dependency group `trainers`")
    monkeypatch.chdir(tmp_path)
    shutil.copy(str(files("mmrender.testing").joinpath("data", "photo.jpg")), "photo.jpg")
    (block,) = re.findall(r'```python title="trainer"\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), found)
    assert found["result"].global_step == 2
