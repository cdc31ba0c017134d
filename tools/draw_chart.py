"""Draw the chart that the demonstration shows a model: `mmrender/testing/data/chart.png`.

Run it with `.venv/bin/python tools/draw_chart.py` after changing it. The figures are made up.
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

TARGET = Path(__file__).resolve().parent.parent / "mmrender" / "testing" / "data" / "chart.png"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
TONS = (96, 88, 131, 167, 212, 259, 284, 251, 198, 154, 117, 103)
TOP_OF_AXIS = 300

WIDTH, HEIGHT = 640, 416
LEFT, RIGHT, TOP, BOTTOM = 64, 616, 84, 352
SCALE = 4  # drawn larger and reduced, which smooths every edge

INK, MUTED, RULE, PAPER = "#1f2933", "#66727f", "#d9dee3", "#ffffff"
BAR, HIGHEST = "#4c84c4", "#e07a3f"


class Canvas:
    """A picture whose coordinates are those of the finished chart."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def line(self, start: tuple[float, float], stop: tuple[float, float], colour: str) -> None:
        """Draw a line one pixel wide."""
        self.draw.line([scaled(start), scaled(stop)], fill=colour, width=SCALE)

    def bar(self, corner: tuple[float, float], opposite: tuple[float, float], colour: str) -> None:
        """Draw a bar with rounded upper corners."""
        self.draw.rounded_rectangle(
            [scaled(corner), scaled(opposite)], 3 * SCALE, colour, corners=(True, True, False, False)
        )

    def text(self, at: tuple[float, float], text: str, size: float, colour: str, anchor: str) -> None:
        """Write text in Pillow's own font; `anchor` is Pillow's."""
        self.draw.text(scaled(at), text, colour, ImageFont.load_default(size * SCALE), anchor=anchor)

    def reduced(self) -> Image.Image:
        """Return the chart at its final size."""
        return self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def scaled(point: tuple[float, float]) -> tuple[float, float]:
    """Map a point of the chart to the enlarged canvas."""
    return point[0] * SCALE, point[1] * SCALE


def height_of(tons: float) -> float:
    """Map a value to its y coordinate."""
    return BOTTOM - (BOTTOM - TOP) * tons / TOP_OF_AXIS


def draw_frame(canvas: Canvas) -> None:
    """Title, gridlines with their values, and the source."""
    canvas.text((24, 24), "Strawberries harvested, by month", 20, INK, "lt")
    canvas.text((24, 52), "tons", 13, MUTED, "lt")
    for tons in range(0, TOP_OF_AXIS + 1, 50):
        y = height_of(tons)
        canvas.line((LEFT, y), (RIGHT, y), INK if tons == 0 else RULE)
        canvas.text((LEFT - 8, y), str(tons), 12, MUTED, "rm")
    canvas.text((24, HEIGHT - 20), "Made-up figures, for demonstration", 11, MUTED, "lm")


def draw_bars(canvas: Canvas) -> None:
    """One bar a month; the highest one is marked and carries its value."""
    pitch = (RIGHT - LEFT) / len(MONTHS)
    for index, (month, tons) in enumerate(zip(MONTHS, TONS, strict=True)):
        middle = LEFT + pitch * (index + 0.5)
        highest = tons == max(TONS)
        canvas.bar((middle - 15, height_of(tons)), (middle + 15, BOTTOM), HIGHEST if highest else BAR)
        canvas.text((middle, BOTTOM + 16), month, 13, INK, "mm")
        if highest:
            canvas.text((middle, height_of(tons) - 6), str(tons), 13, INK, "mb")


def main() -> None:
    """Draw and save the chart."""
    canvas = Canvas()
    draw_frame(canvas)
    draw_bars(canvas)
    canvas.reduced().save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
