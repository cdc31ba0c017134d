"""The interception server of verifiers with its training client. Runs in a venv of its own.

    python benchmarks/gateway_verifiers.py SERVER MODEL_DIR CONTROL_PORT

`GET /open/NAME` opens a rollout and returns URL and key. `GET /left/NAME` returns the tokens of its branches,
each a training sample, and the bytes of its trace as msgpack, which is how verifiers ships a trace.
`GET /recorded/NAME` returns the number of its turns.
"""

import asyncio
import json
import sys

import msgpack
from aiohttp import web
from renderers.configs import Qwen3VLRendererConfig
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main(server: str, model: str, port: int) -> None:
    client = TrainClientConfig(
        base_url=f"{server}/v1",
        api_key_var="NO_KEY",
        renderer=Qwen3VLRendererConfig(),
        renderer_model_name=model,
    )
    sessions: dict[str, RolloutSession] = {}
    async with InterceptionServer() as interception:

        async def open_session(request: web.Request) -> web.Response:
            trace = Trace(
                task=TraceTask(type="Bench", data=TaskData()), agent=AgentInfo(config=AgentConfig())
            )
            session = RolloutSession(ctx=ModelContext("stub", client), trace=trace)
            key, _ = interception.register(session)
            sessions[request.match_info["name"]] = session
            return web.json_response([f"{interception.base_url}/v1", key])

        async def left(request: web.Request) -> web.Response:
            trace = sessions[request.match_info["name"]].trace
            nbytes = len(msgpack.packb(json.loads(trace.model_dump_json())))
            return web.json_response(
                {"tokens": sum(len(branch.token_ids) for branch in trace.branches), "nbytes": nbytes}
            )

        async def recorded(request: web.Request) -> web.Response:
            return web.Response(text=str(sessions[request.match_info["name"]].trace.num_turns))

        async def alive(_: web.Request) -> web.Response:
            return web.Response(text="ok")

        app = web.Application()
        app.router.add_get("/", alive)
        app.router.add_get("/open/{name}", open_session)
        app.router.add_get("/left/{name}", left)
        app.router.add_get("/recorded/{name}", recorded)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
