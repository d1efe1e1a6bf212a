"""Speed-up against draft depth as one SVG page: a panel for each cost model and acceptance profile."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 210, 150
"""Size of a panel in pixels, its margin included."""

LEFT, TOP, RIGHT, BOTTOM = 34, 24, 10, 26

STYLE = (
    "text{font:11px sans-serif;fill:#222}.grid{stroke:#ddd}.plain{stroke:#888;stroke-dasharray:2 3}"
    ".fixed{fill:none;stroke:#0072b2;stroke-width:1.5}.dot{fill:#0072b2}"
    ".auto{stroke:#d55e00;stroke-width:2;stroke-dasharray:7 3}"
)


def panel(title: str, fixed: Sequence[float], auto: float) -> str:
    """One panel: the curve of fixed depths 0, 1, ..., a dashed line for the controller, a dotted one for plain."""
    top = max([*fixed, auto, 1.0]) * 1.08

    def x(n: float) -> float:
        return LEFT + n / (len(fixed) - 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    def line(kind: str, value: float) -> str:
        ends = f'x1="{x(0):.1f}" x2="{x(len(fixed) - 1):.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        return f'<line class="{kind}" {ends}/>'

    def label(px: float, py: float, text: str, anchor: str) -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

    parts = [label(LEFT, 14, title, "start"), line("grid", 0.0), line("plain", 1.0), line("auto", auto)]
    parts += [label(LEFT - 4, y(value) + 4, f"{value:g}", "end") for value in (0, 1)]
    parts += [label(WIDTH - RIGHT, y(auto) - 4, f"auto {auto:.2f}", "end")]
    parts += [label(x(n), HEIGHT - BOTTOM + 14, str(n), "middle") for n in range(0, len(fixed), 5)]
    points = [(x(n), y(value)) for n, value in enumerate(fixed)]
    parts.append(f'<polyline class="fixed" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in points)}"/>')
    parts += [f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="2"/>' for px, py in points]
    return "".join(parts)


def page(rows: Sequence[dict[str, Any]], columns: int) -> str:
    """SVG text of all rows of `simulate_depth.simulate` (with keys cost, profile, tokens), `columns` panels a line."""
    cells = []
    for i, row in enumerate(rows):
        place = f"translate({i % columns * WIDTH},{24 + i // columns * HEIGHT})"
        title = f"{row['cost']}, {row['profile']}"
        cells.append(f'<g transform="{place}">{panel(title, row["fixed"], row["speedup"])}</g>')
    lines = -(-len(rows) // columns)
    head = f"Speed-up over plain decoding by drafts a round; {rows[0]['tokens']} tokens, simulated"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * WIDTH}" height="{24 + lines * HEIGHT}">'
        f"<style>{STYLE}</style><rect width='100%' height='100%' fill='white'/>"
        f'<text x="{LEFT}" y="16">{escape(head)}</text>{"".join(cells)}</svg>\n'
    )
