"""Real harnesses, unmodified, each pointed at a gateway: commands, scripts of answers, and the task's files.

A script's answer N mentions `step-N`; see `scripted_model.py`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from harnesses.scripted_model import ScriptedModel, call_text
from mmrender import Renderer
from mmrender.gateway import Gateway
from mmrender.trajectory.tree import Trajectory

AGENTS = Path(__file__).parent / "agents"
TASK = "Say how many legs the cow has. Look at all files, the picture too."


@dataclass(frozen=True)
class Place:
    """Where a harness runs, and the gateway it calls.

    Attributes:
        url: Base URL of the session, without `/v1`.
        key: The session's key.
        folder: The task's folder.
        home: Home directory of the harness.
        tools: Folder of installed harnesses.
    """

    url: str
    key: str
    folder: Path
    home: Path
    tools: Path


@dataclass(frozen=True)
class Harness:
    """One harness.

    Attributes:
        package: Package and version.
        command: Program and arguments, from the folder of installed harnesses.
        script: Answers of the model.
        environment: Environment variables.
        files: Files in its home directory.
        has_tools: Whether its main prompts offer tools.
    """

    package: str
    command: Callable[[Place], Sequence[str]]
    script: Callable[[Place], Sequence[str]]
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    files: Callable[[Place], Mapping[str, str]] = lambda place: {}
    has_tools: bool = True


def task_folder(folder: Path) -> Path:
    """Write the task's files: notes, numbers, and a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.txt").write_text("The cow has four legs.\nThe café opens at nine.\n")
    (folder / "numbers.csv").write_text("name,legs\ncow,4\nbird,2\nspider,8\n")
    Image.new("RGB", (224, 160), (200, 30, 30)).save(folder / "pic.png")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def shell_script(tool: str, argument: str, picture: str, more: Mapping[str, Any] | None = None) -> list[str]:
    """Answers that use a shell tool, twice with JSON as no template writes it, and then see a picture."""
    rest = dict(more or {})

    def run(command: str, before: str = "") -> str:
        return before + call_text(tool, {argument: command, **rest})

    odd = "".join(f', "{name}":   {json.dumps(value)}' for name, value in rest.items())
    return [
        run("echo step-1; ls", "I look around.\n"),
        call_text(tool, f'{{"{argument}":  "echo step-2 caf\\u00e9; cat notes.txt"{odd}}}'),
        run("echo step-3; wc -l numbers.csv") + "\n" + run("echo step-3 too; head -2 numbers.csv"),
        run("echo step-4; grep cow notes.txt", "  Next.  \n"),
        call_text(tool, f'{{"{argument}":  "echo step-5 caf\\u00e9; sort numbers.csv"{odd}}}'),
        f"step-6: I look at the picture.\n{picture}",
        "step-7: The cow has four legs, and the picture is red.",
    ]


def notes_script(place: Place) -> list[str]:
    """Answers that take notes, twice with JSON as no template writes it, and look at a picture."""
    return [
        "I look.\n" + call_text("note", {"text": "step-1"}),
        call_text("note", '{"text":  "step-2 caf\\u00e9"}'),
        call_text("note", {"text": "step-3"}) + "\n" + call_text("look", {"at": "step-3 legs"}),
        "  Next.  \n" + call_text("note", {"text": "step-4"}),
        call_text("look", '{"at":  "step-5 caf\\u00e9"}'),
        call_text("note", {"text": "step-6"}),
        "step-7: four legs",
    ]


def _npm(name: str, *arguments: str) -> Callable[[Place], Sequence[str]]:
    return lambda place: [str(place.tools / "npm/node_modules/.bin" / name), *arguments]


def _agent(venv: str, script: str, *arguments: str, root: str = "/v1") -> Callable[[Place], Sequence[str]]:
    def command(place: Place) -> Sequence[str]:
        python = place.tools / venv / "bin/python"
        python = python if python.exists() else Path(sys.executable)
        return [str(python), str(AGENTS / script), place.url + root, place.key, str(place.folder), *arguments]

    return command


def _claude(place: Place) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": place.key,
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }


def _codex(place: Place) -> Mapping[str, str]:
    config = f"""
model = "any"
model_provider = "gateway"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.gateway]
name = "gateway"
base_url = "{place.url}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""
    return {".codex/config.toml": config}


def _opencode(place: Place) -> Mapping[str, str]:
    model = {"name": "any", "limit": {"context": 200000, "output": 8000}, "attachment": True}
    model["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gateway",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {"any": model},
    }
    config = {"provider": {"gateway": provider}, "permission": "allow", "autoupdate": False}
    return {".config/opencode/opencode.json": json.dumps(config)}


def _picture(tool: str, argument: str) -> Callable[[Place], str]:
    return lambda place: call_text(tool, {argument: str(place.folder / "pic.png")})


def _browser_script(place: Place) -> list[str]:
    def answer(number: int, action: Mapping[str, Any]) -> str:
        said = {
            "thinking": f"step-{number}",
            "evaluation_previous_goal": "ok",
            "memory": f"step-{number}",
            "next_goal": "go on",
            "action": [action],
        }
        return json.dumps(said)

    actions: list[Mapping[str, Any]] = [
        {"navigate": {"url": f"http://127.0.0.1:{BROWSER_PORT}/", "new_tab": False}},
        {"scroll": {"down": True, "pages": 1.0}},
        {"navigate": {"url": f"http://127.0.0.1:{BROWSER_PORT}/more.html", "new_tab": False}},
        {"scroll": {"down": True, "pages": 1.0}},
        {"wait": {"seconds": 1}},
        {"done": {"text": "four legs", "success": True, "files_to_display": []}},
    ]
    return [answer(number, action) for number, action in enumerate(actions, 1)]


BROWSER_PORT = 9399

HARNESSES: Mapping[str, Harness] = {
    "openai": Harness("openai 3.54.0", _agent("py", "openai_client.py"), notes_script),
    "agents-chat": Harness("openai-agents 0.24.0", _agent("py", "openai_agents.py", "chat"), notes_script),
    "agents-responses": Harness(
        "openai-agents 0.24.0", _agent("py", "openai_agents.py", "responses"), notes_script
    ),
    "agents-stateful": Harness(
        "openai-agents 0.24.0", _agent("py", "openai_agents.py", "responses", "stateful"), notes_script
    ),
    "langchain-chat": Harness("langchain 1.4.7", _agent("py", "langchain_agent.py", "chat"), notes_script),
    "langchain-responses": Harness(
        "langchain 1.4.7", _agent("py", "langchain_agent.py", "responses"), notes_script
    ),
    "pydantic-chat": Harness("pydantic-ai 2.68.0", _agent("py", "pydantic_agent.py", "chat"), notes_script),
    "pydantic-responses": Harness(
        "pydantic-ai 2.68.0", _agent("py", "pydantic_agent.py", "responses"), notes_script
    ),
    "pydantic-messages": Harness(
        "pydantic-ai 2.68.0", _agent("py", "pydantic_agent.py", "messages"), notes_script
    ),
    "smolagents": Harness(
        "smolagents 1.26.0",
        _agent("py", "smol_agent.py"),
        lambda place: [*notes_script(place)[:6], call_text("final_answer", {"answer": "step-7: four legs"})],
    ),
    "mini-swe-agent": Harness(
        "mini-swe-agent 2.4.6",
        _agent("mini", "mini_agent.py"),
        lambda place: [
            *shell_script("bash", "command", call_text("bash", {"command": "echo step-6; file pic.png"}))[:6],
            call_text("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo step-7: four"}),
        ],
        environment=lambda place: {"MSWEA_GLOBAL_CONFIG_DIR": str(place.home / "mini")},
    ),
    "browser-use": Harness(
        "browser-use 0.13.14",
        lambda place: [
            *_agent("browser", "browser_agent.py")(place),
            "/usr/bin/chromium",
            str(BROWSER_PORT),
        ],
        _browser_script,
        has_tools=False,
    ),
    "claude-code": Harness(
        "@anthropic-ai/claude-code 2.1.197",
        lambda place: [
            *_npm("claude")(place),
            "-p",
            TASK,
            "--model",
            "claude-sonnet-4-5",
            "--allowedTools",
            "Bash",
            "Read",
        ],
        lambda place: shell_script(
            "Bash", "command", _picture("Read", "file_path")(place), {"description": "Runs a step"}
        ),
        environment=_claude,
    ),
    "codex": Harness(
        "@openai/codex 0.169.0",
        _npm("codex", "exec", "--skip-git-repo-check", TASK),
        lambda place: shell_script("exec_command", "cmd", _picture("view_image", "path")(place)),
        environment=lambda place: {"GATEWAY_KEY": place.key},
        files=_codex,
    ),
    "opencode": Harness(
        "opencode-ai 1.18.33",
        _npm("opencode", "run", "-m", "gateway/any", TASK),
        lambda place: shell_script(
            "bash", "command", _picture("read", "filePath")(place), {"description": "Runs a step"}
        ),
        files=_opencode,
    ),
    "qwen-code": Harness(
        "@qwen-code/qwen-code 0.15.10",
        _npm("qwen", "-y", "-p", TASK),
        lambda place: shell_script(
            "run_shell_command",
            "command",
            _picture("read_file", "file_path")(place),
            {"description": "Runs a step", "is_background": False},
        ),
        environment=lambda place: {
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "OPENAI_API_KEY": place.key,
            "OPENAI_MODEL": "any",
        },
    ),
}


def run(name: str, place: Place, *, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a harness to its end, in its own home directory and without other variables than it needs."""
    harness = HARNESSES[name]
    task_folder(place.folder)
    place.home.mkdir(parents=True, exist_ok=True)
    for path, text in harness.files(place).items():
        (place.home / path).parent.mkdir(parents=True, exist_ok=True)
        (place.home / path).write_text(text)
    kept = {
        variable: os.environ[variable] for variable in ("PATH", "LANG", "TMPDIR") if variable in os.environ
    }
    environment = {
        **kept,
        "HOME": str(place.home),
        "NO_PROXY": "127.0.0.1,localhost",
        "CI": "1",
        **harness.environment(place),
    }
    return subprocess.run(
        list(harness.command(place)),
        cwd=place.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def play(
    name: str, renderer: Renderer, folder: Path, tools: Path, *, wrap: Callable[[Any], Any] = lambda app: app
) -> tuple[Trajectory, ScriptedModel, str]:
    """Run a harness against a gateway of its own. Return its session, the model, and the harness's output.

    `wrap` may put another application around the gateway's.
    """
    harness = HARNESSES[name]
    place = Place("", "", folder / "task", folder / "home", tools)
    model = ScriptedModel(renderer, harness.script(place), tool_marker="<tools>" if harness.has_tools else "")
    gateway = Gateway(model, renderer, model="any", out=folder / "rollouts.mmr")
    gateway.app = wrap(gateway.app)
    url = gateway.start()
    try:
        session = gateway.run(gateway.open_session(name))
        place = replace(place, url=f"{url}/s/{name}", key=session.api_key)
        done = run(name, place)
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return gateway.run(session.finish()), model, done.stdout
    finally:
        gateway.stop()
