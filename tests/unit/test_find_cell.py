"""The example environment: its boards, its tools, its rewards, and what it says to bad calls."""

import numpy as np
import pytest

from find_cell import FindCell, FindCellSettings, sensible_calls
from guided import guided_params
from kit import error_of, text
from mmrender.content import normalize_messages, normalize_tools
from mmrender.errors import InputError
from mmrender.messages import Message, ToolCall
from mmrender.parsing import ToolCallAttempt
from mmrender.rollout.client import Turn
from mmrender.rollout.environment import Environment


def acting(*calls):
    """A turn that makes calls: `(name, arguments)`, or a status for one that cannot be read."""
    attempts, made = [], []
    for index, call in enumerate(calls):
        if isinstance(call, str):
            attempts.append(ToolCallAttempt(call, None, None, "<tool_call>{", (0, 1)))
        else:
            attempts.append(ToolCallAttempt("ok", *call, "", (0, 1)))
            made.append(ToolCall(*call, f"call-{index}"))
    return Turn(Message(role="assistant", content="", tool_calls=tuple(made)), tuple(attempts))


def zoom(top, left, bottom, right):
    return "zoom", {"top": top, "left": left, "bottom": bottom, "right": right}


def answer(row, column):
    return "answer", {"row": row, "column": column}


def begun(**settings):
    game = FindCell(FindCellSettings(**settings))
    game.reset([], {"seed": 5})
    return game


@pytest.fixture
def game():
    return begun(grid=4, distractors=3)


def test_it_is_an_environment_whose_seed_decides_the_board(game):
    assert isinstance(game, Environment)
    assert len(normalize_tools(game.tools)) == 2
    shown, marked = [], []
    for seed in (1, 1, 2):
        shown.append(np.asarray(game.reset([], {"seed": seed}).messages[0]["content"][0]["image"]))
        marked.append(game.marked)
    assert (shown[0] == shown[1]).all()
    assert (shown[0] != shown[2]).any()
    assert marked[0] == marked[1]


def test_the_mark_is_in_its_cell_and_no_other_figure_is_like_it(game):
    side = game.settings.cell_pixels
    board = np.asarray(game.board).astype(int).sum(2)
    board = (board > 0) & (board < 200)  # lines between cells are black
    ink = board.reshape(4, side, 4, side).sum((1, 3))
    assert (ink > 0).sum() == 4
    assert tuple(np.argwhere(ink == ink.max())[0] + 1) == game.marked


def test_zooming_shows_the_region_at_full_resolution_also_by_the_user(game):
    seen = game.step(acting(zoom(1, 3, 2, 4)))
    (message,) = seen.messages
    picture = message["content"][0]["image"]
    assert (message["role"], message["tool_call_id"], message["name"]) == ("tool", "call-0", "zoom")
    assert picture.size == (192, 192)
    region = game.board.crop((96, 0, 192, 96)).resize((192, 192), 3)
    assert (np.asarray(picture) == np.asarray(region)).all()
    assert message["content"][1]["text"] == "Rows 1 to 2, columns 3 to 4, enlarged."
    assert (seen.reward, seen.done) == (0.0, False)
    wide = game.step(acting(zoom(1, 1, 1, 4))).messages[0]["content"][0]["image"]
    assert wide.size == (192, 48)
    game = begun(images_in="user")
    seen = normalize_messages(game.step(acting(zoom(1, 1, 2, 2), zoom(1, 1, 3, 3))).messages)
    assert [message.role for message in seen] == ["tool", "tool", "user", "user"]
    assert [len(list(message.media())) for message in seen] == [0, 0, 1, 1]


def test_right_and_wrong_answers(game):
    right = game.step(acting(zoom(1, 1, 2, 2), zoom(1, 1, 3, 3), answer(*game.marked)))
    assert (right.done, right.reward) == (True, pytest.approx(0.9))
    assert right.info == {"found": 1.0, "zooms": 2.0, "invalid_calls": 0.0}
    game.reset([], {"seed": 5})
    row, column = game.marked
    wrong = game.step(acting(answer(row % 4 + 1, column)))
    assert (wrong.reward, wrong.done, wrong.info["found"]) == (0.0, True, 0.0)


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (("paint", {}), "Error: there is no tool paint."),
        (("zoom", {"top": 1}), "Error: zoom takes top, left, bottom, right."),
        (answer(0, 1), "Error: row is a whole number from 1 to 4."),
        (answer(1, "2"), "Error: column is a whole number from 1 to 4."),
        (answer(True, 1), "Error: row is a whole number from 1 to 4."),
        (zoom(3, 1, 2, 2), "Error: the region is empty."),
    ],
)
def test_calls_that_make_no_sense(game, call, reply):
    seen = game.step(acting(call))
    assert (seen.messages[0]["content"], seen.messages[0]["tool_call_id"]) == (reply, "call-0")
    assert (seen.reward, seen.done) == (-0.1, False)


def test_what_is_no_call_and_the_end_of_turns(game):
    seen = game.step(acting("invalid_json", zoom(1, 1, 2, 2)))
    assert [message["role"] for message in seen.messages] == ["tool", "user"]
    assert seen.messages[1]["content"] == "That call is no good: invalid json: <tool_call>{."
    assert seen.reward == -0.1
    game = begun(max_turns=2)
    first = game.step(acting())
    assert first.messages[0]["content"] == "Call one of the tools: zoom or answer."
    last = game.step(acting())
    assert (last.done, last.messages, last.reward) == (True, (), -0.1)
    assert last.info["invalid_calls"] == 2.0


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"size": 3}, "extras['size']: there is no such setting - expected seed, grid, distractors, "
         "cell_pixels, view_pixels, max_turns, zoom_cost, invalid_cost, images_in"),
        ({"grid": 1}, "FindCellSettings.grid: is outside of its range - expected 2 to 16, got 1"),
        ({"images_in": "system"}, "FindCellSettings.images_in: no message of that role shows a zoomed part - "
         "expected 'tool' or 'user', got 'system'"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(extras, message):
    assert error_of(InputError, FindCell().reset, [], extras) == message


def test_the_text_of_a_turn():
    assert Turn(Message(role="assistant", content="left")).text == "left"
    assert Turn(Message(role="assistant")).text == ""
    (parts,) = normalize_messages([{"role": "assistant", "content": [text("a"), "b"]}])
    assert Turn(parts).text == "ab"


def test_guided_params_hold_what_the_model_would_write(renderer):
    guided = guided_params(renderer, sensible_calls(3))
    texts = guided["structured_outputs"]["choice"]
    assert len(texts) == 18
    (attempt,) = renderer.parse_response(renderer.tokenizer.encode(texts[14])).tool_calls
    assert (attempt.name, attempt.arguments) == ("answer", {"row": 2, "column": 3})
    assert texts[14] == '<tool_call>\n{"name": "answer", "arguments": {"row": 2, "column": 3}}\n</tool_call>'
    delimiters = {str(renderer.tokenizer.token_id(token)) for token in ("<tool_call>", "</tool_call>")}
    assert guided["logit_bias"].keys() == delimiters
