"""Who reads which record: every element once, however readers, files and rounds change; no file is needed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.training.order import Element, Pass, Place
from mmrender.trajectory.delivery import DeliveryId
from mmrender.trajectory.index import RecordIds

Ids: TypeAlias = Callable[[str], RecordIds]
FILES = ["0", "1/a.mmc", "1/b/c.mmc"]
SENDERS = ["a" * 32, "b" * 32]
SHIPPED = {
    file: RecordIds.of(str(DeliveryId(SENDERS[n % 2], 1 + 3 * n + first)) for n in range(200))
    for first, file in enumerate(FILES)
}
"""Two senders ship to each file, and no message to two of them."""
ITEMS = 3
"""Items of each record."""


class Reader:
    """A reader that takes items, and rounds as it finds them."""

    def __init__(self, place: Place, ids: Ids) -> None:
        self.place, self.rest = place, Pass(place.earlier, ids)
        self.elements = self.rest.elements(place)

    def take(self, items: int, counts: dict[str, int]) -> list[tuple[Element, int]]:
        """Take up to some items, and begin rounds with the records that are there."""
        taken: list[tuple[Element, int]] = []
        while len(taken) < items:
            place = self.place
            if place.position == len(self.elements):
                place.done, place.counts, place.position = place.done | place.counts, dict(counts), 0
                self.elements = self.rest.elements(place)
                if not self.elements:
                    break
            element = self.elements[place.position]
            place.item = max(place.item, self.rest.items.get(element, 0))
            if place.item < ITEMS:
                taken.append((element, place.item))
                place.item += 1
            if place.item == ITEMS and (len(taken) < items or len(taken) % 2):  # or the state is at its end
                place.position, place.item = place.position + 1, 0
        return taken


@settings(max_examples=75, deadline=None)
@given(
    data=st.data(),
    seed=st.none() | st.integers(0, 2**40),
    weights=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.0, 2.0, 2.5]), min_size=2, max_size=2),
    epoch=st.integers(0, 3),
)
def test_every_element_is_read_once(data: Any, seed: int | None, weights: list[float], epoch: int) -> None:
    counts = data.draw(st.dictionaries(st.sampled_from(FILES), st.integers(0, 12), min_size=1))
    ids = SHIPPED.__getitem__ if data.draw(st.booleans()) else lambda _: RecordIds.of([])

    def grow() -> None:
        for file, more in data.draw(st.dictionaries(st.sampled_from(FILES), st.integers(1, 5))).items():
            counts[file] = counts.get(file, 0) + more

    def place(reader: int, readers: int, earlier: list[Any], seen: dict[str, int]) -> Place:
        return Place(reader, readers, epoch, seed, weights, True, dict(seen), earlier=earlier)

    taken: Counter[tuple[Element, int]] = Counter()
    earlier: list[list[dict[str, Any]]] = []
    for is_last in (*[False] * data.draw(st.integers(0, 3)), True):
        readers = data.draw(st.integers(1, 5))
        arrangement = []
        for number in range(readers):
            reader = Reader(place(number, readers, earlier, counts), ids)
            for _ in range(1 if is_last else data.draw(st.integers(1, 2))):
                taken.update(reader.take(10**6 if is_last else data.draw(st.integers(0, 9)), counts))
                if not is_last and data.draw(st.booleans()):
                    grow()
            state = reader.place.state()
            del state["earlier"]
            arrangement.append(state)
        earlier = [*earlier, arrangement]
    whole = Pass([], ids).elements(place(0, 1, [], counts))
    assert taken == Counter((element, item) for element in whole for item in range(ITEMS))
    for file, count in counts.items():
        weight = weights[int(file[0])]
        times = Counter(element.record for element in whole if element.file == file)
        assert all(int(weight) <= times[record] <= int(weight) + (weight % 1 > 0) for record in range(count))


class Shipments:
    """Files of receivers, to which two senders ship. A sender may ship a message to several files."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.ids: dict[str, list[str | None]] = {}
        self._numbers = [0, 0]

    def of(self, file: str) -> RecordIds:
        return RecordIds.of(self.ids.get(file, []))

    def ship(self) -> None:
        """Write some records: new messages, messages that another file has, and records without an id."""
        for kind in self._data.draw(st.lists(st.integers(0, 4), max_size=8)):
            file = self._data.draw(st.sampled_from(FILES))
            records = self.ids.setdefault(file, [])
            others = [id for each in self.ids.values() for id in each if id is not None and id not in records]
            if kind == 0:
                records.append(None)
            elif kind < 3 and others:
                records.append(self._data.draw(st.sampled_from(others)))
            else:
                self._numbers[kind % 2] += 1
                records.append(str(DeliveryId(SENDERS[kind % 2], self._numbers[kind % 2])))

    @property
    def counts(self) -> dict[str, int]:
        return {file: len(records) for file, records in self.ids.items()}


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    seed=st.none() | st.integers(0, 2**40),
    weights=st.lists(st.sampled_from([1.0, 1.0, 2.0]), min_size=2, max_size=2),
)
def test_a_message_in_several_files_is_read_once(data: Any, seed: int | None, weights: list[float]) -> None:
    """Copies come before, while and after the message is read, and readers change; records without ids stay."""
    shipments = Shipments(data)
    shipments.ship()
    taken: Counter[tuple[Element, int]] = Counter()
    earlier: list[list[dict[str, Any]]] = []
    for is_last in (*[False] * data.draw(st.integers(0, 3)), True):
        readers = data.draw(st.integers(1, 3))
        arrangement = []
        for number in range(readers):
            place = Place(number, readers, 0, seed, weights, True, shipments.counts, earlier=earlier)
            reader = Reader(place, shipments.of)
            for _ in range(1 if is_last else data.draw(st.integers(1, 3))):
                taken.update(
                    reader.take(10**6 if is_last else data.draw(st.integers(0, 9)), shipments.counts)
                )
                if not is_last and data.draw(st.booleans()):
                    shipments.ship()
            state = reader.place.state()
            del state["earlier"]
            arrangement.append(state)
        earlier = [*earlier, arrangement]
    read: Counter[str] = Counter()
    for (element, item), times in taken.items():
        id = shipments.ids[element.file][element.record]
        name = f"{element.file} {element.record}" if id is None else id
        read[f"{name} {element.copy} {item}"] += times
    expected = {
        f"{f'{file} {record}' if id is None else id} 0 {item}"
        for file, records in shipments.ids.items()
        for record, id in enumerate(records)
        for item in range(ITEMS)
    }
    firsts = {name for name in read if name.split()[-2] == "0"}
    assert firsts == expected
    assert set(read.values()) <= {1}


def test_messages_of_a_sender_are_shared_evenly_and_a_copy_has_the_reader_of_its_message() -> None:
    sent = [str(DeliveryId("c" * 32, number)) for number in range(1, 801)]
    ids = {"0": RecordIds.of(sent), "1/x": RecordIds.of(sent[::-1])}
    places = [Place(n, 8, 0, None, [1.0, 1.0], False, {"0": 800, "1/x": 800}) for n in range(8)]
    for place in places:
        rest = Pass([], ids.__getitem__)
        assert {element.file for element in rest.elements(place)} == {"0"}
        assert len(rest.elements(place)) == 100
        only = Pass([], ids.__getitem__).elements(replace(place, counts={"1/x": 800}))
        assert {799 - element.record for element in only} == {one.record for one in rest.elements(place)}


def test_an_order_is_the_same_in_every_release() -> None:
    """States name places in it."""
    shuffled = Place(0, 2, 3, 7, [1.0, 1.5], False, {"0": 6, "1/a.mmc": 3})
    order = [("1/a.mmc", 1, 1), ("0", 4, 0), ("0", 0, 0), ("0", 2, 0), ("1/a.mmc", 1, 0)]
    assert [tuple(one) for one in Pass([]).elements(shuffled)] == order


def test_many_files_of_one_record_are_spread_over_readers() -> None:
    counts = {f"0/{number}.mmc": 1 for number in range(4000)}
    shares = [len(Pass([]).elements(Place(n, 8, 0, None, [1.0], False, counts))) for n in range(8)]
    assert sum(shares) == 4000
    assert 430 < min(shares) <= max(shares) < 570
