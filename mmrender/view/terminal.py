"""The token strip: every token of a rendering, coloured by kind, with placeholders folded.

Needs rich, of the extra `cli`.
"""

from collections import Counter

from rich.table import Table
from rich.text import Text

from mmrender.messages import MODALITIES
from mmrender.sidecar import MediaItem, common_prefix
from mmrender.tokens.rendered import RenderedTokens
from mmrender.view.pictures import token_grid
from mmrender.view.text import Decode, token_texts, visible

STYLES = {
    "content": ("white on grey23", "white on grey30"),
    "reasoning": ("plum1 on grey15", "plum1 on grey19"),
    "tool_call": ("khaki1 on grey15", "khaki1 on grey19"),
    "tools": ("dark_sea_green2 on grey11", "dark_sea_green2 on grey15"),
    "documents": ("dark_sea_green2 on grey11", "dark_sea_green2 on grey15"),
    "image": ("black on sky_blue1", "black on sky_blue1"),
    "video": ("black on sky_blue1", "black on sky_blue1"),
}
_SCAFFOLD = ("grey58", "grey46")
_SAMPLED = ("black on dark_sea_green3", "black on dark_sea_green4")
_BEFORE, _AFTER = 16, 24
"""Number of tokens shown before a difference, and from it on."""


def token_strip(rendered: RenderedTokens) -> Text:
    """Return every token in its colour: sampled green, content bright, template dim, media folded.

    An unpickled rendering is without a tokenizer, so its tokens are shown as ids.
    """
    decode = rendered._decode
    if decode is None:
        texts = [f"⟨{token_id}⟩" for token_id in rendered.token_ids]
    else:
        texts = token_texts(rendered.token_ids, decode)
    strip = Text(no_wrap=False, overflow="fold")
    data = rendered.multi_modal_data
    items = {
        placeholder.offset: item
        for modality, ranges in data.mm_placeholders.items()
        for placeholder, item in zip(ranges, data.mm_items[modality], strict=True)
    }
    for span in rendered.spans:
        if span.kind in MODALITIES:
            count, item = span.stop - span.start, items.get(span.start)
            layout = f"{_layout(item, count)} = " if item is not None else ""
            strip.append(f"⟨{span.kind} {layout}{count}⟩", STYLES[span.kind][0])
            continue
        styles = _SAMPLED if span.sampled else STYLES.get(span.kind, _SCAFFOLD)
        for index, piece in enumerate(filter(None, texts[span.start : span.stop])):
            strip.append(visible(piece), styles[index % 2])
            if piece.endswith("\n"):
                strip.append("\n")
    return strip


def _layout(item: MediaItem, count: int) -> str:
    """Return rows and columns of tokens, or the number of tiles."""
    grid = token_grid(item, count)
    if grid is None:
        return "×".join(map(str, item.grid)) + " tiles"
    frames, rows, columns = grid
    return f"{rows}×{columns}" if frames == 1 else f"{frames}×{rows}×{columns}"


def difference(first: RenderedTokens, second: RenderedTokens, names: tuple[str, str], decode: Decode) -> Text:
    """Show both sequences around their first difference."""
    start = common_prefix(first.token_ids, second.token_ids)
    lengths = len(first), len(second)
    if start == max(lengths):
        return Text(f"equal: {start:,} tokens")
    text = Text(f"{start:,} tokens are equal, then they differ\n", no_wrap=False, overflow="fold")
    for name, one in zip(names, (first, second), strict=True):
        before, after = one.token_ids[max(0, start - _BEFORE) : start], one.token_ids[start : start + _AFTER]
        texts = token_texts([*before, *after], decode)
        text.append(f"\n{visible(name)}: {len(one):,} tokens\n", "bold")
        text.append(visible("".join(texts[: len(before)])), _SCAFFOLD[0])
        text.append(visible("".join(texts[len(before) :])), "black on light_salmon1")
        text.append(f"\n{' '.join(map(str, after))}\n", _SCAFFOLD[1])
    return text


def message_table(rendered: RenderedTokens) -> Table:
    """Return a table of each message's tokens, sampled tokens, images and videos."""
    table = Table(title=None, show_edge=False, pad_edge=False)
    for heading in ("message", "role", "tokens", "sampled", "media"):
        table.add_column(heading, justify="left" if heading == "role" else "right")
    counts = rendered.tokens_per_message
    ranges = rendered.multi_modal_data.mm_placeholders.values()
    starts = {one.offset for several in ranges for one in several}  # a sound track has its video's
    shown = Counter(rendered.message_indices[start] for start in starts)
    for index, role in enumerate(rendered.roles):
        spans = [span for span in rendered.spans if span.message == index]
        sampled = sum(span.stop - span.start for span in spans if span.sampled)
        table.add_row(str(index), role, str(counts[index]), str(sampled or ""), str(shown[index] or ""))
    outside = len(rendered) - sum(counts)
    if outside:
        table.add_row("", "template", str(outside), "", "")
    return table


def legend() -> Text:
    """Return the legend of the colours."""
    text = Text()
    entries = [("sampled", _SAMPLED), ("content", STYLES["content"]), ("reasoning", STYLES["reasoning"])]
    entries += [("tool call", STYLES["tool_call"]), ("image", STYLES["image"]), ("template", _SCAFFOLD)]
    for name, styles in entries:
        text.append(f" {name} ", styles[0])
        text.append(" ")
    return text
