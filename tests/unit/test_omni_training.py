"""Qwen's omni models: positions are the model's own, batches have the logits of single forwards, or are refused."""

import numpy as np
import pytest

from audio_cases import asked, clip, heard, qwen2_5_omni, qwen3_omni
from kit import error_of
from mmrender import Renderer
from mmrender.errors import BatchError
from mmrender.training.positions import mrope_position_ids

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig  # noqa: E402
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Qwen25  # noqa: E402
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Qwen3  # noqa: E402

from mmrender.testing.families import compare_family  # noqa: E402
from mmrender.training.families import unproved_family  # noqa: E402

START, IMAGE, VIDEO, AUDIO, AUDIO_START, END = range(400, 406)
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 64,
    "output_dim": 64,
    "n_window": 50,
    "n_window_infer": 100,
    "downsample_hidden_size": 32,
}
_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}
MODELS = {"qwen2_5_omni_thinker": (Qwen25, qwen2_5_omni), "qwen3_omni_moe_thinker": (Qwen3, qwen3_omni)}


def small(name, audio=AUDIO):
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": audio,
        "vision_start_token_id": START,
        "audio_start_token_id": AUDIO_START,
    }
    parts = {"text_config": dict(_TEXT), "audio_config": dict(_AUDIO), "vision_config": dict(_VISION)}
    return MODELS[name][0](AutoConfig.for_model(name, **parts, **ids))


def tokens_of(frames, name):
    """Number of tokens of a clip of up to 99 frames."""
    halved = (frames - 1) // 2 + 1
    return (halved - 2) // 2 + 1 if name.startswith("qwen2_5") else ((halved - 1) // 2) // 2 + 1


def row(rng, name):
    """Tokens with media between, their types, the grids, the seconds of a step and the frames of clips."""
    ids, types, images, videos, seconds, frames = [1], [0], [], [], [], []
    for kind in rng.choice(["image", "video", "audio"], rng.integers(0, 5)):
        if kind == "audio":
            frames.append(int(rng.integers(16, 100)))
            span = [AUDIO] * tokens_of(frames[-1], name)
        else:
            steps = 1 if kind == "image" else int(rng.integers(1, 4))
            grid = [steps, *(2 * rng.integers(1, 5, 2)).tolist()]
            (images if kind == "image" else videos).append(grid)
            if kind == "video":
                # Qwen3-Omni numbers other times in parts of positions.
                seconds.append(
                    float(rng.choice([0.2, 1.0, 2.0, *([0.3] if name.startswith("qwen2_5") else [])]))
                )
            span = [IMAGE if kind == "image" else VIDEO] * (steps * grid[1] * grid[2] // 4)
        before = [*[7] * int(rng.integers(1, 4)), AUDIO_START if kind == "audio" else START]
        ids += [*before, *span, END]
        types += [*[0] * len(before), *[("image", "video", "audio").index(kind) + 1] * len(span), 0]
    return ids, types, images, videos, seconds, frames


@pytest.mark.parametrize("name", MODELS)
def test_positions_are_the_models_own(name):
    with torch.device("meta"):
        model = small(name)
    rope = unproved_family(model.config.to_dict()).mrope
    rng = np.random.default_rng(3)
    rows = [row(rng, name) for _ in range(60)]
    for ids, types, images, videos, seconds, frames in rows:
        if not images and not videos:
            continue
        expected, _ = model.get_rope_index(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            audio_seqlens=torch.tensor(frames),
            second_per_grids=torch.tensor(seconds),
        )
        grids = {"image_grid_thw": images or None, "video_grid_thw": videos or None}
        ours = mrope_position_ids([types], rope, second_per_grid_ts=seconds or None, **grids)
        assert np.array_equal(ours, expected.numpy())
    assert min(sum(map(len, part)) for part in list(zip(*rows, strict=True))[2:]) > 20


def test_times_in_parts_of_positions_are_refused(sentence):
    rope = unproved_family({"model_type": "qwen3_omni_moe_thinker"}).mrope
    types, grids = [[0, 2, 2, 0]], {"video_grid_thw": [[2, 2, 2]], "second_per_grid_ts": [0.3]}
    assert error_of(BatchError, mrope_position_ids, types, rope, **grids) == sentence


@pytest.mark.parametrize("name", MODELS)
def test_batches_have_the_logits_of_single_forwards_or_are_refused(name, tmp_path):
    renderer = Renderer.from_pretrained(MODELS[name][1](tmp_path / name), image_backend="pil")
    seconds = [1.6, 0.5, 0.9, 0.7, 0.7]
    items = [
        renderer.render([asked(heard(clip(each, number)))]).multi_modal_data.mm_items["audio"][0]
        for number, each in enumerate(seconds)
    ]
    (token,) = {piece.token for item in items for piece in item.expansion}
    torch.manual_seed(0)
    model = small(name, renderer.tokenizer.token_id(token)).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.1)
    if name == "qwen3_omni_moe_thinker":
        # Its encoder pads clips to the longest of a batch without a mask, and so mixes them.
        assert "differ from single forwards" in error_of(BatchError, compare_family, model, images=items)
        return
    report = compare_family(model, images=items)
    assert report.family.refused == {}
    assert max(report.logits.values()) < 5e-5
