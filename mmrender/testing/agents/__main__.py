"""Play recorded agents against a gateway.

The program is the inference server behind the gateway, and the agents in front of it. Point the gateway at
the address that it prints, and name the gateway's address for sessions, without `/v1`:

    python -m mmrender.testing.agents 'http://127.0.0.1:8080/s/{session}'

It counts the calls of each recording: answered, continued (the prompt at the server begins with the
prompt and answer of the call whose answer is repeated), new (no answer is repeated), broken, and wrong (the
agent got another answer than was sampled). `tokens` are left for the trainer if calls that continue one
another are one sample, `separate` if each call is one. It exits with 0 if each call was answered rightly and
no prompt broke, else with 1, and with 2 if it could not run. `--json FILE` has all results of each call.
"""

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
from yarl import URL

from mmrender._version import __version__
from mmrender.renderer import Renderer
from mmrender.testing.agents.plays import HTTPSender, PlayedRecording, ScriptedUpstream, play
from mmrender.testing.agents.recordings import load_recording, recording_names
from mmrender.testing.tiny_model import build_tiny_model

_LOOK_AGAIN: Final = 0.2
"""Seconds between looks whether the gateway listens."""
_MAX_PROBLEMS: Final = 3
"""Lines about the problems of one recording."""
_COLUMNS: Final[Mapping[str, Callable[[PlayedRecording], int]]] = {
    "calls": lambda played: len(played.calls),
    "answered": lambda played: sum(call.error is None for call in played.calls),
    "continued": lambda played: sum(call.is_continued for call in played.calls),
    "new": lambda played: sum(call.repeats is None for call in played.calls),
    "broken": lambda played: sum(call.broken is not None for call in played.calls),
    "wrong": lambda played: sum(call.wrong is not None for call in played.calls),
    "tokens": lambda played: played.chained_tokens,
    "separate": lambda played: played.separate_tokens,
}
"""Counts of a recording, by their heading."""


async def play_all(
    gateway: str,
    renderer: Renderer,
    *,
    names: Sequence[str] | None = None,
    port: int = 0,
    key: str = "none",
    model: str | None = None,
    wait: float = 60.0,
    timeout: float = 60.0,
    say: Any = lambda line: None,
) -> list[PlayedRecording]:
    """Play recordings against a gateway, one after another.

    Args:
        gateway: Root URL of a session, without `/v1`. `{session}` becomes a new name for each recording.
        renderer: Model of the server behind the gateway.
        names: Names of recordings, by default all.
        port: Port of the server behind the gateway, on 127.0.0.1. 0 for any free one.
        key: API key. `{session}` is replaced, too.
        model: Model that requests name, by default the recorded names.
        wait: Seconds in which the gateway must listen.
        timeout: Seconds in which each call must be answered.
        say: Called with the address of the server, and with a line for each recording.

    Raises:
        OSError: The port is taken, or the gateway does not listen.
    """
    upstream = ScriptedUpstream(renderer)
    played = []
    async with upstream.serving(port) as url, aiohttp.ClientSession() as client:
        say(f"the server behind the gateway is {url}")
        await _listening(gateway, wait)
        for name in names or recording_names():
            session = f"{name}-{secrets.token_hex(4)}"
            root, own_key = (text.replace("{session}", session) for text in (gateway.rstrip("/"), key))
            send = HTTPSender(client, root, own_key, model, timeout)
            played.append(await play(name, load_recording(name), upstream, send))
            say(_row(name, [f"{count(played[-1]):,}" for count in _COLUMNS.values()]))
    return played


async def _listening(gateway: str, seconds: float) -> None:
    """Wait until the gateway takes connections."""
    url = URL(gateway.replace("{session}", "x"))
    end = time.monotonic() + seconds
    while True:
        try:
            _, writer = await asyncio.open_connection(url.host, url.port)
        except OSError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_LOOK_AGAIN)
        else:
            writer.close()
            return


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:20}" + "".join(f"{cell:>10}" for cell in cells)


def _problems(played: PlayedRecording) -> list[str]:
    """Return a line for each call that is not good, up to `_MAX_PROBLEMS`."""
    lines = []
    for call in played.calls:
        if call.error is not None:
            lines.append(f"{call.name}: status {call.status}: {' '.join(call.error.split())}")
        if call.wrong is not None:
            lines.append(f"{call.name}: {call.wrong}")
        if (broken := call.broken) is not None:
            part = "its answer" if broken.is_sampled else "its prompt"
            lines.append(
                f"{call.name}: breaks {call.repeats} at token {broken.at} of {broken.of}, in {part}: "
                f"expected {broken.expected!r}, got {broken.got!r}"
            )
    more = len(lines) - _MAX_PROBLEMS
    return lines if more <= 0 else [*lines[:_MAX_PROBLEMS], f"{played.name}: and {more} more"]


def _as_json(gateway: str, played: Sequence[PlayedRecording]) -> dict[str, Any]:
    recordings = [
        {
            **dataclasses.asdict(each),
            "separate_tokens": each.separate_tokens,
            "is_good": each.is_good,
            "calls": [
                {**dataclasses.asdict(call), "is_continued": call.is_continued, "is_good": call.is_good}
                for call in each.calls
            ],
        }
        for each in played
    ]
    return {"mmrender": __version__, "gateway": gateway, "recordings": recordings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Return its exit status."""
    parser = argparse.ArgumentParser(
        "python -m mmrender.testing.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("gateway", help="root URL of a session, without /v1, with {session} in it")
    parser.add_argument("--model", help="model directory, whose template has tools; default: a tiny one")
    parser.add_argument("--port", type=int, default=8001, help="port of the server behind the gateway")
    parser.add_argument("--only", nargs="+", choices=recording_names(), metavar="NAME", help="recordings")
    parser.add_argument("--key", default="none", help="API key, with {session} in it if sessions have keys")
    parser.add_argument("--name", help="model that requests name; default: the recorded names")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds until the gateway listens")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each call")
    parser.add_argument("--json", type=Path, help="file for all results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or build_tiny_model(Path(folder) / "tiny", weights=False)
        renderer = Renderer.from_pretrained(str(model), unprinted="allow")  # as servers do
        print(_row("recording", _COLUMNS))
        try:
            played = asyncio.run(
                play_all(
                    options.gateway,
                    renderer,
                    names=options.only,
                    port=options.port,
                    key=options.key,
                    model=options.name,
                    wait=options.wait,
                    timeout=options.timeout,
                    say=lambda line: print(line, flush=True),
                )
            )
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    for line in (line for each in played for line in _problems(each)):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(options.gateway, played), indent=1) + "\n")
    return 0 if all(each.is_good for each in played) else 1


if __name__ == "__main__":
    sys.exit(main())
