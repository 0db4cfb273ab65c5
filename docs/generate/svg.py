"""Boxes, arrows, bars and lines as SVG, for the pictures of the documentation.

Each picture has a background, so that it can be read on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, PALE, PAPER = "#1f2937", "#6b7280", "#fbfaf7"
FILLS = {
    "plain": "#e8eaee",
    "rollout": "#cfe3f7",
    "reward": "#fde6bf",
    "train": "#d4edd3",
    "loss": "#f6cfcf",
    "white": "#ffffff",
}
STROKES = {
    "plain": "#8b93a1",
    "rollout": "#3f83c4",
    "reward": "#c98a1b",
    "train": "#4a9a4a",
    "loss": "#c25450",
    "white": "#8b93a1",
}
FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"


class Picture:
    """One SVG of `width` by `height` pixels; each method adds a shape above the earlier ones."""

    def __init__(self, width: int, height: int, title: str):
        self.size, self.title = (width, height), title
        self._shapes: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, lines: Sequence[str] = (), kind: str = "plain"
    ) -> None:
        """Adds a rounded box with its centred lines, the first of them bold."""
        self._shapes.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='7' fill='{FILLS[kind]}'"
            f" stroke='{STROKES[kind]}' stroke-width='1.5'/>"
        )
        top = y + h / 2 - 8.5 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + 17 * i, line, bold=i == 0, small=i > 0)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        bold: bool = False,
        small: bool = False,
        at: str = "middle",
        color: str = INK,
    ) -> None:
        """Adds a line of text; `at` is start, middle or end."""
        weight = " font-weight='600'" if bold else ""
        self._shapes.append(
            f"<text x='{x:g}' y='{y:g}' text-anchor='{at}' font-size='{12 if small else 14}'"
            f"{weight} fill='{color}'>{escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], color: str = INK, width: float = 2):
        """Adds a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='{width}'/>"
        )

    def arrow(self, points: Sequence[tuple[float, float]], *, dashed: bool = False) -> None:
        """Adds a line through points with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self._shapes.append(
            f"<polyline points='{path}' fill='none' stroke='{INK}' stroke-width='1.6'{dash}"
            " marker-end='url(#head)'/>"
        )

    def bar(self, x: float, y: float, w: float, h: float, kind: str = "plain") -> None:
        """Adds a bar without text."""
        self._shapes.append(
            f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' fill='{FILLS[kind]}'"
            f" stroke='{STROKES[kind]}' stroke-width='1'/>"
        )

    def svg(self) -> str:
        """Returns the file's text."""
        w, h = self.size
        head = (
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8'"
            f" markerHeight='8' orient='auto'><path d='M0,0.5 L8,4 L0,7.5 z' fill='{INK}'/>"
            "</marker></defs>"
        )
        back = f"<rect width='{w}' height='{h}' rx='10' fill='{PAPER}' stroke='#d9d6cc'/>"
        shapes = "\n".join(self._shapes)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {w} {h}' width='{w}'"
            f" height='{h}' role='img' {FONT}>\n<title>{escape(self.title)}</title>\n{head}\n"
            f"{back}\n{shapes}\n</svg>\n"
        )
