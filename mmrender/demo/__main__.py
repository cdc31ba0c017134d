"""The demonstration: `python -m mmrender.demo`. From nothing to logits, offline, on a CPU.

Needs the `hf`, `torch` and `cli` extras. Exits 1 where something that it set out to prove does not hold.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before Transformers is imported: nothing here may depend on a network, and its own bars would tear ours.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from mmrender._version import __version__
from mmrender.demo.conversation import Conversation, three_turns
from mmrender.demo.model import build_tiny_model
from mmrender.errors import MissingDependencyError, MMRenderError
from mmrender.rendered import RenderedTokens
from mmrender.renderer import Renderer

try:
    from rich.console import Console
except ImportError as error:
    raise MissingDependencyError.of_extra("rich", "cli", "the demonstration") from error

from mmrender.demo.proofs import ForwardPass, Proof, forward, prove_parity, prove_text_stays_text
from mmrender.demo.report import WIDTH, Report, forward_lines, model_lines, rollout_lines
from mmrender.demo.rollout import prove_rollout, roll_out


def demonstrate(report: Report, directory: Path) -> None:
    """Run every step; `directory` receives the model."""
    renderer = build(report, directory)
    conversation = three_turns()
    rendered = render(report, renderer, conversation)
    compare(report, directory, renderer, conversation, rendered)
    model = compute(report, directory, rendered)
    sample(report, renderer, model)


def build(report: Report, directory: Path) -> Renderer:
    """Build the model directory and load its renderer."""
    with report.step("Build a vision-language model with random weights"):
        build_tiny_model(directory)
        renderer = Renderer.from_pretrained(directory, image_backend="pil")
        lines = model_lines(directory, renderer)
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


def compute(report: Report, directory: Path, rendered: RenderedTokens) -> Any:
    """Feed ids and pixels to the model; return it."""
    with report.step("Feed ids and pixels to the model"):
        model = load_model(directory)
        result = forward(model, rendered)
    for line in forward_lines(result):
        report.line(line)
    report.prove(_accepted(result, rendered))
    return model


def sample(report: Report, renderer: Renderer, model: Any) -> None:
    """Sample four turns, each bridged to the next."""
    with report.step("Sample four turns, bridging each to the next"):
        turns, final, encoded = roll_out(model, renderer)
        proofs = prove_rollout(renderer, turns, final, encoded)
    for line in rollout_lines(turns):
        report.line(line)
    report.prove(*proofs)


def load_model(directory: Path) -> Any:
    """Load the model's weights, without the progress bar that Transformers would draw."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(directory).eval()


def _accepted(result: ForwardPass, rendered: RenderedTokens) -> Proof:
    holds = result.finite and result.shape[1] == len(rendered)
    return Proof("the model takes ids and pixels", holds, f"{result.shape[1]:,} positions")


def main() -> int:
    """Run the demonstration; return the exit status."""
    console = Console(width=min(WIDTH, Console().width), soft_wrap=False)
    console.print(f"[bold]mmrender {__version__}[/]: messages and pictures to tokens, tensors and logits")
    report = Report(console)
    try:
        with tempfile.TemporaryDirectory(prefix="mmrender-demo-") as folder:
            demonstrate(report, Path(folder) / "tiny-vlm")
    except MMRenderError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        return 2
    for proof in report.failed:
        console.print(f"\n[red]not so: {proof.claim} ({proof.detail})[/]", highlight=False)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
