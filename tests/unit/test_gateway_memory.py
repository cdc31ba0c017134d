"""A session takes its distinct bytes of memory, and none while it is on disk."""

import asyncio
import gc
import tracemalloc

from mmrender.media.resolve import MediaCache
from mmrender.renderer import Renderer
from session_cases import Agent, Script, distinct_bytes

SESSIONS, TURNS = 6, 6


async def test_memory_of_sessions(tiny_model, tmp_path):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", media_cache=MediaCache(0))
    script = Script(renderer)
    async with script.gateway(tmp_path / "out.mmr") as here:
        sessions = [await here.open_session(f"s{number}") for number in range(SESSIONS)]
        agents = [Agent(session) for session in sessions]
        tracemalloc.start()
        for turn in range(TURNS):
            for number, agent in enumerate(agents):
                await agent.turn(f"turn {turn} of {number}", 100 * number + turn)
        del agents, agent
        script.prompts.clear()
        script.newest = None
        for session in sessions:
            session.rest()
        trees = [await session.trajectory() for session in sessions]
        distinct = distinct_bytes(trees)
        del trees
        assert sum(session.nbytes for session in sessions) < 1.1 * distinct
        gc.collect()
        loaded = tracemalloc.get_traced_memory()[0]
        for session in sessions:
            await session.spill()
        await asyncio.sleep(0)
        gc.collect()
        freed = loaded - tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert distinct < freed < 1.1 * distinct
