"""Geometry3K, and the environment that asks its questions: what the recipes beside this file train on.

The data set is `hiyouga/geometry3k`: 2,101 figures with a question and a short answer. With `--tiny` figures
are drawn here, and the model has 478,000 random parameters: nothing is loaded, and little is learned.
"""

import argparse
import io
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

from mmrender.rollout import Observation, Turn
from mmrender.testing.tiny_model import build_tiny_model

HUB: Final = "hiyouga/geometry3k"
ASKED: Final = "Think step by step, and write the final answer in \\boxed{}."
_BOX: Final = re.compile(r"\\boxed\{([^{}]*)\}")


class Geometry:
    """One question about a figure. The reward is 1 for the right answer, 0.1 for a wrong one in a box.

    An answer without a box is asked for once more, so an episode has one turn or two.
    """

    tools = None

    def __init__(self) -> None:
        self._answer, self._is_second = "", False

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> Observation:
        """Ask the question of a row."""
        self._answer, self._is_second = extras["answer"], False
        text = {"type": "text", "text": f"{extras['problem']} {ASKED}"}
        figure = {"type": "image", "image": extras["image"]}
        return Observation([*prompt, {"role": "user", "content": [figure, text]}])

    def step(self, turn: Turn) -> Observation:
        """Judge the answer, or ask for it again."""
        boxes = _BOX.findall(turn.text)
        if not boxes and not self._is_second:
            self._is_second = True
            return Observation([{"role": "user", "content": "Write the answer in \\boxed{}."}])
        return Observation((), reward_of(turn.text, self._answer), True, info={"boxed": float(bool(boxes))})


def reward_of(text: str, answer: str) -> float:
    """Return 1 if the last box has the answer, 0.1 if it has another one, else 0."""
    boxes = _BOX.findall(text)
    if not boxes:
        return 0.0
    return 1.0 if plain(boxes[-1]) == plain(answer) else 0.1


def plain(answer: str) -> str:
    """Return an answer without blanks, signs of degrees and dollars."""
    return re.sub(r"\s|\$|\\circ|°|\^|\.0+$", "", answer).lower()


@dataclass(frozen=True)
class Run:
    """What a recipe is asked for.

    Attributes:
        model: The model's directory or name.
        out: Folder for what the run writes.
        steps: Number of steps.
        tiny: Whether to run here: the tiny model, drawn figures, no GPU.
    """

    model: str
    out: Path
    steps: int
    tiny: bool

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Return rows with `image` (PNG bytes), `problem` and `answer`: all, or the first ones."""
        if self.tiny:
            return [drawn(seed) for seed in range(count or 64)]
        from datasets import load_dataset

        data = load_dataset(HUB, split="train")
        return [
            {
                "image": png(row["images"][0]),
                "problem": row["problem"].replace("<image>", "").strip(),
                "answer": row["answer"],
            }
            for row in data.select(range(min(count or len(data), len(data))))
        ]


def asked(program: str, description: str | None, *, model: str, steps: int) -> Run:
    """Read the command line of a recipe."""
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--model", default=model)
    parser.add_argument("--out", type=Path, default=Path("runs") / program.rpartition(".")[2])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tiny", action="store_true", help="run here: a tiny model, drawn figures, no GPU")
    run = Run(**vars(parser.parse_args()))
    run.out.mkdir(parents=True, exist_ok=True)
    if not run.tiny:
        return run
    directory = run.out / "model"
    if not directory.exists():
        build_tiny_model(directory, patch_size=8)
    return Run(str(directory), run.out, min(run.steps, 2), True)


def drawn(seed: int) -> dict[str, Any]:
    """Draw a figure of one to five squares, and ask for their number."""
    count = random.Random(seed).randint(1, 5)
    figure = Image.new("RGB", (96, 64), "white")
    for place in range(count):
        ImageDraw.Draw(figure).rectangle([4 + 18 * place, 24, 16 + 18 * place, 36], outline="black", width=2)
    return {"image": png(figure), "problem": "How many squares are there?", "answer": str(count)}


def png(image: Image.Image) -> bytes:
    """Return the bytes of a picture as PNG."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()
