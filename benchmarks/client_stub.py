"""A server for `bench_client.py`, in a process of its own: reads a request whole, gives a canned answer.

    python benchmarks/client_stub.py PROMPT_TOKENS COMPLETION_TOKENS

It prints its port and serves until its standard input closes. It looks at nothing but the path and the length
of the body, so it is not what is measured.
"""

import asyncio
import json
import re
import sys
from typing import Any

_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)


def generate_answer(prompt: int, completion: int) -> dict[str, Any]:
    """Answer of vLLM 0.32 at `/inference/v1/generate`; tokens are named in both of its spellings."""
    ids = [100 + index % 500 for index in range(completion)]
    content = [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": -0.5 - index / 1000,
            "rank": 1,
            "top_logprobs": [],
        }
        for index, token in enumerate(ids)
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
    }
    return {"request_id": "stub", "choices": [choice], "usage": _usage(prompt, completion)}


def chat_answer(prompt: int, completion: int) -> dict[str, Any]:
    """Answer of an OpenAI-compatible server at `/v1/chat/completions` with logprobs."""
    content = [
        {"token": f"tok{index % 500}", "logprob": -0.5 - index / 1000, "bytes": None, "top_logprobs": []}
        for index in range(completion)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * 3 * completion},
        "logprobs": {"content": content},
        "finish_reason": "length",
    }
    return {
        "id": "stub",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [choice],
        "usage": _usage(prompt, completion),
    }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class _Exchange(asyncio.BufferedProtocol):
    """Answers every request of one connection; a body is counted and overwritten, never kept."""

    answers: dict[bytes, bytes]

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 20)
        self._head = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def get_buffer(self, _: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes]) if not self._left else b""
        if self._left:
            self._left -= nbytes
        else:
            self._head += data
            head, found, rest = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            length = _LENGTH.search(head)
            self._path = head.split(b" ", 2)[1]
            self._left = (int(length[1]) if length else 0) - len(rest)
            self._head = b""
        if self._left == 0:
            self._transport.write(self.answers.get(self._path.partition(b"?")[0], _answer(b"{}", b"404 No")))


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


async def main(prompt: int, completion: int) -> None:
    models = {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": 1 << 20}]}
    _Exchange.answers = {
        b"/inference/v1/generate": _answer(json.dumps(generate_answer(prompt, completion)).encode()),
        b"/v1/chat/completions": _answer(json.dumps(chat_answer(prompt, completion)).encode()),
        b"/v1/models": _answer(json.dumps(models).encode()),
    }
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Exchange, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
