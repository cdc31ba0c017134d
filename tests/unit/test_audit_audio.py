"""An audit names clips that the sampler loaded in another way, or heard in another order."""

import pytest

from audio_cases import asked, clip, heard, qwen2_audio, qwen2_audio_model
from audit_cases import recorded
from kit import assistant
from mmrender import Renderer
from mmrender.audit import TrainerModel, audit
from mmrender.audit.case import with_items
from mmrender.audit.noise import Noise
from mmrender.training.families import Proof, remember_proof
from mmrender.training.samples import build_training_sample


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = qwen2_audio(tmp_path_factory.mktemp("audio") / "model")
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    model = qwen2_audio_model(renderer)
    remember_proof(model.config.to_dict(), Proof(None, "", None, {}, ("audio",)), on_disk=False)

    def build(first):
        question = asked(first, "or", heard(clip(1.2, 1)), "?")
        return build_training_sample(renderer, [question, assistant("The first of both.")])

    return TrainerModel(model), build


OPTIONS = {"tolerance": 1e-4, "noise": Noise(1e-5, 1e-5)}
STEREO = clip(1.2, 2, channels=2)
WAYS = {
    "a clip that ends early": heard(STEREO[:, :12_000]),
    "a clip at half its rate": heard(STEREO, 8_000),
    "a clip's left channel": heard(STEREO[0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_how_the_sampler_loaded_a_clip_is_named(parts, way):
    trainer, build = parts
    others = {name: build(part) for name, part in WAYS.items()}
    faulty = recorded(build(heard(STEREO)), trainer.sampled_logprobs(others[way]))
    alternatives = {name: [sample] for name, sample in others.items()}
    (finding, *_) = audit([faulty], trainer, alternatives=alternatives, **OPTIONS).findings
    assert (finding.stage, finding.cause) == ("pixels", "other media")
    assert finding.statement == f"the sampler saw the images or clips of {way}"


def test_clips_that_the_sampler_heard_in_another_order_are_named(parts):
    trainer, build = parts
    sample = build(heard(clip(1.2)))
    first, second = sample.media_spans
    heard_by_sampler = with_items(sample, [(first, second.item), (second, first.item)])
    healthy, faulty = (recorded(sample, trainer.sampled_logprobs(one)) for one in (sample, heard_by_sampler))
    assert audit([healthy], trainer, **OPTIONS).ok
    (finding, *_) = audit([faulty], trainer, **OPTIONS).findings
    assert (finding.stage, finding.cause) == ("pixels", "image order")
    assert "clips 0 and 1 in exchanged places" in finding.statement
