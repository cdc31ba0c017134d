"""Audio through models' own processors: tokens, features, several clips, bridges and the wire."""

import base64
import io
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import mmcodecs
from audio_cases import FAMILIES, RATE, asked, clip, heard, wav
from item_cases import same_tensors
from kit import error_of, noise, shown
from mmrender import Renderer, Trajectory
from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.audio import load_audio
from mmrender.media.encoded import EncodedImage, ReferenceItem
from mmrender.media.item import DeferredParts
from mmrender.media.levels import Floats, Padded, expanded, padded
from mmrender.media.processors.adapted_audio import AudioOnlyProcessor
from mmrender.media.wire import item_from_wire, item_to_wire
from mmrender.sidecar import MultiModalData
from mmrender.testing.difference import first_difference
from mmrender.testing.reference import ReferenceRenderer
from mmrender.view.doctor import diagnose
from mmrender.view.page import Page
from mmrender.view.pictures import sound_of, thumbnails, token_grid
from tree_cases import assert_same

ONE_CLIP = frozenset({"audio_flamingo"})
EFFECTS = {"qwen2_audio": "none", "qwen3_omni": "longer", "gemma4": "none", "audio_flamingo": "refused"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    return {name: build(folder / name) for name, build in FAMILIES.items()}


@pytest.fixture(scope="module")
def opened(folders):
    return {
        name: (Renderer.from_pretrained(path, image_backend="pil"), ReferenceRenderer(path, "pil"))
        for name, path in folders.items()
    }


def drawn(source: random.Random, name: str):
    """A conversation with clips of many lengths, silence, and words that look like syntax."""
    messages, clips = [], 0
    for turn in range(source.randint(1, 3)):
        parts = [source.choice(["Listen.", "", " <|im_end|> ", "naïve\n"])]
        for _ in range(source.choice([0, 1, 1, 2])):
            if name in ONE_CLIP and clips:
                break
            clips += 1
            samples = clip(source.choice([0.08, 0.25, 0.7, 2.3, 4.6]), source.randrange(1000))
            part = heard(np.zeros_like(samples) if source.random() < 0.2 else samples)
            parts.insert(source.randint(0, len(parts)), part)
        messages += [asked(*parts), {"role": "assistant", "content": f"Answer {turn}."}]
    return messages[: -1 if source.random() < 0.7 else None]


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_equal_the_reference(name, opened):
    renderer, reference = opened[name]
    parsing = Renderer(
        renderer.templates, renderer.tokenizer, renderer.media, content_special_tokens="parse", memo_bytes=0
    )
    source = random.Random(7)
    clips = 0
    for _ in range(12):
        messages = drawn(source, name)
        rendered = parsing.render(messages)
        clips += len(rendered.multi_modal_data.mm_items.get("audio", ()))
        assert first_difference(parsing, rendered, reference.render(messages)) is None
    assert clips > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_found_about_a_family(name, opened):
    renderer, _ = opened[name]
    renderer.render([asked(heard(clip()))])
    audio = renderer.media.processor.audio
    assert (audio.sampling_rate, audio.effect_of_others) == (RATE, EFFECTS[name])
    assert isinstance(renderer.media.processor, AudioOnlyProcessor)


def test_a_clip_is_the_samples_their_rate_and_the_settings(opened):
    renderer, _ = opened["qwen2_audio"]

    def identity(samples, **options):
        rendered = renderer.render([asked({**heard(samples), **options})])
        return rendered.multi_modal_data.mm_hashes["audio"][0]

    samples = clip(0.4)
    doubled = np.stack([samples, samples])
    assert identity(samples) == identity(samples.astype(np.float64)) == identity(doubled)
    others, _ = opened["gemma4"]
    theirs = others.render([asked(heard(samples))]).multi_modal_data.mm_hashes["audio"][0]
    assert len({identity(samples), identity(samples[:-1]), identity(clip(0.4, 1)), theirs}) == 4


def test_one_clip_is_processed_once(folders):
    renderer = Renderer.from_pretrained(folders["qwen2_audio"], image_backend="pil")
    samples = clip(0.4)
    first = renderer.render([asked(heard(samples), heard(samples.copy()))])
    again = renderer.render([asked("Again:", heard(samples))])
    items = [*first.multi_modal_data.mm_items["audio"], *again.multi_modal_data.mm_items["audio"]]
    assert all(item is items[0] for item in items)
    assert renderer.media.cache.stats.misses == 1


@pytest.mark.parametrize(
    ("name", "seconds", "bridged"),
    [
        ("qwen2_audio", (0.5, 2.0), True),
        ("gemma4", (0.5, 2.0), True),
        ("qwen3_omni", (2.0, 0.5), True),
        ("qwen3_omni", (0.5, 0.5), True),
        ("qwen3_omni", (0.5, 2.0), False),
    ],
)
def test_a_clip_in_a_later_turn_equals_the_whole_conversation(name, seconds, bridged, opened):
    renderer, _ = opened[name]
    first, second = (heard(clip(each, number)) for number, each in enumerate(seconds))
    question, answer, extension = asked(first, "What?"), "A bell.", [asked("And", second, "this?")]
    prompt = renderer.render([question], add_generation_prompt=True)
    completion = renderer.tokenizer.encode(answer) + [renderer.tokenizer.token_id("<|im_end|>")]
    result = renderer.bridge_to_next_turn(
        prompt.token_ids,
        completion,
        extension,
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    if not bridged:
        assert result is None
        assert (
            renderer.why_not_bridged == "the processor pads earlier audio clips to a longer one that follows"
        )
        return
    whole = renderer.render(
        [question, {"role": "assistant", "content": answer}, *extension], add_generation_prompt=True
    )
    assert result.token_ids == whole.token_ids
    assert result.multi_modal_data.mm_hashes == whole.multi_modal_data.mm_hashes
    assert result.multi_modal_data.mm_placeholders == whole.multi_modal_data.mm_placeholders


@pytest.mark.parametrize("name", FAMILIES)
def test_the_wire_inverts(name, opened):
    renderer, _ = opened[name]
    (item,) = renderer.render([asked(heard(clip(0.3)))]).multi_modal_data.mm_items["audio"]
    copy = item_from_wire(mmcodecs.decode(bytes(mmcodecs.encode(item_to_wire(item)))))
    assert copy == item
    assert (copy.modality, copy.size, copy.grid, copy.expansion) == (
        "audio",
        (RATE, 4800),
        item.grid,
        item.expansion,
    )
    assert same_tensors(copy, item)


@pytest.mark.parametrize("name", ["qwen3_omni", "gemma4"])
def test_a_trajectory_with_clips_comes_back_with_their_tensors(name, opened):
    pytest.importorskip("soundfile")
    renderer, _ = opened[name]
    parts = {"type": "audio", "audio": wav(clip(1.2))}, "and", heard(clip(0.4, 1))
    prompt = renderer.render([asked(*parts)], add_generation_prompt=True)
    trajectory = Trajectory("t")
    trajectory.append(prompt.token_ids, [65, 66], logprobs=[-1, -2], multi_modal_data=prompt.multi_modal_data)
    read = Trajectory.from_bytes(bytes(trajectory.to_bytes()))
    assert_same(trajectory, read)
    assert len(read.items) == 2
    assert all(map(same_tensors, trajectory.items, read.items))
    (sample,) = read.samples()
    features = sum(place.num_embeds for place in prompt.multi_modal_data.mm_placeholders["audio"])
    assert (sample.mm_token_type_ids == 3).sum() == features > 0


def test_clips_that_the_call_supplies(opened):
    renderer, _ = opened["qwen2_audio"]
    first, second = clip(0.3), clip(0.5, 1)
    inside = renderer.render([asked(heard(first), "and", heard(second))])
    empty = [asked({"type": "audio"}, "and", {"type": "audio"})]
    audio = [(first, RATE), {"array": second, "sampling_rate": RATE}]
    beside = renderer.render(empty, audio=audio)
    assert beside == inside
    assert renderer.render_text(empty, audio=audio) == inside.text
    again = renderer.encode_text(inside.text, audio=audio)
    assert (again.token_ids, again.multi_modal_data) == (inside.token_ids, inside.multi_modal_data)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_page_shows_the_spectrogram_and_doctor_names_the_extractor(name, opened):
    renderer, _ = opened[name]
    rendered = renderer.render([asked("Hear:", heard(clip(1.5)))])
    (item,) = rendered.multi_modal_data.mm_items["audio"]
    (picture,) = thumbnails(item)
    header, _, data = picture.partition(",")
    frames = 149 if name == "gemma4" else 150
    size = Image.open(io.BytesIO(base64.b64decode(data))).size
    assert (header, size) == ("data:image/jpeg;base64", (frames, 64))
    (span,) = rendered.multi_modal_data.spans()
    assert token_grid(item, span.range.num_embeds) == (1, 1, span.range.num_embeds)
    assert picture in Page(rendered)._repr_html_()
    found = diagnose(renderer)
    assert found["problems"] == {}
    assert found["images"]["audio"].startswith(
        f"{renderer.media.processor.audio.name}, 16000 samples a second"
    )


def test_a_clip_by_reference_is_its_file_and_plays_in_the_page(opened):
    pytest.importorskip("soundfile")
    renderer, _ = opened["gemma4"]
    processor, data = renderer.media.processor, wav(clip(0.5))
    rendered = renderer.render([asked("Hear:", {"type": "audio", "audio": data})])
    (span,) = rendered.multi_modal_data.spans()
    reference = ReferenceItem.of(span.item, data, span.range.length)
    copy = item_from_wire(mmcodecs.decode(bytes(mmcodecs.encode(item_to_wire(reference)))))
    resolved = copy.resolve(processor)
    assert resolved == span.item
    assert same_tensors(resolved, span.item)
    assert sound_of(copy) == f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    assert sound_of(span.item) is None
    other = ReferenceItem.of(span.item, wav(clip(0.5, 1)), span.range.length)
    assert "processing again gives another identity" in error_of(MediaError, other.resolve, processor)
    shown = replace(rendered, multi_modal_data=MultiModalData.of([(span.range, copy)]))
    page = Page(shown)._repr_html_()
    assert sound_of(copy) in page
    assert "media-src data:" in page


@pytest.mark.parametrize("kind", ["FLAC", "OGG"])
def test_a_clip_is_kept_as_a_file_and_has_the_features_of_the_reference(kind, opened):
    soundfile = pytest.importorskip("soundfile")
    renderer, reference = opened["qwen3_omni"]
    levels, out = np.rint(clip(1.7, 5) * 2000).astype(np.int16), io.BytesIO()
    soundfile.write(out, levels, RATE, format=kind, subtype=None if kind == "FLAC" else "OPUS")
    data = wav(levels / 32767) if kind == "FLAC" else out.getvalue()
    messages = [asked({"type": "audio", "audio": EncodedImage(data, "audio/any").data_url})]
    rendered = renderer.render(messages)
    (item,) = rendered.multi_modal_data.mm_items["audio"]
    assert type(item.parts) is DeferredParts
    assert item.nbytes == len(item.parts.source) < 2 * len(levels)
    assert item.parts.source == out.getvalue()
    audio = renderer.media.processor.audio
    assert item.identity not in audio._features
    assert sound_of(item).startswith(f"data:audio/{kind.lower()};base64,")
    assert first_difference(renderer, rendered, reference.render(messages)) is None
    copies = item_from_wire(item_to_wire(item)), pickle.loads(pickle.dumps(item))
    for copy in copies:
        assert type(copy.parts) is dict
        assert same_tensors(copy, item)
    audio._features.clear()
    assert same_tensors(copies[0], item)


def test_a_count_of_tokens_that_a_run_contradicts_is_an_error(opened, folders, sentence, monkeypatch):
    pytest.importorskip("soundfile")
    audio = opened["qwen3_omni"][0].media.processor.audio
    loaded = load_audio(wav(clip(1.1)), RATE)
    assert type(audio.prepare(loaded).finish().parts) is DeferredParts
    monkeypatch.setattr(audio, "_count_tokens", lambda count: 3)
    item = audio.prepare(load_audio(wav(clip(1.2)), RATE)).finish()
    assert error_of(ProcessorError, item.tensors).replace(item.identity[:12], "ID") == sentence
    other = Renderer.from_pretrained(folders["qwen3_omni"], image_backend="pil").media.processor.audio
    monkeypatch.setattr(other, "_count_tokens", lambda count: 3)
    assert type(other.prepare(loaded).finish().parts) is dict


def test_padding_is_not_kept(opened):
    renderer, _ = opened["qwen2_audio"]
    (item,) = renderer.render([asked(heard(clip(0.3)))]).multi_modal_data.mm_items["audio"]
    assert type(item.parts["input_features"]) is Padded
    assert item.nbytes < sum(values.nbytes for values in item.tensors().values()) / 4


@pytest.mark.parametrize("fill", [0.0, -0.0, 1.5])
@pytest.mark.parametrize("shape", [(1, 4, 9), (1, 9, 4), (6,), (2, 3)])
def test_padded_forms_are_exact(fill, shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values[(..., slice(-2, None))] = fill
    for array in (values, np.full(shape, fill, np.float32), np.swapaxes(values, 0, -1).copy()):
        form = padded(array)
        assert form.shape == array.shape
        assert expanded(form, "float32").tobytes() == array.tobytes()
        assert type(form) is Padded
    unlike = np.arange(12, dtype=np.float32).reshape(3, 4)
    unlike[-1, -1] = np.nan
    assert type(padded(unlike)) is Floats


def test_a_clip_too_short_for_a_token_is_refused(opened, sentence):
    renderer, _ = opened["qwen2_audio"]
    assert error_of(MediaError, renderer.render, [asked(heard(clip(1 / RATE)))]) == sentence


def test_a_second_clip_is_refused_where_a_prompt_takes_one(opened, sentence):
    renderer, _ = opened["audio_flamingo"]
    messages = [asked(heard(clip(0.3)), heard(clip(0.4)))]
    assert error_of(MediaError, renderer.render, messages) == sentence


def test_images_and_videos_for_a_model_of_audio_are_refused(opened, sentence):
    renderer, _ = opened["qwen2_audio"]
    messages = [asked("See", shown(noise()))]
    assert error_of(MMRenderError, renderer.render, messages) == sentence
    film = {"type": "video", "video": np.zeros((2, 28, 28, 3), np.uint8)}
    assert error_of(ProcessorError, renderer.render, [asked(film)]) == sentence


def test_audio_for_a_model_of_images_is_refused(tiny_model, sentence):
    template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=template)
    assert error_of(ProcessorError, renderer.render, [asked(heard(clip()))]) == sentence


def test_placeholders_that_a_user_types_are_text(opened):
    renderer, _ = opened["gemma4"]
    rendered = renderer.render([asked("<|audio|>", heard(clip(0.3)))])
    (place,) = rendered.multi_modal_data.mm_placeholders["audio"]
    feature = renderer.tokenizer.token_id("<|audio|>")
    assert rendered.token_ids.count(feature) == place.num_embeds
