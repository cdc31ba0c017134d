"""Record harnesses: `python tests/harnesses/record.py HARNESSES FOLDER [NAME...]` writes `FOLDER/NAME.jsonl`.

Each line is a request and its reply. Texts of the harnesses themselves are replaced by their length and digest,
tools by their names and pictures by a digest, so that equal texts stay equal and nothing of theirs is copied.
"""

import dataclasses
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harnesses import runs
from harnesses.checks import check_ids, count
from mmrender import Renderer
from mmrender.gateway.call import ProtocolName
from mmrender.testing.agents.recordings import PATHS
from mmrender.testing.agents.replies import read_answer

SHARED = Path(__file__).resolve().parents[3] / "shared"
_MAX_TEXT = 100
"""Characters of a text that is kept as it is."""
_MAX_OUTPUT = 400
"""Characters of the output of a command of the script that is kept."""
_KEPT_HEADERS = re.compile(
    r"x-(?!api-key|stainless)[\w-]*(session|agent|thread|window|turn)[\w-]*|session-id|thread-id|user-agent"
    r"|anthropic-version|anthropic-beta|idempotency-key|content-type"
)
_PICTURE = re.compile(r"^data:image/[\w.+-]+;base64,")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class Anonymiser:
    """Replaces texts of others.

    Args:
        own: Texts of the script and the task, which stay.
        paths: Folders, and their names in the recording.
    """

    def __init__(self, own: str, paths: Mapping[str, str]) -> None:
        self._own = own
        self._paths = paths

    def value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value without texts of others."""
        if isinstance(value, Mapping):
            if key == "response_format":
                return {"type": value["type"]}
            if value.get("type") == "base64" and "data" in value:
                return {**value, "data": f"IMAGE {_digest(value['data'])}"}
            return {name: self.value(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            if key == "tools":
                return [_tool_name(tool) for tool in value]
            return [self.value(entry) for entry in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Return a text, or its length and digest."""
        for path, name in self._paths.items():
            text = text.replace(path, name)
        if _PICTURE.match(text):
            return f"IMAGE {_digest(text)}"
        is_ours = text in self._own or ("step-" in text and len(text) <= _MAX_OUTPUT)
        if len(text) <= _MAX_TEXT or is_ours:
            return text
        return f"TEXT of {len(text)} characters, sha {_digest(text)}"


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name") or tool.get("type"))


class Recorder:
    """An ASGI application around another one that keeps requests and replies."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.calls: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or "/v1/" not in scope["path"]:
            await self._app(scope, receive, send)
            return
        body, reply, status = bytearray(), bytearray(), 0
        record: dict[str, Any] = {"n": len(self.calls)}
        self.calls.append(record)

        async def hear() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def speak(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            reply.extend(message.get("body", b""))
            await send(message)

        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            await self._app(scope, hear, speak)
        finally:
            query = scope["query_string"].decode()
            path = scope["path"].partition("/v1/")[2]
            record |= {
                "method": scope["method"],
                "path": f"/v1/{path}" + (f"?{query}" if query else ""),
                "headers": {name: value for name, value in headers.items() if _KEPT_HEADERS.fullmatch(name)},
                "body": json.loads(body) if body else None,
                "status": status,
                "reply": bytes(reply),
            }


def _protocol(path: str) -> ProtocolName:
    return next(protocol for protocol, route in PATHS.items() if path.partition("?")[0] == route)


def record(name: str, renderer: Renderer, tools: Path, out: Path) -> str:
    """Record one harness and return a line about its calls."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recorder: list[Recorder] = []

        def wrap(app: Any) -> Any:
            recorder.append(Recorder(app))
            return recorder[0]

        trajectory, model, _ = runs.play(name, renderer, folder, tools, wrap=wrap)
        check_ids(trajectory, model.exchanges)
        by_answer = {step.extra["gateway"]["response"]: step for step in trajectory.steps}
        paths = {
            str(folder / "task"): "/task",
            str(folder / "home"): "/home/agent",
            str(tools): "/opt/agents",
        }
        own = json.dumps(list(model.script), ensure_ascii=False) + runs.TASK
        clean = Anonymiser(own, paths)
        lines = []
        for call in recorder[0].calls:
            ids = [made for made in by_answer if made.encode() in call["reply"]]
            said = renderer.decode(by_answer[ids[0]].completion_ids[:-1]) if ids else None
            reply = None
            if said is not None:
                streamed = bool(call["body"].get("stream"))
                answer = read_answer(_protocol(call["path"]), call["reply"], streamed=streamed)
                made = [dataclasses.asdict(each) for each in answer.calls]
                reply = {"text": clean.text(said), "content": clean.text(answer.content), "calls": made}
            lines.append({**call, "body": clean.value(call["body"]), "reply": reply})
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    for path, other in paths.items():
        text = text.replace(path, other)
    (out / f"{name}.jsonl").write_text(text)
    counted = count(trajectory)
    why = "; ".join(counted.rendered[1:])
    return (
        f"{name:20} calls {counted.calls:3} bridged {counted.bridged:3} tree {counted.tree_tokens:7} "
        f"calls as samples {counted.call_tokens:8} images {counted.images} {dict(counted.kinds)} {why}"
    )


if __name__ == "__main__":
    tools, out, *names = sys.argv[1:]
    shared = Renderer.from_pretrained(SHARED / "models" / "qwen3_vl")
    for each in names or runs.HARNESSES:
        print(record(each, shared, Path(tools), Path(out)), flush=True)
