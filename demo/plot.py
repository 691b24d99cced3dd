"""The training's curve as an SVG picture."""

from __future__ import annotations

import math
from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 900, 420, 50
_LINES = (("loss", "#c0392b"), ("right", "#2471a3"), ("recall", "#1e8449"))


def plot(curve: list[dict[str, float]], path: Path) -> None:
    """Draws the answers' loss (logarithmic), their accuracy and the indexer's recall over the steps."""
    if not curve:
        return
    last = max(point["step"] for point in curve)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for number, (name, color) in enumerate(_LINES):
        points = [(point["step"] / last, _height(name, point[name])) for point in curve]
        path_text = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{color}" points="{path_text}"/>')
        label = f"{name}: {curve[-1][name]:.4f}" + (" (log, 0.001 to 10)" if name == "loss" else "")
        parts.append(f'<text x="{_WIDTH - 260}" y="{30 + 18 * number}" fill="{color}">{label}</text>')
    parts.append(f'<text x="{_MARGIN}" y="{_HEIGHT - 15}" >step {last:.0f}</text></svg>')
    path.write_text("\n".join(parts))


def _height(name: str, value: float) -> float:
    return (math.log10(max(value, 1e-3)) + 3) / 4 if name == "loss" else value


def _x(part: float) -> float:
    return _MARGIN + part * (_WIDTH - 2 * _MARGIN)


def _y(part: float) -> float:
    return _HEIGHT - _MARGIN - min(max(part, 0.0), 1.0) * (_HEIGHT - 2 * _MARGIN)
