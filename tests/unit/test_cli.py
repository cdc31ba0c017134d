"""The command line: what it prints, and how it fails."""

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

import tree_cases
from doc_pages import ROOT
from kit import assistant, raised, user
from mmrender import Trajectory, __version__
from mmrender.__main__ import main
from mmrender.cli import overview
from mmrender.cli.commands import app
from mmrender.renderer import Renderer
from mmrender.testing import parity as parity_module
from mmrender.testing import reference
from mmrender.testing.reports import ParityReport, parity_table
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory import save_trajectories
from remote_models import tiles

MESSAGES = [user("What?", "red.png"), assistant("Red.")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a picture in it and a conversation about it."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (192, 128), "red").save("red.png")
    Path("chat.json").write_text(json.dumps(MESSAGES))
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mmrender", *map(str, arguments)])
        exited = raised(SystemExit, main)
        captured = capsys.readouterr()
        return exited.code, captured.out, captured.err

    return run


def test_remote_code_runs_if_the_command_says_so(run, folder):
    pytest.importorskip("transformers")
    command = ("render", "chat.json", "-m", tiles(folder / "tiles"), "--image-backend", "pil")
    assert [run(*command)[0], run("--trust-remote-code", *command)[0], run(*command)[0]] == [2, 0, 2]


def test_render_prints_what_the_library_gives(run, folder, tiny_model, renderer):
    status, out, _ = run("render", "chat.json", "-m", tiny_model, "--image-backend", "pil")
    document = json.loads(out)
    shown = {"role": "user", "content": [{"type": "image", "image": folder / "red.png"}, "What?"]}
    expected = renderer.render([shown, MESSAGES[1]])
    assert status == 0
    assert document["token_ids"] == expected.token_ids
    assert document["mm_hashes"] == expected.multi_modal_data.mm_hashes
    (place,) = expected.multi_modal_data.mm_placeholders["image"]
    assert document["mm_placeholders"] == {
        "image": [{"offset": place.offset, "length": 24, "embed_spans": None}]
    }
    assert (document["mm_grids"], document["rewritten"]) == ({"image": [[1, 8, 12]]}, [])
    assert document["spans"][0] == expected.spans[0]._asdict()
    sampled = sum(span["stop"] - span["start"] for span in document["spans"] if span["sampled"])
    assert sampled == int(expected.sampled_mask.sum())


def test_options_stand_beside_the_messages(run, folder, tiny_model):
    tools = [{"name": "zoom", "parameters": {"type": "object", "properties": {}}}]
    document = {"messages": MESSAGES, "tools": tools, "add_generation_prompt": False}
    Path("chat.json").write_text(json.dumps(document))
    status, out, _ = run("view", "chat.json", "-m", tiny_model, "--image-backend", "pil")
    assert status == 0
    assert '"name": "zoom"' in out
    assert "<|vision_start|>⟨image 4×6 = 24⟩<|vision_end|>What?<|im_end|>⏎" in out
    assert "1 │ assistant │" in out
    assert out.count("<|im_start|>assistant") == 1


def test_a_generation_prompt_follows_a_conversation_that_waits_for_the_model(run, folder, tiny_model):
    Path("asked.json").write_text(json.dumps([user("What?")]))
    Path("answered.json").write_text(json.dumps([user("What?"), MESSAGES[1]]))
    options = ("-m", tiny_model, "--image-backend", "pil")
    for name, flags, turns in [
        ("asked.json", (), 1),
        ("asked.json", ("--no-generation-prompt",), 0),
        ("answered.json", (), 1),
        ("answered.json", ("--generation-prompt",), 2),
    ]:
        assert run("view", name, *options, *flags)[1].count("<|im_start|>assistant") == turns
        spans = json.loads(run("render", name, *options, *flags)[1])["spans"]
        assert (spans[-1]["message"] == -1) == (turns == 2 or (name, flags) == ("asked.json", ()))


def test_render_prints_which_tokens_of_a_placeholder_hold_features(run, folder, tiny_model, monkeypatch):
    ids, data = tree_cases.rendered([1, ("C", 3)])
    monkeypatch.setattr(Renderer, "render", lambda *_, **__: RenderedTokens(ids, (), multi_modal_data=data))
    out = run("render", "chat.json", "-m", tiny_model, "--image-backend", "pil")[1]
    place = {"offset": 1, "length": 3, "embed_spans": [[0, 2]]}
    assert json.loads(out)["mm_placeholders"] == {"image": [place]}


@pytest.mark.parametrize("command", ["view", "render"])
def test_a_closed_pipe_is_no_failure(folder, tiny_model, command):
    """As with `head`: the reader goes after a line, and megabytes are still to come."""
    Path("long.json").write_text(json.dumps([{"role": "user", "content": "word " * 20_000}]))
    options = ("long.json", "-m", str(tiny_model), "--image-backend", "pil")
    with subprocess.Popen(
        [sys.executable, "-m", "mmrender", command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors.count(b"Error")) == (0, 0)


def test_help_to_nobody_is_no_failure():
    """The reader is gone before the first byte."""
    with subprocess.Popen(
        [sys.executable, "-m", "mmrender", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")


def without_typer(*arguments):
    code = "import sys; sys.modules['typer'] = None; from mmrender.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_without_the_extra_the_command_names_it():
    line = "MissingDependencyError: the mmrender command needs typer, which is not installed. "
    line += "Install it with: pip install 'mmrender[cli]'\n"
    assert without_typer("view", "chat.json", "-m", "nothing") == (2, "", line)


def test_help_without_the_extra_has_the_same_commands(run):
    status, out, err = without_typer("--help")
    assert (status, err) == (0, "")
    assert "pip install 'mmrender[cli]'" in " ".join(out.split())
    assert max(map(len, out.splitlines())) < 80
    full = " ".join(run("--help")[1].replace("│", " ").split())
    for name, summary in overview.commands().items():
        assert f" {name} {summary} " in " ".join(out.split())
        assert f" {name} {summary}" in full
    assert sorted(overview.commands()) == sorted(
        command.name or command.callback.__name__ for command in app.registered_commands
    )
    assert without_typer("--version") == (0, f"mmrender {__version__}\n", "")
    assert without_typer()[0] == run()[0] == 2


def test_exit_statuses_are_those_of_the_guide(run, tiny_model, monkeypatch):
    rows = re.findall(
        r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/commands.md").read_text("utf-8"), re.MULTILINE
    )
    assert {int(status): meaning for status, meaning in rows} == overview.STATUSES
    for raising, expected in ((KeyboardInterrupt, 130), (ZeroDivisionError, 3)):

        def refuse(*_, raising=raising, **__):
            raise raising

        monkeypatch.setattr(Renderer, "from_pretrained", refuse)
        status, out, err = run("doctor", tiny_model)
        assert (status, out) == (expected, "")
        assert ("Traceback" in err) == (expected == 3)


def test_tokens_of_an_image_need_no_torch(run, folder, tiny_model, monkeypatch):
    """The picture must be resized, which the default back end of `render` does by torch."""
    Image.new("RGB", (100, 70), "red").save("red.png")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run("view", "chat.json", "-m", tiny_model)[0] == 0
    assert run("diff", "chat.json", "chat.json", "-m", tiny_model)[0] == 0
    for arguments in (("render",), ("view", "--html", "page.html"), ("view", "--image-backend", "torch")):
        status, _, err = run(*arguments, "chat.json", "-m", tiny_model)
        assert status == 2
        assert "pip install 'mmrender[torch]'" in err


def test_messages_from_standard_input(run, folder, tiny_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([user("hi")])))
    status, out, _ = run("render", "-", "-m", tiny_model, "--image-backend", "pil")
    assert status == 0
    assert json.loads(out)["mm_hashes"] == {}


def test_doctor_as_json_and_its_failure_where_there_are_problems(run, tiny_model, tmp_path):
    status, out, _ = run("doctor", tiny_model, "--json")
    findings = json.loads(out)
    assert status == 0
    assert findings["template"]["prefix_stable"] is True
    assert findings["images"]["placeholders"]["image"] == "<|image_pad|>"
    directory = shutil.copytree(tiny_model, tmp_path / "refusing")
    (directory / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")
    status, out, _ = run("doctor", directory)
    assert status == 1
    assert "unknown: the template refuses" in out
    assert out.rstrip().endswith(
        f"Compare with Transformers to the last bit: mmrender parity {directory} --cases 50"
    )


def test_parity_of_an_honest_model_also_as_json(run, folder, tiny_model):
    """With photographs from a folder."""
    options = ("--cases", 3, "--image-backend", "pil", "--images", folder)
    status, out, _ = run("parity", tiny_model, *options)
    assert status == 0
    assert "equal" in out
    assert "differ" not in out
    # Every count, and why both sides refused; nothing else is printed there.
    status, out, _ = run("parity", tiny_model, "--cases", 12, "--image-backend", "pil", "--json")
    (counts,) = json.loads(out)
    assert status == 0
    assert (counts["model"], counts["image_backend"], counts["outcome"]) == ("tiny", "pil", "equal")
    assert sum(counts["refusals"].values()) < 5
    assert min(counts["images"], counts["tokens"], counts["pixel_values"], counts["seconds"]) > 0


def test_parity_of_bridges(run, tiny_model):
    status, out, _ = run("parity", tiny_model, "--bridge", "--cases", 5)
    assert status == 0
    assert "why declined" in out
    assert "differ" not in out
    status, out, _ = run("parity", tiny_model, "--bridge", "--cases", 5, "--json")
    (counts,) = json.loads(out)
    assert status == 0
    assert (counts["model"], counts["wrong"]) == ("tiny", 0)
    assert counts["equal"] > 0


def test_parity_ends_at_a_planted_difference(run, tiny_model, monkeypatch):
    honest = Renderer.render

    def wrong(self, messages, **options):
        rendered = honest(self, messages, **options)
        return replace(rendered, token_ids=[*rendered.token_ids[:-1], 7])

    monkeypatch.setattr(parity_module.Renderer, "render", wrong)
    status, out, _ = run("parity", tiny_model, "--cases", 3, "--image-backend", "pil")
    assert status == 1
    assert re.search(
        r'case 0 of seed 0, rules "default": (decoded text|special tokens|token ids) differ', out
    )
    assert re.search("\nours: .*\nreference: .*\noptions: {}\nmessages: .*role", out)


def test_parity_without_a_models_images_fails(run, tiny_model, tmp_path, monkeypatch):
    """Exit 2, and the reason; 1 where something differs as well."""

    def refuse(*_, **__):
        raise ImportError("needs a package")

    monkeypatch.setattr(reference, "build_reference_processor", refuse)
    status, out, _ = run("parity", tiny_model, tmp_path, "--cases", 2, "--image-backend", "pil")
    assert status == 2
    assert f"\n{tiny_model.name}, pil: needs a package\n" in out
    assert f"\n{tmp_path.name}, pil: TokenizerError: {tmp_path}: Transformers cannot open" in out


def test_the_table_of_parity_fits_80_columns():
    report = ParityReport("a_model_of_a_long_name", "torch", cases=300, tokens=1_234_567, images=1_234)
    report.values["pixel_values"], report.videos, report.seconds = 123_456_789_012, 55, 1234.5
    report.not_compared = "why"
    console = Console(width=80, file=io.StringIO())
    console.print(parity_table([report]))
    head, *_ = lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert head.split() == ["model", "mode", "result", "cases", "tokens", "images", "videos", "pixels", "s"]
    assert lines[2].split()[-6:] == ["300", "1.2M", "1,234", "55", "123.5G", "1234"]


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_parity_says_how_to_get_its_reference(run, tiny_model):
    status, out, _ = run("parity", tiny_model, "--cases", 1)
    assert status == 2
    assert 'Install it with: pip install torchvision, or choose image_backend="pil"' in out


def chat_about(source):
    return json.dumps([{"role": "user", "content": [{"type": "image", "image": source}]}])


NOT_JSON = "InputError: chat.json: the file is not JSON - got Expecting property"
JSON_LINES = (
    "InputError: chat.json: the file is not JSON - got Extra data: line 2 column 1 (char 3). Of a file with a"
)
NO_MESSAGES = (
    'InputError: chat.json: no messages in the input - expected a list, or an object with "messages"'
)
BLOCKED = "MediaBlockedError: messages[0].content[0]: the media policy forbids the local file"
UNNAMED = "InputError: --model: the server's model is not named - expected the name it is served by"


@pytest.mark.parametrize(
    ("chat", "arguments", "line"),
    [
        (None, "render chat.json -m nothing", "ModelNotFoundError: "),
        (None, "render none.json", "InputError: none.json: cannot read the file - got No such file"),
        ("{", "render chat.json", NOT_JSON),
        ("[]\n[]", "view chat.json", JSON_LINES),
        ('{"tools": []}', "render chat.json", NO_MESSAGES),
        ("3", "render chat.json", "MessageError: messages"),
        ("[3]", "view chat.json", "MessageError: messages"),
        (None, "render chat.json --image-backend cuda", "ProcessorError: "),
        (chat_about("/outside/red.png"), "render chat.json", BLOCKED),
        (chat_about("half.png"), "render chat.json", "MediaDecodeError: messages[0].content[0]: "),
        (None, "parity MODEL --images none", "InputError: none: no such folder"),
        (None, "demo --server http://127.0.0.1:1", UNNAMED),
        (None, "diff - - -m MODEL", "InputError: -: standard input is read once, not twice. Name a file"),
    ],
)
def test_an_error_is_one_line(run, folder, tiny_model, chat, arguments, line):
    Path("half.png").write_bytes(Path("red.png").read_bytes()[:100])
    if chat is not None:
        Path("chat.json").write_text(chat)
    arguments = [str(tiny_model) if argument == "MODEL" else argument for argument in arguments.split()]
    if arguments[0] in ("render", "view"):
        arguments += [] if "-m" in arguments else ["-m", tiny_model]
        arguments += [] if "--image-backend" in arguments else ["--image-backend", "pil"]
    status, out, err = run(*arguments)
    (found,) = [each for each in err.splitlines() if each.strip()]
    assert (status, out) == (2, "")
    assert found.startswith(line)


def test_version_completion_and_help(run):
    assert run("--version")[:2] == (0, f"mmrender {__version__}\n")
    assert "--show-completion" in run("--help")[1]
    status, out, _ = run()
    assert status == 2
    assert "parity" in out


def test_two_renderings_at_their_first_difference(run, folder, tiny_model, renderer):
    """Exit 1 where they differ; ids of another tool are compared as they are."""
    Path("same.json").write_text(json.dumps(MESSAGES))
    Path("other.json").write_text(json.dumps([MESSAGES[0], assistant("Blue.")]))
    Path("ids.json").write_text(json.dumps({"token_ids": [1, 2]}))
    options = ("-m", tiny_model, "--image-backend", "pil")
    assert run("diff", "chat.json", "same.json", *options)[0] == 0
    status, out, _ = run("diff", "chat.json", "other.json", *options, "--json")
    found = json.loads(out)
    assert status == 1
    assert not found["equal"]
    status, out, _ = run("diff", "chat.json", "other.json", *options)
    assert f"{found['first_difference']} tokens are equal, then they differ" in out
    assert "chat.json" in out
    assert "Blue" in out
    assert run("diff", "chat.json", "ids.json", *options, "--html", "diff.html")[0] == 1
    assert Path("diff.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_page_of_a_conversation_and_of_trajectories(run, folder, tiny_model, renderer):
    options = ("-m", tiny_model, "--image-backend", "pil", "--html", "page.html")
    assert run("view", "chat.json", *options)[0] == 0
    assert "data:image/jpeg" in Path("page.html").read_text("utf-8")
    trajectory = Trajectory("island")
    trajectory.append(renderer.render_ids([user("hi")]), [40])
    save_trajectories("rollouts.mmr", [trajectory])
    assert run("view", "rollouts.mmr", *options)[0] == 0
    assert "branch 0" in Path("page.html").read_text("utf-8")
    assert "--html tokens.html" in run("view", "rollouts.mmr", *options[:4])[2]


def test_a_server_decodes_what_it_is_sent_in_bounded_processes(run, tiny_model, tmp_path, monkeypatch):
    served = []

    async def serve(gateway, **options):
        served.append(gateway)

    monkeypatch.setattr("mmrender.gateway.gateway.Gateway.serve", serve)
    options = ["--model", str(tiny_model), "--out", str(tmp_path / "out.mmr"), "--alias"]
    command = ("gateway", "http://127.0.0.1:1", *options)
    assert run(*command, "s=http://x")[0] == 0
    assert served[0].aliases == {"s": "http://x"}
    assert "--alias: an alias has no name or no URL" in run(*command, "s")[2]
    policy = served[0].renderer.media.policy
    assert (policy.processes is not None) == (sys.platform == "linux")
    assert policy.schemes == {"data", "http", "https"}


def test_demo_takes_a_server(run, monkeypatch):
    from mmrender.testing import demo

    asked, page = [], Path("mmrender-demo.html")
    monkeypatch.setattr(demo, "main", lambda *args, **options: asked.append((args, options)) or 1)
    assert run("demo")[0] == 1
    assert run("demo", "--server", "http://127.0.0.1:1", "--model", "m", "--backend", "sglang")[0] == 1
    assert asked == [
        ((None,), {"backend": None, "model": None, "renderer_of": None, "page": page}),
        (("http://127.0.0.1:1",), {"backend": "sglang", "model": "m", "renderer_of": None, "page": page}),
    ]
