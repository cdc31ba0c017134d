"""Audio to servers: the handshake about a vLLM server's features, and who refuses audio."""

import asyncio
import base64
import io
import wave

import numpy as np
import pytest

from audio_cases import (
    RATE,
    asked,
    audio_flamingo,
    clip,
    gemma4,
    heard,
    logprobs_of,
    qwen2_5_omni,
    qwen2_audio,
    qwen2_audio_model,
)
from kit import error_of
from mmrender import Renderer, generate
from mmrender.client.dynamo import DynamoBackend
from mmrender.client.local import LocalBackend
from mmrender.client.model_arguments import _padded_at_ends
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import VLLMBackend
from mmrender.client.vllm_fields import collate_items, layout_of
from mmrender.client.vllm_images import GENERATE_PATH
from mmrender.client.vllm_render import RENDER_PATH
from mmrender.errors import EngineMismatchError, EngineUnsupportedError
from mmrender.media.vllm_items import decode_mm_kwargs_item, encode_mm_kwargs_item
from mmrender.testing.memory_transport import MemoryTransport
from vllm_contract import completion, info


def windows(tensors):
    """As vLLM's Audio Flamingo 3."""
    count = np.array([len(tensors["input_features"])])
    named = {"feature_attention_mask": tensors["input_features_mask"], "chunk_counts": count}
    return {"input_features": tensors["input_features"], **named}


def unpadded(tensors):
    """As vLLM's Gemma 4."""
    mask = tensors["input_features_mask"][0]
    named = {"input_features_mask": mask[mask][None]}
    return {"input_features_padded": tensors["input_features"][0][mask][None], **named}


def flat(tensors):
    """As vLLM's omni thinkers."""
    mask = tensors["feature_attention_mask"]
    features = tensors["input_features"].transpose(0, 2, 1)[mask.astype(bool)].T
    return {
        "input_audio_features": features,
        "feature_attention_mask": mask,
        "audio_feature_lengths": mask.sum(-1),
    }


FAMILIES = {
    "qwen2_audio": (qwen2_audio, "Qwen2AudioForConditionalGeneration", dict),
    "qwen2_5_omni": (qwen2_5_omni, "Qwen2_5OmniModel", flat),
    "gemma4": (gemma4, "Gemma4ForConditionalGeneration", unpadded),
    "audio_flamingo": (audio_flamingo, "AudioFlamingo3ForConditionalGeneration", windows),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    build, architecture, change = FAMILIES[request.param]
    folder = build(tmp_path_factory.mktemp("audio") / request.param)
    renderer = Renderer.from_pretrained(folder, image_backend="pil")

    def elements(samples):
        """A clip as the server's processor makes it."""
        (item,) = renderer.render([asked(heard(samples))]).multi_modal_data.mm_items["audio"]
        return collate_items(layout_of(architecture), [change(item.tensors())])[0]

    return renderer, elements


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = qwen2_audio(tmp_path_factory.mktemp("audio") / "plain")
    return Renderer.from_pretrained(folder, image_backend="pil")


def rendering(renderer, elements, samples_of=lambda samples: samples):
    """A render route that processes the clip that it gets, or another."""

    def answer(request):
        (part,) = request.json["messages"][0]["content"]
        head, _, data = part["audio_url"]["url"].partition(",")
        assert (part["type"], head) == ("audio_url", "data:audio/wav;base64")
        with wave.open(io.BytesIO(base64.b64decode(data))) as file:
            form = file.getnchannels(), file.getsampwidth(), file.getframerate()
            levels = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
        assert form == (1, 1, RATE)
        assert (levels == 128).all()
        samples = samples_of(np.zeros(len(levels), np.float32))
        rendered = renderer.render([asked(heard(samples))])
        (place,) = rendered.multi_modal_data.mm_placeholders["audio"]
        return {
            "token_ids": rendered.token_ids,
            "features": {
                "mm_hashes": {"audio": ["theirs"]},
                "mm_placeholders": {"audio": [{"offset": place.offset, "length": place.length}]},
                "kwargs_data": {"audio": [encode_mm_kwargs_item(elements(samples))]},
            },
        }

    return answer


def prompt(renderer, samples):
    rendered = renderer.render([asked("Hear:", heard(samples))], add_generation_prompt=True)
    return EngineRequest(
        model="tiny",
        prompt_ids=rendered.token_ids,
        sampling_params={"max_tokens": 4},
        request_id="r",
        multi_modal_data=rendered.multi_modal_data,
    )


def server(route):
    routes = {f"POST {GENERATE_PATH}": completion, f"POST {RENDER_PATH}": route, "GET /server_info": info()}
    return MemoryTransport(routes)


def test_features_go_by_the_names_of_the_server(family):
    renderer, elements = family
    samples = clip(0.7)
    request = prompt(renderer, samples)
    transport = server(rendering(renderer, elements))
    for _ in range(2):
        asyncio.run(VLLMBackend(pixels="uint8").generate(request, transport))
    assert len(transport.of_path(RENDER_PATH)) == 1
    first, second = (asked.json["features"] for asked in transport.of_path(GENERATE_PATH))
    assert first == second
    (span,) = request.multi_modal_data.spans()
    start, stop = (span.range.embed_spans or ((0, span.range.length),))[0]
    assert first["mm_placeholders"] == {"audio": [{"offset": span.start + start, "length": stop - start}]}
    assert first["mm_hashes"] == {"audio": [f"{span.item.identity}-float32"]}
    sent, theirs = decode_mm_kwargs_item(first["kwargs_data"]["audio"][0]), elements(samples)
    assert sent.keys() == theirs.keys()
    for name, elem in theirs.items():
        assert sent[name].field == elem.field
        assert np.array_equal(sent[name].data, elem.data)


@pytest.mark.parametrize("case", ["tokens", "mels"])
def test_a_server_with_another_processor_is_refused(case, plain, sentence):
    def elements(samples):
        (item,) = plain.render([asked(heard(samples))]).multi_modal_data.mm_items["audio"]
        tensors = item.tensors()
        if case == "mels":
            tensors["input_features"] = tensors["input_features"][:, :8]
        return collate_items(layout_of("Qwen2AudioForConditionalGeneration"), [tensors])[0]

    longer = (lambda samples: np.pad(samples, (0, RATE))) if case == "tokens" else (lambda samples: samples)
    transport = server(rendering(plain, elements, longer))
    call = VLLMBackend().generate(prompt(plain, clip(0.7)), transport)
    assert error_of(EngineMismatchError, asyncio.run, call) == sentence


@pytest.mark.parametrize(
    "backend",
    [SGLangBackend(), DynamoBackend(pixels="uint8"), VLLMBackend(images="content_parts")],
    ids=["sglang", "dynamo", "encoded"],
)
def test_others_refuse_audio(backend, plain, sentence):
    call = backend.generate(prompt(plain, clip(0.3)), server(None))
    assert error_of(EngineUnsupportedError, asyncio.run, call) == sentence


def test_clips_of_several_lengths_are_padded_with_zeros():
    torch = pytest.importorskip("torch")
    clips = [torch.ones(1, 3, 2), torch.ones(2, 1, 5)]
    padded = _padded_at_ends(clips)
    assert [tuple(each.shape) for each in padded] == [(1, 3, 5), (2, 3, 5)]
    assert all(
        torch.equal(whole[:, : clip.shape[1], : clip.shape[2]], clip) and whole.sum() == clip.sum()
        for whole, clip in zip(padded, clips, strict=True)
    )


def test_a_model_in_this_process_hears_clips(plain):
    pytest.importorskip("torch")
    model = qwen2_audio_model(plain)
    messages = [asked("One", heard(clip(0.4)), "two", heard(clip(2.2, 1)), "silence?")]
    sampling = {"max_tokens": 6, "seed": 1}
    call = {"backend": LocalBackend(model), "renderer": plain, "model": "m", "sampling_params": sampling}
    turn = asyncio.run(generate(messages=messages, **call))
    assert len(turn.completion_ids) > 1
    np.testing.assert_allclose(turn.logprobs, logprobs_of(model, turn), rtol=0, atol=1e-4)
