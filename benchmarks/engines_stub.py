"""Servers for `bench_engines.py`, in a process of their own: vLLM's routes, each with a canned answer.

    python benchmarks/engines_stub.py SERVERS SERVICE_SECONDS PROMPT_TOKENS COMPLETION_TOKENS

It prints the ports as JSON and reads commands from its standard input: `hang NUMBER` lets a server take
requests without answering them, `wake NUMBER` ends that. It stops when the input closes.
"""

import asyncio
import json
import re
import sys
from typing import Any

from client_stub import generate_answer

_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
_VERSION = re.compile(rb'"(?:new_version|weight_version)": *"([^"]*)"')
GENERATE = b"/inference/v1/generate"


def _answer(body: Any) -> bytes:
    text = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(text) + text


class Server:
    """One server: whether it hangs, whether it is paused, and its weights."""

    def __init__(self, service: float, completion: bytes) -> None:
        self.service, self.completion = service, completion
        self.is_hung = self.is_paused = False
        self.version = "v0"

    def answer(self, path: bytes, body: bytes) -> bytes:
        if path == b"/v1/models":
            return _answer({"data": [{"id": "stub", "max_model_len": 1 << 20}]})
        if path in (b"/pause", b"/resume"):
            self.is_paused = path == b"/pause"
        if version := _VERSION.search(body):
            self.version = version[1].decode()
        return _answer({"is_paused": self.is_paused, "weight_version": self.version})


class Exchange(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if not found or len(rest) < size:
            return
        self._data = b""
        if self._server.is_hung:
            return
        path = head.split(b" ", 2)[1].partition(b"?")[0]
        if path == GENERATE:
            loop = asyncio.get_running_loop()
            loop.call_later(self._server.service, self._transport.write, self._server.completion)
        else:
            self._transport.write(self._server.answer(path, rest))


async def main(count: int, service: float, prompt: int, completion: int) -> None:
    answer = _answer(generate_answer(prompt, completion))
    servers = [Server(service, answer) for _ in range(count)]
    loop = asyncio.get_running_loop()
    listening = [
        await loop.create_server(lambda server=server: Exchange(server), "127.0.0.1", 0, backlog=256)
        for server in servers
    ]
    print(json.dumps([each.sockets[0].getsockname()[1] for each in listening]), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, number = line.split()
        servers[int(number)].is_hung = command == "hang"
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
