"""An over-long prompt made to fit, by leaving out the oldest turns of its conversation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.errors import PromptTooLongError
from mmrender.messages import Message
from mmrender.rollout.prompting import Prompt, Prompter
from mmrender.rollout.shortening import droppable_units


@dataclass(frozen=True, slots=True)
class Shortened:
    """A prompt of what is left of a conversation, and the indices of the messages that are not."""

    prompt: Prompt
    left_out: frozenset[int]


async def shortened(
    prompter: Prompter,
    conversation: Sequence[Message],
    tools: Sequence[Any] | None,
    left_out: frozenset[int],
    error: PromptTooLongError,
) -> Shortened:
    """Leave out as few of the oldest turns as make the prompt fit.

    Args:
        prompter: Renders what is left.
        conversation: All messages that the caller gave.
        tools: Tool definitions.
        left_out: Messages that are left out already.
        error: What was said of the prompt without these. Where it names no bound, one turn more is left out.

    Raises:
        PromptTooLongError: Even the last turn is too long.
    """
    # Leaving out a unit of which nothing is left changes nothing.
    units = [unit for unit in droppable_units(conversation) if not left_out.issuperset(unit)]
    limit = error.max_prompt_len
    low, high = 1, len(units) if limit is not None else min(1, len(units))
    best: Shortened | None = None
    # The more is left out the shorter the prompt, so halving finds the fewest; images are cached.
    while low <= high:
        count = (low + high) // 2
        dropped = left_out.union(*units[:count])
        present = [message for index, message in enumerate(conversation) if index not in dropped]
        why = f"{len(dropped)} messages were left out to fit the engine"
        prompt = await prompter.rendered(present, tools, why)
        if limit is None or len(prompt.token_ids) <= limit:
            best, high = Shortened(prompt, dropped), count - 1
        else:
            low = count + 1
    if best is None:
        raise PromptTooLongError(
            error.prompt_len,
            limit,
            where="messages",
            remedy="No whole turn is left to leave out: shorten the last turn, or show smaller images",
        ) from error
    return best
