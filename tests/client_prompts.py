"""Prompts with media of several families, made without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrender.sidecar import Expansion, MultiModalData, PlaceholderRange, Repeat

PAD, OPEN, CLOSE, ROW, FRAME, IMAGE, VIDEO_PAD = 90, 91, 92, 93, 94, 95, 96
VOCAB = 100
TOKENS = {"pad": PAD, "row": ROW, "frame": FRAME, "video": VIDEO_PAD}


@dataclass(frozen=True)
class FakeItem:
    """A media item that is nothing but its expansion."""

    expansion: Expansion
    identity: str
    modality: Any = "image"
    size: tuple[int, int] = (32, 32)
    grid: tuple[int, ...] = (1, 2, 2)
    nbytes: int = 0

    def tensors(self, dtype: str = "float32", *, framework: str = "numpy") -> dict[str, Any]:
        return {}


def qwen_item(count: int, identity: str | None = None) -> FakeItem:
    """One run of pads."""
    return FakeItem((Repeat("pad", count),), identity or f"qwen-{count}")


def video_item(count: int) -> FakeItem:
    return FakeItem((Repeat("video", count),), f"video-{count}", modality="video")


def tiled_item(rows: int, columns: int) -> FakeItem:
    """Rows of tiles with a frame before and separators between, as tiled families write."""
    pieces: list[Repeat] = [Repeat("frame", 1, embeds=False)]
    for _ in range(rows):
        pieces += [Repeat("pad", columns), Repeat("row", 1, embeds=False)]
    return FakeItem((*pieces, Repeat("pad", 2), Repeat("frame", 1, embeds=False)), f"tiled-{rows}-{columns}")


@dataclass
class PromptMaker:
    """Writes a prompt piece by piece, and its sidecar beside it."""

    ids: list[int] = field(default_factory=list)
    collapsed: list[int] = field(default_factory=list)
    placed: list[tuple[PlaceholderRange, Any]] = field(default_factory=list)

    def text(self, ids: Sequence[int]) -> "PromptMaker":
        self.ids += ids
        self.collapsed += ids
        return self

    def item(self, item: FakeItem, placeholder: int = PAD) -> "PromptMaker":
        offset = len(self.ids)
        spans: list[tuple[int, int]] = []
        for piece in item.expansion:
            assert isinstance(piece, Repeat)
            start = len(self.ids) - offset
            self.ids += [TOKENS[piece.token]] * piece.count
            if piece.embeds:
                spans.append((start, start + piece.count))
        length = len(self.ids) - offset
        whole = spans == [(0, length)]
        self.placed.append((PlaceholderRange(offset, length, None if whole else tuple(spans)), item))
        self.collapsed.append(placeholder)
        return self

    def framed(self, item: FakeItem, placeholder: int = PAD) -> "PromptMaker":
        return self.text([OPEN]).item(item, placeholder).text([CLOSE])

    @property
    def sidecar(self) -> MultiModalData:
        return MultiModalData.of(self.placed)
