"""The demonstration: it runs offline, and it fails when what it claims is not so."""

import asyncio
from dataclasses import replace

import pytest

from mmrender.client.local import LocalBackend, NoTransport
from mmrender.demo import __main__ as demo
from mmrender.demo import games
from mmrender.demo.conversation import load_pictures, three_turns
from mmrender.demo.digest import trajectory_digest
from mmrender.demo.proofs import forward, model_inputs, prove_parity
from mmrender.demo.report import WIDTH
from mmrender.errors import ShippingConnectionError
from mmrender.renderer import Renderer
from mmrender.rollout.renderer_client import RendererClient


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(tiny_model, image_backend="pil")


@pytest.fixture(scope="module")
def conversation():
    return three_turns()


@pytest.fixture(scope="module")
def rendered(renderer, conversation):
    return renderer.render(conversation.messages, **conversation.options)


def test_it_runs_and_every_proof_holds(capsys):
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 16
    assert "re-encoded 0" in out
    assert "logprobs equal a plain forward's" in out
    assert "a second process has the same" in out
    assert out.count("reward") == 8
    assert "32 sampled, stopped; calls divide" in out
    assert "✗" not in out
    assert "⟨image 13×19 = 247⟩" in out
    assert "<tool_call>⏎" in out
    assert "logits 1 x 836 x 1,024, all finite" in out
    assert max(map(len, out.splitlines())) <= WIDTH


def test_the_rollouts_run_against_a_server(tiny_model, capsys, monkeypatch):
    """The same steps with a way to a server; the model behind it is local."""
    monkeypatch.setattr(games, "ROLLOUTS", 1)
    backend = LocalBackend(tiny_model)
    assert demo.main(NoTransport(), backend=backend, model="tiny", renderer_of=str(tiny_model)) == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 9
    assert "1 Load the renderer" in out
    assert "4 Save the games, and ship them" in out


def test_a_server_that_is_not_there_is_one_line(tiny_model, capsys):
    assert demo.main("http://127.0.0.1:9", model=str(tiny_model)) == 2
    assert "EngineConnectionError: " in capsys.readouterr().out


def test_a_wrong_token_is_noticed(monkeypatch, capsys):
    honest = Renderer.render

    def wrong(self, messages, **options):
        rendering = honest(self, messages, **options)
        return replace(rendering, token_ids=[*rendering.token_ids[:-1], 0])

    monkeypatch.setattr(Renderer, "render", wrong)
    monkeypatch.setattr(demo, "sample", lambda *_, **__: None)
    monkeypatch.setattr(demo, "play", lambda *_: None)
    assert demo.main() == 1
    assert "not so: ids equal its processor's (first difference at 835)" in capsys.readouterr().out


def test_an_error_of_ours_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "tiny-vlm").write_text("in the way")
    monkeypatch.setattr(demo.tempfile, "TemporaryDirectory", lambda **_: _Folder(tmp_path))
    assert demo.main() == 2
    assert "ModelError:" in capsys.readouterr().out


class _Folder:
    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return str(self.path)

    def __exit__(self, *_):
        return None


def test_a_wrong_pixel_is_noticed(tiny_model, conversation, renderer):
    photo, chart = load_pictures()
    photo.putpixel((5, 5), (255, 0, 0))
    other = renderer.render(
        [_with_pictures(message, iter([photo, chart])) for message in conversation.messages[:2]],
        **conversation.options,
    )
    reference = replace(conversation, messages=conversation.messages[:2], pictures=conversation.pictures[:1])
    text, ids, pixels = prove_parity(tiny_model, reference, other)
    assert text.holds
    assert ids.holds
    assert not pixels.holds


def _with_pictures(message, pictures):
    if isinstance(message["content"], str):
        return message
    parts = [
        {**part, "image": next(pictures)} if part["type"] == "image" else part for part in message["content"]
    ]
    return {**message, "content": parts}


def test_without_a_processor_the_proof_is_not_claimed(tiny_model, conversation, rendered, monkeypatch):
    def refuse(*_):
        raise ImportError("no torchvision here")

    monkeypatch.setattr("mmrender.testing.reference_renderer.load_reference_image_processor", refuse)
    text, rest = prove_parity(tiny_model, conversation, rendered)
    assert text.holds
    assert rest.holds is None
    assert rest.detail == "no torchvision here"


def test_the_model_is_shown_where_the_images_are(rendered, renderer):
    kinds = model_inputs(rendered)["mm_token_type_ids"][0]
    pad = renderer.tokenizer.token_id("<|image_pad|>")
    assert kinds.tolist() == [int(token_id == pad) for token_id in rendered.token_ids]


def test_the_loss_is_that_of_the_sampled_tokens(tiny_model, rendered):
    import torch

    model = LocalBackend(tiny_model).model
    result = forward(model, rendered)
    with torch.inference_mode():
        ids = torch.tensor([rendered.token_ids])
        logits = model(input_ids=ids, **model_inputs(rendered)).logits.log_softmax(-1)[0]
    sampled = [index for index, is_sampled in enumerate(rendered.sampled_mask) if is_sampled]
    losses = [-logits[index - 1, rendered.token_ids[index]].item() for index in sampled]
    assert result.trained == len(sampled) == 109
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert result.finite


def games_of(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    client = RendererClient(renderer, backend=LocalBackend(tiny_model))
    return asyncio.run(games.play(client, renderer))


def test_what_differs_has_another_digest(tiny_model, monkeypatch):
    monkeypatch.setattr(games, "ROLLOUTS", 1)
    first, *_ = played = games_of(tiny_model)
    assert len({trajectory_digest(each) for each in played}) == len(played)
    before = trajectory_digest(first)
    assert prove_arrival_of(played, {each.trajectory_id: trajectory_digest(each) for each in played})
    first.steps[0].reward = 77.0
    assert trajectory_digest(first) != before
    assert not prove_arrival_of(played, {first.trajectory_id: before})


def prove_arrival_of(trajectories, digests):
    same, torchless = games.prove_arrival(trajectories, games.Arrival(digests, ["json"], 1))
    assert torchless.holds
    return same.holds


def test_a_second_process_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(games.sys, "executable", "/bin/false")
    with pytest.raises(ShippingConnectionError) as refused:
        asyncio.run(games.ship([], tmp_path))
    assert str(refused.value) == (
        f"unix://{tmp_path}/games.sock: the second process failed - got exit status 1"
    )
