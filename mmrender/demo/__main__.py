"""The demonstration, from nothing to a shipped trajectory, offline and on a CPU.

Needs the `hf`, `torch`, `client` and `cli` extras. Exits 1 where a proof does not hold, 2 on an error.
"""

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Before Transformers is imported: nothing here may depend on a network, and its own bars would tear ours.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from mmrender._version import __version__
from mmrender.client import LocalBackend, RendererBackend
from mmrender.client.resolve import BackendName
from mmrender.demo import proofs
from mmrender.demo.conversation import SYSTEM, load_pictures, three_turns, user_turn
from mmrender.errors import MissingDependencyError, MMRenderError
from mmrender.renderer import Renderer
from mmrender.rollout import RendererClient
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.trajectory import Trajectory
from mmrender.view.terminal import legend, message_table, token_strip

try:
    from rich.console import Console
except ImportError as error:
    raise MissingDependencyError.of_extra("rich", "cli", "the demonstration") from error

WIDTH = 80
_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]-[/]"}


class Report:
    """Writes numbered steps and their proofs, and keeps the proofs that fail."""

    def __init__(self) -> None:
        self.console = Console(width=min(WIDTH, Console().width), soft_wrap=False)
        self.print = partial(self.console.print, highlight=False)
        self.failed: list[proofs.Proof] = []
        self._steps = itertools.count(1)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Head a section and show its duration; what is printed inside comes after the heading."""
        start = time.perf_counter()
        self.print(f"\n[bold cyan]{next(self._steps)}[/] [bold]{title}[/]")
        yield
        self.print(f"  [dim]{time.perf_counter() - start:.1f} s[/]")

    def prove(self, *found: proofs.Proof) -> None:
        """Show proofs; remember those that do not hold."""
        for proof in found:
            self.print(f"  {_MARKS[proof.holds]} {proof.claim:<35} [dim]{proof.detail}[/]")
        self.failed += [proof for proof in found if proof.holds is False]


def run_here(report: Report, folder: Path) -> None:
    """Build a tiny model, prove its rendering, sample from it and ship what was sampled."""
    directory = folder / "tiny-vlm"
    with report.step("Build a vision-language model with random weights"):
        build_tiny_model(directory)
        renderer = Renderer.from_pretrained(directory, image_backend="pil")
        describe(report, renderer)
    with report.step("Render three turns with two pictures, a tool call and reasoning"):
        conversation = three_turns()
        rendered = renderer.render(conversation.messages, **conversation.options)
        strip = token_strip(rendered)
        strip.rstrip()
        report.console.print(legend(), "", strip, "", message_table(rendered), sep="\n")
    with report.step("Compare with Transformers"):
        report.prove(*proofs.prove_parity(directory, conversation, rendered))
        report.prove(proofs.prove_text_stays_text(renderer))
        report.prove(proofs.prove_tool_call(renderer, conversation, rendered))
    with report.step("Feed ids and pixels to the model"):
        backend = LocalBackend(directory)
        report.prove(*proofs.prove_forward(backend.model, rendered))
    sample_and_ship(report, RendererClient(renderer, backend=backend), renderer, folder, model=backend.model)


def describe(report: Report, renderer: Renderer) -> None:
    """Show the vocabulary, and what probing the template found."""
    profile = renderer.profile
    stops = ", ".join(renderer.decode([token_id]) for token_id in renderer.get_stop_token_ids())
    report.print(f"  {renderer.tokenizer.vocab_size:,} tokens; turns stop at {stops}")
    roles = ", ".join(profile.image_roles)
    report.print(f"  images in turns of {roles}; prefix stable: {profile.prefix_stable}")


def sample_and_ship(
    report: Report, client: RendererClient, renderer: Renderer, folder: Path, *, model: Any = None
) -> None:
    """Sample three turns with three pictures, save and ship them; `model` checks their log-probabilities."""
    photo, chart = load_pictures()
    crop = chart.crop((0, 0, chart.width // 2, chart.height // 2))
    trajectory = Trajectory()
    with report.step("Sample three turns, bridging each to the next"):
        turns = [user_turn("Which animal?", photo), user_turn("Best month?", chart, crop), user_turn("Sure?")]

        async def converse() -> None:
            conversation: list[Any] = [SYSTEM]
            for seed, asked in enumerate(turns):
                conversation.append(asked)
                sampling = {"seed": seed, "max_tokens": 24}
                turn = await client.create_completion(
                    conversation, trajectory=trajectory, sampling_params=sampling
                )
                conversation.append(turn.message)
                step = trajectory.steps[-1]
                sampled = len(step.completion_ids)
                report.print(f"  turn {seed + 1}: {step.prompt_length:,} tokens in, {sampled} sampled")

        asyncio.run(converse())
        report.prove(*proofs.prove_rollout(renderer, trajectory, pictures=3))
        if model is not None:
            report.prove(proofs.prove_logprobs(model, trajectory))
    with report.step("Save the trajectory, and ship it to a second process"):
        report.prove(proofs.prove_saving(trajectory, folder))
        report.prove(*asyncio.run(proofs.prove_shipping(trajectory, folder)))


def main(
    server: str | None = None,
    *,
    backend: RendererBackend | BackendName | None = None,
    model: str | None = None,
    renderer_of: str | None = None,
) -> int:
    """Run the demonstration here, or its rollouts against a server; return the exit status.

    `backend` is the server's engine (vLLM by default), `model` its name for the model, and `renderer_of` the
    model's directory or hub id, where that is another.
    """
    report = Report()
    report.print(f"[bold]mmrender {__version__}[/]: messages and pictures to tokens and tensors")
    try:
        with tempfile.TemporaryDirectory(prefix="mmrender-demo-") as folder:
            if server is None:
                run_here(report, Path(folder))
            else:
                name = model or renderer_of or ""
                with report.step(f"Load the renderer of {renderer_of or name}"):
                    renderer = Renderer.from_pretrained(renderer_of or name)
                    describe(report, renderer)
                client = RendererClient(renderer, server, model=name, backend=backend)
                sample_and_ship(report, client, renderer, Path(folder))
    except MMRenderError as error:
        report.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 2
    for proof in report.failed:
        report.print(f"\n[red]not so: {proof.claim} ({proof.detail})[/]")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
