"""Who reads which record: every element once, however readers, files and rounds change; no file is needed."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.training.order import Element, Pass, Place

FILES = ["0", "1/a.mmc", "1/b/c.mmc"]
ITEMS = 3
"""Items of each record."""


class Reader:
    """A reader that takes items, and rounds as it finds them."""

    def __init__(self, place: Place) -> None:
        self.place, self.rest = place, Pass(place.earlier)
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


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    seed=st.none() | st.integers(0, 2**40),
    weights=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.0, 2.0, 2.5]), min_size=2, max_size=2),
    epoch=st.integers(0, 3),
)
def test_every_element_is_read_once(data: Any, seed: int | None, weights: list[float], epoch: int) -> None:
    counts = data.draw(st.dictionaries(st.sampled_from(FILES), st.integers(0, 12), min_size=1))

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
            reader = Reader(place(number, readers, earlier, counts))
            for _ in range(1 if is_last else data.draw(st.integers(1, 2))):
                taken.update(reader.take(10**6 if is_last else data.draw(st.integers(0, 9)), counts))
                if not is_last and data.draw(st.booleans()):
                    grow()
            state = reader.place.state()
            del state["earlier"]
            arrangement.append(state)
        earlier = [*earlier, arrangement]
    whole = Pass([]).elements(place(0, 1, [], counts))
    assert taken == Counter((element, item) for element in whole for item in range(ITEMS))
    for file, count in counts.items():
        weight = weights[int(file[0])]
        times = Counter(element.record for element in whole if element.file == file)
        assert all(int(weight) <= times[record] <= int(weight) + (weight % 1 > 0) for record in range(count))


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
