"""A grammar of given texts: at each place, the tokens with which one of them goes on.

A text is followed as the tokenizer encodes it, so a completion that was led to one is what the model would
have been trained on; an engine's grammar also allows the other ways to spell it.
"""

from collections.abc import Iterable, Sequence


class ChoiceGuide:
    """Follows one completion through a set of token sequences, each ended by a stop token.

    Args:
        sequences: What the completion may be; none is empty.
        stop_ids: Tokens that may end it; at least one.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], stop_ids: Iterable[int]) -> None:
        self._open = [tuple(sequence) for sequence in sequences]
        self._stop_ids = sorted(stop_ids)
        self._position = 0

    def allowed(self) -> list[int]:
        """The tokens that may come next, rising; none once a stop token was taken."""
        position = self._position
        following = {sequence[position] for sequence in self._open if len(sequence) > position}
        if any(len(sequence) == position for sequence in self._open):
            following.update(self._stop_ids)
        return sorted(following)

    def take(self, token: int) -> None:
        """Go on with a token that `allowed` named."""
        position = self._position
        self._open = [
            sequence for sequence in self._open if len(sequence) > position and sequence[position] == token
        ]
        self._position += 1
