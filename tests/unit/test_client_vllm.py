"""`VLLMBackend`: what it sends, asks once, refuses first, and stops."""

import asyncio
import base64
import dataclasses
import io
import threading
from operator import attrgetter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from aiohttp import web
from PIL import ExifTags, Image, ImageCms

from kit import blocks, encoded, error_of, raised, shown, until
from mmcodecs.arrays import RawTensor
from mmrender.caching import LRUCache
from mmrender.client import exchange, server_facts, vllm_fields
from mmrender.client.exchange import data_url
from mmrender.client.http import HTTPTransport
from mmrender.client.server_facts import facts_of
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import ABORT_PATH, VLLMBackend
from mmrender.client.vllm_fields import WireForm, encode_item, item_tensors
from mmrender.client.vllm_images import GENERATE_PATH, RENDER_PATH, ImagePlan
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
    PlaceholderError,
)
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Floats, Levels, PixelArithmetic
from mmrender.media.vllm_items import (
    BatchedField,
    FieldElem,
    FlatField,
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
)
from mmrender.sidecar import MultiModalData, Repeat
from mmrender.testing.memory_transport import DROPPED, Answer, MemoryTransport
from stub_server import StubServer, stub_server
from vllm_contract import (
    LAYOUT,
    Recalling,
    completion,
    contract_request,
    info,
    one_image,
    served,
    text_prompt,
    three_images,
)

GENERATE = f"POST {GENERATE_PATH}"
RENDER = f"POST {RENDER_PATH}"
ABORT = f"POST {ABORT_PATH}"
INFO = "GET /server_info"
METRICS, STARTED = "GET /metrics/", "process_start_time_seconds 1.0"


@pytest.fixture(scope="module")
def image(renderer):
    return one_image(renderer)


def server(rendered=None, pixels="uint8", **routes):
    """A server that completes anything, and renders as one that takes these pixels."""
    answers = {GENERATE: completion}
    if rendered is not None:
        answers[RENDER] = lambda _: served(rendered, pixels)
    return MemoryTransport({**answers, **routes})


TENSORS = VLLMBackend(images="features")


def run(transport, rendered, backend=None, **changes):
    request = dataclasses.replace(contract_request(rendered), **changes)
    return asyncio.run((backend or VLLMBackend()).generate(request, transport))


def sent(transport):
    """Bodies of the generate requests."""
    return [asked.json for asked in transport.of_path(GENERATE_PATH)]


# What is sent


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("images", ["features", "hash_only", "content_parts", None])
async def test_every_mode_of_images_survives_a_kept_connection_that_was_closed(
    image, renderer, images, streams
):
    """A mode that asks something first must not be the only one whose connection is looked after."""
    rendered = text_prompt(renderer) if images is None else image
    backend = VLLMBackend(images=images or "auto", pixels="uint8", trust_cache=True)

    class Server(StubServer):
        async def answer_inference_v1_generate(self, request, body):
            if self.connections.count(self.connections[-1]) > 1:
                request.transport.abort()
                return web.Response()
            asked = msgspec.json.decode(body)
            reply = completion(SimpleNamespace(json=asked))
            if images == "content_parts":
                reply["usage"]["prompt_tokens"] = len(rendered.token_ids)
                reply["prompt_token_ids"] = rendered.token_ids
            line = msgspec.json.encode(reply)
            return web.Response(body=b"data: %s\n\ndata: [DONE]\n\n" % line if asked.get("stream") else line)

    async with stub_server(Server) as stub:
        transport = HTTPTransport(TransportConfig(stub.url, retries=RetryPolicy(4, 0.001, 0.0)))
        for _ in range(4):
            request = contract_request(rendered)
            listener = (lambda *_: None) if streams else None
            response = await backend.generate(request, transport, on_tokens=listener)
            assert len(response.completion_ids) == 1


def test_everything_that_can_be_asked(renderer):
    transport, prompt = server(), text_prompt(renderer)
    run(
        transport,
        prompt,
        prompt_ids=np.array(prompt.token_ids, np.int32),
        sampling_params={"max_tokens": 4, "logprobs": 3},
        cache_salt="salt",
        priority=-2,
        routed_experts_prompt_start=5,
    )
    (body,) = sent(transport)
    assert body["sampling_params"] == {"max_tokens": 4, "logprobs": 3, "routed_experts_prompt_start": 5}
    assert (body["token_ids"], body["cache_salt"], body["priority"]) == (prompt.token_ids, "salt", -2)


@pytest.mark.parametrize("pixels", ["uint8", "float32", "float16", "bfloat16"])
def test_features_hold_the_pixels_that_the_server_takes(renderer, pixels):
    prompt = three_images(renderer)
    transport = server(prompt, pixels)
    run(transport, prompt, TENSORS)
    features = sent(transport)[0]["features"]
    items = prompt.multi_modal_data.mm_items["image"]
    assert features["mm_hashes"] == {"image": [f"{item.identity}-{pixels}" for item in items]}
    places = prompt.multi_modal_data.mm_placeholders["image"]
    assert features["mm_placeholders"]["image"] == [
        {"offset": place.offset, "length": place.length} for place in places
    ]
    for item, text in zip(items, features["kwargs_data"]["image"], strict=True):
        elems = decode_mm_kwargs_item(text)
        values, grid = elems["pixel_values"], elems["image_grid_thw"]
        assert grid.field == BatchedField(keep_on_cpu=True)
        assert (grid.data.dtype, grid.data.tolist()) == (np.int64, list(item.grid))
        rows = item.pixel_shape[0]
        assert values.field == FlatField(((slice(0, rows, None),),), dim=0, keep_on_cpu=False)
        if pixels == "bfloat16":
            assert isinstance(values.data, RawTensor)
            expected, values = item.tensors("bfloat16")["pixel_values"], values.data.bits.view(np.uint16)
        else:
            expected = item.levels() if pixels == "uint8" else item.tensors(pixels)["pixel_values"]
            values = values.data
        np.testing.assert_array_equal(values, expected)


def test_an_item_on_the_wire_does_not_depend_on_its_company(renderer):
    prompt = three_images(renderer)
    transport = server(prompt)
    run(transport, prompt, TENSORS)
    first, second, third = sent(transport)[0]["features"]["kwargs_data"]["image"]
    assert first == third != second
    alone = renderer.render([{"role": "user", "content": [shown(blocks(3, 160, 128))]}])
    transport = server(alone)
    run(transport, alone, TENSORS)
    assert sent(transport)[0]["features"]["kwargs_data"]["image"] == [second]


# The handshake


def test_the_server_is_asked_once_for_each_processor(renderer, image):
    transport = server(image)

    async def many():
        requests = [contract_request(image) for _ in range(5)]
        await asyncio.gather(*(TENSORS.generate(request, transport) for request in requests))
        await TENSORS.generate(requests[0], transport)

    asyncio.run(many())
    assert len(transport.of_path(RENDER_PATH)) == 1
    assert len(sent(transport)) == 6
    run(transport, image, TENSORS, model="other")
    assert len(transport.of_path(RENDER_PATH)) == 2
    asked = transport.of_path(RENDER_PATH)[0]
    (part,) = asked.json["messages"][0]["content"]
    assert part["image_url"]["url"].startswith("data:image/png;base64,")
    assert asked.idempotent


def test_the_smallest_image_is_rendered(renderer):
    images = [shown(blocks(n, 128 * n, 128)) for n in (3, 1, 2)]
    transport = MemoryTransport({GENERATE: completion, RENDER: served(one_image(renderer))})
    run(transport, renderer.render([{"role": "user", "content": images}]), TENSORS)
    assert len(sent(transport)) == 1


def test_a_failed_handshake_is_not_remembered(image):
    transport = server(image, **{RENDER: [DROPPED, Answer("starting", status=503), served(image)]})
    with pytest.raises(EngineConnectionError):
        run(transport, image, TENSORS)
    with pytest.raises(EngineStatusError):
        run(transport, image, TENSORS)
    assert sent(transport) == []
    run(transport, image, TENSORS)
    run(transport, image, TENSORS)
    assert len(sent(transport)) == 2


@pytest.mark.parametrize(
    ("failure", "asked"), [(DROPPED, 2), (Answer("starting", status=503), 2), (Answer("no", status=500), 1)]
)
def test_after_a_failure_in_the_servers_place_it_is_asked_anew(image, failure, asked):
    transport = server(image, **{GENERATE: [completion, failure, completion]})
    run(transport, image, TENSORS)
    with pytest.raises(EngineError):
        run(transport, image, TENSORS)
    run(transport, image, TENSORS)
    assert len(transport.of_path(RENDER_PATH)) == asked


def test_a_server_that_normalises_pixels_is_warned_of_once(image, caplog):
    """However often its handshake is repeated."""
    transport = server(image)
    transport.base_url = "http://normalises:8000"
    for model in ("m", "other"):
        run(transport, image, model=model)
    assert len(transport.of_path(RENDER_PATH)) == 2
    assert [record.message.startswith(transport.base_url) for record in caplog.records] == [True]


def test_pixels_that_are_named_need_no_handshake(image):
    transport = server()
    run(transport, image, VLLMBackend(pixels="float16"))
    assert transport.of_path(RENDER_PATH) == []
    (text,) = sent(transport)[0]["features"]["kwargs_data"]["image"]
    assert decode_mm_kwargs_item(text)["pixel_values"].data.dtype == np.float16


def changed_values(elem):
    data = np.array(elem.data)
    data[3, 5] ^= 255
    return FieldElem(data, elem.field)


MISMATCHES = {
    "arithmetic": {"pixels": "float32", "pixel_values": lambda elem: FieldElem(elem.data * 1.1, elem.field)},
    "values": {"pixel_values": changed_values},
    "shape": {"pixel_values": lambda elem: FieldElem(elem.data[:32], elem.field)},
    "dtype": {"pixel_values": lambda elem: FieldElem(elem.data.astype(np.int16), elem.field)},
    "grid": {"image_grid_thw": lambda elem: FieldElem(elem.data[::-1].copy(), elem.field)},
    "missing": {"image_grid_thw": lambda _: None},
    "further": {"extra": FieldElem(np.array([1]), BatchedField())},
    "placeholders": {},
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_server_that_makes_something_else_of_the_image(image, name, sentence):
    answer = served(image, **MISMATCHES[name])
    if name == "placeholders":
        (theirs,) = answer["features"]["mm_placeholders"]["image"]
        theirs.update(offset=theirs["offset"] + 1, length=theirs["length"] - 1)
    transport = server(**{RENDER: answer})
    assert error_of(EngineMismatchError, run, transport, image) == sentence
    assert sent(transport) == []


def test_images_that_cannot_be_sent_are_refused(image, sentence):
    batched = served(image, pixel_values=lambda elem: FieldElem(elem.data, BatchedField()))
    with pytest.raises(EngineUnsupportedError) as caught:
        run(server(**{RENDER: batched}), image, VLLMBackend(images="features"))
    assert str(caught.value) == sentence
    # What can be sent in no way names the first reason.
    prompt = processed(image, pixel_values=Floats(np.zeros((1, 3, 2, 2), np.float32)))
    transport = server(image)
    assert error_of(EngineUnsupportedError, run, transport, prompt, VLLMBackend(pixels="uint8")) == sentence
    assert sent(transport) == []


def processed(image, identity="ab" * 32, **parts):
    """The same prompt with an item of another class in place of its own."""
    (place,) = image.multi_modal_data.mm_placeholders["image"]
    item = ProcessedItem(
        identity=identity, size=(8, 8), grid=(1,), expansion=(Repeat("x", place.length),), parts=parts
    )
    return dataclasses.replace(image, multi_modal_data=MultiModalData.of([(place, item)]))


def test_items_of_other_families_are_compared_by_form(image):
    arithmetic = PixelArithmetic((0.5,) * 3, (0.5,) * 3, 1 / 255, "pil")
    levels = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(1, 3, 4, 4)
    pixels = Levels(levels, (0,), (1, 3, 4, 4), arithmetic)
    prompt = processed(image, "cd" * 32, pixel_values=pixels)
    answer = served(image)
    elem = {"pixel_values": FieldElem(np.zeros((3, 4, 4), np.uint8), BatchedField())}
    answer["features"]["kwargs_data"]["image"] = [encode_mm_kwargs_item(elem)]
    transport = server(**{RENDER: answer})
    run(transport, prompt)
    (text,) = sent(transport)[0]["features"]["kwargs_data"]["image"]
    values = decode_mm_kwargs_item(text)["pixel_values"]
    assert values.field == BatchedField()
    np.testing.assert_array_equal(values.data, levels[0])


# Hashes without data


def hashing(image, **routes):
    return server(image, **{INFO: info(), **routes})


def data_sent(transport):
    return [
        [text is not None for text in body["features"]["kwargs_data"]["image"]] for body in sent(transport)
    ]


@pytest.mark.parametrize(("images", "routes"), [("hash_only", {}), ("auto", {METRICS: STARTED})])
def test_data_is_sent_once(renderer, image, images, routes):
    """By default too, if the cache is proved safe."""
    transport = hashing(image, **routes)
    three = three_images(renderer)
    for prompt in (image, image, three, three):
        run(transport, prompt, VLLMBackend(images=images))
    assert data_sent(transport) == [[True], [False], [True, True, False], [False, False, False]]
    assert len(transport.of_path("/server_info")) == 1


def test_a_completion_has_the_settings_that_the_server_told(image):
    told = info()
    told["vllm_config"]["model_config"] |= {"dtype": "torch.bfloat16", "quantization": None}
    transport = server(image, **{INFO: told})
    assert run(transport, image, VLLMBackend(images="hash_only")).sampler == {
        "engine": "vllm",
        "dtype": "bfloat16",
    }
    assert run(hashing(image), image, TENSORS).sampler == {}  # it was not asked


@pytest.mark.parametrize("miss", ["500", "200"])
def test_a_miss_is_answered_with_all_data(renderer, miss):
    failed = {"choices": [{"index": 0, "finish_reason": "error", "token_ids": [], "logprobs": None}]}
    answer = Answer({"error": {"message": "Internal server error"}}, status=500) if miss == "500" else failed
    three = three_images(renderer)
    transport = hashing(three, **{GENERATE: [completion, answer, completion, completion]})
    for _ in range(3):
        run(transport, three, VLLMBackend(images="hash_only"))
    assert data_sent(transport) == [[True, True, False], [False] * 3, [True] * 3, [False] * 3]


def test_what_fails_with_all_data_fails(image):
    wrong = Answer("broken", status=500)
    transport = hashing(image, **{GENERATE: [completion, wrong, wrong]})
    run(transport, image, VLLMBackend(images="hash_only"))
    assert "500" in error_of(EngineStatusError, run, transport, image, VLLMBackend(images="hash_only"))
    assert data_sent(transport) == [[True], [False], [True]]


@pytest.mark.parametrize("status", [400, 500])
def test_other_errors_are_not_sent_again(image, status):
    transport = hashing(image, **{GENERATE: [Answer("no", status=status)]})
    with pytest.raises(EngineStatusError):
        run(transport, image, VLLMBackend(images="hash_only"))
    assert len(sent(transport)) == 1
    assert len(facts_of(transport).hashes) == 0


UNSAFE = {
    ("mm_processor_cache_gb", 0): "its processor cache is off",
    ("mm_processor_cache_type", "shm"): "its processor cache is of kind 'shm'",
    ("_api_process_count", 2): "it runs 2 API processes",
    ("data_parallel_size", 4): "it runs 4 data-parallel ranks",
}


@pytest.mark.parametrize(("name", "value", "refusal"), [(*setting, why) for setting, why in UNSAFE.items()])
def test_settings_that_a_hash_alone_would_kill(image, name, value, refusal):
    transport = hashing(image, **{INFO: info(**{name: value})})
    for trust in (False, True):
        with pytest.raises(EngineUnsupportedError) as caught:
            run(transport, image, VLLMBackend(images="hash_only", trust_cache=trust))
        assert caught.value.got == refusal
    assert sent(transport) == []


def test_a_server_that_does_not_say_may_be_vouched_for(image):
    transport = server(image)
    with pytest.raises(EngineUnsupportedError, match="does not say how it caches"):
        run(transport, image, VLLMBackend(images="hash_only"))
    for _ in range(2):
        run(transport, image, VLLMBackend(images="hash_only", trust_cache=True))
    assert data_sent(transport) == [[True], [False]]


# The default: hashes where they are proved safe, else encoded images by uuid


def recalling(*prompts, room=100, **routes):
    """That server, which says nothing of its process and its cache."""
    return server(prompts[0], **{GENERATE: Recalling(*prompts, room=room), **routes})


def urls_sent(transport):
    """For each request, which of its encoded images came with their data."""
    return [["url" in part for part in body["content_parts"]] for body in sent(transport)]


@pytest.mark.parametrize(
    "routes",
    [
        {INFO: Answer("closed", status=404)},
        {INFO: Answer("broken", status=500)},
        {INFO: {"vllm_config": {}}},
        *[{INFO: info(**{name: value})} for name, value in UNSAFE],
        {METRICS: ""},
        {METRICS: [f"process_start_time_seconds {number % 2}" for number in range(400)]},
    ],
)
def test_an_image_goes_once_where_a_cache_is_not_proved(image, routes):
    """By its uuid, which a server that lacks it answers by an error of that request alone."""
    transport = hashing(image, **{METRICS: STARTED, GENERATE: Recalling(image), **routes})
    for _ in range(3):
        run(transport, image)
    assert urls_sent(transport) == [[True], [False], [False]]
    (item,) = image.multi_modal_data.mm_items["image"]
    for body in sent(transport):
        (part,) = body["content_parts"]
        assert (part["type"], part["uuid"]) == ("image_url", f"{item.identity}-image")
        assert ("return_token_ids" in body) == ("url" in part)
        assert body["token_ids"].count(body["token_ids"][5]) == 1


def test_an_image_of_a_uuid_has_the_item_s_pixels(renderer):
    prompt = three_images(renderer)
    transport = recalling(prompt)
    run(transport, prompt)
    for part, item in zip(
        sent(transport)[0]["content_parts"], prompt.multi_modal_data.mm_items["image"], strict=True
    ):
        head, _, data = part["url"].partition(",")
        assert head == "data:image/bmp;base64"
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        assert np.array_equal(pixels, item.frames[0].transpose(1, 2, 0))


def decoding(renderer, prompt, pixels, change, **routes):
    """A server that renders the pixels that it decodes, changed."""

    def render(asked):
        url = asked.json["messages"][0]["content"][0]["image_url"]["url"]
        picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        decoded = Image.fromarray(change(np.asarray(picture), picture.format))
        return served(renderer.render([{"role": "user", "content": [shown(decoded)]}]), pixels)

    return recalling(prompt, **{RENDER: render, **routes})


JPEG, PNG = ({"fmt": name} for name in ("JPEG", "PNG"))
TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 3
SIDE = blocks(1).size
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def same(array, _):
    return array


def blurred(array, format):
    """Another way to enlarge the colours of a JPEG, or a rounding that differs."""
    return array ^ 1 if format == "JPEG" else array


CODED = [
    (JPEG, SIDE, "uint8", same, "jpeg"),
    (JPEG | {"subsampling": "4:4:4", "progressive": True}, SIDE, "float32", same, "jpeg"),
    (PNG, SIDE, "uint8", blurred, "png"),
    (JPEG, SIDE, "uint8", blurred, "bmp"),
    (JPEG, SIDE, "float16", blurred, "bmp"),
    (JPEG, SIDE, "bfloat16", same, "bmp"),
    (JPEG, (150, 150), "uint8", same, "bmp"),
    (JPEG | {"icc_profile": PROFILE}, SIDE, "uint8", same, "bmp"),
    (JPEG | {"exif": TURNED}, SIDE, "uint8", same, "bmp"),
]


@pytest.mark.parametrize("number", range(len(CODED)))
def test_original_bytes_go_to_a_server_that_decodes_noise_of_their_coding_as_we_do(renderer, number):
    options, size, pixels, change, mime = CODED[number]
    data = encoded(blocks(100 + number, *size), **options)  # no other test has loaded these pixels
    prompt = renderer.render([{"role": "user", "content": [shown(data)]}], add_generation_prompt=True)
    transport = decoding(renderer, prompt, pixels, change)
    run(transport, prompt)
    ((part,),) = (body["content_parts"] for body in sent(transport))
    head, _, text = part["url"].partition(",")
    assert head == f"data:image/{mime};base64"
    assert mime == "bmp" or base64.b64decode(text) == data
    run(transport, prompt)
    assert urls_sent(transport) == [[True], [False]]
    assert len(transport.of_path(RENDER_PATH)) <= 2


def test_a_file_that_the_server_refuses_goes_as_pixels(renderer):
    data = encoded(blocks(120), "JPEG")
    prompt = renderer.render([{"role": "user", "content": [shown(data)]}], add_generation_prompt=True)
    recall = Recalling(prompt)

    def answer(asked):
        url = asked.json["content_parts"][0].get("url", "")
        return Answer("cannot decode", status=400) if "jpeg" in url else recall(asked)

    transport = decoding(renderer, prompt, "uint8", same, **{GENERATE: answer})
    for _ in range(2):
        run(transport, prompt)
    parts = [body["content_parts"][0].get("url", "-").partition(";")[0] for body in sent(transport)]
    assert parts == ["data:image/jpeg", "data:image/bmp", "-"]


@pytest.mark.parametrize(
    ("usage", "expected", "error"),
    [
        ({"prompt_tokens": 5}, "counted other prompt tokens than were sent", EngineMismatchError),
        ({"completion_tokens": 1}, "lacks the number of the prompt's tokens", EngineReplyError),
    ],
)
def test_the_tokens_of_a_prompt_whose_images_are_known_are_counted(image, usage, expected, error):
    transport = server(image, **{GENERATE: Recalling(image, usage=usage)})
    backend = VLLMBackend(images="content_parts")
    run(transport, image, backend)
    with pytest.raises(error, match=expected):
        run(transport, image, backend)


def test_a_server_that_dropped_an_image_costs_one_request(renderer, image):
    three = three_images(renderer)
    transport = recalling(image, three, room=3)
    for prompt in (image, three, image, image):
        run(transport, prompt)
    assert urls_sent(transport) == [[True], [True] * 3, [False], [True], [False]]


def test_engine_and_frontend_that_dropped_different_images_cost_one_request(image):
    """The frontend knows the uuid, and the engine answers by a failure like any other."""
    broken = Answer({"error": {"message": "Internal server error"}}, status=500)
    answers = Recalling(image)
    transport = server(image, **{GENERATE: [answers, broken, answers, answers]})
    for _ in range(3):
        run(transport, image)
    assert urls_sent(transport) == [[True], [False], [True], [False]]


def test_a_server_that_keeps_no_images_is_sent_tensors(image, monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(server_facts, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    transport = recalling(image, room=0)
    for _ in range(6):
        run(transport, image)
        now.seconds += 1
    forms = [
        "url" if "url" in body["content_parts"][0] else "uuid"
        for body in sent(transport)
        if "content_parts" in body
    ]
    assert forms == ["url", *["uuid", "url"] * 3]
    assert ["features" in body for body in sent(transport)] == [False] * 7 + [True] * 2
    now.seconds += 59
    run(transport, image)
    assert "content_parts" in sent(transport)[-1]  # it is asked again


@pytest.mark.parametrize("images", ["auto", "content_parts"])
def test_a_server_whose_cache_is_off_refuses_a_uuid_in_other_words(image, images):
    off = Answer({"error": {"message": "Failed to apply Qwen3VLProcessor on data"}}, status=400)

    def answer(asked):
        parts = asked.json.get("content_parts", ())
        return off if any("url" not in part for part in parts) else Recalling(image)(asked)

    transport = server(image, **{GENERATE: answer})
    for _ in range(3):
        run(transport, image, VLLMBackend(images=images))
    forms = [
        "tensors" if "features" in body else "url" if "url" in body["content_parts"][0] else "uuid"
        for body in sent(transport)
    ]
    again = ["tensors", "tensors"] if images == "auto" else ["url", "uuid", "url"]
    assert forms == ["url", "uuid", *again]


@pytest.mark.parametrize("refusal", [completion, Answer({"error": {"message": "no images"}}, status=400)])
def test_a_server_that_takes_no_encoded_images_is_sent_tensors(image, refusal):
    def answer(asked):
        return refusal if "content_parts" in asked.json and not callable(refusal) else completion(asked)

    transport = server(image, **{GENERATE: answer})
    for _ in range(3):
        run(transport, image)
    assert ["features" in body for body in sent(transport)] == [False, True, True, True]


def test_what_fails_as_tensors_too_says_nothing_of_encoded_images(image):
    wrong = Answer({"error": {"message": "temperature"}}, status=400)
    transport = server(image, **{GENERATE: [wrong, wrong, Recalling(image)]})
    assert "temperature" in error_of(EngineStatusError, run, transport, image)
    run(transport, image)
    assert ["features" in body for body in sent(transport)] == [False, True, False]


def test_a_pad_that_the_model_sampled_is_no_image_to_the_server(renderer, image):
    """Its processor would widen it."""
    (place,) = image.multi_modal_data.mm_placeholders["image"]
    pad = image.token_ids[place.offset]
    transport = recalling(image)
    run(transport, image, prompt_ids=[*image.token_ids, 5, pad, 6], vocab_size=None)
    assert "features" in sent(transport)[0]


def test_a_stream_that_misses_an_image_is_begun_again(image):
    answers = Recalling(image)

    def line(asked):
        reply = answers(asked)
        return (
            reply
            if isinstance(reply, Answer)
            else b"data: %s\n\ndata: [DONE]\n\n" % msgspec.json.encode(reply)
        )

    lost = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\ndata: [DONE]\n\n'
    transport = server(image, **{GENERATE: [line, lost, line]})
    heard = []
    for _ in range(2):
        asyncio.run(
            VLLMBackend().generate(
                contract_request(image), transport, on_tokens=lambda *tokens: heard.append(tokens)
            )
        )
    assert urls_sent(transport) == [[True], [False], [True]]
    assert heard == [([7], [-1.5], "stop")] * 2


@pytest.mark.parametrize(
    "routes",
    [
        {RENDER: Answer("closed", status=403)},  # which pixels it takes cannot be asked
        {RENDER: None},
    ],
)
def test_parts_go_by_default_where_tensors_cannot(image, routes):
    if routes[RENDER] is None:  # fields joined in a way that is not known
        routes = {RENDER: served(image, pixel_values=lambda elem: FieldElem(elem.data, BatchedField()))}
    transport = recalling(image, **routes)
    run(transport, image)
    (body,) = sent(transport)
    assert "features" not in body
    assert body["content_parts"][0]["url"].startswith("data:image/png;base64,")


# Bodies that a frontend would refuse


def pictures(renderer, count):
    parts = [shown(blocks(number)) for number in range(count)]
    return renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)


@pytest.mark.parametrize("miss", [False, True])
def test_a_request_that_is_too_long_is_split_where_hashes_go(renderer, miss):
    prompt = pictures(renderer, 5)
    answers = [completion, Answer("a miss", status=500), *[completion] * 9] if miss else completion
    transport = hashing(prompt, **{METRICS: STARTED, GENERATE: answers})
    one = encode_item(prompt.multi_modal_data.spans()[0], WireForm(LAYOUT, "uint8")).size
    limit = int(2.5 * one) + 8 * len(prompt.token_ids)
    run(transport, prompt, VLLMBackend(max_body_bytes=limit), sampling_params={"max_tokens": 9, "seed": 3})
    bodies = sent(transport)
    assert all(len(asked.body) <= limit for asked in transport.of_path(GENERATE_PATH))
    *beginnings, whole = bodies[2 * miss :]
    assert [len(body["features"]["mm_hashes"]["image"]) for body in (*beginnings, whole)] == [2, 4, 5]
    assert data_sent(transport)[2 * miss :] == [[True] * 2, [False] * 2 + [True] * 2, [False] * 4 + [True]]
    for body in beginnings:
        count = len(body["features"]["mm_hashes"]["image"])
        stop = prompt.multi_modal_data.spans()[count - 1].stop
        assert body["token_ids"] == prompt.token_ids[:stop]
        assert body["sampling_params"] == {"max_tokens": 1, "logprobs": 0}
    assert whole["token_ids"] == prompt.token_ids
    assert whole["sampling_params"] == {"max_tokens": 9, "seed": 3, "logprobs": 0}
    assert len({body["request_id"] for body in (*beginnings, whole)}) == 3
    run(transport, prompt, VLLMBackend(max_body_bytes=limit))
    assert data_sent(transport)[-1] == [False] * 5


def test_a_request_that_is_too_long_and_cannot_be_split_is_named_before_it_is_sent(renderer, sentence):
    prompt = pictures(renderer, 3)
    backend = VLLMBackend(images="features", max_body_bytes=300_000)
    transport = server(prompt)
    caught = raised(EngineUnsupportedError, run, transport, prompt, backend)
    assert str(caught) == sentence
    assert caught.remedy.endswith("at the frontend and in VLLMBackend(max_body_bytes=...)")
    assert sent(transport) == []
    # Encoded images are shorter.
    transport = recalling(prompt)
    run(transport, prompt, VLLMBackend(max_body_bytes=300_000))
    assert "content_parts" in sent(transport)[0]
    run(transport, prompt, VLLMBackend(max_body_bytes=2_000))  # it has them
    transport = recalling(prompt)
    with pytest.raises(EngineUnsupportedError, match="larger than the server's frontend takes"):
        run(transport, prompt, VLLMBackend(max_body_bytes=2_000))
    assert sent(transport) == []


# Refused first


def test_a_grid_that_does_not_fit_its_patches_is_not_sent(image):
    (item,) = image.multi_modal_data.mm_items["image"]
    (place,) = image.multi_modal_data.mm_placeholders["image"]
    wrong = msgspec.structs.replace(item, grid=(1, 4, 8), identity="c" * 64)
    data = MultiModalData.of([(place, wrong)])
    transport = server()
    with pytest.raises(PlaceholderError, match="the grid does not fit its placeholder range"):
        run(transport, image, VLLMBackend(pixels="uint8"), multi_modal_data=data)
    assert sent(transport) == []


# The engine's own name, settings and limits


def test_an_abort_names_the_request_as_a_header_does():
    async def work(**fields):
        transport = MemoryTransport({GENERATE: Answer(delay=60), ABORT: ""})
        request = EngineRequest("m", [5], {"max_tokens": 1}, "mine", extra_headers={"X-Request-Id": "theirs"})
        task = asyncio.create_task(VLLMBackend(**fields).generate(request, transport))
        await until(lambda: transport.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [asked.json for asked in transport.of_path(ABORT_PATH)]

    assert asyncio.run(work()) == [{"request_ids": ["generate-tokens-theirs"]}]
    assert asyncio.run(work(abort_on_cancel=False)) == []


@pytest.mark.parametrize("settings", [{"images": "tensors"}, {"pixels": "int8"}])
def test_settings_are_checked(settings):
    with pytest.raises(InputError, match=r"^VLLMBackend\.(images|pixels): unknown value of an option"):
        VLLMBackend(**settings)


def test_an_image_is_encoded_once(image, monkeypatch):
    encoded = []

    def counting(item, pixels):
        encoded.append(item.identity)
        return item_tensors(item, pixels)

    monkeypatch.setattr(vllm_fields, "item_tensors", counting)
    (item,) = image.multi_modal_data.mm_items["image"]
    (place,) = image.multi_modal_data.mm_placeholders["image"]
    fresh = MultiModalData.of([(place, msgspec.structs.replace(item, identity="d" * 64))])
    transport = server()
    for _ in range(3):
        run(transport, image, VLLMBackend(pixels="uint8"), multi_modal_data=fresh)
    first, *others = [body["features"] for body in sent(transport)]
    assert encoded == ["d" * 64]
    assert others == [first, first]
    run(transport, image, VLLMBackend(pixels="float16"), multi_modal_data=fresh)
    assert len(encoded) == 2
    (span,) = fresh.spans()
    assert data_url(span.item) is data_url(span.item)


def test_hashes_that_a_server_knows_are_sent_without_a_thread(image, monkeypatch):
    threads = []
    prompts = ImagePlan.prompts

    def noting(self, known):
        threads.append(threading.current_thread())
        return prompts(self, known)

    monkeypatch.setattr(ImagePlan, "prompts", noting)
    transport = hashing(image)
    for _ in range(3):
        run(transport, image, VLLMBackend(images="hash_only", trust_cache=True))
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [False, True, True]


def test_texts_that_a_server_is_sent_once_do_not_fill_the_memory_of_repeated_ones(image, monkeypatch):
    for name in ("_texts", "_sent_texts"):
        monkeypatch.setattr(exchange, name, LRUCache(1 << 20, size_of=attrgetter("size")))
    run(hashing(image), image, VLLMBackend(images="hash_only", trust_cache=True))
    assert (len(exchange._texts), len(exchange._sent_texts)) == (0, 1)
    run(server(), image, VLLMBackend(images="features", pixels="uint8"))
    assert (len(exchange._texts), len(exchange._sent_texts)) == (1, 1)


@pytest.mark.parametrize(
    ("cards", "length"),
    [
        ([{"id": "base", "max_model_len": 64}, {"id": "m", "parent": "base", "max_model_len": None}], 63),
        ([{"id": "other", "max_model_len": 2048}], None),
        ([{"id": "m"}], None),
    ],
    ids=["adapter", "unknown", "silent"],
)
def test_the_longest_prompt(cards, length):
    transport = MemoryTransport({"GET /v1/models": {"data": cards}})
    assert asyncio.run(VLLMBackend().resolve_max_prompt_len("m", transport)) == length
