"""Which messages of a conversation may be left out when it is too long, and in which order.

A conversation is left out by whole units: a user's turn with everything up to the next one, and within the
last of these an assistant's turn with the results of its calls. So a tool's result never stands without its
call, and an image goes with its message.
"""

from collections.abc import Sequence
from itertools import pairwise

from mmrender.messages import Message


def droppable_units(messages: Sequence[Message]) -> list[range]:
    """Units of a conversation, oldest first, that may be left out in this order.

    What stands before the first user's turn stays, and so does the last user's turn with the last of the
    assistant's turns behind it: what the model is to answer.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    # Several user messages in a row are one turn, and so is one that answers an assistant's calls.
    opens = [index for index in starts if index == 0 or messages[index - 1].role not in ("user", "tool")]
    if not opens:
        return []
    units = [range(start, stop) for start, stop in pairwise(opens)]
    answers = [index for index in range(opens[-1], len(messages)) if messages[index].role == "assistant"]
    units += [range(start, stop) for start, stop in pairwise(answers)]
    return units


def without(messages: Sequence[Message], units: Sequence[range]) -> list[Message]:
    """The messages that stand in none of the units."""
    left_out = {index for unit in units for index in unit}
    return [message for index, message in enumerate(messages) if index not in left_out]
