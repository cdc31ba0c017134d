"""The game: say which cell of a board is marked, with one letter."""

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from find_cell import draw_board
from mmrender import Renderer
from mmrender.rollout import Observation, Turn

PIXELS: Final = 64
HELD_OUT: Final = 1 << 40
"""Boards of this number and later ones are never trained on."""


class MarkedCell:
    """One board, one answer: a letter for each cell, row by row. The reward is 1 for the right one.

    Args:
        grid: Rows and columns.
        token_ids: Token of each letter.
        shuffled: Show the picture of another board.
    """

    tools = None

    def __init__(self, grid: int, token_ids: Sequence[int], *, shuffled: bool = False) -> None:
        self._grid, self._token_ids, self._shuffled = grid, token_ids, shuffled
        self.answer = ""

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Draw the board of a seed."""
        board, cell = self._drawn(extras["seed"])
        self.answer = string.ascii_uppercase[(cell.row - 1) * self._grid + cell.column - 1]
        if self._shuffled:
            board, _ = self._drawn(-1 - extras["seed"])
        picture = {"type": "image", "image": board.resize((PIXELS, PIXELS))}
        question = {"role": "user", "content": [picture, {"type": "text", "text": "Which?"}]}
        sampling = {"allowed_token_ids": list(self._token_ids), "max_tokens": 1}
        return Observation([*prompt, question], sampling_params=sampling)

    def step(self, turn: Turn) -> Observation:
        """Judge the answer."""
        found = turn.text == self.answer
        return Observation((), float(found), True, info={"found": float(found)})

    def _drawn(self, seed: int) -> Any:
        return draw_board(
            random.Random(seed), grid=self._grid, cell_pixels=PIXELS // self._grid, distractors=0
        )


def letters(renderer: Renderer, grid: int) -> list[int]:
    """The token of each answer."""
    encoded = [renderer.tokenizer.encode(letter) for letter in string.ascii_uppercase[: grid * grid]]
    return [token for (token,) in encoded]
