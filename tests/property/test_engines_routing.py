"""Laws of routing and of waiting for places."""

import asyncio
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.engines.loops import Slots
from mmrender.engines.policy import ClientPolicy
from mmrender.engines.ring import HashRing
from mmrender.engines.routing import ImageMemory, Router

names = st.lists(st.text("abcdef:/.", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
sessions = st.lists(
    st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), max_size=20
)


@given(names, st.text("xyz", min_size=1, max_size=3), sessions)
def test_sessions_move_only_to_the_engine_that_is_added(names, added, sessions):
    before, after = HashRing(names, 16), HashRing([*names, added], 16)
    for session in sessions:
        old, new = before.owner(session, names), after.owner(session, {*names, added})
        assert new in (old, added)
        # Taking it out again, or ejecting it, sends every session home.
        assert after.owner(session, names) == old


@given(names, sessions)
def test_every_engine_is_an_alternative_and_stands_once(names, sessions):
    ring = HashRing(names, 4)
    for session in sessions:
        assert sorted(ring.order(session)) == sorted(names)
        assert ring.owner(session, ()) is None


def test_ids_that_print_alike_are_told_apart():
    ring = HashRing([f"e{index}" for index in range(64)], 64)
    assert any(
        ring.owner(number, ring._names) != ring.owner(str(number), ring._names) for number in range(20)
    )


def test_sessions_are_balanced():
    names = [f"http://10.0.0.{index}:8000" for index in range(8)]
    ring = HashRing(names, ClientPolicy().virtual_nodes)
    counts = dict.fromkeys(names, 0)
    for session in range(10_000):
        counts[ring.owner(f"trajectory-{session}", names)] += 1
    assert max(counts.values()) / 1250 < 1.15
    assert min(counts.values()) / 1250 > 0.85


@given(
    st.lists(st.tuples(st.lists(st.sampled_from("abcdef"), max_size=4), st.sampled_from("xyz")), max_size=30)
)
def test_image_memory_is_bounded_and_knows_the_last_home(notes):
    memory = ImageMemory(3)
    for images, name in notes:
        memory.note(images, name)
        assert len(memory._engines) <= 3
        if images:
            assert memory.best(images) == name
    assert memory.best(["unknown"]) is None


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 30), min_size=1), st.integers(0, 20))
def test_load_decides_without_session_and_images_only_within_the_slack(loads, slack):
    router = Router("abcd", ClientPolicy(image_slack=slack))
    engines = {name: SimpleNamespace(name=name, load=load) for name, load in loads.items()}
    least = min(loads.values())
    assert loads[router.choose(engines)] == least
    home = max(loads, key=loads.__getitem__)
    router.choose({home: engines[home]}, images=["one"])
    chosen = router.choose(engines, images=["one"])
    assert chosen == home if loads[home] <= least + slack else loads[chosen] == least


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["take", "give", "cancel"]), st.integers(0, 9)), max_size=60),
)
@settings(max_examples=60)
def test_places_are_bounded_given_in_order_and_never_lost(limit, steps):
    async def scenario():
        slots = Slots(limit)
        order: list[int] = []
        held: list[int] = []
        waiting: dict[int, asyncio.Task[None]] = {}

        async def take(number):
            await slots.acquire()
            order.append(number)
            held.append(number)

        for number, (step, pick) in enumerate(steps):
            if step == "take":
                waiting[number] = asyncio.create_task(take(number))
            elif step == "give" and held:
                held.pop(0)
                slots.release()
            elif step == "cancel" and waiting:
                task = list(waiting.values())[pick % len(waiting)]
                task.cancel()
            if pick % 3:
                await asyncio.sleep(0)
            assert slots.used <= limit
            assert len(held) <= limit
        for _ in range(2 * len(steps) + 2):
            await asyncio.sleep(0)
            if held:
                held.pop(0)
                slots.release()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        while held:
            held.pop()
            slots.release()
        assert order == sorted(order)
        assert (slots.used, slots.waiting) == (0, 0)

    asyncio.run(scenario())
