"""An example environment that needs no download: find the marked cell of a grid, with a tool to zoom in.

The board is drawn at full resolution and shown reduced, so that the mark is hard to tell from the other
figures until a part of the board is looked at more closely. Equal seeds draw equal boards.

Run it against a server that serves MODEL: `python examples/find_cell.py http://127.0.0.1:8000 MODEL`
"""

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from PIL import Image, ImageDraw

from mmrender import Renderer, RendererClient
from mmrender.errors import InputError
from mmrender.messages import ToolCall
from mmrender.parsing import ToolCallAttempt
from mmrender.rollout import Observation, Turn, rollouts

_SHADES: Final = ((214, 222, 235), (235, 224, 214), (219, 235, 214), (232, 216, 234))
_INK: Final = (40, 44, 60)
_REGION: Final = ("top", "left", "bottom", "right")


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


@dataclass(frozen=True, slots=True)
class FindCellSettings:
    """Difficulty.

    Attributes:
        grid: Rows and columns, 2 to 16.
        distractors: Other cells that hold a figure which resembles the mark.
        cell_pixels: Side of a cell at full resolution.
        view_pixels: Side of what is shown, board and zoomed parts alike.
        max_turns: Turns of the model until the episode ends without an answer.
        zoom_cost: Taken from the reward of a right answer for each zoom.
        invalid_cost: Taken from the reward of a turn for each call that is malformed, and for a turn without.
        images_in: Role of the message that shows a zoomed part: `tool`, or `user` for templates that take no
            images from tools.

    Raises:
        InputError: A value is outside of its range.
    """

    grid: int = 6
    distractors: int = 4
    cell_pixels: int = 48
    view_pixels: int = 192
    max_turns: int = 6
    zoom_cost: float = 0.05
    invalid_cost: float = 0.1
    images_in: str = "tool"

    def __post_init__(self) -> None:
        ranges = {
            "grid": (2, 16),
            "distractors": (0, self.grid**2 - 1),
            "cell_pixels": (16, 512),
            "view_pixels": (32, 4096),
            "max_turns": (1, 1000),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(
                    "is outside of its range",
                    where=f"FindCellSettings.{name}",
                    expected=f"{low} to {high}",
                    got=str(getattr(self, name)),
                )
        if self.images_in not in ("tool", "user"):
            raise InputError(
                "no message of that role shows a zoomed part",
                where="FindCellSettings.images_in",
                expected="'tool' or 'user'",
                got=repr(self.images_in),
            )


class FindCell:
    """The environment. Its reward is 1 for the marked cell, less what zooming cost, and 0 for another.

    Args:
        settings: How hard it is; a data set's `extras` may replace single settings by name.

    Attributes:
        board: The whole board at full resolution, after a reset.
        marked: The marked cell, after a reset.
    """

    def __init__(self, settings: FindCellSettings | None = None) -> None:
        self._given = settings or FindCellSettings()
        self.settings = self._given
        self.board = Image.new("RGB", (1, 1))
        self.marked = Cell(1, 1)
        self._turns = self._zooms = self._invalid = 0

    @property
    def tools(self) -> list[dict[str, Any]]:
        """`zoom` and `answer`."""
        last = self.settings.grid
        row = {"type": "integer", "minimum": 1, "maximum": last}
        region = dict.fromkeys(_REGION, row)
        return [
            _tool("zoom", "Look more closely at the cells from (top, left) to (bottom, right).", region),
            _tool("answer", "Say which cell is marked. This ends the game.", {"row": row, "column": row}),
        ]

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Draw a board.

        Args:
            prompt: Messages before the board's, such as a system prompt.
            extras: `seed` of the board, and names of `FindCellSettings` with other values.

        Raises:
            InputError: There is no such setting, or its value is outside of its range.
        """
        chosen = {name: value for name, value in extras.items() if name != "seed"}
        unknown = sorted(chosen.keys() - set(FindCellSettings.__dataclass_fields__))
        if unknown:
            raise InputError(
                "there is no such setting",
                where=f"extras[{unknown[0]!r}]",
                expected=f"seed, {', '.join(FindCellSettings.__dataclass_fields__)}",
            )
        self.settings = replace(self._given, **chosen)
        self._turns = self._zooms = self._invalid = 0
        self.board, self.marked = draw_board(
            random.Random(extras.get("seed", 0)),
            grid=self.settings.grid,
            cell_pixels=self.settings.cell_pixels,
            distractors=self.settings.distractors,
        )
        size = self.settings.grid
        question = (
            f"One of the {size} x {size} cells holds a cross with four equal arms. Which one? Rows and "
            "columns count from 1 at the top left. Zoom in where you are not sure."
        )
        parts = [self._picture(self.board), {"type": "text", "text": question}]
        return Observation([*prompt, {"role": "user", "content": parts}])

    def step(self, turn: Turn) -> Observation:
        """Carry out the calls of a turn, in order, until one answers."""
        self._turns += 1
        reward = 0.0
        messages: list[dict[str, Any]] = []
        calls = iter(turn.message.tool_calls)
        for attempt in turn.attempts:
            if attempt.status != "ok":
                reward -= self._mistake()
                messages.append({"role": "user", "content": f"That call is no good: {_fault(attempt)}."})
                continue
            call = next(calls)
            problem = self._problem(call)
            if problem is not None:
                reward -= self._mistake()
                messages.append(_result(call, f"Error: {problem}."))
            elif call.name == "answer":
                return self._answered(call, reward)
            else:
                messages += self._zoomed(call)
        if not turn.attempts:
            reward -= self._mistake()
            messages.append({"role": "user", "content": "Call one of the tools: zoom or answer."})
        # Templates want the answers to calls before the user speaks again.
        messages.sort(key=lambda message: message["role"] == "user")
        is_over = self._turns >= self.settings.max_turns
        return Observation(() if is_over else messages, reward, is_over, info=self._info(found=False))

    def _answered(self, call: ToolCall, reward: float) -> Observation:
        found = Cell(call.arguments["row"], call.arguments["column"]) == self.marked
        if found:
            reward += max(0.0, 1.0 - self.settings.zoom_cost * self._zooms)
        return Observation((), reward, True, info=self._info(found=found))

    def _info(self, *, found: bool) -> dict[str, float]:
        return {"found": float(found), "zooms": float(self._zooms), "invalid_calls": float(self._invalid)}

    def _mistake(self) -> float:
        self._invalid += 1
        return self.settings.invalid_cost

    def _problem(self, call: ToolCall) -> str | None:
        """The fault of a call, or None."""
        names = {"zoom": _REGION, "answer": ("row", "column")}.get(call.name)
        if names is None:
            return f"there is no tool {call.name}"
        if sorted(call.arguments) != sorted(names):
            return f"{call.name} takes {', '.join(names)}"
        last = self.settings.grid
        for name in names:
            value = call.arguments[name]
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= last:
                return f"{name} is a whole number from 1 to {last}"
        if call.name == "zoom" and (
            call.arguments["top"] > call.arguments["bottom"]
            or call.arguments["left"] > call.arguments["right"]
        ):
            return "the region is empty"
        return None

    def _zoomed(self, call: ToolCall) -> list[dict[str, Any]]:
        self._zooms += 1
        side = self.settings.cell_pixels
        where = call.arguments
        box = (
            (where["left"] - 1) * side,
            (where["top"] - 1) * side,
            where["right"] * side,
            where["bottom"] * side,
        )
        shown = self._picture(self.board.crop(box))
        rows, columns = f"{where['top']} to {where['bottom']}", f"{where['left']} to {where['right']}"
        text = f"Rows {rows}, columns {columns}, enlarged."
        if self.settings.images_in == "tool":
            return [_result(call, [shown, {"type": "text", "text": text}])]
        return [_result(call, text), {"role": "user", "content": [shown]}]

    def _picture(self, image: Image.Image) -> dict[str, Any]:
        longest = self.settings.view_pixels / max(image.size)
        width, height = (max(1, round(side * longest)) for side in image.size)
        return {"type": "image", "image": image.resize((width, height), Image.Resampling.BICUBIC)}


def sensible_calls(grid: int) -> list[dict[str, Any]]:
    """Assistant messages that zoom in on one cell or answer, to guide a model that cannot play."""
    cells = [Cell(row, column) for row in range(1, grid + 1) for column in range(1, grid + 1)]
    calls = [("zoom", dict(zip(_REGION, (*cell, *cell), strict=True))) for cell in cells]
    calls += [("answer", cell._asdict()) for cell in cells]
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}
        for name, arguments in calls
    ]


def _tool(name: str, description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _result(call: ToolCall, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _fault(attempt: ToolCallAttempt) -> str:
    return f"{attempt.status.replace('_', ' ')}: {attempt.raw[:200]}"


async def main(url: str, model: str) -> None:
    """Play eight games of each of four boards, and print each as it ends."""
    client = RendererClient(
        Renderer.from_pretrained(model), url, model=model, sampling_params={"max_tokens": 256}
    )
    seeds = [{"seed": game // 8} for game in range(32)]
    async for trajectory in rollouts(client, FindCell, [[]] * len(seeds), extras=seeds, failures="raise"):
        reward = sum(float(step.reward or 0.0) for step in trajectory.steps)
        print(f"{trajectory.extra['name']}: {len(trajectory)} turns, reward {reward:.2f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
