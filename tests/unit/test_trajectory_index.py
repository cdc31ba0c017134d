"""The index beside a file of trajectories: it saves reading, and whatever is wrong with it changes nothing."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kit import error_of
from mmcodecs.files import BLOCK, MappedFile
from mmrender import Trajectory
from mmrender.errors import MissingDependencyError, TrajectoryError
from mmrender.training import Descriptor, TrajectoryDataset
from mmrender.trajectory import TrajectoryReader, TrajectoryWriter, save_trajectories
from mmrender.trajectory.files import received_ids
from mmrender.trajectory.stores import find_files
from tree_cases import Call, calls, grown

GROUPS = st.lists(st.lists(calls(), min_size=1, max_size=2), max_size=5)
PICTURES = [[[Call([10, ("A", 1 + number % 3), 11], [20, 21], number)]] for number in range(9)]


def trees(groups: Any) -> list[list[Trajectory]]:
    return [
        [grown(rollout, f"{number}.{place}") for place, rollout in enumerate(group)]
        for number, group in enumerate(groups)
    ]


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def descriptors(path: Path) -> list[Descriptor]:
    """What the index says, for records that it holds."""
    reader = TrajectoryReader(path)
    return [one for number in range(len(reader)) for one in reader.descriptors(number) or []]


@settings(max_examples=30, deadline=None)
@given(groups=GROUPS, cut=st.integers(0, 5))
def test_an_index_says_what_samples_say(tmp_path_factory: Any, groups: Any, cut: int) -> None:
    path = tmp_path_factory.mktemp("data") / "run"
    whole = trees(groups)
    TrajectoryWriter(path).close()
    for some in (whole[:cut], whole[cut:]):
        save_trajectories(path, some)
    expected = [
        Descriptor.of(sample, record=record, item=item, file="0")
        for record, group in enumerate(whole)
        for item, sample in enumerate([sample for tree in group for sample in tree.samples()])
    ]
    assert descriptors(path) == step_of(expected)
    dataset = TrajectoryDataset(path)
    step = dataset.describe()
    assert step == expected
    assert len(dataset.load(step, range(len(step)))) == len(expected)
    index_of(path).unlink()
    assert descriptors(path) == []
    assert TrajectoryDataset(path).describe() == step


def test_an_index_has_groups_and_some_hundred_bytes_for_a_sample(tmp_path: Path) -> None:
    path, count = tmp_path / "run", 500
    with TrajectoryWriter(path) as file:
        for number in range(count):
            tree = grown([Call([10, ("A", 1 + number % 3), 11], [20], number)], str(number))
            tree.extra["group"] = f"prompt-{number // 8}"
            file.append(tree)
    assert [one.group for one in descriptors(path)] == [f"prompt-{number // 8}" for number in range(count)]
    assert index_of(path).stat().st_size < 110 * count


def test_samples_that_cannot_be_made_are_not_described(tmp_path: Path) -> None:
    tree = Trajectory("a")
    tree.append([1, 2], [3])  # without log-probabilities
    save_trajectories(tmp_path / "run", [tree, *trees([PICTURES[0]])])
    assert [one.record for one in descriptors(tmp_path / "run")] == [1]
    with pytest.raises(TrajectoryError, match="log"):
        TrajectoryDataset(tmp_path / "run").describe()


def test_a_rank_follows_files_that_grow_and_others_load_what_it_plans(tmp_path: Path) -> None:
    groups = trees([[call[0]] for call in PICTURES])
    save_trajectories(tmp_path / "b", groups[:2])
    planner, other = (TrajectoryDataset(tmp_path, wait=wait) for wait in (60.0, 0.0))
    sizes = planner.follow()
    step = [next(sizes) for _ in range(2)]
    state = planner.state_dict()
    save_trajectories(tmp_path / "a", groups[2:5])  # neither dataset has seen this file
    save_trajectories(tmp_path / "b", groups[5:])
    step += [next(sizes) for _ in range(7)]
    assert sorted((one.file, one.record) for one in step) == [
        *[("0/a", number) for number in range(3)],
        *[("0/b", number) for number in range(6)],
    ]
    assert step[2:] == [one for one in TrajectoryDataset(tmp_path).describe() if one not in step[:2]]
    names = [sample.sample_id for _, sample in sorted(other.load(step, range(9)).items())]
    assert sorted(names) == [f"{number}.0/0" for number in range(9)]
    resumed = TrajectoryDataset(tmp_path, wait=60.0)
    resumed.load_state_dict(state)
    following = resumed.follow()
    assert [next(following) for _ in range(7)] == step[2:]


def test_following_reads_no_record_and_asks_what_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with TrajectoryWriter(path) as file:
        for group in trees(PICTURES):
            file.append(group)
    asked: list[int] = []

    def accept(samples: Any) -> bool:
        asked.append(samples[0].record)
        return samples[0].record % 2 == 0

    dataset = TrajectoryDataset(path, accept=accept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrajectoryReader, "__getitem__", lambda *_: pytest.fail("a record was read"))
        patch.setattr(TrajectoryReader, "head", lambda *_: pytest.fail("a head was read"))
        assert [one.record for one in dataset.follow()] == [0, 2, 4, 6, 8]
    assert asked == [*range(9)]
    items = TrajectoryDataset(path, make=lambda trajectories: [tree.samples()[0] for tree in trajectories])
    assert [*items.follow()] == items.describe()


class Touched:
    """The bytes of files that were asked for, by path."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[str, int] = {}
        read = MappedFile.read

        def counted(file: MappedFile, start: int, stop: int, *, ahead: int = 0) -> memoryview:
            self.bytes[str(file)] = self.bytes.get(str(file), 0) + stop - start
            return read(file, start, stop, ahead=ahead)

        patch.setattr(MappedFile, "read", counted)


def test_the_heads_of_records_in_the_index_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    save_trajectories(path, trees(PICTURES[:1] * 10))
    touched = Touched(monkeypatch)
    reader = TrajectoryReader(path, tail=False)
    assert len(reader) == 10
    assert touched.bytes[str(path)] == BLOCK  # the newest header
    assert [len(reader.descriptors(number) or []) for number in range(10)] == [1] * 10
    assert touched.bytes[str(path)] == BLOCK


SENDERS = ("a" * 32, "0" * 32)
IDS = st.lists(
    st.none()
    | st.sampled_from(
        ["game-1", "x:1", f"{SENDERS[0]}:0", f"{SENDERS[0]}:01", f"{SENDERS[0]}:{2**62}", "é:7", ""]
    )
    | st.builds("{}:{}".format, st.sampled_from(SENDERS), st.integers(1, 2**62 - 1)),
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(ids=IDS, cut=st.integers(0, 12), indexed=st.integers(0, 12))
def test_an_index_says_which_ids_records_have(
    tmp_path_factory: Any, ids: list[str | None], cut: int, indexed: int
) -> None:
    """Whatever their form, with an index of all records, of the first ones, or without; while the file grows."""
    path = tmp_path_factory.mktemp("data") / "run"
    TrajectoryWriter(path).close()
    reader = TrajectoryReader(path)
    assert reader.ids().texts() == []
    old = index_of(path).read_bytes()
    for start, stop in ((0, cut), (cut, len(ids))):
        with TrajectoryWriter(path) as file:
            for number, id in enumerate(ids[start:stop], start):
                file.append(grown(PICTURES[0][0], str(number)), id=id)
                assert TrajectoryReader(path).ids().texts() == ids[: number + 1]
        old = index_of(path).read_bytes() if stop <= indexed else old
        reader.refresh()
        assert reader.ids().texts() == ids[:stop]
    parts = [id.split(":") for id in ids if id is not None and re.fullmatch(r"[0-9a-f]{32}:[1-9]\d*", id)]
    numbers = [(sender, int(number)) for sender, number in parts if int(number) < 2**62]
    last = {sender: max(number for each, number in numbers if each == sender) for sender, _ in numbers}
    index_of(path).write_bytes(old)
    assert TrajectoryReader(path).ids().texts() == ids
    assert received_ids(path) == [id for id in ids if id is not None]
    assert TrajectoryReader(path).ids().last_numbers() == last
    index_of(path).unlink()
    assert TrajectoryReader(path).ids().texts() == ids


def test_ids_of_a_file_that_was_replaced_are_its_own(tmp_path: Path) -> None:
    for name, ids in (("run", "abc"), ("other", "xyz")):
        with TrajectoryWriter(tmp_path / name) as file:
            for number, id in enumerate(ids):
                file.append(grown(PICTURES[0][0], f"{id}{number}"), id=id)
    reader = TrajectoryReader(tmp_path / "run")
    assert reader.ids().texts() == [*"abc"]
    for suffix in ("", ".index"):
        (tmp_path / f"other{suffix}").replace(tmp_path / f"run{suffix}")
    assert TrajectoryReader(tmp_path / "run").ids().texts() == [*"xyz"]


def test_the_newest_record_has_no_id_until_its_head_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with TrajectoryWriter(path) as file:
        for number in range(3):
            file.append(grown(PICTURES[0][0], str(number)), id=f"id-{number}")
    blocks = [TrajectoryReader(path).block(number) for number in range(3)]
    whole = path.read_bytes()
    index_of(path).unlink()

    def with_hole(number: int) -> TrajectoryReader:
        start = blocks[number].start
        path.write_bytes(whole[:start] + bytes(200) + whole[start + 200 :])
        return TrajectoryReader(path, tail=False)

    assert with_hole(1).ids().texts() == ["id-0", None, "id-2"]
    reader = with_hole(2)
    assert (len(reader), reader.ids().texts()) == (3, ["id-0", "id-1"])
    path.write_bytes(whole)
    reader.refresh()
    assert reader.ids().texts() == ["id-0", "id-1", "id-2"]


def test_copies_in_two_files_are_left_out_without_a_look_at_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, numbers in (("a", range(1, 9)), ("b", range(5, 13))):
        with TrajectoryWriter(tmp_path / name) as file:
            for number in numbers:
                file.append(grown(PICTURES[0][0], str(number)), id=f"{SENDERS[0]}:{number}")
    touched = Touched(monkeypatch)
    dataset = TrajectoryDataset(tmp_path)
    step = dataset.describe()
    taken = [(one.file[-1], one.record) for one in step]
    assert taken == [("a", record) for record in range(8)] + [("b", record) for record in range(4, 8)]
    size = (tmp_path / "b").stat().st_size
    assert touched.bytes[str(tmp_path / "b")] < size / 4  # the newest record, to see that it is whole
    assert len(dataset.load(step, range(12))) == 12


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("record", [3, 7])
def test_a_copy_takes_the_place_of_a_damaged_or_torn_record(tmp_path: Path, record: int) -> None:
    for name, numbers in (("a", range(1, 9)), ("b", range(4, 13))):
        with TrajectoryWriter(tmp_path / name) as file:
            for number in numbers:
                file.append(grown(PICTURES[0][0], str(number)), id=f"{SENDERS[0]}:{number}")
    path = tmp_path / "a"
    stop, content = TrajectoryReader(path).block(record).stop, bytearray(path.read_bytes())
    content[stop - 40 : stop] = bytes(40)
    path.write_bytes(content)
    for world in (1, 3):
        taken = [one for rank in range(world) for one in TrajectoryDataset(tmp_path, rank=rank, world=world)]
        assert sorted(one.sample_id for one in taken) == sorted(f"{number}/0" for number in range(1, 13))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_torn_record_holds_up_nobody_and_another_takes_its_place(tmp_path: Path, world: int) -> None:
    """A machine fails while a record is written; its message is shipped to another file, and the file goes on."""
    path = tmp_path / "a"
    for name, numbers in (("a", range(1, 9)), ("b", range(8, 12))):
        with TrajectoryWriter(tmp_path / name) as file:
            for number in numbers:
                file.append(grown(PICTURES[0][0], str(number)), id=f"{SENDERS[0]}:{number}")
    index_of(path).unlink()
    stop, content = TrajectoryReader(path).block(7).stop, bytearray(path.read_bytes())
    content[stop - 40 : stop] = bytes(40)
    path.write_bytes(content)
    datasets = [TrajectoryDataset(tmp_path, rank=rank, world=world, wait=1e-9) for rank in range(world)]
    first = [[one.sample_id for one in dataset] for dataset in datasets]
    assert sorted(name for each in first for name in each) == sorted(f"{number}/0" for number in range(1, 12))
    with TrajectoryWriter(path) as file:
        for number in range(12, 15):
            file.append(grown(PICTURES[0][0], str(number)), id=f"{SENDERS[0]}:{number}")
    later = []
    for rank, dataset in enumerate(datasets):
        again = TrajectoryDataset(tmp_path, rank=rank, world=world, wait=1e-9)
        again.load_state_dict(dataset.state_dict())
        later += [one.sample_id for one in again]
    assert sorted(later) == ["12/0", "13/0", "14/0"]


def same_records(path: Path, expected: list[list[Trajectory]]) -> bool:
    reader = TrajectoryReader(path)
    read = [[(one.trajectory_id, one.steps[0].prompt_ids.tolist()) for one in group] for group in reader]
    return read == [
        [(one.trajectory_id, one.steps[0].prompt_ids.tolist()) for one in group] for group in expected
    ]


@pytest.mark.parametrize("count", [1, 9])
def test_a_damaged_short_or_foreign_index_changes_nothing(tmp_path: Path, count: int) -> None:
    """Any byte of it, any length, and the indexes of other files; the next writer mends it."""
    path, foreign = tmp_path / "run", tmp_path / "other"
    whole = trees([PICTURES[number] for number in range(count)])
    save_trajectories(path, whole)
    save_trajectories(foreign, trees([[[Call([10], [20], 0)]]] * 12))
    step, good = TrajectoryDataset(path).describe(), index_of(path).read_bytes()
    bad = [
        *(
            good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
            for at in range(0, len(good), 7 if count == 1 else 31)
        ),
        *(good[:length] for length in range(0, len(good), 41)),
        good + good,
        index_of(foreign).read_bytes(),
        b"no index" * 40,
        path.read_bytes(),
    ]
    for content in bad:
        index_of(path).write_bytes(content)
        assert same_records(path, whole)
        assert TrajectoryDataset(path).describe() == step
    for content in [*bad[::9], *bad[-4:]]:
        index_of(path).write_bytes(content)
        TrajectoryWriter(path).close()
        assert descriptors(path) == step_of(step)
        assert len(index_of(path).read_bytes()) == len(good)


def step_of(step: list[Descriptor]) -> list[Descriptor]:
    """Descriptors as a reader of one file has them, without the file's name."""
    return [replace(one, file="") for one in step]


def test_an_index_of_a_file_that_was_replaced_is_not_believed(tmp_path: Path) -> None:
    """Also if the newest record is the same, at the same place."""
    path = tmp_path / "run"
    save_trajectories(path, trees([PICTURES[0], PICTURES[3], PICTURES[6], PICTURES[2]]))
    old = index_of(path).read_bytes()
    replaced = trees([PICTURES[3], PICTURES[0], PICTURES[6], PICTURES[2]])
    for number, group in enumerate(replaced):
        group[0].trajectory_id = f"{number}.0"
    path.unlink()
    save_trajectories(path, replaced)
    index_of(path).write_bytes(old)
    assert same_records(path, replaced)
    dataset = TrajectoryDataset(path)
    assert [sample.sample_id for sample in dataset] == [f"{number}.0/0" for number in range(4)]
    step = [
        Descriptor.of(sample, record=number, file="0")
        for number, group in enumerate(replaced)
        for sample in group[0].samples()
    ]
    assert sorted(TrajectoryDataset(path).load(step, range(4))) == [0, 1, 2, 3]


def test_an_index_that_is_ahead_of_its_file_is_cut_back(tmp_path: Path) -> None:
    """The machine failed: the index reached the disk, and the newest records did not."""
    path = tmp_path / "run"
    whole = trees([PICTURES[number] for number in range(4)])
    save_trajectories(path, whole)
    content = path.read_bytes()
    reader = TrajectoryReader(path)
    path.write_bytes(content[: reader.block(2).start + 100])
    assert same_records(path, whole[:2])
    save_trajectories(path, whole[3:])
    assert same_records(path, [*whole[:2], whole[3]])
    assert len(descriptors(path)) == 3


def test_an_index_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "run"
    index_of(path).mkdir()
    with pytest.warns(
        RuntimeWarning, match=r"run\.index: the index is not written, and readers do without it"
    ):
        writer = TrajectoryWriter(path)
    with writer:
        for group in trees(PICTURES[:1] * 70):
            writer.append(group)
    assert len(TrajectoryReader(path)) == 70
    index_of(path).rmdir()
    TrajectoryWriter(path).close()
    assert len(descriptors(path)) == 70


def test_an_index_follows_a_file_that_grows(tmp_path: Path) -> None:
    """The newest records are in the file first, and readers take them from there."""
    path = tmp_path / "run"
    with TrajectoryWriter(path) as writer:
        reader = TrajectoryReader(path)
        for number, group in enumerate(trees(PICTURES[:1] * 150)):
            writer.append(group)
            if number % 10 == 0:
                assert reader.refresh() == number + 1
                known = sum(reader.descriptors(each) is not None for each in range(number + 1))
                assert known == (number + 1) // 64 * 64
    assert reader.refresh() == 150
    assert len(descriptors(path)) == 150
    # A writer that is taken up again goes on in the same index.
    before = index_of(path).read_bytes()
    save_trajectories(path, trees(PICTURES[:1]))
    assert index_of(path).read_bytes().startswith(before)
    assert len(descriptors(path)) == 151


def test_a_file_of_an_earlier_release_gets_an_index_when_it_is_opened(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[1] / "data/trajectories/version_4.mmr"
    path = Path(shutil.copy(recorded, tmp_path / "run"))
    assert len(TrajectoryDataset(path).describe()) > 0
    assert not index_of(path).exists()
    TrajectoryWriter(path).close()
    assert descriptors(path) == step_of(TrajectoryDataset(path).describe())


def test_files_directories_and_patterns(tmp_path: Path) -> None:
    for name in ("a.mmc", "b/x.mmc", "b/y.mmc", "b/.hidden", "b/x.mmc.index", "b/c/z.mmc", "run[1].mmc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def names(path: str) -> list[str]:
        found = find_files(f"{tmp_path}/{path}")
        assert all(where == f"{tmp_path}/{path}" or Path(where).is_file() for _, where in found)
        return [name for name, _ in found]

    assert names("a.mmc") == names("missing") == names("run[1].mmc") == [""]
    assert names("b") == names("b/") == names("b/*.mmc") == ["x.mmc", "y.mmc"]
    assert names("*/*.mmc") == ["b/x.mmc", "b/y.mmc"]
    assert names("**/z*") == ["b/c/z.mmc"]
    assert names("none/*") == []


@pytest.fixture
def store() -> Any:
    fsspec = pytest.importorskip("fsspec", reason="the extra `store`")
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_an_object_store_is_read_by_ranges(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.mmc", "b.mmc"):
        save_trajectories(tmp_path / name, trees(PICTURES))
        for path in (tmp_path / name, index_of(tmp_path / name)):
            store.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    ranges: dict[str, int] = {}
    fetch = type(store).cat_file

    def counted(files: Any, path: str, start: int, stop: int) -> bytes:
        ranges[path] = ranges.get(path, 0) + stop - start
        return fetch(files, path, start, stop)

    monkeypatch.setattr(type(store), "cat_file", counted)
    assert find_files("memory://bucket") == [
        (name, f"memory:///bucket/{name}") for name in ("a.mmc", "b.mmc")
    ]
    sizes = {path: len(store.store[path].getvalue()) for path in store.store}
    samples = {}
    for rank in range(2):
        ranges.clear()
        dataset = TrajectoryDataset("memory://bucket/*.mmc", rank=rank, world=2)
        samples[rank] = [sample.token_ids.tolist() for sample in dataset]
        for path, size in sizes.items():
            assert ranges[path] <= (size if path.endswith(".index") else 0.75 * size)
    local = [TrajectoryDataset(tmp_path / "*.mmc", rank=rank, world=2) for rank in range(2)]
    assert samples == {rank: [one.token_ids.tolist() for one in each] for rank, each in enumerate(local)}
    step = TrajectoryDataset("memory://bucket/a.mmc").describe()
    assert step == TrajectoryDataset(tmp_path / "a.mmc").describe()
    # It grows, and another one appears.
    dataset = TrajectoryDataset("memory://bucket", wait=1e-9)
    assert len(list(dataset)) == 18
    for name in ("a.mmc", "c.mmc"):
        save_trajectories(tmp_path / name, trees(PICTURES[:2]))
        for path in (tmp_path / name, index_of(tmp_path / name)):
            store.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    dataset.load_state_dict(dataset.state_dict())
    assert len(list(dataset)) == 4


def test_an_object_store_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert error_of(MissingDependencyError, TrajectoryDataset, "s3://bucket/run.mmc") == (
        "a file in an object store needs fsspec, which is not installed. "
        "Install it with: pip install 'mmrender[store]'"
    )
