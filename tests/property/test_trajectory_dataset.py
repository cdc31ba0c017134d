"""A dataset of shipped trajectories: wherever it is cut off and resumed, every sample comes once, in order."""

import asyncio
import gc
import json
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcodecs
from item_cases import patch_item
from kit import error_of
from mmcodecs import files
from mmcodecs.files import BLOCK
from mmrender import Trajectory
from mmrender.errors import BatchError, ShippingError, TrajectoryError
from mmrender.shipping import Recorder, Sender
from mmrender.shipping.receiver import Received
from mmrender.training import Descriptor, TrajectoryDataset, collate_micro_batch, plan_steps, smallest_dummy
from mmrender.trajectory import TrajectoryReader, TrajectoryWriter, load_trajectories, save_trajectories
from mmrender.trajectory.truncate import truncate
from training_cases import PAD_ID, kinds
from training_cases import sample as training_sample


def rollout(name: str, branches: int = 1) -> Trajectory:
    """A trajectory that gives as many samples as it has branches."""
    trajectory = Trajectory(name)
    for number in range(branches):
        trajectory.append([1, 2], [5 + number], logprobs=[-0.5])
    return trajectory


def record(number: int, branches: list[int]) -> list[Trajectory]:
    return [rollout(f"{number}.{index}", count) for index, count in enumerate(branches)]


def names(trajectories: Any) -> list[str]:
    return [sample.sample_id for trajectory in trajectories for sample in trajectory.samples()]


@contextmanager
def worker(number: int, workers: int) -> Iterator[None]:
    """What a DataLoader's worker process sees."""
    module = torch.utils.data._utils.worker
    module._worker_info = SimpleNamespace(id=number, num_workers=workers) if workers > 1 else None
    try:
        yield
    finally:
        module._worker_info = None


RECORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=6)


@settings(max_examples=25, deadline=None)
@given(
    records=RECORDS,
    later=RECORDS,
    cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4),
    workers=st.integers(1, 3),
    world=st.integers(1, 3),
    follows=st.booleans(),
)
def test_what_was_taken_and_what_is_resumed_are_the_whole_stream(
    tmp_path_factory: Any, records: Any, later: Any, cuts: Any, workers: int, world: int, follows: bool
) -> None:
    """A pass is cut off after `taken` samples and a checkpoint, and `lost` ones after it; the file grows meanwhile."""
    whole = [record(number, branches) for number, branches in enumerate([*records, *later])]
    for number, rank in product(range(workers), range(world)):
        options = {"rank": rank, "world": world} | ({"wait": 1e-9} if follows else {})
        own = slice(rank + world * number, None, world * workers)
        path = tmp_path_factory.mktemp("data") / "run.mmc"
        TrajectoryWriter(path).close()
        save_trajectories(path, whole[: len(records)])
        with worker(number, workers):
            dataset, got = TrajectoryDataset(path, **options), []
            for crash, (taken, lost) in enumerate(cuts):
                running = iter(dataset)
                got += [sample.sample_id for sample in islice(running, taken)]
                state = json.loads(json.dumps(dataset.state_dict()))
                assert len(list(islice(running, lost))) <= lost
                if crash == 0:
                    save_trajectories(path, whole[len(records) :])
                dataset = TrajectoryDataset(path, **options)
                dataset.load_state_dict(state)
                assert dataset.state_dict() == state
            got += [sample.sample_id for sample in dataset]
            # A pass that is at its end stays there, and the next one begins anew.
            dataset.load_state_dict(dataset.state_dict())
            assert list(dataset) == []
            again = names(each for held in list(TrajectoryReader(path))[own] for each in held)
            assert [sample.sample_id for sample in TrajectoryDataset(path, **options)] == again
        held = whole if follows and cuts else whole[: len(records)]
        assert got == names(each for group in held[own] for each in group)


COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), shuffle=st.none() | st.integers(0, 3), follows=st.booleans())
def test_other_readers_take_over_and_every_sample_comes_once(
    tmp_path_factory: Any, data: Any, shuffle: int | None, follows: bool
) -> None:
    """Ranks and workers change again and again, while files grow and new files appear."""
    folder = tmp_path_factory.mktemp("data")
    whole: list[str] = []

    def grow() -> None:
        for name, branches in data.draw(st.dictionaries(st.sampled_from("abc"), COUNTS, max_size=3)).items():
            group = record(len(whole), branches)
            save_trajectories(folder / name, [group])
            whole.extend(names(group))

    def dataset(rank: int, world: int) -> TrajectoryDataset:
        wait = 1e-9 if follows else 0.0
        return TrajectoryDataset(folder, rank=rank, world=world, wait=wait, shuffle=shuffle)

    grow()
    grow()
    got: list[str] = []
    states: list[Any] = []
    begun = whole.copy()
    for is_last in (*[False] * data.draw(st.integers(0, 3)), True):
        world, workers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
        later = []
        for rank, number in product(range(world), range(workers)):
            with worker(number, workers):
                one = dataset(rank, world)
                if states:
                    one.load_state_dict(states)
                taken = None if is_last else data.draw(st.integers(0, 6))
                got += [sample.sample_id for sample in islice(one, taken)]
                later.append(json.loads(json.dumps(one.state_dict())))
            if not is_last and not data.draw(st.integers(0, 2)):
                grow()
        states = data.draw(st.permutations(later))
    # A pass that does not follow ends with the records of its begin, or those that a reader of it saw.
    assert len(got) == len(set(got))
    assert set(got) == set(whole) if follows else set(begun) <= set(got) <= set(whole)


def test_an_epoch_has_its_own_order_and_draws_by_weight(tmp_path: Path) -> None:
    for name in "ab":
        save_trajectories(tmp_path / name, [rollout(f"{name}{number}") for number in range(200)])
    weights = {tmp_path / "a": 0.5, tmp_path / "b": 2.25}

    def epoch(number: int, **options: Any) -> list[str]:
        dataset = TrajectoryDataset(weights, **options)
        dataset.set_epoch(number)
        return [sample.sample_id for sample in dataset]

    first, second = epoch(0, shuffle=1), epoch(1, shuffle=1)
    assert first == epoch(0, shuffle=1) != epoch(0, shuffle=2)
    for drawn in (first, second, epoch(0)):
        times = Counter(drawn)
        a, b = ([times[f"{name}{number}/0"] for number in range(200)] for name in "ab")
        assert set(a) == {0, 1}
        assert 70 < sum(a) < 130  # of 200 that are drawn by halves, by the fixed seeds
        assert set(b) == {2, 3}
        assert 420 < sum(b) < 480
    assert set(first) != set(second)
    assert [name for name in first if name < "b"] != sorted(name for name in first if name < "b")
    ranks = [name for rank in range(3) for name in epoch(0, shuffle=1, rank=rank, world=3)]
    assert Counter(ranks) == Counter(first)
    assert [one.record for one in TrajectoryDataset(weights, shuffle=1).describe()] == [
        int(name[1:-2]) for name in first
    ]


def test_records_are_accepted_by_their_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by the version of the weights. The bytes of other records are not read."""
    path = tmp_path / "run"
    with TrajectoryWriter(path) as file:
        for number in range(8):
            tree = Trajectory(str(number))
            tree.append([1], [2, 3], logprobs=[-1.0, -1.0], weight_versions=[(f"step-{number // 2}", 0, 2)])
            file.append(tree)

    def fresh(samples: Any) -> bool:
        return all(3 - int(one.version.removeprefix("step-")) <= 1 for one in samples)

    for is_indexed in (True, False):
        with monkeypatch.context() as patch:
            reading = Reading(path, patch)
            dataset = TrajectoryDataset(path, accept=fresh)
            assert [sample.sample_id for sample in dataset] == ["4/0", "5/0", "6/0", "7/0"]
            if is_indexed:
                assert reading.bytes < path.stat().st_size * 0.6
        assert [one.record for one in dataset.describe()] == [4, 5, 6, 7]
        assert dataset.state_dict()["position"] == 8
        path.with_name("run.index").unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_with_workers_takes_over_once(tmp_path: Path) -> None:
    """The next pass has new workers, which must not begin at the loaded states again."""
    path = tmp_path / "run"
    save_trajectories(path, [rollout(str(number)) for number in range(9)])
    states = []
    for rank in range(3):
        dataset = TrajectoryDataset(path, rank=rank, world=3)
        assert len(list(islice(dataset, rank))) == rank
        states.append(dataset.state_dict())
    dataset = TrajectoryDataset(path)
    dataset.load_state_dict(states)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(sample.sample_id for sample in loader) == [f"{number}/0" for number in (0, 3, 4, 6, 7, 8)]
    assert len(list(loader)) == 9


def test_a_dataset_has_no_length_and_makes_what_it_is_asked_for(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "run", [record(0, [1, 1]), record(1, [2])])
    dataset = TrajectoryDataset(tmp_path / "run", make=lambda group: [len(group)])
    assert list(torch.utils.data.DataLoader(dataset, batch_size=None)) == [2, 1]
    with pytest.raises(TypeError):
        len(dataset)
    state = dataset.state_dict()
    dataset = TrajectoryDataset(tmp_path / "run", make=lambda group: [])
    dataset.load_state_dict({**state, "position": 1, "item": 1})
    with pytest.raises(BatchError, match=r"run\[1\]: a record has fewer items than when the state was taken"):
        list(dataset)


def test_a_damaged_record_is_named_and_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save_trajectories(path, [rollout("a")])
    start = path.stat().st_size
    save_trajectories(path, [rollout("b"), rollout("c")])
    for place in (start + 3, start + 200):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        (tmp_path / "damaged").write_bytes(data)
        with pytest.warns(RuntimeWarning, match=r"damaged\[1\]: left out, damaged - got "):
            found = [sample.sample_id for sample in TrajectoryDataset(tmp_path / "damaged")]
        assert found == ["a/0", "c/0"]


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "run", [rollout("a"), rollout("b")])
    save_trajectories(tmp_path / "other", [rollout("x"), rollout("y")])
    save_trajectories(tmp_path / "short", [rollout("a")])
    dataset = TrajectoryDataset(tmp_path / "run")
    assert len(list(dataset)) == 2
    state = dataset.state_dict()
    other = TrajectoryReader(tmp_path / "other").block(1).checksum
    for name, problem in (
        ("other[1]", f"expected the checksum {state['last'][2]}, got {other}"),
        ("short", "expected 2 records or more, got 1"),
    ):
        fresh = TrajectoryDataset(tmp_path / name.removesuffix("[1]"))
        assert error_of(BatchError, fresh.load_state_dict, state) == (
            f"{tmp_path / name}: the state belongs to another file - {problem}. "
            "Keep the file that was trained on, and only append to it"
        )
    half = TrajectoryDataset(tmp_path / "run", rank=1, world=2).state_dict()
    with worker(1, 2):
        fresh = TrajectoryDataset(tmp_path / "run", world=3)
        assert error_of(BatchError, fresh.load_state_dict, [half]) == (
            "state: states of readers are missing - expected all of 2, or reader 3 of 6, got readers 1. "
            "Load a list of the states of all workers of all ranks"
        )
    fresh = TrajectoryDataset({tmp_path / "run": 0.5}, shuffle=3)
    assert error_of(BatchError, fresh.load_state_dict, state) == (
        "state: the state belongs to another order - expected shuffle 3 and weights [0.5], got None and [1.0]"
    )
    fresh = TrajectoryDataset(tmp_path / "run")
    assert error_of(BatchError, fresh.load_state_dict, [half, {**half, "epoch": 1}]) == (
        "state: the states belong to several passes - expected epoch 0 of 2 readers, got epoch 1 of 2 readers. "
        "Save the states of all ranks at one step"
    )
    assert error_of(BatchError, fresh.load_state_dict, [half, {**half, "position": 1}]) == (
        "state: two states of one reader differ - got reader 1 of 2. Load the states of one checkpoint"
    )
    assert error_of(BatchError, fresh.load_state_dict, {"_snapshot": {}, "_steps_since_snapshot": 2}) == (
        "state: the state of a loader is of earlier batches - got a snapshot 2 batches before. "
        "Make the StatefulDataLoader with snapshot_every_n_steps=1"
    )
    for wrong in ({"record": 1}, {**state, "version": 1}, {**state, "new": 1}):
        with pytest.raises(BatchError, match="state: this is not a state of a dataset"):
            fresh.load_state_dict(wrong)
    with pytest.raises(BatchError, match="rank: is out of range - expected a whole number, 0 to 1, got 2"):
        TrajectoryDataset(tmp_path / "run", rank=2, world=2)
    with pytest.raises(BatchError, match=r"run: a weight is not a number of times - got -1\.0"):
        TrajectoryDataset({tmp_path / "run": -1})


class Reading:
    """The bytes of a file that were asked for, and those of its memory maps that were touched."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.bytes = path, 0
        read = files.MappedFile.read
        self.maps: list[memoryview] = []

        def counted(file: files.MappedFile, start: int, stop: int, *, ahead: int = 0) -> memoryview:
            self.bytes += stop - start if str(file) == str(path) else 0
            self.maps.append(read(file, start, stop, ahead=ahead))  # an unmapped page counts as untouched
            return self.maps[-1]

        patch.setattr(files.MappedFile, "read", counted)

    @property
    def touched(self) -> int:
        """Pages of this process: a fault brings up to sixteen that are in memory."""
        parts = Path("/proc/self/smaps").read_text().split(f"{self.path}\n")[1:]
        return sum(int(re.findall(r"^Rss: +(\d+) kB", part, re.M)[0]) * 1024 for part in parts)


FAULT = 16 * 4096


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux to count touched pages")
@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_rank_reads_its_own_records_and_their_bytes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    path, count = tmp_path / "run", 9
    with TrajectoryWriter(path) as file:
        sizes = [0]
        for number in range(count):
            file.append(pictured(f"{number}", [patch_item(704, 1024, seed=number)]))
            sizes.append(path.stat().st_size)
    lengths = np.diff(sizes)
    everything = []
    for rank in range(world):
        with monkeypatch.context() as patch:
            reading = Reading(path, patch)
            got = [sample.sample_id for sample in TrajectoryDataset(path, rank=rank, world=world)]
            assert got == [f"{number}/0" for number in range(rank, count, world)]
            own = lengths[rank::world]
            assert 0 <= own.sum() + 2 * BLOCK - reading.bytes < 3 * BLOCK * (len(own) + 1)
            assert reading.touched < own.sum() + 2 * count * 2 * FAULT
        everything += got
    assert sorted(everything, key=lambda name: int(name[:-2])) == [f"{number}/0" for number in range(count)]
    for is_indexed in (True, False):
        with monkeypatch.context() as patch:
            reading = Reading(path, patch)
            dataset = TrajectoryDataset(path, world=world)
            before, touched = reading.bytes, reading.touched
            assert before == (BLOCK if is_indexed else BLOCK * count)  # headers
            step = dataset.describe(range(count))
            assert [(one.media, one.record) for one in step] == [(1, number) for number in range(count)]
            if is_indexed:
                assert reading.bytes - before <= 2 * BLOCK
            assert reading.touched - touched < lengths.sum() / 4
            before = reading.bytes
            loaded = dataset.load(step, [5])
            assert loaded[5].sample_id == "5/0"
            assert lengths[5] - 2 * BLOCK < reading.bytes - before <= lengths[5]
        path.with_name("run.index").unlink(missing_ok=True)


def test_sixteen_ranks_read_a_tenth_more_than_the_file_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shares, and each of them the index, of groups of rollouts that show one picture."""
    items = [patch_item(160, 160, seed=seed) for seed in range(4)]
    with TrajectoryWriter(tmp_path / "run") as file:
        for number in range(128):
            file.append([pictured(f"{number}.{n}", [number % 4], items, seed=number) for n in range(4)])
    asked: list[int] = []
    read = files.MappedFile.read

    def counted(file: files.MappedFile, start: int, stop: int, *, ahead: int = 0) -> memoryview:
        asked.append(stop - start)
        return read(file, start, stop, ahead=ahead)

    monkeypatch.setattr(files.MappedFile, "read", counted)
    share, seen = (tmp_path / "run").stat().st_size / 16, []
    for rank in range(16):
        asked.clear()
        seen += [sample.sample_id for sample in TrajectoryDataset(tmp_path / "run", rank=rank, world=16)]
        assert sum(asked) < 1.1 * share
    assert sorted(seen) == sorted(f"{number}.{n}/0" for number in range(128) for n in range(4))


@pytest.mark.parametrize("kind", sorted(kinds()))
@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_of_descriptors_are_those_of_whole_samples(tmp_path: Path, kind: str, ranks: int) -> None:
    """The oracle: every rank reads all samples, plans, and builds its part."""
    family, items = kinds()[kind].family, kinds()[kind].items
    rng = np.random.default_rng(ranks)
    groups = [
        [
            pictured(f"{number}.{place}", rng.choice(len(items), int(rng.integers(0, 3))), items, seed=number)
            for place in range(1 + number % 3)
        ]
        for number in range(7)
    ]
    save_trajectories(tmp_path / "run", groups)
    whole = [one for trajectory in load_trajectories(tmp_path / "run") for one in trajectory.samples()]
    dummy = smallest_dummy(whole)
    assert dummy is not None
    options = {"ranks": ranks, "max_tokens": 64, "dummy_tokens": len(dummy)}
    expected = plan_steps([Descriptor.of(one) for one in whole], family, **options)
    dataset = TrajectoryDataset(tmp_path / "run")
    step = dataset.describe()
    assert plan_steps(step, family, **options) == expected
    smallest = min((one.smallest, index) for index, one in enumerate(step) if one.smallest is not None)[1]
    assert step[smallest].smallest[0] == len(dummy)
    shown = smallest_dummy([*dataset.load(step, [smallest]).values()])
    for rank in range(ranks):
        own = sorted({index for turn in expected for index in turn[rank].samples})
        loaded = TrajectoryDataset(tmp_path / "run").load(step, own or [0])
        for turn in expected:
            made = [
                collate_micro_batch(samples, turn[rank], family, pad_token_id=PAD_ID, dummy=small)
                for samples, small in ((whole, dummy), (loaded, shown))
            ]
            assert bytes(mmcodecs.encode(made[0])) == bytes(mmcodecs.encode(made[1]))


def pictured(name: str, shown: Any, items: Any = None, seed: int = 0) -> Trajectory:
    """A trajectory of one turn that shows some items, with router choices."""
    one = training_sample(
        [item if items is None else items[item] for item in shown], 4, seed=seed, experts=True
    )
    start = int(one.loss_mask.argmax())
    trajectory = Trajectory(name)
    trajectory.append(
        one.token_ids[:start],
        one.token_ids[start:],
        logprobs=one.logprobs[start:],
        multi_modal_data=one.multi_modal_data,
        routed_experts=one.routed_experts,
    )
    return trajectory


def test_what_was_described_is_what_is_loaded(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "run", [record(0, [1, 2]), record(1, [1])])
    step = TrajectoryDataset(tmp_path / "run").describe()
    assert [(one.record, one.item) for one in step] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    shorter = TrajectoryDataset(
        tmp_path / "run", make=lambda group: [truncate(one, 2) for one in samples_of(group)]
    )
    with pytest.raises(BatchError, match=r"run\[1\], item 0: an item differs from its descriptor"):
        shorter.load(step, [3])
    data = bytearray((tmp_path / "run").read_bytes())
    data[-40] ^= 1
    (tmp_path / "run").write_bytes(data)
    dataset = TrajectoryDataset(tmp_path / "run")
    assert sorted(dataset.load(step, [0, 2])) == [0, 2]
    with pytest.raises(TrajectoryError, match=r"run\[1\]: this file of trajectories cannot be used"):
        dataset.load(step, [3])
    for number in (-1, 2):
        with pytest.raises(
            BatchError, match=rf"run\[{number}\]: there is no such record - expected one of 2"
        ):
            dataset.describe([0, number])


def samples_of(group: Any) -> list[Any]:
    return [sample for trajectory in group for sample in trajectory.samples()]


def test_a_torn_record_is_none_until_it_is_whole(tmp_path: Path) -> None:
    """Its header is on disk, and its content is not: the machine failed, or the file is on another one."""
    path = tmp_path / "run"
    save_trajectories(path, [rollout("a"), rollout("b"), rollout("c")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] + bytes(100))
    for rank, expected in enumerate((["a/0"], ["b/0"])):
        dataset = TrajectoryDataset(path, rank=rank, world=2)
        torn = pytest.warns(RuntimeWarning, match=r"run\[2\]: left out, torn or no longer there")
        with nullcontext() if rank else torn:
            assert [sample.sample_id for sample in dataset] == expected
        following = TrajectoryDataset(path, rank=rank, world=2, wait=0.01)
        assert [sample.sample_id for sample in following] == expected
        state = following.state_dict()
        path.write_bytes(whole)
        following.load_state_dict(state)
        assert [sample.sample_id for sample in following] == [[], ["c/0"]][rank == 0]
        path.write_bytes(whole[:-100] + bytes(100))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_takes_a_trainer_up_again(tmp_path: Path, workers: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="the dependency group `trainers`")
    path = tmp_path / "run"
    save_trajectories(path, [record(number, [1, number % 3]) for number in range(7)])

    def loader() -> Any:
        return loaders.StatefulDataLoader(
            TrajectoryDataset(path), batch_size=2, num_workers=workers, collate_fn=ids_of
        )

    whole = list(loader())
    assert sorted(name for batch in whole for name in batch) == sorted(names(load_trajectories(path)))
    for taken in range(len(whole) + 1):
        first = loader()
        running = iter(first)
        got = list(islice(running, taken))
        state = first.state_dict()
        list(islice(running, 2))
        resumed = loader()
        resumed.load_state_dict(state)
        got += list(resumed)
        # A state that was taken at the end begins the next pass, or ends at once.
        assert got == whole or (taken == len(whole) and got == whole * 2)
        assert list(resumed) == whole


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:'set_vital' is deprecated")
def test_torchdata_goes_on_with_other_ranks_and_workers(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="the dependency group `trainers`")
    for name in "ab":
        save_trajectories(
            tmp_path / name, [[rollout(f"{name}{number}.{n}") for n in range(2)] for number in range(8)]
        )

    def loaded(states: list[Any], world: int, workers: int, taken: int | None) -> tuple[list[str], list[Any]]:
        """What all ranks read, each `taken` batches, and the states of their loaders."""
        got: list[str] = []
        later: list[Any] = []
        for rank in range(world):
            dataset = TrajectoryDataset(tmp_path, rank=rank, world=world, shuffle=1)
            if states:
                dataset.load_state_dict(states)
            loader = loaders.StatefulDataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=ids_of)
            got += [name for batch in islice(loader, taken) for name in batch]
            later.append(loader.state_dict())
        return got, later

    first, states = loaded([], 2, 2, 1)
    second, states = loaded(states, 3, 1, 1)
    third, _ = loaded(states, 2, 0, None)
    assert sorted(first + second + third) == sorted(
        names(load_trajectories(tmp_path / "a") + load_trajectories(tmp_path / "b"))
    )
    assert min(len(first), len(second), len(third)) >= 6


def test_a_rank_keeps_little_of_each_record(tmp_path: Path) -> None:
    """Places, ids and the order of a million records fit into 200 MB."""
    path, kept = tmp_path / "run", []
    with TrajectoryWriter(path) as writer:
        for count in (512, 2048):
            for number in range(len(writer), count):
                writer.append(rollout(str(number)), id=f"{number % 16:032x}:{number + 1}")
            gc.collect()
            tracemalloc.start()
            dataset = TrajectoryDataset(path, shuffle=1)
            samples = iter(dataset)
            next(samples)
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            del dataset, samples
    assert 48 * 1536 < kept[1] - kept[0] < 200 * 1536


def ids_of(samples: Any) -> list[str]:
    return [sample.sample_id for sample in samples]


async def test_what_is_shipped_is_on_disk_once_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder is cut off between writing and acknowledging, and another takes up the file."""
    path, url = tmp_path / "run", f"unix://{tmp_path}/socket"
    groups = [record(number, [1, 1]) if number % 2 else [rollout(str(number))] for number in range(6)]
    with monkeypatch.context() as patch:
        calls: list[str] = []
        acknowledge = Received.ack

        def cut_off(self: Received) -> None:
            calls.append(self.id)
            if len(calls) == 3:
                raise OSError("cut off")
            acknowledge(self)

        patch.setattr(Received, "ack", cut_off)
        recorder = Recorder(url, path, sync=False).__enter__()
        sender = Sender(url)
        deliveries = [await sender.send(group) for group in groups]
        with pytest.raises(OSError, match="cut off"):
            await asyncio.to_thread(joined, recorder)
    assert not any(delivery.acknowledged for delivery in deliveries[2:])
    assert len(TrajectoryReader(path)) == 3
    with Recorder(url, path):
        await sender.aclose()
        dataset = [sample.sample_id for sample in islice(TrajectoryDataset(path, wait=30), 9)]
    assert sorted(dataset) == sorted(names(one for group in groups for one in group))
    assert len(TrajectoryReader(path)) == 6


def joined(recorder: Recorder) -> None:
    recorder._thread.join(60)
    recorder.close()


async def test_what_is_no_trajectory_ends_the_recording_by_name(tmp_path: Path) -> None:
    recorder = Recorder(f"unix://{tmp_path}/socket", tmp_path / "run").__enter__()
    sender = Sender(recorder.url)
    await sender.send({"a": 1})
    with pytest.raises(
        TrajectoryError,
        match="a message cannot be recorded - expected a trajectory, or a list of them, got dict",
    ):
        await asyncio.to_thread(joined, recorder)
    with suppress(ShippingError):
        await sender.aclose(0.01)
    with pytest.raises(ShippingError, match="ack: a recorder sets this option itself"):
        Recorder(f"unix://{tmp_path}/socket", tmp_path / "run", ack="taken")
