"""Turns of the gateway: prompts, answers and records, over a scripted engine and Qwen3-VL's template."""

import pytest

from gateway_cases import ASKED, Recording, gateway, results, said
from kit import data_url, noise
from mmrender.errors import InputError
from rollout_cases import call as spoken


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers("qwen3_vl")


def numbered(text="I look."):
    """A model that looks once more with each turn."""
    count = iter(range(1, 1000))
    return lambda request: f"{text}\n{spoken(next(count))}"


async def test_a_conversation_is_bridged(renderer):
    session, messages = Recording(renderer, numbered("  I look. \n")), [*ASKED]
    for turn in range(4):
        step, answer = await session.ask(messages)
        assert gateway(step)["prompt"] == ("bridged" if turn else "rendered")
        assert step.previous is (session.trajectory.steps[turn - 1] if turn else None)
        messages += [said(answer, content=answer.content.strip()), *results(answer, f"result {turn}")]
    assert len(session.trajectory.branches()) == 1


async def test_a_changed_result_begins_a_branch_that_keeps_the_turns_after_it(renderer):
    session, messages = Recording(renderer, numbered(" I  look")), [*ASKED]
    for turn in range(3):
        step, answer = await session.ask(messages)
        messages += [said(answer), *results(answer, f"result {turn}")]
    messages[3] = {**messages[3], "content": "another result"}
    step, _ = await session.ask(messages)
    first, second, third = session.trajectory.steps[:3]
    record = gateway(step)
    assert (record["prompt"], record["why_branched"]) == ("joined", "messages[3] differs from step 1's")
    assert step.parent is first
    assert step.keep == len(first)
    rest = step.prompt_ids.tolist()[len(first) :]
    for turn in (second, third):
        sampled = turn.completion_ids.tolist()
        assert any(rest[at : at + len(sampled)] == sampled for at in range(len(rest)))


async def test_a_later_system_message_is_not_lost(renderer):
    session = Recording(renderer, numbered())
    _, answer = await session.ask(ASKED)
    late = {"role": "system", "content": "Hurry up."}
    step, _ = await session.ask([*ASKED, said(answer), *results(answer, "1"), late])
    text = renderer.decode(step.prompt_ids.tolist())
    assert text.count("<system-reminder>\nHurry up.\n</system-reminder>") == 1
    assert gateway(step)["prompt"] == "bridged"
    assert gateway(step)["notes"] == ["messages[4]: a later system message, rendered as a user's reminder"]


async def test_pictures_of_tool_results(renderer):
    session = Recording(renderer, numbered())
    _, answer = await session.ask(ASKED)
    picture = {"type": "image_url", "image_url": {"url": data_url(noise(1))}}
    messages = [*ASKED, said(answer), *results(answer, [picture])]
    step, answer = await session.ask(messages)
    assert len(step.own_media) == 1
    assert gateway(step)["prompt"] == "bridged"
    step, _ = await session.ask([*messages, said(answer), *results(answer, "seen")])
    assert (len(step.own_media), len(step.media)) == (0, 1)
    assert gateway(step)["prompt"] == "bridged"


async def test_a_conversation_that_ends_in_an_answer_is_refused(renderer, sentence):
    session = Recording(renderer, numbered())
    with pytest.raises(InputError) as caught:
        await session.ask([*ASKED, {"role": "assistant", "content": "I"}])
    assert str(caught.value) == sentence
    assert not session.trajectory.steps
