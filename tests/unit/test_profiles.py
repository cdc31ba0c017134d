"""The disk cache of what probing found out."""

import importlib.metadata
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kit import user
from mmrender.bridge.proof import TailProver
from mmrender.caching import cache_folder
from mmrender.renderer import Renderer
from mmrender.template import known
from mmrender.template.chat import ChatTemplate
from mmrender.template.known import Findings
from mmrender.template.profile import TemplateProfile, probe_template

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}@"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
USER = [user("And now?")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMRENDER_CACHE", str(tmp_path))
    return tmp_path / "profiles"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was probed, one for each time."""
    seen: list[str] = []
    prove = TailProver.prove

    def probing(*args: Any) -> TemplateProfile:
        seen.append("profile")
        return probe_template(*args)

    def proving(self: TailProver, *args: Any, **options: Any) -> Any:
        seen.append("proof")
        return prove(self, *args, **options)

    monkeypatch.setattr(known, "probe_template", probing)
    monkeypatch.setattr(TailProver, "prove", proving)
    return seen


def load(tiny_model: Path, source: str = TEMPLATE.replace("@", PROMPT), **options: Any) -> Renderer:
    return Renderer.from_pretrained(tiny_model, chat_template=source, image_backend="pil", **options)


def test_second_load_neither_probes_nor_proves(tiny_model, folder, probed):
    first = load(tiny_model)
    bridge = first.bridge_to_next_turn([1], [2], USER)
    assert probed == ["profile", "proof"]
    assert len(list(folder.glob("*.json"))) == 2
    second = load(tiny_model)
    assert second.profile == first.profile
    again = second.bridge_to_next_turn([1], [2], USER)
    assert probed == ["profile", "proof"]
    assert again.token_ids == bridge.token_ids


def test_refusals_are_kept_too(tiny_model, folder, probed):
    source = TEMPLATE.replace("@", "{{ messages | length }}" + PROMPT)
    reasons = set()
    for _ in range(2):
        renderer = load(tiny_model, source)
        assert renderer.bridge_to_next_turn([1], [2], USER) is None
        reasons.add(renderer.why_not_bridged)
    assert reasons == {"the template's text for this extension depends on the number of earlier turns"}
    assert probed.count("proof") == 1
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_a_second_load_parses_without_a_run_of_the_template(shared_models, folder, monkeypatch, name):
    """By each grammar, whose findings are kept apart."""

    def choices():
        renderers = (
            Renderer.from_pretrained(shared_models / name, image_backend="pil", tool_call_grammar=grammar)
            for grammar in (None, "json_tags", "gemma")
        )
        return [(each.response_parser().choice, each.response_parser().edges) for each in renderers]

    first = choices()
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: pytest.fail("the template ran"))
    assert choices() == first
    (own, _), (named, _), (other, _) = first
    assert other not in (own, named)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"form": 3}', b'{"failure": 3}'])
def test_damaged_entry_is_ignored_and_written_again(tiny_model, folder, probed, content):
    profile = load(tiny_model).profile
    load(tiny_model).bridge_to_next_turn([1], [2], USER)
    for file in folder.iterdir():
        file.write_bytes(content)
    renderer = load(tiny_model)
    assert renderer.profile == profile
    assert renderer.bridge_to_next_turn([1], [2], USER) is not None
    assert probed.count("profile") == probed.count("proof") == 2
    assert load(tiny_model).profile == profile
    assert probed.count("profile") == 2


def test_anything_that_matters_makes_another_entry(tiny_model, folder, probed, monkeypatch):
    load(tiny_model).profile  # noqa: B018 - a property that probes
    load(tiny_model, TEMPLATE.replace("@", " " + PROMPT)).profile  # noqa: B018
    source = TEMPLATE.replace("@", PROMPT + "{{ thinking }}")
    load(tiny_model, source).template_profile(thinking=False)
    load(tiny_model, source).template_profile(thinking=True)
    monkeypatch.setattr(known, "code_digest", lambda: "other code")
    load(tiny_model).profile  # noqa: B018
    assert probed == ["profile"] * 5
    assert len(list(folder.iterdir())) == 5


def test_other_code_and_other_releases_make_other_entries(monkeypatch):
    """All code that text, tokens and probes run through is in the digest, and so is each release."""
    root = Path(known.__file__).parents[1]
    files = {file.relative_to(root).as_posix() for pattern in known._CODE for file in root.glob(pattern)}
    assert files >= {"content/values.py", "sidecar.py", "messages.py", "model/files.py", "parsing/prove.py"}
    seen = {known.code_digest.__wrapped__()}
    for package in ("jinja2", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.metadata, "version", lambda name, other=package: "9" if name == other else "1"
            )
            seen.add(known.code_digest.__wrapped__())
    assert len(seen) == 3


def test_arguments_that_the_template_does_not_read_neither_probe_nor_fill_the_disk(
    tiny_model, folder, probed
):
    renderer = load(tiny_model)
    for number in range(20):
        known = renderer.templates.find({f"junk_{number}": number, "other": object()}, has_tools=False)
        assert known.profile.prefix_stable
    assert probed == ["profile"]
    assert len(list(folder.glob("*.json"))) == 1


TODAY = "{{ 'Today is ' + today + '.' if today is defined and today }}"
SHARING = {
    "printed": TODAY + TEMPLATE.replace("@", PROMPT),
    "joined": "{% if today %}{% if tools %}{{ 'T' ~ today }}{% else %}{{ today }}{% endif %}{% endif %}"
    + TEMPLATE.replace("@", PROMPT),
}
APART = {
    "compared": TODAY + TEMPLATE.replace("@", "{{ '!' if today == 'day 3' }}" + PROMPT),
    "in the prompt": TEMPLATE.replace("@", PROMPT + "{{ today if add_generation_prompt }}"),
    "in a loop": TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ today }}").replace("@", PROMPT),
    "in a macro": "{% macro show() %}{{ today }}{% endmacro %}{{ show() }}" + TEMPLATE.replace("@", PROMPT),
    "filtered": "{{ today | upper }}" + TEMPLATE.replace("@", PROMPT),
    "assigned": "{% set day = today %}{{ day }}" + TEMPLATE.replace("@", PROMPT),
    "measured": "{{ today }}{{ today | length }}" + TEMPLATE.replace("@", PROMPT),
}


def values(renderer: Renderer) -> list[tuple[Any, ...]]:
    """Everything that is found of a template with each of some values, and what is rendered with it."""
    found = []
    for today in ("day 1", "<|im_end|>", "day 3"):
        given = {"today": today}
        bridge = renderer.bridge_to_next_turn([1], [2], USER, **given)
        parser = renderer.response_parser(**given)
        text = renderer.render_text(USER, **given)
        ids = bridge and bridge.token_ids
        found.append((text, renderer.template_profile(**given), ids, parser.choice, parser.edges))
    return found


@pytest.mark.parametrize("name", [*SHARING, *APART])
def test_texts_that_a_template_only_prints_are_one_setting(tiny_model, folder, probed, name):
    source = (SHARING | APART)[name]
    found = values(load(tiny_model, source))
    assert probed.count("profile") == (1 if name in SHARING else 3 + (name == "in the prompt"))
    files = len(list(folder.glob("*.json")))
    assert files == 3 if name in SHARING else files > 3
    for today, expected in zip(("day 1", "<|im_end|>", "day 3"), found, strict=True):
        alone = load(tiny_model, source, profile_cache=False)
        assert alone.render_text(USER, today=today) == expected[0]
        assert alone.template_profile(today=today) == expected[1]
        bridge = alone.bridge_to_next_turn([1], [2], USER, today=today)
        assert (bridge and bridge.token_ids) == expected[2]
    # Other values than texts, and the empty text, are settings of their own.
    renderer = load(tiny_model, source)
    profiles = probed.count("profile")
    for other in ("", None):
        if name not in {"filtered", "measured"} or other is not None:
            renderer.template_profile(today=other)
    assert probed.count("profile") > profiles


def test_the_least_recently_used_files_go_first(tmp_path):
    def found(number: int) -> int:
        return Findings(tmp_path, {}, max_files=10).get_or_find(number, int, lambda: 2 * number)

    def known(number: int) -> bool:
        return Findings(tmp_path, {}, max_files=99).get_or_find(number, int, lambda: -1) >= 0

    for number in range(10):
        assert found(number) == 2 * number
        (newest,) = (file for file in tmp_path.iterdir() if file.stat().st_mtime > 1e6)
        os.utime(newest, (number, number))
    assert known(0)
    found(10)
    assert len(list(tmp_path.iterdir())) == 9
    assert [known(number) for number in (0, 1, 2, 9, 10)] == [True, False, False, True, True]


def test_what_cannot_be_kept_is_probed_each_time(tiny_model, folder, probed):
    for _ in range(2):
        load(tiny_model, TEMPLATE.replace("@", "{{ strftime_now('%Y') }}")).profile  # noqa: B018
        load(tiny_model, TEMPLATE.replace("@", "{{ helper }}")).template_profile(helper=object())
    assert probed == ["profile"] * 4
    assert not folder.exists()


def test_opting_out(tiny_model, folder, probed, monkeypatch):
    load(tiny_model, profile_cache=False).profile  # noqa: B018
    for value in ("off", "0", "", "OFF"):
        monkeypatch.setenv("MMRENDER_CACHE", value)
        assert cache_folder("profiles") is None
    load(tiny_model).profile  # noqa: B018
    assert probed == ["profile"] * 2
    assert not folder.exists()


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MMRENDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("profiles") == tmp_path / "mmrender" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("profiles") is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("profiles") == tmp_path / "home" / ".cache" / "mmrender" / "profiles"


def test_folder_that_cannot_be_written_to_is_ignored(tmp_path, tiny_model, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("MMRENDER_CACHE", str(blocked))
    assert load(tiny_model).profile.roles
    assert blocked.read_text() == "in the way"


def test_writers_at_once_leave_one_whole_entry(tmp_path, tiny_model):
    profile = load(tiny_model).profile
    start = threading.Barrier(8)

    def find() -> None:
        start.wait()
        Findings(tmp_path, {}).get_or_find("profile", TemplateProfile, lambda: profile)

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 1
    assert Findings(tmp_path, {}).get_or_find("profile", TemplateProfile, probe_template) == profile
