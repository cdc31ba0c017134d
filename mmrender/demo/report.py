"""How the demonstration shows what it found: one section a step, at most 80 columns."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console, JustifyMethod
from rich.table import Table

from mmrender.demo.proofs import ForwardPass, Proof, images_of
from mmrender.renderer import Renderer
from mmrender.rollout.renderer_client import Completion
from mmrender.tokens.rendered import RenderedTokens
from mmrender.view.terminal import legend, token_strip

WIDTH = 80
_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]-[/]"}


class Report:
    """Writes the demonstration to a console, and keeps the proofs.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.proofs: list[Proof] = []
        self._numbers = count(1)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Head a section; while it runs a spinner turns, and then its duration is shown."""
        number = next(self._numbers)
        start = time.perf_counter()
        with self.console.status(f"{title} …"):
            yield
        took = f"{time.perf_counter() - start:.1f} s"
        heading = f"[bold cyan]{number}[/] [bold]{title}[/]"
        self.console.print(f"\n{heading} [dim]{took}[/]", highlight=False)

    def line(self, text: str) -> None:
        """Write one indented line."""
        self.console.print(f"  {text}", highlight=False)

    def strip(self, rendered: RenderedTokens) -> None:
        """Show every token."""
        strip = token_strip(rendered)
        strip.rstrip()
        self.console.print(legend(), "", strip, "", sep="\n")

    def messages(self, rendered: RenderedTokens) -> None:
        """Show tokens and bytes of each message."""
        self.console.print(message_bytes(rendered))

    def prove(self, *proofs: Proof) -> None:
        """Show proofs and remember them."""
        for proof in proofs:
            self.proofs.append(proof)
            claim = f"{_MARKS[proof.holds]} {proof.claim:<35}"
            self.line(f"{claim} [dim]{proof.detail}[/]")

    @property
    def failed(self) -> list[Proof]:
        """Proofs that do not hold; one that could not be tried is not among them."""
        return [proof for proof in self.proofs if proof.holds is False]


def message_bytes(rendered: RenderedTokens) -> Table:
    """Tokens of each message, how many are trained on, and bytes of its pictures as kept and as float32."""
    table = Table(show_edge=False, box=None, padding=(0, 1))
    for heading in ("message", "role", "tokens", "trained", "picture", "bytes kept", "as float32"):
        justify: JustifyMethod = "left" if heading in ("role", "picture") else "right"
        table.add_column(heading, justify=justify, header_style="bold", no_wrap=True)
    trained = rendered.loss_mask()
    owners = rendered.message_indices
    places = rendered.multi_modal_data.mm_placeholders.get("image", ())
    pictures = list(zip(places, images_of(rendered), strict=True))
    for index, (role, tokens) in enumerate(zip(rendered.roles, rendered.tokens_per_message, strict=True)):
        items = [item for place, item in pictures if owners[place.offset] == index]
        kept = sum(item.nbytes for item in items)
        full = sum(item.tensors("float32")["pixel_values"].nbytes for item in items)
        sizes = ", ".join(f"{width}x{height}" for height, width in (item.size for item in items))
        cells = [str(index), role, str(tokens), str(int(trained[owners == index].sum()) or "")]
        table.add_row(*cells, sizes, f"{kept:,}" if kept else "", f"{full:,}" if full else "")
    outside = len(rendered) - sum(rendered.tokens_per_message)
    table.add_row("", "[dim]template[/]", str(outside), "", "", "", "")
    table.add_row("", "all", str(len(rendered)), str(int(trained.sum())), "", "", "", style="bold")
    return table


def directory_line(directory: Path) -> str:
    """Describe a model directory by its files."""
    files = sorted(file for file in directory.iterdir())
    size = sum(file.stat().st_size for file in files)
    return f"{len(files)} files, {size / 1e6:.1f} MB"


def model_lines(renderer: Renderer) -> list[str]:
    """Describe a model: its vocabulary, and what probing its template found."""
    profile = renderer.profile
    prompts = "a prompt is a prefix of what follows it" if profile.prefix_stable else "history is rewritten"
    stops = ", ".join(str(renderer.tokenizer.token(token_id)) for token_id in renderer.get_stop_token_ids())
    return [
        f"a vocabulary of {renderer.tokenizer.vocab_size:,} tokens; by probing its template: {prompts};",
        f"images in turns of {', '.join(profile.image_roles)}; turns stop at {stops}",
    ]


def forward_lines(result: ForwardPass) -> list[str]:
    """Describe a forward pass."""
    shape = " x ".join(f"{size:,}" for size in result.shape)
    return [
        f"logits {shape}, {'all finite' if result.finite else '[red]not all finite[/]'}",
        f"loss {result.loss:.2f} over the {result.trained} sampled tokens; "
        f"a uniform guess costs {result.uniform:.2f}",
    ]


def rollout_lines(turns: Sequence[Completion]) -> list[str]:
    """One line a turn: its prompt, what was sampled, and how that reads."""
    lines = []
    for number, turn in enumerate(turns, 1):
        if turn.generation is None:
            lines.append(f"turn {number}: {turn.finish_reason.replace('_', ' ')}")
            continue
        prompt, sampled = turn.generation.prompt_ids, turn.generation.completion_ids
        calls = [call.name for call in turn.generation.tool_calls if call.status == "ok"]
        read = ", ".join(f"calls {name}" for name in calls) or "says something"
        ending = "stopped" if turn.generation.parsed.stopped else "cut off"
        lines.append(f"turn {number}: {len(prompt):,} tokens in, {len(sampled)} sampled, {ending}; {read}")
    return lines
