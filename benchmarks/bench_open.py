"""Time of opening a known model, against Transformers' tokenizer alone.

    python benchmarks/bench_open.py [MODEL_DIR] [--rounds N] [--json FILE]

"ours" is `Renderer.from_pretrained` of a model that was opened before on this machine, so that findings about
its template are kept on disk; "tokenizer" is Transformers' `AutoTokenizer.from_pretrained`, which has neither
an image processor nor findings. "import" is a process that imports mmrender, over one that imports nothing,
with compiled modules, as an installed package has them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

from measure import Contender, machine, medians, shown_ms  # noqa: E402

from mmrender import Renderer  # noqa: E402

MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"


def process(code: str, compiled: str) -> Contender:
    """A Python process of its own, with its compiled modules in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return Contender(lambda: subprocess.run([sys.executable, "-c", code], env=environment, check=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time opening a known model.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    seconds = medians(
        {
            "ours": Contender(lambda: Renderer.from_pretrained(options.model, image_backend="pil")),
            "tokenizer": Contender(lambda: AutoTokenizer.from_pretrained(options.model)),
        },
        rounds=options.rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        codes = {"nothing": "pass", "mmrender": "import mmrender"}
        contenders = {name: process(code, folder) for name, code in codes.items()}
        processes = medians(contenders, rounds=options.rounds)
    seconds["import"] = processes["mmrender"] - processes["nothing"]
    print("\n".join(f"{name}: {shown_ms(value)} ms" for name, value in seconds.items()))
    if options.json:
        document = {"machine": machine(("tokenizers", "transformers")), "seconds": seconds}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
