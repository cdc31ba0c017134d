"""Whatever a server answers, by any means, is an error of ours that names what was wrong, soon and in little memory."""

import asyncio
import base64
import contextlib
import gzip
import io
import json
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from mmrender.client import exchange
from mmrender.client.http import HTTPTransport
from mmrender.client.sglang import SGLangBackend
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.errors import EngineError
from stub_server import ENGINES, IDS, PROMPT, Engine, asked

SECONDS, MEGABYTES = 60, 64
"""What one reply may take, on a loaded machine; of memory twenty times the longest reply that is read."""


def npy(array: Any) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return base64.b64encode(stream.getvalue()).decode()


def npy_header(text: str) -> str:
    """An array file of which only the header is there."""
    raw = text.encode().ljust(117) + b"\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw).decode()


def mapping(**changes: Any) -> dict[str, Any]:
    """Dynamo's form of router choices."""
    return {"data": base64.b64encode(bytes(20)).decode(), "shape": [5, 2, 2], "dtype": "uint8", **changes}


class Text(str):
    """JSON that `json` cannot write."""


HUGE = 2**63, 2**64, -(2**63) - 1, 10**40
LARGE = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 1000, 1000)}"
MEMBERS: dict[str, list[Any]] = {
    "logprob": [
        None, -9999.0, -3.4028234663852886e38, 0.7, 1e308, True, False, "-1", [], {}, [-1.0], *HUGE[:2], HUGE[3],
        *map(Text, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-", "0x1", "-1.")),
    ],
    "token": [True, None, -1, 1024, 2**31, *HUGE, 51.5, 1e300, "51", "", [51], {}],
    "named": [7, -1, None, "51", True, [51], 51.5, *HUGE],
    "ids": [
        IDS[:2], [], [*IDS, 53, 54], [50] * 100_000, {"50": 1}, "abc", 7, True, [IDS], [None] * 3, [[], [], []],
        ["50", "51", "52"], [[[[[[50]]]]]],
    ],
    "reason": ["tired", "", None, ["stop"], 7, True, {"type": "stop"}, "STOP", "error", "stop\x00", "x" * 1_000_000],
    "usage": [
        [1], "3", 7, True, {"prompt_tokens": 4}, {"prompt_tokens": -3}, {"prompt_tokens": True},
        {"prompt_tokens": [3]}, {"prompt_tokens": 2**70}, {"prompt_tokens_details": [], "finish_reason": 1},
    ],
    "prompt": [[10, 99, 12], [], PROMPT * 2, PROMPT[:1], [1] * 100_000],
    "versions": [
        "step-7", [1], [{}], [{"version": "a", "start": -1, "end": 3}], [{"version": "a", "start": 0, "end": 9}],
        [{"version": "a", "start": 2, "end": 1}], [{"version": [], "start": 0, "end": 3}],
        [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 1, "end": 3}],
    ],
    "experts": [
        "!!!", "AAA", "", 7, [1], {}, npy(np.zeros((5, 2))), npy(np.zeros((5, 2, 2))), npy(np.zeros((99, 2, 2), np.uint8)),
        npy(np.asfortranarray(np.zeros((5, 2, 2), np.uint8))), npy(np.array([[[{}]]], object)),
        npy_header(LARGE), npy_header(LARGE.replace("1000)", "-1)")), npy_header("(" * 100), npy_header("__import__('os')"),
        mapping(start=-1), mapping(shape=[5, 2]), mapping(shape=[5, -2, 2]), mapping(shape=[2**40] * 3),
        mapping(shape="522"), mapping(dtype="object"), mapping(dtype="S99999"), mapping(dtype="float32"),
        mapping(dtype=7), mapping(data=7), mapping(data="!"),
    ],
}  # fmt: skip

Answer = Callable[[Engine], bytes]


def http(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1") + body


def written(value: Any) -> bytes:
    """JSON, with texts that are no JSON as they are."""
    marks: dict[str, str] = {}

    def mark(each: Any) -> Any:
        if isinstance(each, Text):
            marks[f'"\x7f{len(marks)}"'] = each
            return f"\x7f{len(marks) - 1}"
        if isinstance(each, dict):
            return {key: mark(one) for key, one in each.items()}
        return [mark(one) for one in each] if isinstance(each, list) else each

    text = json.dumps(mark(value), ensure_ascii=False)
    for name, raw in marks.items():
        text = text.replace(name, raw)
    return text.encode()


def good(engine: Engine) -> bytes:
    return written(engine.answer())


def body(raw: bytes) -> Answer:
    return lambda _: http(raw)


def deep(opening: str, closing: str, count: int = 200_000) -> bytes:
    return (opening * count + "1" + closing * count).encode()


def packed(raw: bytes, coding: str, pack: Callable[[bytes], bytes]) -> Answer:
    return lambda _: http(pack(raw), f"Content-Encoding: {coding}")


BOMB = gzip.compress(bytes(1 << 28), 1)
"""256 MiB of zeros."""
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODIES: dict[str, Answer] = {
    **{raw: body(raw.encode()) for raw in ("", " ", "null", "true", "17", "-0.0", '"text"', "[]", "{}", "[null]")},
    **{raw: body(raw.encode()) for raw in ("{", "[", '{"a"', "nan", "{'choices': []}", "<html></html>", "data: {}")},
    **{raw: body(raw.encode()) for raw in ('{"choices": []}', '{"choices": [{}, {}]}', '{"choices": [1]}')},
    **{raw: body(raw.encode()) for raw in ('{"choices": {}}', '{"meta_info": 1}', '{"nvext": []}', '{"error": "no"}')},
    "deep lists": body(deep("[", "]")),
    "deep objects": body(deep('{"a":', "}")),
    "deep choices": body(deep('{"choices":[', "]}", 100_000)),
    "lists without an end": body(b"[" * 200_000),
    "bytes": body(bytes(range(256))),
    "not UTF-8": lambda engine: http(good(engine).replace(b"stop", b"st\xff\xfe")),
    "UTF-16": lambda engine: http(good(engine).decode().encode("utf-16")),
    "byte order mark": lambda engine: http(b"\xef\xbb\xbf" + good(engine)),
    "two answers": lambda engine: http(good(engine) * 2),
    "a list of answers": lambda engine: http(b"[" + good(engine) + b"," + good(engine) + b"]"),
    "half an answer": lambda engine: http(good(engine)[:-20]),
    "behind the answer": lambda engine: http(good(engine) + b"]"),
    "keys twice": lambda engine: http(good(engine)[:-1] + b', "choices": 1, "meta_info": 1, "nvext": 1}'),
    "a number of a million digits": lambda engine: http(b'{"choices":' + b"1" * 1_000_000 + b"}"),
    "longer than any answer": body(b" " * (5 << 20)),
}  # fmt: skip
WIRE: dict[str, Answer] = {
    **{
        f"status {status}": lambda engine, status=status: http(b"no", status=status)
        for status in ("204 No Content", "301 Moved", "307 Again", "400 Bad", "401 No", "404 Not", "413 Large", "418 I",
                       "429 Many", "500 Oh", "502 Gate", "503 Busy", "599 What", "999 What")
    },
    "redirect to a file": lambda _: http(b"", "Location: file:///etc/passwd", status="302 Found"),
    "redirect to itself": lambda _: http(b"", "Location: /", status="308 For ever"),
    "wait for ever": lambda _: http(b"", f"Retry-After: {'9' * 50}", status="503 Busy"),
    "10 MB of error": lambda _: http(b"<p>" * 3_000_000, status="500 Oh"),
    "upgrade": lambda _: b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    "nothing": lambda _: b"",
    "HTTP/9.9": lambda engine: http(good(engine)).replace(b"HTTP/1.1", b"HTTP/9.9"),
    "status of letters": lambda engine: http(good(engine), status="two hundred"),
    "only a status": lambda _: b"HTTP/1.1 200 OK\r\n",
    "no HTTP": good,
    "SSH": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n",
    "TLS": lambda _: bytes.fromhex("16030100050100000100"),
    "zeros": lambda _: bytes(100_000),
    "100,000 headers": lambda _: b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
    "1 MB of header": lambda _: b"HTTP/1.1 200 OK\r\nA: " + b"b" * 1_000_000 + b"\r\n\r\n",
    "header without a name": lambda engine: http(good(engine), ": b"),
    "negative length": lambda engine: http(good(engine), length=-1),
    "a tebibyte declared": lambda engine: http(good(engine), length=1 << 40),
    "2**70 declared": lambda engine: http(good(engine), length=2**70),
    "a byte too many declared": lambda engine: http(good(engine), length=len(good(engine)) + 1),
    "half declared": lambda engine: http(good(engine), length=len(good(engine)) // 2),
    "length of letters": lambda engine: http(good(engine), "Content-Length: abc"),
    "two lengths": lambda engine: http(good(engine), "Content-Length: 7"),
    "chunks of no size": lambda _: CHUNKED + b"zz\r\nabc\r\n",
    "chunk of 2**64": lambda _: CHUNKED + b"f" * 16 + b"\r\nabc",
    "chunk below 0": lambda _: CHUNKED + b"-5\r\nabc\r\n",
    "chunks without an end": lambda engine: CHUNKED + b"%x\r\n%b\r\n" % (len(good(engine)), good(engine)),
    "1 MB of chunk extension": lambda _: CHUNKED + b"5;" + b"a" * 1_000_000 + b"\r\n",
    "gzip bomb": lambda _: http(BOMB, "Content-Encoding: gzip"),
    "gzip bomb twice": packed(BOMB, "gzip", gzip.compress),
    "deflate bomb": packed(bytes(1 << 26), "deflate", zlib.compress),
    "gzip of letters": packed(b"abc", "gzip", bytes),
    "half a gzip": packed(b"[" * 1000, "gzip", lambda raw: gzip.compress(raw)[:-9]),
    "unknown coding": packed(b"{}", "exe", bytes),
    "charset": lambda _: http(b"caf\xe9", "Content-Type: application/json; charset=latin-1"),
}  # fmt: skip


def broken(engine: Engine, place: str, value: Any) -> bytes:
    answer = engine.answer()
    engine.change[place](answer, value)
    return http(written(answer))


def hostile_replies(engine: Engine) -> dict[str, bytes]:
    """Every reply that an engine may not give, by what is wrong with it."""
    found = {name: make(engine) for name, make in (BODIES | WIRE).items()}
    for place in engine.change:
        for index, value in enumerate(MEMBERS[place]):
            if place == "experts" and engine.backend.name == "sglang" and value == "":
                continue  # no rows: as many as there are of a prompt and a completion of one token
            found[f"{place} {index}: {value!r}"[:80]] = broken(engine, place, value)
    return found


@contextlib.asynccontextmanager
async def answering(reply: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A server that reads one request and answers with bytes."""

    tasks: set[asyncio.Task[Any] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
            await reply(writer)
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*[task for task in tasks if task]), SECONDS)


async def outcome(
    engine: Engine,
    reply: Callable[[asyncio.StreamWriter], Any],
    *,
    experts: bool = False,
    patience: float = 15,
) -> str | None:
    """What is not as it should be of the error that an answer becomes; None if all is."""
    backend = engine.backend
    if isinstance(backend, SGLangBackend):
        backend = replace(backend, routed_experts_shape=(2, 2))
    async with answering(reply) as url:
        transport = HTTPTransport(TransportConfig(url, timeout=patience, retries=RetryPolicy(attempts=2)))
        tracemalloc.start()
        started = time.monotonic()
        try:
            response = await backend.generate(asked(routed_experts=experts), transport)
        except EngineError as error:
            named = (
                error.where and (error.got or error.expected or ": " in str(error)) and len(str(error)) < 4000
            )
            problem = None if named else f"says little, or too much: {str(error)[:200]!r}"
        except Exception as error:
            problem = f"foreign {type(error).__name__}: {error}"[:300]
        else:
            problem = f"taken: {response.completion_ids} {response.finish_reason}"
        finally:
            took, peak = time.monotonic() - started, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            await transport.aclose()
    if took > SECONDS or peak > MEGABYTES << 20:
        problem = f"{took:.1f} s, {peak >> 20} MiB; {problem}"
    return problem


async def written_to(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(raw)
    await writer.drain()


@pytest.mark.parametrize("name", ENGINES)
async def test_every_hostile_reply_is_an_error_that_names_it(name):
    engine = ENGINES[name]
    replies = hostile_replies(engine)
    assert len(replies) >= 100
    taken = http(good(engine)), http(good(engine), "Content-Type: text/html; charset=utf-16")
    problems = {}
    for raw in taken:  # it is what else they hold that the others are refused for
        problem = await outcome(engine, partial(written_to, raw=raw))
        assert str(problem).startswith("taken: [50, 51, 52]")
    for what, raw in replies.items():
        reply = partial(written_to, raw=raw)
        if problem := await outcome(engine, reply, experts=what.startswith("experts")):
            problems[what] = problem
    assert not problems, "\n".join(f"{what}: {problem}" for what, problem in problems.items())


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", CHUNKED, b""])
@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize("name", ENGINES)
def test_an_answer_without_end_ends(name, start, pause, monkeypatch):
    monkeypatch.setattr(exchange, "_ABORT_SECONDS", 0.2)

    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        piece = b"x" * (16 if pause else 65_536)
        while not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if start == CHUNKED else piece)
            await writer.drain()
            await asyncio.sleep(pause)

    assert asyncio.run(outcome(ENGINES[name], reply, patience=0.3 if pause else 15)) is None
