"""Small drawings as SVG text, for documents: curves. They need no script and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 30
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1864ab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(curves: Sequence[Curve], *, x_name: str, y_name: str, least_top: float = 0.0) -> str:
    """Curves over one scale that begins at zero."""
    points = [point for curve in curves for point in curve.points]
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = max([least_top, *(y for _, y in points)]) * 1.05 or 1.0
    left = min((x for x, _ in points), default=0.0)
    body = [_frame(left, right, top, x_name, y_name)]
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{_x(x, left, right):.1f},{_y(y, top):.1f}" for x, y in curve.points)
        body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>')
        if len(curves) > 1:
            body.append(
                f'<text x="{LEFT + 8}" y="{TOP + 12 + 14 * number}" fill="{colour}">{escape(curve.name)}</text>'
            )
    return _svg(HEIGHT, body)


def _x(value: float, left: float, right: float) -> float:
    return LEFT + (value - left) / ((right - left) or 1.0) * (WIDTH - LEFT - RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _frame(left: float, right: float, top: float, x_name: str, y_name: str) -> str:
    """Axes with a few numbers."""
    parts = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dee2e6"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">{left:.3g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{right:.3g} {escape(x_name)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{TOP + 12}" text-anchor="end" fill="#868e96">{escape(y_name)}</text>')
    return "".join(parts)


def _svg(height: int, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11">{"".join(body)}</svg>'
    )
