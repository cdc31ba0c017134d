"""Prompts in chunks whose images a server's render route processes."""

import asyncio
import io
import json

import numpy as np
import pybase64
import pytest
from PIL import Image

from mmrender.errors import (
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
    MediaBlockedError,
    MediaDecodeError,
)
from mmrender.media.policy import MediaPolicy
from mmrender.remote import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    VLLMRenderer,
)
from mmrender.spans import PlaceholderRange
from mmrender.testing.memory_transport import Answer, MemoryTransport

PAD = 151655
MODELS = {"data": [{"id": "base"}, {"id": "adapter", "parent": "base"}]}


def png(side=2, colour=0):
    out = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), colour, np.uint8)).save(out, "PNG")
    return out.getvalue()


class Server:
    """Answers the render route: an image of side s takes s placeholder tokens after one scaffold token."""

    def __init__(self, change=None, models=MODELS, delay=0.0):
        self.change = change or (lambda answer: answer)
        self.running = self.most = 0
        self.delay = delay
        routes = {"GET /v1/models": models, "POST /v1/chat/completions/render": self.render}
        self.transport = MemoryTransport(routes)

    async def render(self, asked):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay)
        self.running -= 1
        (part,) = asked.json["messages"][0]["content"]
        data = pybase64.b64decode(part["image_url"]["url"].partition(",")[2])
        side = Image.open(io.BytesIO(data)).width
        features = {
            "mm_hashes": {"image": [f"hash-{hash(data)}"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": side}]},
            "kwargs_data": {"image": [pybase64.b64encode(data).decode()]},
        }
        return Answer(self.change({"token_ids": [7, *[PAD] * side, 8], "features": features}))

    @property
    def renders(self):
        return self.transport.of_path("/v1/chat/completions/render")

    def renderer(self, model="base", **options):
        return VLLMRenderer(self.transport, model, **options)


def render(renderer, *inputs):
    return asyncio.run(renderer.render(inputs))


def test_text_alone_asks_nothing():
    server = Server()
    (rendered,) = render(server.renderer(), ModelInput([EncodedTextChunk([1, 2]), EncodedTextChunk([3])]))
    assert rendered.prompt_ids == [1, 2, 3]
    assert rendered.multi_modal_kwargs is rendered.multi_modal_placeholders is rendered.mm_hashes is None
    assert server.transport.asked == []


def test_images_are_spliced_between_text_in_order():
    server = Server()
    small, large = png(2), png(5, 9)
    (rendered,) = render(
        server.renderer(),
        ModelInput(
            [
                EncodedTextChunk([1]),
                ImageChunk(large, "png", expected_tokens=5),
                EncodedTextChunk([2, 3]),
                ImageChunk(small, "png"),
            ]
        ),
    )
    assert rendered.prompt_ids == [1, *[PAD] * 5, 2, 3, *[PAD] * 2]
    assert rendered.multi_modal_placeholders == {"image": [PlaceholderRange(1, 5), PlaceholderRange(8, 2)]}
    items = rendered.multi_modal_kwargs["image"]
    assert [pybase64.b64decode(item) for item in items] == [large, small]
    assert len(set(rendered.mm_hashes["image"])) == 2


def test_an_image_is_sent_once_for_all_samples_and_calls():
    server = Server(delay=0.01)
    renderer = server.renderer()
    image = ModelInput([ImageChunk(png(3), "png"), ImageChunk(png(3), "png")])
    first = render(renderer, *[image] * 8)
    again = render(renderer, image)
    assert len(server.renders) == 1
    assert all(rendered == again[0] for rendered in first)


def test_the_least_recently_used_image_goes_first():
    server = Server()
    largest = max(len(pybase64.b64encode(png(2, colour))) + 8 * 2 for colour in range(3))
    renderer = server.renderer(cache_bytes=2 * largest)
    for colour in (0, 1, 0, 2, 0, 1):
        render(renderer, ModelInput([ImageChunk(png(2, colour), "png")]))
    assert len(server.renders) == 4  # 0, 1, 2, and 1 once more


def test_requests_are_bounded():
    server = Server(delay=0.01)
    images = [ModelInput([ImageChunk(png(2, colour), "png")]) for colour in range(12)]
    render(server.renderer(max_concurrency=3), *images)
    assert server.most == 3
    assert len(server.renders) == 12


def test_an_adapter_is_rendered_with_its_base_model():
    server = Server()
    render(server.renderer("adapter"), ModelInput([ImageChunk(png(), "png")]))
    assert server.renders[0].json["model"] == "base"


def test_a_base_model_that_is_named_spares_the_look_up():
    server = Server()
    render(server.renderer("adapter", base_model="other"), ModelInput([ImageChunk(png(), "png")]))
    assert [asked.path for asked in server.transport.asked] == ["/v1/chat/completions/render"]
    assert server.renders[0].json["model"] == "other"


def test_an_image_by_path_is_read_under_the_policy(tmp_path):
    (tmp_path / "cell.png").write_bytes(png(4))
    chunk = ImageAssetPointerChunk(str(tmp_path / "cell.png"), "png")
    with pytest.raises(MediaBlockedError) as caught:
        render(Server().renderer(), ModelInput([chunk]))
    assert caught.value.where == "inputs[0].chunks[0]"

    policy = MediaPolicy(local_roots=(tmp_path,))
    (rendered,) = render(Server().renderer(media_policy=policy), ModelInput([chunk]))
    assert rendered.prompt_ids == [PAD] * 4


def raised(kind, *chunks, server=None, model="base"):
    with pytest.raises(kind) as caught:
        render((server or Server()).renderer(model), ModelInput(chunks))
    return str(caught.value)


def test_errors_of_inputs():
    with pytest.raises(InputError) as caught:
        render(Server().renderer(), {"chunks": []})
    assert str(caught.value) == "inputs[0]: not a model input - expected ModelInput, got dict"
    assert raised(InputError) == (
        "inputs[0].chunks: the model input is empty - expected at least one chunk, got none"
    )
    assert raised(InputError, "text") == (
        "inputs[0].chunks[0]: not a chunk - expected EncodedTextChunk, ImageChunk or ImageAssetPointerChunk, got str"
    )
    assert raised(InputError, EncodedTextChunk([1, -1])) == (
        "inputs[0].chunks[0].tokens[1]: not a token id - expected an integer of 0 or more, got -1"
    )
    assert raised(InputError, EncodedTextChunk([1]), ImageChunk(b"", "gif")) == (
        "inputs[0].chunks[1].format: unknown image format - expected 'png' or 'jpeg', got 'gif'"
    )
    assert raised(MediaDecodeError, ImageChunk(png(), "jpeg")) == (
        "inputs[0].chunks[0]: the image is not of the format that its chunk names - expected JPEG, got PNG"
    )


def test_nothing_is_sent_when_any_input_is_malformed():
    server = Server()
    with pytest.raises(InputError):
        render(server.renderer(), ModelInput([ImageChunk(png(), "png")]), ModelInput([]))
    assert server.transport.asked == []


def test_another_number_of_tokens_than_expected():
    assert raised(EngineMismatchError, ImageChunk(png(3), "png", expected_tokens=4)) == (
        "inputs[0].chunks[0].expected_tokens: the server gives the image another number of tokens than expected - "
        "expected 4, got 3. Count tokens with the processor settings that the server runs with"
    )


def put(value, *path):
    def change(answer):
        node = answer
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        return answer

    return change


WHERE = "inputs[0].chunks[0], http://memory/v1/chat/completions/render"
REPLIES = {
    "no features": (put(None, "features"), "features.mm_hashes: the server did not render one image"),
    "no tensors": (
        put(None, "features", "kwargs_data"),
        "features.kwargs_data: the server did not render one image - expected one of 'image', with its data, got {}",
    ),
    "null tensors": (
        put([None], "features", "kwargs_data", "image"),
        "features.kwargs_data: the server did not render one image",
    ),
    "two placeholders": (
        put([{"offset": 0, "length": 1}] * 2, "features", "mm_placeholders", "image"),
        "features.mm_placeholders: the server did not render one image - "
        "expected one of 'image', with its data, got {'image': 2}",
    ),
    "outside": (
        put([{"offset": 2, "length": 3}], "features", "mm_placeholders", "image"),
        "features.mm_placeholders: the server rendered a placeholder outside the prompt - "
        "expected tokens within [0, 4), got [2, 5)",
    ),
    "empty": (
        put([{"offset": 2, "length": 0}], "features", "mm_placeholders", "image"),
        "features.mm_placeholders: the server rendered a placeholder outside the prompt",
    ),
    "other form": (lambda answer: 17, "the server's reply is malformed - expected object, got int"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_answers_that_cannot_be_used(name):
    change, expected = REPLIES[name]
    message = raised(EngineReplyError, ImageChunk(png(), "png"), server=Server(change))
    assert message.startswith(WHERE)
    assert expected in message


def test_a_failure_is_not_kept():
    calls = []

    def fail_once(answer):
        calls.append(1)
        return "broken" if len(calls) == 1 else answer

    server = Server(fail_once)
    renderer = server.renderer()
    image = ModelInput([ImageChunk(png(), "png")])
    with pytest.raises(EngineError):
        render(renderer, image)
    assert render(renderer, image)[0].prompt_ids == [PAD] * 2


def test_a_failure_reaches_all_who_wait_each_with_its_place():
    async def both():
        server = Server(lambda _: "broken", delay=0.01)
        renderer = server.renderer()
        image = ImageChunk(png(), "png")
        text = EncodedTextChunk([1])
        found = await asyncio.gather(
            renderer.render([ModelInput([image])]),
            renderer.render([ModelInput([text, image])]),
            return_exceptions=True,
        )
        return found, len(server.transport.of_path("/v1/chat/completions/render"))

    (first, second), requests = asyncio.run(both())
    assert first.where.startswith("inputs[0].chunks[0], ")
    assert second.where.startswith("inputs[0].chunks[1], ")
    assert requests == 1


def test_a_closed_route_and_other_statuses():
    def closed(status):
        body = {"error": "no"}
        routes = {
            "GET /v1/models": MODELS,
            "POST /v1/chat/completions/render": Answer(body, status=status),
        }
        return VLLMRenderer(MemoryTransport(routes), "base")

    image = ModelInput([ImageChunk(png(), "png")])
    with pytest.raises(EngineUnsupportedError) as caught:
        render(closed(403), image)
    assert str(caught.value) == (
        f"{WHERE}: the server does not render images - "
        'got status 403: {"error":"no"}. '
        "Start vLLM with --enable-scale-out, or start `vllm launch render`"
    )
    with pytest.raises(EngineStatusError) as refused:
        render(closed(400), image)
    assert refused.value.where == "inputs[0].chunks[0], POST http://memory/v1/chat/completions/render"
    assert json.loads(refused.value.body) == {"error": "no"}


def test_an_unknown_model_and_an_unknown_model_list():
    assert raised(EngineUnsupportedError, ImageChunk(png(), "png"), model="third") == (
        "model_name: the server does not serve this model - expected 'base' or 'adapter', got 'third'"
    )
    message = raised(EngineReplyError, ImageChunk(png(), "png"), server=Server(models={"models": []}))
    assert message == (
        "http://memory/v1/models: the server's reply is malformed - got Object missing required field data"
    )


def test_cancelling_leaves_nothing_pending():
    async def cancelled():
        server = Server(delay=60)
        renderer = server.renderer()
        task = asyncio.ensure_future(renderer.render([ModelInput([ImageChunk(png(), "png")])]))
        while not server.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks()), server.transport.cancelled

    tasks, given_up = asyncio.run(cancelled())
    assert tasks == 1
    assert len(given_up) == 1
