r"""Gateways that record agents: what a session leaves for the trainer, and the cost of a call.

    python benchmarks/bench_gateway.py [MODEL_DIR] [--rounds N] [--quick] [--venvs FOLDER] [--json FILE]

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
  without pictures.
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
from gateway_contenders import GATEWAYS, TURNS, Gateway, fetch  # noqa: E402
from gateway_stub import TOOLS  # noqa: E402
from measure import machine, table  # noqa: E402
from render_cases import make_image  # noqa: E402

from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402

SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
SESSIONS = 256
CALLS = 8


def pictures() -> list[Any]:
    """Return the parts of ten pictures."""
    parts = []
    for seed in range(TURNS // 3):
        data = io.BytesIO()
        make_image(640, 480, seed).save(data, "JPEG", quality=90)
        url = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


PICTURES = pictures()
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


async def run_agents(gateway: Gateway, sessions: int, round_number: int) -> None:
    """Run short sessions without pictures, all at once."""
    names = [f"load-{round_number}-{number}" for number in range(sessions)]
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

        await asyncio.gather(*(agent(url, gateway.key(name)) for url, name in zip(urls, names, strict=True)))


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


def measure_load(gateways: Mapping[str, Gateway], sessions: int, rounds: int) -> dict[str, float | str]:
    """Return calls for each second of processor time."""
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for round_number in range(rounds):
        for name, gateway in gateways.items():
            if name == "direct" or name in failed:
                continue
            used = gateway.seconds()
            try:
                asyncio.run(run_agents(gateway, sessions, round_number))
            except Exception as error:  # noqa: BLE001 - a peer's failure is a result
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            found.setdefault(name, []).append(sessions * CALLS / (gateway.seconds() - used))
    return failed | {name: statistics.median(each) for name, each in found.items()}


def shown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out the table."""
    rows = []
    for name, row in found.items():
        if "error" in row:
            rows.append([name, *"-" * 8, row["error"][:60]])
            continue
        load = row.get("calls_a_core")
        rows.append(
            [
                name,
                f"{row['tokens']:,}" if "tokens" in row else "-",
                f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else "-",
                str(row["broken"]),
                *(f"{1e3 * each:.1f}" for each in (*row["call_s"], *row["added_s"])),
                f"{1e3 * row['processor_s']:.1f}",
                f"{load:.0f}" if isinstance(load, float) else str(load or "-")[:60],
            ]
        )
    headings = ["gateway", "tokens", "MB", "broken", "call p50", "p99", "added p50", "p99", "processor"]
    return table([*headings, "calls a core"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="model directory; default: the shared one, or a tiny one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=int, default=3, help="rounds of the sessions at once")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--venvs", type=Path, help="folder with a virtual environment for each peer")
    parser.add_argument("--only", nargs="*", help="names of gateways")
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
                gateway = make(server, model, folder / make.name, options.venvs)
                try:
                    gateway.start()
                    gateways[make.name] = gateway
                except RuntimeError as error:
                    errors[make.name] = {"error": str(error)}
            found = measure_sessions(gateways, server, rounds)
            for name, load in measure_load(gateways, sessions, loads).items():
                found[name]["calls_a_core"] = load
        finally:
            for gateway in gateways.values():
                gateway.stop()
            stub.communicate()
    found |= errors
    print(shown(found))
    print(
        "MB of 1e6 bytes, times in ms of wall time, processor in ms of processor time of the gateway a call"
    )
    if options.json:
        packages = ("openai", "aiohttp", "starlette", "uvicorn")
        options.json.write_text(
            json.dumps({"machine": machine(packages), "gateways": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
