"""Batches with audio: their tensors, and logits of tiny models equal to those of single forwards."""

import json

import numpy as np
import pytest

from audio_cases import FAMILIES, asked, clip, heard
from kit import error_of
from mmrender import Renderer
from mmrender.errors import BatchError
from mmrender.testing.difference import parts_of_batch
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.samples import build_training_sample

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mmrender.testing.families import compare_family  # noqa: E402 - needs torch
from mmrender.training.collate import collate  # noqa: E402
from mmrender.training.families import ModelFamily, Proof, remember_proof, unproved_family  # noqa: E402

_TEXT = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "model_type": "qwen2",
}
_ENCODER = {"num_mel_bins": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def small_qwen2_audio(token):
    encoder = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    encoder |= {"d_model": 32, "max_source_positions": 200, "model_type": "qwen2_audio_encoder"}
    config = transformers.Qwen2AudioConfig(audio_config=encoder, text_config=_TEXT, audio_token_index=token)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def small_audio_flamingo(token):
    encoder = {**_ENCODER, "intermediate_size": 64, "max_source_positions": 100}
    encoder |= {"model_type": "audioflamingo3_encoder"}
    config = transformers.AudioFlamingo3Config(audio_config=encoder, text_config=_TEXT, audio_token_id=token)
    return transformers.AudioFlamingo3ForConditionalGeneration(config)


MODELS = {"qwen2_audio": small_qwen2_audio, "audio_flamingo": small_audio_flamingo}


@pytest.mark.parametrize("name", MODELS)
def test_batches_have_the_logits_of_single_forwards(name, tmp_path):
    folder = FAMILIES[name](tmp_path / name)
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    seconds = [2.6, 0.5, 0.9, 0.7, 0.7]
    items = [
        renderer.render([asked(heard(clip(each, number)))]).multi_modal_data.mm_items["audio"][0]
        for number, each in enumerate(seconds)
    ]
    (token,) = json.loads((folder / "config.json").read_text()).values()
    torch.manual_seed(0)
    model = MODELS[name](token).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.1)
    report = compare_family(model, images=items)
    assert report.family.refused == {}
    assert max(report.logits.values()) < 5e-5


@pytest.mark.parametrize("name", ["qwen2_audio", "gemma4"])
def test_the_tensors_of_a_batch_are_the_clips_padded_with_zeros(name, tmp_path):
    renderer = Renderer.from_pretrained(FAMILIES[name](tmp_path / name), image_backend="pil")
    answer = {"role": "assistant", "content": "Yes."}
    samples = [
        build_training_sample(renderer, [asked(*parts), answer])
        for parts in (
            [heard(clip(0.9))],
            ["None."],
            [heard(clip(0.3, 1)), "then", heard(clip(1.4, 2))],
        )
    ]
    family = ModelFamily(name, rules=unproved_family({"model_type": name}).rules)
    joined = collate_mm_kwargs(samples, family)
    items = [item for sample in samples for item in sample.multi_modal_data.mm_items.get("audio", ())]
    assert len(items) == 3
    for key, whole in joined.items():
        parts = [item.tensors()[key] for item in items]
        cut = parts_of_batch(parts, whole.numpy())
        assert cut is not None
        assert all(np.array_equal(*pair) for pair in zip(parts, cut, strict=True))
    assert [*joined] == [*items[0].tensors()]


def test_a_proof_with_images_is_none_with_audio(tmp_path, sentence):
    renderer = Renderer.from_pretrained(FAMILIES["qwen2_audio"](tmp_path / "model"), image_backend="pil")
    messages = [asked("Hear:", heard(clip(0.5))), {"role": "assistant", "content": "A bell."}]
    sample, settings = build_training_sample(renderer, messages), {"model_type": "hearing and seeing"}
    remember_proof(settings, Proof(None, "", 90, {}, ("image",)), on_disk=False)
    family = ModelFamily.from_config(settings)
    assert error_of(BatchError, collate, [sample], family, pad_token_id=0) == sentence
    remember_proof(settings, Proof(None, "", None, {"packed": "they mix"}, ("audio",)), on_disk=False)
    family = ModelFamily.from_config(settings)
    assert (family.media, family.max_sample_tokens, [*family.refused]) == (("audio", "image"), 90, ["packed"])
    assert "input_features" in collate([sample], family, pad_token_id=0).fields


def test_samples_do_not_train_on_audio(tmp_path):
    renderer = Renderer.from_pretrained(FAMILIES["gemma4"](tmp_path / "gemma4"), image_backend="pil")
    messages = [asked("Hear:", heard(clip(0.5))), {"role": "assistant", "content": "A bell."}]
    sample = build_training_sample(renderer, messages, train_on=("user", "assistant"))
    (span,) = sample.media_spans
    assert not sample.loss_mask[span.start : span.stop].any()
    assert (sample.mm_token_type_ids == 3).sum() == span.range.num_embeds
