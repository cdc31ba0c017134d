"""The LLM proxy of Agent Lightning, for `bench_gateway.py`. Runs in its own venv.

    python benchmarks/gateway_agl.py SERVER PORT CONTROL_PORT

`GET /open/NAME` begins a rollout and returns the ids of rollout and attempt. `GET /left/NAME/CALLS` returns
the tokens of its triplets, each a training sample, and the bytes of its spans as JSON. `GET /recorded/NAME`
returns the number of its triplets.
"""

import asyncio
import sys

from agentlightning.adapter.triplet import LlmProxyTraceToTriplet
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from aiohttp import web


async def main(server: str, port: int, control: int) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    model = {
        "model_name": "stub",
        "litellm_params": {"model": "hosted_vllm/stub", "api_base": f"{server}/v1", "api_key": "none"},
    }
    proxy = LLMProxy(
        port=port,
        host="127.0.0.1",
        model_list=[model],
        store=store,
        launch_mode="thread",
        callbacks=["return_token_ids", "logprobs", "opentelemetry"],
    )
    await proxy.start()
    rollouts: dict[str, tuple[str, str]] = {}

    async def open_session(request: web.Request) -> web.Response:
        rollout = await store.start_rollout(input={})
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        rollouts[request.match_info["name"]] = ids
        return web.json_response(ids)

    async def left(request: web.Request) -> web.Response:
        spans, triplets = [], []
        for _ in range(100):  # spans come some time after their calls
            spans = await store.query_spans(*rollouts[request.match_info["name"]])
            triplets = LlmProxyTraceToTriplet().adapt(spans)
            if len(triplets) == int(request.match_info["calls"]):
                break
            await asyncio.sleep(0.1)
        tokens = sum(len(each.prompt["token_ids"]) + len(each.response["token_ids"]) for each in triplets)
        nbytes = sum(len(span.model_dump_json()) for span in spans)
        return web.json_response({"tokens": tokens, "nbytes": nbytes, "samples": len(triplets)})

    async def recorded(request: web.Request) -> web.Response:
        spans = await store.query_spans(*rollouts[request.match_info["name"]])
        return web.Response(text=str(len(LlmProxyTraceToTriplet().adapt(spans))))

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", alive)
    app.router.add_get("/open/{name}", open_session)
    app.router.add_get("/left/{name}/{calls}", left)
    app.router.add_get("/recorded/{name}", recorded)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", control).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
