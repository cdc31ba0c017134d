"""Qwen's omni models: positions are the model's own, batches have the logits of single forwards, or are refused."""

import asyncio

import numpy as np
import pytest

from audio_cases import asked, clip, film, heard, omni_renderer, qwen2_5_omni, qwen3_omni, with_videos
from kit import error_of
from mmrender import Renderer
from mmrender.client.local import LocalBackend
from mmrender.client.types import EngineRequest
from mmrender.errors import BatchError
from mmrender.testing.memory_transport import MemoryTransport
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.positions import mrope_position_ids
from mmrender.trajectory.sample import TrainingSample

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig  # noqa: E402
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Qwen25  # noqa: E402
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Qwen3  # noqa: E402

from mmrender.testing.families import compare_family  # noqa: E402
from mmrender.training.collate import collate  # noqa: E402
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
    "max_position_embeddings": 1024,
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


def small(name, audio=AUDIO, **settings):
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": audio,
        "vision_start_token_id": START,
        "audio_start_token_id": AUDIO_START,
        **settings,
    }
    parts = {"text_config": dict(_TEXT), "audio_config": dict(_AUDIO), "vision_config": dict(_VISION)}
    return MODELS[name][0](AutoConfig.for_model(name, **parts, **ids))


def filled(model):
    """The model with weights whose outputs depend on every input."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.1)
    return model


def tokens_of(frames, name):
    """Number of tokens of a clip."""
    if name.startswith("qwen2_5"):
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return -(-(frames % 100) // 8) + frames // 100 * 13


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


@pytest.mark.parametrize("name", MODELS)
def test_positions_with_sound_tracks_are_the_models_own(name, tmp_path):
    audio = omni_renderer(with_videos(MODELS[name][1](tmp_path / name))).media.processor.audio
    ids_of = {"<|video|>": VIDEO, audio._token: AUDIO}
    with torch.device("meta"):
        model = small(name, position_id_per_seconds=25 if name.startswith("qwen2_5") else 13)
    rope = unproved_family(model.config.to_dict()).mrope
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(30):
        ids, types, grids, frames = [1], [0], [], []
        for kind in rng.choice(["clip", "film", "film"], rng.integers(1, 5)):
            frames.append(int(rng.integers(16, 1000)))
            count = tokens_of(frames[-1], name)
            if kind == "clip":
                runs, before, after = [(AUDIO, count)], [7, AUDIO_START], [END, 8]
            else:
                grid = [int(rng.integers(1, 6)), *(2 * rng.integers(1, 4, 2)).tolist()]
                grids.append(grid)
                found = audio.alternate(grid[0], grid[1] * grid[2] // 4, 2.0, count)[1:-1]
                runs = [(ids_of[token], number) for token, number in found]
                before, after = [7, START, AUDIO_START], [END, END, 8]
                seen.add((runs[-1][0], len(runs) > 2))
            span = [token for token, number in runs for _ in range(number)]
            ids += [*before, *span, *after]
            types += [*[0] * len(before), *[{VIDEO: 2, AUDIO: 3}[token] for token in span], *[0] * len(after)]
        if not grids:
            continue
        expected, _ = model.get_rope_index(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            video_grid_thw=torch.tensor(grids),
            use_audio_in_video=True,
            audio_seqlens=torch.tensor(frames),
            second_per_grids=torch.full((len(grids),), 2.0),
        )
        ours = mrope_position_ids([types], rope, video_grid_thw=grids, second_per_grid_ts=[2.0] * len(grids))
        assert np.array_equal(ours, expected.numpy())
    assert seen == {(VIDEO, True), (AUDIO, True), (AUDIO, False)}


@pytest.mark.parametrize("name", MODELS)
def test_batches_with_sound_tracks_have_the_logits_of_single_forwards(name, tmp_path):
    patch = 14 if name.startswith("qwen2_5") else 16
    renderer = omni_renderer(with_videos(MODELS[name][1](tmp_path / name), patch))
    token_of = renderer.tokenizer.token_id
    audio = renderer.media.processor.audio._token
    named = {"image": "<|image|>", "video": "<|video|>", "vision_start": "<|vision_start|>"}
    ids = {f"{kind}_token_id": token_of(token) for kind, token in named.items()}
    ids["audio_start_token_id"] = token_of(audio.replace("AUDIO", "audio_bos").replace("_pad", "_start"))
    rate = 25 if name.startswith("qwen2_5") else 13
    model = filled(small(name, token_of(audio), position_id_per_seconds=rate, **ids).float()).eval()
    parts = [[film(), "Hear."], [heard(clip(0.7, 4)), "and", film(4, 3.0, seed=2), "Well?"]]
    parts = parts if name.startswith("qwen2_5") else [[part[-2], part[-1]] for part in parts]
    rendered = [renderer.render([asked(*each)]) for each in parts]
    samples = [
        TrainingSample(each.token_array, np.zeros(len(each), bool), multi_modal_data=each.multi_modal_data)
        for each in rendered
    ]
    family = unproved_family(model.config.to_dict())
    first = rendered[0]
    request = EngineRequest(
        model="m",
        prompt_ids=first.token_ids,
        sampling_params={"max_tokens": 3, "seed": 1},
        request_id="r",
        multi_modal_data=first.multi_modal_data,
    )
    turn = asyncio.run(LocalBackend(model).generate(request, MemoryTransport({})))
    whole = np.array([*first.token_ids, *turn.completion_ids], np.int32)
    sample = TrainingSample(whole, np.zeros(len(whole), bool), multi_modal_data=first.multi_modal_data)
    logprobs = logits_alone(model, sample, family).log_softmax(-1)[len(first) - 1 : -1]
    expected = logprobs.gather(1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
    np.testing.assert_allclose(turn.logprobs, expected, rtol=0, atol=1e-4)
    for rows in (None, [[0, 1]], [[1], [0]]):
        batch = collate(samples, family, pad_token_id=0, rows=rows)
        with torch.inference_mode():
            logits = model(**batch.model_inputs()).logits
        placed = [(number, segment) for number, row in enumerate(batch.segments) for segment in row]
        for (number, segment), index in zip(placed, [1, 0] if rows == [[1], [0]] else [0, 1], strict=True):
            sample = samples[index]
            alone = logits_alone(model, sample, family)
            ours = logits[number, segment.start : segment.start + segment.length]
            assert (ours - alone).abs().max() < 5e-5


def logits_alone(model, sample, family):
    """Logits of one forward with positions of the model's own."""
    media = collate_mm_kwargs([sample], family)
    with torch.inference_mode():
        return model(
            input_ids=torch.from_numpy(sample.token_ids)[None].long(),
            attention_mask=torch.ones(1, len(sample), dtype=torch.int64),
            use_audio_in_video=True,
            **media,
        ).logits[0]


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
    model = filled(small(name, renderer.tokenizer.token_id(token)).float())
    if name == "qwen3_omni_moe_thinker":
        # Its encoder pads clips to the longest of a batch without a mask, and so mixes them.
        assert "differ from single forwards" in error_of(BatchError, compare_family, model, images=items)
        return
    report = compare_family(model, images=items)
    assert report.family.refused == {}
    assert max(report.logits.values()) < 5e-5
