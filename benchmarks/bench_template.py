"""Time of a traced rendering over plain Jinja, on real chat templates.

    python benchmarks/bench_template.py [MODELS_DIR] [--runs N] [--json FILE]

"jinja" is the compiled template alone on plain dicts; "transformers" is its `render_jinja_template`, which
also rebuilds the messages as plain data, as ours builds them as traced data. Runs are interleaved; medians of
processor time. Before a case is timed, the texts of all three are compared.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

from transformers.utils.chat_template_utils import (  # noqa: E402
    _compile_jinja_template,
    render_jinja_template,
)

from mmrender.content import normalize_messages  # noqa: E402
from mmrender.messages import RenderRequest  # noqa: E402
from mmrender.model.files import ModelDir  # noqa: E402
from mmrender.model.tokenizer import Tokenizer  # noqa: E402
from mmrender.template.chat import ChatTemplate  # noqa: E402
from mmrender.template.probes import Probes  # noqa: E402
from mmrender.template.sources import choose_template, load_templates  # noqa: E402

ROUNDS = (1, 8)


def conversation(rounds: int) -> list[dict[str, Any]]:
    """Rounds of a question and an answer, a few dozen words each."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful. " * 10}]
    for turn in range(rounds):
        messages += [
            {"role": "user", "content": f"{turn}: what is in this picture? " * 15},
            {"role": "assistant", "content": f"{turn}: a house by the sea, and a dog. " * 15},
        ]
    return messages


def interleaved(contenders: Sequence[Callable[[], str]], runs: int) -> list[float]:
    """Median processor time of each, in milliseconds."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(runs):
        for taken, contender in zip(times, contenders, strict=True):
            started = time.process_time_ns()
            contender()
            taken.append((time.process_time_ns() - started) / 1e6)
    return [statistics.median(taken) for taken in times]


def measure(directory: Path, rounds: int, runs: int) -> dict[str, Any]:
    model = ModelDir(directory)
    templates, tokens = load_templates(model), model.special_tokens
    source = templates[choose_template(templates, name=None, has_tools=False)]
    ours, plain = ChatTemplate(source, special_tokens=tokens), _compile_jinja_template(source)
    form = Probes(ours, Tokenizer.load(model)).form
    messages = conversation(rounds)
    request = RenderRequest(normalize_messages(messages))
    contenders: list[Callable[[], str]] = [
        lambda: ours.render(request, form),
        lambda: plain.render(messages=messages, tools=None, documents=None, **tokens),
        lambda: render_jinja_template([messages], chat_template=source, **tokens)[0][0],
    ]
    texts = {str.__str__(contender()) for contender in contenders}
    if len(texts) != 1:
        raise SystemExit(f"{directory.name}: the texts differ")
    traced, jinja, reference = interleaved(contenders, runs)
    return {
        "model": directory.name,
        "rounds": rounds,
        "traced_ms": traced,
        "jinja_ms": jinja,
        "transformers_ms": reference,
        "to_jinja": traced / jinja,
        "to_transformers": traced / reference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="?", type=Path, default=ROOT.parent / "shared" / "models")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = sorted(path for path in options.models.iterdir() if (path / "tokenizer_config.json").is_file())
    rows = [measure(directory, rounds, options.runs) for directory in found for rounds in ROUNDS]
    print(f"{'model':20}{'rounds':>7}{'traced':>9}{'jinja':>9}{'hf':>9}{'/jinja':>8}{'/hf':>7}")
    for row in rows:
        print(
            f"{row['model']:20}{row['rounds']:7}{row['traced_ms']:9.3f}{row['jinja_ms']:9.3f}"
            f"{row['transformers_ms']:9.3f}{row['to_jinja']:8.2f}{row['to_transformers']:7.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
