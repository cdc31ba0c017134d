"""Prove that what would be published works: build it, read it, install it alone, and render there.

1. Build the sdist, and the wheel from the sdist.
2. The wheel holds exactly the files of `mmrender/` and `codecs/mmcodecs/`; the sdist can rebuild them.
3. Install the wheel with its core dependencies only into a new environment: no extra's package may be there.
4. Render a conversation with a picture there and compare ids and pixels with what Transformers gives here.
5. The command has its help, and names the extra that it needs.
6. Measure `import mmrender` there.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PACKAGES = {"mmrender": ROOT / "mmrender", "mmcodecs": ROOT / "codecs" / "mmcodecs"}
SDIST_NEEDS = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "codecs/mmcodecs/py.typed",
    "constraints.txt",
    "docs/index.md",
    "mkdocs.yml",
    "mmrender/py.typed",
    "pyproject.toml",
    "tests/conftest.py",
    "tools/check_package.py",
    "tools/readme_links.py",
)


class CheckError(Exception):
    """The package is not fit to publish."""


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print a step's title and how long it took."""
    print(f"-- {title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"   {time.perf_counter() - start:.1f} s", flush=True)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed; its whole output is shown when it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckError(
            f"{' '.join(map(str, command))} exited {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def source_files() -> set[str]:
    """Paths inside the wheel that the working tree calls for."""
    return {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_wheel(wheel: Path) -> None:
    """Compare the wheel's contents with the working tree."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in inside if name.split("/")[0].endswith(".dist-info")}
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        raise CheckError(f"{wheel.name} holds no LICENSE")
    missing, unexpected = source_files() - inside, inside - metadata - source_files()
    if missing or unexpected:
        raise CheckError(f"{wheel.name}: missing {sorted(missing)}, unexpected {sorted(unexpected)}")
    print(f"   {wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB, {len(inside - metadata)} files")


def check_sdist(sdist: Path) -> None:
    """Check that the sdist holds what it takes to build, test and document the package."""
    with tarfile.open(sdist) as archive:
        inside = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    missing = set(SDIST_NEEDS) - inside
    if missing:
        raise CheckError(f"{sdist.name} lacks {sorted(missing)}")
    print(f"   {sdist.name}: {sdist.stat().st_size / 1e3:.0f} kB, {len(inside)} files")


def new_environment(folder: Path, wheel: Path) -> Path:
    """Create an environment that holds the wheel and its core dependencies; return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "-c", ROOT / "constraints.txt", wheel)
    return python


def check_render(python: Path, workspace: Path) -> None:
    """Render the same conversation in both environments and compare."""
    model = workspace / "model"
    # Run outside the checkout, so that nothing but the installed wheel can be imported.
    reference = json.loads(run(sys.executable, TOOLS / "render_reference.py", model, cwd=workspace))
    rendered = json.loads(run(python, TOOLS / "render_core_only.py", model, cwd=workspace))
    for key, expected in reference.items():
        if rendered[key] != expected:
            raise CheckError(
                f"{key} differs from the reference\n  expected {expected}\n  rendered {rendered[key]}"
            )
    print(
        f"   {len(rendered['token_ids'])} token ids and pixels {rendered['pixel_shape']} equal the reference"
    )


def check_command(python: Path) -> None:
    """Check that the command's help works, and that a command names the extra that it needs in one line."""
    for argument, status in (("--help", 0), ("render", 2)):
        done = subprocess.run(
            [str(python.with_name("mmrender")), argument], capture_output=True, text=True, check=False
        )
        named = "mmrender[cli]" in (done.stderr if status else done.stdout)
        if done.returncode != status or done.stderr.count("\n") != bool(status) or not named:
            raise CheckError(f"mmrender {argument} exited {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"   {done.stderr}", end="")


def main(dist: Path | None = None) -> int:
    """Run every step; return the exit status. The packages stay in `dist`, if it is named."""
    try:
        with tempfile.TemporaryDirectory(prefix="mmrender-package-") as temporary:
            workspace = Path(temporary)
            dist = workspace / "dist" if dist is None else dist
            with step("build"):
                run(sys.executable, "-m", "build", "--outdir", dist)
                (wheel,) = dist.glob("*.whl")
                (sdist,) = dist.glob("*.tar.gz")
            with step("contents"):
                check_wheel(wheel)
                check_sdist(sdist)
            with step("install with core dependencies only"):
                python = new_environment(workspace / "venv", wheel)
            with step("render there"):
                check_render(python, workspace)
            with step("the command there"):
                check_command(python)
            with step("import time there"):
                print(run(python, TOOLS / "check_import.py", cwd=workspace), end="")
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
