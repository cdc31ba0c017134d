"""The demonstration: it runs offline, and it fails when what it claims is not so."""

import asyncio
from dataclasses import replace

import pytest

from mmrender.client.local import LocalBackend, NullTransport
from mmrender.demo import __main__ as demo
from mmrender.demo.conversation import load_pictures, three_turns
from mmrender.demo.proofs import media_inputs, prove_parity, prove_shipping
from mmrender.demo.receiver import trajectory_digest
from mmrender.errors import ShippingConnectionError
from mmrender.renderer import Renderer
from mmrender.rollout import RendererClient
from mmrender.trajectory import Trajectory


@pytest.fixture(scope="module")
def conversation():
    return three_turns()


@pytest.fixture(scope="module")
def rendered(renderer, conversation):
    return renderer.render(conversation.messages, **conversation.options)


def test_it_runs_and_every_proof_holds(capsys):
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 15
    assert "✗" not in out
    for shown in (
        *("logprobs equal a plain forward's", "a second process has the same"),
        *("⟨image 13×19 = 247⟩", "<tool_call>⏎", "logits 1 x 833 x 1,024"),
    ):
        assert shown in out
    assert max(map(len, out.splitlines())) <= demo.WIDTH


def test_the_rollout_runs_against_a_server(tiny_model, capsys):
    """The same steps with a way to a server; the model behind it is local."""
    backend = LocalBackend(tiny_model)
    assert demo.main(NullTransport(), backend=backend, model="tiny", renderer_of=str(tiny_model)) == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 7
    assert "1 Load the renderer" in out
    assert "3 Save the trajectory, and ship it" in out


def test_a_wrong_token_is_noticed(monkeypatch, capsys):
    honest = Renderer.render

    def wrong(self, messages, **options):
        rendering = honest(self, messages, **options)
        return replace(rendering, token_ids=[*rendering.token_ids[:-1], 0])

    monkeypatch.setattr(Renderer, "render", wrong)
    monkeypatch.setattr(demo, "sample_and_ship", lambda *_, **__: None)
    assert demo.main() == 1
    assert "not so: ids equal its processor's (first difference at 832)" in capsys.readouterr().out


def test_an_error_of_ours_is_one_line(tiny_model, capsys):
    assert demo.main("http://127.0.0.1:9", model=str(tiny_model)) == 2
    assert "EngineConnectionError: " in capsys.readouterr().out


def test_a_wrong_pixel_is_noticed(tiny_model, conversation, renderer):
    photo, _ = load_pictures()
    messages = conversation.messages[:2]
    photo.putpixel((5, 5), (255, 0, 0))
    shown = [{"type": "image", "image": photo}, messages[1]["content"][1]]
    other = renderer.render([messages[0], {**messages[1], "content": shown}], **conversation.options)
    reference = replace(conversation, messages=messages, pictures=conversation.pictures[:1])
    assert [proof.holds for proof in prove_parity(tiny_model, reference, other)] == [True, True, False]


def test_without_a_processor_the_proof_is_not_claimed(tiny_model, conversation, rendered, monkeypatch):
    def refuse(*_):
        raise ImportError("no torchvision here")

    monkeypatch.setattr("mmrender.testing.reference.build_reference_processor", refuse)
    text, rest = prove_parity(tiny_model, conversation, rendered)
    assert text.holds
    assert rest.holds is None
    assert rest.detail == "no torchvision here"


def test_the_model_is_shown_where_the_images_are(rendered, renderer):
    kinds = media_inputs(rendered.multi_modal_data, len(rendered))["mm_token_type_ids"][0]
    pad = renderer.tokenizer.token_id("<|image_pad|>")
    assert kinds.tolist() == [int(token_id == pad) for token_id in rendered.token_ids]


def test_what_differs_has_another_digest(renderer, conversation, tiny_model):
    trajectories = []
    for seed in (1, 1, 2):
        trajectory = Trajectory("same name")
        client = RendererClient(
            renderer, backend=LocalBackend(tiny_model), sampling_params={"seed": seed, "max_tokens": 4}
        )
        asyncio.run(client.create_completion(conversation.messages[:2], trajectory=trajectory))
        trajectories.append(trajectory)
    first, second, third = map(trajectory_digest, trajectories)
    assert first == second != third


def test_a_second_process_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrender.demo.proofs.sys.executable", "/bin/false")
    with pytest.raises(ShippingConnectionError) as refused:
        asyncio.run(prove_shipping(Trajectory(), tmp_path))
    assert str(refused.value) == (f"unix://{tmp_path}/rollout.sock: the second process failed - got status 1")
