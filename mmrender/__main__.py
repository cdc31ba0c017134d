"""The command `mmrender`, also as `python -m mmrender`."""

import sys
import traceback

from mmrender._version import __version__
from mmrender.cli.output import outlive_readers


def main() -> None:
    """Run the command line, and exit with one of the statuses of `mmrender.cli.overview`."""
    try:
        outlive_readers()
        _run()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # noqa: BLE001 Python's own status of a crash, 1, would say that something was found
        traceback.print_exc()
        sys.exit(3)


def _run() -> None:
    from mmrender.errors import MissingDependencyError  # here, since an interrupt may come with any import

    try:
        from mmrender.cli.commands import run
    except MissingDependencyError as error:
        sys.exit(_without_commands(f"{type(error).__name__}: {error}", str(error)))
    run()


def _without_commands(line: str, reason: str) -> int:
    """Answer requests for help or the version. Else print the error's line. Return the exit status."""
    from mmrender.cli.overview import overview

    asked = set(sys.argv[1:])
    if "--version" in asked:
        print(f"mmrender {__version__}")
        return 0
    if not asked or asked & {"--help", "-h"}:
        print(overview(reason))
        return 0 if asked else 2
    sys.stderr.write(f"{line}\n")
    return 2


if __name__ == "__main__":
    main()
