"""Virtual environments for inference servers, installed once from a frozen list.

Usage: `python tools/servers/environments.py ENGINE VENV`, where ENGINE is a folder beside this file with a
`requirements.txt`. Its comment `# python:` names the Python release, and `# torch:` the torch release, of
which a CPU build is taken. A folder `site/` beside it is copied into site-packages, and `with_torch/` too
where there is torch. Running it again on a finished environment does nothing.

Exit status: 0 installed or up to date, 3 where no interpreter of that release is found, 1 otherwise. The
variable PYTHON names an interpreter; otherwise PATH and `~/.pyenv/versions` are searched.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
NO_INTERPRETER = 3
STAMP = ".installed"


class InstallError(Exception):
    """Message to the caller; `code` is the exit status."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def named(requirements: str, key: str) -> str | None:
    """Value of a comment line `# key: value`."""
    found = re.search(rf"^# {key}: *(\S+)", requirements, re.MULTILINE)
    return found[1] if found else None


def candidates(release: str) -> Iterator[str]:
    """Interpreters to try, best first."""
    if os.environ.get("PYTHON"):
        yield os.environ["PYTHON"]
    yield sys.executable
    yield from filter(None, map(shutil.which, (f"python{release}", "python3")))
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{release}*/bin/python{release}")))


def find_python(release: str) -> str:
    """An interpreter of a release, such as 3.12.

    Raises:
        InstallError: There is none.
    """
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates(release):
        try:
            answer = subprocess.run([candidate, "-c", script], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if answer.returncode == 0 and answer.stdout.strip() == release:
            return candidate
    raise InstallError(
        f"needs Python {release} (looked on PATH and under ~/.pyenv/versions); set PYTHON to its interpreter",
        NO_INTERPRETER,
    )


def site_folders(folder: Path, requirements: str) -> list[Path]:
    """Files that are copied into site-packages."""
    folders = [folder / "site", *([HERE / "with_torch"] if named(requirements, "torch") else [])]
    return [entry for entry in folders if entry.is_dir()]


def digest(folder: Path) -> str:
    """Digest of everything that an environment is made from."""
    requirements = folder / "requirements.txt"
    state = hashlib.sha256(Path(__file__).read_bytes() + requirements.read_bytes())
    for site in site_folders(folder, requirements.read_text()):
        for file in sorted(site.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                state.update(str(file.relative_to(HERE)).encode() + b"\0" + file.read_bytes())
    return state.hexdigest()


def install(folder: Path, venv: Path) -> None:
    """Make `venv` the environment of the engine in `folder`.

    Raises:
        InstallError: It cannot be made here.
    """
    requirements = (folder / "requirements.txt").read_text()
    python = find_python(named(requirements, "python") or "3.11")
    subprocess.run([python, "-m", "venv", "--clear", venv], check=True)
    # Most of the files are never imported, so byte code is left to the first import.
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "install", "-qq", "--no-compile"]
    pip.append("--no-deps")
    if torch := named(requirements, "torch"):
        subprocess.run([*pip, f"torch=={torch}"], check=True)
        build = asked(venv, "import importlib.metadata as m; print(m.version('torch'))")
        if not build.endswith("+cpu"):
            remedy = "name an index, such as PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
            raise InstallError(f"pip took torch {build}, which is not a CPU build: {remedy}")
    subprocess.run([*pip, "-r", folder / "requirements.txt"], check=True)
    packages = asked(venv, "import sysconfig; print(sysconfig.get_path('purelib'))")
    for site in site_folders(folder, requirements):
        shutil.copytree(site, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def asked(venv: Path, script: str) -> str:
    """Output of a script in an environment."""
    return subprocess.check_output([venv / "bin" / "python", "-c", script], text=True).strip()


def main(arguments: list[str]) -> int:
    """Install, unless it is installed already."""
    if len(arguments) != 2:
        print(f"usage: {sys.argv[0]} ENGINE VENV", file=sys.stderr)
        return 2
    engine, venv = arguments[0], Path(arguments[1]).resolve()
    folder = HERE / engine
    stamp = venv / STAMP
    wanted = digest(folder)
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    try:
        install(folder, venv)
    except InstallError as error:
        print(f"{engine}: {error}", file=sys.stderr)
        return error.code
    except subprocess.CalledProcessError as error:
        print(f"{engine}: {error}", file=sys.stderr)
        return 1
    stamp.write_text(wanted)
    print(f"{engine}: installed in {venv}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
