"""The demonstration: `python -m mmrender.demo`. From nothing to shipped trajectories, offline, on a CPU.

Needs the `hf`, `torch` and `cli` extras. Exits 1 where something that it set out to prove does not hold.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before Transformers is imported: nothing here may depend on a network, and its own bars would tear ours.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from mmrender._version import __version__
from mmrender.client.local import LocalBackend
from mmrender.demo.conversation import Conversation, three_turns
from mmrender.errors import MissingDependencyError, MMRenderError
from mmrender.renderer import Renderer
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.tokens.rendered import RenderedTokens

try:
    from rich.console import Console
except ImportError as error:
    raise MissingDependencyError.of_extra("rich", "cli", "the demonstration") from error

from mmrender.demo import games
from mmrender.demo.proofs import ForwardPass, Proof, forward, prove_parity, prove_text_stays_text
from mmrender.demo.report import (
    WIDTH,
    Report,
    directory_line,
    forward_lines,
    model_lines,
    rollout_lines,
)
from mmrender.demo.rollout import prove_drift, prove_logprobs, prove_rollout, roll_out
from mmrender.rollout.renderer_client import RendererClient


def demonstrate(report: Report, folder: Path) -> None:
    """Run every step; `folder` receives the model and what is saved."""
    directory = folder / "tiny-vlm"
    renderer = build(report, directory)
    conversation = three_turns()
    rendered = render(report, renderer, conversation)
    compare(report, directory, renderer, conversation, rendered)
    backend = compute(report, directory, rendered)
    client = RendererClient(renderer, backend=backend)
    sample(report, client, renderer, model=backend.model)
    play(report, client, renderer, folder)


def demonstrate_server(
    report: Report, folder: Path, *, server: str, backend: Any, model: str, renderer_of: str
) -> None:
    """Run the rollouts against an inference server; `folder` receives what is saved."""
    with report.step(f"Load the renderer of {renderer_of}"):
        renderer = Renderer.from_pretrained(renderer_of)
        lines = model_lines(renderer)
    for line in lines:
        report.line(line)
    client = RendererClient(renderer, server, model=model, backend=backend)
    sample(report, client, renderer)
    play(report, client, renderer, folder)


def build(report: Report, directory: Path) -> Renderer:
    """Build the model directory and load its renderer."""
    with report.step("Build a vision-language model with random weights"):
        build_tiny_model(directory)
        renderer = Renderer.from_pretrained(directory, image_backend="pil")
        lines = [directory_line(directory), *model_lines(renderer)]
    for line in lines:
        report.line(line)
    return renderer


def render(report: Report, renderer: Renderer, conversation: Conversation) -> RenderedTokens:
    """Render the conversation; show its tokens and bytes."""
    with report.step("Render three turns with two pictures, a tool call and reasoning"):
        rendered = renderer.render(conversation.messages, **conversation.options)
    report.strip(rendered)
    report.messages(rendered)
    return rendered


def compare(
    report: Report, directory: Path, renderer: Renderer, conversation: Conversation, rendered: RenderedTokens
) -> None:
    """Prove the rendering equal to the reference's."""
    with report.step("Compare with Transformers"):
        proofs = prove_parity(directory, conversation, rendered)
        proofs.append(prove_text_stays_text(renderer))
    report.prove(*proofs)


def compute(report: Report, directory: Path, rendered: RenderedTokens) -> LocalBackend:
    """Feed ids and pixels to the model; return what samples from it."""
    with report.step("Feed ids and pixels to the model"):
        backend = LocalBackend(directory)
        result = forward(backend.model, rendered)
    for line in forward_lines(result):
        report.line(line)
    report.prove(_accepted(result, rendered))
    return backend


def sample(report: Report, client: RendererClient, renderer: Renderer, model: Any = None) -> None:
    """Sample four turns, each bridged to the next; with `model` compare with its plain forward."""
    with report.step("Sample four turns, bridging each to the next"):
        rollout = asyncio.run(roll_out(client, renderer))
        proofs = prove_rollout(renderer, rollout)
        if model is not None:
            proofs += [prove_drift(renderer, rollout), prove_logprobs(model, rollout)]
    for line in rollout_lines(rollout.turns):
        report.line(line)
    report.prove(*proofs)


def play(report: Report, client: RendererClient, renderer: Renderer, folder: Path) -> None:
    """Roll out the example environment, and send the trajectories to a second process."""
    with report.step(f"Play {games.BOARDS * games.ROLLOUTS} games: find the marked cell"):
        trajectories = asyncio.run(games.play(client, renderer))
        proofs = games.prove_games(trajectories)
    for line in games.game_lines(trajectories):
        report.line(line)
    report.prove(*proofs)
    with report.step("Save the games, and ship them to a second process"):
        _, saved = games.save(trajectories, folder)
        arrival = asyncio.run(games.ship(trajectories, folder))
        proofs = [saved, *games.prove_arrival(trajectories, arrival)]
    report.prove(*proofs)


def _accepted(result: ForwardPass, rendered: RenderedTokens) -> Proof:
    holds = result.finite and result.shape[1] == len(rendered)
    return Proof("the model takes ids and pixels", holds, f"{result.shape[1]:,} positions")


def main(
    server: str | None = None,
    *,
    backend: Any = None,
    model: str | None = None,
    renderer_of: str | None = None,
) -> int:
    """Run the demonstration; return the exit status.

    Args:
        server: Base URL of an inference server; None runs everything in this process.
        backend: Its engine, as for `mmrender.client.generate.generate`.
        model: Name under which the server knows the model.
        renderer_of: Directory or hub id of the model; by default `model`.
    """

    def run(report: Report, folder: Path) -> None:
        if server is None:
            return demonstrate(report, folder)
        name = model or renderer_of or ""
        return demonstrate_server(
            report, folder, server=server, backend=backend, model=name, renderer_of=renderer_of or name
        )

    return _reported(run)


def _reported(run: Callable[[Report, Path], None]) -> int:
    console = Console(width=min(WIDTH, Console().width), soft_wrap=False)
    console.print(f"[bold]mmrender {__version__}[/]: messages and pictures to tokens, tensors and logits")
    report = Report(console)
    try:
        with tempfile.TemporaryDirectory(prefix="mmrender-demo-") as folder:
            run(report, Path(folder))
    except MMRenderError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        return 2
    for proof in report.failed:
        console.print(f"\n[red]not so: {proof.claim} ({proof.detail})[/]", highlight=False)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
