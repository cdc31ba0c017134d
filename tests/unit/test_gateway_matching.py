"""Which step a call continues, with one planted difference at a time."""

import copy
from dataclasses import replace

import pytest

from mmrender.client.types import Usage
from mmrender.content import normalize_messages
from mmrender.errors import InputError
from mmrender.gateway.call import Answer, AnswerCall, Call, Origin, new_id
from mmrender.gateway.matching import Index
from mmrender.gateway.reading import read_arguments
from rollout_cases import TOOLS

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "How many?"}
OTHER_TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {}}}


def answer(content="", *calls, protocol="chat"):
    prefix = "toolu_" if protocol == "messages" else "call_"
    made = tuple(AnswerCall(prefix + new_id(), name, arguments) for name, arguments in calls)
    return Answer(new_id(), 0, 0, None, content, made, "stop", None, Usage(1, 1))


def repeated(made, **changes):
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in made.calls
    ]
    return {
        "role": "assistant",
        "content": made.content,
        **({"tool_calls": calls} if calls else {}),
        **changes,
    }


def call_of(messages, tools=TOOLS, **fields):
    return Call("chat", "m", normalize_messages(messages), tools=tools and tuple(tools), **fields)


class Session:
    """Answers without a model, and the conversation so far."""

    def __init__(self, **options):
        self.index = Index(**options)
        self.messages = []
        self.answers = []

    def say(self, made, *messages, **fields):
        """Add messages, answer them, and repeat the answer. Returns the place."""
        self.messages += messages
        place = self.index.place(call_of(self.messages, **fields))
        self.index.add(len(self.answers), place.recorded(made))
        self.answers.append(made)
        self.messages.append(repeated(made))
        return place


@pytest.fixture
def session():
    """Two answers: one with a call, and one of text alone."""
    session = Session()
    session.say(
        answer("  I  look.\n", ("look", '{ "at": 1000.0,  "why": "caf\\u00e9"}')),
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [TEXT, PICTURE]},
    )
    result = {"role": "tool", "tool_call_id": session.answers[0].calls[0].id, "content": "3 legs"}
    session.say(answer("Three of them."), result)
    session.messages.append({"role": "user", "content": "Sure?"})
    return session


def changed(messages, path, value):
    """The messages with one value set, or removed if it is `...`."""
    messages = copy.deepcopy(messages)
    *parents, last = path
    inner = messages
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return messages


ARGUMENTS = (2, "tool_calls", 0, "function", "arguments")
SAME = {
    "nothing": ((0, "content"), "Be brief."),
    "one text part": ((0, "content"), [{"type": "text", "text": "Be brief."}]),
    "keys of arguments in another order": (ARGUMENTS, '{"why":"café","at":1000}'),
    "blanks at the ends of an answer": ((2, "content"), "I look."),
    "runs of blanks": ((4, "content"), "Three\n\n of  them. "),
    "reasoning that was added": ((2, "reasoning_content"), "Hm."),
    "an empty text part": (
        (3, "content"),
        [{"type": "text", "text": "3 legs"}, {"type": "text", "text": ""}],
    ),
    "an answer in parts": (
        (4, "content"),
        [{"type": "text", "text": "Three of "}, {"type": "text", "text": "them."}],
    ),
}
REWRITTEN = {
    "other arguments": (ARGUMENTS, '{"at": 2, "why": "café"}'),
    "another tool": ((2, "tool_calls", 0, "function", "name"), "invalid"),
    "other words": ((2, "content"), "I was here."),
    "no text": ((2, "content"), None),
}
OTHER = {
    "system message": ((0, "content"), "Be very brief.", "the system message differs from step 0's"),
    "text": ((1, "content", 0, "text"), "How many ?", "messages[1] differs from step 0's"),
    "picture": (
        (1, "content", 1, "image_url", "url"),
        "data:image/png;base64,AAAB",
        "messages[1] differs from step 0's",
    ),
    "order of parts": ((1, "content"), [PICTURE, TEXT], "messages[1] differs from step 0's"),
    "name": ((1, "name"), "Ann", "messages[1] differs from step 0's"),
    "result": ((3, "content"), "3  legs", "messages[3] differs from step 1's"),
    "id of the result": ((3, "tool_call_id"), "call_1", "messages[3] differs from step 1's"),
    "answer": ((4, "content"), "Four of them.", "messages[4] is another turn than step 1 sampled"),
    "member": ((3, "is_error"), True, "messages[3] differs from step 1's"),
    "call id": (
        (2, "tool_calls", 0, "id"),
        "call_" + "x" * 24,
        None,  # without one of our ids the text and the arguments decide
    ),
    "call id and arguments": (
        (2, "tool_calls", 0),
        {"id": "c", "function": {"name": "look", "arguments": "{}"}},
        "messages[2] is another turn than step 0 sampled",
    ),
    "call": ((2, "tool_calls"), ..., "messages[2] is another turn than step 0 sampled"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_forms_of_one_conversation_are_equal(session, change):
    place = session.index.place(call_of(changed(session.messages, *change)))
    assert (place.parent, place.start, place.why, place.rewritten) == (1, 5, None, ())


@pytest.mark.parametrize("change", REWRITTEN.values(), ids=REWRITTEN)
def test_a_turn_with_our_ids_is_kept_if_the_agent_rewrites_it(session, change):
    call = call_of(changed(session.messages, *change))
    place = session.index.place(call)
    assert (place.parent, place.why, place.rewritten) == (1, None, (0,))


@pytest.mark.parametrize("change", REWRITTEN.values(), ids=REWRITTEN)
def test_a_strict_index_takes_a_rewritten_turn_for_another(change):
    session = Session(strict=True)
    session.say(answer("I look.", ("look", '{"at": 1, "why": "café"}')), {"role": "user", "content": "Look."})
    session.messages[:0] = [{"role": "system", "content": "x"}]
    session.messages.append({"role": "user", "content": "So?"})
    messages = changed(session.messages, *change)[1:]
    place = session.index.place(call_of(messages))
    assert (place.parent, place.why) == (None, "messages[1] is another turn than step 0 sampled")
    assert place.borrowed == {}


@pytest.mark.parametrize(("path", "value", "why"), OTHER.values(), ids=OTHER)
def test_one_difference_makes_another_conversation(session, path, value, why):
    place = session.index.place(call_of(changed(session.messages, path, value)))
    assert place.why == why
    assert place.parent == (1 if why is None else 0 if path[0] > 2 else None)


def test_tools_and_template_arguments_come_first(session):
    place = session.index.place(call_of(session.messages, tools=[*TOOLS, OTHER_TOOL]))
    assert (place.parent, place.why) == (None, "the tools differ from step 1's")
    assert place.borrowed == {2: 0, 4: 1}
    place = session.index.place(call_of(session.messages, template_arguments={"enable_thinking": False}))
    assert (place.parent, place.why) == (None, "the template arguments differ from step 1's")
    function = dict(reversed(TOOLS[0]["function"].items()))
    place = session.index.place(call_of(session.messages, tools=[{"function": function, "type": "function"}]))
    assert (place.parent, place.why) == (1, None)


def test_tools_that_must_not_be_called_stay_in_the_prompt(session):
    call = call_of(session.messages, tool_choice="none")
    assert call.offered is None
    assert session.index.place(call) == session.index.place(call_of(session.messages))


def test_calls_that_an_agent_writes_as_text_are_found_by_their_ids(session):
    made = session.answers[0].calls[0]
    written = f"I look.\nCalling tools:\n[{{'id': '{made.id}', 'function': {{'name': 'look'}}}}]"
    messages = [*session.messages[:2], {"role": "assistant", "content": written}]
    place = session.index.place(call_of([*messages, {"role": "user", "content": "Observation: 3"}]))
    assert (place.parent, place.start, place.rewritten, place.why) == (
        0,
        3,
        (0,),
        "messages[3] differs from step 1's",
    )


def test_a_turn_after_another_conversation_is_borrowed(session):
    messages = changed(session.messages, (0, "content"), "Be very brief.")
    place = session.index.place(call_of(messages))
    assert (place.parent, place.start) == (None, 0)
    assert place.borrowed == {2: 0, 4: 1}  # by its id, and by its text and the message before it


def test_answers_left_out(session):
    messages = [*session.messages[:4], {"role": "user", "content": "Call a tool."}]
    place = session.index.place(call_of(messages))
    assert (place.parent, place.start) == (0, 3)
    assert place.why == "messages[4] comes in place of the turn of step 1"


def test_a_conversation_that_ends_early(session):
    place = session.index.place(call_of(session.messages[:1]))
    assert (place.parent, place.why) == (None, "the conversation ends before step 0's")


def test_the_same_prompt_again_is_a_sibling(session):
    place = session.index.place(call_of(session.messages[:4]))
    assert (place.sibling, place.parent, place.why) == (1, 0, None)
    first = session.index.place(call_of(session.messages[:2]))
    assert (first.sibling, first.parent, first.why) == (0, None, None)


def test_equal_answers_to_one_prompt_are_told_apart_by_what_follows(session):
    """Of two equal texts, the one whose conversation goes on as here."""
    call = call_of(session.messages[:4])
    twin = session.index.place(call).recorded(session.answers[1])
    session.index.add(2, twin)
    session.index.add(3, session.index.place(call_of(session.messages)).recorded(answer("Yes.")))
    assert session.index.place(call_of(session.messages)).sibling == 3
    continued = [*session.messages, repeated(answer("Yes.")), {"role": "user", "content": "Good."}]
    assert session.index.place(call_of(continued)).parent == 3
    place = session.index.place(call_of([*session.messages[:-1], {"role": "user", "content": "New."}]))
    assert place.parent in (1, 2)


def test_equal_answers_belong_to_the_agent_that_got_them():
    """Two subagents with one task get the same words."""
    session = Session()
    asked = [{"role": "user", "content": "Look."}]
    for name in ("a", "b"):
        place = session.index.place(call_of(asked, origin=Origin(agent=name)))
        session.index.add(len(session.index), place.recorded(answer("So.")))
    continued = [*asked, repeated(answer("So.")), {"role": "user", "content": "And?"}]
    for name, parent in (("a", 0), ("b", 1), ("c", 1)):
        assert session.index.place(call_of(continued, origin=Origin(agent=name))).parent == parent


def test_an_index_of_the_steps_records_finds_the_same_places(session):
    class Step:
        def __init__(self, index, recorded):
            import msgspec

            self.index, self.extra = index, {"gateway": {"matching": msgspec.to_builtins(recorded)}}

    records = dict(session.index._steps)
    again = Index.of([Step(index, recorded) for index, recorded in records.items()])
    for stop in (1, 2, 4, 6):
        call = call_of(session.messages[:stop])
        assert again.place(call) == session.index.place(call)


@pytest.mark.parametrize("raw", ['{"command": "ec', "plain"])
def test_arguments_that_are_no_json_are_their_text(raw):
    session = Session()
    session.say(answer("x", ("look", "{}")), {"role": "user", "content": "Look."})
    forms = [{"__unparsed": raw}, {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}]
    foreign = [
        {
            "role": "assistant",
            "content": "y",
            "tool_calls": [{"function": {"name": "look", "arguments": read_arguments(each, "arguments")}}],
        }
        for each in forms
    ]
    asked = {"role": "user", "content": "So?"}
    first, second = (session.index.place(call_of([session.messages[0], each, asked])) for each in foreign)
    assert first.record.path == second.record.path
    assert first.why == "messages[1] is another turn than step 0 sampled"


def test_numbers_that_javascript_cannot_tell_apart_are_equal():
    session = Session()
    numbers = '{"a": 1000.0, "b": 9007199254740993, "c": 1e21, "d": true}'
    session.say(answer("", ("look", numbers)), {"role": "user", "content": "Look."})
    same = '{"d":true,"a":1000,"b":9007199254740992,"c":1e+21}'
    other = '{"d":1,"a":1000,"b":9007199254740992,"c":1e+21}'
    for arguments, rewritten in ((same, ()), (other, (0,))):
        messages = changed(session.messages, (1, "tool_calls", 0, "function", "arguments"), arguments)
        place = session.index.place(call_of([*messages, {"role": "user", "content": "So?"}]))
        assert place.rewritten == rewritten


def test_a_schema_may_have_numbers_beyond_64_bits():
    tools = [
        {"type": "function", "function": {"name": "look", "parameters": {"maximum": 10**30 + more}}}
        for more in (0, 0, 1)
    ]
    digests = [call_of([{"role": "user", "content": "x"}], [tool]).digests for tool in tools]
    assert digests[0] == digests[1]
    assert digests[0].request != digests[2].request


def test_a_conversation_without_a_question_is_refused():
    with pytest.raises(InputError, match="the conversation must end in a message to answer"):
        Index().place(replace(call_of([{"role": "user", "content": "x"}]), messages=()))
