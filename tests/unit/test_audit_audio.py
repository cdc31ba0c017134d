"""An audit names clips that the sampler heard in another order."""

import pytest

from audio_cases import asked, clip, heard, qwen2_audio, qwen2_audio_model
from audit_cases import recorded
from kit import assistant
from mmrender import Renderer
from mmrender.audit import TrainerModel, audit
from mmrender.audit.case import with_items
from mmrender.audit.search import Noise
from mmrender.training.families import Proof, remember_proof
from mmrender.training.samples import build_training_sample


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = qwen2_audio(tmp_path_factory.mktemp("audio") / "model")
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    model = qwen2_audio_model(renderer)
    remember_proof(model.config.to_dict(), Proof(None, "", None, {}, ("audio",)), on_disk=False)
    messages = [asked(heard(clip(1.2)), "or", heard(clip(1.2, 1)), "?"), assistant("The first of both.")]
    return TrainerModel(model), build_training_sample(renderer, messages)


def test_clips_that_the_sampler_heard_in_another_order_are_named(parts):
    trainer, sample = parts
    first, second = sample.media_spans
    heard_by_sampler = with_items(sample, [(first, second.item), (second, first.item)])
    options = {"tolerance": 1e-4, "noise": Noise(1e-5, 1e-5, 1e-3, 1e-3)}
    healthy, faulty = (recorded(sample, trainer.sampled_logprobs(one)) for one in (sample, heard_by_sampler))
    assert audit([healthy], trainer, **options).ok
    (finding, *_) = audit([faulty], trainer, **options).findings
    assert (finding.stage, finding.cause) == ("pixels", "clip order")
    assert "clips 0 and 1 in exchanged places" in finding.statement
