"""`pytest --mmrender-model DIR` as a user runs it, on a good model and on a broken one."""

import os
import shutil
import subprocess
import sys


def test_laws_run_on_a_directory_and_name_what_is_broken(tiny_model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    (broken / "chat_template.jinja").write_text("{{ 'never closed' ")
    options = [f"--mmrender-model={path}" for path in (tiny_model, broken)]
    plugins = ["-p", "mmrender.testing.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rA",
            *plugins,
            *options,
            "--mmrender-cases=3",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    outcomes = {line.partition("mmrender ")[2]: line.split()[0] for line in lines if "mmrender " in line[:60]}
    for law in ("parity", "bridges"):
        assert any(
            name.startswith(f"{law}[tiny") and found == "PASSED" for name, found in outcomes.items()
        ), lines
        assert any(name.startswith(f"{law}[broken") and found == "FAILED" for name, found in outcomes.items())
    assert "the chat template 'default' does not compile" in done.stdout
