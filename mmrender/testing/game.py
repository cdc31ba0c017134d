"""`DotGame`, the smallest environment with images, tools and several turns; and `guided_params`.

A full example is `examples/find_cell.py`.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from PIL import Image, ImageDraw

from mmrender.content import normalize_messages
from mmrender.protocols import RendererProtocol
from mmrender.rollout.client import Turn
from mmrender.rollout.environment import Observation

GRID: Final = 3
CELL_PIXELS: Final = 54
_COLOURS: Final = ("lightblue", "bisque", "lightgreen", "plum")
_DELIMITER_BIAS: Final = 50.0
"""Decides between a token such as `<tool_call>` and the letters that spell it."""


def _tool(name: str, description: str) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 1, "maximum": GRID}
    parameters = {"type": "object", "properties": {"row": number, "column": number}}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


class DotGame:
    """Find the cell that holds a dot: `look` shows a cell enlarged, `answer` ends the game.

    The reward is 1 for the right cell, and -0.1 for a turn without a usable call.

    Args:
        images_in: Role of the message that shows a cell: `tool`, or `user` for templates that take no images
            from tools.
        max_turns: Turns of the model until the game ends without an answer.
        sampling_params: For every turn, such as those of `guided_params`.
    """

    def __init__(
        self,
        *,
        images_in: str = "tool",
        max_turns: int = 4,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> None:
        self._images_in = images_in
        self._max_turns = max_turns
        self._sampling = dict(sampling_params or {})

    @property
    def tools(self) -> list[dict[str, Any]]:
        """`look` and `answer`."""
        return [_tool("look", "Show a cell enlarged."), _tool("answer", "Say which cell holds the dot.")]

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Draw the board of `extras["seed"]`."""
        dice = random.Random(extras.get("seed", 0))
        side = GRID * CELL_PIXELS
        self.board = Image.new("RGB", (side, side))
        draw = ImageDraw.Draw(self.board)
        for top in range(0, side, CELL_PIXELS):
            for left in range(0, side, CELL_PIXELS):
                box = (left, top, left + CELL_PIXELS - 2, top + CELL_PIXELS - 2)
                draw.rectangle(box, fill=dice.choice(_COLOURS))
        self.dot = (dice.randint(1, GRID), dice.randint(1, GRID))
        middle = [(place - 0.5) * CELL_PIXELS for place in self.dot]
        draw.circle((middle[1], middle[0]), 4, fill="black")
        self._turns = self._unusable = 0
        question = {"type": "text", "text": "Which row and column hold the dot? Both count from 1."}
        opening = {"role": "user", "content": [{"type": "image", "image": self.board}, question]}
        return Observation([*prompt, opening], sampling_params=self._sampling)

    def step(self, turn: Turn) -> Observation:
        """Answer the calls of a turn."""
        self._turns += 1
        messages: list[dict[str, Any]] = []
        for call in turn.message.tool_calls:
            cell = (call.arguments.get("row"), call.arguments.get("column"))
            result = {"role": "tool", "tool_call_id": call.id, "name": call.name}
            if call.name == "answer":
                found = float(cell == self.dot)
                return Observation((), found, True, info=self._info(found))
            if call.name != "look" or not all(isinstance(n, int) and 1 <= n <= GRID for n in cell):
                messages.append({**result, "content": "Error: there is no such cell."})
                continue
            top, left = ((int(place or 1) - 1) * CELL_PIXELS for place in cell)
            box = (left, top, left + CELL_PIXELS, top + CELL_PIXELS)
            shown = [{"type": "image", "image": self.board.crop(box).resize((96, 96))}]
            if self._images_in == "tool":
                messages.append({**result, "content": shown})
            else:
                messages += [{**result, "content": "See below."}, {"role": "user", "content": shown}]
        reward = 0.0
        if not turn.message.tool_calls:
            self._unusable += 1
            reward = -0.1
            messages.append({"role": "user", "content": "Call look or answer."})
        # Templates want the answers to calls before the user speaks again.
        messages.sort(key=lambda message: message["role"] == "user")
        done = self._turns >= self._max_turns
        return Observation(() if done else messages, reward, done, self._sampling, self._info(0.0))

    def _info(self, found: float) -> dict[str, float]:
        return {"found": found, "turns_without_call": float(self._unusable)}


def game_calls() -> list[dict[str, Any]]:
    """Assistant messages with the calls that make sense in a `DotGame`."""
    cells = [{"row": row, "column": column} for row in range(1, GRID + 1) for column in range(1, GRID + 1)]
    calls = [{"name": name, "arguments": cell} for name in ("look", "answer") for cell in cells]
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        for call in calls
    ]


def guided_params(
    renderer: RendererProtocol, choices: Sequence[Any], *, tools: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Sampling parameters that guide an engine to one of several assistant messages.

    The model's own template writes them, so no format of tool calls is known here. A grammar of text allows a
    delimiter such as `<tool_call>` as its own token and as the letters that spell it, and only the token is
    parsed as a call; so a bias decides for the token.
    """
    stops = set(renderer.get_stop_token_ids())
    added = set(renderer.tokenizer.added_ids.values()) if hasattr(renderer, "tokenizer") else set()
    texts: list[str] = []
    delimiters: set[int] = set()
    for message in normalize_messages(choices, where="choices"):
        rendered = renderer.render([{"role": "user", "content": "x"}, message], tools=tools)
        marked = zip(rendered.token_ids, rendered.sampled_mask.tolist(), strict=True)
        sampled = [token for token, is_sampled in marked if is_sampled]
        while sampled and sampled[-1] in stops:
            sampled.pop()
        texts.append(renderer.decode(sampled))
        delimiters |= added.intersection(sampled)
    bias = {str(token): _DELIMITER_BIAS for token in sorted(delimiters)}
    return {"structured_outputs": {"choice": texts}, **({"logit_bias": bias} if bias else {})}
