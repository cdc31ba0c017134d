"""Log-probabilities from hidden states over a real vocabulary, forward and backward: peak memory and time.

    python benchmarks/bench_logprobs.py [--tokens 4096 8192 16384 32768] [--hidden 64] [--rounds 3]
                                        [--dtype float32] [--entropy] [--plain-tokens 4096] [--json FILE]

Each contender gets hidden states `(tokens, hidden)` and the weights of an output head over 151,936 ids,
returns the log-probability of one id a token, and runs backward to both. The hidden size is small, so
that the vocabulary decides. Hidden states and weights do not count, their gradients do.

- mmrender: `mmrender.training.scoring`.
- checkpointed: chunks of 128 tokens by plain torch, each under `torch.utils.checkpoint`.
- plain: all logits, `log_softmax` and `gather`. Up to `--plain-tokens`; beyond, its memory is computed from
  there, since every tensor grows with the tokens, and its time is left out.
- compiled: the same through `torch.compile`, with CUDA only.
- trl, tiles: `ChunkedLogProbFunction` of TRL, tiles of tokens and vocabulary.
- trl, logits: all logits and `selective_log_softmax` of TRL. Limited as plain.
- liger: the function of `LigerFusedLinearGRPOLoss` that makes log-probabilities, without its loss.

TRL and Liger run if they are installed; on a CPU both run plain torch in place of their Triton kernels.
Every contender's values and gradients are compared with the first one's before anything is timed. Memory
is the peak of the resident set over what it was before; with CUDA, of the allocator. Contenders take
turns.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import CLOCKS, machine, peak_resident, table  # noqa: E402
from torch.nn.functional import linear  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mmrender import TrainingSample  # noqa: E402
from mmrender.training import ModelFamily, collate  # noqa: E402
from mmrender.training.scoring import OutputHead, Scoring  # noqa: E402

VOCABULARY, CHUNK_TOKENS = 151_936, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Scores = tuple[Any, Any]


class Case:
    """Hidden states before some tokens, and the weights of a head."""

    def __init__(self, tokens: int, hidden: int, dtype: Any) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = {"generator": generator, "device": DEVICE}
        states = torch.randn(tokens + 1, hidden, **drawn)
        weight = torch.randn(VOCABULARY, hidden, **drawn) * hidden**-0.5
        self.hidden = states.to(DEVICE, dtype)[None].requires_grad_()
        self.weight = weight.to(DEVICE, dtype).requires_grad_()
        ids = np.random.default_rng(0).integers(0, VOCABULARY, tokens + 1, dtype=np.int32)
        sample = TrainingSample(ids, np.arange(tokens + 1) > 0, np.zeros(tokens + 1, np.float32))
        batch = collate([sample], ModelFamily(model_type="text"), pad_token_id=0, device=DEVICE)
        self.predictions = batch.predictions()
        self.ids = batch.input_ids[0, 1:]
        self.slopes = torch.randn(tokens, **drawn)


def _entropy(logprobs: Any) -> Any:
    return -(logprobs.exp() * logprobs).sum(-1)


def _of_logits(logits: Any, ids: Any, entropy: bool) -> Scores:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return chosen, _entropy(logprobs) if entropy else None


def ours(case: Case, entropy: bool) -> Scores:
    scores = Scoring(case.predictions, entropy=entropy).of(case.hidden, OutputHead(case.weight))
    return scores.logprobs, scores.entropy


def plain(case: Case, entropy: bool) -> Scores:
    return _of_logits(linear(case.hidden[0, :-1], case.weight), case.ids, entropy)


def checkpointed(case: Case, entropy: bool) -> Scores:
    size = CHUNK_TOKENS
    parts = zip(case.hidden[0, :-1].split(size), case.ids.split(size), strict=True)

    def one(hidden: Any, ids: Any) -> Scores:
        return _of_logits(linear(hidden, case.weight), ids, entropy)

    scores = [checkpoint(one, hidden, ids, use_reentrant=False) for hidden, ids in parts]
    return torch.cat([one for one, _ in scores]), torch.cat([one for _, one in scores]) if entropy else None


def peers() -> dict[str, Callable[[Case, bool], Scores]]:
    """Contenders of other libraries, as far as they are installed."""
    found: dict[str, Callable[[Case, bool], Scores]] = {}
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
        from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy
    except ImportError as error:
        print(f"without trl: {error}", file=sys.stderr)
    else:

        def tiles(case: Case, entropy: bool) -> Scores:
            outputs = ("entropy",) if entropy else ()
            hidden = case.hidden[0, :-1]
            size, head = 8192, (None, 1.0)  # its trainers' default tile of the vocabulary
            out = ChunkedLogProbFunction.apply(hidden, case.weight, None, case.ids, 1.0, size, *head, outputs)
            return out[0], out[1]

        def of_logits(case: Case, entropy: bool) -> Scores:
            logits = linear(case.hidden[0, :-1], case.weight)
            if entropy:
                scores: Scores = selective_log_softmax_and_entropy(logits, case.ids)
                return scores
            return selective_log_softmax(logits, case.ids), None

        found |= {"trl, tiles": tiles, "trl, logits": of_logits}
    try:
        from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction as Liger
    except ImportError as error:
        print(f"without liger: {error}", file=sys.stderr)
    else:

        def liger(case: Case, entropy: bool) -> Scores:
            return Liger.apply(case.hidden[0, :-1], case.weight, case.ids, None, 1.0, 4096), None

        found["liger"] = liger
    return found


WITH_LOGITS = ("plain", "compiled", "trl, logits")


def step(score: Callable[[Case, bool], Scores], case: Case, entropy: bool) -> Scores:
    """Forward and backward; return the gradients."""
    logprobs, of_entropy = score(case, entropy)
    total = (logprobs.float() * case.slopes).sum() + (0.0 if of_entropy is None else of_entropy.sum())
    gradients: Scores = torch.autograd.grad(total, [case.hidden, case.weight])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return gradients


def check(contenders: dict[str, Callable[[Case, bool], Scores]], entropy: bool, dtype: Any) -> None:
    """Compare values and gradients on a small case.

    Raises:
        SystemExit: Some differ.
    """
    case = Case(300, 16, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    expected: list[Any] = []
    for name, score in contenders.items():
        asked = entropy and name != "liger"
        if asked != entropy:
            expected_now = [*ours(case, False)[:1], *step(ours, case, False)]
        else:
            expected_now = expected = expected or [*ours(case, entropy)[:1], *step(ours, case, entropy)]
        for mine, theirs in zip(
            expected_now, [*score(case, asked)[:1], *step(score, case, asked)], strict=True
        ):
            error = float((mine - theirs).detach().abs().max()) / float(mine.detach().abs().max())
            if not error < tolerance:
                raise SystemExit(f"{name} differs by {error}")


def peak(call: Callable[[], object]) -> int | None:
    if DEVICE != "cuda":
        return peak_resident(call)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated()) - before


def measure(case: Case, contenders: dict[str, Callable[[Case, bool], Scores]], options: Any) -> Any:
    """Return a row for each contender: its peak, and the median time of calls that take turns."""
    tokens, clock = len(case.ids), CLOCKS[options.clock]
    running = {
        name: score
        for name, score in contenders.items()
        if name not in WITH_LOGITS or tokens <= options.plain_tokens
    }

    def run(name: str) -> object:
        return step(running[name], case, options.entropy)

    peaks: dict[str, int | None] = {}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(options.rounds):
        for name in running:
            start = clock()
            if turn == 0:
                peaks[name] = peak(partial(run, name))
            else:
                run(name)
            seconds[name].append(clock() - start)
    return [
        {
            "tokens": tokens,
            "contender": name,
            "peak_bytes": peaks.get(name),
            "seconds": statistics.median(seconds[name]) if name in running else None,
        }
        for name in contenders
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--plain-tokens", type=int, default=4096)
    parser.add_argument("--contenders", nargs="+", help="all by default")
    parser.add_argument("--clock", default="cpu", choices=sorted(CLOCKS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    everyone = {"mmrender": ours, "checkpointed": checkpointed, "plain": plain, **peers()}
    if DEVICE == "cuda":
        everyone["compiled"] = torch.compile(plain)
    if options.entropy:
        everyone.pop("liger", None)  # it has none
    if options.contenders:
        everyone = {name: everyone[name] for name in options.contenders}
    check(everyone, options.entropy, dtype)
    rows: list[dict[str, Any]] = []
    for tokens in sorted(options.tokens):
        rows += measure(Case(tokens, options.hidden, dtype), everyone, options)
        print(*rows[-len(everyone) :], sep="\n", file=sys.stderr, flush=True)
    per_token = {row["contender"]: row["peak_bytes"] / row["tokens"] for row in rows if row["peak_bytes"]}
    for row in rows:
        row["computed"] = row["peak_bytes"] is None and row["contender"] in per_token
        if row["computed"]:
            row["peak_bytes"] = int(per_token[row["contender"]] * row["tokens"])
    shown = [
        (
            str(row["tokens"]),
            row["contender"],
            f"{(row['peak_bytes'] or 0) / 1e9:.2f}" + (" computed" if row["computed"] else ""),
            "-" if row["seconds"] is None else f"{row['seconds']:.3g}",
        )
        for row in rows
    ]
    print(table(("tokens", "contender", "peak GB", "seconds"), shown))
    if options.json:
        packages = ("torch", "trl", "liger-kernel")
        settings = {**vars(options), "json": str(options.json), "vocabulary": VOCABULARY, "device": DEVICE}
        result = {"machine": machine(packages), "settings": settings, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
