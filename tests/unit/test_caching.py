"""Caches in memory: what their counters say."""

import threading
from concurrent.futures import ThreadPoolExecutor

from mmrender.caching import LRUCache


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
