"""Record what vLLM answers, for the contract tests that run without it.

Usage: `MMRENDER_VLLM_ENV=VENV PYTHONPATH=tests .venv/bin/python tests/integration/record_vllm_replies.py [SERVER...]`

Starts three servers, or those named of default, floats and closed, and writes
`tests/data/engines/vllm/NAME.json`, a list of exchanges: method, path, request, status and reply. Texts of items
and images within requests are cut to their digests, since the server took them as they were.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from integration.engine_checks import MODEL
from integration.engine_server import EngineServer, start_vllm
from mmrender import Renderer
from mmrender.client.http import HTTPTransport
from mmrender.client.server_facts import Process
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import ABORT_PATH, VLLMBackend
from mmrender.client.vllm_images import GENERATE_PATH, RENDER_PATH
from mmrender.errors import EngineStatusError, MMRenderError
from mmrender.sidecar import collapse
from mmrender.testing.tiny_model import build_tiny_model
from vllm_contract import (
    ALTERNATIVES,
    DATA,
    GREEDY,
    contract_request,
    one_image,
    shortened,
    text_prompt,
    three_images,
    to_json,
)

LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}


class Recording:
    """A transport that keeps every exchange."""

    def __init__(self, base_url: str):
        self.transport = HTTPTransport(base_url)
        self.exchanges: list[dict[str, Any]] = []

    @property
    def base_url(self):
        return self.transport.base_url

    async def request(self, method: str, path: str, *, json: Any = None, **options: Any):
        entry: dict[str, Any] = {"method": method, "path": path, "request": to_json(json)}
        try:
            reply = await self.transport.request(method, path, json=json, **options)
            entry |= {"status": reply.status, "reply": decoded(bytes(reply.body))}
            return reply
        except EngineStatusError as error:
            entry |= {"status": error.status, "reply": decoded(error.body.encode())}
            raise
        finally:
            if not path.startswith("/metrics/"):  # which process answers is nothing to replay
                self.exchanges.append(entry)

    async def aclose(self):
        await self.transport.aclose()


def decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode()


def write(name: str, exchanges: list[dict[str, Any]]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    # One exchange a line.
    text = "[" + ",\n".join(json.dumps(shortened(entry)) for entry in exchanges) + "]"
    (DATA / f"{name}.json").write_text(text + "\n")
    print(f"{name}: {[entry.get('status') for entry in exchanges]} {len(text)} bytes", flush=True)


async def record(server: EngineServer, name: str, *works: Any) -> None:
    """Record what some calls exchange; each is a function of the transport that gives a coroutine."""
    transport = Recording(server.base_url)
    try:
        for work in works:
            try:
                await work(transport)
            except MMRenderError as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:150]}")
    finally:
        await transport.aclose()
    write(name, transport.exchanges)


def raw(**body: Any) -> Any:
    """A request as it is written here, for what the backend would never send."""
    whole = {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": GREEDY, **body}
    whole = {key: value for key, value in whole.items() if value is not None}
    return lambda way: way.request("POST", GENERATE_PATH, json=whole)


def by(backend: VLLMBackend, rendered: Any, **options: Any) -> Any:
    return lambda way: backend.generate(contract_request(rendered, **options), way)


def hidden(backend: VLLMBackend, rendered: Any) -> Any:
    """A call of which the server is wrongly thought to have the images."""

    async def work(way: Recording) -> None:
        process = await Process.answering(way)
        for digest in rendered.multi_modal_data.mm_hashes["image"]:
            process.facts.hashes.put(f"{digest}-uint8", True)
        await backend.generate(contract_request(rendered), way)

    return work


async def record_default(server: EngineServer, renderer: Renderer) -> None:
    text, image, three = text_prompt(renderer), one_image(renderer), three_images(renderer)
    features, hashes = VLLMBackend(), VLLMBackend(images="hash_only")
    parts = VLLMBackend(images="content_parts")
    await record(server, "models", lambda way: features.resolve_max_prompt_len(MODEL, way))
    await record(server, "text", by(features, text))
    await record(server, "alternatives", by(features, text, sampling=ALTERNATIVES))
    free = await features.generate(contract_request(text), HTTPTransport(server.base_url))
    await record(
        server,
        "stop_token",
        by(features, text, sampling={**GREEDY, "stop_token_ids": [free.completion_ids[2]]}),
    )
    stops = renderer.get_stop_token_ids()
    await record(server, "stop_eos", by(features, text, sampling={**GREEDY, "allowed_token_ids": stops}))
    piece = renderer.decode([free.completion_ids[2]])
    await record(
        server, "stop_text", by(features, text, sampling={**GREEDY, "stop": [piece.strip() or piece]})
    )
    await record(server, "hash_miss", hidden(hashes, one_image(renderer, seed=5)))
    await record(server, "features", by(features, image))
    await record(server, "hash_hit", by(hashes, three), by(hashes, three))
    await record(server, "content_parts", by(parts, image))
    await record(server, "content_parts_three", by(parts, three))
    await record(server, "content_parts_named", by(parts, three), by(parts, three))
    await record_refusals(server, renderer)
    await record_control(server)


async def record_refusals(server: EngineServer, renderer: Renderer) -> None:
    image = one_image(renderer)
    url = "data:image/png;base64,AAAA"
    collapsed = collapse(image.token_ids, image.multi_modal_data)
    refusals = {
        "overflow_context": raw(token_ids=[5] * 3000),
        "overflow_no_room": raw(token_ids=[5] * 2048),
        "overflow_no_max_tokens": raw(token_ids=[5] * 3000, sampling_params={"temperature": 0}),
        "unknown_model": raw(model="other"),
        "negative_id": raw(token_ids=[-5]),
        "outside_vocabulary": raw(token_ids=[5000]),
        "no_tokens": raw(token_ids=[]),
        "temperature": raw(sampling_params={**GREEDY, "temperature": -1}),
        "logprobs": raw(sampling_params={**GREEDY, "logprobs": 30}),
        "empty_salt": raw(cache_salt=""),
        "part_nested": raw(
            token_ids=collapsed, content_parts=[{"type": "image_url", "image_url": {"url": url}}]
        ),
        "part_no_image": raw(token_ids=collapsed, content_parts=[{"type": "image_url", "url": url}]),
        "part_unknown_uuid": raw(
            token_ids=collapsed, content_parts=[{"type": "image_url", "url": None, "uuid": "a"}]
        ),
    }
    for name, work in refusals.items():
        await record(server, f"refused_{name}", work)
    words = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 3000}]}
    await record(server, "refused_overflow_chat", lambda way: way.request("POST", RENDER_PATH, json=words))


async def record_control(server: EngineServer) -> None:
    async def aborted(way: Recording) -> None:
        request = EngineRequest(MODEL, [5, 6, 7], {**LONG, "max_tokens": 1900}, "cut-off")
        task = asyncio.create_task(VLLMBackend().generate(request, way))
        await asyncio.sleep(0.03)
        await way.request("POST", ABORT_PATH, json={"request_ids": ["generate-tokens-cut-off"]})
        await task

    async def versions(way: Recording) -> None:
        request = EngineRequest(MODEL, [5, 6, 7], {**LONG, "max_tokens": 150}, "versions")
        task = asyncio.create_task(VLLMBackend().generate(request, way))
        await asyncio.sleep(0.05)
        await way.request("POST", "/pause?mode=keep", json={})
        await way.request("POST", "/update_weight_version", json={"new_version": "step-7"})
        await way.request("POST", "/resume", json={})
        await task

    await record(server, "aborted", aborted)
    await record(server, "weight_versions", versions)


async def record_floats(server: EngineServer, renderer: Renderer) -> None:
    await record(server, "features_floats", by(VLLMBackend(), one_image(renderer)))
    hashes = VLLMBackend(images="hash_only")
    await record(server, "hash_refused", by(hashes, one_image(renderer)))


async def record_closed(server: EngineServer, renderer: Renderer) -> None:
    text, image = text_prompt(renderer), one_image(renderer)
    await record(server, "closed_generate", by(VLLMBackend(), text))
    await record(server, "closed_render", by(VLLMBackend(), image))
    await record(server, "closed_info", by(VLLMBackend(images="hash_only", pixels="uint8"), image))


SERVERS: dict[str, tuple[Any, list[str], dict[str, str]]] = {
    "default": (record_default, [], {}),
    "floats": (record_floats, ["--no-mm-device-do-normalize", "--mm-processor-cache-gb", "0"], {}),
    "closed": (record_closed, ["--no-enable-scale-out"], {"VLLM_SERVER_DEV_MODE": "0"}),
}


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "tiny")
        renderer = Renderer.from_pretrained(model)
        for name in names or SERVERS:
            work, flags, environment = SERVERS[name]
            with start_vllm(model, flags, environment=environment, log=Path(folder) / "log") as server:
                asyncio.run(work(server, renderer))


if __name__ == "__main__":
    main(sys.argv[1:])
