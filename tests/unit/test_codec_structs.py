"""Types are read for the first time by many threads at once."""

import subprocess
import sys

SCRIPT = """
import sys, threading
import mmcodecs, msgspec

sys.setswitchinterval(1e-6)
data = mmcodecs.encode({"items": [{"a": 1, "b": {"x": [1]}}], "more": {}})
for number in range(40):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", dict[str, list[int]]), ("c", str, "")])
    kind = msgspec.defstruct(f"Outer{number}", [("items", list[inner]), ("more", dict[str, inner])])
    barrier = threading.Barrier(6)

    def read():
        barrier.wait()
        assert type(mmcodecs.decode(data, type=kind).items[0]) is inner

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_read_a_type_first_do_not_end_the_process():
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
