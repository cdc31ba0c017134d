"""The board of `FindCell`: a grid of shaded cells, some of which hold a figure."""

import random
from typing import Final, NamedTuple

from PIL import Image, ImageDraw

_SHADES: Final = ((214, 222, 235), (235, 224, 214), (219, 235, 214), (232, 216, 234))
_INK: Final = (40, 44, 60)


class Cell(NamedTuple):
    """A place on the board, counted from 1 at the top left."""

    row: int
    column: int


def draw_board(
    dice: random.Random, *, grid: int, cell_pixels: int, distractors: int
) -> tuple[Image.Image, Cell]:
    """Draw a board, and say which cell holds the mark.

    The mark is a cross with equal arms; a distractor has one arm that is shorter.

    Args:
        dice: Decides everything that is random.
        grid: Rows and columns.
        cell_pixels: Side of a cell.
        distractors: How many of them; fewer than cells.
    """
    size, side = grid, cell_pixels
    board = Image.new("RGB", (size * side, size * side))
    draw = ImageDraw.Draw(board)
    cells = [Cell(row, column) for row in range(1, size + 1) for column in range(1, size + 1)]
    for cell in cells:
        left, top = (cell.column - 1) * side, (cell.row - 1) * side
        draw.rectangle((left, top, left + side - 2, top + side - 2), fill=dice.choice(_SHADES))
    marked, *others = dice.sample(cells, distractors + 1)
    for cell in (marked, *others):
        arms = [side * 0.3] * 4
        if cell is not marked:
            arms[dice.randrange(4)] *= 0.55
        across, down = (cell.column - 0.5) * side, (cell.row - 0.5) * side
        above, right, below, left_arm = arms
        stroke = max(2, side // 12)
        draw.line((across, down - above, across, down + below), fill=_INK, width=stroke)
        draw.line((across - left_arm, down, across + right, down), fill=_INK, width=stroke)
    return board, marked
