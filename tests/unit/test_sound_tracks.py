"""Videos of omni models with their sound tracks: two items of one range, whose tokens alternate."""

from itertools import groupby

import numpy as np
import pytest

from audio_cases import (
    asked,
    clip,
    film,
    heard,
    omni_renderer,
    qwen2_5_omni,
    qwen2_audio,
    qwen3_omni,
    with_videos,
)
from kit import assistant, error_of
from mmrender import Renderer
from mmrender.client.vllm_images import dense_spans
from mmrender.content.messages import normalize_messages
from mmrender.errors import EngineUnsupportedError, InputError, MediaError, ProcessorError, RenderError
from mmrender.media import tracks
from mmrender.media.audio import load_audio
from mmrender.media.policy import MediaPolicy
from mmrender.media.tracks import load_track
from mmrender.messages import VideoPart
from mmrender.sidecar import collapse
from mmrender.training.packing import smallest_dummy
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.truncate import truncate
from video_cases import encoded_video, frames_of

pytest.importorskip("av")
pytest.importorskip("transformers")

FAMILIES = {"qwen2_5_omni": qwen2_5_omni, "qwen3_omni": qwen3_omni}


@pytest.fixture(scope="module", params=list(FAMILIES))
def renderer(request, tmp_path_factory):
    folder = FAMILIES[request.param](tmp_path_factory.mktemp("omni") / request.param)
    return omni_renderer(with_videos(folder))


def runs_of(renderer, rendered):
    """The runs of equal tokens in the range of the first video, by name."""
    place = rendered.multi_modal_data.mm_placeholders["video"][0]
    ids = rendered.token_ids[place.offset : place.offset + place.length]
    return [(renderer.decode([token]), len(list(run))) for token, run in groupby(ids)]


def test_tokens_alternate_in_one_range_of_two_items(renderer):
    rendered = renderer.render([asked("See", film(), "and", heard(clip(0.6, 5)), film(seconds=0))])
    data = rendered.multi_modal_data
    audio = renderer.media.processor.placeholder["audio"]
    (start, one), *middle, (end, last) = runs_of(renderer, rendered)
    assert (one, last) == (1, 1)
    assert (start, end) != (audio, audio)
    spans = data.spans(len(rendered))
    assert [span.modality for span in spans] == ["video", "audio", "audio", "video"]
    video, track, alone, silent = spans
    assert track.is_track_of(video)
    assert not alone.is_track_of(video)
    counts = {token: sum(count for name, count in middle if name == token) for token in ("<|video|>", audio)}
    assert counts == {"<|video|>": video.range.num_embeds, audio: track.range.num_embeds}
    assert sum(counts.values()) == video.range.length - 2
    assert len(middle) > 3
    assert [data.count(kind) for kind in ("video", "audio")] == [2, 1]
    assert silent.range.embed_spans is None
    short = collapse(rendered.token_ids, data, rendered.placeholder_ids)
    assert len(short) == len(rendered) - sum(span.range.length - 1 for span in (video, alone, silent))
    again = renderer.render([asked("Look.", film())]).multi_modal_data
    assert again.mm_hashes["video"] == data.mm_hashes["video"][:1]
    # Without the track, the frames are another item.
    assert silent.item.identity != video.item.identity


def test_a_bridge_is_a_rendering_or_refused(renderer):
    first = [asked(film())]
    follow = [asked(film(seed=1, seconds=1.5), heard(clip(0.5, 3)), "And now?")]
    prompt = renderer.render(first, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode_run("Fine.").ids, renderer.tokenizer.token_id("<|im_end|>")]
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids, completion, follow, previous_multi_modal_data=prompt.multi_modal_data
    )
    whole = renderer.render([*first, assistant("Fine."), *follow], add_generation_prompt=True)
    assert bridged is not None
    assert bridged.token_ids == whole.token_ids
    assert bridged.multi_modal_data == whole.multi_modal_data
    longer = [asked(film(seed=2, seconds=6.0))]
    refused = renderer.bridge_to_next_turn(
        prompt.token_ids, completion, longer, previous_multi_modal_data=prompt.multi_modal_data
    )
    is_independent = renderer.media.processor.audio.effect_of_others == "none"
    assert (refused is None) != is_independent
    assert is_independent or "pads earlier audio clips" in renderer.why_not_bridged


def test_tracks_travel_and_are_cut_with_their_videos(renderer):
    rendered = renderer.render([asked(film(), "Hear.", film(seed=1))])
    trajectory = Trajectory("films")
    stop = renderer.tokenizer.token_id("<|im_end|>")
    trajectory.append(rendered.token_ids, [stop], multi_modal_data=rendered.multi_modal_data, logprobs=[0.0])
    received = Trajectory.from_frames(trajectory.to_frames())
    (sample,) = received.samples()
    assert sample.multi_modal_data.mm_hashes == rendered.multi_modal_data.mm_hashes
    assert sample.multi_modal_data.mm_placeholders == rendered.multi_modal_data.mm_placeholders
    second = sample.media_spans[2]
    for length, count in ((second.start + 1, 2), (second.stop, 4)):
        assert len(truncate(sample, length).media_spans) == count
    dummy = smallest_dummy([sample])
    assert [span.modality for span in dummy.media_spans] == ["video", "audio"]


def test_a_sound_track_is_decoded_as_its_file():
    sound = np.stack([clip(0.5, 1), clip(0.5, 2)])
    levels = np.rint(sound * 32767).astype(np.int16)
    data = encoded_video(frames_of(4, 28, 56), fps=8, container="matroska", sound=sound)
    track = load_track(VideoPart(data), 16_000, MediaPolicy(), "part")
    assert np.array_equal(track.samples, load_audio(levels, 16_000, source_rate=16_000).samples)
    assert load_track(VideoPart(film(seconds=0)["video"]), 16_000, MediaPolicy(), "part") is None
    assert load_track(VideoPart(frames_of(4, 28, 56)), 16_000, MediaPolicy(), "part") is None


def test_what_cannot_be_joined_is_refused(tmp_path, monkeypatch, sentence):
    options = {"image_backend": "pil"}
    qwen2 = qwen2_audio(tmp_path / "qwen2_audio")
    found = [error_of(ProcessorError, Renderer.from_pretrained, qwen2, use_audio_in_video=True, **options)]
    plain = Renderer.from_pretrained(qwen2, **options)
    names = ("use_audio_in_video", "load_audio_from_video")
    found += [error_of(InputError, plain.render, [asked("Hear.")], **{name: True}) for name in names]
    found.append(error_of(RenderError, Renderer.from_pretrained, qwen2, use_audio_in_video="yes"))
    part = VideoPart(film(seconds=3.0)["video"])
    short = MediaPolicy(max_audio_seconds=2)
    found.append(error_of(MediaError, load_track, part, 16_000, short, "messages[0].content[0]"))
    monkeypatch.setattr(tracks, "CODECS", ("aac",))
    found.append(error_of(MediaError, load_track, part, 16_000, MediaPolicy(), "messages[0].content[0]"))
    assert "\n".join(each.replace(str(tmp_path), "FOLDER") for each in found) == sentence


def test_engines_that_lose_the_features_of_a_range_refuse_tracks(renderer, sentence):
    data = renderer.render([asked(film())]).multi_modal_data
    assert error_of(EngineUnsupportedError, dense_spans, data.spans()).split(", got ")[0] == sentence


def test_frames_take_their_sound_with_them(renderer):
    frames, sound = frames_of(8, 28, 56, 3), clip(3.0, 3)
    part = {"type": "video", "video": frames, "fps": 2.0, "audio": sound, "sampling_rate": 16_000}
    rendered = renderer.render([asked("See", part)])
    video, track = rendered.multi_modal_data.spans(len(rendered))
    assert track.is_track_of(video)
    silent = renderer.render([asked("See", {**part, "audio": None, "sampling_rate": None})])
    assert [*silent.multi_modal_data.mm_hashes] == ["video"]
    louder = renderer.render([asked("See", {**part, "audio": (sound / 2, 16_000), "sampling_rate": None})])
    assert louder.token_ids == rendered.token_ids
    assert louder.multi_modal_data.mm_hashes["audio"] != rendered.multi_modal_data.mm_hashes["audio"]
    # The sound of a part comes before that of its file.
    file = renderer.render([asked("See", {**film(), "audio": sound[:16_000], "sampling_rate": 16_000})])
    assert file.multi_modal_data.mm_items["audio"][0].size == (16_000, 16_000)
    trajectory = Trajectory("films")
    message = normalize_messages([asked(part)])[0]
    trajectory.append([1, 2], [3], logprobs=[0.0], messages=[message])
    received = Trajectory.from_frames(trajectory.to_frames()).steps[0].messages[0].content[0]
    assert (received.source, received.sound.source, received.sound.sampling_rate) == (None, None, 16_000)


def test_sound_that_would_be_left_out_is_refused(tiny_model, sentence):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    part = {"type": "video", "video": frames_of(4, 32, 32), "fps": 2.0, "audio": (clip(0.5), 16_000)}
    assert error_of(MediaError, renderer.render, [asked(part)]) == sentence
