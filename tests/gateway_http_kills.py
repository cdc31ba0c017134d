"""Kill gateways that serve HTTP, and agents amid their calls: `python gateway_http_kills.py MODEL OUT`.

Agents talk to one gateway at a time, over three protocols, streamed and not. A timer kills the gateway, and
another one takes its place on the same port. Agents drop connections at any moment, as if they were killed. An
agent without a whole reply repeats its request. Every reply that came whole must be one step of its session's
trajectory, and must extend the step of the reply before. Further steps are answers that no agent
received. The last line is the result as JSON.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from gateway_kills import warm
from kit import data_url, free_port, noise
from mmrender.gateway.settings import GatewaySettings
from mmrender.renderer import Renderer
from mmrender.trajectory.files import load_trajectories, received_ids
from session_cases import Script

PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


class SlowScript(Script):
    """An engine that takes its time, and streams."""

    async def generate(self, request: Any, transport: Any, *, on_tokens: Any = None) -> Any:
        response = Script.completion(self, request, random.randrange(10**6))  # no two answers are equal
        ids, logprobs = response.completion_ids, response.logprobs
        for token, logprob in zip(ids, logprobs, strict=True):
            await asyncio.sleep(0.004)
            if on_tokens is not None:
                on_tokens([token], [logprob], None)
        if on_tokens is not None:
            on_tokens([], [], response.finish_reason)
        return response


def nursery(renderer: Any, out: Path, port: int, orders: socket.socket) -> None:
    """Fork a gateway for each byte that comes, once the one before is dead. Answer with its process id."""
    pid = None
    while orders.recv(1):
        if pid is not None:
            os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            try:
                orders.close()
                script = SlowScript(renderer)
                random.seed(os.getpid())
                gateway = script.gateway(out, settings=GatewaySettings(port=port))
                asyncio.run(gateway.serve())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        orders.send(pid.to_bytes(4, "little"))
    os._exit(0)


@dataclass
class Play:
    """All agents, and the gateway that they have at the moment."""

    orders: socket.socket
    root: str
    turns: int
    chance: random.Random
    gateway_kills: int
    agent_kills: int
    killed: int = 0
    dropped: int = 0
    requests: int = 0
    child: int = 0
    received: dict[str, list[str]] = field(default_factory=dict)

    def start(self) -> None:
        self.orders.send(b"g")
        self.child = int.from_bytes(self.orders.recv(4), "little")

    async def kill(self) -> None:
        """Kill the gateway again and again."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.05, 0.6))
            if self.killed < self.gateway_kills:
                os.kill(self.child, signal.SIGKILL)
                self.killed += 1
                await asyncio.sleep(self.chance.uniform(0.0, 0.05))
                self.start()

    async def post(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> bytes:
        """Send a request until a whole reply comes."""
        while True:
            self.requests += 1
            try:
                async with (
                    asyncio.timeout(self.patience()),
                    http.post(f"{self.root}{path}", json=body) as reply,
                ):
                    data = await reply.read()
                    if reply.status == 200 or (path.endswith("/finish") and reply.status == 409):
                        return data
                    raise AssertionError(f"{reply.status}: {data[:300]!r}")
            except TimeoutError:
                self.dropped += 1
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.02)

    def patience(self) -> float | None:
        """Seconds after which an agent drops its connection."""
        is_dropped = self.dropped < self.agent_kills and self.chance.random() < 0.3
        return self.chance.uniform(0.0, 0.06) if is_dropped else None

    async def agent(self, name: str, protocol: str) -> None:
        messages: list[Any] = []
        async with aiohttp.ClientSession() as http:
            for turn in range(self.turns):
                messages.append(said_by_user(protocol, f"turn {turn} of {name}", turn))
                stream = self.chance.random() < 0.5
                body = {"model": "m", "max_tokens": 64, "stream": stream, "messages": messages}
                if protocol == "responses":
                    body = {"model": "m", "max_output_tokens": 64, "stream": stream, "input": messages}
                while (
                    answer := whole(
                        protocol, stream, await self.post(http, f"/s/{name}/v1/{PATHS[protocol]}", body)
                    )
                ) is None:
                    pass
                self.received.setdefault(name, []).append(answer["id"][-24:])
                messages += answer["messages"]
            await self.post(http, f"/sessions/{name}/finish", {"reward": 1.0})


def said_by_user(protocol: str, words: str, turn: int) -> dict[str, Any]:
    if turn % 3:
        return {"role": "user", "content": words}
    url = data_url(noise(turn))
    pictures: dict[str, Any] = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": url.split(",")[1]},
        },
    }
    text = {"type": "input_text" if protocol == "responses" else "text", "text": words}
    return {"role": "user", "content": [pictures[protocol], text]}


def whole(protocol: str, stream: bool, data: bytes) -> dict[str, Any] | None:
    """The answer in a reply, or None if the stream ended early."""
    if not stream:
        body = json.loads(data)
    else:
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        body = ending(protocol, events, data)
        if body is None:
            return None
    if protocol == "chat":
        return {"id": body["id"], "messages": [body["choices"][0]["message"]]}
    if protocol == "responses":
        return {"id": body["id"], "messages": body["output"]}
    return {"id": body["id"], "messages": [{"role": "assistant", "content": body["content"]}]}


def ending(protocol: str, events: list[Any], data: bytes) -> dict[str, Any] | None:
    """The reply that events make, or None if the last is missing."""
    if protocol == "responses":
        return next((each["response"] for each in events if each["type"] == "response.completed"), None)
    if protocol == "chat":
        text = "".join(
            each["choices"][0]["delta"].get("content") or "" for each in events if each.get("choices")
        )
        message = {"role": "assistant", "content": text}
        is_whole = b"data: [DONE]" in data and "error" not in events[-1]
        return {"id": events[0]["id"], "choices": [{"message": message}]} if is_whole else None
    if not events or events[-1]["type"] != "message_stop":
        return None
    text = "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta")
    return {"id": events[0]["message"]["id"], "content": [{"type": "text", "text": text}]}


def faults(out: Path, play: Play) -> tuple[list[str], int]:
    """Compare the file with the replies that came whole. Return the differences, and the number of other steps."""
    found: list[str] = []
    extra = 0
    trees = load_trajectories(out)
    if sorted(received_ids(out)) != sorted(play.received):
        found.append(f"sessions {sorted(received_ids(out))}, not {sorted(play.received)}")
    for tree in trees:
        answers = play.received[tree.trajectory_id]
        steps = {step.extra["gateway"]["response"]: step for step in tree.steps}
        missing = [answer for answer in answers if answer not in steps]
        if missing or len(steps) != len(tree.steps) or len(set(answers)) != play.turns:
            found.append(f"{tree.trajectory_id}: {answers}, steps {list(steps)}")
            continue
        line = [steps[answer] for answer in answers]
        for step, after in pairwise(line):
            if after.previous is not step:
                found.append(f"{tree.trajectory_id}: step {after.index} does not extend step {step.index}")
        extra += len(tree) - len(line)
        if tree.reward != 1.0 or tree.error is not None:
            found.append(f"{tree.trajectory_id}: reward {tree.reward}, error {tree.error}")
    return found, extra


async def played(options: argparse.Namespace, orders: socket.socket, port: int) -> Play:
    chance = random.Random(0)
    root = f"http://127.0.0.1:{port}"
    play = Play(orders, root, options.turns, chance, options.gateways, options.agents)
    play.start()
    killer = asyncio.ensure_future(play.kill())
    number = 0
    while play.killed < options.gateways or play.dropped < options.agents:
        names = [f"s{number + index}" for index in range(8)]
        number += 8
        protocols = [list(PATHS)[index % 3] for index in range(8)]
        await asyncio.gather(*map(play.agent, names, protocols))
    killer.cancel()
    os.kill(play.child, signal.SIGTERM)
    await asyncio.sleep(0.5)
    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--gateways", type=int, default=10, help="gateways to kill")
    parser.add_argument("--agents", type=int, default=10, help="connections to drop")
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    renderer = Renderer.from_pretrained(options.model, image_backend="pil")
    warm(renderer)
    ours, theirs = socket.socketpair()
    out, port = options.out / "out.mmr", free_port()
    if os.fork() == 0:
        ours.close()
        nursery(renderer, out, port, theirs)
    theirs.close()
    play = asyncio.run(played(options, ours, port))
    ours.close()
    found, extra = faults(out, play)
    result = {
        "gateways_killed": play.killed,
        "connections_dropped": play.dropped,
        "requests": play.requests,
        "sessions": len(play.received),
        "turns": sum(map(len, play.received.values())),
        "unreceived_steps": extra,
        "faults": found,
    }
    print(json.dumps(result))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
