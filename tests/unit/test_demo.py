"""The demonstration: it runs offline, and it fails when a claim does not hold."""

import asyncio
from dataclasses import replace
from pathlib import Path

from kit import error_of, shown
from mmrender import RendererClient, Trajectory
from mmrender.client.local import LocalBackend
from mmrender.client.transport import NullTransport
from mmrender.errors import ShippingConnectionError
from mmrender.renderer import Renderer
from mmrender.testing import demo
from mmrender.testing.demo import TOOLS, Report, prove_parity, prove_shipping, shipped_pictures, three_turns
from mmrender.testing.receiver import trajectory_digest


def test_it_runs_and_every_claim_holds(capsys, tmp_path):
    page = tmp_path / "runs" / "demo.html"
    assert demo.main(page=page) == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 14
    assert "✗" not in out
    for line in (
        *("logprobs equal a plain forward's", "a second process has the same"),
        *("⟨image 13×19 = 247⟩", "<tool_call>⏎", "107 of 827 tokens"),
    ):
        assert line in out
    *lines, last = out.splitlines()
    assert last == f"All of this as a page: {page}"
    assert max(map(len, lines)) <= demo.WIDTH
    written = page.read_text("utf-8")
    assert all(name in written for name in ("three turns", '"name":"rollout"', "data:image/jpeg"))
    assert written.count("\\u2713 ") == 14  # every claim


def test_the_rollout_runs_against_a_server(tiny_model, capsys, tmp_path, monkeypatch):
    """The same steps with a way to a server. The model behind it is local."""
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend(tiny_model)
    assert demo.main(NullTransport(), backend=backend, model="tiny", renderer_of=str(tiny_model)) == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 7
    assert "1 Load the renderer" in out
    assert "3 Save the trajectory, and ship it" in out
    assert out.endswith("as a page: mmrender-demo.html\n")
    assert "data:image/jpeg" in Path("mmrender-demo.html").read_text("utf-8")


def test_a_wrong_token_is_noticed(monkeypatch, capsys, tmp_path):
    honest = Renderer.render

    def wrong(self, messages, **options):
        rendering = honest(self, messages, **options)
        return replace(rendering, token_ids=[*rendering.token_ids[:-1], 0])

    monkeypatch.setattr(Renderer, "render", wrong)
    monkeypatch.setattr(demo, "sample_and_ship", lambda *_, **__: None)
    assert demo.main(page=tmp_path / "demo.html") == 1
    assert "not so: ids equal its processor's (ours " in capsys.readouterr().out


def test_an_error_of_ours_is_one_line(tiny_model, capsys):
    assert demo.main("http://127.0.0.1:9", model=str(tiny_model)) == 2
    assert "EngineConnectionError: " in capsys.readouterr().out


def claims_of_parity(tiny_model, renderer, messages, rendered):
    report = Report()
    prove_parity(report, tiny_model, renderer, messages, rendered)
    return report.claims


def test_a_wrong_pixel_is_noticed(tiny_model, renderer):
    photo, _ = shipped_pictures()
    photo = photo.copy()
    photo.putpixel((5, 5), (255, 0, 0))
    system, question = three_turns()[:2]
    other = {**question, "content": [shown(photo), question["content"][1]]}
    rendered = renderer.render([system, other], tools=TOOLS, add_generation_prompt=True)
    claims = claims_of_parity(tiny_model, renderer, [system, question], rendered)
    assert [claim.holds for claim in claims] == [True, True, False]


def test_without_a_processor_the_claim_is_not_made(tiny_model, renderer, monkeypatch):
    def refuse(*_, **__):
        raise ImportError("no torchvision here")

    monkeypatch.setattr("mmrender.testing.reference.build_reference_processor", refuse)
    messages = three_turns()
    rendered = renderer.render(messages, tools=TOOLS, add_generation_prompt=True)
    text, rest = claims_of_parity(tiny_model, renderer, messages, rendered)
    assert text.holds
    assert (rest.holds, rest.detail) == (None, "no torchvision here")


def test_what_differs_has_another_digest(renderer, tiny_model):
    trajectories = []
    for seed in (1, 1, 2):
        trajectory = Trajectory("same name")
        client = RendererClient(
            renderer, backend=LocalBackend(tiny_model), sampling_params={"seed": seed, "max_tokens": 4}
        )
        asyncio.run(client.create_completion(three_turns()[:2], trajectory=trajectory))
        trajectories.append(trajectory)
    first, second, third = map(trajectory_digest, trajectories)
    assert first == second != third


def test_a_second_process_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrender.testing.demo.sys.executable", "/bin/false")
    refused = error_of(ShippingConnectionError, asyncio.run, prove_shipping(Report(), Trajectory(), tmp_path))
    assert refused == (f"unix://{tmp_path}/rollout.sock: the second process failed - got status 1")
