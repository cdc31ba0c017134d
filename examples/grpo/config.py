"""Settings of a run, as fields and as flags of the command line."""

import argparse
import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from mmrender.testing.tiny_model import build_tiny_model


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
        out: Folder of the run. The same command goes on with a run that was cut off.
        game: `cell`, with one answer, `look`, with a picture between two, or `zoom`, with a tool to call.
        grid: Rows and columns of the board, 2 to 5.
        pixels: Side of a picture.
        constrained: Sample only turns that are legal.
        shuffled: Show pictures of other boards than the answers belong to: nothing can be learned.
        seed: Seed of the weights, the boards and the sampling.
        warm_up: Maximum number of updates on recorded games of an expert before the first step, for `zoom`.
        warm_up_until: Share of held-out boards at which these end, so that something is left to learn.
        recorded: Recorded games of one of these updates.
        steps: Maximum number of steps. A step plays games and updates the weights once.
        until: Share of held-out boards at which a run ends.
        boards: Boards of a step.
        rollouts: Games of each board, one group.
        answers: Number of samples of a game's last turn in `zoom`: branches that share everything before.
        cycle: Steps after which the boards come again; 0 for never.
        learning_rate: Learning rate of AdamW.
        entropy_bonus: Weight of the entropy of the allowed tokens.
        most_weight: Maximum of an importance weight.
        row_tokens: Tokens of a packed row.
        micro_batch_tokens: Tokens of a forward; gradients of a step are accumulated over its micro-batches.
        held_out: Number of boards that are never trained on, played greedily.
        evaluate_every: Steps between plays of the held-out boards, and between checkpoints.
        audit_share: Maximum share of the time for audits, which end the run if sampler and trainer differ.
            0 for none.
        tolerance: Difference of sampler and trainer in nats that rounding may cause.
        explain: Number of games whose cause of difference an audit looks for, in some seconds each.
        hidden_size: Width of the model.
        layers: Layers of its language model and of its vision tower.
        patch_size: Side of a patch, in pixels.
        fault: A fault between sampler and trainer: shifted, stale, retokenized or parsed.
        agent: Play by an agent that calls a gateway over HTTP with the client of OpenAI.
        server: URL of the vLLM server of `grpo.processes`, or `local` for a model in each worker.
        workers: Worker processes of `grpo.processes`.
        receivers: Processes of `grpo.processes` that receive games.
        quiet: Show nothing while the run goes on.
    """

    out: Path = Path("runs/grpo")
    game: str = "cell"
    grid: int = 3
    pixels: int = 64
    constrained: bool = True
    shuffled: bool = False
    seed: int = 0
    warm_up: int = 0
    warm_up_until: float = 0.6
    recorded: int = 32
    steps: int = 200
    until: float = 0.99
    boards: int = 32
    rollouts: int = 8
    answers: int = 1
    cycle: int = 0
    learning_rate: float = 3e-4
    entropy_bonus: float = 0.05
    most_weight: float = 2.0
    row_tokens: int = 512
    micro_batch_tokens: int = 4096
    held_out: int = 128
    evaluate_every: int = 10
    audit_share: float = 0.02
    tolerance: float = 1e-3
    explain: int = 1
    hidden_size: int = 64
    layers: int = 2
    patch_size: int = 8
    fault: str = ""
    agent: bool = False
    server: str = "http://127.0.0.1:8000"
    workers: int = 1
    receivers: int = 1
    quiet: bool = False


ZOOM: Final[dict[str, Any]] = {
    "grid": 2,
    "warm_up": 400,
    "boards": 16,
    "rollouts": 4,
    "answers": 2,
    "entropy_bonus": 0.01,
    "row_tokens": 1024,
}
"""Settings of the game with the tool that differ from the settings of `cell`."""


GAMES: Final[dict[str, dict[str, Any]]] = {"cell": {}, "look": {"boards": 16}, "zoom": ZOOM}
"""The games, and their own settings."""


AGENT: Final = {"rollouts": 8, "answers": 1}
"""Settings of both games that differ if an agent plays, which asks for one answer a turn."""


MAX_GRID: Final = 5
"""Rows and columns of the largest board, whose cells have the letters A to Y."""


_FREE: Final = {
    "out",
    "steps",
    "until",
    "audit_share",
    "explain",
    "fault",
    "server",
    "workers",
    "receivers",
    "quiet",
}
"""Settings that may be others when a run goes on."""


def build(config: Config) -> Path:
    """Build the model that a run begins with, if it is not there; return its directory.

    Raises:
        SystemExit: The folder holds a run with other settings.
    """
    directory, file = config.out / "model", config.out / "settings.json"
    settings = {name: value for name, value in vars(config).items() if name not in _FREE}
    known = json.loads(file.read_text()) if file.exists() else settings
    if other := [name for name in settings if known.get(name) != settings[name]]:
        raise SystemExit(
            f"{config.out} holds a run with another {other[0]}: {known.get(other[0])}, not "
            f"{settings[other[0]]}; name another folder with --out, or remove it"
        )
    if not directory.exists():
        written = config.out / "model.new"
        shutil.rmtree(written, ignore_errors=True)
        build_tiny_model(
            written,
            seed=config.seed,
            hidden_size=config.hidden_size,
            layers=config.layers,
            patch_size=config.patch_size,
        ).rename(directory)
    file.write_text(json.dumps(settings))
    return directory


def parse(arguments: list[str] | None = None, *, program: str = "grpo") -> Config:
    """Read the flags of the command line of a program, such as `--learning-rate 1e-3`."""
    lines = (line.strip().partition(": ") for line in (Config.__doc__ or "").splitlines())
    described = {name: text for name, _, text in lines if text}
    parser = argparse.ArgumentParser(
        program,
        usage=f"python -m {program} [--FLAG VALUE ...]",
        description="Train a small vision-language model until it plays a game. Defaults are in parentheses.",
    )
    for setting in fields(Config):
        options: dict[str, Any] = {"type": type(setting.default)}
        if isinstance(setting.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        if setting.name == "game":
            options = {"choices": list(GAMES)}
        flag = "--" + setting.name.replace("_", "-")
        text = described[setting.name].rstrip(".") + f" ({_defaults(setting.name, setting.default)})"
        parser.add_argument(flag, default=setting.default, help=text, **options)
    chosen = parser.parse_args(arguments)
    parser.set_defaults(**{**GAMES[chosen.game], **(AGENT if chosen.agent else {})})
    config = Config(**vars(parser.parse_args(arguments)))
    if config.agent and config.game == "look":
        parser.error("argument --agent: the agent calls tools, and the game look has none to call")
    if not 2 <= config.grid <= MAX_GRID:
        parser.error(f"argument --grid: {config.grid} is not 2 to {MAX_GRID}, so that each cell has a letter")
    return config


def _defaults(name: str, default: Any) -> str:
    """Defaults of a flag in words: its own, a game's, an agent's."""
    texts = [str(default) or "none"]
    texts += [f"{own[name]} in {game}" for game, own in GAMES.items() if name in own]
    texts += [f"{AGENT[name]} with --agent"] if name in AGENT else []
    return ", ".join(texts)
