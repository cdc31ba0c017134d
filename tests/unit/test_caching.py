"""Caches in memory, by their counters, and on disk."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmrender.caching import FileCache, LRUCache, SingleFlight


def test_those_that_wait_for_a_computation_count_as_hits():
    looked = threading.Semaphore(0)

    class Watched(LRUCache[str, int]):
        def get(self, key):
            value = super().get(key)
            looked.release()
            return value

    cache = Watched(10)

    def compute():
        for _ in range(5):  # all have looked, and found nothing
            looked.acquire()
        return 1

    with ThreadPoolExecutor(5) as threads:
        assert [*threads.map(lambda _: cache.get_or_compute("key", compute), range(5))] == [1] * 5
    assert (cache.stats.hits, cache.stats.misses) == (4, 1)


def test_a_computation_that_fails_is_left_to_a_thread_that_waits():
    flight, looked, go_on = SingleFlight(), threading.Semaphore(0), threading.Event()

    def find():
        looked.release()

    def fail():
        go_on.wait()
        raise KeyError("of the first")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(flight.run, "key", find, fail)
        looked.acquire()
        second = threads.submit(flight.run, "key", find, lambda: "of the second")
        looked.acquire()
        go_on.set()
        assert repr(first.exception()) == "KeyError('of the first')"
        assert second.result() == "of the second"
    assert flight.run("key", lambda: "kept", lambda: pytest.fail("computed again")) == "kept"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_leavings_of_a_crash_are_cleared_once_they_are_old(tmp_path, monkeypatch):
    cache = FileCache(tmp_path)
    child = os.fork()
    if not child:
        Path.replace = lambda *_: os._exit(0)  # a crash before the file has its name
        cache.put("value", 1)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    cache.put("value", 2)
    assert left.exists()  # another process may be writing it
    hour_ago = time.time() - 3600
    os.utime(left, (hour_ago, hour_ago))
    cache.put("value", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]
    assert cache.get("value", int) == 3


def test_a_value_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    FileCache(tmp_path).put("value", 1)
    assert [*tmp_path.iterdir()] == []
