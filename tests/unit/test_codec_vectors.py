"""The test vectors, both ways, by the codec and by the reader that knows the specification only."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mmcodecs
from codec_values import identical
from wire_vectors import BUILDERS, FOLDER, build, unshared, vectors, written

VECTORS = vectors()
NAMES = [vector["files"][0] for vector in VECTORS]
READER = Path(__file__).parents[2] / "examples" / "read_frames.py"


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_frames", READER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts_of(vector: dict[str, Any]) -> list[bytes]:
    return [(FOLDER / name).read_bytes() for name in vector["files"]]


def test_the_codec_writes_and_reads_the_vectors() -> None:
    encoder = mmcodecs.Encoder(table_bytes=4096)
    for vector in VECTORS:
        assert written(vector, encoder) == parts_of(vector), vector["about"]
    decoder = mmcodecs.Decoder(table_bytes=4096)
    for vector in VECTORS:
        parts = parts_of(vector)
        data = parts if vector["mode"] == "frames" else parts[0]
        got = decoder.decode(data) if vector.get("connection") else mmcodecs.decode(data)
        assert identical(unshared(build(vector["value"])), got), vector["about"]


def as_plain_reader_sees(value: Any) -> Any:
    if isinstance(value, mmcodecs.RawTensor):
        return value.dtype, value.bits
    if isinstance(value, dict):
        return {key: as_plain_reader_sees(item) for key, item in value.items()}
    return [as_plain_reader_sees(item) for item in value] if isinstance(value, list) else value


def test_the_plain_reader_reads_the_vectors(reader: ModuleType) -> None:
    shared: dict[bytes, Any] = {}
    for vector in VECTORS:
        got = reader.read(parts_of(vector), shared if vector.get("connection") else None)
        assert identical(as_plain_reader_sees(unshared(build(vector["value"]))), got), vector["about"]


def test_the_plain_reader_is_short_uses_msgpack_and_numpy_only_and_prints_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = READER.read_text().splitlines()
    assert len(lines) < 90
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported - {"msgpack", "numpy"} == {
        "collections", "pathlib", "struct", "sys", "typing",
    }  # fmt: skip
    import subprocess
    import sys

    command = [sys.executable, str(READER), str(FOLDER / "long.bin")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("{'ids': [0, 1, 2,")


def test_the_vectors_cover_the_wire() -> None:
    # Every storage, mode, extension type and dtype family stands in some vector.
    text = (FOLDER / "vectors.json").read_text()
    for name in BUILDERS:
        assert name in text
    assert {vector["mode"] for vector in VECTORS} == {"single", "frames"}
