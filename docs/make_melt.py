"""Draw the animated picture of README: hard top-3 melts as the temperature rises, and freezes again.

`python docs/make_melt.py` writes docs/img/melt.svg and, for dark grounds, docs/img/melt-dark.svg: SVG with its own
animation (SMIL), which browsers play inside an image. It also copies the explorer to docs/. The same bytes each time.
"""

import math
import shutil
from pathlib import Path

import torch

import khot
from khot.cli import EXPLORER

DOCS = Path(__file__).parent
X = torch.tensor([2.4, 1.4, 0.9, 0.3, -0.3, -0.9, -1.6, -2.3], dtype=torch.float64)
K, COLDEST, HOTTEST, FRAMES, SECONDS = 3, 0.01, 10.0, 40, 10
# The colours of the explorer: ink, words that matter less, the curve, grid, accent, the edge of a dot; and the dots.
LIGHT = ("#22303c", "#5a6874", "#9aa5ae", "#dcdfe1", "#c25400", "#ffffff")
LIGHT_DOTS = ("#481d6f", "#443a83", "#3a538b", "#2f6b8e", "#26818e", "#1f958b", "#25ab82", "#44bf70")
DARK = ("#e8ecef", "#a9b4bd", "#75818b", "#313b45", "#ff9d5c", "#12171d")
DARK_DOTS = ("#b794f6", "#9b9df5", "#7fa9ee", "#62b6dd", "#4cc3c4", "#4fcfa5", "#74d884", "#a5dd6a")
LEFT, RIGHT, TOP, BASE, REACH = 40, 690, 78, 290, 3.0
SLIDER = (430, 690, 34)  # from, to, height
STACK = (338, 30)  # top and height of the bar
PAUSE, MOVE = 0.08, 0.42  # shares of a cycle: cold, up, hot, down


def temperatures() -> list[float]:
    """Return T of every frame, slow at both ends."""
    shares = [i / (FRAMES - 1) for i in range(FRAMES)]
    return [COLDEST * (HOTTEST / COLDEST) ** (s * s * (3 - 2 * s)) for s in shares]


def animated(attribute: str, values: list[str]) -> str:
    """Return the animation of an attribute through all frames and back."""
    there = [PAUSE + MOVE * i / (FRAMES - 1) for i in range(FRAMES)]
    back = [2 * PAUSE + MOVE + MOVE * i / (FRAMES - 1) for i in range(FRAMES)]
    times = [0.0, *there, *back[:-1], 1.0]
    path = [values[0], *values, *values[::-1]]
    assert len(times) == len(path)
    shown = ";".join(f"{time:.4f}".rstrip("0").rstrip(".") for time in times)
    return (
        f'<animate attributeName="{attribute}" dur="{SECONDS}s" repeatCount="indefinite" keyTimes="{shown}" '
        f'values="{";".join(path)}"/>'
    )


def number(value: float) -> str:
    """Return a length in pixels."""
    return f"{value:.1f}".removesuffix(".0")


def across(score: float) -> float:
    """Return where a score stands."""
    return LEFT + (score + REACH) / (2 * REACH) * (RIGHT - LEFT)


def up(y: float) -> float:
    """Return where a height ends."""
    return BASE - y * (BASE - TOP)


def curve(temperature: float) -> str:
    """Return the path of F, with more points where it is steep."""
    tau = float(khot.threshold(X, K, temperature=temperature))
    even = [-REACH + 2 * REACH * i / 40 for i in range(41)]
    steep = [tau + temperature * z / 2 for z in range(-12, 13)]
    points = sorted(min(REACH, max(-REACH, score)) for score in even + steep)
    heights = [1 / (1 + math.exp(min(700.0, (tau - score) / temperature))) for score in points]
    return "M" + "L".join(f"{number(across(score))} {number(up(y))}" for score, y in zip(points, heights, strict=True))


def still(colors: tuple[str, ...]) -> str:
    """Return what does not move: axes, the slider and the words."""
    ink, soft, _, grid, _, _ = colors
    lines = [f'<path d="M{LEFT} {up(y):g}H{RIGHT}" stroke="{grid}"/>' for y in (0, 0.5, 1)]
    lines += [f'<text x="{LEFT - 32}" y="{up(y) + 4:g}" fill="{soft}">{y:g}</text>' for y in (0, 0.5, 1)]
    start, end, height = SLIDER
    lines.append(f'<path d="M{start} {height}H{end}" stroke="{grid}" stroke-width="6" stroke-linecap="round"/>')
    for i, label in enumerate(("0.01", "0.1", "1", "10")):
        x = start + (end - start) * i / 3
        lines.append(f'<text x="{x:g}" y="{height + 24}" text-anchor="middle" fill="{soft}">{label}</text>')
    top, thickness = STACK
    lines.append(f'<text x="{start - 16}" y="{height + 5}" text-anchor="end" fill="{ink}">temperature T</text>')
    lines.append(f'<text x="{LEFT}" y="30" font-size="18" font-weight="700" fill="{ink}">Melt a hard top-{K}</text>')
    lines.append(f'<text x="{LEFT}" y="52" fill="{ink}">The heights always add up to {K}.</text>')
    lines.append(f'<text x="{LEFT}" y="{top - 12}" fill="{soft}">the same heights, end to end</text>')
    for value in range(len(X) + 1):
        x = LEFT + (RIGHT - LEFT) * value / len(X)
        lines.append(f'<text x="{x:g}" y="{top + thickness + 20}" text-anchor="middle" fill="{soft}">{value}</text>')
    return "\n".join(lines)


def melt(colors: tuple[str, ...], dots: tuple[str, ...]) -> str:
    """Return the picture."""
    ink, _, faint, _, accent, edge = colors
    heat = temperatures()
    y = khot.sigmoid_topk(X.expand(FRAMES, -1), K, temperature=torch.tensor(heat, dtype=torch.float64))  # (frames, n)
    ends = y.cumsum(-1) - y
    top, thickness = STACK
    unit = (RIGHT - LEFT) / len(X)
    moving = [
        f'<path fill="none" stroke="{faint}" stroke-width="2.5" stroke-linejoin="round" d="{curve(heat[0])}">'
        f"{animated('d', [curve(t) for t in heat])}</path>"
    ]
    for i, color in enumerate(dots):
        x, heights = number(across(float(X[i]))), [number(up(float(v))) for v in y[:, i]]
        tall = [number(BASE - up(float(v))) for v in y[:, i]]
        starts = [number(LEFT + unit * float(v)) for v in ends[:, i]]
        wide = [number(unit * float(v)) for v in y[:, i]]
        moving += [
            f'<rect x="{float(x) - 3:g}" width="6" fill="{color}" opacity="0.8" y="{heights[0]}" height="{tall[0]}">'
            f"{animated('y', heights)}{animated('height', tall)}</rect>",
            f'<circle cx="{x}" r="9" fill="{color}" stroke="{edge}" stroke-width="2" cy="{heights[0]}">'
            f"{animated('cy', heights)}</circle>",
            f'<rect y="{top}" height="{thickness}" fill="{color}" stroke="{edge}" x="{starts[0]}" width="{wide[0]}">'
            f"{animated('x', starts)}{animated('width', wide)}</rect>",
        ]
    dashes = f'stroke="{ink}" stroke-width="1.5" stroke-dasharray="5 4"'
    moving.append(f'<path d="M{LEFT + unit * K:g} {top - 6}v{thickness + 12}" {dashes}/>')
    start, end, height = SLIDER
    knob = [number(start + (end - start) * math.log(t / COLDEST) / math.log(HOTTEST / COLDEST)) for t in heat]
    moving.append(
        f'<circle r="9" cy="{height}" fill="{accent}" stroke="{edge}" stroke-width="2" cx="{knob[0]}">'
        f"{animated('cx', knob)}</circle>"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="400" viewBox="0 0 720 400" role="img" '
        'font-family="system-ui, DejaVu Sans, sans-serif" font-size="14">\n'
        f"<title>As the temperature rises, a hard top-{K} melts into equal shares that still add up to {K}</title>\n"
        f"{still(colors)}\n" + "\n".join(moving) + "\n</svg>\n"
    )


if __name__ == "__main__":
    (DOCS / "img" / "melt.svg").write_text(melt(LIGHT, LIGHT_DOTS), encoding="utf-8")
    (DOCS / "img" / "melt-dark.svg").write_text(melt(DARK, DARK_DOTS), encoding="utf-8")
    shutil.copyfile(EXPLORER, DOCS / "explorer.html")
