"""The command `mmrender`, also as `python -m mmrender`."""

import sys

from mmrender.errors import MissingDependencyError


def main() -> None:
    """Run the command line. Without the extra `cli`, name it and exit with status 2."""
    try:
        from mmrender.cli import main as run
    except MissingDependencyError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
