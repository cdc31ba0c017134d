"""Environments for the libraries that `mmrender/integrations` stands on, and their tests.

Usage: `python tools/libraries.py NAME FOLDER [--install]`, where `integration-NAME` is a dependency group.
The environment in FOLDER holds that group alone, on top of the packages of the Python that runs this. With
`--install` nothing is tested.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHVISION = "torchvision==0.28.0"
"""For the references' torch back end; its wheel asks for another torch than the CPU one."""
ALONE = {"tinker": ("tinker-cookbook==0.6.1",)}
"""By library what is installed without its requirements, of which an index may lack some."""


def install(name: str, folder: Path) -> Path:
    """Create the environment unless it is there with the same packages; return its interpreter.

    Raises:
        CalledProcessError: pip could not install them.
    """
    python = folder / "bin" / "python"
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][f"integration-{name}"]
    wanted = "\n".join(group)
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    below = sysconfig.get_paths()["purelib"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "zz_below.pth").write_text(f"{below}\n")
    for path in (ROOT / "tools" / "servers" / "with_torch").iterdir():
        shutil.copy(path, packages)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", TORCHVISION, *ALONE.get(name, ())], check=True)
    subprocess.run([*pip, *group], check=True)
    stamp.write_text(wanted)
    return python


def main(name: str, folder: Path, *options: str) -> int:
    """Install what the tests need, and run them unless the options say otherwise."""
    try:
        python = install(name, folder.resolve())
    except subprocess.CalledProcessError as error:
        return error.returncode
    if "--install" in options:
        return 0
    environment = {
        **os.environ,
        "MMRENDER_LIBRARY": name,
        # Ray's workers import the tests' functions, too.
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "codecs", ROOT / "tests"])),
        "OMP_NUM_THREADS": "1",
    }
    tests = [
        *(
            str(path)
            for path in sorted((ROOT / "tests/integrations").glob("test_*.py"))
            if path.stem.split("_")[1] == name
        ),
        "tests/unit/test_pages.py::test_the_code_of_a_library_runs",
    ]
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-rs", "-p", "no:asyncio", *tests],
        cwd=ROOT,
        env=environment,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
