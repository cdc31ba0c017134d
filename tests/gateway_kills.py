"""A gateway that is killed at each point of a session, and agents that come back: `python gateway_kills.py [MODEL OUT]`.

This process holds the agents, which know every answer that they have received. It forks a gateway for them. The
gateway counts points: before and within each write to a file, before files are removed, in the engine, and
before, within and after each reply. At the point of its number it kills itself. The agents then start another and
repeat their last request, as real agents do. With `--random N` a timer kills N gateways instead. The last line is
the result as JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mmcodecs.files
from mmrender.gateway.gateway import Gateway
from mmrender.messages import Message
from mmrender.renderer import Renderer
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.trajectory.files import load_trajectories, received_ids
from session_cases import Script, ask, user

_real_writer = mmcodecs.files.RecordWriter.__init__
_real_unlink = Path.unlink


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Points:
    """Counts points, and ends the process at one of them."""

    end: int | None
    passed: int = 0

    def __call__(self, before_death: Any = None) -> None:
        self.passed += 1
        if self.passed == self.end:
            if before_death is not None:
                before_death()
            die()


class TornFile:
    """A file that may be written in part."""

    def __init__(self, file: Any, point: Points) -> None:
        self._file = file
        self._point = point

    def write(self, data: Any) -> int:
        def half() -> None:
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()

        self._point()
        self._point(half)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class DyingScript(Script):
    """An engine during whose answers the gateway may die."""

    point: Points

    def completion(self, request: Any, number: int) -> Any:
        self.point()
        # The answer depends on the prompt, so that repetitions can be told from turns.
        return super().completion(request, len(request.prompt_ids))


def serve(renderer: Any, out: Path, connection: socket.socket, end: int | None) -> None:
    """Be a gateway until killed or left: a line of JSON for each request and reply."""
    point = Points(end)

    def opened(self: Any, *arguments: Any, **options: Any) -> None:
        _real_writer(self, *arguments, **options)
        self._file = TornFile(self._file, point)

    def unlink(self: Path, missing_ok: bool = False) -> None:
        point()
        _real_unlink(self, missing_ok)

    mmcodecs.files.RecordWriter.__init__ = opened  # type: ignore[method-assign]
    Path.unlink = unlink  # type: ignore[method-assign]
    script = DyingScript(renderer)
    script.point = point

    async def reply(here: Gateway, request: dict[str, Any]) -> tuple[bytes, Any]:
        session = await here.session(request["session"], open=True) if request["do"] != "finish" else None
        if request["do"] == "ask":
            messages = [
                Message(role="assistant", content=each["said"]) if "said" in each else user(*each["user"])
                for each in request["messages"]
            ]
            assert session is not None
            pending = await session.begin(ask(*messages))
            [answer] = await pending.answers()
            return json.dumps({"id": answer.id, "content": answer.content}).encode(), pending
        try:
            await (await here.session(request["session"])).finish(reward=1.0)
        except Exception as error:  # a repeated request finds the session gone
            if type(error).__name__ != "SessionClosedError":
                raise
        return b'"finished"', None

    async def run() -> None:
        async with script.gateway(out) as here:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            while line := await reader.readline():
                text, pending = await reply(here, json.loads(line))
                point()

                def half(data: bytes = text) -> None:
                    os.write(connection.fileno(), data[: len(data) // 2])

                point(half)
                writer.write(text + b"\n")
                await writer.drain()
                point()
                if pending is not None:
                    pending.delivered()

    asyncio.run(run())


@dataclass
class Agents:
    """All agents of one run, and the gateway that they have at the moment."""

    renderer: Any
    out: Path
    ends: list[int | None]
    """The points at which gateways die, one after another. Later ones live."""
    kill_after: Any = None
    kills: int = 0
    child: int = 0
    stream: Any = None
    timer: threading.Timer | None = None
    received: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        end = self.ends.pop(0) if self.ends else None
        self.child = os.fork()
        if self.child == 0:
            ours.close()
            try:
                serve(self.renderer, self.out, theirs, end)
            finally:
                os._exit(0)
        theirs.close()
        self.stream = ours.makefile("rwb")
        ours.close()
        if self.kill_after is not None and (seconds := self.kill_after()) is not None:
            self.timer = threading.Timer(seconds, os.kill, (self.child, signal.SIGKILL))
            self.timer.start()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()
        with contextlib.suppress(BrokenPipeError):  # a request that was not sent
            self.stream.close()
        _, status = os.waitpid(self.child, 0)
        self.kills += os.WIFSIGNALED(status)

    def request(self, **request: Any) -> Any:
        """Send a request until a whole reply comes."""
        while True:
            try:
                self.stream.write(json.dumps(request).encode() + b"\n")
                self.stream.flush()
                line = self.stream.readline()
            except (BrokenPipeError, ConnectionResetError):
                line = b""
            if line.endswith(b"\n"):
                return json.loads(line)
            self.stop()
            self.start()

    def play(self, sessions: int, turns: int) -> None:
        """Let all agents take their turns, then finish them."""
        self.start()
        histories: dict[str, list[Any]] = {f"s{number}": [] for number in range(sessions)}
        for turn in range(turns):
            for name, history in histories.items():
                history.append({"user": [f"turn {turn} of {name}", *([turn] if turn % 2 == 0 else [])]})
                answer = self.request(do="ask", session=name, messages=history)
                self.received.setdefault(name, []).append(answer)
                history.append({"said": answer["content"]})
        for name in histories:
            self.request(do="finish", session=name)
        self.stop()

    def faults(self, turns: int) -> list[str]:
        """Compare the file with the answers that agents have received."""
        found = []
        trees = load_trajectories(self.out)
        if sorted(received_ids(self.out)) != sorted(self.received):
            found.append(f"sessions {received_ids(self.out)}")
        if left := os.listdir(f"{self.out}.open"):
            found.append(f"files of open sessions: {left}")
        for tree in trees:
            answers = self.received[tree.trajectory_id]
            recorded = [step.extra["gateway"]["response"] for step in tree.steps]
            if recorded != [answer["id"] for answer in answers] or len(answers) != turns:
                found.append(f"{tree.trajectory_id}: answers {answers}, steps {recorded}")
            if any(step.extra["gateway"].get("undelivered") for step in tree.steps[:-1]):
                found.append(f"{tree.trajectory_id}: a received answer is marked as undelivered")
            if (tree.error, tree.reward, len(tree.branches())) != (None, 1.0, 1):
                found.append(f"{tree.trajectory_id}: {tree.error}, {tree.reward}, {tree.branches()}")
            for step, after in zip(tree.steps, tree.steps[1:], strict=False):
                if after.parent is not step or after.keep != len(step):
                    found.append(
                        f"{tree.trajectory_id}: step {after.index} does not extend step {step.index}"
                    )
        return found


def warm(renderer: Any) -> None:
    """Render and bridge once, so that gateways need not probe the template."""
    opening = [user("turn 0 of s0", 0)]
    prompt = renderer.render(opening, add_generation_prompt=True)
    answer = [*renderer.tokenizer.encode("answer"), *renderer.get_stop_token_ids()[:1]]
    renderer.bridge_to_next_turn(
        prompt.token_ids, answer, [user("turn 1 of s0")], previous_multi_modal_data=prompt.multi_modal_data
    )
    renderer.parse_response(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="directory of the model; by default a tiny one is built")
    parser.add_argument("out", nargs="?", type=Path, help="folder of files; by default a temporary one")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="how many points lie between two that are tried")
    parser.add_argument("--random", type=int, help="number of gateways to kill by a timer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mmrender-kills-") as folder:
        faults = kill_gateways(options, options.out or Path(folder))
    sys.exit(bool(faults))


def kill_gateways(options: argparse.Namespace, out: Path) -> list[str]:
    """Play runs, print the result, and return the faults."""
    model = options.model or build_tiny_model(out / "model")
    renderer = Renderer.from_pretrained(model, image_backend="pil")
    warm(renderer)
    faults: list[str] = []
    kills = runs = 0

    def run(**how: Any) -> Agents:
        nonlocal kills, runs
        agents = Agents(renderer, out / f"run{runs}.mmr", **how)
        agents.play(options.sessions, options.turns)
        faults.extend(f"run {runs}: {fault}" for fault in agents.faults(options.turns))
        kills, runs = kills + agents.kills, runs + 1
        return agents

    if options.random is None:
        end = 1
        while run(ends=[end, end // 2]).kills:
            end += options.every
    else:
        chance = random.Random(0)
        while kills < options.random:
            run(ends=[], kill_after=lambda: chance.uniform(0.0, 0.5))
    print(json.dumps({"runs": runs, "kills": kills, "faults": faults}))
    return faults


if __name__ == "__main__":
    main()
