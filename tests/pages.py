"""Error sentences as the tests expect them: one page for each room, in `tests/errors/`.

A test asserts `str(error.value) == sentence`. `make errors` writes the pages anew from the tests, and their diff is
what a reviewer reads. The room is the first word of the test module's name: `test_content_parts.py` writes to
`content.ambr`.
"""

from pathlib import Path

from syrupy.extensions.amber import AmberSnapshotExtension
from syrupy.location import PyTestLocation
from syrupy.types import SnapshotIndex

FOLDER = Path(__file__).parent / "errors"


def _room(test_location: PyTestLocation) -> str:
    return Path(test_location.filepath).stem.split("_")[1]


class RoomPage(AmberSnapshotExtension):
    """Keeps the sentences of a room's test modules in one file."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """Return the folder of all pages."""
        return str(FOLDER)

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: SnapshotIndex) -> str:
        """Return the name of the room's page."""
        return _room(test_location)

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: SnapshotIndex = 0) -> str:
        """Return the name of a sentence: its module, test and case."""
        name = super().get_snapshot_name(test_location=test_location, index=index)
        return f"{name} in {Path(test_location.filepath).stem}"

    @classmethod
    def matches_test_location(cls, *, test_location: PyTestLocation, snapshot_location: str) -> bool:
        """Whether a page is that of a test's room."""
        return Path(snapshot_location).stem == _room(test_location)
