"""From rows of a data set with images to a batch of supervised fine-tuning: samples a second a core.

    python benchmarks/bench_sft.py [MODEL_DIR] [--rows 8] [--rounds 5] [--quick] [--json FILE]

A row has messages in the form of TRL's data sets, four rounds of them, and two pictures of 512², JPEG files
that are opened and not decoded, as `datasets` returns them. No picture comes twice, so no cache helps.

- mmrender: `Collator` with a renderer. It also makes labels of the answers alone, and M-RoPE positions.
- trl: `DataCollatorForVisionLanguageModeling` over Transformers' processor. Its labels are all tokens.

Token ids, masks, grids and every pixel are compared before anything is timed. Processor time is that of all
threads. TRL needs its environment (`python tools/libraries.py trl FOLDER --install`): that runs this script,
or `MMRENDER_TRL_ENV` names it. It is left out without.
"""

import argparse
import importlib.util
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from measure import fresh, machine, medians, shown_ms, shown_ratio, table  # noqa: E402
from PIL import Image  # noqa: E402
from turn_cases import answers, picture  # noqa: E402

from mmrender import Renderer  # noqa: E402
from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402
from mmrender.training import Collator, ModelFamily  # noqa: E402

SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
HAS_TRL = importlib.util.find_spec("trl") is not None
PICTURES, ROUNDS = 2, 4
COMPARED = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
Row = dict[str, Any]


def row(seed: int) -> Row:
    """Return one row. Its pictures and words depend on the seed."""
    words = random.Random(seed)
    texts = [" ".join(words.sample(text.partition("<tool_call>")[0].split(), 40)) for text in answers()]
    messages: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        question: list[dict[str, Any]] = [{"type": "text", "text": texts[2 * number]}]
        if number < PICTURES:
            question.insert(0, {"type": "image"})
        messages.append({"role": "user", "content": question})
        answer = [{"type": "text", "text": texts[2 * number + 1]}]
        messages.append({"role": "assistant", "content": answer})
    files = [picture(PICTURES * seed + number) for number in range(PICTURES)]
    return {"messages": messages, "images": [Image.open(io.BytesIO(file)) for file in files]}


def ours(directory: str, renderer: Renderer) -> Callable[[list[Row]], dict[str, Any]]:
    """Return mmrender's collator."""
    return Collator(ModelFamily.from_config(directory), pad_token_id=_pad_id(renderer), renderer=renderer)


def _pad_id(renderer: Renderer) -> int:
    return next(renderer.tokenizer.added_ids[name] for name in ("<|endoftext|>", "<|im_end|>"))


def theirs(directory: str) -> Callable[[list[Row]], dict[str, Any]]:
    """Return TRL's collator."""
    from transformers import AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    collator: Any = DataCollatorForVisionLanguageModeling(AutoProcessor.from_pretrained(directory))
    return collator  # type: ignore[no-any-return]


def require_same(ours: dict[str, Any], others: dict[str, Any]) -> None:
    """Require two batches to hold the same inputs.

    Raises:
        SystemExit: One differs.
    """
    for name in COMPARED:
        if not torch.equal(ours[name], others[name]):
            raise SystemExit(f"trl makes other {name}")


def measure(directory: str, rows: int, rounds: int) -> dict[str, float]:
    """Return the processor seconds of one row by contender."""
    renderer = Renderer.from_pretrained(directory, image_backend="torch")
    collators = {"mmrender": ours(directory, renderer)}
    if HAS_TRL:
        collators["trl"] = theirs(directory)
        batches = [collate([row(seed) for seed in range(rows)]) for collate in collators.values()]
        require_same(*batches)

    def made(seed: int) -> list[Row]:
        return [row(rows * seed + number) for number in range(rows)]

    timed = {name: fresh(made, collate) for name, collate in collators.items()}
    seconds = medians(timed, rounds=rounds, slice_s=0, clock="cpu")
    return {name: value / rows for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="model directory; default: the shared one, or a tiny one")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = os.environ.get("MMRENDER_TRL_ENV")
    if environment and not HAS_TRL:
        python = str(Path(environment) / "bin" / "python")
        os.execv(python, [python, *sys.argv])
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(SHARED_MODEL)
        if not Path(model).is_dir():
            model = str(Path(folder) / "tiny")
            build_tiny_model(Path(model), weights=False)
        seconds = measure(model, options.rows, rounds)
    lines = [
        [name, f"{1 / value:.0f}", shown_ms(value), shown_ratio(value, seconds["mmrender"])]
        for name, value in seconds.items()
    ]
    headings = ["fine-tuning", "samples a second a core", "processor ms a sample", "ours is faster"]
    print(table(headings, lines))
    if options.json:
        document = {"machine": machine(("torch", "transformers", "trl")), "seconds": seconds}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
