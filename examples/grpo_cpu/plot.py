"""The picture of a run: reward, tool use and episode length by step, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 56, 48, 150, 44
LEGEND = 180


def save_plot(path: Path, steps: Sequence[dict[str, Any]], before: float, after: float) -> None:
    """Write the picture of a run.

    Args:
        path: Path of the file.
        steps: The ledger of the run.
        before: Mean reward of the held-out tasks before training.
        after: The same after it.
    """
    last = len(steps) + 1

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>Reward of training episodes by step, and of held-out tasks</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="14">GRPO on two cores: mean reward of SmolLM2-135M</text>',
    ]
    for value in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line x1="{LEFT}" x2="{x(last)}" y1="{y(value)}" y2="{y(value)}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    labels = {0: "before", **{step: str(step) for step in range(1, last, max(1, last // 10))}, last: "after"}
    for step, label in labels.items():
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{x(last / 2):.1f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    lines = (("reward", "#0b6e4f", "training reward"), ("tool_use", "#b35c00", "tool use"))
    for number, (name, color, label) in enumerate(lines):
        points = " ".join(f"{x(one['step']):.1f},{y(one['metrics'][name]):.1f}" for one in steps)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x(last) + 12}" y="{LEGEND + 20 * number}" fill="{color}">{label}</text>')
    for end, value in ((0, before), (last, after)):
        parts.append(f'<circle cx="{x(end):.1f}" cy="{y(value):.1f}" r="5" fill="#1f4e9c"/>')
        parts.append(f'<text x="{x(end) + 11:.1f}" y="{y(value) + 4:.1f}" fill="#1f4e9c">{value:.2f}</text>')
    parts.append(f'<text x="{x(last) + 12}" y="{LEGEND + 40}" fill="#1f4e9c">held-out tasks</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")
