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
        out: Folder of the run: model, metrics, checkpoint, rollouts and plot. A run that was cut off goes on.
        game: `cell` or `zoom`; the second has the settings of `ZOOM` where they are not given.
        grid: Rows and columns of the board.
        pixels: Side of a picture.
        constrained: Sample only turns that are legal, in `zoom`; in `cell` it is always so.
        shuffled: Show pictures of other boards than the answers are of: nothing can be learned.
        seed: Of the weights, the boards and the sampling.
        warm_up: The most updates on recorded games of an expert before the first step, for `zoom`.
        warm_up_until: Share of held-out boards at which these end, so that something is left to learn.
        recorded: Recorded games of such an update.
        steps: The most updates of the weights.
        until: Share of held-out boards at which a run of one process ends.
        boards: Boards of a step.
        rollouts: Games of each board, one group.
        answers: Last turns that are sampled of a game, in `zoom`: branches that share all before.
        cycle: Steps after which the boards come again; 0 for never.
        learning_rate: Of AdamW.
        entropy_bonus: Weight of the entropy of what could be answered.
        most_weight: Where importance weights are cut.
        row_tokens: Tokens of a packed row.
        micro_batch_tokens: Tokens of a forward; gradients of a step are accumulated over its micro-batches.
        held_out: Boards that are never trained on, to be played greedily.
        evaluate_every: Steps between such games, and between checkpoints and samples of rollouts.
        audit_every: Steps between audits, which end the run where sampler and trainer differ; 0 for none.
        tolerance: Nats by which arithmetic alone may part sampler and trainer; more is a finding.
        explain: Games that differ most whose cause an audit looks for, in some seconds each.
        hidden_size: Width of the model.
        layers: Layers of its language model and of its vision tower.
        patch_size: Side of a patch, in pixels.
        fault: A fault between sampler and trainer, to see what it does; see `grpo.faults`.
        agent: Play by an agent that calls a gateway over HTTP with the client of OpenAI.
        server: URL of the vLLM server that the worker of two processes plays against.
        quiet: Show no progress.
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
    audit_every: int = 20
    tolerance: float = 1e-3
    explain: int = 1
    hidden_size: int = 64
    layers: int = 2
    patch_size: int = 8
    fault: str = ""
    agent: bool = False
    server: str = "http://127.0.0.1:8000"
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
"""Settings of the game with the tool that differ from those of the other one."""


AGENT: Final = {"rollouts": 8, "answers": 1}
"""Settings of both games that differ if an agent plays, which asks for one answer a turn."""


_FREE: Final = {"out", "steps", "until", "audit_every", "explain", "fault", "server", "quiet"}
"""Settings that may be others when a run goes on."""


def build(config: Config) -> Path:
    """Build the model that a run begins with, if it is not there; return its directory.

    Raises:
        SystemExit: The folder holds a run with other settings.
    """
    directory, file = config.out / "model", config.out / "settings.json"
    settings = {name: value for name, value in vars(config).items() if name not in _FREE}
    known = json.loads(file.read_text()) if file.exists() else settings
    if other := sorted(name for name in settings if known.get(name) != settings[name]):
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


def parse(arguments: list[str] | None = None) -> Config:
    """Read the flags of the command line, such as `--learning-rate 1e-3`."""
    lines = (line.strip().partition(": ") for line in (Config.__doc__ or "").splitlines())
    described = {name: text for name, _, text in lines if text}
    parser = argparse.ArgumentParser("grpo", description=__doc__)
    for setting in fields(Config):
        options: dict[str, Any] = {"type": type(setting.default)}
        if isinstance(setting.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        flag = "--" + setting.name.replace("_", "-")
        text = described.get(setting.name, "") + f" ({setting.default})"
        parser.add_argument(flag, default=setting.default, help=text, **options)
    chosen = parser.parse_args(arguments)
    parser.set_defaults(**{**(ZOOM if chosen.game == "zoom" else {}), **(AGENT if chosen.agent else {})})
    return Config(**vars(parser.parse_args(arguments)))
