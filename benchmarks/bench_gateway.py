r"""Gateways that record agents: what a session leaves for the trainer, and the cost of a call.

    python benchmarks/bench_gateway.py [MODEL_DIR] [--rounds N] [--quick] [--venvs FOLDER] [--json FILE]
    python benchmarks/bench_gateway.py [MODEL_DIR] --memory SESSIONS

One agent, a loop around the openai client, makes 30 calls. Each answer calls a tool, every third tool shows
a picture of 640 x 480 pixels, and two answers have JSON as no template writes it (`\u00e9`, double spaces).
All gateways are in front of one server, which answers by a script in real tokens; see `gateway_stub.py`.
"direct" is the agent at the server. Peers run if `--venvs` has them; see `gateway_contenders.py`.

- tokens, bytes: of the training samples, and of the record that the trainer gets.
- broken: calls whose prompt, at the server, does not begin with the prompt and answer of the call before.
- call: milliseconds of a call, as the agent sees it. added: the part that is not spent in the server, without
  the same part of "direct". Of each call of the session the median of the rounds, in which gateways take
  turns; then p50 and p99 over the calls.
- calls a core: calls for each second of the gateway's processor time, in 256 sessions at once, 8 calls each,
  without pictures. lost: calls of them that were answered and are not in the records.

`--memory` measures our gateway alone: the growth of its resident memory with sessions of 20 calls and 10
pictures of 320 x 240 pixels, over the bytes that the sessions count.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

import aiohttp  # noqa: E402
import openai  # noqa: E402
from gateway_contenders import GATEWAYS, TURNS, Gateway, Ours, fetch  # noqa: E402
from gateway_stub import TOOLS  # noqa: E402
from measure import machine, table  # noqa: E402
from render_cases import make_image  # noqa: E402

from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402

SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
SESSIONS = 256
CALLS = 8
MEMORY_CALLS = 20
MEMORY_AT_ONCE = 16


def picture(seed: int, width: int, height: int) -> dict[str, Any]:
    """Return the part of a picture."""
    data = io.BytesIO()
    make_image(width, height, seed).save(data, "JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


PICTURES = [picture(seed, 640, 480) for seed in range(TURNS // 3)]
QUESTION = [
    {"role": "system", "content": "You look at pictures and take notes."},
    {"role": "user", "content": "How many legs have the animals?"},
]


def run_agent(url: str, key: str) -> list[float]:
    """Run the agent. Return the seconds of its calls."""
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    messages: list[Any] = list(QUESTION)
    seconds, shown = [], 0
    for _ in range(TURNS):
        begun = time.perf_counter()
        reply = client.chat.completions.create(model="stub", messages=messages, tools=TOOLS, max_tokens=512)
        seconds.append(time.perf_counter() - begun)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            text = f"noted {arguments.get('text')}" if call.function.name == "note" else "see the picture"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if call.function.name == "look":
                messages.append({"role": "user", "content": [PICTURES[shown]]})
                shown += 1
    client.close()
    return seconds


async def run_agents(gateway: Gateway, names: Sequence[str]) -> None:
    """Run short sessions without pictures, all at once."""
    urls = [await asyncio.to_thread(gateway.url, name) for name in names]
    # Servers close a connection that was idle for 5 s, and a request that meets the closing is lost.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as client:

        async def agent(url: str, key: str) -> None:
            messages: list[Any] = list(QUESTION)
            for _ in range(CALLS):
                body = {"model": "stub", "messages": messages, "tools": TOOLS, "max_tokens": 512}
                headers = {"authorization": f"Bearer {key}"}
                async with client.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
                    answer = await reply.json()
                    if reply.status != 200:
                        raise RuntimeError(f"status {reply.status}: {str(answer)[:300]}")
                message = answer["choices"][0]["message"]
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": "noted"}
                    for call in message["tool_calls"]
                ]
                messages = [*messages, message, *results]

        agents = [agent(url, gateway.key(name)) for url, name in zip(urls, names, strict=True)]
        ends = await asyncio.gather(*agents, return_exceptions=True)
    if errors := [end for end in ends if isinstance(end, BaseException)]:
        first = f"{type(errors[0]).__name__}: {errors[0]}"
        raise RuntimeError(f"{len(errors)} of {len(names)} sessions failed, the first: {first}")


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1) + 0.5)]


def measure_sessions(gateways: Mapping[str, Gateway], stub: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Run the agent at each gateway, in turns."""
    calls: dict[str, list[list[float]]] = {name: [] for name in gateways}
    outside: dict[str, list[list[float]]] = {name: [] for name in gateways}
    found: dict[str, dict[str, Any]] = {name: {} for name in gateways}
    for round_number in range(-1, rounds):  # the first one warms up
        for name, gateway in gateways.items():
            session = f"session-{round_number + 1}"
            fetch(f"{stub}/calls")
            used = gateway.seconds()
            seconds = run_agent(gateway.url(session), gateway.key(session))
            used = gateway.seconds() - used
            seen = json.loads(fetch(f"{stub}/calls"))
            if len(seen) != TURNS:
                raise SystemExit(f"{name}: the server saw {len(seen)} calls")
            if round_number < 0:
                continue
            calls[name].append(seconds)
            outside[name].append([total - each["seconds"] for total, each in zip(seconds, seen, strict=True)])
            row = found[name]
            row.setdefault("processor_s", []).append(used / TURNS)
            row["broken"] = sum(not each["extends"] for each in seen[1:])
            if round_number == 0 and (left := gateway.left(session)) is not None:
                row |= {"tokens": left.tokens, "bytes": left.nbytes}
    medians = {
        name: [statistics.median(each) for each in zip(*outside[name], strict=True)] for name in gateways
    }
    for name, row in found.items():
        row["call_s"] = quantiles([statistics.median(each) for each in zip(*calls[name], strict=True)])
        added = [own - base for own, base in zip(medians[name], medians["direct"], strict=True)]
        row["added_s"] = quantiles(added)
        row["processor_s"] = statistics.median(row["processor_s"])
    return found


def lost_calls(gateway: Gateway, names: Sequence[str]) -> dict[str, int]:
    """Return the number of calls that the records of sessions lack. Some gateways record a while later."""
    lost = dict.fromkeys(names, CALLS)
    for wait in (0, 1, 2, 4, 8):
        time.sleep(wait)
        lost = {name: CALLS - gateway.recorded(name) for name in lost}
        lost = {name: count for name, count in lost.items() if count > 0}
        if not lost:
            break
    return lost


def measure_load(gateways: Mapping[str, Gateway], sessions: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure calls for each second of processor time, and count calls that were not recorded."""
    found: dict[str, dict[str, Any]] = {name: {} for name in gateways if name != "direct"}
    for round_number in range(rounds):
        for name, row in found.items():
            if "load_error" in row:
                continue
            gateway = gateways[name]
            names = [f"load-{round_number}-{number}" for number in range(sessions)]
            used = gateway.seconds()
            try:
                asyncio.run(run_agents(gateway, names))
            except RuntimeError as error:  # a peer's failure is a result
                row["load_error"] = str(error)
                continue
            row.setdefault("calls_a_core", []).append(sessions * CALLS / (gateway.seconds() - used))
            row.setdefault("lost", []).append(sum(lost_calls(gateway, names).values()))
    for row in found.values():
        row |= {name: statistics.median(row[name]) for name in ("calls_a_core", "lost") if name in row}
    return found


async def grow(gateway: Gateway, numbers: Sequence[int]) -> None:
    """Run sessions with pictures, which stay open."""
    places = asyncio.Semaphore(MEMORY_AT_ONCE)
    async with aiohttp.ClientSession() as client:

        async def agent(number: int) -> None:
            url = f"{gateway.url(f'grown-{number}')}/chat/completions"
            messages: list[Any] = []
            for turn in range(MEMORY_CALLS):
                content: Any = f"turn {turn} of {number}: what is there?"
                if turn % 2 == 0:
                    shown = picture(MEMORY_CALLS * number + turn, 320, 240)
                    content = [shown, {"type": "text", "text": content}]
                messages.append({"role": "user", "content": content})
                body = {"model": "stub", "messages": messages, "tools": TOOLS, "max_tokens": 512}
                async with client.post(url, json=body) as reply:
                    messages.append((await reply.json())["choices"][0]["message"])
                    reply.raise_for_status()

        async def limited(number: int) -> None:
            async with places:
                await agent(number)

        await asyncio.gather(*map(limited, numbers))


def measure_memory(gateway: Ours, sessions: int) -> str:
    """Return the growth of resident memory with sessions, in words."""

    def counted() -> int:
        listed = json.loads(fetch(f"{gateway.root}/sessions"))["data"]
        return sum(each["bytes"] for each in listed)

    asyncio.run(grow(gateway, range(MEMORY_AT_ONCE)))  # what the first calls load is not counted
    bytes_before, before = counted(), gateway.resident()
    asyncio.run(grow(gateway, range(MEMORY_AT_ONCE, MEMORY_AT_ONCE + sessions)))
    time.sleep(5)  # idle sessions drop the buffers that make a next call cheap
    distinct, grown = counted() - bytes_before, gateway.resident() - before
    return f"{sessions} sessions: {grown / 1e6:.0f} MB for {distinct / 1e6:.0f} MB, {grown / distinct:.3f}"


def shown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out the table."""
    rows = []
    for name, row in found.items():
        if "error" in row:
            rows.append([name, *"-" * 9, row["error"][:60]])
            continue
        load = f"{row['calls_a_core']:.0f}" if "calls_a_core" in row else row.get("load_error", "-")[:60]
        rows.append(
            [
                name,
                f"{row['tokens']:,}" if "tokens" in row else "-",
                f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else "-",
                str(row["broken"]),
                *(f"{1e3 * each:.1f}" for each in (*row["call_s"], *row["added_s"])),
                f"{1e3 * row['processor_s']:.1f}",
                load,
                f"{row['lost']:.0f}" if "lost" in row else "-",
            ]
        )
    headings = ["gateway", "tokens", "MB", "broken", "call p50", "p99", "added p50", "p99", "processor"]
    return table([*headings, "calls a core", "lost"], rows)


TITLES = {
    "mmrender": "mmrender",
    "verifiers": "verifiers 0.4.0, interception",
    "rllm": "rllm-model-gateway 0.1.0",
    "agl": "Agent Lightning 0.3.0, proxy",
}
COLUMNS = ("gateway", "tokens", "MB", "broken calls", "added p50, p99", "processor time of a call")
LOAD_COLUMNS = ("calls a core", "lost")


def guide(found: Mapping[str, Mapping[str, Any]], rounds: int, loads: int, sessions: int) -> str:
    """Return the table of docs/gateway.md, and the lines under it that say how it was measured."""
    headings = (*COLUMNS, *LOAD_COLUMNS)
    rows = [" | ".join(headings), " | ".join(["---", *["--:"] * (len(headings) - 1)])]
    cores = len(os.sched_getaffinity(0))
    notes = [
        f"Medians of {rounds} rounds of the session, and of {loads} of the load, on {cores} cores.",
        "Added: the part of a call outside the server, without the same part of a call without a gateway.",
        f"Calls a core: {CALLS * sessions:,} short calls of {sessions} sessions at once, for each second of "
        "processor time of the gateway. Lost: calls of them that were answered and are not in its records.",
    ]
    for name, title in TITLES.items():
        row = found[name]
        if problem := row.get("error") or row.get("load_error"):
            notes.append(f"{title}: {problem}.")
        if "error" in row:
            continue
        p50, p99 = (f"{1e3 * each:.0f}" for each in row["added_s"])
        cells = [title, f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.1f}", f"{row['broken']} of {TURNS - 1}"]
        cells += [f"{p50}, {p99} ms", f"{1e3 * row['processor_s']:.1f} ms"]
        cells += [f"{row[key]:,.0f}" if key in row else "-" for key in ("calls_a_core", "lost")]
        rows.append(" | ".join(cells))
    lines = [line for note in notes for line in textwrap.wrap(f"- {note}", 140, subsequent_indent="  ")]
    return "\n".join([*(f"| {row} |" for row in rows), "", *lines, ""])


def write_guide(path: Path, text: str) -> None:
    """Replace the table in the guide, and the lines under it up to those about tokens."""
    page = path.read_text()
    start, stop = page.index(f"| {COLUMNS[0]} | {COLUMNS[1]} |"), page.index("- Tokens are of the training")
    path.write_text(page[:start] + text + page[stop:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="model directory; default: the shared one, or a tiny one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=int, default=3, help="rounds of the sessions at once")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--venvs", type=Path, help="folder with a virtual environment for each peer")
    parser.add_argument("--memory", type=int, metavar="SESSIONS", help="measure the memory of sessions alone")
    parser.add_argument("--only", nargs="*", help="names of gateways")
    parser.add_argument("--guide", type=Path, help="write the table into this page, docs/gateway.md")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds, loads = (1, 1) if options.quick else (options.rounds, options.loads)
    sessions = 32 if options.quick else SESSIONS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = options.model or str(SHARED_MODEL)
        if not Path(model).is_dir():
            model = str(folder / "tiny")
            build_tiny_model(folder / "tiny", weights=False)
        command = [sys.executable, str(ROOT / "benchmarks" / "gateway_stub.py"), model]
        stub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert stub.stdout is not None
        server = f"http://127.0.0.1:{int(stub.stdout.readline())}"
        gateways: dict[str, Gateway] = {}
        errors: dict[str, dict[str, Any]] = {}
        try:
            for make in GATEWAYS:
                if options.only and make.name not in ("direct", *options.only):
                    continue
                if options.memory and make is not Ours:
                    continue
                gateway = make(server, model, folder / make.name, options.venvs)
                try:
                    gateway.start()
                    gateways[make.name] = gateway
                except RuntimeError as error:
                    errors[make.name] = {"error": str(error)}
            if options.memory:
                ours = gateways["mmrender"]
                assert isinstance(ours, Ours)
                print(measure_memory(ours, options.memory))
                return
            found = measure_sessions(gateways, server, rounds)
            for name, load in measure_load(gateways, sessions, loads).items():
                found[name] |= load
        finally:
            for gateway in gateways.values():
                gateway.stop()
            stub.communicate()
    found |= errors
    print(shown(found))
    print("MB of 1e6 bytes. Times in ms: wall time, and processor time of the gateway for a call")
    if options.guide:
        write_guide(options.guide, guide(found, rounds, loads, sessions))
    if options.json:
        packages = ("openai", "aiohttp", "starlette", "uvicorn")
        options.json.write_text(
            json.dumps({"machine": machine(packages), "gateways": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
