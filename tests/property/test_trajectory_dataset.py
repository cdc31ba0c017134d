"""A dataset of shipped trajectories: wherever it is cut off and resumed, every sample comes once, in order."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.errors import BatchError, ShippingError, TrajectoryError
from mmrender.shipping import BlockingSender, Recorder
from mmrender.shipping.receiver import Received
from mmrender.training import TrajectoryDataset
from mmrender.trajectory import (
    Trajectory,
    TrajectoryReader,
    TrajectoryWriter,
    load_trajectories,
    save_trajectories,
)


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


@settings(max_examples=80, deadline=None)
@given(
    records=RECORDS,
    later=RECORDS,
    cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4),
    workers=st.integers(1, 3),
    follows=st.booleans(),
)
def test_what_was_taken_and_what_is_resumed_are_the_whole_stream(
    tmp_path_factory: Any, records: Any, later: Any, cuts: Any, workers: int, follows: bool
) -> None:
    """A pass is cut off after `taken` samples and a checkpoint, and `lost` ones after it; the file grows meanwhile."""
    whole = [record(number, branches) for number, branches in enumerate([*records, *later])]
    options = {"wait": 1e-9} if follows else {}
    for number in range(workers):
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
            again = names(each for held in list(TrajectoryReader(path))[number::workers] for each in held)
            assert [sample.sample_id for sample in TrajectoryDataset(path, **options)] == again
        held = whole if follows and cuts else whole[: len(records)]
        assert got == names(each for own in held[number::workers] for each in own)


def test_a_dataset_has_no_length_and_makes_what_it_is_asked_for(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "run", [record(0, [1, 1]), record(1, [2])])
    dataset = TrajectoryDataset(tmp_path / "run", make=lambda group: [len(group)])
    assert list(torch.utils.data.DataLoader(dataset, batch_size=None)) == [2, 1]
    with pytest.raises(TypeError):
        len(dataset)
    state = dataset.state_dict()
    dataset = TrajectoryDataset(tmp_path / "run", make=lambda group: [])
    dataset.load_state_dict({**state, "record": 1, "item": 1})
    with pytest.raises(
        BatchError, match=r"run\[1\]: a record gives fewer items than when the state was taken"
    ):
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
    next(iter(dataset))
    state = dataset.state_dict()
    other = TrajectoryReader(tmp_path / "other").checksum(0)
    for name, problem in (
        ("other[0]", f"expected the checksum {state['checksum']}, got {other}"),
        ("short", "expected 2 records or more, got 1"),
    ):
        with pytest.raises(BatchError) as caught:
            TrajectoryDataset(tmp_path / name.removesuffix("[0]")).load_state_dict(state)
        assert str(caught.value) == (
            f"{tmp_path / name}: the state is that of another file - {problem}. "
            "Keep the file that was trained on, and only append to it"
        )
    with worker(1, 2), pytest.raises(BatchError) as caught:
        TrajectoryDataset(tmp_path / "run").load_state_dict(state)
    assert str(caught.value) == (
        "state: the state is that of another worker - expected worker 1 of 2, got worker 0 of 1. "
        "Load states with as many workers as they were taken with"
    )


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


def ids_of(samples: Any) -> list[str]:
    return [sample.sample_id for sample in samples]


def test_what_is_shipped_is_on_disk_once_before_it_is_acknowledged(
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
            if len(calls) == 5:  # each message is acknowledged here, and then on the receiver's loop
                raise OSError("cut off")
            acknowledge(self)

        patch.setattr(Received, "ack", cut_off)
        recorder = Recorder(url, path, sync=False).__enter__()
        sender = BlockingSender(url)
        sender.open()
        deliveries = [sender.send(group, id=f"task-{number}") for number, group in enumerate(groups)]
        with pytest.raises(OSError, match="cut off"):
            joined(recorder)
    assert not any(delivery.acknowledged for delivery in deliveries[2:])
    assert len(TrajectoryReader(path)) == 3
    with Recorder(url, path), BlockingSender(url) as again:
        for number in (0, 5):  # a worker that was started again repeats itself
            again.send(groups[number], id=f"task-{number}")
        sender.close()
        again.flush(30)
        dataset = [sample.sample_id for sample in islice(TrajectoryDataset(path, wait=30), 9)]
    assert sorted(dataset) == sorted(names(one for group in groups for one in group))
    assert len(TrajectoryReader(path)) == 6


def joined(recorder: Recorder) -> None:
    recorder._thread.join(30)
    recorder.close()


def test_what_is_no_trajectory_ends_the_recording_by_name(tmp_path: Path) -> None:
    recorder = Recorder(f"unix://{tmp_path}/socket", tmp_path / "run").__enter__()
    sender = BlockingSender(recorder.url)
    sender.open()
    sender.send({"a": 1})
    with pytest.raises(
        TrajectoryError,
        match="a message cannot be recorded - expected a trajectory, or a list of them, got dict",
    ):
        joined(recorder)
    with suppress(ShippingError):
        sender.close(0.01)
    with pytest.raises(ShippingError, match="ack: a recorder sets this option itself"):
        Recorder(f"unix://{tmp_path}/socket", tmp_path / "run", ack="taken")
