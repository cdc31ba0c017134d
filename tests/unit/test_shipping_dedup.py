"""Each id once: in memory, over restarts, through a torn file, and for several senders of one message."""

import asyncio
import os

import pytest

from mmrender.errors import ShippingError
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.inbox import Inbox
from mmrender.shipping.seen import SeenIds
from shipping_cases import PATIENT


def test_ids_are_known_again_after_a_restart(tmp_path):
    seen = SeenIds(tmp_path / "new" / "folder")
    for name in ("a", "b", "ü"):
        seen.add(name)
    seen.close()
    again = SeenIds(tmp_path / "new" / "folder", known=["from elsewhere"])
    assert all(name in again for name in ("a", "b", "ü", "from elsewhere"))
    assert "c" not in again
    assert len(again) == 4
    again.close()


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_torn_line_is_cut_off_and_what_follows_is_whole(tmp_path, cut):
    path = tmp_path / "acknowledged.ids"
    path.write_bytes(b"first\nsecond"[: 6 + cut])
    seen = SeenIds(tmp_path)
    assert "first" in seen
    assert len(seen) == 1
    seen.add("third")
    seen.close()
    assert path.read_bytes() == b"first\nthird\n"


def test_the_window_bounds_memory_and_file(tmp_path):
    seen = SeenIds(tmp_path, window=10)
    for number in range(100):
        seen.add(f"id {number}")
    assert len(seen) == 10
    assert "id 99" in seen
    assert "id 89" not in seen
    lines = (tmp_path / "acknowledged.ids").read_text().splitlines()
    assert len(lines) <= 21
    assert lines[-1] == "id 99"
    with pytest.raises(
        ShippingError, match="another receiver uses this folder"
    ):  # also after it was rewritten
        SeenIds(tmp_path)
    seen.close()
    again = SeenIds(tmp_path, window=10)
    assert [f"id {number}" in again for number in (90, 99, 89)] == [True, True, False]
    again.close()
    assert sorted(os.listdir(tmp_path)) == ["acknowledged.ids"]


def test_a_note_that_cannot_be_written_counts_for_nothing(tmp_path, monkeypatch):
    seen = SeenIds(tmp_path, sync=True)
    seen.add("a")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        seen.add("b")
    assert "b" not in seen
    monkeypatch.undo()
    seen.close()
    assert (tmp_path / "acknowledged.ids").read_text() == "a\n"


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_file_that_cannot_be_rewritten_stays_in_use_and_is_tried_again(tmp_path, monkeypatch, caplog):
    seen = SeenIds(tmp_path, window=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for name in "abcdef":
            seen.add(name)
            assert name in seen
    path = tmp_path / "acknowledged.ids"
    assert path.read_text() == "a\nb\nc\nd\ne\nf\n"
    assert "cannot be written anew: [Errno 28] No space left on device" in caplog.text
    assert (tmp_path / "acknowledged.new").stat().st_size == 0
    seen.add("g")
    assert path.read_text() == "f\ng\n"
    seen.add("h")
    seen.close()
    again = SeenIds(tmp_path, window=3)
    assert all(name in again for name in "fgh")
    again.close()


def test_a_rewrite_that_fails_is_not_repeated_at_every_note(tmp_path, monkeypatch):
    seen = SeenIds(tmp_path, window=64)
    rewrites = []
    monkeypatch.setattr(os, "replace", lambda *_: rewrites.append(1) or full())
    for number in range(128 + 1 + 20):
        seen.add(str(number))
    assert len(rewrites) == 5
    seen.close()


def test_with_sync_the_name_of_the_file_is_synced_before_a_note_counts(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    folder = tmp_path / "new" / "folder"
    seen = SeenIds(folder, window=1, sync=True)
    assert synced == [str(tmp_path / "new"), str(tmp_path), str(folder)]
    synced.clear()
    file, draft = (str(folder / f"acknowledged.{end}") for end in ("ids", "new"))
    for name in "abcd":
        seen.add(name)
    assert synced == [file, file, file, draft, file, str(folder)]

    def folders_fail(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(folder):
            full()

    monkeypatch.setattr(os, "fsync", folders_fail)
    seen.add("e")  # leads to a rewrite, whose name may be lost with the machine
    assert "e" in seen
    with pytest.raises(OSError, match="No space"):
        seen.add("f")
    assert "f" not in seen
    monkeypatch.setattr(os, "fsync", fsync)
    seen.add("g")
    seen.close()
    assert (folder / "acknowledged.ids").read_text() == "e\ng\n"


def test_a_message_is_handed_on_when_the_file_of_ids_cannot_be_rewritten(tmp_path, monkeypatch):
    async def run():
        monkeypatch.setattr(os, "replace", full)
        receiver = Receiver(f"unix://{tmp_path}/a", folder=tmp_path / "ids", dedup_window=2)
        async with receiver, Sender(receiver.url, timing=PATIENT) as sender:
            for number in range(8):
                await sender.send(number, id=f"m{number}")
            assert [(await receiver.receive(5)).value for _ in range(8)] == list(range(8))
            await sender.flush(5)

    asyncio.run(run())


def test_an_id_that_several_connections_ask_for_is_taken_once_and_all_are_told():
    class Owner:
        def __init__(self, peer):
            self.peer, self.closed, self.said = peer, False, []

        def took(self, seq):
            self.said.append(("took", seq))

        def finished(self, seq):
            self.said.append(("finished", seq))

    first, second, third = (Owner(name) for name in "abc")
    inbox = Inbox(SeenIds())
    inbox.put("x", 1, 100, (first, 5))
    first.closed = True
    assert inbox.orphaned == (1, 100)
    entry = inbox.ask("x", (second, 7))
    assert entry.owner == (second, 7)
    assert inbox.orphaned == (0, 0)
    inbox.put("x", 1, 100, (third, 9))
    assert third.said == [("took", 9)]
    assert inbox.ask("y", (third, 10)) == "new"
    assert len(inbox) == 1
    inbox.ack("x")  # nobody has taken it yet
    assert "x" not in inbox.seen
    assert inbox.take().value == 1
    assert inbox.ask("x", (third, 11)) == "held"
    inbox.ack("x")
    inbox.ack("x")
    assert second.said == [("took", 7), ("finished", 7)]
    assert third.said == [("took", 9), ("finished", 9), ("finished", 11)]
    assert inbox.ask("x", (third, 12)) == "acked"
    inbox.put("x", 1, 100, (third, 13))
    assert third.said[-2:] == [("took", 13), ("finished", 13)]
    assert inbox.duplicates == 2
    assert inbox.take() is None


def test_a_worker_that_starts_over_sends_nothing_twice(tmp_path):
    async def worker(url: str) -> None:
        async with Sender(url) as sender:
            for number in range(5):
                await sender.send(number, id=f"rollout {number}")

    async def run():
        async with Receiver(f"unix://{tmp_path}/a", folder=tmp_path / "ids") as receiver:
            first = asyncio.ensure_future(worker(receiver.url))
            got = [(await receiver.receive(5)).value for _ in range(5)]
            await first
            await worker(receiver.url)  # all of it is known
            assert receiver.stats.duplicates == 5
            assert receiver.stats.queued == 0
            assert got == [0, 1, 2, 3, 4]
        async with Receiver(f"unix://{tmp_path}/a", folder=tmp_path / "ids") as receiver:
            await worker(receiver.url)
            assert receiver.stats.queued == 0

    asyncio.run(run())


def test_an_acknowledgement_that_cannot_be_noted_is_not_given(tmp_path, monkeypatch):
    async def run():
        receiver = Receiver(f"unix://{tmp_path}/a", ack="explicit", folder=tmp_path)
        async with receiver, Sender(receiver.url, timing=PATIENT) as sender:
            delivery = await sender.send("x", id="x")
            message = await receiver.receive(5)
            with monkeypatch.context() as patch:
                patch.setattr(
                    receiver._inbox.seen, "add", lambda id: (_ for _ in ()).throw(OSError("disk full"))
                )
                with pytest.raises(OSError, match="disk full"):
                    message.ack()
            await asyncio.sleep(0.05)
            assert not delivery.done
            message.ack()
            await asyncio.wait_for(delivery, 5)

    asyncio.run(run())


def test_two_receivers_do_not_share_a_folder(tmp_path):
    async def run():
        async with Receiver("memory://one", folder=tmp_path):
            with pytest.raises(ShippingError) as caught:
                Receiver("memory://two", folder=tmp_path)
            assert str(caught.value) == f"{tmp_path}: another receiver uses this folder"
        await Receiver("memory://two", folder=tmp_path).aclose()

    asyncio.run(run())
