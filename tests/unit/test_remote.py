"""Prompts in chunks whose images a server's render route processes."""

import asyncio
import io
import json

import numpy as np
import pybase64
import pytest
from PIL import Image

from kit import raised
from mmrender.errors import (
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
    MediaBlockedError,
    MediaDecodeError,
)
from mmrender.media.policy import MediaPolicy
from mmrender.remote import EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInput, VLLMRenderer
from mmrender.sidecar import PlaceholderRange
from mmrender.testing.memory_transport import Answer, MemoryTransport

PAD = 151655
MODELS = {"data": [{"id": "base"}, {"id": "adapter", "parent": "base"}]}
RENDER = "/v1/chat/completions/render"


def png(side=2, colour=0):
    out = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), colour, np.uint8)).save(out, "PNG")
    return out.getvalue()


class Server:
    """Answers the render route: an image of side s takes s placeholder tokens after one scaffold token."""

    def __init__(self, change=lambda answer: answer, models=MODELS, delay=0.0):
        self.change = change
        self.running = self.most = 0
        self.delay = delay
        self.transport = MemoryTransport({"GET /v1/models": models, f"POST {RENDER}": self.render})

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
        return self.transport.of_path(RENDER)

    def renderer(self, model="base", **options):
        return VLLMRenderer(self.transport, model, **options)


def image(*drawn, format="png", **options):
    return ImageChunk(png(*drawn), format, **options)


def render(renderer, *inputs):
    return asyncio.run(renderer.render([ModelInput(chunks) for chunks in inputs]))


def test_images_are_spliced_between_text_in_order_and_text_alone_asks_nothing():
    server = Server()
    (rendered,) = render(server.renderer(), [EncodedTextChunk([1, 2]), EncodedTextChunk([3])])
    assert rendered.prompt_ids == [1, 2, 3]
    assert rendered.multi_modal_kwargs is rendered.multi_modal_placeholders is rendered.mm_hashes is None
    assert server.transport.asked == []
    large = image(5, 9, expected_tokens=5)
    chunks = [EncodedTextChunk([1]), large, EncodedTextChunk([2, 3]), image(2)]
    (rendered,) = render(Server().renderer(), chunks)
    assert rendered.prompt_ids == [1, *[PAD] * 5, 2, 3, *[PAD] * 2]
    assert rendered.multi_modal_placeholders == {"image": [PlaceholderRange(1, 5), PlaceholderRange(8, 2)]}
    items = rendered.multi_modal_kwargs["image"]
    assert [pybase64.b64decode(item) for item in items] == [png(5, 9), png(2)]
    assert len(set(rendered.mm_hashes["image"])) == 2


def test_an_image_is_sent_once_while_it_is_cached():
    server = Server(delay=0.01)
    renderer = server.renderer()
    twice = [image(3), image(3)]
    first = render(renderer, *[twice] * 8)
    again = render(renderer, twice)
    assert len(server.renders) == 1
    assert all(rendered == again[0] for rendered in first)
    server = Server()
    largest = max(len(pybase64.b64encode(png(2, colour))) + 8 * 2 for colour in range(3))
    renderer = server.renderer(cache_bytes=2 * largest)
    for colour in (0, 1, 0, 2, 0, 1):
        render(renderer, [image(2, colour)])
    assert len(server.renders) == 4  # 0, 1, 2, and 1 once more


def test_requests_are_bounded():
    server = Server(delay=0.01)
    render(server.renderer(max_concurrency=3), *([image(2, colour)] for colour in range(12)))
    assert (server.most, len(server.renders)) == (3, 12)


def test_an_adapter_is_rendered_with_its_base_model_which_may_be_named():
    server = Server()
    render(server.renderer("adapter"), [image()])
    render(server.renderer("adapter", base_model="other"), [image()])
    assert [asked.path for asked in server.transport.asked] == ["/v1/models", RENDER, RENDER]
    assert [asked.json["model"] for asked in server.renders] == ["base", "other"]


def test_an_image_by_path_is_read_under_the_policy(tmp_path):
    (tmp_path / "cell.png").write_bytes(png(4))
    chunk = ImageAssetPointerChunk(str(tmp_path / "cell.png"), "png")
    caught = raised(MediaBlockedError, render, Server().renderer(), [chunk])
    assert caught.where == "inputs[0].chunks[0]"
    policy = MediaPolicy(local_roots=(tmp_path,))
    (rendered,) = render(Server().renderer(media_policy=policy), [chunk])
    assert rendered.prompt_ids == [PAD] * 4


def refused(kind, *chunks, server=None, model="base"):
    return raised(kind, render, (server or Server()).renderer(model), chunks)


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        (InputError, []),
        (InputError, ["text"]),
        (InputError, [EncodedTextChunk([1, -1])]),
        (InputError, [EncodedTextChunk([1]), ImageChunk(b"", "gif")]),
        (MediaDecodeError, [image(format="jpeg")]),
        (EngineMismatchError, [image(3, expected_tokens=4)]),
    ],
)  # fmt: skip
def test_inputs_that_are_refused(kind, chunks, sentence):
    assert str(refused(kind, *chunks)) == sentence


def test_nothing_is_sent_when_any_input_is_malformed():
    server = Server()
    with pytest.raises(InputError, match=r"^inputs\[1\].chunks: the model input is empty"):
        render(server.renderer(), [image()], [])
    assert server.transport.asked == []
    with pytest.raises(InputError, match=r"^inputs\[0\]: not a model input - expected ModelInput, got dict$"):
        asyncio.run(server.renderer().render([{"chunks": []}]))


def features(**changed):
    """Change or (None) drop what an answer's features hold of the image."""

    def change(answer):
        found = answer["features"] | {name: {"image": value} for name, value in changed.items()}
        answer["features"] = {name: value for name, value in found.items() if value != {"image": None}}
        return answer

    return change


WHERE = f"inputs[0].chunks[0], http://memory{RENDER}"
NOT_ONE = "the server did not render one image"
ONE_OF = NOT_ONE + " - expected one of 'image', with its data, got "
OUTSIDE = "the server rendered a placeholder outside the prompt"
REPLIES = {
    "no features": (lambda answer: {"token_ids": answer["token_ids"]}, f"features.mm_hashes: {NOT_ONE}"),
    "no tensors": (features(kwargs_data=None), f"features.kwargs_data: {ONE_OF}{{}}"),
    "null tensors": (features(kwargs_data=[None]), f"features.kwargs_data: {NOT_ONE}"),
    "two placeholders": (
        features(mm_placeholders=[{"offset": 0, "length": 1}] * 2),
        f"features.mm_placeholders: {ONE_OF}{{'image': 2}}",
    ),
    "outside": (
        features(mm_placeholders=[{"offset": 2, "length": 3}]),
        f"features.mm_placeholders: {OUTSIDE} - expected tokens within [0, 4), got [2, 5)",
    ),
    "empty": (features(mm_placeholders=[{"offset": 2, "length": 0}]), f"features.mm_placeholders: {OUTSIDE}"),
    "other form": (lambda answer: 17, "the server's reply is malformed - expected object, got int"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_answers_that_cannot_be_used(name):
    change, expected = REPLIES[name]
    message = str(refused(EngineReplyError, image(), server=Server(change)))
    assert message.startswith(WHERE)
    assert expected in message


def test_a_failure_reaches_all_who_wait_each_with_its_place_and_is_not_kept():
    answers = ["broken"]
    server = Server(lambda answer: answers.pop() if answers else answer, delay=0.01)
    renderer = server.renderer()

    async def both():
        inputs = [image()], [EncodedTextChunk([1]), image()]
        calls = [renderer.render([ModelInput(chunks)]) for chunks in inputs]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = asyncio.run(both())
    assert first.where.startswith("inputs[0].chunks[0], ")
    assert second.where.startswith("inputs[0].chunks[1], ")
    assert len(server.renders) == 1
    assert render(renderer, [image()])[0].prompt_ids == [PAD] * 2


def test_closed_routes_statuses_and_unknown_models(sentence):
    def error(kind, status):
        server = Server()
        routes = {"GET /v1/models": MODELS, f"POST {RENDER}": Answer({"error": "no"}, status=status)}
        server.transport = MemoryTransport(routes)
        return refused(kind, image(), server=server)

    assert str(error(EngineUnsupportedError, 403)) == sentence
    malformed = error(EngineStatusError, 400)
    assert malformed.where == f"inputs[0].chunks[0], POST http://memory{RENDER}"
    assert json.loads(malformed.body) == {"error": "no"}
    assert str(refused(EngineUnsupportedError, image(), model="third")) == sentence
    assert str(refused(EngineReplyError, image(), server=Server(models={"models": []}))) == sentence


async def test_cancelling_leaves_nothing_pending():
    server = Server(delay=60)
    task = asyncio.ensure_future(server.renderer().render([ModelInput([image()])]))
    while not server.running:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(asyncio.all_tasks()), len(server.transport.cancelled)) == (1, 1)
