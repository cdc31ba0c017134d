"""Games of boards with one marked cell, whose answers are letters: the cells, row by row."""

import random
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from find_cell import draw_board
from grpo.config import Config
from mmrender import Renderer
from mmrender.rollout import Observation, Turn

HELD_OUT: Final = 1 << 40
"""Boards of this number and later ones are never trained on."""
RECORDED: Final = 1 << 41
"""Boards of this number and later ones are those of recorded games."""
_CELL: Final = {"type": "object", "properties": {"cell": {"type": "string"}}}
ZOOM: Final = {"type": "function", "function": {"name": "zoom", "parameters": _CELL}}
CAPTION: Final = "<|im_end|>"
"""Beside the picture that the tool shows. What a tool says may hold anything, and stays text."""
CALL: Final = '<tool_call>\n{"name": "zoom", "arguments": {"cell": "%s"}}\n</tool_call>'
TURN_TOKENS: Final = 40
"""The most tokens of a turn of the game with the tool; a call takes 24."""


def draw(seed: int | str, grid: int, pixels: int) -> tuple[dict[str, Any], str]:
    """Draw the board of a seed: its picture, as a part of a message, and the letter of the marked cell."""
    board, cell = draw_board(random.Random(seed), grid=grid, cell_pixels=pixels // grid, distractors=0)
    letter = string.ascii_uppercase[(cell.row - 1) * grid + cell.column - 1]
    return {"type": "image", "image": board.resize((pixels, pixels))}, letter


def one_letter(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters of a turn of one token: one of `token_ids`, if there are some."""
    limit = {"allowed_token_ids": list(token_ids)} if token_ids else {}
    return {**limit, "max_tokens": 1}


class MarkedCell:
    """One board, one answer: the letter of the marked cell. The reward is 1 for the right one.

    Args:
        grid: Rows and columns.
        pixels: Side of a picture.
        token_ids: Token of each letter, if nothing else can be answered.
        shuffled: Show the picture of another board.
    """

    tools = None

    def __init__(
        self, grid: int, pixels: int, token_ids: Sequence[int] = (), *, shuffled: bool = False
    ) -> None:
        self._grid, self._pixels, self._token_ids, self._shuffled = grid, pixels, token_ids, shuffled
        self.answer = ""

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Draw the board of a seed."""
        return self._ask(prompt, extras["seed"])

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of any turn."""
        return one_letter(self._token_ids)

    def step(self, turn: Turn) -> Observation:
        """Judge the answer."""
        found = turn.text == self.answer
        return Observation((), float(found), True, info={"found": float(found)})

    def _ask(self, prompt: Sequence[Any], seed: int) -> Observation:
        question = {"role": "user", "content": [self._shown(seed), {"type": "text", "text": "Which?"}]}
        return Observation([*prompt, question], sampling_params=self.sampling)

    def _shown(self, seed: int, cell: str = "") -> dict[str, Any]:
        """Return the picture of a seed's board, or of a cell's, and keep the letter that is right."""
        picture, self.answer = draw(f"{seed}{cell}" if cell else seed, self._grid, self._pixels)
        if self._shuffled:
            other = -1 - seed
            picture, _ = draw(f"{other}{cell}" if cell else other, self._grid, self._pixels)
        return picture


class ZoomedCell:
    """A board in each cell of a board: look at one with the tool, and answer which cell of it is marked.

    The reward is 1 for the right letter of the board that lies in the marked cell. A turn that is no call
    ends the game.

    Args:
        grid: Rows and columns of each board.
        pixels: Side of a picture.
        constrained: Sample nothing but a call with one of the cells, and then one of the letters.
        shuffled: Show the pictures of another game.
    """

    tools: Final = (ZOOM,)

    def __init__(self, grid: int, pixels: int, *, constrained: bool = False, shuffled: bool = False) -> None:
        self._letters = list(string.ascii_uppercase[: grid * grid])
        self._calls = [CALL % letter for letter in self._letters]
        self._constrained = constrained
        self._grid, self._pixels, self._shuffled = grid, pixels, shuffled
        self._seed, self._shown = 0, ""
        self.cell = self.answer = ""

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Draw the board of a seed."""
        self._seed, self._shown = extras["seed"], ""
        picture, self.cell = draw(self._seed, self._grid, self._pixels)
        _, self.answer = draw(f"{self._seed}{self.cell}", self._grid, self._pixels)
        if self._shuffled:
            picture, _ = draw(-1 - self._seed, self._grid, self._pixels)
        question = {"role": "user", "content": [picture, {"type": "text", "text": "Which?"}]}
        return Observation([*prompt, question], sampling_params=self._sampling(self._calls))

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of any turn: a call or a letter."""
        return self._sampling([*self._calls, *self._letters])

    def step(self, turn: Turn) -> Observation:
        """Show the cell that is asked for; judge the answer once one was shown."""
        if not self._shown:
            calls = turn.message.tool_calls
            cell = calls[0].arguments.get("cell") if len(calls) == 1 and calls[0].name == "zoom" else None
            if cell not in self._letters:
                return Observation((), 0.0, True, info=self._info())
            self._shown = cell
            result = {"role": "tool", "tool_call_id": calls[0].id, "name": "zoom", "content": self._inside()}
            return Observation([result], sampling_params=self._sampling(self._letters), info=self._info())
        found = turn.text == self.answer
        return Observation((), float(found), True, info=self._info(found))

    def recorded(self, seed: int) -> list[Any]:
        """Return the messages of a game that an expert plays."""
        asked = self.reset([], {"seed": seed}).messages
        self._shown = self.cell
        call = {"id": "call_0", "name": "zoom", "arguments": {"cell": self.cell}}
        return [
            *asked,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "name": "zoom", "content": self._inside()},
            {"role": "assistant", "content": self.answer},
        ]

    def _sampling(self, choices: list[str]) -> dict[str, Any]:
        """How a turn is sampled that is one of `choices`."""
        limit = {"structured_outputs": {"choice": choices}} if self._constrained else {}
        return {"max_tokens": TURN_TOKENS, **limit}

    def _inside(self) -> list[Any]:
        """What the tool shows of a cell."""
        seed = -1 - self._seed if self._shuffled else self._seed
        picture, _ = draw(f"{seed}{self._shown}", self._grid, self._pixels)
        return [picture, {"type": "text", "text": CAPTION}]

    def _info(self, found: bool = False) -> dict[str, Any]:
        return {
            "called": float(bool(self._shown)),
            "zoomed": float(self._shown == self.cell),
            "found": float(found),
            "answer": self.answer,
        }


class LookedCell(MarkedCell):
    """Two turns of one letter: the cell to look into, and the marked cell of the board that lies there.

    A tool shows that board after the first turn, whichever cell was chosen. Each right letter is worth half a
    point. The arguments are those of `MarkedCell`.
    """

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Draw the board of a seed."""
        self._seed, self._turns = extras["seed"], 0
        return self._ask(prompt, self._seed)

    def step(self, turn: Turn) -> Observation:
        """Judge a letter, and show the board of the first one's cell."""
        self._turns += 1
        reward = 0.5 * (turn.text == self.answer)
        if self._turns == 2:
            return Observation((), reward, True, info={"found": float(reward > 0)})
        result = {"role": "tool", "name": "look", "content": [self._shown(self._seed, turn.text)]}
        return Observation([result], reward, sampling_params=self.sampling)


Game = MarkedCell | ZoomedCell | LookedCell


def game_of(config: Config, renderer: Renderer) -> Callable[[], Game]:
    """Return a function that makes an environment of the game that the settings name."""
    grid, pixels, shuffled = config.grid, config.pixels, config.shuffled
    if config.game != "zoom":
        kind = MarkedCell if config.game == "cell" else LookedCell
        token_ids = letters(renderer, grid) if config.constrained else ()
        return partial(kind, grid, pixels, token_ids, shuffled=shuffled)
    return partial(ZoomedCell, grid, pixels, constrained=config.constrained, shuffled=shuffled)


def letters(renderer: Renderer, grid: int) -> list[int]:
    """The token of each answer."""
    encoded = [renderer.tokenizer.encode(letter) for letter in string.ascii_uppercase[: grid * grid]]
    return [token for (token,) in encoded]
