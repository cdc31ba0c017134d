"""Token ids are checked where they enter: by `bridge_to_next_turn`, `parse_response` and `decode`."""

import numpy as np
import pytest

from kit import error_of, user
from mmrender.content.ids import checked_ids
from mmrender.errors import InputError

NEW = [user("And now?")]


@pytest.fixture(scope="module")
def prompt(renderer):
    return renderer.render_ids([user("Hi.")], add_generation_prompt=True)


def wrong_ids(vocab_size):
    return {
        "a batch of one": ([[1, 2]], "[0]", "[1, 2]"),
        "texts": (["a", "b"], "[0]", "'a'"),
        "a text": ("abc", "", "str"),
        "bytes": (b"abcd", "", "bytes"),
        "floats": ([1, 2.0], "[1]", "2.0"),
        "negative": ([1, -1], "[1]", "-1"),
        "beyond the vocabulary": ([1, vocab_size], "[1]", str(vocab_size)),
        "beyond 64 bits": ([1, 2**70], "[1]", str(2**70)),
        "an array of floats": (np.ones(2), "", "float64 of shape (2,)"),
        "an array of two dimensions": (np.ones((1, 2), int), "", "int64 of shape (1, 2)"),
        "a mask": ([1, True, 0], "[1]", "True"),
        "a mapping": ({"input_ids": [1]}, "", "dict"),
    }


@pytest.mark.parametrize("name", wrong_ids(9))
def test_ids_that_are_none_are_refused_with_their_place(renderer, prompt, name):
    ids, place, got = wrong_ids(renderer.vocab_size)[name]
    calls = {
        "previous_prompt_ids": lambda: renderer.bridge_to_next_turn(ids, [], NEW),
        "previous_completion_ids": lambda: renderer.bridge_to_next_turn(prompt, ids, NEW),
        "token_ids": lambda: renderer.parse_response(ids),
        "prompt_ids": lambda: renderer.parse_response(prompt[:1], prompt_ids=ids),
    }
    for where, call in calls.items():
        with pytest.raises(InputError, match="not token ids") as caught:
            call()
        assert (caught.value.where, caught.value.got) == (where + place, got)
    assert "not token ids" in error_of(InputError, renderer.decode, ids)


def test_ids_of_a_prompt_are_checked_before_its_last_turn_too(renderer, prompt):
    with pytest.raises(InputError, match="not token ids") as caught:
        renderer.parse_response(prompt[:1], prompt_ids=[-1, *prompt])
    assert (caught.value.where, caught.value.got) == ("prompt_ids[0]", "-1")


@pytest.mark.parametrize("form", [list, tuple, lambda ids: np.array(ids, int)])
def test_a_completion_may_be_empty(form):
    assert checked_ids(form([]), "token_ids", 9) == []


def test_every_flat_form_of_integers_bridges_to_the_same_ids(renderer, prompt):
    torch = pytest.importorskip("torch")
    stop = renderer.get_stop_token_ids()[:1]
    expected = renderer.bridge_to_next_turn(prompt, stop, NEW).token_ids
    for form in (
        tuple,
        np.array,
        lambda ids: np.array(ids, np.uint16),
        torch.tensor,
        lambda ids: [*np.array(ids)],
    ):
        bridged = renderer.bridge_to_next_turn(form(prompt), form(stop), NEW).token_ids
        assert bridged == expected
        assert {type(token_id) for token_id in bridged} == {int}
