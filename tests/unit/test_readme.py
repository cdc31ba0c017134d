"""What the README and the guides show is true: their code runs, and the figures beside it are right."""

import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from end_to_end import no_placeholders
from mmrender.audit import TrainerModel
from mmrender.client.local import LocalBackend
from mmrender.renderer import Renderer
from mmrender.rollout.client import RendererClient
from mmrender.view.terminal import message_table, token_strip

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/index.md", "docs/quickstart.md"]
HUB_ID = "Qwen/Qwen3-VL-8B-Instruct"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """Run a page's Python in a folder with the pictures it names; `model` stands in for the hub id.

    A model with weights also stands in for the server; without, what comes before the first rollout is run.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("photo.jpg", "chart.png"):
        shutil.copy(str(files("mmrender.testing").joinpath("data", name)), name)
    load = Renderer.from_pretrained

    def run(page, model, weights=False):
        monkeypatch.setattr(
            Renderer, "from_pretrained", lambda name, **rest: load(model if name == HUB_ID else name, **rest)
        )
        if weights:
            trained = stand_in_for_the_server(monkeypatch, model)
            monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", lambda name, **_: trained)
        found = {}
        for block in blocks(page, "python"):
            if "RendererClient" in block and not weights:
                break
            exec(compile(block, page, "exec"), found)
        return found

    return run


def stand_in_for_the_server(monkeypatch, directory):
    """Give every client a model in this process, whatever server it names, and return the model."""
    local = LocalBackend(directory)
    start = RendererClient.__init__

    def init(client, renderer, server, *, model, backend, sampling_params):
        assert (server, model, backend) == ("http://127.0.0.1:8000", "my-model", "vllm")
        start(
            client, renderer, backend=local, sampling_params={**sampling_params, **no_placeholders(renderer)}
        )

    monkeypatch.setattr(RendererClient, "__init__", init)
    return TrainerModel.from_pretrained(directory).model


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, run_page, tiny_model):
    found = run_page(page, tiny_model, weights=True)
    assert len(found["rendered"]) > 200
    if page == "docs/quickstart.md":
        assert len(found["samples"]) == 1
        assert found["trajectory"].steps[2].extra["why_rendered"] is None
        assert float((found["ours"] - found["batch"].logprobs)[found["batch"].loss_mask].abs().max()) < 1e-3


def test_the_figures_of_the_readme_are_those_of_the_model(run_page, shared_models):
    found = run_page("README.md", shared_models / "qwen3_vl")
    rendered = found["rendered"]
    assert len(rendered) == 267
    assert rendered.token_ids[:5] == [151644, 872, 198, 151652, 151655]
    assert rendered.message_indices[:3].tolist() == [0, 0, 0]
    assert rendered.multi_modal_data.mm_placeholders["image"][0].length == 247
    trained = [
        token for token, counts in zip(rendered.token_ids, rendered.loss_mask(), strict=True) if counts
    ]
    assert found["renderer"].decode(trained) == "A cow.<|im_end|>"
    assert len(trained) == 4
    tensors = found["image"].tensors("bfloat16", framework="torch")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "pixel_values": (988, 1536),
        "image_grid_thw": (1, 3),
    }


def test_the_strip_of_the_guide_is_what_view_prints(run_page, shared_models):
    from rich.console import Console

    rendered = run_page("README.md", shared_models / "qwen3_vl")["rendered"]
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(token_strip(rendered), "", message_table(rendered), sep="\n")
    shown = [line.rstrip() for line in capture.get().splitlines() if line.strip()]
    (block,) = [block for block in blocks("docs/view.md", "text") if "⟨image" in block]
    assert [line for line in block.splitlines() if line.strip()] == shown
