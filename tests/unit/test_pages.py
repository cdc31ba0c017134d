"""What is shown is true: the code of the README, the guides and docstrings runs, in the order of its page."""

import ast
import builtins
import ssl
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from doc_pages import (
    ELSEWHERE,
    LEFT_OUT,
    LIBRARIES,
    PAGES,
    ROOT,
    Page,
    lay_out,
    load_script,
    missing_for,
    stand_in,
)
from kit import shown, user
from mmrender import Trajectory
from mmrender.client.local import LocalBackend
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Environment

OWN = sorted(PAGES.keys() - ELSEWHERE.keys() - LIBRARIES.keys())


@pytest.fixture
def run(tmp_path, monkeypatch, renderer, tiny_model):
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, tiny_model)
    stand_in(monkeypatch, renderer)
    # No certificates are made for a page: only how they are named is shown.
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda *_: None)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
    return lambda name, **given: Page(name, given).run()


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith(".md")])
def test_the_code_of_a_page_runs(name, run):
    run(name)


def test_the_tour_runs_as_a_script(tmp_path, monkeypatch, caplog, capsys):
    """It brings its own model, pictures and server. What it computes it asserts itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # other tests keep theirs
    script = load_script("tools/tour_script.py").tour_script()
    exec(compile(script, "tour.py", "exec"), {"__name__": "__main__"})
    assert "colours read as BGR" in capsys.readouterr().out
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []  # of its server


def test_rollouts_of_the_guide_end_as_it_says(run, tiny_model, monkeypatch, capsys):
    """With the tiny model, which finds no answer, in place of a server's."""
    start, local = RendererClient.__init__, LocalBackend(tiny_model)

    def init(client, renderer, server, *, model, backend, sampling_params):
        assert (server, model, backend) == ("http://127.0.0.1:8000", "MODEL", "vllm")
        start(
            client, renderer, backend=local, sampling_params={**sampling_params, "max_tokens": 6, "seed": 1}
        )

    monkeypatch.setattr(RendererClient, "__init__", init)
    found = run("docs/rollout.md")
    assert isinstance(found["Guess"](), Environment)
    assert found["turn"].why_rendered is None
    assert len(found["trajectory"]) == 2
    output = found["output"]
    assert (output["errors"], output["stop_reasons"]) == ([None] * 2, ["max_turns"] * 2)
    assert sum(output["rewards"][0]) == pytest.approx(-0.2)
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()] == [["4", "max_turns"]] * 2


def test_the_audit_of_the_guide_finds_what_it_says(run):
    found = run("docs/audit.md")
    (finding,) = found["report"].findings
    page = (ROOT / "docs" / "audit.md").read_text("utf-8")
    assert (
        f"game-0/0: {finding.stage}, {finding.cause}: the log-probabilities are those at temperature 0.7"
        in page
    )
    assert " ".join(finding.remedy.split()) in " ".join(page.split())


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith(".py")])
def test_the_code_of_a_docstring_runs(name, run, renderer, tiny_model, tmp_path):
    """What goes before it is given: a docstring shows a call, not a program."""
    if reason := missing_for(name):
        pytest.skip(reason)
    from torch.utils.data import DataLoader
    from transformers import AutoModelForImageTextToText

    import mmcodecs
    import mmrender
    from mmrender import client, media, shipping, training, trajectory

    given = {"mmcodecs": mmcodecs}
    for package in (mmrender, client, media, shipping, training, trajectory):
        given |= {each: getattr(package, each) for each in package.__all__}
    photo = shown(tmp_path / "photo.jpg")
    rendered = renderer.render([{"role": "user", "content": [photo, "What?"]}], add_generation_prompt=True)
    data = rendered.multi_modal_data
    response = SimpleNamespace(completion_ids=[40, 41], logprobs=[-0.1, -0.2])
    bridged = renderer.bridge_to_next_turn(
        rendered.token_ids, [40, 41], [user("Why?")], previous_multi_modal_data=data
    )
    rollout = Trajectory()
    rollout.append(rendered.token_ids, [40, 41], logprobs=[-0.1, -0.2], multi_modal_data=data)
    turn, next_turn = (
        SimpleNamespace(
            prompt_ids=prompt.token_ids, completion_ids=[40, 41], logprobs=[-0.1, -0.2], finish_reason="length",
            multi_modal_data=prompt.multi_modal_data, routed_experts=None, weight_versions=(), allowed=(),
            restricted=(),
        )
        for prompt in (rendered, bridged)
    )  # fmt: skip
    given |= {
        "turn": turn, "next_turn": next_turn, "rendered": rendered, "bridged": bridged, "response": response, "more": response,
        "prompt_ids": rendered.token_ids, "next_prompt_ids": bridged.token_ids, "item": data.mm_items["image"][0],
        "trajectory": rollout, "group": [rollout, rollout], "directory": tiny_model, "renderer": renderer,
    }  # fmt: skip
    if name.startswith("mmrender/training"):
        model = AutoModelForImageTextToText.from_pretrained(tiny_model)
        family = training.ModelFamily.from_config(tiny_model)
        batch = training.collate(rollout.samples(), family, pad_token_id=0, dtype=model.dtype)
        given |= {"model": model, "batch": batch, "StatefulDataLoader": DataLoader}
        given["collator"] = training.Collator(family, pad_token_id=0)
    run(name, **given)


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_the_code_of_a_library_defines_what_it_names(name):
    defined, named = set(dir(builtins)), set()
    for _, code in PAGES[name]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Name):
                (named if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
    assert named <= defined


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_the_code_of_a_library_runs(name, run, monkeypatch):
    """TRL's trainers for one step, and without a GPU, which their settings ask for."""
    if reason := missing_for(name):
        pytest.skip(reason)
    if LIBRARIES[name] == "trl":
        import trl

        for settings in ("SFTConfig", "GRPOConfig"):
            smaller = partial(getattr(trl, settings), use_cpu=True, bf16=False, max_steps=1)
            monkeypatch.setattr(trl, settings, smaller)
    run(name)


def test_every_page_runs_somewhere():
    assert {*ELSEWHERE, *LIBRARIES, *LEFT_OUT} <= set(PAGES)
    assert sum(map(len, PAGES.values())) > 60
