"""RendererClient: what it bridges, what it renders and why, what it does with prompts that are too long."""

import asyncio
from itertools import count

import pytest

from kit import assistant, raised
from mmrender.client.server_facts import forget
from mmrender.errors import InputError, PromptTooLongError
from mmrender.messages import Message
from mmrender.renderer import RendererPool
from mmrender.rollout.client import RendererClient
from mmrender.trajectory.tree import Trajectory
from rollout_cases import TOOLS, ScriptedBackend, call, shown, text


def user(words, *images):
    return {"role": "user", "content": [*map(shown, images), text(words)]}


SYSTEM = {"role": "system", "content": "Look closely."}
OPENING = [SYSTEM, user("Which animal is this?", 1)]


class Talk:
    """A client with its trajectory, asked turn by turn."""

    def __init__(self, renderer, *answers, limit=None, hidden_limit=None, **options):
        said = iter(answers)
        limits = {"limit": limit, "hidden_limit": hidden_limit}
        self.backend = ScriptedBackend(renderer, lambda _: next(said), **limits)
        self.client = RendererClient(renderer, backend=self.backend, model="m", **options)
        self.trajectory = Trajectory("talk")

    def ask(self, messages, **options):
        options = {"trajectory": self.trajectory, **options}
        return asyncio.run(self.client.create_completion(messages, **options))


def test_a_turn_is_bridged_from_the_one_before(renderer):
    talk = Talk(renderer, "A cow.", "Sand.")
    first = talk.ask(OPENING)
    second = talk.ask([*OPENING, first.message, user("And where is it?", 2)])
    assert first.why_rendered == "the conversation begins"
    assert second.why_rendered is None
    assert second.step.parent is first.step
    assert second.step.keep == len(first.step)
    assert second.step.prompt_ids[: len(first.step)].tolist() == first.step.token_ids.tolist()
    assert len(second.step.multi_modal_data.mm_items["image"]) == 2
    assert talk.backend.requests[1].prompt_ids == second.step.prompt_ids.tolist()
    assert (second.finish_reason, second.message.content) == ("stop", "Sand.")
    assert second.step.logprobs.tolist() == pytest.approx(second.generation.logprobs)
    assert second.step.extra == {"why_rendered": None}
    assert first.step.messages == [
        SYSTEM,
        {"role": "user", "content": [{"type": "image"}, text("Which animal is this?")]},
        assistant("A cow."),
    ]  # without its picture


def test_a_message_that_is_changed_in_its_place_begins_anew(renderer):
    talk = Talk(renderer, "A cow.", "Sand.", "Grass.")
    opening = [dict(SYSTEM), user("Which animal is this?", 1)]
    turn = talk.ask(opening)
    messages = [*opening, turn.message, user("And where is it?")]
    talk.ask(messages)
    opening[0]["content"] = "Look away."
    assert talk.ask(messages).why_rendered == "the conversation continues no earlier step"
    assert talk.trajectory.steps[-1].messages[0] == {"role": "system", "content": "Look away."}


def test_messages_may_be_echoed_in_other_forms(renderer):
    talk = Talk(renderer, f"<think>\nIt has horns.\n</think>\n\nA cow.{call(3)}", "Sand.")
    first = talk.ask(OPENING, tools=TOOLS)
    called = {"id": "call_0_0", "type": "function", "function": {"name": "look", "arguments": '{"at":3}'}}
    echo = {"role": "assistant", "content": [text("A cow.")], "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "call_0_0", "content": [shown(2), text("closer")]}
    second = talk.ask([*OPENING, echo, result], tools=TOOLS)
    assert (first.finish_reason, first.message.reasoning_content) == ("tool_calls", "It has horns.")
    assert first.message.tool_calls[0].id == "call_0_0"
    assert second.why_rendered is None
    assert second.step.parent is first.step
    assert first.step.tools == tuple(TOOLS)
    assert second.step.tools is first.step.tools
    (sample,) = talk.trajectory.samples()
    assert sample.tools is first.step.tools


def test_a_bridged_step_has_the_tools_that_its_prompt_shows(renderer):
    """Whose keys came in another order than in the later call; without tools it has none."""
    talk = Talk(renderer, "A cow.", "Sand.", "Sky.")
    turned = [dict(reversed(tool.items())) for tool in TOOLS]
    first = talk.ask(OPENING, tools=TOOLS)
    second = talk.ask([*OPENING, first.message, user("Where?")], tools=turned)
    assert second.why_rendered is None
    assert list(second.step.tools[0]) == list(TOOLS[0])
    assert talk.ask(OPENING).step.tools is None


def said(words):
    return Message(role="assistant", content=words)


NEW, OTHER = (
    "the conversation continues no earlier step",
    "the conversation has another turn than step 0 sampled",
)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda turn: [SYSTEM, user("Which one?", 1), turn, user("Where?")], NEW),
        (lambda turn: [SYSTEM, user("Which animal is this?", 5), turn, user("Where?")], NEW),
        (lambda turn: [*OPENING, said("A dog."), user("Where?")], OTHER),
        (lambda turn: [*OPENING, turn], "nothing follows the turn of step 0"),
        (lambda turn: [*OPENING, turn, user("a"), said("b"), user("c")], "a turn after step 0 was not sampled here"),
    ],
    ids=range(5),
)  # fmt: skip
def test_what_cannot_be_bridged_is_rendered_and_says_why(renderer, change, why):
    talk = Talk(renderer, "A cow.", "Sand.")
    first = talk.ask(OPENING)
    conversation = change(first.message)
    second = talk.ask(conversation)
    assert (second.why_rendered, second.step.extra["why_rendered"]) == (why, why)
    full = renderer.render(conversation, add_generation_prompt=True)
    assert second.step.prompt_ids.tolist() == full.token_ids


def test_other_tools_and_the_renderers_own_reason_are_named(renderer, monkeypatch):
    talk = Talk(renderer, "A cow.", "Sand.", "Sky.")
    going_on = [*OPENING, talk.ask(OPENING, tools=TOOLS).message, user("Where?")]
    assert talk.ask(going_on).why_rendered == "step 0 had other tools"
    monkeypatch.setattr(renderer, "bridge_to_next_turn", lambda *_, **__: None)
    monkeypatch.setattr(type(renderer), "why_not_bridged", property(lambda _: "the moon is full"))
    assert talk.ask(going_on, tools=TOOLS).why_rendered == "the moon is full"


def test_the_newest_step_that_fits_is_taken(renderer):
    spelled = [token for letter in "A cow." for token in renderer.tokenizer.encode(letter)]
    talk = Talk(renderer, "A cow.", spelled, "Sand.", "Sky.")
    first, again = talk.ask(OPENING), talk.ask(OPENING)
    assert first.message == again.message
    assert first.step.token_ids.tolist() != again.step.token_ids.tolist()
    going_on = [*OPENING, first.message, user("Where?")]
    newest, named = talk.ask(going_on), talk.ask(going_on, parent=first.step)
    assert newest.step.prompt_ids[: len(again.step)].tolist() == again.step.token_ids.tolist()
    assert named.step.prompt_ids[: len(first.step)].tolist() == first.step.token_ids.tolist()


def test_without_a_trajectory_or_a_known_one_nothing_is_continued(renderer):
    talk = Talk(renderer, "A cow.", "A cow.", "Sand.")
    alone = talk.ask(OPENING, trajectory=None)
    assert (alone.step, alone.message.content, len(talk.trajectory)) == (None, "A cow.", 0)
    first = talk.ask(OPENING)
    talk.client.forget(talk.trajectory)
    second = talk.ask([*OPENING, first.message, user("Where?")])
    assert second.why_rendered == "step 0 was not made by this client"


def test_a_pool_bridges_as_a_renderer_does(renderer):
    with RendererPool(renderer, workers=1, media_threads=0) as pool:
        talk = Talk(pool, "A cow.", "Sand.", "Sky.")
        first = talk.ask(OPENING)
        second = talk.ask([*OPENING, first.message, user("Where?", 2)])
        assert second.why_rendered is None
        third = talk.ask([*OPENING, said("A dog."), user("Where?")])
        assert third.why_rendered == OTHER


def length_of(renderer, conversation):
    return len(renderer.render(conversation, add_generation_prompt=True))


def test_too_long_is_an_error_or_stops(renderer):
    length = length_of(renderer, OPENING)
    talk = Talk(renderer, limit=length - 1)
    refused = raised(PromptTooLongError, talk.ask, OPENING)
    assert (refused.prompt_len, refused.max_prompt_len) == (length, length - 1)
    assert len(talk.trajectory) == len(talk.backend.requests) == 0
    stopped = Talk(renderer, limit=length - 1, overlong="stop").ask(OPENING)
    assert (stopped.finish_reason, stopped.generation, stopped.step) == ("prompt_too_long", None, None)
    assert stopped.message.content == ""
    with pytest.raises(PromptTooLongError, match="No whole turn is left to leave out") as refused:
        Talk(renderer, limit=20, overlong="drop_oldest_turns").ask(OPENING)
    assert (refused.value.where, refused.value.max_prompt_len) == ("messages", 20)


def test_oldest_turns_are_left_out_with_their_images(renderer):
    talk = Talk(renderer, *(f"Answer {n}." for n in range(8)), limit=400, overlong="drop_oldest_turns")
    conversation = [SYSTEM]
    reasons = []
    for number in range(8):
        conversation.append(user(f"Question {number}? " + "What do you see here? " * 4, number))
        done = talk.ask(conversation)
        conversation.append(done.message)
        reasons.append(done.why_rendered)
        asked = number + 1 - len(done.left_out) // 2
        assert len(done.step.prompt_ids) <= 400
        assert done.left_out == tuple(range(1, 1 + len(done.left_out)))
        assert len(done.step.multi_modal_data.mm_items["image"]) == asked
    assert reasons[1] is None
    assert "2 messages were left out to fit the engine" in reasons
    assert done.step.extra["left_out"] == list(done.left_out)


def test_after_leaving_out_the_next_turn_is_bridged(renderer):
    short, long = "Yes? ", "What do you see here, and where? " * 12
    conversation = [SYSTEM, user(long, 1)]
    talk = Talk(renderer, "One.", "Two.", "Three.", limit=None, overlong="drop_oldest_turns")
    first = talk.ask(conversation)
    conversation += [first.message, user(short, 2)]
    talk.backend.limit = len(first.step) + 5
    forget(talk.client.engine.transport)  # the limit is remembered
    second = talk.ask(conversation)
    assert second.left_out == (1, 2)
    conversation += [second.message, user(short)]
    third = talk.ask(conversation)
    assert (third.left_out, third.why_rendered) == ((1, 2), None)
    assert third.step.parent is second.step


def test_an_engine_that_only_refuses_is_asked_with_one_turn_less_each_time(renderer):
    conversation = [SYSTEM]
    for number in range(4):
        conversation += [user("Say something long, please. " * 3, number), said("No.")]
    conversation.append(user("Now?"))
    full, less = (length_of(renderer, each) for each in (conversation, [SYSTEM, *conversation[5:]]))
    talk = Talk(renderer, "Well.", hidden_limit=less, overlong="drop_oldest_turns")
    done = talk.ask(conversation)
    assert done.left_out == (1, 2, 3, 4)
    assert [len(request.prompt_ids) for request in talk.backend.requests][::2] == [full, less]


def test_options_and_parameters_of_calls_come_over_those_of_the_client(renderer):
    params = {"temperature": 0.5, "top_k": 3}
    talk = Talk(renderer, "a", "b", sampling_params=params, request_options={"priority": 2})
    talk.ask(OPENING, sampling_params={"top_k": 4})
    talk.ask(OPENING, priority=7, cache_salt="s")
    first, second = talk.backend.requests
    params = [{name: each.sampling_params[name] for name in params} for each in (first, second)]
    assert params == [{"temperature": 0.5, "top_k": 4}, {"temperature": 0.5, "top_k": 3}]
    assert (first.priority, second.priority, second.cache_salt) == (2, 7, "s")


async def test_many_samples_of_one_prompt_at_once(renderer):
    numbers = count()
    backend = ScriptedBackend(renderer, lambda _: f"Answer {next(numbers)}.", delays=iter([5, 0, 3, 1]))
    client = RendererClient(renderer, backend=backend, model="m")
    trajectory = Trajectory("group")
    asked = [client.create_completion(OPENING, trajectory=trajectory) for _ in range(4)]
    done = await asyncio.gather(*asked)
    assert len({tuple(each.step.completion_ids.tolist()) for each in done}) == 4
    assert len(trajectory.branches()) == 4
    assert len(trajectory.items) == 1


def test_what_is_refused(renderer):
    expected = r"^overlong: unknown value .* - expected 'error', 'drop_oldest_turns' or 'stop', got 'cut'$"
    with pytest.raises(InputError, match=expected):
        RendererClient(renderer, backend="local", overlong="cut")
