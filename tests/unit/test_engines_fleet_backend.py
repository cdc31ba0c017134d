"""Rollouts through a client of many engines."""

import asyncio

import pytest

from end_to_end import no_placeholders, roll_out_many
from mmrender import Renderer, RendererClient, Trajectory, generate
from mmrender.client.local import LocalBackend
from mmrender.engines import FleetBackend, InferenceEngineClient
from mmrender.engines.local_engine import LocalEngine
from mmrender.errors import PromptTooLongError


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(tiny_model, image_backend="pil")


def fleet_of(tiny_model, renderer, count=2):
    locals_ = [LocalBackend(tiny_model) for _ in range(count)]
    engines = [LocalEngine(local, name=f"engine-{index}") for index, local in enumerate(locals_)]
    return InferenceEngineClient(engines, renderer=renderer)


def test_rollouts_are_those_of_one_engine(tiny_model, renderer):
    async def both():
        fleet = fleet_of(tiny_model, renderer)
        options = {"sampling_params": no_placeholders(renderer)}
        try:
            found = await roll_out_many(RendererClient(renderer, backend=FleetBackend(fleet), **options), 3)
            alone = await roll_out_many(
                RendererClient(renderer, backend=LocalBackend(tiny_model), **options), 3
            )
        finally:
            await fleet.teardown()
        return found, alone

    found, alone = asyncio.run(both())
    for ours, theirs in zip(found, alone, strict=True):
        assert [step.completion_ids.tolist() for step in ours.steps] == [
            step.completion_ids.tolist() for step in theirs.steps
        ]
        assert all(step.extra["why_rendered"] is None for step in ours.steps[2:])
        assert len(ours.samples()) == len(theirs.samples())


def test_a_pause_is_not_seen_by_a_rollout(tiny_model, renderer):
    async def paused():
        fleet = fleet_of(tiny_model, renderer, 1)
        client = RendererClient(
            renderer, backend=FleetBackend(fleet), sampling_params={"max_tokens": 40, "temperature": 0.0}
        )
        messages = [{"role": "user", "content": "Count to twenty."}]
        task = asyncio.ensure_future(client.create_completion(messages, trajectory=Trajectory("a")))
        await asyncio.sleep(0.05)
        await fleet.pause_generation("abort")
        await fleet.resume_generation()
        completion = await task
        undisturbed = await client.create_completion(messages)
        await fleet.teardown()
        return completion.generation, undisturbed.generation

    disturbed, plain = asyncio.run(paused())
    assert disturbed.completion_ids == plain.completion_ids
    assert disturbed.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_the_limit_is_that_of_the_engines(tiny_model, renderer):
    async def too_long():
        fleet = InferenceEngineClient(
            [LocalEngine(LocalBackend(tiny_model, max_model_len=32))], renderer=renderer
        )
        try:
            await generate(
                renderer=renderer,
                messages=[{"role": "user", "content": "word " * 64}],
                model="tiny",
                backend=FleetBackend(fleet),
            )
        finally:
            await fleet.teardown()

    with pytest.raises(PromptTooLongError) as caught:
        asyncio.run(too_long())
    assert caught.value.max_prompt_len == 31
